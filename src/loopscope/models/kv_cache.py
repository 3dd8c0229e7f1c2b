"""What do later tokens need of earlier ones? Their keys and values: in every layer, and in every loop.

A cache keeps them for some rows, in every layer (by its name) and loop (0 is what comes before the first). Two kinds of
layout reach into one: appending rows add their new tokens to it, and rows that begin with one shared prefix only read
it. All loops of a layer lie in one tensor, so that rows at different loops are read and written together.

Shapes: L loops that the cache has room for, R its rows, C tokens it has room for, B rows of a batch, P tokens of all
its rows, H heads, K head width, D width.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Integers = NDArray[np.int64]
_ROUND = 64
"""Rows are made longer by multiples of this."""


class KeysValues(NamedTuple):
    keys: Tensor  # [L, R, C, H, K]
    values: Tensor  # [L, R, C, H, K]


class Places(NamedTuple):
    """Where tokens go in a cache."""

    indices: Tensor  # [P] place times capacity plus position
    first: int  # the first loop, of those in the cache, that is among them


@dataclass(eq=False)
class KVCache:
    """With `latest_only`, all loops share one place, which holds what the last loop that a token went through left."""

    rows: int
    capacity: int
    latest_only: bool = False
    most_loops: int = 1  # that it will be asked for, as far as one knows
    _slots: dict[int, int] = field(default_factory=dict, init=False)  # where each loop lies, from 1 on
    _keys_values: dict[tuple[str, bool], KeysValues] = field(default_factory=dict, init=False)  # looped, or before
    _firsts: dict[tuple[str, bool], int] = field(default_factory=dict, init=False)  # the first loop that a layer has
    _states: dict[tuple[str, int], Tensor] = field(default_factory=dict, init=False)  # [R, C, D]

    def places(self, rows: Integers, loops: Integers) -> Integers:
        """[B] where these rows at these loops lie among all rows of all loops; all or none of the loops are 0."""
        if self.latest_only or not loops.any():
            return rows
        slots = {loop: self._slots.setdefault(loop, len(self._slots)) for loop in sorted(set(loops.tolist()))}
        return np.array([slots[loop] for loop in loops.tolist()], dtype=np.int64) * self.rows + rows

    def write(self, layer: str, looped: bool, places: Places, keys: Tensor, values: Tensor) -> None:
        """Keys and values [P, H, K] of tokens."""
        found = self._allocated(layer, looped, places.first, keys, values)
        before = self._firsts[layer, looped] * self.rows * self.capacity
        indices = places.indices - before if before else places.indices
        found.keys.view(-1, *keys.shape[1:]).index_copy_(0, indices, keys)
        found.values.view(-1, *values.shape[1:]).index_copy_(0, indices, values)

    def read(self, layer: str, looped: bool, places: Tensor | slice, upto: int) -> KeysValues:
        """[B, `upto`, H, K] those of the first tokens at these places: of neighbours where they are, else a copy."""
        keys, values = (stored.flatten(0, 1) for stored in self._keys_values[layer, looped])
        before = self._firsts[layer, looped] * self.rows
        if isinstance(places, slice):
            first, last = places.start - before, places.stop - before
            return KeysValues(keys[first:last, :upto], values[first:last, :upto])
        there = places - before if before else places
        return KeysValues(*(stored[:, :upto].index_select(0, there) for stored in (keys, values)))

    def write_states(self, name: str, loop: int, indices: Tensor, states: Tensor) -> None:
        """States [P, D] of tokens (row times capacity plus position), from which their next loop can begin later."""
        stored = self._states.get((name, loop))
        if stored is None:
            stored = self._states[name, loop] = states.new_zeros((self.rows, self.capacity, states.shape[1]))
        stored.view(-1, states.shape[1]).index_copy_(0, indices, states)

    def read_states(self, name: str, loop: int, indices: Tensor) -> Tensor:
        """[P, D]"""
        stored = self._states[name, loop]
        return stored.view(-1, stored.shape[2]).index_select(0, indices)

    def propagate(self, loop: int, loops: Iterable[int], indices: Tensor) -> None:
        """Fills the deeper `loops` of tokens (row times capacity plus position) with what their `loop` has."""
        own, *deeper = (self._loop_number(each) for each in (loop, *loops))
        size = self.rows * self.capacity
        for (layer, looped), found in list(self._keys_values.items()):
            place = own - self._firsts[layer, looped]
            if looped and 0 <= place < len(found.keys):
                keys, values = (stored[place].flatten(0, 1).index_select(0, indices) for stored in found)
                for number in deeper:
                    self.write(layer, looped, Places(indices + number * size, number), keys, values)

    def grow(self, capacity: int, rows: int = 0) -> None:
        """Makes room for longer rows, or for more of them."""
        if capacity <= self.capacity and rows <= self.rows:
            return
        self.rows = max(rows, self.rows)
        if capacity > self.capacity:
            self.capacity = -(-max(capacity, self.capacity * 5 // 4) // _ROUND) * _ROUND
        for key, found in self._keys_values.items():  # one after the other, so that no more than one is there twice
            self._keys_values[key] = KeysValues(*(self._grown(stored, len(stored)) for stored in found))
        for name, states in self._states.items():
            self._states[name] = self._grown(states[None], 1)[0]

    def take(self, rows: Tensor) -> None:
        """Keeps the rows of these numbers, in that order, each as often as it is named: the beams of a search."""
        self.rows = len(rows)
        for key, found in self._keys_values.items():
            self._keys_values[key] = KeysValues(*(stored.index_select(1, rows.to(stored.device)) for stored in found))
        for name, states in self._states.items():
            self._states[name] = states.index_select(0, rows.to(states.device))

    @property
    def nbytes(self) -> int:
        """What the keys and values take."""
        return sum(stored.nbytes for found in self._keys_values.values() for stored in found)

    def _loop_number(self, loop: int) -> int:
        return int(self.places(np.zeros(1, dtype=np.int64), np.array([loop]))[0]) // self.rows

    def _allocated(self, layer: str, looped: bool, first: int, keys: Tensor, values: Tensor) -> KeysValues:
        """The tensors of a layer, with room for the loops from this one on that were asked for."""
        key, end = (layer, looped), len(self._slots) if looped and not self.latest_only else 1
        found = self._keys_values.get(key)
        if found is None:
            self._firsts[key] = first
            shapes = ((end - first, self.rows, self.capacity, *each.shape[1:]) for each in (keys, values))
            found = KeysValues(*(keys.new_zeros(shape) for shape in shapes))
        elif (before := max(0, self._firsts[key] - first)) or end - self._firsts[key] > len(found.keys):
            self._firsts[key] -= before
            needed = end - self._firsts[key]
            room = min(self.most_loops - self._firsts[key], 2 * len(found.keys))
            loops = max(needed, before + len(found.keys), room)
            found = KeysValues(*(self._grown(stored, loops, before) for stored in found))
        self._keys_values[key] = found
        return found

    def _grown(self, stored: Tensor, loops: int, before: int = 0) -> Tensor:
        """The same in a larger tensor, with room for so many loops before what there is."""
        grown = stored.new_zeros((loops, self.rows, self.capacity, *stored.shape[3:]))
        grown[before : before + len(stored), : stored.shape[1], : stored.shape[2]] = stored
        return grown


@dataclass(frozen=True, eq=False)
class AppendingRows:
    """Rows whose new tokens come after what the cache has of them, and join it."""

    kv_cache: KVCache
    rows: Integers  # [B] of the cache
    cached: Integers  # [B] how many tokens are there already
    loops: Integers  # [B]

    def take(self, rows: Integers) -> "AppendingRows":
        return AppendingRows(self.kv_cache, self.rows[rows], self.cached[rows], self.loops[rows])

    def follows(self, other: "AppendingRows") -> bool:
        """Whether these are the same tokens, perhaps at another loop."""
        if self.rows is other.rows and self.cached is other.cached:
            return True
        return np.array_equal(self.rows, other.rows) and np.array_equal(self.cached, other.cached)

    @cached_property
    def looped(self) -> bool:
        """Whether the rows are in the loops, or before them."""
        return bool(self.loops.any())

    @cached_property
    def places(self) -> Integers:
        """[B] where they lie in the cache."""
        return self.kv_cache.places(self.rows, self.loops)

    @property
    def group_keys(self) -> Integers:
        """[B] rows with the same key can attend together."""
        return np.zeros_like(self.loops)


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
