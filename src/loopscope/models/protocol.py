"""The looped protocol: what must a model be able to do to be recorded, diagnosed and run adaptively?

Four things: `begin` (tokens -> state), `step` (the shared block, once), `predict` (state -> logits) and `halt`
(state -> halt logit, if it has a gate). Nothing in a state ties its rows together: rows can be taken out and joined
with rows at other loops, because the block is the same at every depth.

Shapes: B rows, M tokens (right-padded), T loops, D width, V vocabulary.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loopscope.errors import UserError


@dataclass(frozen=True)
class LoopState:
    """The rows of a batch, each at its own loop. A model may add tensors: [B], or [B, M, ...] if they go by token."""

    hidden: Tensor  # [B, M, D] what the next loop starts from
    lengths: Tensor  # [B] tokens of each row; what lies beyond is padding and is never read
    loop: Tensor  # [B] loops applied so far

    def take(self, rows: Tensor) -> Self:
        """The rows at these indices (or where this mask is true), in that order."""
        return type(self)(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})

    @classmethod
    def join(cls, states: Sequence[Self]) -> Self:
        """All rows of `states`, padded to the longest."""
        longest = max(state.hidden.shape[1] for state in states)
        joined: dict[str, Any] = {}
        for field in fields(cls):
            parts = [getattr(state, field.name) for state in states]
            if parts[0].ndim > 1:
                parts = [F.pad(part, [0, 0] * (part.ndim - 2) + [0, longest - part.shape[1]]) for part in parts]
            joined[field.name] = torch.cat(parts)
        return cls(**joined)


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
        """r_t, the state as the head and the gate read it: [B, D] at one position a row, or [B, M, D] at all."""

    @abstractmethod
    def predict(self, state: LoopState, positions: Tensor | None = None) -> Tensor:
        """Logits [B, V] at one position a row, or [B, M, V] at all."""

    @abstractmethod
    def halt(self, state: LoopState, positions: Tensor | None = None) -> Tensor | None:
        """Halt logits [B] at one position a row, or [B, M] at all; None without a gate."""

    def loops(
        self,
        tokens: Tensor,
        lengths: Tensor | None = None,
        num_loops: int | None = None,
        positions: Tensor | None = None,
    ) -> Loops:
        """Logits, pooled states and halt logits of every loop, at every token or at one position a row.

        At every token the entries of padding hold no meaning.
        """
        if num_loops is not None and num_loops < 1:
            raise UserError(f"num_loops must be at least 1, got {num_loops}.")
        state = self.begin(tokens, lengths)
        logits, hidden, gates = [], [], []
        for _ in range(num_loops or self.num_loops):
            state = self.step(state)
            logits.append(self.predict(state, positions))
            hidden.append(self.pooled(state, positions))
            gates.append(self.halt(state, positions))
        halting = [gate for gate in gates if gate is not None]
        return Loops(torch.stack(logits), torch.stack(hidden), torch.stack(halting) if halting else None)


def begin_state(hidden: Tensor, lengths: Tensor | None) -> LoopState:
    """The state of rows that have gone through no loop yet."""
    rows, longest = hidden.shape[:2]
    if lengths is not None and lengths.shape != (rows,):
        raise UserError(f"lengths must be one number a row, got the shape {list(lengths.shape)} for {rows} rows.")
    if lengths is None:
        lengths = torch.full((rows,), longest, device=hidden.device)
    return LoopState(hidden, lengths, torch.zeros(rows, dtype=torch.long, device=hidden.device))


def at_positions(hidden: Tensor, positions: Tensor | None) -> Tensor:
    """[B, D] at one position a row; all of [B, M, D] without positions."""
    if positions is None:
        return hidden
    return hidden[torch.arange(len(hidden), device=hidden.device), positions]
