"""How do rows of different lengths share a batch without padding? Packed: the tokens of one row after the other.

Modules that process tokens independently (projections, norms, MLPs, heads) run on all states at once. Attention is
causal, so rows with a common prefix have the same states for it, and a layout can keep these states once. Only
attention (attention.py) uses the rows.

A row may end in branches, each of which continues the row's trunk (the choices of a question), and a row may come after
tokens with cached keys and values (kv_cache.py).

The places of tokens follow from the lengths of rows. LoopScope computes them on the host, which need not wait for the
device, and copies only finished indices. Names with `host` are NumPy arrays, all others are tensors on the device.

Shapes: B rows, P tokens of all rows, S states (P, or fewer where prefixes are shared), M tokens of the longest row,
C branches.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from loopscope.errors import UserError
from loopscope.models.device import upload
from loopscope.models.kv_cache import AppendingRows, CachedRows, Integers

CPU = torch.device("cpu")
_Value = TypeVar("_Value")


class Sharing(NamedTuple):
    """Describe which tokens share a state."""

    places: Tensor  # [P] the state of every token
    owners: Tensor  # [S] the first token of every state


@dataclass(frozen=True, eq=False)
class Layout:
    """Describe the rows of a packed batch; sorted by length they leave the fewest empty cells in attention."""

    host_lengths: Integers  # [B]
    device: torch.device = CPU
    host_branches: Integers | None = None  # [B, C] tokens of each branch at the row's end; 0: no branch
    cache: CachedRows | None = None  # the cached tokens before the rows
    sharing: Sharing | None = None  # None: every token has its own state, in order
    _computed: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)

    def compute_once(self, name: Hashable, make: Callable[[], _Value]) -> _Value:
        """The result of `make`, computed once for this layout: every layer and loop needs the same indices."""
        if name not in self._computed:
            self._computed[name] = make()
        return self._computed[name]

    @cached_property
    def lengths(self) -> Tensor:
        """[B] tokens of every row."""
        return upload(self.host_lengths, self.device)

    @cached_property
    def starts(self) -> Tensor:
        """[B] the first token of every row."""
        return upload(self.host_starts, self.device)

    @cached_property
    def host_starts(self) -> Integers:
        return self.host_lengths.cumsum() - self.host_lengths

    @cached_property
    def trunks(self) -> Tensor:
        """[B] the tokens of every row before its branches."""
        return upload(self.host_trunks, self.device)

    @cached_property
    def host_trunks(self) -> Integers:
        return self.host_lengths if self.host_branches is None else self.host_lengths - self.host_branches.sum(1)

    @property
    def _host_parts(self) -> Integers:
        """[B, 1 + C] the tokens of trunk and branches."""
        assert self.host_branches is not None
        return np.concatenate((self.host_trunks[:, None], self.host_branches), 1)

    @cached_property
    def branch(self) -> Tensor:
        """[P] the branch of every token, from 1; 0: the trunk."""
        parts = self._host_parts
        return upload(np.repeat(np.tile(np.arange(parts.shape[1]), len(parts)), parts.ravel()), self.device)

    @cached_property
    def positions(self) -> Tensor:
        """[S] the number of tokens before every state's own."""
        return self.to_states(upload(self.host_positions, self.device))

    @cached_property
    def host_positions(self) -> Integers:
        """[P] the number of tokens before every token in its row, or in its branch and trunk."""
        first = np.zeros_like(self.host_lengths) if self.cache is None else self.cache.cached
        if self.host_branches is None:
            return count_up(first, self.host_lengths)
        parts = self._host_parts
        starts = np.repeat(first[:, None], parts.shape[1], axis=1)
        starts[:, 1:] += self.host_trunks[:, None]
        return count_up(starts.ravel(), parts.ravel())

    @cached_property
    def host_contexts(self) -> Integers:
        """[B] the most tokens that a token of each row sees, with itself and the cached tokens."""
        longest = self.host_trunks if self.host_branches is None else self.host_trunks + self.host_branches.max(1)
        return longest if self.cache is None else longest + self.cache.cached

    @cached_property
    def max_context(self) -> int:
        return int(self.host_contexts.max(initial=0))

    @cached_property
    def longest(self) -> int:
        """The length of the longest row."""
        return int(self.host_lengths.max(initial=0))

    def states(self, tokens: Tensor) -> Tensor:
        """The states of these tokens (indices over all rows)."""
        return tokens if self.sharing is None else self.sharing.places[tokens]

    def states_at(self, positions: Tensor) -> Tensor:
        """[B] the states at one position in every row."""
        return self.states(self.starts + positions)

    def take(self, rows: Integers) -> tuple[Self, Tensor]:
        """The layout of only these rows, without sharing, and the places of its states in this layout."""
        lengths = self.host_lengths[rows]
        branches = None if self.host_branches is None else self.host_branches[rows]
        taken = type(self)(lengths, self.device, branches, None if self.cache is None else self.cache.take(rows))
        return taken, self.states(upload(count_up(self.host_starts[rows], lengths), self.device))

    @classmethod
    def join(cls, layouts: Sequence[Self]) -> Self:
        """The layout of all rows, in this order, without a cache."""
        lengths = np.concatenate([layout.host_lengths for layout in layouts])
        given = [layout.host_branches for layout in layouts]
        widest = max(0 if branches is None else branches.shape[1] for branches in given)
        joined = np.zeros((len(lengths), widest), dtype=np.int64)
        first = 0
        for layout, branches in zip(layouts, given, strict=True):
            if branches is not None:
                joined[first : first + len(branches), : branches.shape[1]] = branches
            first += len(layout.host_lengths)
        return cls(lengths, layouts[0].device, joined if widest else None)

    def with_cache(self, cache: CachedRows | None) -> Self:
        """The same rows after these cached tokens; if only the loop differs, computed indices are kept."""
        if cache is None and self.cache is None:
            return self
        if isinstance(cache, AppendingRows) and cache.follows(self.cache):
            layout = object.__new__(type(self))  # copy.copy takes several times as long, at every loop of every token
            layout.__dict__.update(self.__dict__, cache=cache)
            return layout
        return replace(self, cache=cache)

    def pack(self, padded: Tensor) -> Tensor:
        """[B, M, ...] -> [S, ...]"""
        self.require_plain("Layout.pack")
        return self.to_states(padded.flatten(0, 1).index_select(0, self._cells_inside(padded.shape[1])))

    def unpack(self, packed: Tensor, longest: int) -> Tensor:
        """[S, ...] -> [B, M, ...], zeros beyond the rows' ends."""
        self.require_plain("Layout.unpack")
        rows, tokens = len(self.host_lengths), packed if self.sharing is None else packed[self.sharing.places]
        cells = packed.new_zeros((rows * longest, *packed.shape[1:]))
        return cells.index_copy(0, self._cells_inside(longest), tokens).view(rows, longest, *packed.shape[1:])

    def mask(self, longest: int) -> Tensor:
        """[B, M] the cells of a padded batch that are tokens."""
        return torch.arange(longest, device=self.device) < self.lengths[:, None]

    def require_plain(self, function: str) -> None:
        """Reject rows with branches or a cache, for a function that would ignore them."""
        if self.cache is not None or self.host_branches is not None:
            what = "a KV cache" if self.cache is not None else "branches"
            raise UserError(
                f"{function} knows rows alone, and these have {what}: attend with cached_attention, or do not declare "
                "kv_cache and branches for this model."
            )

    def _cells_inside(self, longest: int) -> Tensor:
        """[P] the places of the tokens in a padded batch of this length."""
        first = np.arange(len(self.host_lengths)) * longest
        return self.compute_once(("inside", longest), lambda: upload(count_up(first, self.host_lengths), self.device))

    def to_states(self, values: Tensor) -> Tensor:
        """[P, ...] -> [S, ...]"""
        return values if self.sharing is None else values[self.sharing.owners]


def count_up(first: Integers, counts: Integers) -> Integers:
    """Count up from each of `first`, `counts` numbers each, in one array."""
    if (counts == 1).all():  # decoding: one token a row
        return first.copy()
    return np.arange(counts.sum()) + np.repeat(first - (counts.cumsum() - counts), counts)


def share_prefixes(tokens: Tensor, lengths: Tensor, device: torch.device | None = None) -> Layout:
    """The layout of padded tokens [B, M] in which rows with a common prefix share the states of the prefix.

    The indices are on `device` (default: that of the tokens); with both on the CPU, the host waits for no device.
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
    places[order] = np.maximum.accumulate(number, axis=0)  # a repeated prefix has the state of the previous row
    states = places[inside]
    owners = np.empty(new.sum(), dtype=np.int64)
    owners[states[::-1]] = np.arange(len(states))[::-1]
    device = tokens.device if device is None else device
    return Layout(counts, device, sharing=Sharing(upload(states, device), upload(owners, device)))
