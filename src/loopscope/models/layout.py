"""How do rows of different lengths share a batch without waste? Their tokens lie one row after the other.

Everything that looks at one token at a time (projections, norms, MLPs, heads) runs on all states at once, without
padding. Attention is causal, so rows that begin with the same tokens have the same states there, and a layout can keep
them once. Only attention looks at rows. It takes neighbouring rows of about the same length as one dense batch, which
may leave a few cells empty: its own arithmetic is a small part, and many small batches would cost more.

A row may end in branches, which continue its trunk each for itself (the choices of a question), and a row may come
after tokens whose keys and values are cached (kv_cache.py); cached_attention.py serves both.

Where things lie follows from how many tokens each row has, so it is worked out on the host, which need not wait for the
device to know it; only finished indices go there.

Shapes: B rows, P tokens of all rows, S states (P, or fewer where prefixes are shared), M tokens of the longest row,
R rows of a group, C branches, H heads, K head width.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loopscope.errors import UserError
from loopscope.models.device import upload
from loopscope.models.kv_cache import AppendingRows, Integers, SharedPrefix

_Value = TypeVar("_Value")
_PADDING = 1.3
"""Rows join a group while its cells are at most this many times its tokens."""


_OF_ANY_LOOP = (
    "counts",
    "starts",
    "positions",
    "host_positions",
    "contexts",
    "max_context",
    "longest",
    "tokens",
    "groups",
)
"""Of a layout of appending rows: what does not depend on where their loops lie in the cache."""
OF_ONE_LOOP = "at this loop"
"""What begins so among the names of what is computed once, does."""


def _is_of_any_loop(name: Hashable) -> bool:
    return not (isinstance(name, tuple) and name[0] == OF_ONE_LOOP)


class Sharing(NamedTuple):
    """Which tokens have a state in common."""

    places: Tensor  # [P] the state of every token
    owners: Tensor  # [S] the first token of every state


class Counts(NamedTuple):
    """The tokens of rows, where the host reads them."""

    lengths: Integers  # [B]
    branches: Integers | None  # [B, C]


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
    host: Counts | None = field(default=None, compare=False, repr=False)  # None: the device is asked, once
    _computed: dict[Hashable, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    @classmethod
    def from_host(
        cls,
        lengths: Integers,
        device: torch.device,
        branches: Integers | None = None,
        cache: AppendingRows | SharedPrefix | None = None,
    ) -> Self:
        """The layout of rows whose tokens were counted on the host: nobody has to wait for the device to know them."""
        there = None if branches is None else upload(branches, device)
        return cls(upload(lengths, device), branches=there, cache=cache, host=Counts(lengths, branches))

    @cached_property
    def counts(self) -> Counts:
        """The tokens of rows and branches, on the host."""
        if self.host is not None:
            return self.host
        return Counts(self.lengths.cpu().numpy(), None if self.branches is None else self.branches.cpu().numpy())

    @property
    def device(self) -> torch.device:
        return self.lengths.device

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
    def host_starts(self) -> Integers:
        return self.counts.lengths.cumsum() - self.counts.lengths

    @cached_property
    def positions(self) -> Tensor:
        """[S] how many tokens come before every state's own."""
        return self._to_states(upload(self.host_positions, self.device))

    @cached_property
    def host_positions(self) -> Integers:
        """[P] how many tokens come before every one in its row, or in its branch and the trunk before that."""
        first = np.zeros_like(self.host_starts) if self.cache is None else self.cache.cached
        numbers = count_up(first, self.counts.lengths)
        if self.branches is None:
            return numbers
        parts = self._parts
        apart = parts.cumsum(1) - parts - parts[:, :1]  # of other branches, between the trunk and each part
        return numbers - np.repeat(apart.clip(min=0).ravel(), parts.ravel())

    @cached_property
    def trunks(self) -> Tensor:
        """[B] the tokens of every row before its branches."""
        return self.lengths if self.branches is None else upload(self.host_trunks, self.device)

    @cached_property
    def host_trunks(self) -> Integers:
        lengths, branches = self.counts
        return lengths if branches is None else lengths - branches.sum(1)

    @cached_property
    def branch(self) -> Tensor:
        """[P] the branch of every token, from 1; 0: the trunk."""
        parts = self._parts
        return upload(np.repeat(np.tile(np.arange(parts.shape[1]), len(parts)), parts.ravel()), self.device)

    @property
    def _parts(self) -> Integers:
        """[B, 1 + C] the tokens of trunk and branches."""
        assert self.counts.branches is not None
        return np.concatenate((self.host_trunks[:, None], self.counts.branches), 1)

    @cached_property
    def longest(self) -> int:
        """The tokens of the longest row."""
        return int(self.counts.lengths.max(initial=0))

    @cached_property
    def max_context(self) -> int:
        """How many tokens the last one of the longest row sees, itself included."""
        return int(self.contexts.max(initial=0))

    @cached_property
    def contexts(self) -> Integers:
        """[B] how many tokens the one of each row that sees most sees, itself and what is cached included."""
        lengths, branches = self.counts
        own = lengths if branches is None else self.host_trunks + branches.max(1, initial=0)
        return own if self.cache is None else own + self.cache.cached

    @cached_property
    def tokens(self) -> int:
        return int(self.counts.lengths.sum())

    def states(self, tokens: Tensor) -> Tensor:
        """The states of these tokens (numbered over all rows)."""
        return tokens if self.sharing is None else self.sharing.places[tokens]

    def row_numbers(self, rows: Tensor | NDArray[Any]) -> Integers:
        """These rows, or those where this mask is true, by their numbers."""
        chosen = rows if isinstance(rows, np.ndarray) else rows.cpu().numpy()
        return np.arange(len(self.lengths))[chosen]

    def take(self, rows: Tensor | NDArray[Any]) -> tuple[Self, Tensor]:
        """The layout of these rows alone, sharing nothing, and where its states lie in this one."""
        numbers = self.row_numbers(rows)
        lengths, branches = self.counts
        taken = self.from_host(
            lengths[numbers],
            self.device,
            None if branches is None else branches[numbers],
            None if self.cache is None else self.cache.take(numbers),
        )
        return taken, self.states(upload(count_up(self.host_starts[numbers], lengths[numbers]), self.device))

    @classmethod
    def join(cls, layouts: Sequence[Self]) -> Self:
        """The rows of all, in that order, without any cache."""
        counts = [layout.counts for layout in layouts]
        lengths = np.concatenate([each.lengths for each in counts])
        widest = max(0 if each.branches is None else each.branches.shape[1] for each in counts)
        branches = np.zeros((len(lengths), widest), dtype=np.int64)
        ends = np.cumsum([len(each.lengths) for each in counts])
        for each, end in zip(counts, ends, strict=True):
            if each.branches is not None:
                branches[end - len(each.lengths) : end, : each.branches.shape[1]] = each.branches
        host = Counts(lengths, branches if widest else None)
        return cls(
            torch.cat([layout.lengths for layout in layouts]),
            branches=None if host.branches is None else upload(host.branches, layouts[0].device),
            host=host,
        )

    def with_cache(self, cache: AppendingRows | SharedPrefix | None) -> Self:
        """The same rows, after these tokens; where only the loop is another, what was worked out stays."""
        if cache is None and self.cache is None:
            return self
        layout = replace(self, cache=cache)
        if isinstance(cache, AppendingRows) and isinstance(self.cache, AppendingRows) and cache.follows(self.cache):
            layout.__dict__.update({name: self.__dict__[name] for name in _OF_ANY_LOOP if name in self.__dict__})
            layout._computed.update({name: made for name, made in self._computed.items() if _is_of_any_loop(name)})
        return layout

    def pack(self, padded: Tensor) -> Tensor:
        """[B, M, ...] -> [S, ...]"""
        self.require_plain("Layout.pack")
        return self._to_states(padded.flatten(0, 1).index_select(0, self._cells_inside(padded.shape[1])))

    def unpack(self, packed: Tensor, longest: int) -> Tensor:
        """[S, ...] -> [B, M, ...], zeros beyond the rows' ends."""
        self.require_plain("Layout.unpack")
        rows, tokens = len(self.lengths), packed if self.sharing is None else packed[self.sharing.places]
        cells = packed.new_zeros((rows * longest, *packed.shape[1:]))
        return cells.index_copy(0, self._cells_inside(longest), tokens).view(rows, longest, *packed.shape[1:])

    @cached_property
    def groups(self) -> tuple[AttentionGroup, ...]:
        keys = np.zeros(len(self.lengths), dtype=np.int64) if self.cache is None else self.cache.group_keys
        lengths = self.counts.lengths
        if len(keys) and (lengths == lengths[0]).all() and (keys == keys[0]).all():  # tokens of text: one of each row
            return (self._group(slice(0, len(keys)), int(lengths[0])),)
        each = torch.from_numpy(np.stack((self.counts.lengths, keys), 1))
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
        cells = torch.arange(longest, device=self.device).minimum(self.lengths[rows, None] - 1)
        return AttentionGroup(rows, self.states(self.starts[rows, None] + cells))

    def gather_indices(self, *heads: int) -> list[list[Tensor]]:
        """For states with so many heads of each kind: the rows [R, heads, M] that every group gathers, kind by kind."""
        return self.compute_once(("gather", heads), lambda: self._gather_indices(heads))

    def _gather_indices(self, heads: tuple[int, ...]) -> list[list[Tensor]]:
        head_numbers = torch.arange(sum(heads), device=self.device)[:, None]
        rows = (cells[:, None] * sum(heads) + head_numbers for _, cells in self.groups)
        return [[kind.contiguous() for kind in torch.split(group, list(heads), dim=1)] for group in rows]

    def scatter_index(self, heads: int) -> Tensor:
        """[S H] where the attention of every state lies among the rows [R, H, M] of all groups."""
        return self.compute_once(("scatter", heads), lambda: self._scatter_index(heads))

    def _scatter_index(self, heads: int) -> Tensor:
        widths = np.concatenate([np.full(cells.shape[0], cells.shape[1]) for _, cells in self.groups])
        rows = heads * widths
        first = count_up(rows.cumsum() - rows, self.counts.lengths)
        index, width = (upload(each, self.device)[:, None] for each in (first, np.repeat(widths, self.counts.lengths)))
        return self._to_states(index + torch.arange(heads, device=self.device) * width).flatten()

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

    def _cells_inside(self, longest: int) -> Tensor:
        """[P] where the tokens lie in a padded batch of this length."""
        first = np.arange(len(self.lengths)) * longest
        return self.compute_once(("inside", longest), lambda: upload(count_up(first, self.counts.lengths), self.device))

    def _to_states(self, values: Tensor) -> Tensor:
        """[P, ...] -> [S, ...]"""
        return values if self.sharing is None else values[self.sharing.owners]


def count_up(first: Integers, counts: Integers) -> Integers:
    """For each of `first` so many numbers, counting up from it."""
    if (counts == 1).all():  # text that goes on by a token
        return first.copy()
    return np.arange(counts.sum()) + np.repeat(first - (counts.cumsum() - counts), counts)


def share_prefixes(tokens: Tensor, lengths: Tensor, device: torch.device | None = None) -> Layout:
    """The layout of padded tokens [B, M] in which rows that begin alike keep the states of their prefix once.

    It lies on the device (default: that of the tokens); the host waits for neither if both are given on the CPU.
    """
    counts = lengths.cpu().numpy()
    inside = np.arange(tokens.shape[1]) < counts[:, None]
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
    device = tokens.device if device is None else device
    sharing = Sharing(*(upload(array, device) for array in (states, owners)))
    return Layout(upload(counts, device), sharing, host=Counts(counts, None))
