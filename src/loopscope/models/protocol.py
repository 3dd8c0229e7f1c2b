"""The looped protocol: what must a model be able to do to be recorded, diagnosed and run adaptively?

Four things: `begin` (tokens -> state), `step` (the shared block, once), `predict` (state -> logits) and `halt`
(state -> halt logit, if it has a gate). Nothing in a state ties its rows together: rows can be taken out and joined
with rows at other loops, because the block is the same at every depth.

Shapes: B rows, M tokens of the longest row, P tokens of all rows, T loops, D width, V vocabulary.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from loopscope.errors import UserError
from loopscope.models.packing import Layout


@dataclass(frozen=True)
class LoopState:
    """The rows of a batch, each at its own loop, packed: a row's tokens stand together, and there is no padding.

    A model may add tensors of its own: [B], or [P, ...] if they go by token (`tokenwise` names those).
    """

    hidden: Tensor  # [P, D] what the next loop starts from
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
        parts = {name: getattr(self, name)[tokens if name in self.tokenwise else rows] for name in self._tensors()}
        return type(self)(layout=layout, **parts)

    @classmethod
    def join(cls, states: Sequence[Self]) -> Self:
        """All rows of `states`, in that order."""
        parts = {name: torch.cat([getattr(state, name) for state in states]) for name in cls._tensors()}
        return cls(layout=Layout(torch.cat([state.lengths for state in states])), **parts)

    @classmethod
    def _tensors(cls) -> list[str]:
        return [field.name for field in fields(cls) if field.name != "layout"]

    def at(self, positions: Tensor | None) -> Tensor:
        """The hidden state [B, D] at one position a row, or [P, D] of all tokens."""
        return self.hidden if positions is None else self.hidden[self.layout.starts + positions]


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

    @abstractmethod
    def begin(self, tokens: Tensor, lengths: Tensor | None = None) -> LoopState:
        """The state before the first loop, of tokens [B, M] whose rows end at `lengths` (default: M)."""

    @abstractmethod
    def step(self, state: LoopState) -> LoopState:
        """One application of the shared block."""

    @abstractmethod
    def pooled(self, state: LoopState, positions: Tensor | None = None) -> Tensor:
        """r_t, the state as the head and the gate read it: [B, D] at one position a row, or [P, D] at all tokens."""

    @abstractmethod
    def predict(self, state: LoopState, positions: Tensor | None = None) -> Tensor:
        """Logits [B, V] at one position a row, or [P, V] at all tokens."""

    @abstractmethod
    def halt(self, state: LoopState, positions: Tensor | None = None) -> Tensor | None:
        """Halt logits [B] at one position a row, or [P] at all tokens; None without a gate."""

    def loops(
        self,
        tokens: Tensor,
        lengths: Tensor | None = None,
        num_loops: int | None = None,
        positions: Tensor | None = None,
    ) -> Loops:
        """Logits, pooled states and halt logits of every loop, at every token or at one position a row.

        At every token, what lies beyond a row's end is zero.
        """
        if num_loops is not None and num_loops < 1:
            raise UserError(f"num_loops must be at least 1, got {num_loops}.")
        state = self.begin(tokens, lengths)

        def shaped(state: LoopState, values: Tensor) -> Tensor:
            return values if positions is not None else state.layout.unpack(values, tokens.shape[1])

        logits, hidden, gates = [], [], []
        for _ in range(num_loops or self.num_loops):
            state = self.step(state)
            logits.append(shaped(state, self.predict(state, positions)))
            hidden.append(shaped(state, self.pooled(state, positions)))
            gates.append(self.halt(state, positions))
        halting = [shaped(state, gate) for gate in gates if gate is not None]
        return Loops(torch.stack(logits), torch.stack(hidden), torch.stack(halting) if halting else None)


def row_layout(tokens: Tensor, lengths: Tensor | None) -> Layout:
    """The layout of padded tokens [B, M] whose rows end at `lengths` (default: M)."""
    rows, longest = tokens.shape
    if lengths is None:
        lengths = torch.full((rows,), longest, device=tokens.device)
    if lengths.shape != (rows,):
        raise UserError(f"lengths must be one number a row, got the shape {list(lengths.shape)} for {rows} rows.")
    return Layout(lengths)


def first_state(hidden: Tensor, layout: Layout) -> LoopState:
    """The state of rows that have gone through no loop yet."""
    return LoopState(hidden, layout, torch.zeros_like(layout.lengths))
