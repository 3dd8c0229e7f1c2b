"""The looped protocol: what must a model be able to do to be recorded, diagnosed and run adaptively?

Four things: `begin` (tokens -> state), `step` (the shared block, once), `predict` (state -> logits) and `halt`
(state -> halt logit, if it has a gate). Nothing in a state ties its rows together: rows can be taken out and joined
with rows at other loops, because the block is the same at every depth.

Shapes: B rows, M tokens of the longest row, P tokens of all rows, T loops, D width, V vocabulary.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from types import MappingProxyType
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from loopscope.errors import UserError
from loopscope.models.memory import GoingOn, Prefixed
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
        return cls(layout=Layout.join([state.layout for state in states]), **parts)

    @classmethod
    def _tensors(cls) -> list[str]:
        return [field.name for field in fields(cls) if field.name != "layout"]

    def at(self, positions: Tensor | None) -> Tensor:
        """The hidden state [B, D] at one position a row, or [S, D] of all."""
        if positions is None:
            return self.hidden
        return self.hidden.index_select(0, self.layout.states(self.layout.starts + positions))

    def after(self, past: GoingOn | Prefixed | None) -> Self:
        """The same rows, after tokens that are remembered."""
        return replace(self, layout=self.layout.after(past))


@dataclass(frozen=True)
class Loops:
    """What a model says at every loop: at every token, or (without the M) at one position a row."""

    logits: Tensor  # [T, B, M, V]
    hidden: Tensor  # [T, B, M, D] the pooled states r_t
    gate_logits: Tensor | None  # [T, B, M]


class LoopedModel(nn.Module):
    """Base of every looped model."""

    num_loops: int
    """T, the depth the model was trained for."""
    block_size: int
    """The longest row that the model takes."""
    vocab_size: int
    head_attends: ClassVar[bool] = False
    """Whether `readable` looks at other tokens, too, so that it must be asked of all of them."""
    tied: Mapping[str, str] = MappingProxyType({})
    """Tensors that are another one: a checkpoint may leave them out."""
    identify: Callable[[], str] | None = None
    """Hashes the weights, of a model that was loaded from a checkpoint; large ones take a while."""
    causal: ClassVar[bool] = True
    """Whether a token's state depends on the tokens before it only; then rows that begin alike can share states."""
    unneeded: ClassVar[tuple[str, ...]] = ()
    """Tensors that a checkpoint may have and that follow from others."""

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

    def readable(self, state: LoopState, positions: Tensor | None = None) -> Tensor:
        """What `predict` reads, in the shape of `pooled`, which it is unless a model does more before its head."""
        return self.pooled(state, positions)

    @abstractmethod
    def predict(self, readable: Tensor) -> Tensor:
        """Logits [..., V] from what the head reads [..., D]."""

    @abstractmethod
    def halt(self, pooled: Tensor) -> Tensor | None:
        """Halt logits [...] from pooled states [..., D]; None without a gate."""

    def last_pooled(self, state: LoopState, positions: Tensor) -> Tensor | None:
        """`pooled` after one more loop, the last of these rows, from a model that can leave out what is not read."""
        return None

    def begin(self, tokens: Tensor, lengths: Tensor | None = None, share: bool = False) -> LoopState:
        """The state before the first loop, of tokens [B, M] whose rows end at `lengths` (default: M).

        With `share`, rows that begin alike keep their common states once, if the model is causal.
        """
        rows, longest = tokens.shape
        if lengths is None:
            lengths = torch.full((rows,), longest, device=tokens.device)
        if lengths.shape != (rows,):
            raise UserError(f"lengths must be one number a row, got the shape {list(lengths.shape)} for {rows} rows.")
        layout = shared_beginnings(tokens, lengths) if share and self.causal else Layout(lengths)
        return self.begin_packed(layout.pack(tokens), layout)

    def begin_packed(self, tokens: Tensor, layout: Layout) -> LoopState:
        """The same of tokens [S] that lie as `layout` says."""
        self.check_length(layout.reach)
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
        pooled, readable = [], []
        for left in reversed(range(num_loops or self.num_loops)):
            if positions is not None and not left and (last := self.last_pooled(state, positions)) is not None:
                pooled.append(last)
                readable.append(last)
                break
            state = self.step(state)
            there = [self.pooled(state, positions)]
            there.append(self.readable(state, positions) if self.head_attends else there[0])
            if positions is None:
                there = [state.layout.unpack(states, tokens.shape[1]) for states in there]
            pooled.append(there[0])
            readable.append(there[1])
        hidden = torch.stack(pooled)
        return Loops(self.predict(torch.stack(readable) if self.head_attends else hidden), hidden, self.halt(hidden))


def first_state(hidden: Tensor, layout: Layout) -> LoopState:
    """The state of rows that have gone through no loop yet."""
    return LoopState(hidden, layout, torch.zeros_like(layout.lengths))
