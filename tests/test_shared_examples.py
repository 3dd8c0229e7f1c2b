"""Examples that two recordings share are found by their content; what chance shares is not taken for that."""

from dataclasses import replace

import numpy as np
import pytest
from conftest import random_trajectory

import loopscope as ls
from loopscope.shared_examples import num_shared, sketch_of


def shared(first: ls.Trajectory, second: ls.Trajectory, size: int | None = 1024) -> int:
    return num_shared(sketch_of(first, size), sketch_of(second, size))


def drawn(rng: np.random.Generator, rows: int, inputs: int) -> ls.Trajectory:
    """Draws of a few inputs, each with its text."""
    return random_trajectory(rows=rows, examples=[str(each) for each in rng.integers(0, inputs, rows)])


def bare(recording: ls.Trajectory) -> ls.Trajectory:
    """Its answers and signals, without logits."""
    return ls.Trajectory(
        predictions=recording.predicted, labels=recording.labels, signals={"margin": ls.signal("margin", recording)}
    )


FORMS = {
    "logits": lambda recording: recording,
    "signals": bare,
    "texts": lambda recording: replace(recording, examples=[f"{row:.6}" for row in recording.logits[:, 0, 0]]),
    "sequences": lambda recording: replace(recording, sequences=np.arange(recording.num_examples) // 4),
    "rounded": lambda recording: replace(recording, logits=recording.logits.astype(np.float64) + 1e-5),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [None, 1024, 100])
def test_shared_examples_are_found(form: str, size: int | None) -> None:
    whole, other = (FORMS[form](random_trajectory(seed, rows=2_000)) for seed in (0, 1))
    mine = random_trajectory(0, rows=2_000) if form == "rounded" else whole
    part = mine.take(np.arange(400, 2_000) if form == "sequences" else np.random.default_rng(0).permutation(2_000)[:1_500])
    assert shared(part, whole, size) > 0.5 * part.num_units
    assert shared(other, whole, size) == 0


@pytest.mark.parametrize(("rows", "others", "inputs"), [(1_000, 1_000, 100), (500, 4_000, 2_000), (300, 300, 300)])
def test_draws_from_few_inputs_share_them_by_chance(rows: int, others: int, inputs: int) -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        assert shared(drawn(rng, rows, inputs), drawn(rng, others, inputs)) == 0
    copied = drawn(rng, others, inputs)
    assert shared(copied.take(np.arange(1, others)), copied) == pytest.approx(others, rel=0.02)
