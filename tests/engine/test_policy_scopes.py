"""What may a policy decide about? `tests/test_misleading.py` has what is rejected; here is what is honoured."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tiny_language import outspoken

import loopscope as ls
from loopscope.engine.requests import Request
from loopscope.models.looped_model import LoopedModel
from loopscope.recording.question_recording import score_all_loops
from loopscope.scope import STATE_WORDS, Scope, scope_of

ROWS = np.random.default_rng(0).integers(3, 600, (6, 7))
CHOICES = [np.array([5, 6]), np.array([7]), np.array([8, 9, 10])]
MODEL = outspoken()


def policy(model: LoopedModel = MODEL) -> ls.ExitPolicy:
    """With a guarantee for answers of this model; the numbers do not matter here."""
    rng = np.random.default_rng(1)
    labels = rng.integers(0, 4, 400)
    logits = rng.normal(size=(400, 3, 4)) + 4 * (np.arange(4) == labels[:, None])[:, None]
    provenance = {"weights_sha256": model.weights_sha256, "precision": model.precision}
    recorded = ls.Trajectory(logits=logits, labels=labels, split="validation", provenance=provenance)
    return ls.calibrate(recorded, 0.5, 0.8, readout="margin")


def rows(rule: ls.ExitPolicy, model: LoopedModel = MODEL) -> list[Any]:
    return list(ls.run(model, rule, [Request(key, (row,)) for key, row in enumerate(ROWS)]))


def questions(norms: tuple[float, ...] = (), mean: bool | None = None, **options: Any) -> Callable[..., list[Any]]:
    asked = [ls.choices(key, row, CHOICES, norms, whole=bool(mean), **options) for key, row in enumerate(ROWS)]
    return lambda rule: list(ls.run(MODEL, rule, asked, mean=mean))


def text(cache: Any) -> Callable[..., list[Any]]:
    return lambda rule: ls.generate(MODEL, [ls.Prompt(0, ROWS[0])], rule, max_new_tokens=3, cache=cache)


CONSUMERS: dict[str, Callable[[ls.ExitPolicy], Any]] = {
    "rows": rows,
    "questions": questions(),
    "questions per character": questions((3.0, 1.0, 7.0), score="per_character"),
    "questions, mean state": questions(mean=True),
    "text": text("full"),
    "text, propagate": text("propagate"),
}


@pytest.mark.parametrize("consumer", CONSUMERS)
def test_a_policy_made_by_hand_binds_nobody(consumer: str) -> None:
    assert len(CONSUMERS[consumer](ls.ExitPolicy("margin", 1.0)))


def test_the_mean_state_can_be_run() -> None:
    """A policy on the mean over the choices' tokens exits live where its replay on such a recording does."""
    asked = [ls.choices(key, row, CHOICES, whole=True) for key, row in enumerate(ROWS)]
    scores = score_all_loops(MODEL, asked, mean=True)
    recorded = ls.Trajectory(
        logits=scores.log_likelihoods.astype(np.float32),
        hidden=scores.hidden,
        provenance={"benchmark": "mine", "metric": "acc", "state": STATE_WORDS["mean_over_choices"]},
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
    rule = policy(model)
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
    rule = ls.ExitPolicy("margin", 1.0, scope=Scope(unit="answers", precision="float32"))
    with pytest.raises(ls.UserError, match="calibrated on weights in float32.*weights in bfloat16"):
        rows(rule, half)
    assert rows(rule.for_any_model(), half)


def test_a_promise_holds_for_its_own_depth_only() -> None:
    rule, asked = policy(), [Request(key, (row,)) for key, row in enumerate(ROWS)]
    waiting = iter(asked)
    with pytest.raises(ls.UserError, match="calibrated for 3 loops, and here full depth is 2"):
        next(ls.run(MODEL, rule, waiting, num_loops=2))
    assert len(list(waiting)) == len(asked)  # nothing was taken
    assert {answer.loop for answer in ls.run(MODEL, rule.for_any_model(), asked, num_loops=2)} <= {1, 2}


def test_scores_are_sums_unless_it_is_said() -> None:
    assert ls.choices(0, ROWS[0], CHOICES, (1.0, 1.0, 1.0)).score == "sum"
    assert ls.choices(0, ROWS[0], CHOICES, (1.0, 2.0, 1.0)).score is None
