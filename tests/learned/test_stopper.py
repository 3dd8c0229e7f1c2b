"""Learned stoppers: what they find where the best rule is known, how they are kept, and what is refused."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import random_trajectory
from numpy.typing import NDArray
from scipy.optimize import brentq

import loopscope as ls
from loopscope.frontier import sweep
from loopscope.learned.attach import load_fitted
from loopscope.learned.stopper import STOPPER_KINDS, Stopper, StopperKind, price_index
from loopscope.learned.stopper_fitting import fit_out_of_bag, with_stoppers

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


def swept_out_of_bag(validation: ls.Trajectory, test: ls.Trajectory, *others: str) -> list[ls.Frontier]:
    """The frontier of a stopper that was fitted to validation and cross-fitted there, and those of single signals."""
    stopper, out_of_bag = fit_out_of_bag(validation, signals=["top1", "margin"])
    validation = replace(validation, signals={**validation.signals, "stopper:a": out_of_bag})
    test = ls.attach(test, {"a": stopper})
    return [sweep(name, validation, test) for name in ("stopper:a", *others)]


def test_backward_induction_finds_the_best_rule() -> None:
    """Within 0.02 loops of the optimum in closed form, which no single signal comes near."""
    validation, test = population(1, 10_000, "validation"), population(2, 40_000, "test")
    frontier, *single = swept_out_of_bag(validation, test, "top1", "margin")
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
    validation, test = (kinds_of_inputs(*each) for each in ((1, 10_000, "validation"), (2, 40_000, "test")))
    frontier, confidence = swept_out_of_bag(validation, test, "top1")
    for accuracy in (0.7, 0.74, 0.78, 0.82):
        best = 1 + (min(accuracy, 0.75) - 0.66) / 0.45 + max(accuracy - 0.75, 0) * 2 / 0.45
        found, by_confidence = frontier.depth_at(accuracy), confidence.depth_at(accuracy)
        assert found is not None
        assert best - 0.02 < found < best + 0.02
        assert by_confidence is None or by_confidence > best + 0.1


def test_what_it_says_of_its_own_recording_is_no_better_than_of_another() -> None:
    """Cross-fitted, also by whole sequences; what it was fitted to, asked again, would look far better."""
    noise = random_trajectory(3, rows=400, loops=4)  # labels by chance: there is nothing to learn
    for recording in (noise, replace(noise, sequences=np.repeat(np.arange(40), 10))):
        stopper, out_of_bag = fit_out_of_bag(recording, leaf=1, kind="classifier")
        lost = ~recording.correct[:, 0] & recording.correct[:, -1]
        assert abs(np.corrcoef(out_of_bag[:, 0], lost)[0, 1]) < 0.15
        assert np.corrcoef(stopper.values(recording)[:, 0], lost)[0, 1] > 0.8


@pytest.mark.parametrize("together", [False, True])
def test_of_many_examples_some_are_fitted_to(together: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole sequences, where there are any. What it says of the others is what it says of new ones."""
    monkeypatch.setattr("loopscope.learned.stopper_fitting.MAX_EXAMPLES", 400)
    noise = random_trajectory(3, rows=1000, loops=4)  # labels by chance: there is nothing to learn
    recording = replace(noise, sequences=np.repeat(np.arange(100), 10)) if together else noise
    stopper, out_of_bag = fit_out_of_bag(recording, leaf=1, kind="classifier")
    told = stopper.values(recording)
    fitted_to = (told != out_of_bag).any(axis=1)
    assert 350 < fitted_to.sum() <= 400
    assert not together or set(fitted_to.reshape(100, 10).sum(axis=1)) == {0, 10}
    lost = ~recording.correct[:, 0] & recording.correct[:, -1]
    assert abs(np.corrcoef(out_of_bag[:, 0], lost)[0, 1]) < 0.15
    assert np.corrcoef(told[fitted_to, 0], lost[fitted_to])[0, 1] > 0.8


def test_prices() -> None:
    """The index is the price at which the gain of going on is gone, by a straight line; or what going on loses."""
    prices = np.array([0.0, 0.1, 0.2, 1.0])
    gains = np.array([[0.3, 0.1, -0.1, -0.9], [-0.05, -0.15, -0.2, -1], [0.2, 0.3, 0.1, 0.05], [0.1, 0.0, -0.1, -0.9]])
    assert price_index(gains, prices) == pytest.approx([0.15, -0.05, 1.0, 0.1])


@pytest.mark.parametrize("kind", STOPPER_KINDS)
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
    same = ls.fit_stopper(recording, kind=kind)  # with the same seed
    assert all(np.array_equal(value, same.tensors[name]) for name, value in stopper.tensors.items())
    other = random_trajectory(2, rows=200, loops=4)
    policy = ls.ExitPolicy("stopper:mine", 0.1, stopper)
    policy.save(tmp_path / "policy.json")
    assert np.array_equal(ls.ExitPolicy.load(tmp_path / "policy.json").exit_loops(other), policy.exit_loops(other))
    assert policy.exit_loops(other).tolist() == (
        ls.ExitPolicy("stopper:mine", 0.1).exit_loops(ls.attach(other, {"mine": stopper})).tolist()
    )


def test_it_can_be_certified() -> None:
    fitted, tested = population(1, 4000, "train"), population(2, 6000, "validation")
    stopper = ls.fit_stopper(fitted)
    policy = ls.calibrate(tested, 0.15, gates={"mine": stopper}, readout="stopper:mine")
    assert policy.gate is stopper
    assert policy.guarantee is not None
    best_single = ls.calibrate(tested, 0.15, readout="auto")
    assert best_single.guarantee is not None
    assert policy.guarantee.average_loops < best_single.guarantee.average_loops - 0.05


def test_agreement_needs_no_labels() -> None:
    recording = random_trajectory(1, rows=300, loops=4)
    unlabelled = replace(recording, labels=None)
    with pytest.raises(ls.UserError, match="label"):
        ls.fit_stopper(unlabelled)
    assert ls.fit_stopper(unlabelled, gain="agreement").num_loops == 4


def test_a_forest_that_does_not_fit_together_is_refused() -> None:
    stopper = ls.fit_stopper(random_trajectory(1, rows=150, loops=3))
    for name, spoilt in {
        "below": np.zeros_like(stopper.below),  # in circles
        "feature": stopper.feature + 100,
        "value": np.full_like(stopper.value, np.inf),
        "edges": stopper.edges[:1],
        "prices": stopper.prices[::-1],
        "roots": stopper.roots[:, :0],
        "above": stopper.above[:0],
    }.items():
        with pytest.raises(ls.UserError, match="do not fit together"):
            replace(stopper, **{name: spoilt})


def test_a_diagnosis_of_few_sequences_does_without() -> None:
    validation, test = (
        replace(random_trajectory(seed, rows=300, loops=4), sequences=np.arange(300) % 2, split=split)
        for seed, split in ((1, "validation"), (2, "test"))
    )
    assert with_stoppers(validation, test) == (validation, test)
