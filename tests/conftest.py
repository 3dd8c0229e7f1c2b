"""Fixtures that several tests share: random trajectories, one of a benchmark too, and a tiny trained run."""

# ruff: noqa: E402

import json
import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")  # NumPy and PyTorch read it when they are imported, here and in what tests start

from argparse import ArgumentParser, _SubParsersAction
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import settings

import loopscope as ls
from loopscope.cli import make_parser
from loopscope.questions import BENCHMARKS
from loopscope.training.language_run import LanguageRun
from loopscope.training.settings import PretrainSettings, RunSettings, read_pretrain_settings, read_settings
from loopscope.training.task_run import train
from loopscope.training.training_loop import train_run

GOLDEN = Path(__file__).parent / "golden"
os.environ["COLUMNS"] = "110"  # tables are as wide as without a terminal, also under pytest-xdist, which says 80
settings.register_profile("any machine", deadline=None)  # a busy one takes its time
settings.load_profile("any machine")

TINY = [
    *("task.modulus=3", "task.max_operations=2", "task.train_examples=600", "task.validation_examples=120"),
    *("task.test_examples=150", "model.width=16", "model.loops=3", "model.block_size=11", "training.steps=12"),
    *("training.batch_size=16", "training.log_every=3", "training.checkpoint_every=4", "training.validate_every=6"),
    "training.validation_sample=60",
]
GATED = ["objective.name=learned_gate", "model.gate=linear"]


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


def forget_readout(name: str) -> None:
    ls.READOUTS.pop(name, None)


@contextmanager
def forgetting_readouts() -> Iterator[None]:
    """What is registered as a readout meanwhile is not known afterwards."""
    with patch.dict(ls.READOUTS):
        yield


@pytest.fixture
def forgotten() -> Iterator[None]:
    """What a test registers as a readout is not known after it."""
    with forgetting_readouts():
        yield


@cache
def verbs() -> dict[str, ArgumentParser]:
    """The parser of every verb, by the words that lead to it."""
    found, left = {}, {"": make_parser()}
    while left:
        name, parser = left.popitem()
        below = [action.choices for action in parser._actions if isinstance(action, _SubParsersAction)]
        for word, each in below[0].items() if below else ():
            left[f"{name} {word}".strip()] = each
        if not below:
            found[name] = parser
    return found


def tiny_settings(*overrides: str) -> RunSettings:
    return read_settings("demo", [*TINY, *overrides])


def tiny_study(product: str, *settings: str) -> str:
    """The text of a study of two runs and a reference, with gates, a guarantee, transferred rules and one product."""
    return f"""
title = "Tiny"
targets = [0.2, 0.9]
products = ["{product}"]
transfer = ["mano-geometric0.3-fixed-s0", "mano-geometric0.3-linear-b0.1-s0"]

[[parts]]
settings = "demo"
set = {json.dumps(settings)}
reference = {{ gate = "none", prior = 0.3 }}
gates = {{ examples = 40, steps = 3, kind = ["linear"], objective = ["utility"] }}
guarantees = [{{ max_drop = 0.9, confidence = 0.5, readout = "margin" }}]

[[parts.runs]]
prior = [0.3]
seed = [0]
fit = true

[[parts.runs]]
gate = ["linear"]
prior = [0.3]
beta = [0.1]
"""


def random_trajectory(
    seed: int = 0, rows: int = 200, loops: int = 4, classes: int = 5, **changes: object
) -> ls.Trajectory:
    """A trajectory whose answers become better with depth."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, rows)
    logits = rng.normal(size=(rows, loops, classes))
    logits[np.arange(rows), :, labels] += np.linspace(0, 3, loops)
    fields: dict[str, object] = {
        "logits": logits,
        "labels": labels,
        "difficulty": rng.integers(1, 4, rows),
        "hidden": rng.normal(size=(rows, loops, 6)),
        "gate_logits": rng.normal(size=(rows, loops)),
    }
    return ls.Trajectory(**{**fields, **changes})  # type: ignore[arg-type]


def outcome_of(right: list[bool], loop: int) -> str:
    """What an exit at this loop is, in plain words, for one example."""
    if not any(right):
        return "never right"
    if right[loop - 1]:
        return "could have exited earlier" if any(right[: loop - 1]) else "just in time"
    return "exited too early" if any(right[loop:]) else "exited too late"


def answers(
    benchmark: str, split: str, seed: int = 0, rows: int = 300, skill: float = 1.0, subjects: int = 1, **changes: object
) -> ls.Trajectory:
    """A recording of a benchmark as a looped checkpoint of four loops could make it: answers settle with depth."""
    rng = np.random.default_rng([seed, len(benchmark), len(split)])
    loops, choices, width = 4, 5 if benchmark == "commonsense_qa" else 4, 8
    metric = BENCHMARKS[benchmark].metric
    labels, norms = rng.integers(0, choices, rows), rng.integers(5, 60, (rows, choices))
    ease = rng.normal(skill, 1.5, (rows, 1, 1)) * np.array([0.2, 0.75, 1.0, 1.02])[:, None]
    unsettled = np.array([0.9, 0.5, 0.2, 0.1])[:, None]
    noise = rng.normal(size=(rows, 1, choices)) + 0.6 * rng.normal(size=(rows, loops, choices)) * unsettled
    scores = noise + ease * (np.arange(choices) == labels[:, None])[:, None, :]
    logits = scores - 4.0 if metric == "acc_norm" else 3 * scores - 60.0
    settled = np.cumsum(rng.normal(size=(rows, loops, width)) * np.array([1, 0.5, 0.25, 0.12])[:, None], axis=1)
    top = np.sort(scores, axis=-1)
    gate_logits = top[..., -1] - top[..., -2] - 1.5 + rng.normal(0, 0.5, (rows, loops))
    keys = [f"{benchmark}/s{row % subjects}/{row}" if subjects > 1 else f"{benchmark}/{row}" for row in range(rows)]
    fields: dict[str, object] = {
        "logits": logits,
        "labels": labels,
        "norms": norms,
        "hidden": settled,
        "gate_logits": gate_logits,
        "split": split,
        "examples": [f"{key}\nQuestion: {key} of {split}?" for key in keys],
        "provenance": {"benchmark": benchmark, "metric": metric, "weights_sha256": f"{seed}", "model": "Ouro-1.4B"},
    }
    return ls.Trajectory(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def gated_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with a linear gate."""
    folder = tmp_path_factory.mktemp("runs") / "gated"
    train(tiny_settings(*GATED), folder, torch.device("cpu"))
    return folder


TINY_OURO = """
vocab_size = 300
context = 16

[model]
hidden_size = 16
intermediate_size = 24
num_hidden_layers = 2
num_attention_heads = 2
total_ut_steps = 3
max_position_embeddings = 64

[training]
steps = 12
batch_size = 4
warmup_steps = 3
learning_rate = 1e-2
muon_learning_rate = 0.02
log_every = 3
checkpoint_every = 4
validate_every = 6
validation_sample = 10
"""


def tiny_text(folder: Path) -> tuple[Path, Path]:
    """Files of documents to train on and to validate with; they are of many lengths."""
    documents = [f"{a} and {b} make {a + b}. " * (1 + b % 4) for a in range(30) for b in range(10)]
    paths = folder / "train.txt", folder / "validation.txt"
    for path, part in zip(paths, (documents[::2], documents[1::2]), strict=True):
        path.write_text("<|endoftext|>".join(part))
    return paths


def tiny_ouro_settings(folder: Path, *overrides: str) -> PretrainSettings:
    (folder / "tiny.toml").write_text(TINY_OURO)
    return read_pretrain_settings(folder / "tiny.toml", overrides)


def tiny_language_run(folder: Path, *overrides: str) -> LanguageRun:
    train, validation = tiny_text(folder)
    return LanguageRun(tiny_ouro_settings(folder, *overrides), (train,), (validation,), folder / "run")


@pytest.fixture(scope="session")
def tiny_ouro(tmp_path_factory: pytest.TempPathFactory) -> LanguageRun:
    """A small language model, trained for some steps."""
    run = tiny_language_run(tmp_path_factory.mktemp("language"))
    train_run(run, torch.device("cpu"))
    return run


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """A headless Chromium; scripts/browser installs one."""
    from chromium import find, started

    if (path := find()) is None:
        pytest.skip("there is no Chromium; `make browser` installs one")
    with started(path) as browser:
        yield browser
