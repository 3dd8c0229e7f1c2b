"""What is given from Python in the wrong type or with a wrong value: one sentence each, or the right conversion."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import GOLDEN, random_trajectory

import loopscope as ls
from loopscope.analysis import as_targets
from loopscope.engine import Sampling
from loopscope.exits.calibration import certify
from loopscope.models import LoopedModel
from loopscope.models.tokenizer import load_tokenizer
from loopscope.recording import Keep
from loopscope.training import train
from loopscope.training.settings import read_settings

ROWS, LOOPS = 40, 4
NAN, INF = float("nan"), float("inf")
VALIDATION, TEST = (random_trajectory(seed, ROWS, LOOPS) for seed in (0, 1))
FRONTIER = ls.sweep("margin", VALIDATION, TEST)
RAGGED = [[1.0, 2.0], [3.0]]
NUMBERS: dict[str, object] = {"text": "0.5", "None": None, "NaN": NAN, "True": True, "list": [0.5], "complex": 0.5j}
COUNTS: dict[str, object] = {"0": 0, "-1": -1, "True": True, "2.5": 2.5, "2.0": 2.0, "text": "2", "NaN": NAN}
NOT_A_RECORDING: dict[str, object] = {"None": None, "path": "recordings/test", "array": np.zeros((2, 3)), "number": 3}


def made(**changes: object) -> ls.Trajectory:
    return random_trajectory(0, ROWS, LOOPS, **changes)


def bare(predictions: object, **changes: Any) -> ls.Trajectory:
    return ls.Trajectory(predictions=predictions, **changes)  # type: ignore[arg-type]


@cache
def model() -> LoopedModel:
    return ls.load_model(GOLDEN / "ouro-tiny")


def asked(*given: Any, **options: Any) -> list[ls.Answer]:
    return list(ls.run(model(), ls.ExitPolicy("fixed", 1), *given, **options))


def written(prompt: Any = (1, 2), forced: Any = None, **options: Any) -> Any:
    return ls.generate(model(), [ls.Prompt(0, prompt, forced)], **{"max_new_tokens": 1, **options})


POLICY = ls.ExitPolicy("fixed", 1)
GATE = ls.FittedGate(np.zeros(6), np.zeros(()))
TOKENS = np.ones((2, 3), int)
Call = Callable[[], object]


def each(values: dict[str, object], name: str, call: Callable[[Any], object]) -> dict[str, Call]:
    return {f"{name}: {what}": lambda value=value: call(value) for what, value in values.items()}  # type: ignore[misc]


WRONG: dict[str, Call] = {
    # arrays of a trajectory
    **{
        f"{name}: {what}": lambda name=name, value=value: made(**{name: value})  # type: ignore[misc]
        for name in ("logits", "labels", "difficulty", "hidden", "gate_logits", "sequences", "norms", "seen")
        for what, value in {
            "ragged": RAGGED,
            "objects": np.array([None] * ROWS, dtype=object),
            "texts": ["a"] * ROWS,
            "complex": np.ones(ROWS, complex),
            "0-d": np.array(1),
            "text": "abc",
            "mapping": {"a": 1},
            "too few": np.ones(3, int),
        }.items()
    },
    "labels: floats": lambda: made(labels=np.zeros(ROWS)),
    "labels: booleans": lambda: made(labels=np.zeros(ROWS, bool)),
    "labels: negative, without logits": lambda: bare(np.zeros((2, 3), int), labels=[0, -1]),
    "labels: beyond int64": lambda: made(labels=np.full(ROWS, 2**64 - 1, np.uint64)),
    "seen: 2": lambda: made(seen=np.full(ROWS, 2)),
    "seen: -1": lambda: made(seen=np.full(ROWS, -1)),
    "seen: 0.5": lambda: made(seen=np.full(ROWS, 0.5)),
    "seen: NaN": lambda: made(seen=np.full(ROWS, NAN)),
    "sequences: floats": lambda: made(sequences=np.zeros(ROWS)),
    "difficulty: NaN": lambda: made(difficulty=np.full(ROWS, NAN)),
    "logits: booleans": lambda: made(logits=np.zeros((ROWS, LOOPS, 5), bool)),
    "hidden: booleans": lambda: made(hidden=np.zeros((ROWS, LOOPS, 5), bool)),
    "predictions: floats": lambda: bare(np.zeros((2, 3))),
    "predictions: NaN": lambda: bare(np.full((2, 3), NAN)),
    "predictions: negative": lambda: bare(np.full((2, 3), -1)),
    "predictions: booleans": lambda: bare(np.zeros((2, 3), bool)),
    "predictions: ragged": lambda: bare(RAGGED),
    "predictions: 0-d": lambda: bare(np.array(1)),
    "predictions: 3-d": lambda: bare(np.zeros((2, 3, 4), int)),
    "label_log_probs: above 0": lambda: bare(np.zeros((2, 3), int), label_log_probs=np.ones((2, 3))),
    "norms: 0": lambda: made(norms=np.zeros((ROWS, 5))),
    "norms: negative": lambda: made(norms=np.full((ROWS, 5), -1)),
    "norms: NaN": lambda: made(norms=np.full((ROWS, 5), NAN)),
    "signals: a list": lambda: made(signals=[np.zeros((ROWS, LOOPS))]),
    "signals: a number as name": lambda: made(signals={3: np.zeros((ROWS, LOOPS))}),
    "signals: booleans": lambda: made(signals={"mine": np.zeros((ROWS, LOOPS), bool)}),
    "signals: ragged": lambda: made(signals={"mine": RAGGED}),
    "examples: one text": lambda: made(examples="x" * ROWS),
    "examples: numbers": lambda: made(examples=list(range(ROWS))),
    "examples: bytes": lambda: made(examples=[b"x"] * ROWS),
    "examples: a number": lambda: made(examples=3),
    "split": lambda: made(split=3),
    "provenance: a list": lambda: made(provenance=["here"]),
    "provenance: a text": lambda: made(provenance="here"),
    "provenance: an object": lambda: made(provenance={"a": object()}),
    "provenance: numbers as names": lambda: made(provenance={1: 2}),
    "provenance: a list as metric": lambda: made(provenance={"metric": ["acc"]}),
    "provenance: a list of definitions": lambda: made(provenance={"signal_definitions": ["margin"]}),
    "take: floats": lambda: VALIDATION.take(np.array([0.0, 1.0])),
    "take: out of range": lambda: VALIDATION.take(np.array([ROWS])),
    "take: negative": lambda: VALIDATION.take(np.array([-1])),
    "take: another mask": lambda: VALIDATION.take(np.ones(ROWS + 1, bool)),
    "take: a mask of 0 and 1": lambda: VALIDATION.take(np.arange(ROWS) % 2),
    "take: a number": lambda: VALIDATION.take(np.array(3)),
    "take: texts": lambda: VALIDATION.take(np.array(["a"])),
    "take: nothing": lambda: VALIDATION.take(np.array([])),
    "load: a number": lambda: ls.Trajectory.load(3),  # type: ignore[arg-type]
    # policies and readouts
    **each(NUMBERS, "threshold", lambda value: ls.ExitPolicy("margin", value)),
    "threshold: too large": lambda: ls.ExitPolicy("margin", 10**400),
    "policy: a number as readout": lambda: ls.ExitPolicy(3, 0.5),  # type: ignore[arg-type]
    "policy: None as readout": lambda: ls.ExitPolicy(None, 0.5),  # type: ignore[arg-type]
    "policy: a list as readout": lambda: ls.ExitPolicy(["margin"], 0.5),  # type: ignore[arg-type]
    **each({**COUNTS, "2.0": INF}, "depth", lambda value: ls.ExitPolicy("fixed", value)),
    "policy: a path as gate": lambda: ls.ExitPolicy("gate:mine", 0.5, "gates/mine"),  # type: ignore[arg-type]
    "policy: a number as model": lambda: ls.ExitPolicy("margin", 0.5, model=3),  # type: ignore[arg-type]
    "policy: a text as guarantee": lambda: ls.ExitPolicy("margin", 0.5, guarantee="sure"),  # type: ignore[arg-type]
    "policy: a text as scope": lambda: ls.ExitPolicy("margin", 0.5, scope="tokens"),  # type: ignore[arg-type]
    "policy: load a number": lambda: ls.ExitPolicy.load(3),  # type: ignore[arg-type]
    **each(NOT_A_RECORDING, "exit_loops", lambda value: POLICY.exit_loops(value)),
    **each(NOT_A_RECORDING, "stops", lambda value: POLICY.stops(value)),
    **each(NOT_A_RECORDING, "signal", lambda value: ls.signal("margin", value)),
    "signal: a number": lambda: ls.signal(3, VALIDATION),  # type: ignore[arg-type]
    "readout: a number": lambda: ls.Readout(3, "above"),  # type: ignore[arg-type]
    "readout: no function": lambda: ls.Readout("mine", "above", "logits", 3),  # type: ignore[arg-type]
    "readout: registered": lambda: ls.register_readout("margin"),  # type: ignore[arg-type]
    # sweeps, promises, diagnoses
    **each(NOT_A_RECORDING, "sweep validation", lambda value: ls.sweep("margin", value, TEST)),
    **each(NOT_A_RECORDING, "sweep test", lambda value: ls.sweep("margin", VALIDATION, value)),
    "sweep: a number": lambda: ls.sweep(3, VALIDATION, TEST),  # type: ignore[arg-type]
    "sweep: grid": lambda: ls.sweep("margin", VALIDATION, TEST, grid=3),  # type: ignore[arg-type]
    **each({"95": 95, "-1": -1, "inf": INF}, "depth_at", lambda value: FRONTIER.depth_at(value)),
    **each({"95": 95, "-1": -1, "inf": INF}, "threshold_at", lambda value: FRONTIER.threshold_at(value)),
    **each(NUMBERS, "depth_at", lambda value: FRONTIER.depth_at(value)),
    **each(NOT_A_RECORDING, "calibrate", lambda value: ls.calibrate(value, 0.3)),
    **each(NUMBERS, "max_drop", lambda value: ls.calibrate(VALIDATION, value)),
    **each(NUMBERS, "confidence", lambda value: ls.calibrate(VALIDATION, 0.3, value)),
    **each({**COUNTS, "0": None}, "seed", lambda value: ls.conformal_risk_control(VALIDATION, 0.3, seed=value)),
    "calibrate: gates": lambda: ls.calibrate(VALIDATION, 0.3, gates=[GATE]),  # type: ignore[arg-type]
    "calibrate: a gate": lambda: ls.calibrate(VALIDATION, 0.3, gates={"mine": "gates/mine"}),  # type: ignore[dict-item]
    "calibrate: grid": lambda: ls.calibrate(VALIDATION, 0.3, grid="test"),  # type: ignore[arg-type]
    "calibrate: loss": lambda: ls.calibrate(VALIDATION, 0.3, loss=["gap"]),  # type: ignore[arg-type]
    "calibrate: readout": lambda: ls.calibrate(VALIDATION, 0.3, readout=3),  # type: ignore[arg-type]
    "calibrate: a text as flag": lambda: ls.calibrate(VALIDATION, 0.3, unseen="no"),  # type: ignore[arg-type]
    "certify: a number": lambda: certify(VALIDATION, 0.01),  # type: ignore[arg-type]
    **each(NOT_A_RECORDING, "diagnose", lambda value: ls.diagnose(value, TEST)),
    **each(NOT_A_RECORDING, "diagnose test", lambda value: ls.diagnose(VALIDATION, value)),
    "diagnose: reference": lambda: ls.diagnose(VALIDATION, TEST, VALIDATION),  # type: ignore[arg-type]
    "diagnose: target": lambda: ls.diagnose(VALIDATION, TEST, target="high"),  # type: ignore[arg-type]
    "diagnose: True": lambda: ls.diagnose(VALIDATION, TEST, target=True),
    **each(NOT_A_RECORDING, "compare", lambda value: ls.compare(value, TEST, "margin", "entropy")),
    "compare: a number": lambda: ls.compare(VALIDATION, TEST, 3, "entropy"),  # type: ignore[arg-type]
    **each(NUMBERS, "target", lambda value: ls.Target(value)),
    "target: above 1": lambda: ls.Target(1.5),
    **each(
        {key: NUMBERS[key] for key in ("text", "NaN", "True", "list")}, "below", lambda value: ls.Target(None, value)
    ),
    # gates
    "gate: NaN": lambda: ls.FittedGate(np.full(6, NAN), np.zeros(())),
    "gate: 2-d weight": lambda: ls.FittedGate(np.zeros((1, 6)), np.zeros(())),
    "gate: 1-d bias": lambda: ls.FittedGate(np.zeros(6), np.zeros(6)),
    "gate: half a layer": lambda: ls.FittedGate(np.zeros(6), np.zeros(()), np.zeros((6, 4))),
    "gate: another width": lambda: ls.FittedGate(np.zeros(6), np.zeros(()), np.zeros((5, 4)), np.zeros(5)),
    "gate: texts": lambda: ls.FittedGate(["a"], 0.0),  # type: ignore[arg-type]
    "gate: provenance": lambda: ls.FittedGate(np.zeros(6), np.zeros(()), provenance="here"),  # type: ignore[arg-type]
    "gate: load": lambda: ls.FittedGate.load(3),  # type: ignore[arg-type]
    "attach: a list": lambda: ls.attach(VALIDATION, [GATE]),  # type: ignore[arg-type]
    "attach: a path": lambda: ls.attach(VALIDATION, {"mine": "gates/mine"}),  # type: ignore[dict-item]
    "attach: no recording": lambda: ls.attach("here", {"mine": GATE}),  # type: ignore[arg-type]
    "attach: a number as name": lambda: ls.attach(VALIDATION, {3: GATE}),  # type: ignore[dict-item]
    **each(NOT_A_RECORDING, "fit_gate", lambda value: ls.fit_gate(value)),
    "fit_gate: settings": lambda: ls.fit_gate(VALIDATION, {"steps": 3}),  # type: ignore[arg-type]
    **each({**COUNTS, "2.0": INF}, "fit_gate steps", lambda value: ls.fit_gate(VALIDATION, steps=value)),
    # requests and prompts
    "request: no rows": lambda: ls.Request(0, 3),  # type: ignore[arg-type]
    "request: a flat row": lambda: ls.Request(0, [1, 2, 3]),  # type: ignore[list-item]
    "request: floats": lambda: ls.Request(0, [np.array([1.0])]),
    "request: ragged": lambda: ls.Request(0, [RAGGED]),  # type: ignore[list-item]
    "request: texts": lambda: ls.Request(0, "ab"),  # type: ignore[arg-type]
    "request: scored floats": lambda: ls.Request(0, [[1, 2], [1, 3]], [1.0, 1.0]),  # type: ignore[list-item]
    "request: scored text": lambda: ls.Request(0, [[1, 2], [1, 3]], "11"),  # type: ignore[list-item, arg-type]
    "request: scored bytes": lambda: ls.Request(0, [[1, 2], [1, 3]], b"\1\1"),
    "request: norms text": lambda: ls.Request(0, [[1, 2], [1, 3]], [1, 1], "ab"),  # type: ignore[list-item, arg-type]
    "request: norms NaN": lambda: ls.choices(0, np.array([1]), [np.array([2]), np.array([3])], [NAN, 1.0]),
    "request: norms infinite": lambda: ls.choices(0, np.array([1]), [np.array([2]), np.array([3])], [INF, 1.0]),
    "request: shared": lambda: ls.Request(0, [[1, 2, 3]], shared=1.5),  # type: ignore[list-item, arg-type]
    "request: whole": lambda: ls.Request(0, [[1, 2, 3]], whole="no"),  # type: ignore[list-item, arg-type]
    "request: score": lambda: ls.Request(0, [[1, 2, 3]], score=3),  # type: ignore[list-item, arg-type]
    "choices: context": lambda: ls.choices(0, 3, [[1]]),  # type: ignore[arg-type, list-item]
    "choices: continuations": lambda: ls.choices(0, [1], 3),  # type: ignore[arg-type]
    "choices: empty": lambda: ls.choices(0, [1], [[]]),  # type: ignore[arg-type, list-item]
    "run: no request": lambda: asked([[1, 2]]),
    "run: no list": lambda: asked(3),
    "run: no model": lambda: list(ls.run("ouro", POLICY, [])),  # type: ignore[arg-type]
    "run: no policy": lambda: list(ls.run(model(), "margin", [])),  # type: ignore[arg-type]
    **each(COUNTS, "batch_size", lambda value: asked([], batch_size=value)),
    **each(COUNTS, "num_loops", lambda value: asked([], num_loops=value)),
    **each(COUNTS, "batch_tokens", lambda value: asked([], batch_tokens=value)),
    "generate: no prompt": lambda: ls.generate(model(), ["Hello"]),  # type: ignore[list-item]
    "generate: no list": lambda: ls.generate(model(), 3),  # type: ignore[arg-type]
    "generate: ragged": lambda: written(RAGGED),
    "generate: floats": lambda: written(np.array([1.0])),
    "generate: text": lambda: written("Hello"),
    "generate: forced floats": lambda: written(forced=[1.5]),
    "generate: stop": lambda: written(stop=3),
    "generate: stop 0-d": lambda: written(stop=np.array(3)),
    "generate: stop texts": lambda: written(stop="ab"),
    "generate: stop bytes": lambda: written(stop=b"\3"),
    "generate: cache": lambda: written(cache=3),
    "generate: sampling": lambda: written(sampling={"temperature": 1.0}),
    "generate: policy": lambda: written(policy="margin"),
    **each(COUNTS, "max_new_tokens", lambda value: written(max_new_tokens=value)),
    **each({**NUMBERS, "-1": -1.0, "infinite": INF}, "temperature", lambda value: Sampling(temperature=value)),
    **each({**COUNTS, "0": None}, "top_k", lambda value: Sampling(top_k=value)),
    **each(NUMBERS, "top_p", lambda value: Sampling(top_p=value)),
    # models, recordings, training, reports
    "record_model: ragged": lambda: ls.record_model(model(), [[1, 2], [3]]),
    "record_model: floats": lambda: ls.record_model(model(), np.ones((2, 3))),
    "record_model: 0-d": lambda: ls.record_model(model(), 3),
    "record_model: labels": lambda: ls.record_model(model(), TOKENS, labels=[-1, 0], keep=Keep(logits=False)),
    "record_model: large labels": lambda: ls.record_model(model(), TOKENS, labels=[10**6, 0], keep=Keep(logits=False)),
    "record_model: lengths": lambda: ls.record_model(model(), TOKENS, [1.5, 2]),
    "record_model: split": lambda: ls.record_model(model(), TOKENS, split=3),  # type: ignore[arg-type]
    "record_model: keep": lambda: ls.record_model(model(), TOKENS, keep=True),  # type: ignore[arg-type]
    "record_model: no model": lambda: ls.record_model("ouro", TOKENS),  # type: ignore[arg-type]
    "record_benchmark: a number": lambda: ls.record_benchmark("x", 3, "test", Path("out")),  # type: ignore[arg-type]
    "record_benchmark: out": lambda: ls.record_benchmark("x", "arc_easy", "test", 3),  # type: ignore[arg-type]
    **each(COUNTS, "limit", lambda value: ls.record_benchmark("x", "arc_easy", "test", Path("out"), limit=value)),
    "load_model: a number": lambda: ls.load_model(3),  # type: ignore[arg-type]
    "load_model: dtype": lambda: ls.load_model(GOLDEN / "ouro-tiny", dtype=["float32"]),  # type: ignore[arg-type]
    "load_model: device": lambda: ls.load_model(GOLDEN / "ouro-tiny", device=3.5),  # type: ignore[arg-type]
    "check_model: a text": lambda: ls.check_model("ouro"),  # type: ignore[arg-type]
    "check_model: rows": lambda: ls.check_model(model(), 3),  # type: ignore[arg-type]
    "check_model: ragged": lambda: ls.check_model(model(), [RAGGED]),  # type: ignore[list-item]
    "train: settings": lambda: ls.train(3, "run"),  # type: ignore[arg-type]
    "train: folder": lambda: ls.train("demo", 3),  # type: ignore[arg-type]
    "train: overrides": lambda: ls.train("demo", "run", overrides=[3]),  # type: ignore[list-item]
    "train: options": lambda: ls.train("demo", "run", objective="a:b", options=3),  # type: ignore[arg-type]
    "train: one wrong override": lambda: ls.train("demo", "run", overrides="training.seed"),
    "report: a list": lambda: ls.report([VALIDATION], "out"),  # type: ignore[operator]
    "report: one recording": lambda: ls.report({"mine": VALIDATION}, "out"),  # type: ignore[operator]
    "report: a number as name": lambda: ls.report({3: (VALIDATION, TEST)}, "out"),  # type: ignore[operator]
    "report: targets": lambda: ls.report({"a": (VALIDATION, TEST)}, "out", targets="high"),  # type: ignore[operator]
    "targets: 0-d": lambda: as_targets(np.array(3)),  # type: ignore[arg-type]
    "targets: several of another kind": lambda: as_targets(np.array([0.5, 2.0])),  # type: ignore[arg-type]
    "report: policies": lambda: ls.report({"a": (VALIDATION, TEST)}, "out", policies={"a": 3}),  # type: ignore[operator]
    "report: out": lambda: ls.report({"a": (VALIDATION, TEST)}, 3),  # type: ignore[operator]
    # names that the system cannot have
    **{
        f"a name that is too long: {what}": lambda call=call, name=name: call(name)  # type: ignore[misc]
        for name in ("A" * 300, "a/" * 3_000 + "a")
        for what, call in {
            f"{len(name)}, recording": ls.Trajectory.load,
            f"{len(name)}, saved recording": VALIDATION.save,
            f"{len(name)}, gate": ls.FittedGate.load,
            f"{len(name)}, policy": ls.ExitPolicy.load,
            f"{len(name)}, saved policy": ls.ExitPolicy("margin", 0.5).save,
            f"{len(name)}, model": ls.load_model,
            f"{len(name)}, tokenizer": load_tokenizer,
            f"{len(name)}, run": lambda name: train("demo", name),
            f"{len(name)}, report": lambda name: ls.report({"a": (VALIDATION, TEST)}, name),  # type: ignore[operator]
        }.items()
    },
}


@pytest.mark.parametrize("name", WRONG)
def test_one_sentence_for_what_is_wrong(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ls.UserError) as found:
        WRONG[name]()
    text = str(found.value)
    assert text.endswith(".")
    assert "\n" not in text
    assert len(text) < 500
    assert not list(tmp_path.iterdir())


def test_seen_as_0_and_1_is_what_it_says() -> None:
    seen = np.arange(ROWS) % 3 == 0
    expected = made(seen=seen).unseen().logits
    for given in (seen, seen.astype(int), seen.astype(np.uint8), seen.astype(float), seen.tolist(), [*map(int, seen)]):
        trajectory = made(seen=given)
        assert np.array_equal(trajectory.unseen().logits, expected)
        assert trajectory.sha256 == made(seen=seen).sha256


def test_what_can_be_converted_exactly_is() -> None:
    hard = np.arange(ROWS) % 2 == 0
    assert made(difficulty=hard).difficulty.dtype == np.int64
    assert made(labels=np.zeros(ROWS, np.uint8)).labels.dtype == np.int64
    assert made(examples=np.array(["a"] * ROWS)).examples == ["a"] * ROWS
    assert VALIDATION.take(hard).num_examples == VALIDATION.take(np.flatnonzero(hard)).num_examples == ROWS // 2
    assert VALIDATION.take([3, 3]).num_examples == 2  # type: ignore[arg-type]
    for threshold in (1, 1.0, np.float32(1), np.int64(1)):
        assert ls.ExitPolicy("fixed", threshold).exit_loops(VALIDATION).tolist() == [1] * ROWS
    assert ls.Request(0, np.array([[1, 2]], np.uint8)).tokens.dtype == np.int64
    assert ls.Target(np.float64(0.9)).key == "0.9"
    assert [each.key for each in as_targets(np.array([0.5, 0.9]))] == ["0.5", "0.9"]  # type: ignore[arg-type]
    assert read_settings("demo").training.seed == read_settings("demo", ["training.seed=0"]).training.seed
    assert replace(GATE, weight=[0.0] * 6).halt_logits(np.zeros((2, 6))).tolist() == [0.0, 0.0]  # type: ignore[arg-type]
