"""Readouts: does a policy exit where its rule says?"""

import numpy as np
import pytest
from conftest import random_trajectory

import loopscope as ls
from loopscope.exits.signals import CONVERGENCE


def with_signal(name: str, values: list[list[float]]) -> ls.Trajectory:
    rows, loops = np.shape(values)
    return ls.Trajectory(
        logits=None, labels=[0] * rows, predictions=np.zeros((rows, loops), int), signals={name: np.array(values)}
    )


@pytest.mark.parametrize("name", ["top1", "margin", "gate"])
def test_exits_at_the_first_loop_at_or_above(name: str) -> None:
    trajectory = with_signal(name, [[0.1, 0.5, 0.9], [0.6, 0.2, 0.1], [0.1, 0.2, 0.3], [0.1, 0.7, 0.2]])
    assert ls.ExitPolicy(readout=name, threshold=0.5).exit_loops(trajectory).tolist() == [2, 1, 3, 2]


@pytest.mark.parametrize("name", ["entropy", *CONVERGENCE])
def test_exits_at_the_first_loop_at_or_below(name: str) -> None:
    """A convergence signal that was recorded with a value at loop 1 does not decide there either."""
    trajectory = with_signal(name, [[0.9, 0.5, 0.1], [0.4, 0.8, 0.9], [0.9, 0.8, 0.7], [0.9, 0.3, 0.8]])
    expected = [2, 3, 3, 2] if name in CONVERGENCE else [2, 1, 3, 2]
    assert ls.ExitPolicy(readout=name, threshold=0.5).exit_loops(trajectory).tolist() == expected


@pytest.mark.parametrize("name", CONVERGENCE)
def test_convergence_decides_from_loop_2_on(name: str) -> None:
    """However lax the threshold, there is nothing to compare loop 1 with."""
    loops = ls.ExitPolicy(name, np.inf).exit_loops(random_trajectory())
    assert (loops == 2).all()


def test_fixed_depth_and_the_oracle() -> None:
    labels = np.zeros(3, int)
    predictions = np.array([[1, 0, 1], [1, 1, 1], [0, 1, 1]])
    trajectory = ls.Trajectory(logits=None, labels=labels, predictions=predictions)
    assert ls.ExitPolicy("fixed", 2).exit_loops(trajectory).tolist() == [2, 2, 2]
    assert ls.ExitPolicy("oracle").exit_loops(trajectory).tolist() == [2, 3, 1]


def test_a_gate_threshold_of_1_means_the_last_loop() -> None:
    """Even where float64 cannot tell the CDF from 1."""
    trajectory = random_trajectory(gate_logits=np.full((200, 4), 60.0))
    assert (ls.ExitPolicy("gate", 1.0).exit_loops(trajectory) == 4).all()
    assert (ls.ExitPolicy("gate", 0.99).exit_loops(trajectory) == 1).all()
    recorded = with_signal("gate", [[1.0, 1.0, 0.5]])
    assert ls.ExitPolicy("gate", 1.0).exit_loops(recorded).tolist() == [3]


@pytest.mark.parametrize("name", [name for name in ls.READOUTS if name not in ("fixed", "oracle")])
@pytest.mark.parametrize("threshold", [-np.inf, np.inf, 0.3])
def test_exit_loops_are_between_1_and_t(name: str, threshold: float) -> None:
    loops = ls.ExitPolicy(name, threshold).exit_loops(random_trajectory())
    assert loops.shape == (200,)
    assert np.issubdtype(loops.dtype, np.integer)
    assert loops.min() >= 1
    assert loops.max() <= 4


@pytest.mark.parametrize(
    ("readout", "threshold", "words"),
    [
        ("mood", 1.0, "no readout 'mood'"),
        ("margin", None, "needs a threshold"),
        ("fixed", 0, "whole number"),
        ("oracle", 1.0, "takes no threshold"),
    ],
)
def test_impossible_policies_are_refused(readout: str, threshold: float | None, words: str) -> None:
    with pytest.raises(ls.UserError, match=words):
        ls.ExitPolicy(readout, threshold)
