"""What do later tokens need of earlier ones? Their keys and values: in every layer, and in every loop.

A memory keeps them for some rows, in one place for every slot (the name of a layer) and level (the loop; 0 is what
comes before the first). Two kinds of layout reach into one: rows that go on with what they have said so far add their
new tokens to it, and rows that begin with one long text alike only read it.

Shapes: R rows of the memory, C tokens it has room for, B rows of a batch, P tokens of all its rows, H heads, K head
width, D width.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Integers = NDArray[np.int64]
_ROUND = 64
"""Rows are made longer by multiples of this."""


class Kept(NamedTuple):
    keys: Tensor  # [R, C, H, K]
    values: Tensor  # [R, C, H, K]


@dataclass(eq=False)
class Memory:
    """With `single`, all loops share one level: it holds what the last loop that a token went through left there."""

    rows: int
    capacity: int
    single: bool = False
    _kept: dict[tuple[str, int], Kept] = field(default_factory=dict, init=False)
    _states: dict[tuple[str, int], Tensor] = field(default_factory=dict, init=False)  # [R, C, D]

    def write(self, slot: str, level: int, places: Tensor, keys: Tensor, values: Tensor) -> None:
        """Keys and values [P, H, K] of tokens at these places (row times capacity plus position)."""
        kept = self._kept.get(self._at(slot, level))
        if kept is None:
            shape = (self.rows, self.capacity, *keys.shape[1:])
            kept = self._kept[self._at(slot, level)] = Kept(keys.new_zeros(shape), values.new_zeros(shape))
        for there, new in zip(kept, (keys, values), strict=True):
            there.view(-1, *new.shape[1:]).index_copy_(0, places, new)

    def read(self, slot: str, level: int, rows: Integers, upto: int) -> Kept:
        """Those of the first `upto` tokens of these rows."""
        kept = self._kept[self._at(slot, level)]
        whole = np.array_equal(rows, np.arange(self.rows))
        return Kept(*(_taken(there, None if whole else rows, upto) for there in kept))

    def keep(self, name: str, level: int, places: Tensor, states: Tensor) -> None:
        """States [P, D] of tokens, from which their next loop can begin later."""
        there = self._states.get((name, level))
        if there is None:
            there = self._states[name, level] = states.new_zeros((self.rows, self.capacity, states.shape[1]))
        there.view(-1, states.shape[1]).index_copy_(0, places, states)

    def states(self, name: str, level: int, places: Tensor) -> Tensor:
        """[P, D]"""
        there = self._states[name, level]
        return there.view(-1, there.shape[2]).index_select(0, places)

    def hand_down(self, level: int, levels: Iterable[int], places: Tensor) -> None:
        """Fills the deeper `levels` of these tokens with what their `level` has."""
        for (slot, deep), kept in list(self._kept.items()):
            if deep == level:
                keys, values = (there.view(-1, *there.shape[2:]).index_select(0, places) for there in kept)
                for deeper in levels:
                    self.write(slot, deeper, places, keys, values)

    def grow(self, capacity: int, rows: int = 0) -> None:
        """Makes room for longer rows, or for more of them."""
        if capacity <= self.capacity and rows <= self.rows:
            return
        self.rows = max(rows, self.rows)
        if capacity > self.capacity:
            self.capacity = -(-max(capacity, self.capacity * 5 // 4) // _ROUND) * _ROUND
        for at, kept in self._kept.items():  # one after the other, so that no more than one is there twice
            self._kept[at] = Kept(*map(self._longer, kept))
        for name, there in self._states.items():
            self._states[name] = self._longer(there)

    @property
    def nbytes(self) -> int:
        """What the keys and values take."""
        return sum(there.nbytes for kept in self._kept.values() for there in kept)

    def _at(self, slot: str, level: int) -> tuple[str, int]:
        return slot, min(level, 1) if self.single else level

    def _longer(self, there: Tensor) -> Tensor:
        grown = there.new_zeros((self.rows, self.capacity, *there.shape[2:]))
        grown[: there.shape[0], : there.shape[1]] = there
        return grown


def _taken(there: Tensor, rows: Integers | None, upto: int) -> Tensor:
    if rows is None:
        return there[:, :upto]
    return there[:, :upto].index_select(0, torch.from_numpy(rows).to(there.device))


@dataclass(frozen=True, eq=False)
class GoingOn:
    """Rows whose new tokens come after what the memory has of them, and join it."""

    memory: Memory
    rows: Integers  # [B] of the memory
    before: Integers  # [B] how many tokens are there
    levels: Integers  # [B]

    def take(self, rows: Integers) -> "GoingOn":
        return GoingOn(self.memory, self.rows[rows], self.before[rows], self.levels[rows])

    @property
    def kinds(self) -> Integers:
        """[B] rows of one kind can attend together."""
        return self.levels


@dataclass(frozen=True, eq=False)
class Prefixed:
    """Rows that begin with a text that was read before; each names its memory (of one row), or None."""

    texts: NDArray[np.object_]  # [B] of Memory | None
    before: Integers  # [B] how many tokens it has
    levels: Integers  # [B]

    def take(self, rows: Integers) -> "Prefixed":
        return Prefixed(self.texts[rows], self.before[rows], self.levels[rows])

    @property
    def kinds(self) -> Integers:
        names = np.array([id(text) for text in self.texts], dtype=np.int64)
        return np.unique(names, return_inverse=True)[1] * (int(self.levels.max(initial=0)) + 1) + self.levels
