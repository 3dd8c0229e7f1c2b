"""The protocol's own examination: do good models pass, and is each broken one told what is wrong with it?"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from conftest import GOLDEN, tiny_settings
from torch import Tensor, nn

import loopscope as ls
from loopscope.checks.model_contract import check_model
from loopscope.models import Layout, LoopedModel, LoopState, initial_loop_state
from loopscope.training import initial_model


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


def test_good_models_pass() -> None:
    golden = [ls.load_model(GOLDEN / name) for name in ("ouro-tiny", "huginn-tiny")]
    for model in (Plain(), *golden, initial_model(tiny_settings()).eval()):
        held = check_model(model)
        assert len(held) == 11
        assert max(check.measured for check in held) < 1e-5
    assert ls.check_model is check_model


class MixesRows(Plain):
    def step(self, state: LoopState) -> LoopState:
        after = super().step(state)
        return replace(after, hidden=after.hidden + state.hidden.mean(0))


class SeesPadding(Plain):
    def step(self, state: LoopState) -> LoopState:
        after = super().step(state)
        return replace(after, hidden=after.hidden / state.layout.longest)


class CountsRows(Plain):
    def embed(self, tokens: Tensor, layout: Layout) -> LoopState:
        number = torch.repeat_interleave(torch.arange(len(layout.lengths)), layout.lengths)
        return initial_loop_state(self.embedding(tokens) + number[:, None], layout)


class ForgetsToCount(Plain):
    def step(self, state: LoopState) -> LoopState:
        return replace(super().step(state), loop=state.loop)


class BeginsAtOne(Plain):
    def embed(self, tokens: Tensor, layout: Layout) -> LoopState:
        return replace(super().embed(tokens, layout), loop=torch.ones_like(layout.lengths))


class WorksInPlace(Plain):
    def step(self, state: LoopState) -> LoopState:
        state.hidden.copy_(super().step(state).hidden)
        return replace(state, loop=state.loop + 1)


class KeepsACounter(Plain):
    calls = 0

    def step(self, state: LoopState) -> LoopState:
        self.calls += 1
        after = super().step(state)
        return replace(after, hidden=after.hidden + 0.01 * self.calls)


class DropsOut(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.train()

    def predict(self, pooled: Tensor) -> Tensor:
        return nn.functional.dropout(super().predict(pooled), 0.5, self.training)


class LooksAtTheDeepest(Plain):
    """Takes the loop of the batch for that of every row."""

    def step(self, state: LoopState) -> LoopState:
        after = super().step(state)
        return replace(after, hidden=after.hidden * (1 + state.loop.max()))


class LooksAhead(Plain):
    def step(self, state: LoopState) -> LoopState:
        after = super().step(state)
        padded = state.layout.unpack(state.hidden, state.layout.longest)
        return replace(after, hidden=after.hidden + state.layout.pack(padded.sum(1, keepdim=True).expand_as(padded)))


class ReadsElsewhere(Plain):
    def pooled(self, state: LoopState, positions: Tensor | None = None) -> Tensor:
        return state.at(None if positions is None else torch.zeros_like(positions))


class OneLogit(Plain):
    def predict(self, pooled: Tensor) -> Tensor:
        return pooled.sum(-1)


class FlatOnly(Plain):
    def predict(self, pooled: Tensor) -> Tensor:
        return super().predict(pooled.view(-1, 8))


class Explodes(Plain):
    def predict(self, pooled: Tensor) -> Tensor:
        return super().predict(pooled) / 0.0


class HaltsInColumns(Plain):
    def halt(self, pooled: Tensor) -> Tensor | None:
        return pooled[..., :1]


class OtherLastLoop(Plain):
    def last_pooled(self, state: LoopState, positions: Tensor) -> Tensor:
        return self.pooled(state, positions)


class NoSize(Plain):
    def __init__(self) -> None:
        super().__init__()
        del self.num_loops


@dataclass(frozen=True)
class Remembering(LoopState):
    embedded: Tensor

    tokenwise: ClassVar[tuple[str, ...]] = ("hidden",)


class NamesNoTokens(Plain):
    def embed(self, tokens: Tensor, layout: Layout) -> LoopState:
        state = super().embed(tokens, layout)
        return Remembering(state.hidden, layout, state.loop, state.hidden)


class LosesItsState(NamesNoTokens):
    def embed(self, tokens: Tensor, layout: Layout) -> LoopState:
        state = Plain.embed(self, tokens, layout)
        return Remembering(state.hidden, layout, state.loop, state.loop)

    def step(self, state: LoopState) -> LoopState:
        return Plain.step(self, LoopState(state.hidden, state.layout, state.loop))


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (MixesRows, "depends on the rows beside it"),
        (SeesPadding, "depends on the rows beside it"),
        (CountsRows, "where it stands in the batch"),
        (ForgetsToCount, "loop=state.loop \\+ 1"),
        (BeginsAtOne, "at loop 0"),
        (WorksInPlace, "step changes 'hidden'"),
        (KeepsACounter, "a second time"),
        (DropsOut, "call model.eval()"),
        (LooksAtTheDeepest, "joins others at a later loop"),
        (LooksAhead, "causal = False"),
        (ReadsElsewhere, "pooled at one position a row is not"),
        (OneLogit, "predict must make \\[4, classes\\]"),
        (FlatOnly, "any number of dimensions"),
        (Explodes, "NaN or infinite"),
        (HaltsInColumns, "halt must make \\[4\\]"),
        (OtherLastLoop, "last_pooled differs"),
        (NoSize, "self.num_loops"),
        (NamesNoTokens, "named in its `tokenwise`"),
        (LosesItsState, "step must return a Remembering"),
    ],
)
def test_a_broken_model_is_told_what_is_wrong(broken: Callable[[], LoopedModel], words: str) -> None:
    with pytest.raises(ls.UserError, match=words) as error:
        check_model(broken())
    assert "\n" not in str(error.value)


def test_a_model_that_says_that_it_looks_ahead_may() -> None:
    class Honest(LooksAhead):
        causal = False

    check_model(Honest())


def test_a_model_may_be_read_at_its_first_token() -> None:
    class Classifier(Plain):
        causal = False

        def pooled(self, state: LoopState, positions: Tensor | None = None) -> Tensor:
            rows = state.at(torch.zeros_like(state.lengths))
            return rows if positions is not None else rows.repeat_interleave(state.lengths, 0)

    check_model(Classifier())
