"""What happens at every threshold: against the policy itself, example by example."""

import numpy as np
import pytest
from conftest import outcome_of, random_trajectory

from loopscope.analysis.difficulty import difficulty_bins
from loopscope.analysis.outcomes import OUTCOMES, count_exits, outcomes, sample_by_pattern
from loopscope.exits import READOUTS, ExitPolicy
from loopscope.exits.sweep import crossings, exit_loops, laxest_first
from loopscope.exits.thresholds import grid


@pytest.mark.parametrize("readout", READOUTS)
def test_exits_are_those_of_the_policy(readout: str) -> None:
    trajectory = random_trajectory(seed=3, rows=150)
    thresholds = np.array([np.nan]) if readout == "oracle" else grid(readout, trajectory)
    thresholds = thresholds[laxest_first(readout, thresholds)]
    crossed = crossings(readout, thresholds, trajectory)
    levels, bins = difficulty_bins(trajectory)
    table = count_exits(crossed, len(thresholds), trajectory.correct, bins)
    for place in range(0, len(thresholds), 7):
        policy = ExitPolicy(readout, None if readout == "oracle" else float(thresholds[place]))
        loops = policy.exit_loops(trajectory)
        assert (exit_loops(crossed, np.array([place]))[:, 0] == loops).all()
        right = trajectory.correct[np.arange(len(loops)), loops - 1]
        for level in range(len(levels)):
            counts = [int(((bins == level) & (loops == loop)).sum()) for loop in (1, 2, 3, 4)]
            assert table.loops[place, level].tolist() == counts
            assert table.right[place, level] == (right & (bins == level)).sum()
        said = [outcome_of(*each) for each in zip(trajectory.correct.tolist(), loops.tolist(), strict=True)]
        assert dict(zip(OUTCOMES, table.outcomes[place].tolist(), strict=True)) == {
            name: said.count(name) for name in OUTCOMES
        }


def test_every_outcome_of_every_pattern() -> None:
    correct = np.array([[row >> loop & 1 for loop in range(4)] for row in range(16)], dtype=bool)
    loops = np.tile(np.arange(1, 5), (16, 1))
    codes = outcomes(correct, loops)
    for row in range(16):
        for place in range(4):
            assert OUTCOMES[codes[row, place]] == outcome_of(correct[row].tolist(), place + 1)


def test_rare_patterns_are_among_the_examples() -> None:
    trajectory = random_trajectory(seed=5, rows=2000)
    rows = sample_by_pattern(trajectory, 60)
    assert len(rows) == len(set(rows.tolist())) == 60
    patterns, sizes = np.unique(trajectory.correct, axis=0, return_counts=True)
    shown, shares = np.unique(trajectory.correct[rows], axis=0, return_counts=True)
    assert len(shown) == len(patterns)
    assert all(share >= min(size, 60 // len(patterns)) for share, size in zip(shares, sizes, strict=True))
    assert (sample_by_pattern(trajectory, 60) == rows).all()
    assert (sample_by_pattern(trajectory, 30) == rows[:30]).all()
    assert sorted(sample_by_pattern(trajectory, 5000).tolist()) == list(range(2000))
