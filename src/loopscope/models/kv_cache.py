"""What do later tokens need of earlier ones? Their keys and values: in every layer, and in every loop.

A cache keeps them for some rows, in one place for every layer (by its name) and loop (0 is what comes before the
first). Two kinds of layout reach into one: appending rows add their new tokens to it, and rows that begin with one
shared prefix only read it.

Shapes: R rows of the cache, C tokens it has room for, B rows of a batch, P tokens of all its rows, H heads, K head
width, D width.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Integers = NDArray[np.int64]
_ROUND = 64
"""Rows are made longer by multiples of this."""


class KeysValues(NamedTuple):
    keys: Tensor  # [R, C, H, K]
    values: Tensor  # [R, C, H, K]


@dataclass(eq=False)
class KVCache:
    """With `latest_only`, all loops share one place, which holds what the last loop that a token went through left."""

    rows: int
    capacity: int
    latest_only: bool = False
    _keys_values: dict[tuple[str, int], KeysValues] = field(default_factory=dict, init=False)
    _states: dict[tuple[str, int], Tensor] = field(default_factory=dict, init=False)  # [R, C, D]

    def write(self, layer: str, loop: int, indices: Tensor, keys: Tensor, values: Tensor) -> None:
        """Keys and values [P, H, K] of tokens at these indices (row times capacity plus position)."""
        found = self._keys_values.get(self._key(layer, loop))
        if found is None:
            shape = (self.rows, self.capacity, *keys.shape[1:])
            found = KeysValues(keys.new_zeros(shape), values.new_zeros(shape))
            self._keys_values[self._key(layer, loop)] = found
        for stored, new in zip(found, (keys, values), strict=True):
            stored.view(-1, *new.shape[1:]).index_copy_(0, indices, new)

    def read(self, layer: str, loop: int, rows: Tensor | None, upto: int) -> KeysValues:
        """Those of the first `upto` tokens of these rows (None: of all)."""
        found = self._keys_values[self._key(layer, loop)]
        return KeysValues(*(_rows_up_to(stored, rows, upto) for stored in found))

    def write_states(self, name: str, loop: int, indices: Tensor, states: Tensor) -> None:
        """States [P, D] of tokens, from which their next loop can begin later."""
        stored = self._states.get((name, loop))
        if stored is None:
            stored = self._states[name, loop] = states.new_zeros((self.rows, self.capacity, states.shape[1]))
        stored.view(-1, states.shape[1]).index_copy_(0, indices, states)

    def read_states(self, name: str, loop: int, indices: Tensor) -> Tensor:
        """[P, D]"""
        stored = self._states[name, loop]
        return stored.view(-1, stored.shape[2]).index_select(0, indices)

    def propagate(self, loop: int, loops: Iterable[int], indices: Tensor) -> None:
        """Fills the deeper `loops` of these tokens with what their `loop` has."""
        for (layer, stored_loop), found in list(self._keys_values.items()):
            if stored_loop == loop:
                keys, values = (stored.view(-1, *stored.shape[2:]).index_select(0, indices) for stored in found)
                for deeper in loops:
                    self.write(layer, deeper, indices, keys, values)

    def grow(self, capacity: int, rows: int = 0) -> None:
        """Makes room for longer rows, or for more of them."""
        if capacity <= self.capacity and rows <= self.rows:
            return
        self.rows = max(rows, self.rows)
        if capacity > self.capacity:
            self.capacity = -(-max(capacity, self.capacity * 5 // 4) // _ROUND) * _ROUND
        for key, found in self._keys_values.items():  # one after the other, so that no more than one is there twice
            self._keys_values[key] = KeysValues(*map(self._grown, found))
        for name, stored in self._states.items():
            self._states[name] = self._grown(stored)

    def take(self, rows: Tensor) -> None:
        """Keeps the rows of these numbers, in that order, each as often as it is named: the beams of a search."""
        self.rows = len(rows)
        for key, found in self._keys_values.items():
            self._keys_values[key] = KeysValues(*(stored.index_select(0, rows.to(stored.device)) for stored in found))
        for name, stored in self._states.items():
            self._states[name] = stored.index_select(0, rows.to(stored.device))

    @property
    def nbytes(self) -> int:
        """What the keys and values take."""
        return sum(stored.nbytes for found in self._keys_values.values() for stored in found)

    def _key(self, layer: str, loop: int) -> tuple[str, int]:
        return layer, min(loop, 1) if self.latest_only else loop

    def _grown(self, stored: Tensor) -> Tensor:
        grown = stored.new_zeros((self.rows, self.capacity, *stored.shape[2:]))
        grown[: stored.shape[0], : stored.shape[1]] = stored
        return grown


def _rows_up_to(stored: Tensor, rows: Tensor | None, upto: int) -> Tensor:
    return stored[:, :upto] if rows is None else stored[:, :upto].index_select(0, rows)


@dataclass(frozen=True, eq=False)
class AppendingRows:
    """Rows whose new tokens come after what the cache has of them, and join it."""

    kv_cache: KVCache
    rows: Integers  # [B] of the cache
    cached: Integers  # [B] how many tokens are there already
    loops: Integers  # [B]

    def take(self, rows: Integers) -> "AppendingRows":
        return AppendingRows(self.kv_cache, self.rows[rows], self.cached[rows], self.loops[rows])

    @property
    def group_keys(self) -> Integers:
        """[B] rows with the same key can attend together."""
        return self.loops


@dataclass(frozen=True, eq=False)
class SharedPrefix:
    """Rows that begin with a prefix that was run before; each names its cache (of one row), or None."""

    kv_caches: NDArray[np.object_]  # [B] of KVCache | None
    cached: Integers  # [B] how many tokens it has
    loops: Integers  # [B]

    def take(self, rows: Integers) -> "SharedPrefix":
        return SharedPrefix(self.kv_caches[rows], self.cached[rows], self.loops[rows])

    @property
    def group_keys(self) -> Integers:
        names = np.array([id(cache) for cache in self.kv_caches], dtype=np.int64)
        return np.unique(names, return_inverse=True)[1] * (int(self.loops.max(initial=0)) + 1) + self.loops
