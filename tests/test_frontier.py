"""Sweeps: exactly the policy at every threshold, on a fine grid or the paper's, and never calibrated on test data."""

import json
import time
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import vl_convert
from conftest import random_trajectory
from hypothesis import given, settings

import loopscope as ls
from loopscope.frontier import accuracy_and_loops, choose, curve, swept_thresholds
from loopscope.threshold_grids import GATE_GRID

VALIDATION, TEST = random_trajectory(seed=1, split="validation"), random_trajectory(seed=2, split="test")


@pytest.mark.parametrize("name", ls.READOUTS)
def test_every_point_is_the_policy_replayed(name: str) -> None:
    frontier = ls.sweep(name, calibration=VALIDATION, evaluation=TEST)
    for point, threshold in enumerate(frontier.thresholds):
        policy = ls.ExitPolicy(name, None if name == "oracle" else float(threshold))
        for trajectory, accuracy, loops in [
            (TEST, frontier.accuracy, frontier.average_loops),
            (VALIDATION, frontier.calibration_accuracy, frontier.calibration_average_loops),
        ]:
            assert (accuracy[point], loops[point]) == accuracy_and_loops(policy, trajectory)


@settings(max_examples=40)
@given(
    st.sampled_from(["margin", "kl"]),
    st.lists(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=3, max_size=3), min_size=1, max_size=12),
    st.lists(st.sampled_from([-1.0, 0.0, 0.25, 0.4, 0.5, 1.0, 2.0]), min_size=1, max_size=9),
)
def test_ties_duplicates_and_unordered_thresholds_are_exact(
    name: str, values: list[list[float]], thresholds: list[float]
) -> None:
    answers = np.random.default_rng(len(values)).integers(0, 2, (len(values), 3))
    trajectory = ls.Trajectory(labels=[0] * len(values), predictions=answers, signals={name: np.array(values)})
    accuracy, loops = curve(name, thresholds, trajectory)
    for point, threshold in enumerate(thresholds):
        assert (accuracy[point], loops[point]) == accuracy_and_loops(ls.ExitPolicy(name, threshold), trajectory)


@pytest.mark.parametrize("name", [name for name in ls.READOUTS if name not in ("fixed", "oracle")])
def test_the_fine_grid_goes_from_the_laxest_threshold_to_full_depth_and_misses_little(name: str) -> None:
    fine, paper = (ls.sweep(name, VALIDATION, TEST, grid=grid) for grid in ("fine", "paper"))
    whole = name == "patience"  # between the whole numbers that there are
    assert len(fine.thresholds) == (2 + TEST.num_loops - 1 if whole else 402)
    assert np.isfinite(fine.thresholds).all()  # a policy file can hold each
    last = fine.average_loops.argmax()
    assert fine.average_loops[last] == TEST.num_loops
    assert fine.accuracy[last] == TEST.correct[:, -1].mean()
    for accuracy in np.linspace(0.3, 0.8, 21):
        ours, theirs = fine.depth_at(accuracy), paper.depth_at(accuracy)
        assert theirs is None or (ours is not None and ours <= theirs + 0.03)


def test_full_depth_is_a_policy_that_can_be_saved_and_d_at_x_has_one(tmp_path: Path) -> None:
    frontier = ls.sweep("margin", VALIDATION, TEST)
    policy = ls.ExitPolicy("margin", float(frontier.thresholds[-1]))
    policy.save(tmp_path / "policy.json")
    assert set(ls.ExitPolicy.load(tmp_path / "policy.json").exit_loops(TEST)) == {TEST.num_loops}
    assert str(policy) == "margin at full depth"
    threshold = frontier.threshold_at(0.6)
    assert threshold is not None
    accuracy, loops = accuracy_and_loops(ls.ExitPolicy("margin", threshold), TEST)
    assert accuracy >= 0.6
    assert loops == frontier.depth_at(0.6)
    assert frontier.threshold_at(1.0) is None


def test_a_notebook_shows_frontiers_in_a_line_and_as_a_chart() -> None:
    frontier, fixed = (ls.sweep(name, VALIDATION, TEST) for name in ("margin", "fixed"))
    point = frontier.select()
    for shown in (repr(frontier), repr(point), repr(point.policy)):
        assert "margin" in shown
        assert len(shown) < 160
        assert "array" not in shown
    bundle = frontier.plot(fixed)._repr_mimebundle_()
    chart = bundle["application/vnd.vegalite.v5+json"]
    rows = chart["data"]["values"]
    assert {row["readout"] for row in rows} == {"margin", "fixed"}
    drawn = {(row["average loops"], row["accuracy"]) for row in rows if row["readout"] == "margin"}
    assert drawn == set(zip(frontier.average_loops.tolist(), frontier.accuracy.tolist(), strict=True))
    json.dumps(chart, allow_nan=False)
    assert vl_convert.vegalite_to_svg(chart).startswith("<svg")


def test_the_paper_s_grid_is_quantiles_of_the_pooled_calibration_signal_or_the_gate_s_own() -> None:
    for name in ("entropy", "margin", "kl", "hidden_change"):
        values = ls.signal(name, VALIDATION)
        expected = np.quantile(values[~np.isnan(values)], np.linspace(0.005, 0.995, 51))
        assert np.array_equal(ls.sweep(name, VALIDATION, TEST, grid="paper").thresholds, expected)
    assert np.array_equal(ls.sweep("gate", VALIDATION, TEST, grid="paper").thresholds, np.linspace(0.01, 1, 100))
    ls.sweep("gate", VALIDATION, TEST, grid="paper").thresholds[:] = 7  # nobody else's grid
    assert GATE_GRID.max() == 1
    assert ls.sweep("fixed", VALIDATION, TEST).thresholds.tolist() == [1, 2, 3, 4]
    assert len(ls.sweep("oracle", VALIDATION, TEST).thresholds) == 1
    one, other = random_trajectory(seed=1, loops=1), random_trajectory(seed=2, loops=1)
    assert set(ls.sweep("margin", one, other).average_loops.tolist()) == {1.0}


def test_d_at_x_is_the_least_depth_that_reaches_it_and_calibration_selects() -> None:
    """The most accurate on calibration data, and then the shallowest."""
    frontier = ls.Frontier("margin", *(np.array(values) for values in FRONTIER))
    assert [frontier.depth_at(accuracy) for accuracy in (0.9, 0.95, 0.96)] == [2.0, 2.5, None]
    point = frontier.select()
    assert point.policy == ls.ExitPolicy("margin", 0.3)
    assert (point.accuracy, point.average_loops) == (0.9, 2.0)
    assert (point.calibration_accuracy, point.calibration_average_loops) == (0.97, 2.1)


FRONTIER = (
    [0.1, 0.2, 0.3, 0.4],  # thresholds
    [0.8, 0.95, 0.9, 0.95],  # accuracy
    [1.5, 3.0, 2.0, 2.5],  # average loops
    [0.8, 0.97, 0.97, 0.96],  # calibration accuracy
    [1.4, 3.1, 2.1, 2.4],  # calibration average loops
)


def test_inputs_that_were_drawn_twice_are_no_leak() -> None:
    inputs = random_trajectory(seed=11, rows=3000)
    ls.sweep("margin", *(inputs.take(np.random.default_rng(seed).integers(0, 3000, 400)) for seed in (0, 1)))
    constant = 4 * np.eye(3)[np.random.default_rng(1).integers(0, 3, (2, 90, 4))]  # copies within each
    ls.sweep("margin", *(ls.Trajectory(logits=each, labels=np.arange(90) % 3) for each in constant))


@pytest.mark.parametrize(("name", "most"), [("margin", 5), ("gate", 12)])
def test_a_sweep_costs_little_more_than_its_signal(name: str, most: int) -> None:
    """30,000 examples x 6 loops, both measured side by side; the best of several rounds of each.

    On a quiet machine it is once or twice the signal; the gate's signal costs less than sorting it.
    """
    val, test = (random_trajectory(seed=seed, rows=30_000, loops=6, classes=23, hidden=None) for seed in (1, 2))
    signals, sweeps = [], []
    for _ in range(3):
        for trajectory in (val, test):
            trajectory.computed.clear()
        began = time.perf_counter()
        ls.signal(name, val), ls.signal(name, test)
        between = time.perf_counter()
        ls.sweep(name, val, test)
        signals.append(between - began)
        sweeps.append(time.perf_counter() - between)
    assert min(sweeps) < most * min(signals)


@pytest.mark.parametrize("readout", ["margin", "kl"])
def test_a_chosen_threshold_keeps_away_from_equal_examples(readout: str) -> None:
    """Many equal examples sit on a quantile; the chosen policy decides as the quantile does, from a distance."""
    part = random_trajectory(rows=40)
    rows = np.repeat(np.arange(40), 25)
    calibration = part.take(rows)
    policy = choose(readout, calibration)
    values = ls.signal(readout, calibration)[:, :-1]
    assert policy.threshold is not None
    assert np.nanmin(np.abs(values / policy.threshold - 1)) > 1e-5
    accuracies, loops = curve(readout, swept_thresholds(readout, calibration), calibration)
    ours = accuracy_and_loops(policy, calibration)
    assert ours[0] >= accuracies.max() - 1e-12
    assert ours[1] == pytest.approx(loops[accuracies == accuracies.max()].min(), abs=0.03 * 4)
