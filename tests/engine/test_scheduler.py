"""The engine: is it the replay, whatever the batch? Does it stay within its batch, and compute only what it needs?"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import count, islice
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import GOLDEN, tiny_settings

import loopscope as ls
from loopscope.engine.replay_agreement import compare_with_replay
from loopscope.engine.requests import Request, choices, task_requests
from loopscope.engine.scheduler import Answer, in_order, run
from loopscope.models.looped_model import LoopedModel, LoopState
from loopscope.readouts.signals import SIGNALS
from loopscope.recording.recording_folder import Keep
from loopscope.recording.task_recording import record_task
from loopscope.training.run_folder import read_run_settings
from loopscope.training.task_run import initial_model


@pytest.fixture(scope="module")
def recorded(gated_run: Path, tmp_path_factory: pytest.TempPathFactory) -> ls.Trajectory:
    return record_task(gated_run, "test", tmp_path_factory.mktemp("engine") / "test", Keep(hidden=True))


@pytest.fixture(scope="module")
def model(gated_run: Path) -> LoopedModel:
    return ls.load_model(gated_run)


@pytest.fixture(scope="module")
def requests(gated_run: Path) -> list[Request]:
    return list(task_requests(read_run_settings(gated_run).task.split("test")))


def policy_of(readout: str, recorded: ls.Trajectory) -> ls.ExitPolicy:
    """A threshold in the widest gap between signals near the middle: equal examples must not sit on it."""
    values = np.sort(ls.signal(readout, recorded)[:, :-1].ravel())
    values = values[~np.isnan(values)]
    middle = values[int(0.3 * len(values)) : int(0.7 * len(values)) + 2]
    widest = int(np.diff(middle).argmax())
    return ls.ExitPolicy(readout, float(middle[widest : widest + 2].mean()))


@pytest.mark.parametrize("readout", [*SIGNALS, "stopper:induction", "stopper:classifier"])
def test_every_request_exits_where_the_replay_says(
    readout: str, model: LoopedModel, requests: list[Request], recorded: ls.Trajectory
) -> None:
    if readout.startswith("stopper:"):
        kind = readout.removeprefix("stopper:")
        stopper = ls.fit_stopper(replace(recorded, split="validation"), kind=kind)
        recorded = ls.attach(recorded, {kind: stopper})
        policy = replace(policy_of(readout, recorded), gate=stopper)
    else:
        policy = policy_of(readout, recorded)
    assert len(set(policy.exit_loops(recorded))) > 1
    replayed, shuffled = policy.exit_loops(recorded), np.random.default_rng(0).permutation(len(requests))
    for batch_size, order in ((1, shuffled[:30]), (7, shuffled), (1000, np.arange(len(requests)))):
        answers = list(run(model, (requests[row] for row in order), policy, batch_size))
        assert sorted(answer.key for answer in answers) == sorted(order)
        for answer in answers:
            assert answer.loop == replayed[answer.key]
            assert np.allclose(answer.logits, recorded.logits[answer.key, answer.loop - 1], atol=1e-5)
    agreement = compare_with_replay(answers, policy, recorded)
    assert (agreement.differing, agreement.close) == (0, 0)


@pytest.mark.filterwarnings("ignore:36 examples are copies of others", "ignore:The model is not above chance")
def test_a_monitor_fed_by_the_engine_sees_what_it_sees_in_a_recording(
    model: LoopedModel, requests: list[Request], recorded: ls.Trajectory, gated_run: Path, tmp_path: Path
) -> None:
    validation = record_task(gated_run, "validation", tmp_path / "validation")
    policy = ls.calibrate(validation, 0.2, 0.8, readout="margin", loss="disagreement")
    live, full_depth = ls.Monitor(policy, alpha=0.1), ls.ExitPolicy("fixed", recorded.num_loops)
    for part in (requests[:40], requests[40:]):
        batch = [Request(number, request.rows) for number, request in enumerate(part)]
        answers = sorted(run(model, batch, policy), key=lambda answer: answer.key)
        losses = np.full(len(batch), np.nan)
        for answer in run(model, batch, full_depth):
            losses[answer.key] = answer.prediction != answers[answer.key].prediction
        live.update([answer.loop for answer in answers], losses)
    assert live.result == ls.Monitor(policy, alpha=0.1).replay(recorded, stream=True)
    assert live.result.audited == len(requests)


def test_a_stream_without_end_is_answered(model: LoopedModel, requests: list[Request], recorded: ls.Trajectory) -> None:
    """Never more rows than the batch has room for are taken in, and nobody waits for the end."""
    pulled = 0

    def endless() -> Iterator[Request]:
        nonlocal pulled
        for number in count():
            pulled += 1
            yield Request(number, requests[number % len(requests)].rows)

    most = 0
    for answered, _ in enumerate(islice(run(model, endless(), policy_of("margin", recorded), 16), 300)):
        most = max(most, pulled - answered)
    assert 1 < most <= 17


def test_the_batch_is_kept_full(
    model: LoopedModel, requests: list[Request], recorded: ls.Trajectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: dict[str, list[int]] = {"early_pooled": [], "finish_step": [], "step": []}
    for name in rows:
        real = getattr(model, name)

        def counted(state: LoopState, *at: torch.Tensor, name: str = name, real=real):  # type: ignore[no-untyped-def]
            rows[name].append(len(state.loop))
            return real(state, *at)

        monkeypatch.setattr(model, name, counted)
    policy = policy_of("margin", recorded)
    loops = policy.exit_loops(recorded)
    list(run(model, requests, policy, 20))
    begun, finished, whole = rows.values()
    assert sum(begun) == loops.sum()  # nobody runs a loop more than needed
    assert set(begun[: -recorded.num_loops]) == {20}  # until the queue is empty
    assert sum(finished) == (loops - 1).sum()  # nor the rest of a loop
    assert not whole
    list(run(model, requests[:20], ls.ExitPolicy("fixed", 3), 20))
    assert (begun[-1], whole) == (20, [20, 20])  # where nobody may exit, loops are not divided


def test_a_model_whose_loops_are_not_divided_answers_alike(
    model: LoopedModel, requests: list[Request], recorded: ls.Trajectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = policy_of("margin", recorded)
    divided = {answer.key: answer for answer in run(model, requests, policy, 20)}
    monkeypatch.setattr(model, "early_pooled", lambda state, positions: None)
    for answer in run(model, requests, policy, 20):
        assert answer.loop == divided[answer.key].loop
        assert np.allclose(answer.logits, divided[answer.key].logits, atol=1e-5)


@pytest.mark.parametrize(("readout", "all_logits"), [("gate", False), ("hidden_change", False), ("margin", True)])
def test_only_what_the_policy_needs_is_computed(
    readout: str,
    all_logits: bool,
    model: LoopedModel,
    requests: list[Request],
    recorded: ls.Trajectory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = {"predict": 0, "halt": 0}
    for name in asked:
        real = getattr(model, name)

        def counted(pooled: torch.Tensor, name: str = name, real=real) -> torch.Tensor:  # type: ignore[no-untyped-def]
            asked[name] += len(pooled)
            return real(pooled)

        monkeypatch.setattr(model, name, counted)
    policy = policy_of(readout, recorded)
    list(run(model, requests, policy, 20))
    loops = int(policy.exit_loops(recorded).sum())
    assert asked["predict"] == (loops if all_logits else len(requests))
    assert asked["halt"] == (loops if readout == "gate" else 0)


def test_impossible_requests_are_refused() -> None:
    row = np.array([1, 2, 3])
    for rows, scored, norms in (([row[:0]], [], []), ([row, row], [3, 1], []), ([row, row], [0, 1], [])):
        with pytest.raises(ls.UserError):
            Request(0, rows, scored, norms)
    for norms in ((0.0, 1.0), (np.nan, 1.0), (1.0,)):
        with pytest.raises(ls.UserError, match="a number above 0"):
            Request(0, [row, row], [1, 1], norms)


def test_those_before_a_bad_request_are_answered(model: LoopedModel, requests: list[Request]) -> None:
    answered = []
    with pytest.raises(ls.UserError, match="vocabulary"):
        for answer in run(model, [*requests[:5], Request(9, [np.array([99])])], ls.ExitPolicy("margin", 1.0), 6):
            answered.append(answer.key)
    assert sorted(answered) == [0, 1, 2, 3, 4]


def test_a_row_that_overflows_harms_nobody_else(requests: list[Request]) -> None:
    model = initial_model(tiny_settings()).eval()
    row = np.array([6, 4, 0, 1, 7])
    head = model.embedding.weight.detach().clone()
    model.predict = lambda read: read @ head.T  # type: ignore[method-assign]
    with torch.no_grad():
        model.embedding.weight[2] = torch.inf
        answers = run(model, [Request(0, [row]), Request(1, [np.full(6, 2)])], ls.ExitPolicy("fixed", 2), 4)
        answer = next(answers)
        with pytest.raises(ls.UserError, match="not finite"):
            next(answers)
    assert answer.key == 0
    assert np.isfinite(answer.logits).all()


def test_tokens_of_any_whole_type(model: LoopedModel, requests: list[Request]) -> None:
    (same,) = run(model, [requests[0]], ls.ExitPolicy("fixed", 1))
    for dtype in (np.uint8, np.int32, np.uint64):
        (answer,) = run(model, [Request(0, [requests[0].rows[0].astype(dtype)])], ls.ExitPolicy("fixed", 1))
        assert np.array_equal(answer.logits, same.logits)
    with pytest.raises(ls.UserError, match="must be whole numbers"):
        Request(0, [np.array([1.0])])


def test_only_who_exits_needs_scores() -> None:
    """A gate policy asks the head about the choices of those questions that exit, and of no others."""
    model = ls.load_model(GOLDEN / "ouro-tiny")
    asked, real = [], model.predict
    model.predict = lambda pooled: asked.append(len(pooled)) or real(pooled)  # type: ignore[method-assign]
    rng = np.random.default_rng(0)
    questions = [choices(key, rng.integers(0, 50, 5), [rng.integers(0, 50, 2) for _ in range(3)]) for key in range(20)]
    loops = [answer.loop for answer in run(model, questions, ls.ExitPolicy("gate", 0.5), 12)]
    assert len(set(loops)) > 1
    assert sum(asked) == 20 * (1 + 3)  # the first tokens of all choices are predicted at one place


def test_in_order() -> None:
    keys = [2, 0, 1, 4, 3]
    answers = [Answer(key, 1, np.zeros(2, dtype=np.float32)) for key in keys]
    assert [answer.key for answer in in_order(answers)] == [0, 1, 2, 3, 4]
