"""By difficulty: against cases computed by hand."""

import numpy as np
import pytest
from conftest import random_trajectory

import loopscope as ls
from loopscope.analysis.difficulty import by_difficulty, difficulty_ordering, exit_distribution
from loopscope.readouts.replay import signal


def with_signal(name: str, values: list[list[float]], difficulty: list[float]) -> ls.Trajectory:
    rows, loops = np.shape(values)
    return ls.Trajectory(
        logits=None,
        labels=[0] * rows,
        difficulty=difficulty,
        predictions=np.zeros((rows, loops), int),
        signals={name: np.array(values)},
    )


def test_means_by_hand() -> None:
    logits = np.log([[[0.8, 0.2], [0.6, 0.4]], [[0.1, 0.9], [0.7, 0.3]], [[0.3, 0.7], [0.2, 0.8]]])
    trajectory = ls.Trajectory(logits=logits, labels=[0, 0, 0], difficulty=[1, 1, 5])
    accuracy = by_difficulty(trajectory.correct, trajectory)
    assert (accuracy.levels, accuracy.counts) == ([1, 5], [2, 1])
    assert accuracy.values == [[0.5, 1.0], [0.0, 0.0]]
    expected = -np.log([[0.8, 0.6], [0.1, 0.7], [0.3, 0.2]])
    means = by_difficulty(trajectory.cross_entropy, trajectory).values
    assert np.array(means) == pytest.approx(np.array([expected[:2].mean(axis=0), expected[2]]))
    bare = random_trajectory(difficulty=None)
    assert by_difficulty(bare.correct, bare).values[0] == pytest.approx(bare.correct.mean(axis=0))


def test_exit_distributions_are_distributions_and_by_hand() -> None:
    assert np.sum(exit_distribution(random_trajectory()).values, axis=1) == pytest.approx(1)
    trajectory = ls.Trajectory(
        logits=np.zeros((1, 3, 2)), labels=[0], difficulty=[2], gate_logits=[[0.0, np.log(3), -9.0]]
    )
    assert exit_distribution(trajectory).values[0] == pytest.approx([1 / 2, 3 / 8, 1 / 8])


def test_loop_1_of_convergence_stays_empty_and_is_not_counted() -> None:
    late = with_signal("kl", [[np.nan, 1.0], [np.nan, 2.0], [np.nan, 3.0]], [1, 2, 3])
    assert difficulty_ordering("kl", late).bin_mean == pytest.approx(1.0)
    trajectory = random_trajectory()
    for first, *others in by_difficulty(signal("kl", trajectory), trajectory).values:
        assert first is None
        assert None not in others


@pytest.mark.parametrize(("name", "sign"), [("entropy", 1), ("margin", -1), ("top1", -1), ("logit_change", 1)])
def test_the_sign_makes_harder_look_harder(name: str, sign: int) -> None:
    """Bin means rise with difficulty at loop 1, and at loop 2 the middle bins are swapped: rho 1 and 0.8."""
    trajectory = with_signal(name, [[1.0, 1.0], [2.0, 3.0], [3.0, 2.0], [4.0, 4.0]], [1, 2, 3, 4])
    over_loops = 0.8 if name == "logit_change" else 0.9  # convergence has no loop 1
    assert difficulty_ordering(name, trajectory).bin_mean == pytest.approx(sign * over_loops)


def test_bin_means_hide_the_scatter_of_examples() -> None:
    trajectory = with_signal("entropy", [[0.0], [3.0], [1.0], [4.0]], [1, 1, 2, 2])
    ordering = difficulty_ordering("entropy", trajectory)
    assert ordering.bin_mean == pytest.approx(1.0)
    assert ordering.per_example == pytest.approx(0.447, abs=1e-3)


def test_fractional_difficulties_stay_apart_and_continuous_ones_are_binned() -> None:
    trajectory = with_signal("entropy", [[1.0], [2.0], [3.0]], [0.25, 0.75, 1.25])
    assert by_difficulty(trajectory.correct, trajectory).levels == [0.25, 0.75, 1.25]
    rng = np.random.default_rng(0)
    continuous = random_trajectory(rows=1000, difficulty=rng.random(1000))
    table = by_difficulty(continuous.correct, continuous)
    assert table.counts == [100] * 10
    assert table.levels == sorted(table.levels)


def test_a_constant_signal_or_one_bin_has_no_order() -> None:
    assert difficulty_ordering("entropy", with_signal("entropy", [[0.1]] * 7, [1, 1, 1, 2, 2, 3, 3])).bin_mean is None
    assert difficulty_ordering("entropy", with_signal("entropy", [[1.0], [2.0]], [1, 1])).per_example is None
