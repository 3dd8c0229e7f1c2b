"""What may a policy decide about? `tests/test_misleading.py` has what is rejected; here is what is honoured."""

import numpy as np
import pytest
from tiny_language import outspoken

import loopscope as ls
from loopscope.engine.requests import Request
from loopscope.recording.question_recording import score_all_loops
from loopscope.scope import STATE_WORDS, Scope, scope_of

ROWS = np.random.default_rng(0).integers(3, 600, (6, 7))
CHOICES = [np.array([5, 6]), np.array([7]), np.array([8, 9, 10])]
ASKED = [Request(key, (row,)) for key, row in enumerate(ROWS)]
MODEL = outspoken()


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
    answers = {answer.key: answer.loop for answer in ls.run(MODEL, asked, rule)}
    replayed = rule.exit_loops(recorded)
    assert [answers[key] for key in range(len(ROWS))] == replayed.tolist()
    assert len(set(replayed)) > 1
    last = score_all_loops(MODEL, asked, mean=False).hidden
    assert not np.allclose(last, scores.hidden)


def calibrated() -> ls.ExitPolicy:
    """With a guarantee for answers of our model; the numbers do not matter here."""
    rng = np.random.default_rng(1)
    labels = rng.integers(0, 4, 400)
    logits = rng.normal(size=(400, 3, 4)) + 4 * (np.arange(4) == labels[:, None])[:, None]
    provenance = {"weights_sha256": MODEL.weights_sha256, "precision": MODEL.precision}
    recorded = ls.Trajectory(logits=logits, labels=labels, split="validation", provenance=provenance)
    return ls.calibrate(recorded, 0.5, 0.8, readout="margin")


def test_a_policy_for_any_model_keeps_the_kind_of_decision() -> None:
    """It gives up its guarantee, and runs with other weights, in another precision and to another depth."""
    rule, waiting = calibrated(), iter(ASKED)
    assert rule.guarantee is not None
    with pytest.raises(ls.UserError, match="calibrated for 3 loops, and here full depth is 2"):
        next(ls.run(MODEL, waiting, rule, num_loops=2))
    assert len(list(waiting)) == len(ASKED)  # nothing was taken
    anywhere = rule.for_any_model()
    assert anywhere.guarantee is None
    assert len(list(ls.run(outspoken().bfloat16(), ASKED, anywhere))) == len(ASKED)
    assert {answer.loop for answer in ls.run(MODEL, ASKED, anywhere, num_loops=2)} <= {1, 2}
    with pytest.raises(ls.UserError, match="calibrated on answers"):
        ls.generate(MODEL, [ls.Prompt(0, ROWS[0])], anywhere)


def test_a_policy_made_by_hand_binds_nobody() -> None:
    rule = ls.ExitPolicy("margin", 1.0)
    assert rule.scope == Scope()
    assert len(list(ls.run(MODEL, ASKED, rule))) == len(ASKED)
    asked = [ls.choices(key, row, CHOICES, (3.0, 1.0, 7.0), score="per_character") for key, row in enumerate(ROWS)]
    assert len(list(ls.run(MODEL, asked, rule))) == len(ROWS)
    assert ls.generate(MODEL, [ls.Prompt(0, ROWS[0])], rule, max_new_tokens=3, cache="propagate")


def test_scores_are_sums_unless_it_is_said() -> None:
    assert ls.choices(0, ROWS[0], CHOICES, (1.0, 1.0, 1.0)).score == "sum"
    assert ls.choices(0, ROWS[0], CHOICES, (1.0, 2.0, 1.0)).score is None
