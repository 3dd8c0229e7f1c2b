"""Readouts of one's own, and the built-in ones that take a step: one definition, causal, replayed as it runs."""

import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from conftest import random_trajectory
from hypothesis import given, settings
from numpy.typing import NDArray

import loopscope as ls
from loopscope.cli import main
from loopscope.exits import readouts
from loopscope.exits.exit_state import ExitState, RowStates
from loopscope.exits.recorded_signals import replayed
from loopscope.exits.sweep import choose
from loopscope.exits.thresholds import available_readouts, fine_grid, gap_grid, grid

STEPPED = [name for name, kind in ls.READOUTS.items() if kind in ("above", "below")]


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
@settings(max_examples=15, deadline=None)
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


def test_the_new_built_in_signals_are_their_definitions() -> None:
    trajectory = random_trajectory(rows=60, loops=6, classes=3)
    patience, settling, bend = (ls.signal(name, trajectory) for name in STEPPED[-3:])
    for row in range(60):
        z, r, answers = trajectory.logits[row], trajectory.hidden[row], trajectory.predicted[row].tolist()
        for t in range(6):
            assert patience[row, t] == next(k for k in range(t + 1) if k == t or answers[t - k - 1] != answers[t])
            if t < 2:
                assert np.isnan(settling[row, t])
                assert np.isnan(bend[row, t])
                continue
            assert bend[row, t] == pytest.approx(np.linalg.norm(r[t] - 2 * r[t - 1] + r[t - 2]))
            first, second = sorted(z[t])[::-1][:2]
            step, last = np.abs(z[t] - z[t - 1]).max(), np.abs(z[t - 1] - z[t - 2]).max()
            ratio = min(step / last, 0.99)
            assert settling[row, t] == pytest.approx(first - second - 2 * step * ratio / (1 - ratio))


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


@pytest.mark.parametrize("logits", [np.zeros((4, 5, 3)), np.eye(3)[[[0, 0, 1, 1, 2]] * 4] * 1e30])
def test_settling_is_finite_where_nothing_moves_and_where_all_jumps(logits: NDArray) -> None:
    values = ls.signal("settling", ls.Trajectory(logits=logits))
    assert np.isnan(values[:, :2]).all()
    assert np.isfinite(values[:, 2:]).all()


@pytest.mark.parametrize("loops", [1, 2, 3])
def test_too_few_loops_for_two_steps(loops: int) -> None:
    names = available_readouts(random_trajectory(loops=loops))
    assert ("settling" in names) == ("hidden_acceleration" in names) == (loops == 3)
    assert "patience" in names
    if loops < 3:
        with pytest.raises(ls.UserError, match=f"{'one loop' if loops == 1 else '2 loops'} only"):
            ls.sweep("settling", random_trajectory(1, loops=loops), random_trajectory(2, loops=loops))


def test_a_signal_that_speaks_at_the_last_loop_only_lets_nobody_exit_early() -> None:
    three = random_trajectory(rows=900, loops=3, split="validation")
    assert "settling" in ls.calibrate(three, 0.5).guarantee.candidates
    with pytest.raises(ls.UserError, match="No threshold of 'settling' lets an example exit early"):
        ls.calibrate(three, 0.5, readout="settling")


# ---- registering


def test_a_readout_is_known_everywhere_from_then_on(forgotten: None) -> None:
    @ls.readout("steady", exits="above", reads="predictions")
    def steady(answers, state):  # type: ignore[no-untyped-def]
        count = np.zeros(len(answers)) if state is None else np.where(answers == state[0], state[1] + 1, 0)
        return count, (answers, count)

    assert isinstance(steady, ls.Readout)
    validation, test = (random_trajectory(seed, split=split) for seed, split in ((1, "validation"), (2, "test")))
    assert "steady" in available_readouts(validation, test)
    ours, built_in = (ls.sweep(name, validation, test) for name in ("steady", "patience"))
    assert np.array_equal(ours.average_loops, built_in.average_loops)
    assert np.array_equal(ours.accuracy, built_in.accuracy)


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
    with pytest.raises(ls.UserError, match="must be a Readout"):
        ls.register_readout(abs)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("gate:mine", "above"), "is named by letters"),
        (("auto", "above"), "is named by letters"),
        (("", "above"), "is named by letters"),
        (("mine", "sideways"), "exits 'above' or 'below'"),
        (("mine", "above", "labels", abs), "reads one of"),
        (("mine", "above", "logits"), "needs both"),
        (("mine", "above", None, abs), "needs both"),
    ],
)
def test_what_is_no_readout_is_refused(arguments: tuple, words: str) -> None:
    with pytest.raises(ls.UserError, match=words):
        ls.Readout(*arguments)


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (lambda now: now[:1], r"values \[1\] for 200 rows"),
        (lambda now: np.where(now > 0, np.inf, 0), "infinite"),
        (lambda now, state: (now, now), "tuple of arrays"),
        (lambda now, state: (now, (now[:3],)), "tuple of arrays"),
        (lambda now, state: (now * (1 if state is None else np.nan), (now,)), "at loop 2"),
        (lambda now: 1 / 0, r"failed: ZeroDivisionError: division by zero \(test_own_readouts.py, line \d+\)\.$"),
        (lambda now: nowhere, "failed: NameError: .*test_own_readouts.py, line"),  # type: ignore[name-defined]  # noqa: F821
        (lambda now: now.__imul__(2), "failed: ValueError: .*read-only.*test_own_readouts.py, line"),
        (lambda now: np.linalg.inv(now), "failed: LinAlgError: .*test_own_readouts.py, line"),
        (lambda now: now + 0j, "of the type complex"),
        (lambda now: ["1"] * len(now), "must be numbers"),
        (lambda now: [None] * len(now), "must be numbers"),
        (lambda now: None, r"values \[\] for 200 rows"),
        (lambda now: (now, None), "as its second argument"),
        (lambda now, state=(): (now, (now,)), "as its second argument"),
        (lambda now, state: now, "must return two things"),
        (lambda now, state: (now, (now,), 3), "must return two things"),
        (lambda *given: given[0], "must return two things"),
    ],
)
def test_a_step_that_does_not_keep_to_its_form_is_refused(step, words: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ls.UserError, match=words):
        replayed(ls.Readout("wrong", "above", "gate_logits", step), random_trajectory().gate_logits)


def standardised(values):  # type: ignore[no-untyped-def]
    return (values - values.mean()) / (values.std() + 1e-9)


@pytest.mark.parametrize(
    "step",
    [
        lambda logits: standardised(logits.max(axis=1)),
        lambda logits: logits.max(axis=1) - logits.max(),
        lambda logits: logits.max(axis=1).argsort().argsort(),
        lambda logits: np.random.default_rng().random(len(logits)),
        lambda logits, state: (logits.max(axis=1) / (1 if state is None else state[0].mean()), (logits.max(axis=1),)),
    ],
    ids=["standardised", "best", "rank", "chance", "state"],
)
@pytest.mark.parametrize("classes", [5, 40_000])
def test_a_step_that_looks_at_other_rows_is_refused(step, classes: int) -> None:  # type: ignore[no-untyped-def]
    """Also where the logits are so wide that the replay steps the rows one by one."""
    values = np.random.default_rng(0).normal(size=(9, 4, classes)).astype(np.float32)
    with pytest.raises(ls.UserError, match="'crowded' says something else of a row alone"):
        replayed(ls.Readout("crowded", "above", "logits", step), values)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 300), st.integers(1, 300))
def test_a_step_that_rounds_in_float32_is_not_refused(seed: int, rows: int, width: int) -> None:
    rng = np.random.default_rng(seed)
    direction = rng.normal(size=width).astype(np.float32)
    values = rng.normal(size=(rows, 3, width)).astype(np.float32)
    assert replayed(ls.Readout("along", "above", "hidden", lambda now: now @ direction), values).shape == (rows, 3)


@pytest.mark.parametrize(
    "step",
    [
        lambda *given: (given[0], given[:1]),
        lambda now, state: (now, (now,)),
        lambda now, state=None: (now, (now,)),
        lambda now, *state: (now, (now,)),
    ],
)
def test_a_step_with_room_for_a_state_gets_one(step) -> None:  # type: ignore[no-untyped-def]
    values = np.ones((4, 2), np.float32)
    assert np.array_equal(replayed(ls.Readout("roomy", "above", "gate_logits", step), values), values)


@pytest.mark.parametrize(
    "step", [np.abs, lambda now: now, lambda now, **k: now, lambda now, *, k=1: now, lambda now, k=3: now]
)
def test_a_step_without_room_for_a_state_gets_none(step) -> None:  # type: ignore[no-untyped-def]
    values = np.ones((4, 2), np.float32)
    assert replayed(ls.Readout("narrow", "above", "gate_logits", step), values).shape == (4, 2)


def test_a_broken_readout_does_not_harm_the_others(forgotten: None) -> None:
    ls.readout("broken", exits="above", reads="logits")(lambda logits: 1 / 0)
    validation, test = (random_trajectory(seed, split=split) for seed, split in ((1, "validation"), (2, "test")))
    with pytest.warns(UserWarning, match=r"'broken' failed: .* It is left out here\."):
        assert "broken" not in available_readouts(validation, test)
    with pytest.raises(ls.UserError, match="'broken' failed"):
        ls.sweep("broken", validation, test)


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
    with pytest.raises(ls.UserError, match="calls itself 'offered'"):
        ls.ExitPolicy("mislabelled", 1.0)


OFFERED = ls.Readout("offered", "above", "gate_logits", lambda now: now)


def test_a_file_never_imports_what_it_names(forgotten: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ls.register_readout(OFFERED)
    ls.ExitPolicy("offered", 0.5).save(tmp_path / "policy.json")
    assert ls.ExitPolicy.load(tmp_path / "policy.json") == ls.ExitPolicy("offered", 0.5)
    del ls.READOUTS["offered"], readouts._KNOWN["offered"]
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
    monkeypatch.delitem(sys.modules, "typed_here", raising=False)
    Path("typed_here.py").write_text(
        "import loopscope as ls\n\n\n"
        "@ls.readout('doubt', exits='below', reads='logits')\ndef doubt(logits):\n    return -logits.max(axis=1)\n\n"
        "other = 3\n"
    )
    for seed, split in ((1, "validation"), (2, "test")):
        random_trajectory(seed, rows=400, split=split).save(split)
    assert main(["evaluate", "validation", "test", "--readout", "typed_here:doubt", "--readout", "margin"]) == 0
    assert "doubt" in capsys.readouterr().out
    assert main(["calibrate", "validation", "--readout", "typed_here:doubt", "--max-drop", "0.5"]) == 0
    assert ls.ExitPolicy.load("policy.json").readout == "doubt"
    for words, expected in (
        (["evaluate", "validation", "test", "--readout", "typed_here:other"], "must be a loopscope.Readout"),
        (["evaluate", "validation", "test", "--readout", "nowhere:doubt"], "There is no module 'nowhere'"),
        (["diagnose", ".", "--with-readout", "doubt"], "takes MODULE:NAME"),
    ):
        assert main(words) == 2
        assert expected in capsys.readouterr().err
    del ls.READOUTS["doubt"], readouts._KNOWN["doubt"]
    assert main(["evaluate", "test", "--policy", "policy.json"]) == 2
    assert "not installed" in capsys.readouterr().err
    assert main(["evaluate", "test", "--policy", "policy.json", "--with-readout", "typed_here:doubt"]) in (0, 1)
    assert sys.path[0] != ""
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
    assert ls.signal("mine", test).shape == (1500, 4)
    for asked in (lambda: ls.sweep("mine", validation, test), lambda: ls.calibrate(validation, readout="mine")):
        with pytest.raises(ls.UserError, match=r"has no readout: say when it exits, with ls.register_readout\(ls.Rea"):
            asked()
    ls.register_readout(ls.Readout("mine", exits="below"))
    assert ls.register_readout(ls.Readout("mine", exits="below")).reads is None  # the same again
    frontier = ls.sweep("mine", validation, test)
    assert frontier.average_loops.min() < 2.1
    policy = ls.calibrate(validation, 0.2, readout="mine")
    assert 2 <= policy.exit_loops(test).mean() < 4
    assert "mine" in ls.calibrate(validation, 0.2).guarantee.candidates
    with pytest.raises(ls.UserError, match="can be replayed but not run"):
        ExitState(policy, 4)
    with pytest.raises(ls.UserError, match="only exists recorded"):
        ls.signal("mine", random_trajectory())


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
    foreign[7, 3] += 0.01
    with pytest.raises(ls.UserError, match=f"recorded signal '{name}' is not what the readout '{name}' makes of the"):
        ls.signal(name, ls.Trajectory(**kept, signals={name: foreign}))
    alone = ls.Trajectory(labels=whole.labels, predictions=whole.predicted, signals={name: foreign})
    assert ls.signal(name, alone)[7, 3] == pytest.approx(foreign[7, 3])  # nothing there says otherwise


def test_a_policy_is_held_to_the_definition_that_it_was_made_with(forgotten: None, tmp_path: Path) -> None:
    """The same name with other lines would be another rule under the old promise."""

    def first(logits):  # type: ignore[no-untyped-def]
        return logits.max(axis=1)

    def second(logits):  # type: ignore[no-untyped-def]
        return 2 * logits.max(axis=1)

    def register(exits: str, reads: str, step) -> None:  # type: ignore[no-untyped-def]
        for table in (readouts._KNOWN, readouts.READOUTS):
            table.pop("largest", None)  # type: ignore[attr-defined]
        ls.register_readout(ls.Readout("largest", exits, reads, step))  # type: ignore[arg-type]

    register("above", "logits", first)
    validation, test = (random_trajectory(n, rows=2000, split=each) for n, each in ((1, "validation"), (2, "test")))
    made = [
        ls.calibrate(validation, 0.5, 0.8, readout="largest"),
        choose("largest", validation),
        ls.sweep("largest", validation, test).select().policy,
    ]
    frontier = ls.sweep("largest", validation, test)
    for number, policy in enumerate(made):
        policy.save(tmp_path / f"{number}.json")
        assert ls.ExitPolicy.load(tmp_path / f"{number}.json") == policy
        assert policy.exit_loops(test).max() <= 4
    for other in (("above", "logits", second), ("below", "logits", first), ("above", "hidden", first)):
        register(*other)
        for number, policy in enumerate(made):
            with pytest.raises(ls.UserError, match="another definition of the readout 'largest'"):
                ls.ExitPolicy.load(tmp_path / f"{number}.json")
            with pytest.raises(ls.UserError, match="another definition of the readout 'largest'"):
                policy.exit_loops(test)
            with pytest.raises(ls.UserError, match="another definition of the readout 'largest'"):
                policy.for_any_model().exit_loops(test)
            with pytest.raises(ls.UserError, match="another definition of the readout 'largest'"):
                frontier.select().policy.exit_loops(test)
            policy.save(tmp_path / f"{number}.json")  # what it was made with, not what the name means by now
    register("above", "logits", first)
    assert [ls.ExitPolicy.load(tmp_path / f"{number}.json") for number in range(3)] == made
    assert ls.ExitPolicy("largest", 0.5).definition_sha256 is None
    assert ls.calibrate(validation, 0.5, 0.8, readout="margin").definition_sha256 is None
