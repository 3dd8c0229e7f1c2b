"""Learned stoppers: what they find where the best rule is known, how they are kept, and what is refused."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import random_trajectory
from numpy.typing import NDArray
from scipy.optimize import brentq

import loopscope as ls
from loopscope.analysis.stoppers import with_stoppers
from loopscope.exits.fitted import load_fitted
from loopscope.exits.stopper import KINDS, Stopper, StopperKind, price_index
from loopscope.exits.stopper_fitting import PRICES, fit_out_of_bag
from loopscope.exits.sweep import sweep

LAST = 0.95
"""The accuracy of the last loop of the population below, whatever was seen before."""


def recorded(right: NDArray[np.bool_], signals: dict[str, NDArray[np.float64]], split: str) -> ls.Trajectory:
    """Answers that are right or not, and what is seen of them at every loop."""
    labels = np.ones(len(right), dtype=np.int64)
    return ls.Trajectory(logits=None, predictions=right.astype(np.int64), labels=labels, signals=signals, split=split)


def population(seed: int, rows: int, split: str) -> ls.Trajectory:
    """Three loops. At loop 1 an answer is right with probability (u + v) / 2, at loop 2 with 1/2 + w/2, at loop 3 LAST.

    All of u, v, w are uniform and seen: u as top1 and v as margin at loop 1, w as top1 at loop 2. No signal knows
    u + v. (Whether the answer changed would say something, too; the rule by hand does not ask.)
    """
    rng = np.random.default_rng(seed)
    u, v, w = rng.random((3, rows))
    right = rng.random((rows, 3)) < np.stack([(u + v) / 2, 0.5 + w / 2, np.full(rows, LAST)], axis=1)
    noise = rng.random((4, rows))
    signals = {"top1": np.stack([u, w, noise[0]], axis=1), "margin": np.stack([v, *noise[1:3]], axis=1)}
    return recorded(right, signals, split)


def optimum(price: float) -> tuple[float, float]:
    """Accuracy and loops of the best rule at a price: by hand, from the last loop to the first."""
    until = np.clip(2 * (LAST - price) - 1, 0, 1)  # loop 2 goes on where w is below this
    right_2 = until * LAST + (1 - until) * (0.5 + (until + 1) / 4)
    worth_2 = right_2 - price * until
    bar = np.clip(worth_2 - price, 0, 1)  # loop 1 goes on where (u + v) / 2 is below this
    goes_on = 2 * bar**2 if bar <= 0.5 else 1 - 2 * (1 - bar) ** 2
    # the mean of (u + v) / 2 over those that stay, by the triangular density 4 x, or 4 (1 - x)
    below = 4 * bar**3 / 3 if bar <= 0.5 else 1 / 6 + (2 * bar**2 - 4 * bar**3 / 3) - 1 / 3
    return goes_on * right_2 + 0.5 - below, 1 + goes_on * (1 + until)


def optimal_depth(accuracy: float) -> float:
    return optimum(brentq(lambda price: optimum(price)[0] - accuracy, 0, 0.6))[1]


def test_the_rule_by_hand_is_right() -> None:
    """Against a simulation of it."""
    for price in (0.02, 0.1, 0.3):
        rng = np.random.default_rng(5)
        u, v, w, draw = rng.random((4, 1_000_000))
        until = 2 * (LAST - price) - 1
        worth = np.where(w < until, LAST - price, 0.5 + w / 2).mean()
        on, further = (u + v) / 2 < worth - price, w < until
        chance = np.where(on, np.where(further, LAST, 0.5 + w / 2), (u + v) / 2)
        accuracy, loops = (draw < chance).mean(), (1 + on * (1 + further)).mean()
        assert optimum(price) == pytest.approx((accuracy, loops), abs=2e-3)


def test_backward_induction_finds_the_best_rule() -> None:
    """Within 0.02 loops of the optimum in closed form, which no single signal comes near."""
    validation, test = population(1, 20_000, "validation"), population(2, 100_000, "test")
    stopper, out_of_bag = fit_out_of_bag(validation, signals=["top1", "margin"])
    validation = replace(validation, signals={**validation.signals, "stopper:a": out_of_bag})
    test = ls.attach(test, {"a": stopper})
    frontier = sweep("stopper:a", validation, test)
    single = [sweep(name, validation, test) for name in ("top1", "margin")]
    for accuracy in (0.75, 0.8, 0.85, 0.9):
        best, found = optimal_depth(accuracy), frontier.depth_at(accuracy)
        assert found is not None
        assert best - 0.02 < found < best + 0.02
        assert all((each.depth_at(accuracy) or 3.0) > best + 0.05 for each in single)


KINDS_OF_INPUTS = {  # how many there are, and how often each loop is right
    "known": (0.4, (0.9, 0.9, 0.9)),
    "loop 2 helps": (0.2, (0.5, 0.95, 0.95)),
    "only loop 3 helps": (0.2, (0.5, 0.5, 0.95)),
    "nothing helps": (0.2, (0.5, 0.5, 0.5)),
}
MARGINS = {
    "known": (0.0, 1.0),
    "loop 2 helps": (0.4, 0.6),
    "only loop 3 helps": (0.1, 0.3),
    "nothing helps": (0.7, 0.9),
}
"""At loop 1: they tell three kinds apart that are all as confident (top1), in an order that no threshold follows."""


def kinds_of_inputs(seed: int, rows: int, split: str) -> ls.Trajectory:
    rng = np.random.default_rng(seed)
    shares, right = zip(*KINDS_OF_INPUTS.values(), strict=True)
    kind = rng.choice(len(shares), rows, p=shares)
    low, high = np.array(list(MARGINS.values()))[kind].T
    confident = np.where(kind == 0, 0.9, 0.5) + rng.normal(0, 0.05, rows)
    noise = rng.random((4, rows))
    correct = rng.random((rows, 3)) < np.array(right)[kind]
    signals = {
        "top1": np.stack([confident, *noise[:2]], 1),
        "margin": np.stack([rng.uniform(low, high), *noise[2:]], 1),
    }
    return recorded(correct, signals, split)


def test_backward_induction_learns_what_going_on_is_worth() -> None:
    """Not how sure the answer is, and not what the next loop alone is worth.

    By hand: without going on 66 % are right; an input that loop 2 helps wins 0.45 for one loop, one that only loop 3
    helps wins 0.45 for two, and these come last. A rule that looks one loop ahead never takes the latter along, and so
    gets no further than 75 %; one that goes by confidence takes along as many that nothing helps.
    """
    validation, test = (kinds_of_inputs(*each) for each in ((1, 20_000, "validation"), (2, 100_000, "test")))
    stopper, out_of_bag = fit_out_of_bag(validation, signals=["top1", "margin"])
    validation = replace(validation, signals={**validation.signals, "stopper:a": out_of_bag})
    test = ls.attach(test, {"a": stopper})
    frontier, confidence = (sweep(name, validation, test) for name in ("stopper:a", "top1"))
    for accuracy in (0.7, 0.74, 0.78, 0.82):
        best = 1 + (min(accuracy, 0.75) - 0.66) / 0.45 + max(accuracy - 0.75, 0) * 2 / 0.45
        found, by_confidence = frontier.depth_at(accuracy), confidence.depth_at(accuracy)
        assert found is not None
        assert best - 0.02 < found < best + 0.02
        assert by_confidence is None or by_confidence > best + 0.1


def test_what_it_says_of_its_own_recording_is_no_better_than_of_another() -> None:
    """Cross-fitted, also by whole sequences; what it was fitted to, asked again, would look far better."""
    noise = random_trajectory(3, rows=600, loops=4)  # labels by chance: there is nothing to learn
    for recording in (noise, replace(noise, sequences=np.repeat(np.arange(60), 10))):
        stopper, out_of_bag = fit_out_of_bag(recording, leaf=1, kind="classifier")
        lost = ~recording.correct[:, 0] & recording.correct[:, -1]
        assert abs(np.corrcoef(out_of_bag[:, 0], lost)[0, 1]) < 0.15
        assert np.corrcoef(stopper.values(recording)[:, 0], lost)[0, 1] > 0.8


def test_prices() -> None:
    """The index is the price at which the gain of going on is gone, by a straight line; or what going on loses."""
    prices = np.array([0.0, 0.1, 0.2, 1.0])
    gains = np.array([[0.3, 0.1, -0.1, -0.9], [-0.05, -0.15, -0.2, -1], [0.2, 0.3, 0.1, 0.05], [0.1, 0.0, -0.1, -0.9]])
    assert price_index(gains, prices) == pytest.approx([0.15, -0.05, 1.0, 0.1])


@pytest.mark.parametrize("kind", KINDS)
def test_files(kind: StopperKind, tmp_path: Path) -> None:
    """It comes back from safetensors and JSON as it was, alone and with a policy, and pickle has no part in it."""
    recording = random_trajectory(1, rows=300, loops=4)
    stopper = ls.fit_stopper(recording, kind=kind)
    stopper.save(tmp_path / "mine")
    assert sorted(file.suffix for file in (tmp_path / "mine").iterdir()) == [".json", ".safetensors"]
    again = load_fitted(tmp_path / "mine")
    assert isinstance(again, Stopper)
    assert again.kind == kind
    assert again.signals == stopper.signals
    assert all(np.array_equal(value, again.tensors[name]) for name, value in stopper.tensors.items())
    other = random_trajectory(2, rows=200, loops=4)
    policy = ls.ExitPolicy("stopper:mine", 0.1, stopper)
    policy.save(tmp_path / "policy.json")
    assert np.array_equal(ls.ExitPolicy.load(tmp_path / "policy.json").exit_loops(other), policy.exit_loops(other))
    assert policy.exit_loops(other).tolist() == (
        ls.ExitPolicy("stopper:mine", 0.1).exit_loops(ls.attach(other, {"mine": stopper})).tolist()
    )


def test_same_seed_same_stopper() -> None:
    first, second = (ls.fit_stopper(random_trajectory(1, rows=300, loops=4)) for _ in range(2))
    assert all(np.array_equal(value, second.tensors[name]) for name, value in first.tensors.items())


def test_it_can_be_certified() -> None:
    fitted, tested = population(1, 4000, "train"), population(2, 6000, "validation")
    stopper = ls.fit_stopper(fitted)
    policy = ls.calibrate(tested, 0.15, gates={"mine": stopper}, readout="stopper:mine")
    assert policy.gate is stopper
    assert policy.guarantee is not None
    best_single = ls.calibrate(tested, 0.15, readout="auto")
    assert best_single.guarantee is not None
    assert policy.guarantee.average_loops < best_single.guarantee.average_loops - 0.05
    with pytest.raises(ls.UserError, match="fitted to the train split, so its threshold must be chosen on another"):
        ls.calibrate(fitted, 0.15, gates={"mine": stopper}, readout="stopper:mine")
    unnamed = replace(fitted, split=None)
    with pytest.raises(ls.UserError, match="fitted to this very recording"):
        ls.calibrate(unnamed, 0.15, gates={"mine": ls.fit_stopper(unnamed)}, readout="stopper:mine")


def test_agreement_needs_no_labels() -> None:
    recording = random_trajectory(1, rows=300, loops=4)
    unlabelled = replace(recording, labels=None)
    with pytest.raises(ls.UserError, match="label"):
        ls.fit_stopper(unlabelled)
    assert ls.fit_stopper(unlabelled, gain="agreement").num_loops == 4


def test_what_is_refused() -> None:
    recording = random_trajectory(1, rows=300, loops=4)
    stopper = ls.fit_stopper(recording)
    with pytest.raises(ls.UserError, match="fitted to 4 loops, and here full depth is 5"):
        stopper.values(random_trajectory(2, loops=5))
    with pytest.raises(ls.UserError, match="must not be fitted on the test split"):
        ls.fit_stopper(replace(recording, split="test"))
    with pytest.raises(ls.UserError, match="100 examples or more; there are 50"):
        ls.fit_stopper(recording.take(np.arange(50)))
    few = replace(recording, sequences=np.arange(300) % 2)
    with pytest.raises(ls.UserError, match="10 sequences or more; there are 2"):
        ls.fit_stopper(few)
    with pytest.raises(ls.UserError, match="one loop"):
        ls.fit_stopper(random_trajectory(1, rows=300, loops=1))
    with pytest.raises(
        ls.UserError, match="reads built-in signals of one loop, such as entropy or margin; got 'fixed'"
    ):
        ls.fit_stopper(recording, signals=["fixed"])
    with pytest.raises(ls.UserError, match="trees"):
        ls.fit_stopper(recording, trees=3)
    with pytest.raises(ls.UserError, match="takes no stopper; its name would begin with 'stopper:'"):
        ls.ExitPolicy("gate:mine", 0.5, stopper)
    bare = ls.Trajectory(logits=recording.logits, labels=recording.labels, split="validation")
    with pytest.raises(ls.UserError, match="no gate"):
        ls.ExitPolicy("stopper:mine", 0.5, stopper).exit_loops(bare)


@pytest.mark.parametrize(
    "change",
    [
        {"below": lambda each: np.zeros_like(each)},  # in circles
        {"above": lambda each: each + 10**6},
        {"feature": lambda each: each + 100},
        {"roots": lambda each: each - 1},
        {"value": lambda each: np.full_like(each, np.inf)},
        {"value": lambda each: each[:, :1]},
        {"edges": lambda each: each[:1]},
        {"prices": lambda each: each[::-1]},
        {"below": lambda each: each[:0]},
        {"roots": lambda each: each[:, :0]},
    ],
)
def test_a_forest_that_does_not_fit_together_is_refused(change: dict) -> None:  # type: ignore[type-arg]
    stopper = ls.fit_stopper(random_trajectory(1, rows=300, loops=4))
    ((name, spoil),) = change.items()
    with pytest.raises(ls.UserError, match="do not fit together"):
        replace(stopper, **{name: spoil(stopper.tensors[name])})


def test_a_diagnosis_of_few_sequences_does_without() -> None:
    validation, test = (
        replace(random_trajectory(seed, rows=300, loops=4), sequences=np.arange(300) % 2, split=split)
        for seed, split in ((1, "validation"), (2, "test"))
    )
    assert with_stoppers(validation, test) == (validation, test)


def test_whole_numbers_of_any_type() -> None:
    recording = random_trajectory(1, rows=300, loops=4)
    stopper = ls.fit_stopper(recording)
    other = replace(stopper, below=stopper.below.astype(np.uint64), roots=stopper.roots.astype(np.int16))
    assert np.array_equal(other.values(recording), stopper.values(recording))


def test_prices_rise_from_nothing() -> None:
    assert PRICES[0] == 0
    assert (np.diff(PRICES) > 0).all()
    assert PRICES[-1] == 1
