"""Examples that two recordings share: found however they are disguised, and never in draws from a small space."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loopscope as ls
from loopscope.analysis.held_out import check_policy
from loopscope.errors import UserError
from loopscope.leaks import check_calibration
from loopscope.row_overlap import RowKeys, sequence_keys, text_keys
from loopscope.tasks import Mano, Parity, Task
from loopscope.trajectory import concatenate
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


@pytest.mark.parametrize("length", [1, 3, 20, 100])
@pytest.mark.parametrize("disguise", [name for name in DISGUISES if name != "copies"])
def test_sequences_are_known_again(length: int, disguise: str) -> None:
    """However long they are, and if there are only 40 of them."""

    def texts(seed: int) -> ls.Trajectory:
        rows = random_trajectory(seed, 40 * length, split="validation")
        return _with(rows, sequences=np.arange(40 * length) // length)

    def disguised(whole: ls.Trajectory) -> ls.Trajectory:
        part = whole.take(whole.sequences > 0)
        if disguise == "another order":  # of the texts
            return part.take(np.argsort(np.random.default_rng(1).permutation(40)[part.sequences], kind="stable"))
        return replace(DISGUISES[disguise](part), sequences=part.sequences)

    for known in (texts(0), texts(0).row_sketch):
        assert disguised(texts(0)).num_shared(known) > 0.5 * 39 * length
        assert disguised(texts(1)).num_shared(known) == 0


def test_a_part_of_many_sequences_is_found_by_the_sketch() -> None:
    whole = _with(random_trajectory(0, 20_000), sequences=np.arange(20_000) // 10)
    other = _with(random_trajectory(1, 20_000), sequences=np.arange(20_000) // 10)
    parts = [whole.take(whole.sequences < 300), other.take(other.sequences >= 300)]
    mixed = concatenate(parts)
    assert mixed.num_shared(whole.row_sketch) == pytest.approx(3_000, abs=1_200)
    assert other.num_shared(whole.row_sketch) == 0


@pytest.mark.parametrize(("size", "other_size", "least"), [(40, 40, 10), (400, 40, 4), (4_000, 40, 2)])
def test_a_few_shared_rows_are_found(size: int, other_size: int, least: int) -> None:
    """Where nothing repeats within: a half of the pairs is shared by lot where sizes are alike, and ever fewer else."""
    ours, theirs = np.split(np.random.default_rng(0).permutation(10**6)[: size + other_size].astype(np.uint64), [size])
    found = []
    for shared in (least - 1, least):
        theirs[:shared] = ours[:shared]
        found.append(RowKeys.of(ours).num_shared(RowKeys.of(theirs)))
    assert found == [0, least]


@pytest.mark.parametrize("copies", [(1, 3), (3, 1), (3, 3), (2, 5)])
def test_copies_hide_no_part_that_is_shared(copies: tuple[int, int]) -> None:
    """Though a row of one recording is missing, so that not all have as many."""
    rng = np.random.default_rng(0)
    ours, theirs = (rng.integers(0, 2**36, 500).astype(np.uint64) for _ in range(2))
    theirs[:50] = ours[:50]
    first, second = (np.repeat(keys, often)[1:] for keys, often in zip((ours, theirs), copies, strict=True))
    assert RowKeys.of(first).num_shared(RowKeys.of(second)) == pytest.approx(50, abs=1)


def test_a_small_part_of_a_large_recording_is_found_by_the_sketch() -> None:
    rng = np.random.default_rng(0)
    ours, theirs = (rng.integers(0, 2**36, size).astype(np.uint64) for size in (20_000, 1_000))
    sketch = RowKeys.of(ours).sketch()
    assert len(sketch.keys) < 30_000
    assert RowKeys.of_sketch(sketch).num_shared(RowKeys.of(theirs)) == 0
    theirs[:60] = ours[:60]
    assert RowKeys.of_sketch(sketch).num_shared(RowKeys.of(theirs)) == pytest.approx(60, abs=40)


def test_splits_without_repeats_from_few_inputs_are_rejected() -> None:
    """Nothing in them says that they share their inputs by chance."""
    texts = [f"input {number}" for number in range(3 * ROWS // 2)]
    draws = [np.random.default_rng(seed).permutation(len(texts))[:ROWS] for seed in (0, 1)]
    drawn = [_with(recorded(seed), examples=[texts[row] for row in rows]) for seed, rows in enumerate(draws)]
    with pytest.raises(UserError, match=r"\(split one draw, or draw with repeats\)"):
        check_calibration(drawn[0], _with(drawn[1], split="test", examples=drawn[1].examples))


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
    ours, theirs = (RowKeys.of(text_keys(texts)) for texts in (validation, test))
    assert set(validation) & set(test)
    assert ours.num_shared(theirs) == 0
    assert RowKeys.of_sketch(ours.sketch()).num_shared(theirs) == 0
    again = RowKeys.of(text_keys(validation[1:]))
    assert ours.num_shared(again) > 0.9 * size
    assert RowKeys.of_sketch(ours.sketch()).num_shared(again) > 0.9 * size


@pytest.mark.parametrize("inputs", [2, 100, 10_000])
def test_chance_alone_is_hardly_ever_taken_for_an_overlap(inputs: int) -> None:
    rng = np.random.default_rng(0)

    def drawn(size: int) -> RowKeys:
        return RowKeys.of(rng.integers(0, inputs, size).astype(np.uint64))

    assert sum(drawn(500).num_shared(drawn(300)) > 0 for _ in range(200)) <= 1


def test_a_part_that_is_shared_is_estimated() -> None:
    rng = np.random.default_rng(0)
    ours, theirs = (rng.integers(0, 5000, 2000).astype(np.uint64) for _ in range(2))
    theirs[:600] = ours[:600]
    assert RowKeys.of(ours).num_shared(RowKeys.of(theirs)) == pytest.approx(600, abs=150)


def test_boilerplate_that_whole_texts_repeat_is_no_overlap() -> None:
    rng = np.random.default_rng(0)
    texts = rng.integers(0, 2**40, (12, 50)).astype(np.uint64)

    def drawn() -> RowKeys:
        keys = texts[rng.integers(0, len(texts), 30)].ravel()
        return RowKeys.of(sequence_keys(keys, np.repeat(np.arange(30), 50)))

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
        check_policy(policy, DISGUISES[disguise](recorded().take(np.arange(1, ROWS))))
