"""Over seeds: those that reach the target are averaged, and how many did is said."""

import pytest

from loopscope.analysis import over_seeds


def test_mean_and_sample_deviation_over_those_that_reach_it() -> None:
    summary = over_seeds([4.0, 5.0, None])
    assert summary.mean == 4.5
    assert summary.deviation == pytest.approx(0.7071, abs=1e-4)  # the sample's, as in the paper's 4.50 ± 0.71
    assert str(summary) == "4.50 ± 0.71 (2 of 3)"


def test_one_seed_has_no_deviation_and_none_no_mean() -> None:
    assert str(over_seeds([1.384])) == "1.38"
    assert str(over_seeds([1.384, None])) == "1.38 (1 of 2)"
    assert str(over_seeds([None, None, None])) == "N/A"
    assert str(over_seeds([-0.01, 0.0, 0.004])) == "0.00 ± 0.01 (3 of 3)"  # nothing has no sign
