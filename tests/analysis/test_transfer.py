"""Rules across trajectories: what is carried over, what is refused, and that no test data choose anything."""

from dataclasses import replace

import numpy as np
import pytest
from simulated import pair

import loopscope as ls
from loopscope.analysis.gaps import EQUIVALENCE_MARGIN
from loopscope.analysis.transfer import TransferResult, fitted_rules
from loopscope.frontier import sweep

Both = tuple[ls.Trajectory, ls.Trajectory]
X = 0.85
READS = ls.FittedGate(weight=np.array([2.0, 0.0]), bias=np.array(-7.0))  # the first of two states


def recorded(seed: int = 0, width: int = 2, rows: int = 300, **changes: object) -> Both:
    """Whose first state is the confidence of the answer, so that a gate can read it."""
    both = pair(right=0.9, rows=rows, loops=3, seed=seed, **changes)
    made = []
    for each in both:
        assert each.logits is not None
        states = np.zeros((*each.logits.shape[:2], width))
        states[..., 0] = each.logits.max(axis=2)
        made.append(replace(each, hidden=states, gate_logits=None))
    return made[0], made[1]


def scaled(both: Both, factor: float) -> Both:
    """The same answers, with logits that are larger throughout."""
    made = [replace(each, logits=factor * each.logits) for each in both if each.logits is not None]
    return made[0], made[1]


def few(both: Both) -> Both:
    """So few examples that no stoppers are learned, which take longest."""
    return both[0].take(np.arange(99)), both[1].take(np.arange(99))


def by_pair(found: list[TransferResult], readout: str) -> dict[tuple[str, str], TransferResult]:
    return {(each.fitted_on, each.stops): each for each in found if each.readout == readout}


def test_a_threshold_is_carried_over_and_what_a_signal_says_apart_from_it() -> None:
    """Three times the logits are three times the margin: its threshold fits no more, and what it says still does."""
    a = few(recorded(0))
    found = ls.transfer({"a": a, "b": scaled(few(recorded(1)), 3.0)}, target=X)
    (readout,) = {each.readout for each in found if each.fitted_on == "a"}
    cells = by_pair(found, readout)
    home, abroad = cells["a", "a"], cells["a", "b"]
    assert home.gap is not None
    assert home.selected is not None
    assert (home.gap.value, home.gap.low, home.gap.high) == (0, 0, 0)
    assert (home.selected.accuracy.value, home.selected.loops.value) == (0, 0)
    assert abroad.gap is not None
    assert abroad.selected is not None
    assert abroad.gap.low <= 0 <= abroad.gap.high
    assert abroad.selected.accuracy.high < 0  # three times as confident, so it exits too early
    assert abroad.selected.loops.high < 0
    validation, test = a
    policy = ls.ExitPolicy(readout, home.threshold)
    loops = policy.exit_loops(test)
    assert home.average_loops == pytest.approx(loops.mean())
    assert home.accuracy == pytest.approx(test.correct[np.arange(99), loops - 1].mean())
    reached = sweep(readout, validation, test).calibration_depth_at(X)
    assert policy.exit_loops(validation).mean() == pytest.approx(reached)


def test_a_gate_carries_over_where_states_mean_the_same_and_not_where_they_do_not() -> None:
    same, turned = few(recorded(1)), [replace(each, hidden=-each.hidden) for each in few(recorded(2))]
    models = {"a": few(recorded(0)), "same": same, "turned": (turned[0], turned[1])}
    found = by_pair(ls.transfer(models, {"a": {"own": READS}}, X), "gate:own")
    assert [stops for _, stops in found] == ["a", "same", "turned"]
    home, alike, other = found.values()
    for each in (home, alike):
        assert each.gap is not None
        assert each.gap.low <= EQUIVALENCE_MARGIN
    assert other.gap is not None
    assert other.gap.low > EQUIVALENCE_MARGIN
    assert other.gap.first == "gate:own"
    assert other.gap.second not in ("gate:own", "labels known")
    assert "gate:own of a on turned: +" in str(other)


def test_what_does_not_fit_a_model_is_refused_there_in_a_sentence() -> None:
    wide, stateless = few(recorded(1, width=3)), [replace(each, hidden=None) for each in few(recorded(2))]
    models = {"a": few(recorded(0)), "wide": wide, "stateless": (stateless[0], stateless[1])}
    found = by_pair(ls.transfer(models, {"a": {"own": READS}}, X), "gate:own")
    assert found["a", "wide"].refused == "The gate reads states of width 2, and these have 3."
    assert "record it with --hidden" in found["a", "stateless"].refused
    assert (found["a", "wide"].gap, found["a", "wide"].selected) == (None, None)
    assert str(found["a", "wide"]).endswith("width 2, and these have 3.")
    assert not found["a", "a"].refused
    deep = pair(right=0.9, rows=99, loops=5)
    chance = [replace(each, labels=np.roll(each.labels, 1)) for each in few(recorded(3))]
    found = ls.transfer({"a": recorded(0, rows=120), "deep": deep, "chance": (chance[0], chance[1])}, target=X)
    stoppers = by_pair(found, "stopper:induction")
    assert "fitted to 3 loops, and here full depth is 5" in stoppers["a", "deep"].refused
    assert not stoppers["a", "a"].refused
    assert all("No verdict" in each.refused for each in found if each.stops == "chance")


def test_stoppers_read_every_signal_but_the_gate_s() -> None:
    validation = recorded(0, rows=120)[0]
    gated = replace(validation, gate_logits=np.zeros((120, 3)))
    rules = {rule.readout: rule for rule in fitted_rules(gated, {}, ls.Target(X))}
    assert list(rules)[1:] == ["gate", "stopper:induction", "stopper:classifier"]
    stopper = rules["stopper:induction"].gate
    assert isinstance(stopper, ls.Stopper)
    assert "gate" not in stopper.signals
    assert "hidden_change" in stopper.signals
    out_of_bag = ls.ExitPolicy("stopper:induction", rules["stopper:induction"].threshold, stopper)
    assert out_of_bag.exit_loops(recorded(1, rows=120)[1]).min() >= 1


def test_test_data_choose_nothing() -> None:
    """Other labels in a test recording change what is found there, and nothing of what was chosen."""
    a, b = few(recorded(0)), few(recorded(1))
    shuffled = replace(b[1], labels=np.where(np.arange(99) % 3, b[1].labels, (b[1].required_labels + 1) % 4))
    first = by_pair(ls.transfer({"a": a, "b": b}, {"a": {"own": READS}}, X), "gate:own")["a", "b"]
    second = by_pair(ls.transfer({"a": a, "b": (b[0], shuffled)}, {"a": {"own": READS}}, X), "gate:own")["a", "b"]
    assert first.threshold == second.threshold
    assert first.average_loops == second.average_loops
    assert first.accuracy != second.accuracy
    assert first.selected is not None
    assert second.selected is not None
    assert first.selected.second == second.selected.second
    other_test = by_pair(ls.transfer({"a": (a[0], b[1]), "b": b}, {"a": {"own": READS}}, X), "gate:own")["a", "b"]
    assert other_test == first  # the test data of the model that brings the rule have no part in it


def test_leaks_are_refused() -> None:
    a, b = few(recorded(0)), few(recorded(1))
    texts = [[f"{split} {row}" for row in range(99)] for split in ("validation", "test")]
    named = [replace(each, examples=names) for each, names in zip(a, texts, strict=True)]
    leaking = [replace(each, examples=names) for each, names in zip(b, texts[::-1], strict=True)]
    with pytest.raises(ls.UserError, match="of the test recording of 'b' have the same texts as examples of the valid"):
        ls.transfer({"a": (named[0], named[1]), "b": (leaking[0], leaking[1])}, target=X)
    with pytest.raises(ls.UserError, match="There are gates of .c."):
        ls.transfer({"a": a, "b": b}, {"c": {"own": READS}})
    fitted = ls.FittedGate(weight=np.ones(2), bias=np.array(0.0), provenance={"weights_sha256": "0" * 64})
    of_a = [replace(each, provenance={"weights_sha256": "a" * 64}) for each in a]
    with pytest.raises(ls.UserError, match="fitted to the states of another model"):
        ls.transfer({"a": (of_a[0], of_a[1]), "b": b}, {"a": {"own": fitted}})
