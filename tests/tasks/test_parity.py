"""Parity: are labels, lengths and the online batches right?"""

from collections import Counter

import numpy as np
import pytest

from loopscope.errors import UserError
from loopscope.tasks import Draws, Parity


def test_labels_are_parities() -> None:
    task = Parity(validation_examples=800)
    examples = task.split("validation")
    assert [text.count("1") % 2 for text in task.text(examples)] == examples.labels.tolist()
    assert [len(text) for text in task.text(examples)] == examples.difficulty.tolist()
    assert Counter(examples.difficulty.tolist()) == dict.fromkeys(range(1, 41), 20)


def test_the_block_size_follows_the_task() -> None:
    assert Parity().positions == 42


def test_online_batches_differ_by_step_and_seed_and_come_again() -> None:
    task = Parity()
    first, again = task.batch(0, 0, 80), task.batch(0, 0, 80)
    assert (first.tokens == again.tokens).all()
    assert (first.tokens != task.batch(0, 1, 80).tokens).any()
    assert (first.tokens != task.batch(1, 0, 80).tokens).any()


def test_online_batches_are_balanced_over_steps() -> None:
    task = Parity()
    counts = Counter(int(level) for step in range(5) for level in task.batch(0, step, 24).difficulty)
    assert counts == dict.fromkeys(range(1, 41), 3)


def test_longer_strings_for_extrapolation() -> None:
    examples = Parity(test_examples=50).split("extrapolation", levels=range(41, 46))
    assert set(examples.difficulty) == set(range(41, 46))


def test_draws_are_uniform() -> None:
    draws = Draws(1).integers(np.full(60_000, 6))
    assert np.abs(np.bincount(draws, minlength=6) - 10_000).max() < 500
    assert sorted(Draws(1, 2).permutation(100)) == list(range(100))


def test_written_examples_are_read_again() -> None:
    task = Parity(max_bits=9)
    examples = task.split("validation", 200)
    again = task.parse(task.text(examples))
    assert np.array_equal(again.tokens, examples.tokens)
    assert np.array_equal(again.labels, examples.labels)
    for text in ("", "012", "1 0"):
        with pytest.raises(UserError, match="bits"):
            task.parse([text])


def test_a_train_split_of_a_task_that_draws_online_is_drawn_like_its_batches() -> None:
    task = Parity(max_bits=9, validation_examples=50, test_examples=50)
    with pytest.raises(UserError, match="say how many to draw"):
        task.split("train")
    drawn = task.split("train", 90)
    assert len(drawn) == 90
    assert np.bincount(drawn.difficulty)[1:].tolist() == [10] * 9
    assert np.array_equal(drawn.tokens, task.split("train", 90).tokens)
