"""MANO: are the expressions well-formed, their values right, the splits balanced, reproducible and disjoint?"""

from collections import Counter
from itertools import product

import numpy as np
import pytest

from loopscope.errors import UserError
from loopscope.tasks import Draws, Examples, Mano, fingerprints, overlap, seen


def hashes(examples: Examples) -> np.ndarray:
    return np.unique(fingerprints(examples))


def evaluate(symbols: list[str], modulus: int) -> int:
    """A prefix expression by plain recursion."""
    rest = iter(symbols)

    def value() -> int:
        symbol = next(rest)
        if symbol not in "+-*":
            return int(symbol)
        left, right = value(), value()
        return {"+": left + right, "-": left - right, "*": left * right}[symbol] % modulus

    result = value()
    assert next(rest, None) is None, "tokens are left over"
    return result


@pytest.mark.parametrize("modulus", [2, 23, 97])
def test_labels_are_the_values_of_the_expressions(modulus: int) -> None:
    task = Mano(modulus=modulus, train_examples=500)
    examples = task.split("train")
    values = [evaluate(text.split(), modulus) for text in task.text(examples)]
    assert values == examples.labels.tolist()


def test_rows_are_begin_expression_marker() -> None:
    task = Mano(train_examples=300)
    examples = task.split("train")
    rows = np.arange(len(examples))
    assert (examples.lengths == 2 * examples.difficulty + 3).all()
    assert (examples.tokens[:, 0] == task.vocab_size - 2).all()
    assert (examples.tokens[rows, examples.lengths - 1] == task.vocab_size - 1).all()
    operators = (examples.tokens >= 23) & (examples.tokens < 26)
    assert (operators.sum(axis=1) == examples.difficulty).all()


def test_the_paper_s_splits() -> None:
    task = Mano()
    assert (task.modulus, task.operators, task.max_operations) == (23, "+-*", 10)
    assert (task.train_seed, task.validation_seed, task.test_seed) == (42, 43, 44)
    assert task.positions == 23
    assert task.length(14) == 31
    for name in ("train", "validation", "test"):
        examples = task.split(name)
        assert Counter(examples.difficulty.tolist()) == dict.fromkeys(range(1, 11), 5000)


def test_operand_sizes_split_uniformly() -> None:
    """With n operations the left operand has k ~ U{0..n-1}: at n = 3, each of 0, 1, 2 in a third of the cases."""
    task = Mano(modulus=5)
    examples = task.draw(Draws(7), np.full(9000, 3))
    sizes = Counter(_left_size(text.split()) for text in task.text(examples))
    assert set(sizes) == {0, 1, 2}
    assert all(abs(count - 3000) < 4 * np.sqrt(2000) for count in sizes.values())
    leaves = examples.tokens[examples.tokens < 5]
    operators = examples.tokens[(examples.tokens >= 5) & (examples.tokens < 8)]
    assert np.bincount(operators - 5) == pytest.approx(9000, rel=0.05)
    assert len(np.unique(leaves)) == 5


def _left_size(symbols: list[str]) -> int:
    need, operations = 1, 0
    for symbol in symbols[1:]:
        operations += symbol in "+-*"
        need += 1 if symbol in "+-*" else -1
        if need == 0:
            return operations
    raise AssertionError("no left operand")


def test_the_same_seed_gives_the_same_examples_on_every_machine() -> None:
    """Frozen values: NumPy guarantees the raw stream that everything is derived from."""
    task = Mano(train_examples=1000)
    assert task.text(task.split("train"))[:2] == FIRST_TWO
    assert int(fingerprints(task.split("train")).sum()) == SUM_OF_FINGERPRINTS


FIRST_TWO = ["+ + + * 1 19 13 * 10 - 12 + 6 21 + + 20 17 * 5 18", "- + 19 5 + 2 4"]
SUM_OF_FINGERPRINTS = 10001758898877811068


def test_space_counts_all_expressions() -> None:
    task = Mano(modulus=2, operators="+*", max_operations=2)
    examples = task.draw(Draws(0), np.full(5000, 2))
    assert len(set(task.text(examples))) == task.space(2) == 2 * 4 * 8
    assert task.space(1) == len(list(product("+*", "01", "01")))


def test_independent_draws_overlap_where_the_space_is_small() -> None:
    task = Mano()
    shares = overlap(task.split("validation"), hashes(task.split("train")))
    assert shares["1"] > 0.9
    assert 0 < shares["2"] < 0.1
    assert all(shares[str(level)] < 0.01 for level in range(3, 11))


def test_disjoint_keeps_validation_and_test_out_of_training() -> None:
    task = Mano(modulus=5, max_operations=3, disjoint=True, train_examples=20_000, test_examples=5_000)
    train, validation, test = (task.split(name) for name in ("train", "validation", "test"))
    for held_out in (validation, test):
        known = seen(held_out, hashes(train))
        assert not known[held_out.difficulty > 1].any()
        assert known[held_out.difficulty == 1].all()  # 75 expressions are too few to divide
    assert not seen(test, hashes(validation))[test.difficulty > 1].any()
    texts = task.text(test)
    assert [evaluate(text.split(), 5) for text in texts] == test.labels.tolist()


def test_online_batches_are_disjoint_from_the_held_out_splits_too() -> None:
    task = Mano(modulus=5, max_operations=3, disjoint=True, train_examples=0)
    batch = task.batch(seed=3, step=5, size=600)
    assert not seen(batch, hashes(task.split("test")))[batch.difficulty > 1].any()
    assert Counter(batch.difficulty.tolist()) == {1: 200, 2: 200, 3: 200}


def test_extrapolation_is_harder_than_training() -> None:
    task = Mano(test_examples=400)
    harder = task.split("extrapolation", levels=range(11, 15))
    assert Counter(harder.difficulty.tolist()) == dict.fromkeys(range(11, 15), 100)
    assert harder.tokens.shape[1] == 31
    with pytest.raises(UserError, match="above 10"):
        task.split("extrapolation", levels=range(10, 12))


def test_a_part_of_a_split_is_its_beginning() -> None:
    task = Mano(train_examples=500)
    whole, part = task.split("train"), task.split("train", 60)
    assert task.text(part) == task.text(whole)[:60]
    assert seen(part, hashes(whole)).all()
    with pytest.raises(UserError, match="has 500 examples"):
        task.split("train", 501)


def test_batches_of_one_length_cover_everything_without_padding() -> None:
    examples = Mano(train_examples=500).split("train")
    rows = list(examples.same_length_batches(64))
    assert sorted(np.concatenate(rows).tolist()) == list(range(500))
    assert all(len(batch) <= 64 and len(set(examples.lengths[batch])) == 1 for batch in rows)


def test_written_examples_are_read_again() -> None:
    task = Mano(modulus=5, operators="+*")
    examples = task.split("validation", 300)
    again = task.parse(task.text(examples))
    assert np.array_equal(fingerprints(again), fingerprints(examples))
    assert np.array_equal(again.labels, examples.labels)
    assert np.array_equal(again.difficulty, examples.difficulty)


@pytest.mark.parametrize("text", ["", "+", "+ 1", "1 1", "+ 1 1 1", "+ 5 1", "- 1 1", "1 +", "one"])
def test_what_is_no_expression_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="prefix notation"):
        Mano(modulus=5, operators="+*").parse(["+ 1 1", text])
