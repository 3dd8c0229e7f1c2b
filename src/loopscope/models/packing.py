"""How do rows of different lengths share a batch without padding? Their tokens lie one row after the other.

Everything that looks at one token at a time (projections, norms, MLPs, heads) runs on all P tokens at once; only
attention looks at rows, and it takes each run of rows of equal length as one dense batch. Rows may come in any order;
sorted by length there are the fewest runs.

Shapes: B rows, P tokens of all rows, M tokens of the longest row, H heads, K head width.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Self

import torch
from torch import Tensor

from loopscope.models.attention import causal_attention


class Run(NamedTuple):
    """Neighbouring rows of one length."""

    start: int  # of their tokens
    stop: int
    rows: int
    length: int


@dataclass(frozen=True)
class Layout:
    """Where the rows of a packed batch lie."""

    lengths: Tensor  # [B]

    @cached_property
    def starts(self) -> Tensor:
        """[B] the first token of every row."""
        return self.lengths.cumsum(0) - self.lengths

    @cached_property
    def positions(self) -> Tensor:
        """[P] the place of every token in its row."""
        return self._tokens(torch.zeros_like(self.lengths))

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        lengths, counts = torch.unique_consecutive(self.lengths.cpu(), return_counts=True)
        runs, start = [], 0
        for length, rows in zip(lengths.tolist(), counts.tolist(), strict=True):
            runs.append(Run(start, start + rows * length, rows, length))
            start += rows * length
        return tuple(runs)

    @property
    def longest(self) -> int:
        return max((run.length for run in self.runs), default=0)

    def take(self, rows: Tensor) -> tuple[Self, Tensor]:
        """The layout of these rows alone, and where their tokens lie in this one."""
        taken = type(self)(self.lengths[rows])
        return taken, taken._tokens(self.starts[rows])

    def pack(self, padded: Tensor) -> Tensor:
        """[B, M, ...] -> [P, ...]"""
        inside = torch.arange(padded.shape[1], device=padded.device) < self.lengths[:, None]
        return padded[inside]

    def unpack(self, packed: Tensor, longest: int) -> Tensor:
        """[P, ...] -> [B, M, ...], zeros beyond the rows' ends."""
        padded = packed.new_zeros((len(self.lengths), longest, *packed.shape[1:]))
        padded[torch.arange(longest, device=packed.device) < self.lengths[:, None]] = packed
        return padded

    def _tokens(self, first: Tensor) -> Tensor:
        """[P] numbers that count up from `first` [B] in every row."""
        total = int(self.lengths.sum())
        counting = torch.arange(total, device=self.lengths.device)
        return counting + torch.repeat_interleave(first - self.starts, self.lengths, output_size=total)


def packed_attention(query: Tensor, key: Tensor, value: Tensor, layout: Layout) -> Tensor:
    """[P, H, K] -> [P, H K]; every token attends to itself and to what stands before it in its row."""
    mixed = []
    for start, stop, rows, length in layout.runs:
        dense = (part[start:stop].view(rows, length, *part.shape[1:]).transpose(1, 2) for part in (query, key, value))
        mixed.append(causal_attention(*dense).transpose(1, 2).flatten(2).flatten(0, 1))
    return torch.cat(mixed) if mixed else query.flatten(1)  # no rows, no tokens
