"""How do rows of different lengths share a batch without waste? Their tokens lie one row after the other.

Everything that looks at one token at a time (projections, norms, MLPs, heads) runs on all states at once, without
padding. Attention is causal, so rows that begin with the same tokens have the same states there, and a layout can keep
them once. Only attention looks at rows. It takes neighbouring rows of about the same length as one dense batch, which
may leave a few slots empty: its own arithmetic is a small part, and many small batches would cost more.

A row may end in branches, which continue its trunk each for itself (the choices of a question), and a row may come
after tokens whose keys and values are remembered (memory.py); attending.py serves both.

Shapes: B rows, P tokens of all rows, S states (P, or fewer where beginnings are shared), M tokens of the longest row,
R rows of a group, C branches, H heads, K head width.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from loopscope.models.attention import Rotary, attention_at, causal_attention
from loopscope.models.memory import GoingOn, Prefixed

_Made = TypeVar("_Made")
_PADDING = 1.3
"""Rows join a group while its slots are at most this many times its tokens."""


class Sharing(NamedTuple):
    """Which tokens have a state in common."""

    places: Tensor  # [P] the state of every token
    owners: Tensor  # [S] the first token of every state


class Group(NamedTuple):
    """Neighbouring rows that attend as one dense batch."""

    rows: slice
    slots: Tensor  # [R, M] the state in each slot; those beyond a row's end hold its last one


@dataclass(frozen=True)
class Layout:
    """Where the rows of a packed batch lie. Sorted by length they leave the fewest slots empty in attention."""

    lengths: Tensor  # [B]
    sharing: Sharing | None = None  # None: every token has its own state, in order
    branches: Tensor | None = None  # [B, C] tokens of each branch at the row's end; 0: there is none
    past: GoingOn | Prefixed | None = None  # the tokens before the rows' own
    _kept: dict[Hashable, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    def once(self, name: Hashable, make: Callable[[], _Made]) -> _Made:
        """What `make` returns, made once for this layout: every layer and loop needs the same indices."""
        if name not in self._kept:
            self._kept[name] = make()
        kept: _Made = self._kept[name]
        return kept

    @cached_property
    def starts(self) -> Tensor:
        """[B] the first token of every row."""
        return self.lengths.cumsum(0) - self.lengths

    @cached_property
    def positions(self) -> Tensor:
        """[S] how many tokens come before every state's own."""
        counted = self.counting(torch.zeros_like(self.lengths))
        if self.branches is not None:
            counted = counted - self.of_tokens(self._apart)
        if self.past is not None:
            counted = counted + self.spread(torch.from_numpy(self.past.before).to(counted.device))
        return self._of_states(counted)

    @cached_property
    def trunks(self) -> Tensor:
        """[B] the tokens of every row before its branches."""
        return self.lengths if self.branches is None else self.lengths - self.branches.sum(1)

    @cached_property
    def branch(self) -> Tensor:
        """[P] the branch of every token, from 1; 0: the trunk."""
        return self.of_tokens(torch.arange(self._parts.shape[1], device=self.lengths.device).expand_as(self._parts))

    @property
    def _parts(self) -> Tensor:
        """[B, 1 + C] the tokens of trunk and branches."""
        assert self.branches is not None
        return torch.cat((self.trunks[:, None], self.branches), 1)

    @property
    def _apart(self) -> Tensor:
        """[B, 1 + C] how many tokens of other branches stand between the trunk and each part."""
        parts = self._parts
        return (parts.cumsum(1) - parts - self.trunks[:, None]).clamp(min=0)

    def of_tokens(self, values: Tensor) -> Tensor:
        """[B, 1 + C] of trunks and branches -> [P] of their tokens."""
        return torch.repeat_interleave(values.flatten(), self._parts.flatten(), output_size=self.tokens)

    def spread(self, values: Tensor) -> Tensor:
        """[B, ...] of rows -> [P, ...] of their tokens."""
        return torch.repeat_interleave(values, self.lengths, dim=0, output_size=self.tokens)

    @cached_property
    def longest(self) -> int:
        """The tokens of the longest row."""
        return int(self.lengths.max()) if len(self.lengths) else 0

    @cached_property
    def reach(self) -> int:
        """How many tokens the last one of the longest row sees, itself included."""
        if not len(self.lengths) or (self.branches is None and self.past is None):
            return self.longest
        return int(self.positions.max()) + 1

    @cached_property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    def states(self, tokens: Tensor) -> Tensor:
        """The states of these tokens (numbered over all rows)."""
        return tokens if self.sharing is None else self.sharing.places[tokens]

    def take(self, rows: Tensor) -> tuple[Self, Tensor]:
        """The layout of these rows alone, sharing nothing, and where its states lie in this one."""
        past = self.past
        if past is not None:
            past = past.take(np.arange(len(self.lengths))[rows.cpu().numpy()])
        branches = None if self.branches is None else self.branches[rows]
        taken = type(self)(self.lengths[rows], branches=branches, past=past)
        return taken, self.states(taken.counting(self.starts[rows]))

    @classmethod
    def join(cls, layouts: Sequence[Self]) -> Self:
        """The rows of all, in that order; what was before them must be said again."""
        branches = None
        if any(layout.branches is not None for layout in layouts):
            each = [layout.lengths[:, None] * 0 if layout.branches is None else layout.branches for layout in layouts]
            branches = pad_sequence([counts for many in each for counts in many], batch_first=True)
        return cls(torch.cat([layout.lengths for layout in layouts]), branches=branches)

    def after(self, past: GoingOn | Prefixed | None) -> Self:
        """The same rows, after these tokens."""
        return self if past is None and self.past is None else replace(self, past=past)

    def pack(self, padded: Tensor) -> Tensor:
        """[B, M, ...] -> [S, ...]"""
        return self._of_states(padded[self._inside(padded.shape[1])])

    def unpack(self, packed: Tensor, longest: int) -> Tensor:
        """[S, ...] -> [B, M, ...], zeros beyond the rows' ends."""
        padded = packed.new_zeros((len(self.lengths), longest, *packed.shape[1:]))
        padded[self._inside(longest)] = packed if self.sharing is None else packed[self.sharing.places]
        return padded

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        kinds = np.zeros(len(self.lengths), dtype=np.int64) if self.past is None else self.past.kinds
        each = torch.stack((self.lengths.cpu(), torch.from_numpy(kinds)), 1)
        alike, counts = torch.unique_consecutive(each, return_counts=True, dim=0)
        edges, first, row, tokens, longest, before = [], 0, 0, 0, 0, -1
        for (length, kind), count in zip(alike.tolist(), counts.tolist(), strict=True):
            wider = max(longest, length)
            if tokens and (kind != before or (row - first + count) * wider > _PADDING * (tokens + count * length)):
                edges.append((slice(first, row), longest))
                first, tokens, wider = row, 0, length
            row, tokens, longest, before = row + count, tokens + count * length, wider, kind
        edges.append((slice(first, row), longest))
        return tuple(self._group(*edge) for edge in edges if row)

    def _group(self, rows: slice, longest: int) -> Group:
        slots = torch.arange(longest, device=self.lengths.device).minimum(self.lengths[rows, None] - 1)
        return Group(rows, self.states(self.starts[rows, None] + slots))

    def gathers(self, *heads: int) -> list[list[Tensor]]:
        """For states with so many heads of each kind: the rows [R, heads, M] that every group gathers, kind by kind."""
        return self.once(("gathers", heads), lambda: self._gathers(heads))

    def _gathers(self, heads: tuple[int, ...]) -> list[list[Tensor]]:
        everyone = torch.arange(sum(heads), device=self.lengths.device)[:, None]
        rows = (slots[:, None] * sum(heads) + everyone for _, slots in self.groups)
        return [[kind.contiguous() for kind in torch.split(group, list(heads), dim=1)] for group in rows]

    def answers(self, heads: int) -> Tensor:
        """[S H] where the attention of every state lies among the rows [R, H, M] of all groups."""
        return self.once(("answers", heads), lambda: self._answers(heads))

    def _answers(self, heads: int) -> Tensor:
        starts, widths, first = [], [], 0
        for _, slots in self.groups:
            count, longest = slots.shape
            starts.append(first + heads * longest * torch.arange(count, device=slots.device))
            widths.append(torch.full_like(starts[-1], longest))
            first += count * heads * longest
        width = torch.repeat_interleave(torch.cat(widths), self.lengths, output_size=self.tokens)
        every = torch.arange(heads, device=width.device)
        return self._of_states(self.counting(torch.cat(starts))[:, None] + every * width[:, None]).flatten()

    def _inside(self, longest: int) -> Tensor:
        return torch.arange(longest, device=self.lengths.device) < self.lengths[:, None]

    def _of_states(self, values: Tensor) -> Tensor:
        """[P, ...] -> [S, ...]"""
        return values if self.sharing is None else values[self.sharing.owners]

    def counting(self, first: Tensor) -> Tensor:
        """[P] numbers that count up from `first` [B] in every row."""
        counting = torch.arange(self.tokens, device=self.lengths.device)
        return counting + torch.repeat_interleave(first - self.starts, self.lengths, output_size=self.tokens)


def shared_beginnings(tokens: Tensor, lengths: Tensor) -> Layout:
    """The layout of padded tokens [B, M] in which rows that begin alike keep the states of their beginnings once."""
    inside = np.arange(tokens.shape[1]) < lengths.cpu().numpy()[:, None]
    padded = np.where(inside, tokens.cpu().numpy(), -1)
    order = np.lexsort(padded.T[::-1])
    ordered = padded[order]
    new = inside[order]
    new[1:] &= ~np.logical_and.accumulate(ordered[1:] == ordered[:-1], axis=1)
    number = np.where(new, new.cumsum().reshape(new.shape) - 1, -1)
    places = np.empty_like(number)
    places[order] = np.maximum.accumulate(number, axis=0)  # what is not new has the state of the last new one above
    states = places[inside]
    owners = np.empty(new.sum(), dtype=np.int64)
    owners[states[::-1]] = np.arange(len(states))[::-1]
    return Layout(lengths, Sharing(*(torch.from_numpy(array).to(tokens.device) for array in (states, owners))))


def packed_attention(projected: Tensor, heads: tuple[int, int, int], layout: Layout, rotary: Rotary | None) -> Tensor:
    """[S, query, key and value heads, K] -> [S, H K]; every token attends to itself and to its row before it."""
    if not len(projected):
        return projected[:, : heads[0]].flatten(1)
    mixed = []
    for query, key, value in _dense(projected, layout.gathers(*heads)):
        if rotary is not None:
            query, key = rotary.turn(query), rotary.turn(key)
        mixed.append(causal_attention(query, key, value).flatten(0, 2)[:, None])
    (answers,) = _gather(_joined(mixed), layout.answers(heads[0]))
    return answers.view(len(projected), -1)


def packed_attention_at(
    query: Tensor, projected: Tensor, positions: Tensor, layout: Layout, rotary: Rotary | None
) -> Tensor:
    """One query a row [B, H, K], at `positions` [B]; key and value heads [S, 2 H, K] of all states -> [B, H K]."""
    if not len(projected):
        return query.flatten(1)
    query = query[:, :, None]
    if rotary is not None:
        query = rotary.turn(query, positions[:, None])
    mixed = []
    dense = _dense(projected, layout.gathers(query.shape[1], query.shape[1]))
    for (rows, _), (key, value) in zip(layout.groups, dense, strict=True):
        turned = key if rotary is None else rotary.turn(key)
        mixed.append(attention_at(query[rows], turned, value, positions[rows]).flatten(1))
    return _joined(mixed)


def _dense(projected: Tensor, gathers: list[list[Tensor]]) -> list[list[Tensor]]:
    """[S, heads, K] -> for every group [R, heads, M, K] of each kind; gathering puts the heads in front at no cost."""
    flat = iter(_gather(projected, *(index for group in gathers for index in group)))
    return [[next(flat) for _ in group] for group in gathers]


def _gather(states: Tensor, *indices: Tensor) -> tuple[Tensor, ...]:
    """Rows [.., K] of states [S, heads, K], numbered over both."""
    taken: tuple[Tensor, ...] = _Gather.apply(states, *indices)  # type: ignore[no-untyped-call]
    return taken


class _Gather(torch.autograd.Function):
    """All gradients are added into one buffer; autograd would make one for every index and add those."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, *indices: Tensor) -> tuple[Tensor, ...]:
        ctx.shape, ctx.indices = states.shape, indices
        rows = states.flatten(0, 1)
        return tuple(rows.index_select(0, index.flatten()).view(*index.shape, -1) for index in indices)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        states = gradients[0].new_zeros(ctx.shape)
        for index, gradient in zip(ctx.indices, gradients, strict=True):
            states.flatten(0, 1).index_add_(0, index.flatten(), gradient.reshape(-1, ctx.shape[-1]))
        return states, *(None for _ in ctx.indices)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
