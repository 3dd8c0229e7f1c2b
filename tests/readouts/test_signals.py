"""Signals: equal to their definitions, causal, blind to missing classes, exact near convergence."""

import hypothesis.strategies as st
import numpy as np
import pytest
from conftest import random_trajectory
from hypothesis import given, settings

import loopscope as ls
from loopscope.readouts.signals import SIGNALS
from loopscope.training.objectives import log_exit_distribution


def by_definition(name: str, tr: ls.Trajectory, row: int, t: int) -> float:
    """Appendix B, one example and loop at a time."""
    z, r = tr.logits[row], tr.hidden[row]
    p = np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)
    match name:
        case "patience":
            answers = z.argmax(axis=1).tolist()
            return next(k for k in range(t + 1) if k == t or answers[t - k - 1] != answers[t])
        case "entropy":
            return float(-sum(x * np.log(x) for x in p[t]))
        case "top1":
            return float(max(p[t]))
        case "margin":
            first, second = sorted(z[t])[::-1][:2]
            return float(first - second)
        case "gate":
            survive = np.prod([1 - 1 / (1 + np.exp(-g)) for g in tr.gate_logits[row, : t + 1]])
            return float(1 - survive) if t + 1 < tr.num_loops else 1.0
        case "halting":
            spent = sum(1 / (1 + np.exp(-g)) for g in tr.gate_logits[row, : t + 1])
            return float(spent) if spent < 0.99 else 1.0
    if t == 0:
        return float("nan")
    match name:
        case "kl":
            return float(sum(a * np.log(a / b) for a, b in zip(p[t], p[t - 1], strict=True)))
        case "logit_change":
            return float(np.linalg.norm(z[t] - z[t - 1]))
        case "hidden_change":
            return float(np.linalg.norm(r[t] - r[t - 1]))
        case "hidden_cosine":
            return float(1 - r[t] @ r[t - 1] / np.linalg.norm(r[t]) / np.linalg.norm(r[t - 1]))
    if t == 1:
        return float("nan")
    match name:
        case "hidden_acceleration":
            return float(np.linalg.norm(r[t] - 2 * r[t - 1] + r[t - 2]))
        case "settling":
            first, second = sorted(z[t])[::-1][:2]
            step, last = np.abs(z[t] - z[t - 1]).max(), np.abs(z[t - 1] - z[t - 2]).max()
            ratio = min(step / last, 0.99)
            return float(first - second - 2 * step * ratio / (1 - ratio))
    raise AssertionError(name)


@pytest.mark.parametrize("name", [name for name, each in ls.READOUTS.items() if each.takes == "threshold"])
def test_signals_are_their_definitions(name: str) -> None:
    trajectory = random_trajectory(rows=40)
    expected = [[by_definition(name, trajectory, row, t) for t in range(4)] for row in range(40)]
    assert ls.signal(name, trajectory) == pytest.approx(np.array(expected), nan_ok=True, rel=1e-9)


@pytest.mark.parametrize("name", [name for name, (source, _) in SIGNALS.items() if source == "logits"])
def test_missing_classes_count_in_no_signal(name: str) -> None:
    """A question with three choices in a set with five gives what it gives in a set with three."""
    small = random_trajectory(classes=3)
    logits = np.full((200, 4, 5), -np.inf)
    logits[..., :3] = small.logits
    large = random_trajectory(logits=logits, labels=small.labels)
    assert ls.signal(name, large) == pytest.approx(ls.signal(name, small), nan_ok=True, rel=1e-12)
    assert large.cross_entropy == pytest.approx(small.cross_entropy)


@settings(max_examples=50)
@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=7))
def test_the_gate_s_cdf_rises_to_one_at_the_last_loop_and_not_before(gates: list[float]) -> None:
    trajectory = ls.Trajectory(logits=np.zeros((1, len(gates), 2)), labels=[0], gate_logits=[gates])
    cdf = ls.signal("gate", trajectory)[0]
    assert (np.diff(cdf) >= 0).all()
    assert (cdf[:-1] < 1).all()
    assert cdf[-1] == 1


def test_the_gate_s_cdf_is_that_of_training() -> None:
    import torch

    trajectory = random_trajectory()
    q = log_exit_distribution(torch.from_numpy(np.array(trajectory.gate_logits)).T).exp().T.numpy()
    assert ls.signal("gate", trajectory) == pytest.approx(q.cumsum(axis=1))


def test_near_convergence_there_is_more_than_rounding_noise() -> None:
    """Two predictions that differ by 1e-5 in a float32 logit of 20: KL is about 1e-10 times a probability."""
    logits = np.array([[[20.0, 18.0, 0.0], [20.0 + 1e-5, 18.0, 0.0]]], dtype=np.float32)
    wide = logits.astype(np.float64)
    p = np.exp(wide - 20) / np.exp(wide - 20).sum(axis=2, keepdims=True)
    expected = 0.5 * p[0, 0, 0] * (1 - p[0, 0, 0]) * (wide[0, 1, 0] - wide[0, 0, 0]) ** 2
    trajectory = ls.Trajectory(logits=logits, labels=[0])
    assert ls.signal("kl", trajectory)[0, 1] == pytest.approx(expected, rel=1e-3)


def test_constant_states_have_not_moved() -> None:
    trajectory = random_trajectory(hidden=np.zeros((200, 4, 6)))
    assert (ls.signal("hidden_change", trajectory)[:, 1:] == 0).all()
    assert np.isfinite(ls.signal("hidden_cosine", trajectory)[:, 1:]).all()


def test_what_is_not_there_is_explained() -> None:
    bare = random_trajectory(hidden=None, gate_logits=None)
    for name, words in [("gate", "has no gate"), ("hidden_cosine", "--hidden"), ("mood", "no signal 'mood'")]:
        with pytest.raises(ls.UserError, match=words):
            ls.signal(name, bare)


@pytest.mark.parametrize("logits", [np.zeros((4, 5, 3)), np.eye(3)[[[0, 0, 1, 1, 2]] * 4] * 1e30])
def test_settling_is_finite_where_nothing_moves_and_where_all_jumps(logits: np.ndarray) -> None:
    values = ls.signal("settling", ls.Trajectory(logits=logits))
    assert np.isnan(values[:, :2]).all()
    assert np.isfinite(values[:, 2:]).all()
