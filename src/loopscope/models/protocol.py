"""The looped protocol: what must a model be able to do to be recorded, diagnosed and run adaptively?

Four things: `begin` (tokens -> state), `step` (the shared block, once), `predict` (state -> logits) and `halt`
(state -> halt logit, if it has a gate). Nothing in a state ties its rows together: rows can be taken out and joined
with rows at other loops, because the block is the same at every depth.

Shapes: B rows, M tokens of the longest row, P tokens of all rows, T loops, D width, V vocabulary.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from loopscope.errors import UserError
from loopscope.models.packing import Layout, shared_beginnings


@dataclass(frozen=True)
class LoopState:
    """The rows of a batch, each at its own loop, packed: a row's tokens stand together, and there is no padding.

    A model may add tensors of its own: [B], or [P, ...] if they go by token (`tokenwise` names those).
    """

    hidden: Tensor  # [S, D] what the next loop starts from
    layout: Layout  # where the rows lie in it
    loop: Tensor  # [B] loops applied so far

    tokenwise: ClassVar[tuple[str, ...]] = ("hidden",)

    @property
    def lengths(self) -> Tensor:
        """[B] tokens of each row."""
        return self.layout.lengths

    def take(self, rows: Tensor) -> Self:
        """The rows at these indices (or where this mask is true), in that order."""
        layout, tokens = self.layout.take(rows)
        parts = {name: getattr(self, name) for name in self._tensors()}
        parts = {
            name: value.index_select(0, tokens) if name in self.tokenwise else value[rows]
            for name, value in parts.items()
        }
        return type(self)(layout=layout, **parts)

    @classmethod
    def join(cls, states: Sequence[Self]) -> Self:
        """All rows of `states`, in that order."""
        states = [state if state.layout.sharing is None else state.take(state.loop >= 0) for state in states]
        parts = {name: torch.cat([getattr(state, name) for state in states]) for name in cls._tensors()}
        return cls(layout=Layout(torch.cat([state.lengths for state in states])), **parts)

    @classmethod
    def _tensors(cls) -> list[str]:
        return [field.name for field in fields(cls) if field.name != "layout"]

    def at(self, positions: Tensor | None) -> Tensor:
        """The hidden state [B, D] at one position a row, or [S, D] of all."""
        if positions is None:
            return self.hidden
        return self.hidden.index_select(0, self.layout.states(self.layout.starts + positions))


@dataclass(frozen=True)
class Loops:
    """What a model says at every loop: at every token, or (without the M) at one position a row."""

    logits: Tensor  # [T, B, M, V]
    hidden: Tensor  # [T, B, M, D] the pooled states, as the head reads them
    gate_logits: Tensor | None  # [T, B, M]


class LoopedModel(nn.Module):
    """Base of every looped model."""

    num_loops: int
    """T, the depth the model was trained for."""
    block_size: int
    """The longest row that the model takes."""
    vocab_size: int
    identify: Callable[[], str] | None = None
    """Hashes the weights, of a model that was loaded from a checkpoint; large ones take a while."""

    @cached_property
    def weights_sha256(self) -> str | None:
        """What tells this model from any other, if it was loaded."""
        return None if self.identify is None else self.identify()

    @abstractmethod
    def first(self, tokens: Tensor, layout: Layout) -> LoopState:
        """The state before the first loop, of the tokens [S] that lie as `layout` says."""

    @abstractmethod
    def step(self, state: LoopState) -> LoopState:
        """One application of the shared block."""

    @abstractmethod
    def pooled(self, state: LoopState, positions: Tensor | None = None) -> Tensor:
        """r_t, the state as the head and the gate read it: [B, D] at one position a row, or [S, D] of all."""

    @abstractmethod
    def predict(self, pooled: Tensor) -> Tensor:
        """Logits [..., V] from pooled states [..., D]."""

    @abstractmethod
    def halt(self, pooled: Tensor) -> Tensor | None:
        """Halt logits [...] from pooled states [..., D]; None without a gate."""

    def last_pooled(self, state: LoopState, positions: Tensor) -> Tensor:
        """`pooled` after one more loop, the last of these rows; a model may leave out what is not read."""
        return self.pooled(self.step(state), positions)

    def begin(self, tokens: Tensor, lengths: Tensor | None = None, share: bool = False) -> LoopState:
        """The state before the first loop, of tokens [B, M] whose rows end at `lengths` (default: M).

        With `share`, rows that begin alike keep their common states once.
        """
        rows, longest = tokens.shape
        if lengths is None:
            lengths = torch.full((rows,), longest, device=tokens.device)
        if lengths.shape != (rows,):
            raise UserError(f"lengths must be one number a row, got the shape {list(lengths.shape)} for {rows} rows.")
        layout = shared_beginnings(tokens, lengths) if share else Layout(lengths)
        return self.begin_packed(layout.pack(tokens), layout)

    def begin_packed(self, tokens: Tensor, layout: Layout) -> LoopState:
        """The same of tokens [S] that lie as `layout` says."""
        self.check_length(layout.longest)
        return self.first(tokens, layout)

    def check_length(self, length: int) -> None:
        """Refuses rows that are too long for the model."""
        if length > self.block_size:
            raise UserError(
                f"The examples have {length} tokens, but the model's block size is {self.block_size}; nothing is cut "
                "off, so choose shorter examples or a model with a larger block size."
            )

    def loops(
        self,
        tokens: Tensor,
        lengths: Tensor | None = None,
        num_loops: int | None = None,
        positions: Tensor | None = None,
    ) -> Loops:
        """Logits, pooled states and halt logits of every loop, at every token or at one position a row.

        At every token, pooled states beyond a row's end are zero.
        """
        if num_loops is not None and num_loops < 1:
            raise UserError(f"num_loops must be at least 1, got {num_loops}.")
        state = self.begin(tokens, lengths, share=True)
        pooled = []
        for left in reversed(range(num_loops or self.num_loops)):
            if positions is not None and not left:
                pooled.append(self.last_pooled(state, positions))
                break
            state = self.step(state)
            there = self.pooled(state, positions)
            pooled.append(there if positions is not None else state.layout.unpack(there, tokens.shape[1]))
        hidden = torch.stack(pooled)
        return Loops(self.predict(hidden), hidden, self.halt(hidden))


def first_state(hidden: Tensor, layout: Layout) -> LoopState:
    """The state of rows that have gone through no loop yet."""
    return LoopState(hidden, layout, torch.zeros_like(layout.lengths))
