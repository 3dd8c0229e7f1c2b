"""P-values, the walk and conformal risk control: the formulas, and the mistakes that are known of them."""

from math import comb, e, exp, log

import numpy as np
import pytest
from scipy.stats import binom

from loopscope.certify.bounds import (
    conformal,
    count_leading,
    fixed_sequence,
    max_losses,
    min_units,
    p_values,
    risk_interval,
)


def test_the_binomial_p_value_is_exact() -> None:
    expected = sum(comb(500, k) * 0.01**k * 0.99 ** (500 - k) for k in range(2))
    assert p_values([1.0], 500, 0.01, binary=True)[0] == pytest.approx(expected, rel=1e-12)
    assert p_values([0.1 + 0.2 + 0.7], 500, 0.01, binary=True)[0] == pytest.approx(expected)  # a count, not 1 + epsilon


def test_the_hoeffding_bentkus_p_value_is_the_smaller_of_both() -> None:
    n, alpha, total = 400, 0.05, 7.3
    mean = total / n
    h = mean * log(mean / alpha) + (1 - mean) * log((1 - mean) / (1 - alpha))
    expected = min(exp(-n * h), e * binom.cdf(8, n, alpha))
    assert p_values([total], n, alpha, binary=False)[0] == pytest.approx(expected, rel=1e-9)
    assert p_values([0.0], n, alpha, binary=False)[0] == pytest.approx((1 - alpha) ** n)  # 0 ln 0 = 0
    assert p_values([40.0], n, alpha, binary=False)[0] == 1.0  # above alpha nothing is proven
    thirds = float(np.sum(np.full(9, 1 / 3)))  # 3 but for rounding
    exact = p_values([3.0], 299, 0.05, binary=False)[0]
    assert p_values([thirds], 299, 0.05, binary=False)[0] == pytest.approx(exact, rel=1e-6)
    assert p_values([3.0 + 1e-13], 299, 0.05, binary=False)[0] == pytest.approx(exact, rel=1e-6)
    assert p_values(-1e-16, 20, 0.2, binary=False) == pytest.approx(0.8**20)


@pytest.mark.parametrize("rate", [0.05, 0.08])
def test_a_p_value_is_below_delta_no_more_often_than_delta(rate: float) -> None:
    """Under the null, for losses of 0 and 1 and for losses that are averages of correlated ones."""
    rng = np.random.default_rng(1)
    ones = rng.binomial(300, rate, 20_000).astype(float)
    assert (p_values(ones, 300, 0.05, binary=True) <= 0.1).mean() <= 0.1 + 2 * 0.0021
    clustered = rng.beta(rate / 2, (1 - rate) / 2, (4_000, 300)).sum(axis=1)
    assert (p_values(clustered, 300, 0.05, binary=False) <= 0.1).mean() <= 0.1 + 2 * 0.0047


@pytest.mark.parametrize(
    ("n", "alpha", "number"),
    [(500, 0.01, 1), (1_000, 0.01, 4), (2_000, 0.01, 12), (5_000, 0.01, 38), (10_000, 0.01, 83), (500, 0.005, -1)],
)
def test_the_largest_count_that_still_proves(n: int, alpha: float, number: int) -> None:
    assert max_losses(n, alpha, 0.05) == number
    assert p_values(number + 1.0, n, alpha, binary=True) > 0.05
    if number >= 0:
        assert p_values(float(number), n, alpha, binary=True) <= 0.05


def test_the_walk_ends_at_the_first_failure_and_returns_the_last_that_passed() -> None:
    assert fixed_sequence([0.01, 0.02, 0.20, 0.01], 0.05) == 2  # what passes behind a gap does not count
    assert fixed_sequence([0.20, 0.01], 0.05) == 0
    assert fixed_sequence([0.01, 0.05], 0.05) == 2
    assert fixed_sequence([], 0.05) == 0
    assert fixed_sequence([0.01, np.nan], 0.05) == 1
    assert count_leading(np.array([True, True, False, True])) == 2


def test_conformal_risk_control_adds_the_example_to_come() -> None:
    losses = np.array([0.0, 1.0, 2.0, 4.0])
    for n, expected in [(99, 1), (199, 2), (299, 3), (98, 0)]:  # (losses + 1) / (n + 1) <= 0.01
        assert conformal(losses, n, 0.01) == expected
    assert max_losses(199, 0.01, None) == 1
    assert max_losses(98, 0.01, None) == -1


def test_the_number_that_is_needed() -> None:
    assert min_units(0.01, 0.05) == 299
    assert min_units(0.005, 0.05) == 598
    assert min_units(0.01, None) == 99
    assert min_units(0.01, 0.05, rate=0.01) is None
    assert min_units(0.06, 0.05, rate=3 / 50) is None  # but for rounding
    assert min_units(0.3, 1 - 1e-12) == 1
    needed = min_units(0.01, 0.05, rate=0.005)
    assert needed is not None
    assert p_values(0.005 * needed, needed, 0.01, binary=True) <= 0.05
    assert p_values(0.005 * needed / 2, needed // 2, 0.01, binary=True) > 0.05


def test_the_interval_covers_the_risk() -> None:
    rng = np.random.default_rng(2)
    for binary, totals in ((True, rng.binomial(400, 0.02, 300)), (False, rng.beta(0.1, 4.9, (100, 400)).sum(axis=1))):
        bounds = [risk_interval(float(total), 400, binary, 0.95) for total in totals]
        assert np.mean([low <= 0.02 <= high for low, high in bounds]) >= 0.94
    low, high = risk_interval(8, 400, True, 0.95)
    assert (low, high) == pytest.approx((0.00867, 0.03903), abs=1e-5)  # Clopper and Pearson
    assert risk_interval(0, 100, False, 0.95)[1] == pytest.approx(1 - 0.025**0.01, abs=2e-4)  # (1 - risk)^100 = 2.5 %
    assert risk_interval(0, 100, True, 0.95)[0] == 0.0
    assert risk_interval(100 + 4e-15, 100, False, 0.95)[1] == 1.0
