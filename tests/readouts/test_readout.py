"""Readouts of one's own, and the built-in ones that take a step: one definition, causal, replayed as it runs."""

import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from conftest import forget_readout, random_trajectory
from hypothesis import given, settings
from numpy.typing import NDArray

import loopscope as ls
from loopscope.cli import main
from loopscope.exit_state import RowStates
from loopscope.frontier import choose
from loopscope.readouts import readout as readouts
from loopscope.readouts.replay import replayed
from loopscope.threshold_grids import fine_grid, gap_grid, grid

STEPPED = [name for name, each in ls.READOUTS.items() if each.takes == "threshold"]


def mean_so_far(logits, state):  # type: ignore[no-untyped-def]
    """The mean over the loops of the best logit, of those that there are, with a state that is wider at loop 2."""
    best = np.where(np.isneginf(logits), -1e9, logits).max(axis=1).astype(float)
    if state is None:
        return np.full(len(best), np.nan), (best,)
    total, count = (state[0] + best, state[1] + 1) if len(state) == 2 else (state[0] + best, np.full(len(best), 2.0))
    return total / count, (total, count)


OWN = [
    ls.Readout("mean_so_far", "above", "logits", mean_so_far),
    ls.Readout("sureness", "above", "logits", lambda logits: np.exp(logits - logits.max(axis=1, keepdims=True)).sum(1)),
    ls.Readout("sign_changes", "above", "hidden", lambda now, state: _sign_changes(now, state)),
]


def _sign_changes(now, state):  # type: ignore[no-untyped-def]
    changed = np.zeros(len(now), int) if state is None else state[1] + (np.sign(now) != np.sign(state[0])).sum(axis=1)
    return changed, (now, changed)


def definition(name: str) -> ls.Readout:
    found = readouts.find_readout(name)
    assert found is not None
    return found


ALL = [*map(definition, STEPPED), *OWN]


def source_of(each: ls.Readout, trajectory: ls.Trajectory) -> NDArray:
    return trajectory.predicted if each.reads == "predictions" else getattr(trajectory, str(each.reads))


def some_trajectory(seed: int, loops: int) -> ls.Trajectory:
    """Questions with 2 to 5 choices, whose answers settle."""
    rng = np.random.default_rng(seed)
    whole = random_trajectory(seed, rows=30, loops=loops)
    missing = np.arange(5)[None, None] >= np.maximum(rng.integers(2, 6, 30), whole.labels + 1)[:, None, None]
    logits = np.where(missing, -np.inf, np.array(whole.logits, dtype=np.float32))
    single = {name: np.asarray(getattr(whole, name), np.float32) for name in ("hidden", "gate_logits")}
    return ls.Trajectory(logits=logits.astype(np.float32), labels=whole.labels, **single)


@pytest.mark.parametrize("each", ALL, ids=lambda each: each.name)
@settings(max_examples=8)
@given(st.integers(0, 2**32 - 1), st.integers(1, 7))
def test_live_values_are_those_of_the_replay(each: ls.Readout, seed: int, loops: int) -> None:
    """Rows come at random times, leave at random times, and stand in another order every time."""
    trajectory, rng = some_trajectory(seed, loops), np.random.default_rng(seed)
    values = source_of(each, trajectory)
    expected = replayed(each, values)
    states, waiting = RowStates(each), list(range(trajectory.num_examples))
    active, loop = np.empty(0, int), np.empty(0, int)
    while waiting or len(active):
        new = [waiting.pop() for _ in range(min(len(waiting), int(rng.integers(0, 9))))]
        states.admit(len(new))
        active, loop = np.append(active, new).astype(int), np.append(loop, [0] * len(new)).astype(int)
        order = rng.permutation(len(active))
        states.take(order)
        active, loop = active[order], loop[order] + 1
        if len(active):
            found, now = states.advance(values[active, loop - 1]), expected[active, loop - 1]
            last = loop == loops
            if each.name == "gate":  # that all that is left exits at T is the policy's business
                found, now = found[~last], now[~last]
            assert np.array_equal(found, now, equal_nan=True)
            stays = ~last & (rng.random(len(active)) < 0.8)
            states.take(np.flatnonzero(stays))
            active, loop = active[stays], loop[stays]


@pytest.mark.parametrize("each", ALL, ids=lambda each: each.name)
def test_what_comes_later_changes_nothing(each: ls.Readout) -> None:
    values = np.array(source_of(each, random_trajectory(loops=6)))
    for loop in range(1, 6):
        changed = values.copy()
        changed[:, loop:] = changed[:, loop:][::-1] * (3 if each.reads != "predictions" else 1)
        before, after = replayed(each, values)[:, :loop], replayed(each, changed)[:, :loop]
        assert np.array_equal(before, after, equal_nan=True)


def test_settling_above_0_is_never_overturned_where_steps_shrink() -> None:
    """Every step is at most half of the one before, so what the ratio of two steps bounds is bounded indeed."""
    rng = np.random.default_rng(0)
    steps = rng.uniform(-1, 1, (3000, 9, 4))
    steps /= np.abs(steps).max(axis=2, keepdims=True)
    ratio = rng.uniform(0.1, 0.7, (3000, 1, 1))
    logits = rng.normal(0, 2, (3000, 1, 4)) + np.cumsum(steps * ratio ** np.arange(9)[:, None], axis=1)
    trajectory = ls.Trajectory(logits=logits)
    settled = ls.signal("settling", trajectory) > 1e-9
    rows, loops = np.nonzero(settled[:, :-1])
    assert 0.1 < settled[:, 3].mean() < 0.95
    assert (trajectory.predicted[rows, loops] == trajectory.predicted[rows, -1]).all()
    wrong = ls.signal("margin", trajectory)[:, 2] > 0.3  # a margin alone does not say so
    assert (trajectory.predicted[wrong, 2] != trajectory.predicted[wrong, -1]).any()


# ---- registering


def test_the_same_lines_may_run_again_and_another_definition_may_not(forgotten: None) -> None:
    def cell(factor: float) -> ls.Readout:
        @ls.readout("scaled", exits="above", reads="gate_logits")
        def scaled(gate_logits):  # type: ignore[no-untyped-def]
            return factor * gate_logits

        return scaled

    trajectory = random_trajectory()
    cell(1.0)
    assert np.array_equal(ls.signal("scaled", trajectory), trajectory.gate_logits)
    cell(2.0)
    assert np.array_equal(ls.signal("scaled", trajectory), 2 * trajectory.gate_logits)  # nothing old is left
    for name in ("scaled", "margin", "patience", "fixed", "oracle"):
        with pytest.raises(ls.UserError, match=f"another readout '{name}'"):
            ls.register_readout(ls.Readout(name, "above", "gate_logits", lambda now: now))


@pytest.mark.parametrize(
    ("step", "takes_one"),
    [
        (lambda *given: (given[0], given[:1]), True),
        (lambda now, state: (now, (now,)), True),
        (lambda now, state=None: (now, (now,)), True),
        (np.abs, False),
        (lambda now, *, k=1: now, False),
        (lambda now, k=3: now, False),
    ],
)
def test_a_step_with_room_for_a_state_gets_one(step, takes_one: bool) -> None:  # type: ignore[no-untyped-def]
    values, mine = np.ones((4, 2), np.float32), ls.Readout("roomy", "above", "gate_logits", step)
    assert mine.looks_back is takes_one
    assert np.array_equal(replayed(mine, values), values)


@pytest.mark.parametrize(("rows", "width"), [(1, 300), (7, 33), (300, 257)])
def test_a_step_that_rounds_in_float32_is_not_refused(rows: int, width: int) -> None:
    rng = np.random.default_rng(rows)
    direction = rng.normal(size=width).astype(np.float32)
    values = rng.normal(size=(rows, 3, width)).astype(np.float32)
    assert replayed(ls.Readout("along", "above", "hidden", lambda now: now @ direction), values).shape == (rows, 3)


def test_an_installed_package_is_asked_for_an_unknown_name(forgotten: None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def installed(group: str, name: str) -> list[EntryPoint]:
        asked.append((group, name))
        return [EntryPoint(name, f"{__name__}:OFFERED", group)] if name in ("offered", "mislabelled") else []

    monkeypatch.setattr(readouts, "entry_points", installed)
    assert ls.ExitPolicy("margin", 1.0).readout == "margin"
    assert not asked
    with pytest.raises(ls.UserError, match="no readout 'mood'"):
        ls.ExitPolicy("mood", 1.0)
    assert ls.ExitPolicy("offered", 1.0).exit_loops(random_trajectory()).max() <= 4
    assert set(asked) == {("loopscope.readouts", "mood"), ("loopscope.readouts", "offered")}
    with pytest.raises(ls.UserError, match="no readout 'mislabelled'"):
        ls.ExitPolicy("mislabelled", 1.0)


OFFERED = ls.Readout("offered", "above", "gate_logits", lambda now: now)


def test_a_file_never_imports_what_it_names(forgotten: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ls.register_readout(OFFERED)
    ls.ExitPolicy("offered", 0.5).save(tmp_path / "policy.json")
    assert ls.ExitPolicy.load(tmp_path / "policy.json") == ls.ExitPolicy("offered", 0.5)
    forget_readout("offered")
    with pytest.raises(ls.UserError, match=r"policy.json exits by the readout 'offered', which is not installed: imp"):
        ls.ExitPolicy.load(tmp_path / "policy.json")
    (tmp_path / "trap.py").write_text("raise SystemExit('imported')\n")
    text = (tmp_path / "policy.json").read_text().replace("offered", "trap:trap")
    (tmp_path / "policy.json").write_text(text)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ls.UserError, match="not installed"):
        ls.ExitPolicy.load("policy.json")


def test_the_command_line_imports_what_was_typed(
    forgotten: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("typed_here.py").write_text(
        "import loopscope as ls\n\n\n"
        "@ls.readout('doubt', exits='below', reads='logits')\ndef doubt(logits):\n    return -logits.max(axis=1)\n"
    )
    for seed, split in ((1, "validation"), (2, "test")):
        random_trajectory(seed, rows=400, split=split).save(split)
    assert main(["calibrate", "validation", "--readout", "typed_here:doubt", "--max-drop", "0.5"]) == 0
    assert ls.ExitPolicy.load("policy.json").readout == "doubt"
    assert main(["sweep", "validation", "test", "--readout", "nowhere:doubt"]) == 2
    assert "No module named 'nowhere'" in capsys.readouterr().err
    forget_readout("doubt")
    del sys.modules["typed_here"]
    assert main(["check", "test", "--policy", "policy.json"]) == 2
    assert "not installed" in capsys.readouterr().err
    assert main(["check", "test", "--policy", "policy.json", "--with-readout", "typed_here:doubt"]) in (0, 1)
    del sys.modules["typed_here"]


# ---- signals that came with a recording


def foreign(seed: int, split: str) -> ls.Trajectory:
    trajectory = random_trajectory(seed, rows=1500, split=split)
    margin = np.array(ls.signal("margin", trajectory))
    margin[:, 0] = np.nan
    return ls.Trajectory(
        labels=trajectory.labels, predictions=trajectory.predicted, signals={"mine": -margin}, split=split
    )


def test_a_recorded_signal_is_swept_and_calibrated_once_it_is_known_when_it_exits(forgotten: None) -> None:
    validation, test = foreign(1, "validation"), foreign(2, "test")
    ls.register_readout(ls.Readout("mine", exits="below"))
    assert ls.register_readout(ls.Readout("mine", exits="below")).reads is None  # the same again
    frontier = ls.sweep("mine", validation, test)
    assert frontier.average_loops.min() < 2.1
    policy = ls.calibrate(validation, 0.2, readout="mine")
    assert 2 <= policy.exit_loops(test).mean() < 4
    assert "mine" in ls.calibrate(validation, 0.2).guarantee.candidates


# ---- whole numbers


def counting(seed: int, sign: int = 1) -> ls.Trajectory:
    trajectory = random_trajectory(seed, rows=800, loops=6, split=("test", "validation")[seed % 2])
    steady = np.array(ls.signal("patience", trajectory), dtype=np.int64)
    return ls.Trajectory(
        labels=trajectory.labels,
        predictions=trajectory.predicted,
        signals={"whole": sign * steady},
        split=trajectory.split,
    )


@pytest.mark.parametrize(("exits", "sign"), [("above", 1), ("below", -1)])
def test_thresholds_of_whole_numbers_lie_between_them(exits: str, sign: int, forgotten: None) -> None:
    ls.register_readout(ls.Readout("whole", exits=exits))  # type: ignore[arg-type]
    validation, test = counting(1, sign), counting(2, sign)
    grids = [make("whole", validation) for make in (grid, fine_grid, gap_grid)]
    chosen = [choose("whole", validation), ls.calibrate(validation, 0.3, readout="whole")]
    chosen.append(ls.sweep("whole", validation, test).select().policy)
    for threshold in (*np.concatenate(grids), *(policy.threshold for policy in chosen)):
        assert np.isinf(threshold) or threshold % 1 == 0.5
    loops = [ls.ExitPolicy("whole", float(threshold)).exit_loops(validation).mean() for threshold in grids[0]]
    assert sorted(loops, reverse=exits == "below") == loops
    assert len(set(loops)) == 6
    assert min(loops) == 1


@pytest.mark.parametrize("name", STEPPED)
def test_a_recorded_signal_is_what_its_name_says_where_that_can_be_told(name: str) -> None:
    """Live the built-in definition would run; a signal of another meaning would exit by it in the replay only."""
    whole = random_trajectory(rows=100, loops=5)
    kept = {each: getattr(whole, each) for each in ("logits", "labels", "hidden", "gate_logits")}
    expected = np.array(ls.signal(name, whole))
    rounded = ls.Trajectory(**kept, signals={name: expected.astype(np.float32)})
    assert ls.signal(name, rounded) == pytest.approx(expected, rel=1e-6, nan_ok=True)
    foreign = expected.copy()
    foreign[7, 3] -= 0.01
    with pytest.raises(ls.UserError, match=f"recorded signal '{name}' is not what the readout '{name}' makes of the"):
        ls.signal(name, ls.Trajectory(**kept, signals={name: foreign}))
    alone = ls.Trajectory(labels=whole.labels, predictions=whole.predicted, signals={name: foreign})
    assert ls.signal(name, alone)[7, 3] == pytest.approx(foreign[7, 3])  # nothing there says otherwise


def test_a_policy_keeps_the_definition_that_it_was_made_with(forgotten: None, tmp_path: Path) -> None:
    def once(logits):  # type: ignore[no-untyped-def]
        return logits.max(axis=1)

    def twice(logits):  # type: ignore[no-untyped-def]
        return 2 * logits.max(axis=1)

    def register(*definition) -> None:  # type: ignore[no-untyped-def]
        forget_readout("largest")
        ls.register_readout(ls.Readout("largest", *definition))

    register("above", "logits", once)
    validation, test = (random_trajectory(n, rows=600, split=each) for n, each in ((1, "validation"), (2, "test")))
    chosen = ls.sweep("largest", validation, test).select().policy
    made = [ls.calibrate(validation, 0.5, 0.8, readout="largest"), choose("largest", validation), chosen]
    for other in (("above", "logits", twice), ("below", "logits", once), ("above", "hidden", once)):
        register(*other)
        for number, policy in enumerate(made):
            with pytest.raises(ls.UserError, match="another definition of the readout 'largest'"):
                policy.exit_loops(test)
            policy.save(tmp_path / f"{number}.json")  # what it was made with, not what the name means by now
    register("above", "logits", once)
    assert [ls.ExitPolicy.load(tmp_path / f"{number}.json") for number in range(3)] == made
    assert ls.calibrate(validation, 0.5, 0.8, readout="margin").scope.definition is None
