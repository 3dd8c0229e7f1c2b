"""Fixtures that several tests share: a random trajectory, and a tiny trained run."""

from pathlib import Path

import numpy as np
import pytest
import torch

import loopscope as ls
from loopscope.training import RunSettings, read_settings, train

GOLDEN = Path(__file__).parent / "golden"

TINY = [
    "task.modulus=3",
    "task.max_operations=2",
    "task.train_examples=600",
    "task.validation_examples=120",
    "task.test_examples=150",
    "model.width=16",
    "model.loops=3",
    "model.block_size=11",
    "training.steps=12",
    "training.batch_size=16",
    "training.log_every=3",
    "training.checkpoint_every=4",
    "training.validate_every=6",
    "training.validation_sample=60",
]
GATED = ["objective.name=learned_gate", "model.gate=linear"]


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


def tiny_settings(*overrides: str) -> RunSettings:
    return read_settings("demo", [*TINY, *overrides])


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


@pytest.fixture(scope="session")
def gated_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with a linear gate."""
    folder = tmp_path_factory.mktemp("runs") / "gated"
    train(tiny_settings(*GATED), folder, torch.device("cpu"))
    return folder
