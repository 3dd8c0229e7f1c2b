"""Examples that two recordings share: found however they are disguised, and never in draws from a small space."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loopscope as ls
from loopscope.analysis.held_out import hold_out
from loopscope.errors import UserError
from loopscope.row_overlap import RowKeys, text_keys
from loopscope.splits import check_calibration
from loopscope.tasks import Mano, Parity, Task
from tests.conftest import random_trajectory

ROWS = 400
OVERLAP = r"About [\d,]+ of the [\d,]+ examples of the evaluation recording have the same"


def recorded(seed: int = 0) -> ls.Trajectory:
    return _with(random_trajectory(seed, ROWS, split="validation"))


def _with(trajectory: ls.Trajectory, **changed: Any) -> ls.Trajectory:
    kept = {"logits": trajectory.logits, "labels": trajectory.labels, "split": trajectory.split}
    return ls.Trajectory(**{**kept, **changed})


def without_logits(trajectory: ls.Trajectory) -> ls.Trajectory:
    log_probs = -trajectory.cross_entropy
    return _with(trajectory, logits=None, predictions=trajectory.predicted, label_log_probs=log_probs)


DISGUISES: dict[str, Callable[[ls.Trajectory], ls.Trajectory]] = {
    "a row is missing": lambda t: t,
    "another order": lambda t: t.take(np.random.default_rng(1).permutation(t.num_examples)),
    "copies": lambda t: t.take(np.repeat(np.arange(t.num_examples), 3)),
    "half precision": lambda t: _with(t, logits=np.asarray(t.logits, dtype=np.float16)),
    "shifted": lambda t: _with(t, logits=np.asarray(t.logits) + 1e-5),
    "without logits": without_logits,
}


@pytest.mark.parametrize("disguise", DISGUISES)
def test_a_test_split_that_is_validation_minus_one_row_is_rejected(disguise: str) -> None:
    validation = recorded()
    disguised, other = (DISGUISES[disguise](each.take(np.arange(1, ROWS))) for each in (validation, recorded(1)))
    with pytest.raises(UserError, match=OVERLAP):
        check_calibration(validation, disguised)
    assert disguised.num_shared(validation.row_sketch) > 0.5 * ROWS  # the sketch of a file sees it, too
    check_calibration(validation, other)
    assert other.num_shared(validation.row_sketch) == 0


def test_texts_tell_whatever_the_answers_are() -> None:
    texts = [f"input {number}" for number in range(2 * ROWS)]
    validation = _with(recorded(), examples=texts[:ROWS])
    with pytest.raises(UserError, match=OVERLAP):
        check_calibration(validation, _with(recorded(1), examples=texts[1 : ROWS + 1], split="test"))
    check_calibration(validation, _with(recorded(1), examples=texts[ROWS:], split="test"))


@pytest.mark.parametrize(
    "task", [Mano(modulus=2, max_operations=2), Mano(modulus=2, max_operations=7), Parity(max_bits=6), Parity()]
)
@pytest.mark.parametrize("size", [200, 3000])
def test_draws_of_a_small_task_repeat_inputs_by_chance(task: Task, size: int) -> None:
    validation, test = (task.text(task.split(split, size, None)) for split in ("validation", "test"))
    ours, theirs = (RowKeys.of(text_keys(texts), size) for texts in (validation, test))
    assert set(validation) & set(test)
    assert ours.num_shared(theirs) == 0
    assert RowKeys.of_sketch(ours.sketch()).num_shared(theirs) == 0
    again = RowKeys.of(text_keys(validation[1:]), size - 1)
    assert ours.num_shared(again) > 0.9 * size
    assert RowKeys.of_sketch(ours.sketch()).num_shared(again) > 0.9 * size


@pytest.mark.parametrize("inputs", [2, 100, 10_000])
def test_chance_alone_is_hardly_ever_taken_for_an_overlap(inputs: int) -> None:
    rng = np.random.default_rng(0)

    def drawn(size: int) -> RowKeys:
        return RowKeys.of(rng.integers(0, inputs, size).astype(np.uint64), size)

    assert sum(drawn(500).num_shared(drawn(300)) > 0 for _ in range(200)) <= 1


def test_a_part_that_is_shared_is_estimated() -> None:
    rng = np.random.default_rng(0)
    ours, theirs = (rng.integers(0, 5000, 2000).astype(np.uint64) for _ in range(2))
    theirs[:600] = ours[:600]
    assert RowKeys.of(ours, 2000).num_shared(RowKeys.of(theirs, 2000)) == pytest.approx(600, abs=150)


def test_boilerplate_that_whole_texts_repeat_is_no_overlap() -> None:
    rng = np.random.default_rng(0)
    texts = rng.integers(0, 2**40, (12, 50)).astype(np.uint64)

    def drawn() -> RowKeys:
        return RowKeys.of(texts[rng.integers(0, len(texts), 30)].ravel(), 30)

    assert [drawn().num_shared(drawn()) for _ in range(20)] == [0] * 20


@pytest.mark.parametrize("disguise", DISGUISES)
def test_a_policy_knows_its_calibration_data_again(disguise: str, tmp_path: Path) -> None:
    """In its file, too; also where every input was counted once."""
    texts = [str(number % (3 * ROWS // 4)) for number in range(ROWS)]
    ls.calibrate(_with(recorded(), examples=texts), 0.3, readout="margin", distinct=True).save(tmp_path / "policy.json")
    policy = ls.ExitPolicy.load(tmp_path / "policy.json")
    with pytest.raises(
        UserError, match=r"About [\d,]+ of the [\d,]+ examples of this recording have the same .* the guarantee"
    ):
        hold_out(policy, DISGUISES[disguise](recorded().take(np.arange(1, ROWS))))
