"""The protocol's own examination: do good models pass, and is each broken one told what is wrong with it?"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from conftest import GOLDEN, tiny_settings
from torch import Tensor, nn

import loopscope as ls
from loopscope.checks.model_contract import check_model
from loopscope.models.looped_model import LoopedModel, LoopState, initial_loop_state
from loopscope.models.packing import Layout
from loopscope.training.task_run import initial_model


class Plain(LoopedModel):
    """The simplest looped model that looks at its row: every token adds the mean of those before it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.num_loops, self.block_size, self.vocab_size = 3, 12, 7
        self.embedding, self.mix = nn.Embedding(7, 8), nn.Linear(8, 8)
        self.eval()

    def embed(self, tokens: Tensor, layout: Layout) -> LoopState:
        return initial_loop_state(self.embedding(tokens), layout)

    def step(self, state: LoopState) -> LoopState:
        padded = state.layout.unpack(state.hidden, state.layout.longest)
        before = padded.cumsum(1) / torch.arange(1, padded.shape[1] + 1)[:, None]
        return replace(state, hidden=torch.tanh(self.mix(state.layout.pack(padded + before))), loop=state.loop + 1)

    def pooled(self, state: LoopState, positions: Tensor | None = None) -> Tensor:
        return state.at(positions)

    def predict(self, pooled: Tensor) -> Tensor:
        return nn.functional.linear(pooled, self.embedding.weight)

    def halt(self, pooled: Tensor) -> Tensor | None:
        return pooled.sum(-1)


SHORT = [np.array(row) for row in ([1, 2, 0, 3, 2, 4, 1, 0], [2, 5, 1, 0, 3], [1, 2, 0, 3, 0, 0, 5, 1], [4])]
"""Rows of different lengths, two of which begin alike."""


def test_good_models_pass() -> None:
    golden = [ls.load_model(GOLDEN / name) for name in ("ouro-tiny", "huginn-tiny")]
    for model in (Plain(), *golden, initial_model(tiny_settings()).eval()):
        held = check_model(model, SHORT)
        assert len(held) == 13
        assert max(check.measured for check in held) < 1e-5
    assert ls.check_model is check_model


@dataclass(frozen=True)
class Remembering(LoopState):
    embedded: Tensor

    tokenwise: ClassVar[tuple[str, ...]] = ("hidden",)


def step_of(change: Callable[[Tensor, LoopState], Tensor]) -> dict[str, Any]:
    """A step whose new states are changed, by what they are and the state before."""

    def step(model: Plain, state: LoopState) -> LoopState:
        after = Plain.step(model, state)
        return replace(after, hidden=change(after.hidden, state))

    return {"step": step}


def embed_of(change: Callable[[LoopState], LoopState]) -> dict[str, Any]:
    return {"embed": lambda model, tokens, layout: change(Plain.embed(model, tokens, layout))}


def predict_of(change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    return {"predict": lambda model, pooled: change(Plain.predict(model, pooled))}


def of_all_tokens(hidden: Tensor, state: LoopState) -> Tensor:
    padded = state.layout.unpack(state.hidden, state.layout.longest)
    return hidden + state.layout.pack(padded.sum(1, keepdim=True).expand_as(padded))


def row_numbers(state: LoopState) -> LoopState:
    number = torch.repeat_interleave(torch.arange(len(state.lengths)), state.lengths)
    return replace(state, hidden=state.hidden + number[:, None])


def in_place(model: Plain, state: LoopState) -> LoopState:
    state.hidden.copy_(Plain.step(model, state).hidden)
    return replace(state, loop=state.loop + 1)


def of_the_first_token(model: Plain, state: LoopState, positions: Tensor | None = None) -> Tensor:
    return state.at(None if positions is None else torch.zeros_like(positions))


CALLS = count(1)
BROKEN: dict[str, tuple[str, dict[str, Any]]] = {
    "mixes rows": ("depends on the rows beside it", step_of(lambda new, state: new + state.hidden.mean(0))),
    "sees padding": ("depends on the rows beside it", step_of(lambda new, state: new / state.layout.longest)),
    "counts rows": ("where it stands in the batch", embed_of(row_numbers)),
    "forgets to count": (r"loop=state.loop \+ 1", {"step": lambda m, s: replace(Plain.step(m, s), loop=s.loop)}),
    "begins at one": ("at loop 0", embed_of(lambda state: replace(state, loop=torch.ones_like(state.lengths)))),
    "works in place": ("step changes 'hidden'", {"step": in_place}),
    "keeps a counter": ("a second time", step_of(lambda new, state: new + 0.01 * next(CALLS))),
    "drops out": ("call model.eval()", {"__init__": lambda model: Plain.__init__(model) or (model.train() and None)}),
    "looks at the deepest": ("joins others at a later loop", step_of(lambda new, s: new * (1 + s.loop.max()))),
    "looks ahead": ("causal = False", step_of(of_all_tokens)),
    "reads elsewhere": ("pooled at one position a row is not", {"pooled": of_the_first_token}),
    "one logit": (r"predict must make \[4, classes\]", predict_of(lambda logits: logits.sum(-1))),
    "flat only": ("any number of dimensions", {"predict": lambda m, pooled: Plain.predict(m, pooled.view(-1, 8))}),
    "explodes": ("NaN or infinite", predict_of(lambda logits: logits / 0.0)),
    "halts in columns": (r"halt must make \[4\]", {"halt": lambda model, pooled: pooled[..., :1]}),
    "another last loop": ("last_pooled differs", {"last_pooled": lambda model, state, at: model.pooled(state, at)}),
    "another half loop": (
        "early_pooled and finish_step differ",
        {
            "early_pooled": lambda model, state, at: (model.pooled(model.step(state), at), state),
            "finish_step": lambda model, begun: begun,
        },
    ),
    "no size": ("self.num_loops", {"__init__": lambda model: Plain.__init__(model) or delattr(model, "num_loops")}),
    "names no tokens": (
        "named in its `tokenwise`",
        embed_of(lambda state: Remembering(state.hidden, state.layout, state.loop, state.hidden)),
    ),
    "loses its state": (
        "step must return a Remembering",
        {
            **embed_of(lambda state: Remembering(state.hidden, state.layout, state.loop, state.loop)),
            "step": lambda model, s: Plain.step(model, LoopState(s.hidden, s.layout, s.loop)),
        },
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_model_is_told_what_is_wrong(kind: str) -> None:
    words, methods = BROKEN[kind]
    with pytest.raises(ls.UserError, match=words) as error:
        check_model(type("Broken", (Plain,), methods)())
    assert "\n" not in str(error.value)


def test_a_model_that_says_that_it_looks_ahead_may() -> None:
    def first(model: Plain, state: LoopState, positions: Tensor | None = None) -> Tensor:
        rows = state.at(torch.zeros_like(state.lengths))
        return rows if positions is not None else rows.repeat_interleave(state.lengths, 0)

    check_model(type("Honest", (Plain,), {"causal": False, **step_of(of_all_tokens)})())
    check_model(type("ReadAtItsFirstToken", (Plain,), {"causal": False, "pooled": first})())
