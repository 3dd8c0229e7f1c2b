"""The simple tier of the model contract: how is a network adapted that knows padded batches and nothing else?

Four methods around code that stays as it is: embed the tokens, apply the block to a padded batch with a mask, predict,
and (where there is a gate) halt. That is enough to be recorded, diagnosed, calibrated and run row by row. Text and
questions with choices need a KV cache and branches: `LoopedModel` itself, with `cached_attention`.

Shapes: B rows, M tokens of the longest row, D width, V classes.
"""

from abc import abstractmethod

from torch import Tensor

from loopscope.models.contract import LoopedModel, LoopState, initial_loop_state
from loopscope.models.layout import Layout


class SimpleLoopedModel(LoopedModel):
    """`predict(hidden [..., D]) -> [..., V]` and `halt(hidden [..., D]) -> [...]` are as in `LoopedModel`."""

    causal = False  # the careful answer: set it to True where a token sees none after it, and states can be shared

    @abstractmethod
    def embed_rows(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """The hidden states [B, M, D] before the first loop, of tokens [B, M]; `mask` [B, M] is false where padded."""

    @abstractmethod
    def block(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """One loop: [B, M, D] -> [B, M, D]; what is padded must not be attended to."""

    def embed(self, tokens: Tensor, layout: Layout) -> LoopState:
        hidden = self.embed_rows(layout.unpack(tokens, layout.longest), layout.mask(layout.longest))
        return initial_loop_state(layout.pack(hidden), layout)

    def step(self, state: LoopState) -> LoopState:
        layout = state.layout
        hidden = self.block(layout.unpack(state.hidden, layout.longest), layout.mask(layout.longest))
        return LoopState(layout.pack(hidden), layout, state.loop + 1)
