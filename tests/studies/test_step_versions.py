"""Is a step's version raised when it makes another artifact of the same inputs?

An artifact in a store is found by its address, which holds the version of its step and not the code. So if the code of
an analysis changes what it says, and the version stays, a store that is there already shows the old numbers for ever.
Each digest below is of what a step makes of recordings that are always the same. If one fails, the artifact has
changed: raise `version` of that step in `studies/steps.py`, and put the new pair here.
"""

import json
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from conftest import random_trajectory

import loopscope as ls
from loopscope.analysis.gaps import Subject
from loopscope.analysis.model_analysis import ModelRecordings, analyse_model
from loopscope.analysis.targets import Target
from loopscope.analysis.transfer import fitted_rules, replayed_rules
from loopscope.certify.calibration import certify
from loopscope.certify.risk_target import RiskTarget
from loopscope.config import digest
from loopscope.studies.steps import Analyse, Certify, Fit, Step, Transfer
from loopscope.training.gate_fitting import GateSettings, fit_gate

SEEDS = {"validation": 1, "test": 2}
MODEL = {"weights_sha256": "a" * 64}


def recording(split: str, seed: int = 0, **changes: object) -> ls.Trajectory:
    """Of 400 examples whose answers become better with depth; from one place to another the same."""
    fields = {"split": split, "provenance": MODEL, "examples": [f"{split} {row}" for row in range(400)], **changes}
    return random_trajectory(10 * seed + SEEDS.get(split, 3), rows=400, **fields)


def rounded(value: Any) -> Any:
    """To four digits: another processor may add in another order."""
    if isinstance(value, float):
        return float(f"{value:.4g}") + 0.0
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, list | tuple) else value


def short(value: object) -> str:
    return digest(rounded(json.loads(msgspec.json.encode(value))))[:16]


def of(seed: int) -> ModelRecordings:
    return ModelRecordings(str(seed), recording("validation", seed), recording("test", seed))


def fitted() -> ls.FittedGate:
    return fit_gate(recording("train"), GateSettings(steps=20))


def analysis() -> object:
    return analyse_model(of(0), of(1), (0.5,))


def policy() -> object:
    """Its file, without the hash of it."""
    target = RiskTarget(max_drop=0.2, confidence=0.9, readout="margin")
    found = certify(recording("validation"), target)
    guarantee = msgspec.to_builtins(found.guarantee)
    return found.readout, found.threshold, guarantee


def gate() -> object:
    return {name: np.asarray(values, float).tolist() for name, values in fitted().tensors.items()}


def transfer() -> object:
    here, there = (Subject(each.validation, each.test) for each in (of(0), of(1)))
    rules = fitted_rules(here.validation, {"own": fitted()}, Target(0.5))
    return list(replayed_rules(rules, ("here", here.validation), ("there", there), Target(0.5)))


@pytest.mark.parametrize(
    ("step", "version", "make", "expected"),
    [
        (Analyse, 14, analysis, "f51281d9e65f86f8"),
        (Certify, 2, policy, "7e7b6185357c945a"),
        (Fit, 1, gate, "2a5b3464c44c74b4"),
        (Transfer, 1, transfer, "899bb5d16e48a21b"),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_what_a_step_makes_goes_with_its_version(
    step: type[Step], version: int, make: Callable[[], object], expected: str
) -> None:
    assert (step.version, short(make())) == (version, expected)
