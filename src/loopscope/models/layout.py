"""How do rows of different lengths share a batch without waste? Their tokens lie one row after the other.

Everything that looks at one token at a time (projections, norms, MLPs, heads) runs on all states at once, without
padding. Attention is causal, so rows that begin with the same tokens have the same states there, and a layout can keep
them once. Only attention looks at rows. It takes neighbouring rows of about the same length as one dense batch, which
may leave a few cells empty: its own arithmetic is a small part, and many small batches would cost more.

A row may end in branches, which continue its trunk each for itself (the choices of a question), and a row may come
after tokens whose keys and values are cached (kv_cache.py); cached_attention.py serves both.

Shapes: B rows, P tokens of all rows, S states (P, or fewer where prefixes are shared), M tokens of the longest row,
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

from loopscope.errors import UserError
from loopscope.models.kv_cache import AppendingRows, SharedPrefix

_Value = TypeVar("_Value")
_PADDING = 1.3
"""Rows join a group while its cells are at most this many times its tokens."""


class Sharing(NamedTuple):
    """Which tokens have a state in common."""

    places: Tensor  # [P] the state of every token
    owners: Tensor  # [S] the first token of every state


class AttentionGroup(NamedTuple):
    """Neighbouring rows that attend as one dense batch."""

    rows: slice
    cells: Tensor  # [R, M] the state in each cell; those beyond a row's end hold its last one


@dataclass(frozen=True)
class Layout:
    """Where the rows of a packed batch lie. Sorted by length they leave the fewest cells empty in attention."""

    lengths: Tensor  # [B]
    sharing: Sharing | None = None  # None: every token has its own state, in order
    branches: Tensor | None = None  # [B, C] tokens of each branch at the row's end; 0: there is none
    cache: AppendingRows | SharedPrefix | None = None  # the tokens before the rows' own
    _computed: dict[Hashable, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    def compute_once(self, name: Hashable, make: Callable[[], _Value]) -> _Value:
        """What `make` returns, made once for this layout: every layer and loop needs the same indices."""
        if name not in self._computed:
            self._computed[name] = make()
        value: _Value = self._computed[name]
        return value

    @cached_property
    def starts(self) -> Tensor:
        """[B] the first token of every row."""
        return self.lengths.cumsum(0) - self.lengths

    @cached_property
    def positions(self) -> Tensor:
        """[S] how many tokens come before every state's own."""
        numbers = self.count_up_from(torch.zeros_like(self.lengths))
        if self.branches is not None:
            numbers = numbers - self.per_token_of_parts(self._apart)
        if self.cache is not None:
            numbers = numbers + self.per_token(torch.from_numpy(self.cache.cached).to(numbers.device))
        return self._to_states(numbers)

    @cached_property
    def trunks(self) -> Tensor:
        """[B] the tokens of every row before its branches."""
        return self.lengths if self.branches is None else self.lengths - self.branches.sum(1)

    @cached_property
    def branch(self) -> Tensor:
        """[P] the branch of every token, from 1; 0: the trunk."""
        return self.per_token_of_parts(
            torch.arange(self._parts.shape[1], device=self.lengths.device).expand_as(self._parts)
        )

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

    def per_token_of_parts(self, values: Tensor) -> Tensor:
        """[B, 1 + C] of trunks and branches -> [P] of their tokens."""
        return torch.repeat_interleave(values.flatten(), self._parts.flatten(), output_size=self.tokens)

    def per_token(self, values: Tensor) -> Tensor:
        """[B, ...] of rows -> [P, ...] of their tokens."""
        return torch.repeat_interleave(values, self.lengths, dim=0, output_size=self.tokens)

    @cached_property
    def longest(self) -> int:
        """The tokens of the longest row."""
        return int(self.lengths.max()) if len(self.lengths) else 0

    @cached_property
    def max_context(self) -> int:
        """How many tokens the last one of the longest row sees, itself included."""
        if not len(self.lengths) or (self.branches is None and self.cache is None):
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
        cache = self.cache
        if cache is not None:
            cache = cache.take(np.arange(len(self.lengths))[rows.cpu().numpy()])
        branches = None if self.branches is None else self.branches[rows]
        taken = type(self)(self.lengths[rows], branches=branches, cache=cache)
        return taken, self.states(taken.count_up_from(self.starts[rows]))

    @classmethod
    def join(cls, layouts: Sequence[Self]) -> Self:
        """The rows of all, in that order, without any cache."""
        branches = None
        if any(layout.branches is not None for layout in layouts):
            each = [layout.lengths[:, None] * 0 if layout.branches is None else layout.branches for layout in layouts]
            branches = pad_sequence([counts for many in each for counts in many], batch_first=True)
        return cls(torch.cat([layout.lengths for layout in layouts]), branches=branches)

    def with_cache(self, cache: AppendingRows | SharedPrefix | None) -> Self:
        """The same rows, after these tokens."""
        return self if cache is None and self.cache is None else replace(self, cache=cache)

    def pack(self, padded: Tensor) -> Tensor:
        """[B, M, ...] -> [S, ...]"""
        self.require_plain("Layout.pack")
        return self._to_states(padded[self.mask(padded.shape[1])])

    def unpack(self, packed: Tensor, longest: int) -> Tensor:
        """[S, ...] -> [B, M, ...], zeros beyond the rows' ends."""
        self.require_plain("Layout.unpack")
        padded = packed.new_zeros((len(self.lengths), longest, *packed.shape[1:]))
        padded[self.mask(longest)] = packed if self.sharing is None else packed[self.sharing.places]
        return padded

    @cached_property
    def groups(self) -> tuple[AttentionGroup, ...]:
        keys = np.zeros(len(self.lengths), dtype=np.int64) if self.cache is None else self.cache.group_keys
        each = torch.stack((self.lengths.cpu(), torch.from_numpy(keys)), 1)
        alike, counts = torch.unique_consecutive(each, return_counts=True, dim=0)
        edges, first, row, tokens, longest, previous = [], 0, 0, 0, 0, -1
        for (length, key), count in zip(alike.tolist(), counts.tolist(), strict=True):
            wider = max(longest, length)
            if tokens and (key != previous or (row - first + count) * wider > _PADDING * (tokens + count * length)):
                edges.append((slice(first, row), longest))
                first, tokens, wider = row, 0, length
            row, tokens, longest, previous = row + count, tokens + count * length, wider, key
        edges.append((slice(first, row), longest))
        return tuple(self._group(*edge) for edge in edges if row)

    def _group(self, rows: slice, longest: int) -> AttentionGroup:
        cells = torch.arange(longest, device=self.lengths.device).minimum(self.lengths[rows, None] - 1)
        return AttentionGroup(rows, self.states(self.starts[rows, None] + cells))

    def gather_indices(self, *heads: int) -> list[list[Tensor]]:
        """For states with so many heads of each kind: the rows [R, heads, M] that every group gathers, kind by kind."""
        return self.compute_once(("gather", heads), lambda: self._gather_indices(heads))

    def _gather_indices(self, heads: tuple[int, ...]) -> list[list[Tensor]]:
        head_numbers = torch.arange(sum(heads), device=self.lengths.device)[:, None]
        rows = (cells[:, None] * sum(heads) + head_numbers for _, cells in self.groups)
        return [[kind.contiguous() for kind in torch.split(group, list(heads), dim=1)] for group in rows]

    def scatter_index(self, heads: int) -> Tensor:
        """[S H] where the attention of every state lies among the rows [R, H, M] of all groups."""
        return self.compute_once(("scatter", heads), lambda: self._scatter_index(heads))

    def _scatter_index(self, heads: int) -> Tensor:
        starts, widths, first = [], [], 0
        for _, cells in self.groups:
            count, longest = cells.shape
            starts.append(first + heads * longest * torch.arange(count, device=cells.device))
            widths.append(torch.full_like(starts[-1], longest))
            first += count * heads * longest
        width = torch.repeat_interleave(torch.cat(widths), self.lengths, output_size=self.tokens)
        every = torch.arange(heads, device=width.device)
        return self._to_states(self.count_up_from(torch.cat(starts))[:, None] + every * width[:, None]).flatten()

    def require_plain(self, function: str) -> None:
        """Refuses rows that attend beyond themselves, for a function that would ignore it."""
        if self.cache is not None or self.branches is not None:
            what = "a KV cache" if self.cache is not None else "branches"
            raise UserError(
                f"{function} knows rows alone, and these have {what}: attend with cached_attention, or do not declare "
                "kv_cache and branches for this model."
            )

    def mask(self, longest: int) -> Tensor:
        """[B, M] which cells of a padded batch are tokens."""
        return torch.arange(longest, device=self.lengths.device) < self.lengths[:, None]

    def _to_states(self, values: Tensor) -> Tensor:
        """[P, ...] -> [S, ...]"""
        return values if self.sharing is None else values[self.sharing.owners]

    def count_up_from(self, first: Tensor) -> Tensor:
        """[P] numbers that count up from `first` [B] in every row."""
        numbers = torch.arange(self.tokens, device=self.lengths.device)
        return numbers + torch.repeat_interleave(first - self.starts, self.lengths, output_size=self.tokens)


def share_prefixes(tokens: Tensor, lengths: Tensor) -> Layout:
    """The layout of padded tokens [B, M] in which rows that begin alike keep the states of their prefix once."""
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
