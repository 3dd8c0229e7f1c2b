"""Tasks: are inputs well-formed, answers right, splits balanced, reproducible and disjoint?"""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from loopscope.errors import UserError
from loopscope.tasks import (
    Draws,
    Examples,
    HopInduction,
    Mano,
    Parity,
    Reachability,
    StateTracking,
    Task,
    fingerprints,
    overlap,
    seen,
)

SMALL = {
    "mano": Mano(modulus=5, operators="+*"),
    "parity": Parity(max_bits=9),
    "state-tracking": StateTracking(letters=3, max_factors=5),
    "hop-induction": HopInduction(alphabet=3, letters=9, max_hops=3),
    "reachability": Reachability(nodes=7, paths=3, max_edges=3),
}
by_task = pytest.mark.parametrize("task", SMALL.values(), ids=SMALL)
PARITY = Parity(max_bits=9, validation_examples=90, test_examples=50)


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
def test_mano_s_answers_are_the_values_of_the_expressions(modulus: int) -> None:
    task = Mano(modulus=modulus, train_examples=300)
    examples = task.split("train")
    assert [evaluate(text.split(), modulus) for text in task.text(examples)] == examples.labels.tolist()
    operators = (examples.tokens >= modulus) & (examples.tokens < modulus + 3)
    assert (operators.sum(axis=1) == examples.difficulty).all()


@by_task
def test_rows_are_begin_input_marker(task: Task) -> None:
    examples = task.split("validation", 300)
    assert (examples.lengths == task.length(examples.difficulty)).all()
    assert np.array_equal(task.difficulties(examples.tokens, examples.lengths), examples.difficulty)
    assert (examples.tokens[:, 0] == task.vocab_size - 2).all()
    assert (examples.tokens[np.arange(300), examples.lengths - 1] == task.vocab_size - 1).all()
    assert not examples.tokens[np.arange(examples.tokens.shape[1]) >= examples.lengths[:, None]].any()
    if isinstance(task, Parity):
        texts = task.text(examples)
        assert [text.count("1") % 2 for text in texts] == examples.labels.tolist()
        assert [len(text) for text in texts] == examples.difficulty.tolist()


def test_the_paper_s_splits() -> None:
    task = Mano()
    assert (task.modulus, task.operators, task.max_operations) == (23, "+-*", 10)
    assert (task.train_seed, task.validation_seed, task.test_seed) == (42, 43, 44)
    assert (task.positions, task.length(14), Parity().positions) == (23, 31, 42)
    assert Counter(task.split("test").difficulty.tolist()) == dict.fromkeys(range(1, 11), 5000)


def test_operand_sizes_split_uniformly() -> None:
    """With n operations the left operand has k ~ U{0..n-1}: at n = 3, each of 0, 1, 2 in a third of the cases."""
    task = Mano(modulus=5)
    examples = task.draw(Draws(7), np.full(9000, 3))
    sizes = Counter(_left_size(text.split()) for text in task.text(examples))
    assert set(sizes) == {0, 1, 2}
    assert all(abs(count - 3000) < 4 * np.sqrt(2000) for count in sizes.values())
    operators = examples.tokens[(examples.tokens >= 5) & (examples.tokens < 8)]
    assert np.bincount(operators - 5) == pytest.approx(9000, rel=0.05)
    assert len(np.unique(examples.tokens[examples.tokens < 5])) == 5


def _left_size(symbols: list[str]) -> int:
    need, operations = 1, 0
    for symbol in symbols[1:]:
        operations += symbol in "+-*"
        need += 1 if symbol in "+-*" else -1
        if need == 0:
            return operations
    raise AssertionError("no left operand")


def test_the_same_seed_gives_the_same_uniform_draws_on_every_machine() -> None:
    """Frozen values: NumPy guarantees the raw stream that everything is derived from."""
    draws = Draws(1).integers(np.full(60_000, 6))
    assert np.abs(np.bincount(draws, minlength=6) - 10_000).max() < 500
    assert sorted(Draws(1, 2).permutation(100)) == list(range(100))
    task = Mano(train_examples=1000)
    first_two = ["+ + + * 1 19 13 * 10 - 12 + 6 21 + + 20 17 * 5 18", "- + 19 5 + 2 4"]
    assert task.text(task.split("train"))[:2] == first_two
    assert int(fingerprints(task.split("train")).sum()) == 10001758898877811068


def test_space_counts_all_inputs() -> None:
    task = Mano(modulus=2, operators="+*", max_operations=2)
    assert len(set(task.text(task.draw(Draws(0), np.full(5000, 2))))) == task.space(2) == 2 * 4 * 8
    assert (task.space(1), PARITY.space(3)) == (8, 8)


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
    assert [evaluate(text.split(), 5) for text in task.text(test)] == test.labels.tolist()
    batch = Mano(modulus=5, max_operations=3, disjoint=True, train_examples=0).batch(seed=3, step=5, size=600)
    assert not seen(batch, hashes(test))[batch.difficulty > 1].any()
    assert Counter(batch.difficulty.tolist()) == {1: 200, 2: 200, 3: 200}


def test_online_batches_are_balanced_over_steps_and_come_again() -> None:
    task = Parity()
    counts = Counter(int(level) for step in range(5) for level in task.batch(0, step, 24).difficulty)
    assert counts == dict.fromkeys(range(1, 41), 3)
    first = task.batch(0, 0, 80).tokens
    assert (first == task.batch(0, 0, 80).tokens).all()
    assert (first != task.batch(0, 1, 80).tokens).any()
    assert (first != task.batch(1, 0, 80).tokens).any()


def test_extrapolation_is_harder_than_training() -> None:
    task = Mano(test_examples=400)
    harder = task.split("extrapolation", levels=range(11, 15))
    assert Counter(harder.difficulty.tolist()) == dict.fromkeys(range(11, 15), 100)
    assert harder.tokens.shape[1] == 31
    with pytest.raises(UserError, match="above 10"):
        task.split("extrapolation", levels=range(10, 12))


def test_a_part_of_a_split_is_its_beginning_and_its_batches_have_no_padding() -> None:
    task = Mano(train_examples=500)
    whole, part = task.split("train"), task.split("train", 60)
    assert task.text(part) == task.text(whole)[:60]
    assert seen(part, hashes(whole)).all()
    with pytest.raises(UserError, match="has 500 examples"):
        task.split("train", 501)
    rows = list(whole.same_length_batches(64))
    assert sorted(np.concatenate(rows).tolist()) == list(range(500))
    assert all(len(batch) <= 64 and len(set(whole.lengths[batch])) == 1 for batch in rows)


def test_a_train_split_of_a_task_that_draws_online_is_drawn_like_its_batches() -> None:
    with pytest.raises(UserError, match="say how many to draw"):
        PARITY.split("train")
    drawn = PARITY.split("train", 90)
    assert np.bincount(drawn.difficulty)[1:].tolist() == [10] * 9
    assert np.array_equal(drawn.tokens, PARITY.split("train", 90).tokens)


@by_task
def test_written_examples_are_read_again(task: Task) -> None:
    examples = task.split("validation", 300)
    again = task.parse(task.text(examples))
    for name in ("tokens", "lengths", "labels", "difficulty"):
        assert np.array_equal(getattr(again, name), getattr(examples, name))
    longest = task.length(task.levels[-1])
    with pytest.raises(UserError, match=f"makes {longest} tokens, and the model's block size is {longest - 1}"):
        task.parse(task.text(examples), longest - 1)


def test_what_is_no_input_is_rejected() -> None:
    for text in ("", "+", "+ 1", "1 1", "+ 1 1 1", "+ 5 1", "- 1 1", "1 +", "one"):
        with pytest.raises(UserError, match="prefix notation"):
            Mano(modulus=5, operators="+*").parse(["+ 1 1", text])
    for text in ("", "012", "1 0"):
        with pytest.raises(UserError, match="bits"):
            PARITY.parse([text])
    for text in ("", "123 4", "124", "132 "[:2]):
        with pytest.raises(UserError, match="a list of permutations of 3 letters, such as '132 321'"):
            SMALL["state-tracking"].parse([text])
    for text in ("abcabcabc", "abcabcab>", "abcabcabb>", "abcabcab>>", "cababab>c>", "abcabcabc>>>>>>>", "abcabcabcd>"):
        with pytest.raises(UserError, match="9 of the letters a to c, no two neighbours the same"):
            SMALL["hop-induction"].parse([text])
    nothing = (
        "b c d e e f g",
        "b c d e e f g a a",
        "b c d h e f g a",
        "b c d e e f g b",
        "b c d e e f g f",
        "a c d e e f g b",
    )
    circle, joined = "b c d d f e g a", "b c d d d f g a"
    for text in (*nothing, circle, joined):
        with pytest.raises(UserError, match="7 nodes to which the edges of a to g lead .* on 3 paths"):
            SMALL["reachability"].parse([text])


def test_a_word_is_the_product_of_its_permutations() -> None:
    for letters in (2, 3, 5):
        task = StateTracking(letters=letters, max_factors=6, validation_examples=300)
        examples = task.split("validation")
        for text, label in zip(task.text(examples), examples.labels.tolist(), strict=True):
            images = range(1, letters + 1)
            for factor in text.split():
                images = [int(factor[image - 1]) for image in images]
            assert task.symbols[label] == "".join(map(str, images))
        assert len(task.symbols) == {2: 2, 3: 6, 5: 120}[letters]


def test_a_hop_goes_behind_the_latest_earlier_occurrence() -> None:
    task = HopInduction(alphabet=4, letters=14, max_hops=4, validation_examples=300)
    examples = task.split("validation")
    for text, label in zip(task.text(examples), examples.labels.tolist(), strict=True):
        letters, place = text.rstrip(">"), 13
        assert all(letter != following for letter, following in pairwise(letters))
        for _ in range(text.count(">")):
            place = letters.rindex(letters[place], 0, place) + 1
        assert letters[place] == task.symbols[label]
    assert Counter(examples.difficulty.tolist()) == dict.fromkeys(range(1, 5), 75)


def test_reachability_asks_for_the_end_of_a_path() -> None:
    task = Reachability(nodes=9, paths=3, max_edges=5, validation_examples=300)
    examples = task.split("validation")
    for text, label, difficulty in zip(
        task.text(examples), examples.labels.tolist(), examples.difficulty.tolist(), strict=True
    ):
        *following, node = text.split()
        edges, walked = {tail: head for tail, head in zip("abcdefghi", following, strict=True) if tail != head}, 0
        assert node not in edges.values()
        while node in edges:
            node, walked = edges[node], walked + 1
        assert (task.symbols[label], walked, len(edges)) == (node, difficulty, 6)
    assert task.parse(task.text(examples)).difficulty.tolist() == examples.difficulty.tolist()
    beginnings = Counter(text.split()[-1] for text in task.text(examples))
    assert len(beginnings) == 9
    assert max(beginnings.values()) < 60


@pytest.mark.parametrize(
    "task",
    [
        Reachability(nodes=4, paths=2, max_edges=2),
        Reachability(nodes=5, paths=3, max_edges=2),
        HopInduction(alphabet=3, letters=6, max_hops=4),
        HopInduction(alphabet=4, letters=5, max_hops=3),
        StateTracking(letters=3, max_factors=2),
    ],
)
def test_space_says_how_many_inputs_there_are(task: Task) -> None:
    for level in task.levels:
        inputs = len({*task.text(task.draw(Draws(0), np.full(20 * task.space(level) + 500, level)))})
        assert inputs == task.space(level)


def test_tasks_whose_inputs_cannot_be_as_hard() -> None:
    for words, call in (
        ("leave 4 edges", lambda: Reachability(nodes=7, paths=3, max_edges=5)),
        ("has 6 hops; choose 5 at most", lambda: HopInduction(alphabet=4, letters=9, max_hops=6)),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    with pytest.raises(UserError, match="No input of this task is harder than 4"):
        SMALL["reachability"].split("extrapolation", 10, range(4, 6))
    with pytest.raises(UserError, match="No input of this task is harder than 6"):
        SMALL["hop-induction"].split("extrapolation", 10, range(4, 8))


class Few(Parity):
    def space(self, difficulty: int) -> int:
        return 1000


def test_a_difficulty_with_a_handful_of_inputs_is_not_divided_for_ever() -> None:
    with pytest.raises(
        UserError, match="Difficulty 1 has too few inputs for splits of its own, and `space` says 1,000"
    ):
        Few(max_bits=2, disjoint=True).split("validation", 20)
