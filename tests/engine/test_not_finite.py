"""Logits, states or halt logits that overflow while a model runs are an error wherever answers are made."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from conftest import GOLDEN

import loopscope as ls
from loopscope.engine.sampling import Sampling
from loopscope.models.looped_model import LoopedModel
from loopscope.recording.question_recording import score_all_loops
from loopscope.recording.recording_folder import Keep

ROWS = np.random.default_rng(0).integers(0, 60, (4, 7))
POLICIES = [
    ls.ExitPolicy("fixed", 2),
    ls.ExitPolicy("margin", 1e9),
    ls.ExitPolicy("entropy", -1.0),
    ls.ExitPolicy("kl", -1.0),
    ls.ExitPolicy("settling", 1e9),
    ls.ExitPolicy("patience", 2),
    ls.ExitPolicy("gate", 2.0),
    ls.ExitPolicy("hidden_change", -1.0),
]


def overflowing(part: str) -> LoopedModel:
    """A model whose weights are finite, and what it computes with them is not."""
    model = ls.load_model(GOLDEN / "ouro-tiny")
    for name, weights in model.named_parameters():
        if part in name:
            weights.copy_(torch.full_like(weights, 3e38))
    return model


def asked(shared: int = 0) -> list[ls.Request]:
    return [ls.choices(key, row[:4], [row[4:6], row[6:]], shared=shared) for key, row in enumerate(ROWS)]


USES: dict[str, Callable[[LoopedModel, ls.ExitPolicy], Any]] = {
    "rows": lambda model, policy: list(ls.run(model, [ls.Request(key, [row]) for key, row in enumerate(ROWS)], policy)),
    "questions": lambda model, policy: list(ls.run(model, asked(2), policy, greedy=True)),
    "text": lambda model, policy: ls.generate(model, [ls.Prompt(0, ROWS[0])], policy, max_new_tokens=2),
    "drawn text": lambda model, policy: ls.generate(
        model, [ls.Prompt(0, ROWS[0])], policy, max_new_tokens=2, sampling=Sampling(temperature=1.0, top_k=5)
    ),
    "forced text": lambda model, policy: list(
        ls.stream(model, [ls.Prompt(0, ROWS[0], ROWS[1])], policy, with_logits=True)
    ),
}


@pytest.mark.parametrize("use", USES)
def test_no_answer_is_made_of_logits_that_overflow(use: str) -> None:
    sound, spoilt = ls.load_model(GOLDEN / "ouro-tiny"), overflowing("lm_head")
    for policy in POLICIES:
        assert USES[use](sound, policy), policy
        with pytest.raises(ls.UserError, match="not finite"):
            USES[use](spoilt, policy)


@pytest.mark.parametrize(("part", "readout"), [("early_exit_gate", "gate"), ("model.norm", "hidden_change")])
@pytest.mark.parametrize("use", ["rows", "questions", "text"])
def test_no_exit_is_decided_by_what_overflows(use: str, part: str, readout: str) -> None:
    with pytest.raises(ls.UserError, match="(states|logits) hold a value that is not finite"):
        USES[use](overflowing(part), ls.ExitPolicy(readout, 0.5))


@pytest.mark.parametrize("part", ["lm_head", "early_exit_gate"])
def test_nothing_is_recorded_of_what_overflows(part: str) -> None:
    model = overflowing(part)
    for keep in (Keep(), Keep(logits=False)):
        with pytest.raises(ls.UserError, match="not finite"):
            ls.record_model(model, ROWS, labels=np.zeros(len(ROWS), int), keep=keep)
    with pytest.raises(ls.UserError, match="not finite"):
        score_all_loops(model, asked())


def test_a_class_that_is_missing_is_no_error() -> None:
    """-inf says that an example does not have a class."""
    model = ls.load_model(GOLDEN / "ouro-tiny")
    predict = model.predict

    def masked(head_input: torch.Tensor) -> torch.Tensor:
        logits = predict(head_input)
        return torch.where(torch.arange(logits.shape[-1]) < 3, -torch.inf, logits)

    model.predict = masked  # type: ignore[method-assign]
    for use in ("rows", "text", "drawn text"):
        assert USES[use](model, ls.ExitPolicy("fixed", 2))
