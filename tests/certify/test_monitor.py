"""The monitor: quiet without a change, whatever the calibration drew; speaks with one; outlives its process."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import loopscope as ls
from loopscope.certify.monitor import MEAN_BETS, MeanBets, RankBets, starting_wealth
from loopscope.errors import UserError
from loopscope.policy import CalibrationExits, Certificate
from loopscope.trajectory import concatenate

LOOPS = 4
ALPHA = 0.2
"""Large, so that a few hundred streams can tell."""


def settling(
    rows: int, seed: int | list[int], later: float = 0.0, wrong: float = 0.0, labels: bool = True, **more: object
) -> ls.Trajectory:
    """Right from a random loop on, the margin grows from about there; some exit `later`, some are `wrong` early."""
    rng = np.random.default_rng(seed)
    settled = np.minimum(rng.geometric(0.5, (rows, 1)) + (rng.random((rows, 1)) < later), LOOPS)
    margin = np.arange(1, LOOPS + 1) - settled + rng.normal(0, 0.5, (rows, LOOPS))
    right = np.arange(1, LOOPS + 1) >= settled
    right[rng.random(rows) < wrong, :-1] = False
    zeros = np.zeros(rows, int) if labels else None
    return ls.Trajectory(predictions=(~right).astype(int), labels=zeros, signals={"margin": margin}, **more)


@pytest.fixture(scope="module")
def policy() -> ls.ExitPolicy:
    return ls.calibrate(settling(3_000, 0), 0.02, readout="margin")


def test_the_policy_says_how_its_tested_examples_exited(policy: ls.ExitPolicy, tmp_path: Path) -> None:
    assert policy.certificate is not None
    exits = policy.certificate.exits
    assert (exits.per_loop, len(exits.counts)) == (1, LOOPS)
    assert sum(exits.counts) == policy.guarantee.tested.examples == 2_400
    assert exits.mean == pytest.approx(policy.guarantee.average_loops)
    policy.save(tmp_path / "policy.json")
    assert ls.ExitPolicy.load(tmp_path / "policy.json").certificate == policy.certificate


@pytest.mark.parametrize(("guarantee", "audit"), [(ls.calibrate, 0.3), (ls.conformal_risk_control, 0)])
def test_false_alarms_are_no_more_than_they_may_be_when_thresholds_are_chosen_on_the_same_data(
    guarantee: Callable[..., ls.ExitPolicy], audit: float
) -> None:
    alarms, streams = 0, 60
    for number in range(streams):
        chosen = guarantee(settling(700, [1, number]), 0.04, readout="margin")
        alarms += ls.Monitor(chosen, ALPHA, seed=number).replay(settling(700, [2, number]), audit).alarm
    assert alarms / streams <= ALPHA + 2 * (ALPHA * (1 - ALPHA) / streams) ** 0.5


def test_few_calibration_examples_do_not_pass_for_the_truth(policy: ls.ExitPolicy) -> None:
    """Against shares that were taken for known, forty examples would look like a change to many streams."""
    rng, shares, streams = np.random.default_rng(3), [0.4, 0.3, 0.2, 0.1], 120
    found = []
    for number in range(streams):
        counts = CalibrationExits(per_loop=1, counts=rng.multinomial(40, shares).tolist())
        monitor = ls.Monitor(
            replace(policy, certificate=Certificate(guarantee=policy.guarantee, exits=counts)), ALPHA, seed=number
        )
        found.append(monitor.update(rng.choice(LOOPS, 400, p=shares) + 1))
    alarms, half = sum(each.alarm for each in found), ALPHA / 2
    assert alarms / streams <= half + 2 * (half * (1 - half) / streams) ** 0.5
    evidence = np.array([each.e_exits for each in found])
    assert evidence.mean() <= 1 + 2 * evidence.std() / streams**0.5


def test_bets_are_fair_on_what_they_are_against() -> None:
    ranks = (np.arange(100_000) + 0.5) / 100_000
    bets = RankBets()
    assert np.mean([bets.payoffs(rank) for rank in ranks], axis=0) == pytest.approx(1)
    for limit in (1e-6, 0.01, 0.5, 0.99):
        risk = MeanBets(limit)
        at_limit = limit * np.array(risk.payoffs(1.0)) + (1 - limit) * np.array(risk.payoffs(0.0))
        assert at_limit == pytest.approx(1)
        assert (np.array(risk.payoffs(0.0)[1:]) < 1).all()  # less risk pays less than 1 on average
        assert (np.array(risk.payoffs(0.0)) > 0).all()
        assert np.array(risk.payoffs(limit)) == pytest.approx(1)


def test_the_wealth_is_1_on_average_and_speaks_as_rarely_as_it_says() -> None:
    """Exactly, over all streams of 12 audits, at a risk that is just the limit."""
    limit, steps, expected, crossed = 0.3, 12, 0.0, 0.0
    for stream in range(2**steps):
        wealth, bets, probability = starting_wealth(MEAN_BETS), MeanBets(limit), 1.0
        for step in range(steps):
            loss = stream >> step & 1
            probability *= limit if loss else 1 - limit
            wealth.grow(bets.payoffs(loss), loss, step + 1)
        expected += probability * wealth.e_value
        crossed += probability * (wealth.p_value <= 0.1)
        assert sum(wealth.shares) == pytest.approx(1)
        assert wealth.p_value == pytest.approx(np.exp(-wealth.highest))
    assert expected == pytest.approx(1)
    assert 0 < crossed <= 0.1


def test_a_long_quiet_stream_does_not_make_it_deaf(policy: ls.ExitPolicy) -> None:
    """The wealth falls by a power of the length, not exponentially."""
    monitor = ls.Monitor(policy)
    quiet = monitor.replay(settling(20_000, 5), audit=1, stream=True)
    assert not quiet.alarm
    assert quiet.e_exits > 1e-3
    assert quiet.e_risk > 1e-3
    (alarm,) = monitor.replay(settling(3_000, 6, later=0.4), audit=0, stream=True).alarms
    assert (alarm.test, alarm.direction) == ("exits", "later")
    assert 20_000 < alarm.example < 21_500
    assert abs(alarm.since - 20_000) < 500
    assert alarm.observed > alarm.expected + 0.1


def test_losses_alone_give_an_alarm_and_earlier_exits_too(policy: ls.ExitPolicy) -> None:
    result = ls.Monitor(policy).replay(settling(3_000, 8, wrong=0.1))
    (alarm,) = result.alarms
    assert (alarm.test, alarm.direction, alarm.expected) == ("risk", "higher", 0.02)
    assert alarm.observed > 0.04
    assert result.p_risk <= 0.005 < result.p_exits
    assert "audited answers lose" in result.sentence
    assert "at most 2 % was guaranteed" in result.sentence
    assert not ls.Monitor(policy).replay(settling(3_000, 8, wrong=0.1), audit=0).alarm
    stream = settling(3_000, 7)
    earlier = replace(stream, signals={"margin": stream.signals["margin"] + 1})
    (alarm,) = ls.Monitor(policy).replay(earlier, 0).alarms
    assert alarm.direction == "earlier"
    assert alarm.observed < alarm.expected


def test_batches_do_not_matter_and_neither_does_a_restart(policy: ls.ExitPolicy, tmp_path: Path) -> None:
    rng = np.random.default_rng(9)
    loops, losses = rng.integers(1, LOOPS + 1, 500), np.where(rng.random(500) < 0.3, rng.random(500) < 0.03, np.nan)
    whole = ls.Monitor(policy, seed=4).update(loops, losses)
    parts = ls.Monitor(policy, seed=4)
    for part in np.split(np.arange(500), [1, 1, 120, 300]):
        parts.update(loops[part], losses[part])
        parts.save(tmp_path / "monitor.json")
        parts = ls.Monitor.load(tmp_path / "monitor.json", policy)
    assert parts.result == whole
    assert whole.alarm  # uniform exits are not those of the policy
    assert ls.Monitor(policy, seed=5).update(loops, losses).e_exits != whole.e_exits
    audited = [ls.Monitor(policy).replay(settling(300, 10), audit=0.2).audited for _ in range(2)]
    assert audited[0] == audited[1]
    assert 30 < audited[0] < 90


def test_of_a_guarantee_on_average_the_exits_alone_are_watched_with_all_of_alpha(tmp_path: Path) -> None:
    average = ls.conformal_risk_control(settling(3_000, 0), 0.02, readout="margin")
    with pytest.raises(UserError, match="on average over calibrations, not for each one"):
        ls.Monitor(average).update([1], [np.nan])
    with pytest.raises(UserError, match="watch the exits alone"):
        ls.Monitor(average).replay(settling(100, 1), audit=0.5)
    stream = settling(3_000, 8, wrong=0.1)  # losses far above the guarantee, exits as they were
    monitor = ls.Monitor(average)
    quiet = monitor.replay(stream)
    assert (quiet.alarm, quiet.audited, quiet.e_risk, quiet.p_risk) == (False, 0, None, None)
    assert "(exits alone are watched)" in quiet.sentence
    monitor.save(tmp_path / "monitor.json")
    assert ls.Monitor.load(tmp_path / "monitor.json", average).result == quiet
    (alarm,) = monitor.replay(settling(3_000, 9, later=0.4)).alarms
    assert (alarm.test, alarm.direction) == ("exits", "later")
    loops = average.exit_loops(settling(1_000, 10, later=0.4))
    p_value = ls.Monitor(average).update(loops).p_exits
    assert ls.Monitor(average, 1.001 * p_value).update(loops).alarm
    assert not ls.Monitor(average, 0.999 * p_value).update(loops).alarm


def test_a_text_counts_once_with_its_averages() -> None:
    def texts(seed: int, later: float = 0.0) -> ls.Trajectory:
        return settling(6_000, seed, later, sequences=np.repeat(np.random.default_rng(seed).permutation(600), 10))

    chosen = ls.calibrate(texts(0), 0.1, readout="margin")
    assert chosen.certificate.exits.per_loop == 16
    assert sum(chosen.certificate.exits.counts) == 480
    assert chosen.certificate.exits.mean == pytest.approx(chosen.guarantee.average_loops, abs=0.01)
    quiet = ls.Monitor(chosen).replay(texts(1))
    assert (quiet.unit, quiet.examples, quiet.audited, quiet.alarm) == ("sequences", 600, 600, False)
    assert ls.Monitor(chosen).replay(texts(2, later=0.5)).alarm
    stream = texts(3)
    loops = chosen.exit_loops(stream)
    in_order = [loops[stream.sequences == number].mean() for number in dict.fromkeys(stream.sequences.tolist())]
    assert ls.Monitor(chosen).update(in_order) == ls.Monitor(chosen).replay(stream, audit=0, stream=True)


def often_easy(rows: int, rng: np.random.Generator) -> ls.Trajectory:
    """Half of the draws are of 300 easy inputs, the others of 20,000 hard ones; an input is always answered alike."""
    inputs = np.random.default_rng(0)
    settled = np.append(np.ones(300, int), np.minimum(1 + inputs.geometric(0.5, 20_000), LOOPS))[:, None]
    margin = np.arange(1, LOOPS + 1) - settled + inputs.normal(0, 0.5, (20_300, LOOPS))
    drawn = np.where(rng.random(rows) < 0.5, rng.integers(0, 300, rows), rng.integers(300, 20_300, rows))
    return ls.Trajectory(
        predictions=(np.arange(1, LOOPS + 1) < settled[drawn]).astype(int),
        labels=np.zeros(rows, int),
        signals={"margin": margin[drawn]},
        examples=[str(each) for each in drawn],
    )


def test_inputs_that_are_counted_once_give_no_alarm() -> None:
    """Their first occurrences come easy inputs first: played so, all of these streams gave an alarm."""
    for seed in range(8):
        rng = np.random.default_rng(seed)
        chosen = ls.calibrate(often_easy(3_000, rng), 0.05, readout="margin", distinct=True)
        stream = often_easy(3_000, rng)
        for played_as_it_stands in (False, True):  # an input stands where one of its copies does, drawn at random
            assert not ls.Monitor(chosen, seed=seed).replay(stream, stream=played_as_it_stands).alarm


def test_inputs_that_are_counted_once_give_no_alarm_on_a_recording_of_another_size() -> None:
    for seed in range(8):
        rng = np.random.default_rng(seed)
        chosen = ls.calibrate(often_easy(2_000, rng), 0.05, readout="margin", distinct=True)
        assert not ls.Monitor(chosen, seed=seed).replay(often_easy(10_000, rng)).alarm
    with pytest.raises(UserError, match="give a recording with as many examples"):
        ls.Monitor(chosen).replay(often_easy(1_000, rng))


@pytest.mark.parametrize("option", ["distinct", "new_inputs"])
@pytest.mark.parametrize("rows", [3_000, 2_000])
def test_a_stream_of_inputs_that_are_counted_once_keeps_its_order(option: str, rows: int) -> None:
    """Also where it is longer than the calibration data: the change after two thirds of it is found where it is."""

    def named(recording: ls.Trajectory, prefix: str) -> ls.Trajectory:
        return replace(recording, examples=[f"{prefix} {row}" for row in range(recording.num_examples)])

    chosen = ls.calibrate(named(settling(rows, 0), "known"), 0.05, readout="margin", **{option: True})
    stream = concatenate([named(settling(2_000, 1), "before"), named(settling(1_000, 2, later=0.6), "after")])
    played = ls.Monitor(chosen).replay(stream, audit=0, stream=True)
    (alarm,) = played.alarms
    assert alarm.since == pytest.approx(played.examples * 2 / 3, abs=100)
    assert alarm.direction == "later"


def test_the_order_of_a_recording_is_no_order_of_time(policy: ls.ExitPolicy) -> None:
    recording = settling(3_000, 12)
    by_depth = recording.take(np.argsort(policy.exit_loops(recording), kind="stable"))
    found = [ls.Monitor(policy).replay(each, audit=0.5) for each in (recording, by_depth)]
    assert found[0] == found[1]
    assert not found[0].alarm
    (alarm,) = ls.Monitor(policy).replay(by_depth, stream=True).alarms
    assert alarm.test == "exits"
    assert "since about example" in ls.Monitor(policy).replay(by_depth, stream=True).sentence
    changed = ls.Monitor(policy).replay(settling(3_000, 13, later=0.4))
    assert "examples in random order: exits come later" in changed.sentence
    assert "since" not in changed.sentence
    texts = replace(recording, sequences=np.arange(3_000) // 10)
    of_texts = ls.calibrate(texts, 0.1, readout="margin")
    other = settling(3_000, 14, sequences=np.arange(3_000) // 10)
    sorted_texts = replace(other, sequences=np.random.default_rng(0).permutation(300)[other.sequences])
    assert ls.Monitor(of_texts).replay(other) == ls.Monitor(of_texts).replay(sorted_texts)


def test_nothing_of_what_is_refused_counts(policy: ls.ExitPolicy) -> None:
    monitor = ls.Monitor(policy)
    for loops, losses in (([1, 5], None), ([1, 2], [0.0]), ([1, 1], [0.0, 1.5])):
        with pytest.raises(UserError):
            monitor.update(loops, losses)
    assert monitor.update([], []).examples == 0
    for share in (0, 1, np.nan):
        with pytest.raises(UserError, match="share of false alarms"):
            ls.Monitor(policy, share)
    with pytest.raises(UserError, match="share that is audited"):
        monitor.replay(settling(10, 0), 1.1)


def test_a_tiny_alpha_is_no_vow_of_silence(policy: ls.ExitPolicy) -> None:
    assert ls.Monitor(policy, 5e-324).update([LOOPS] * 3_000).alarm
    assert ls.Monitor(policy).replay(settling(100, 1, labels=False), audit=0).audited == 0
