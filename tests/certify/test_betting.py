"""Bets on losses of sequences: as rarely wrong as they say, sharper than a bound on the mean, the same every time."""

from math import exp, log, pi, sqrt
from statistics import NormalDist

import numpy as np
import pytest

import loopscope as ls
from loopscope.certify.bounds import betting_p_values, min_units, min_units_by_bets, p_values
from loopscope.certify.losses import losses, lost_at, risk_groups
from loopscope.certify.threshold_walk import Proof
from loopscope.frontier import crossings
from loopscope.threshold_grids import gap_grid

SHAPES = {
    "all or nothing": lambda rng, mean, size: (rng.random(size) < mean).astype(float),
    "shares of twenty": lambda rng, mean, size: rng.binomial(20, mean, size) / 20,
    "rarely all": lambda rng, mean, size: np.where(
        rng.random(size) < mean / 4, 1.0, rng.binomial(20, 0.75 * mean / (1 - mean / 4), size) / 20
    ),
    "skewed": lambda rng, mean, size: rng.beta(mean / 2, (1 - mean) / 2, size),
}


def sequences_of(count: int, seed: int = 0, length: int = 12, alone: bool = False) -> ls.Trajectory:
    """Sequences of decisions that are right from a random loop on; the margin grows from about there."""
    rng = np.random.default_rng(seed)
    settled = np.minimum(rng.geometric(0.5, (count * length, 1)), 4)
    right = np.arange(1, 5) >= settled
    return ls.Trajectory(
        predictions=(~right).astype(int),
        labels=np.zeros(len(right), int),
        signals={"margin": np.arange(1, 5) - settled + rng.normal(0, 0.8, right.shape)},
        sequences=None if alone else np.repeat(np.arange(count), length),
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("alpha", "units"), [(0.05, 150), (0.2, 60)])
def test_a_risk_at_the_limit_is_proven_no_more_often_than_the_level(shape: str, alpha: float, units: int) -> None:
    rng = np.random.default_rng(0)
    drawn = SHAPES[shape](rng, alpha, (units, 2_000))
    for level in (0.05, 0.2):
        proven = (betting_p_values([drawn], units, alpha, level) <= level).mean()
        assert proven <= level + 3 * sqrt(level * (1 - level) / 2_000)


def test_it_is_sharper_than_hoeffding_bentkus() -> None:
    rng = np.random.default_rng(1)
    for shape, least in (("shares of twenty", 0.9), ("rarely all", 0.3), ("skewed", 0.0), ("all or nothing", 0.0)):
        drawn = SHAPES[shape](rng, 0.033, (300, 400))
        bets = (betting_p_values([drawn], 300, 0.05, 0.05) <= 0.05).mean()
        mean_only = (p_values(drawn.sum(axis=0), 300, 0.05, False) <= 0.05).mean()
        assert bets >= max(mean_only + 0.02, least), shape


def by_hand(losses: list[float], alpha: float, level: float) -> float:
    """The same for one threshold, unit by unit in plain numbers."""
    wealth, highest, normal = 1.0, 1.0, NormalDist()
    before = 0.5 / (alpha * (1 - alpha))
    squares, total = 0.5, before * alpha
    for number, loss in enumerate(losses):
        left = len(losses) - number
        share = min(max(wealth * level, 1e-300), 1 - 1e-12)
        distance = normal.inv_cdf(share)
        option = exp(-(distance**2) / 2) / sqrt(2 * pi) / share / sqrt(squares / (before + number) * left)
        needed = (exp(-log(share) / left) - 1) / alpha
        bet = min(max(option, needed), 1 / (1 - alpha)) if highest * level < 1 - 1e-12 else 0.0
        wealth = max(wealth * (1 + bet * (alpha - loss)), 0.0)
        highest = max(highest, wealth)
        mean = total / (before + number)
        total += loss
        squares += (loss - mean) * (loss - total / (before + number + 1))
    return 1 / highest


def test_many_thresholds_at_once_and_in_blocks_are_each_by_itself() -> None:
    rng = np.random.default_rng(2)
    drawn = rng.binomial(10, 0.05 * rng.random(12), (90, 12)) / 10
    found = betting_p_values([drawn[:17], drawn[17:60], drawn[60:]], 90, 0.06, 0.1)
    assert found == pytest.approx([by_hand(column.tolist(), 0.06, 0.1) for column in drawn.T], rel=1e-9)
    assert found == pytest.approx(betting_p_values([drawn], 90, 0.06, 0.1), rel=1e-12)
    assert found.min() < 0.1 < found.max()
    lost = np.concatenate((np.ones((30, 1)), np.zeros((30, 1))))
    assert betting_p_values([lost], 60, 0.3, 0.05)[0] == pytest.approx(1)  # wealth that is lost stays lost


@pytest.mark.parametrize(
    ("alpha", "level"), [(0.01, 0.05), (0.05, 0.025), (0.5, 0.25), (0.9, 0.05), (0.3, 0.001), (0.002, 0.3)]
)
def test_without_any_loss_it_takes_as_many_units_as_the_exact_test(alpha: float, level: float) -> None:
    units = min_units(alpha, level)
    assert units is not None
    assert betting_p_values([np.zeros((units, 1))], units, alpha, level)[0] <= level
    if units > 1:
        assert betting_p_values([np.zeros((units - 1, 1))], units - 1, alpha, level)[0] > level


def test_about_so_many_units_prove_a_rate() -> None:
    rng = np.random.default_rng(3)
    units = min_units_by_bets(0.05, 0.05, 0.035, 0.035 * 0.965 / 20)
    assert units is not None
    proven = (betting_p_values([rng.binomial(20, 0.035, (units, 300)) / 20], units, 0.05, 0.05) <= 0.05).mean()
    assert proven > 0.6
    assert min_units_by_bets(0.05, 0.05, 0.05, 0.1) is None


def test_the_losses_of_every_unit_at_every_threshold_are_those_of_the_policy() -> None:
    recording = sequences_of(40, seed=4)
    (group,) = risk_groups(recording, per_difficulty=False)
    thresholds = gap_grid("margin", recording, 30)
    order = Proof(bound="betting", seed=5).order(group.units)
    columns = np.array([3, 0, len(thresholds) - 1, 7])
    crossed, lost = crossings("margin", thresholds, recording), losses("gap", recording)
    found = np.concatenate(list(group.unit_losses(crossed, lost, len(thresholds), columns, order)))
    for place, column in enumerate(columns):
        loops = ls.ExitPolicy("margin", float(thresholds[column])).exit_loops(recording)
        assert found[:, place] == pytest.approx(group.means(lost_at("gap", recording, loops))[order], abs=1e-12)


def test_a_policy_says_by_which_bound_and_the_order_is_part_of_it() -> None:
    recording = sequences_of(600, seed=6)
    policies = [
        ls.calibrate(recording, 0.05, readout="margin", bound=bound) for bound in ("betting", "hoeffding_bentkus")
    ]
    bets, mean_only = (policy.guarantee for policy in policies)
    assert (bets.bound, bets.order_seed) == ("betting", 0)
    assert (mean_only.bound, mean_only.order_seed) == ("hoeffding_bentkus", None)
    assert bets.average_loops < mean_only.average_loops
    assert bets.evidence[0].p_value <= bets.level
    again = ls.calibrate(recording, 0.05, readout="margin").guarantee
    assert again == bets
    moved = ls.calibrate(recording.take(np.argsort(recording.sequences % 7, kind="stable")), 0.05, readout="margin")
    assert moved.guarantee.evidence == bets.evidence  # where a sequence stands in the recording does not matter
    examples = ls.calibrate(sequences_of(600, seed=6, alone=True), 0.05, readout="margin").guarantee
    assert (examples.bound, examples.order_seed) == (None, None)  # the exact test
