"""Model x policy x consumer: does every combination do the right thing, or say that it will not?

The rows of the table are policies by what they were calibrated on, its columns those who use them. A cell is the
beginning of the refusal, or None where the policy is honoured: then its exits are those of its replay.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_language import outspoken

import loopscope as ls
from loopscope.engine.requests import Request
from loopscope.models.looped_model import LoopedModel
from loopscope.recording.question_recording import score_all_loops
from loopscope.scope import STATE_WORDS, scope_of

ROWS = np.random.default_rng(0).integers(3, 600, (6, 7))
CHOICES = [np.array([5, 6]), np.array([7]), np.array([8, 9, 10])]
MODEL = outspoken()
OTHER = outspoken(rope_theta=500.0, hidden_size=16)


def recording(model: LoopedModel = MODEL, **changes: Any) -> ls.Trajectory:
    """Of a kind that `changes` name; the numbers do not matter here."""
    rng = np.random.default_rng(1)
    sequences = changes.pop("sequences", None)
    provenance = {"weights_sha256": model.weights_sha256, "precision": model.precision, **changes}
    labels = rng.integers(0, 4, 400)
    logits = rng.normal(size=(400, 3, 4)) + 4 * (np.arange(4) == labels[:, None])[:, None]
    hidden = rng.normal(size=(400, 3, 32))
    return ls.Trajectory(
        logits=logits, labels=labels, split="validation", provenance=provenance, sequences=sequences, hidden=hidden
    )


def policy(kind: ls.Trajectory, readout: str = "margin") -> ls.ExitPolicy:
    return ls.calibrate(kind, 0.5, 0.8, readout=readout)


QUESTIONS = {"benchmark": "mine", "metric": "acc", "state": STATE_WORDS["last_token"]}
KINDS: dict[str, ls.Trajectory] = {
    "answers": recording(),
    "questions": recording(**QUESTIONS),
    "questions per character": recording(**QUESTIONS | {"metric": "acc_norm"}),
    "questions, mean state": recording(**QUESTIONS | {"state": STATE_WORDS["mean_over_choices"]}),
    "tokens": recording(sequences=np.arange(400)),
    "another model's answers": recording(OTHER),
    "answers in bfloat16": recording(precision="bfloat16"),
}


def rows(rule: ls.ExitPolicy, model: LoopedModel = MODEL) -> list[Any]:
    return list(ls.run(model, rule, [Request(key, (row,)) for key, row in enumerate(ROWS)]))


def questions(norms: tuple[float, ...] = (), mean: bool | None = None, **options: Any) -> Callable[..., list[Any]]:
    def run(rule: ls.ExitPolicy) -> list[Any]:
        whole = mean or (mean is None and rule.scope.state == "mean_over_choices")
        asked = [ls.choices(key, row, CHOICES, norms, whole=whole, **options) for key, row in enumerate(ROWS)]
        return list(ls.run(MODEL, rule, asked, mean=mean))

    return run


def text(cache: Any) -> Callable[..., list[Any]]:
    return lambda rule: ls.generate(MODEL, [ls.Prompt(0, ROWS[0])], rule, max_new_tokens=3, cache=cache)


CONSUMERS: dict[str, Callable[[ls.ExitPolicy], Any]] = {
    "rows": rows,
    "questions": questions(),
    "questions per character": questions((3.0, 1.0, 7.0), score="per_character"),
    "questions, last token": questions(mean=False),
    "text": text("full"),
    "text, propagate": text("propagate"),
    "replay of answers": lambda rule: rule.exit_loops(KINDS["answers"]),
    "replay of questions": lambda rule: rule.exit_loops(KINDS["questions"]),
    "replay of tokens": lambda rule: rule.exit_loops(KINDS["tokens"]),
}
ANSWERS, ASKED, TOKENS = "calibrated on answers", "calibrated on questions", "calibrated on next tokens"
SUM, CHARACTER, MEAN = "calibrated on log-likelihoods of whole", "calibrated on log-likelihoods per", "averaged over"
MODELS, PRECISION = "calibrated for another model", "calibrated on weights in bfloat16"
TABLE: dict[str, list[str | None]] = {
    "answers": [None, ANSWERS, ANSWERS, ANSWERS, ANSWERS, ANSWERS, None, ANSWERS, ANSWERS],
    "questions": [ASKED, None, SUM, None, ASKED, ASKED, ASKED, None, ASKED],
    "questions per character": [ASKED, CHARACTER, None, CHARACTER, ASKED, ASKED, ASKED, CHARACTER, ASKED],
    "questions, mean state": [ASKED, None, SUM, MEAN, ASKED, ASKED, ASKED, MEAN, ASKED],
    "tokens": [TOKENS, TOKENS, TOKENS, TOKENS, None, "cache 'full'", TOKENS, TOKENS, None],
    "another model's answers": [MODELS, MODELS, MODELS, MODELS, ANSWERS, ANSWERS, MODELS, ANSWERS, ANSWERS],
    "answers in bfloat16": [PRECISION] * 4 + [ANSWERS, ANSWERS, PRECISION, ANSWERS, ANSWERS],
}


@pytest.mark.parametrize("kind", TABLE)
def test_every_cell_is_right_or_refused(kind: str) -> None:
    rule = policy(KINDS[kind])
    assert rule.scope == scope_of(KINDS[kind])
    for (consumer, use), refusal in zip(CONSUMERS.items(), TABLE[kind], strict=True):
        if refusal is None:
            assert len(use(rule)), consumer
        else:
            with pytest.raises(ls.UserError) as error:
                use(rule)
            assert refusal in str(error.value), consumer


def test_a_policy_made_by_hand_binds_nobody() -> None:
    for consumer, use in CONSUMERS.items():
        assert len(use(ls.ExitPolicy("margin", 1.0))), consumer


def test_the_mean_state_can_be_run() -> None:
    """A policy on the mean over the choices' tokens exits live where its replay on such a recording does."""
    asked = [ls.choices(key, row, CHOICES, whole=True) for key, row in enumerate(ROWS)]
    scores = score_all_loops(MODEL, asked, mean=True)
    recorded = ls.Trajectory(
        logits=scores.log_likelihoods.astype(np.float32),
        hidden=scores.hidden,
        provenance={**QUESTIONS, "state": STATE_WORDS["mean_over_choices"]},
    )
    values = ls.signal("hidden_change", recorded)[:, 1:2]
    rule = ls.ExitPolicy("hidden_change", float(np.median(values)), scope=scope_of(recorded))
    answers = {answer.key: answer.loop for answer in ls.run(MODEL, rule, asked)}
    replayed = rule.exit_loops(recorded)
    assert [answers[key] for key in range(len(ROWS))] == replayed.tolist()
    assert len(set(replayed)) > 1
    last = score_all_loops(MODEL, asked, mean=False).hidden
    assert not np.allclose(last, scores.hidden)


def test_another_model_in_memory_is_refused_until_it_is_said() -> None:
    """A model that was trained further is another one, too."""
    model = outspoken()
    rule = policy(recording(model))
    assert rows(rule, model)
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    with pytest.raises(ls.UserError, match="calibrated for another model"):
        rows(rule, model)
    assert rule.for_any_model().guarantee is None
    assert rows(rule.for_any_model(), model)
    with pytest.raises(ls.UserError, match="calibrated on answers"):
        text("full")(rule.for_any_model())  # the kind of decision stays


def test_a_low_precision_is_held_to_as_well() -> None:
    half = outspoken().bfloat16()
    rule = replace(policy(KINDS["answers"]), model=None)
    with pytest.raises(ls.UserError, match="calibrated on weights in float32.*weights in bfloat16"):
        rows(rule, half)
    assert rows(rule.for_any_model(), half)


def test_a_promise_holds_for_its_own_depth_only() -> None:
    rule, asked = policy(KINDS["answers"]), [Request(key, (row,)) for key, row in enumerate(ROWS)]
    waiting = iter(asked)
    with pytest.raises(ls.UserError, match="calibrated for 3 loops, and here full depth is 2"):
        next(ls.run(MODEL, rule, waiting, num_loops=2))
    assert len(list(waiting)) == len(asked)  # nothing was taken
    assert {answer.loop for answer in ls.run(MODEL, rule.for_any_model(), asked, num_loops=2)} <= {1, 2}


def test_norms_must_be_said() -> None:
    assert ls.choices(0, ROWS[0], CHOICES, (1.0, 1.0, 1.0)).score == "sum"
    assert ls.choices(0, ROWS[0], CHOICES, (1.0, 2.0, 1.0)).score is None
    for norms, score in (((), "per_character"), ((1.0, 2.0, 1.0), "sum")):
        with pytest.raises(ls.UserError, match="the score 'sum' has no norms"):
            ls.choices(0, ROWS[0], CHOICES, norms, score=score)
    with pytest.raises(ls.UserError, match="say it with score="):
        questions((1.0, 2.0, 1.0))(policy(KINDS["questions"]))


def test_recordings_of_different_kinds_are_not_mixed() -> None:
    """A threshold chosen on one kind means nothing on the other."""
    for first, second in (
        ("questions", "questions per character"),
        ("questions", "questions, mean state"),
        ("answers", "answers in bfloat16"),
        ("answers", "questions"),
        ("answers", "tokens"),
    ):
        other = KINDS[second].take(np.arange(200))
        with pytest.raises(ls.UserError, match="are of different kinds"):
            ls.sweep("margin", KINDS[first], replace(other, split="test"))
        with pytest.raises(ls.UserError, match="are of different kinds"):
            ls.calibrate(KINDS[first], 0.5, 0.8, grid=replace(other, split="train"))
