"""Where are keys and values of earlier tokens kept? In a KV cache, for every layer and every loop.

A cache keeps rows of tokens, for every layer (by its name) and loop (0 is before the first loop). Two kinds of layout
use it: appending rows add their new tokens, and rows with a shared prefix only read it. All loops of a layer are in one
tensor, so that rows at different loops are read and written together.

Shapes: L loops, R rows and C tokens of a row for which the cache has room, B rows of a batch, P tokens of all rows, H
heads, K head width, D width.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Integers = NDArray[np.int64]
CAPACITY_STEP = 64
"""The length of rows grows by multiples of this."""
MAX_RESERVED = 4096
"""The most tokens after a prompt for which the cache makes room at once."""


class KeysValues(NamedTuple):
    """Hold the keys and values of a layer in the cache."""

    keys: Tensor  # [L, R, C, H, K] as they are stored
    values: Tensor


class _LoopViews(NamedTuple):
    """Cache two views on the memory of one loop of a layer, or of all loops, for reuse by every token."""

    tokens: KeysValues  # [R C, H, K] by token, for writing
    rows: KeysValues  # [R, H, C, K] by row and head, for attention


class CachedLoops(NamedTuple):
    """Describe the loops of tokens by their numbers in the cache."""

    looped: bool  # False: before the first loop
    number: int | None  # the common loop of all tokens; None: different loops
    first: int  # the smallest number


@dataclass(eq=False)
class KVCache:
    """Keep keys and values of rows by layer and loop; with `latest_only`, a token's last loop overwrites the others."""

    rows: int
    capacity: int
    latest_only: bool = False
    most_loops: int = 1  # an estimate of the loops that will be stored
    _filled: int = field(default=0, init=False)  # the tokens that the longest row may have
    _numbers: dict[int, int] = field(default_factory=dict, init=False)  # the place of each loop, from 1 on
    _keys_values: dict[tuple[str, bool], KeysValues] = field(default_factory=dict, init=False)  # looped, or before
    _views: dict[tuple[str, bool, int | None], _LoopViews] = field(default_factory=dict, init=False)  # parts of those
    _firsts: dict[tuple[str, bool], int] = field(default_factory=dict, init=False)  # the first loop of each layer
    _states: dict[str, Tensor] = field(default_factory=dict, init=False)  # [loops, R, C, D], from loop 0 on

    def __post_init__(self) -> None:
        self._filled = self.capacity

    def number(self, loop: int) -> int:
        return 0 if self.latest_only or not loop else self._numbers.setdefault(loop, len(self._numbers))

    def at(self, loop: int) -> CachedLoops:
        """The place of tokens that are all at this loop."""
        return CachedLoops(loop > 0, self.number(loop), self.number(loop))

    def write(self, layer: str, at: CachedLoops, indices: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write keys and values [P, H, K] at row (over several loops: of all) times capacity plus position."""
        if at.number is None or (layer, at.looped, at.number) not in self._views:
            self._allocate(layer, at, keys, values)
        if at.number is None and (before := self._firsts[layer, at.looped]):
            indices = indices - before * self.rows * self.capacity
        stored = self._view(layer, at).tokens
        stored.keys.index_copy_(0, indices, keys)
        stored.values.index_copy_(0, indices, values)

    def read(self, layer: str, at: CachedLoops, rows: Tensor | slice, upto: int) -> KeysValues:
        """[B, H, `upto`, K] the first tokens of rows: a view if the rows are neighbours, else a copy."""
        keys, values = (stored.narrow(2, 0, upto) for stored in self._view(layer, at).rows)
        before = self._firsts[layer, at.looped] * self.rows if at.number is None else 0
        if isinstance(rows, slice):
            if rows.stop - rows.start == len(keys):
                return KeysValues(keys, values)
            there = slice(rows.start - before, rows.stop - before)
            return KeysValues(keys[there], values[there])
        chosen = rows - before if before else rows
        copies = (stored.transpose(1, 2).index_select(0, chosen) for stored in (keys, values))  # copies whole tokens
        return KeysValues(*(copy.transpose(1, 2) for copy in copies))

    def write_states(self, name: str, deepest: int, indices: Tensor, states: Tensor) -> None:
        """Write states [P, D] of tokens after loops up to the `deepest`, from which their next loop can begin later.

        The index of a state is (loop times rows plus row) times capacity plus position.
        """
        there = self._states.get(name)
        if there is None or len(there) <= deepest:
            before = states.new_empty((0, self.rows, self.capacity, states.shape[1])) if there is None else there
            loops = min(max(deepest + 1, 2 * len(before)), self.most_loops + 1) if deepest else 1
            self._states[name] = there = self._grown(before, loops)
        there.view(-1, there.shape[-1]).index_copy_(0, indices, states)

    def read_states(self, name: str, indices: Tensor) -> Tensor:
        """[P, D] the stored states at these indices."""
        there = self._states[name]
        return there.view(-1, there.shape[-1]).index_select(0, indices)

    def propagate(self, loop: int, loops: Iterable[int], indices: Tensor) -> None:
        """Copy the entries of tokens (row times capacity plus position) at `loop` to the deeper `loops`."""
        own, deeper = self.number(loop), [self.at(each) for each in loops]
        for (layer, looped), found in list(self._keys_values.items()):
            place = own - self._firsts[layer, looped]
            if looped and 0 <= place < len(found.keys):
                keys, values = (stored[place].flatten(0, 1).index_select(0, indices) for stored in found)
                for at in deeper:
                    self.write(layer, at, indices, keys, values)

    def grow(self, tokens: int, rows: int = 0, reserve: int = 0) -> None:
        """Make room for longer rows, or for more rows.

        With `reserve`, the cache makes room for so many tokens at once: it does not copy its entries again, and on a
        CPU the memory is used only page by page.
        """
        room = max(tokens, min(reserve, tokens + MAX_RESERVED))
        if tokens > self.capacity:
            room = max(room, self.capacity * 5 // 4)
        if room > self.capacity or rows > self.rows:
            self.capacity = max(self.capacity, -(-room // CAPACITY_STEP) * CAPACITY_STEP)
            self.rows = max(rows, self.rows)
            self._make_room()
        self._filled = max(self._filled, tokens)

    def _make_room(self) -> None:
        self._views.clear()
        for key, found in self._keys_values.items():  # one after the other, so that only one is copied at a time
            self._keys_values[key] = KeysValues(*(self._grown(stored, len(stored)) for stored in found))
        for name, states in self._states.items():
            self._states[name] = self._grown(states, len(states))

    def take(self, rows: Tensor) -> None:
        """Keep the rows of these indices, in this order and as often as named, as beam search needs."""
        self.rows = len(rows)
        self._views.clear()
        for key, found in self._keys_values.items():
            self._keys_values[key] = KeysValues(*(stored.index_select(1, rows.to(stored.device)) for stored in found))
        for name, states in self._states.items():
            self._states[name] = states.index_select(1, rows.to(states.device))

    @property
    def nbytes(self) -> int:
        """The bytes of keys and values."""
        return sum(stored.nbytes for found in self._keys_values.values() for stored in found)

    def _view(self, layer: str, at: CachedLoops) -> _LoopViews:
        """The views on one loop of a layer, or on all its loops with their rows one after the other."""
        found = self._views.get((layer, at.looped, at.number))
        if found is None:
            stored, first = self._keys_values[layer, at.looped], self._firsts[layer, at.looped]
            own = [each.flatten(0, 1) if at.number is None else each[at.number - first] for each in stored]
            tokens = KeysValues(*(each.flatten(0, 1) for each in own))
            found = _LoopViews(tokens, KeysValues(*(each.transpose(1, 2) for each in own)))
            self._views[layer, at.looped, at.number] = found
        return found

    def _allocate(self, layer: str, at: CachedLoops, keys: Tensor, values: Tensor) -> None:
        """Allocate the tensors of a layer, with room for the requested loops from these on."""
        key, end = (layer, at.looped), len(self._numbers) if at.looped and not self.latest_only else 1
        if key not in self._keys_values:
            self._firsts[key] = at.first
            shapes = ((end - at.first, self.rows, self.capacity, *each.shape[1:]) for each in (keys, values))
            self._keys_values[key] = KeysValues(*(_untouched_zeros(shape, keys) for shape in shapes))
            return
        found = self._keys_values[key]
        before = max(0, self._firsts[key] - at.first)
        if before or end - self._firsts[key] > len(found.keys):
            self._views.clear()
            self._firsts[key] -= before
            room = min(self.most_loops - self._firsts[key], 2 * len(found.keys))
            loops = max(end - self._firsts[key], before + len(found.keys), room)
            self._keys_values[key] = KeysValues(*(self._grown(stored, loops, before) for stored in found))

    def _grown(self, stored: Tensor, loops: int, before: int = 0) -> Tensor:
        """Copy a tensor into a larger one, with room for so many loops before its own."""
        grown = _untouched_zeros((loops, self.rows, self.capacity, *stored.shape[3:]), stored)
        filled = stored[:, :, : self._filled]
        grown[before : before + len(stored), : filled.shape[1], : filled.shape[2]] = filled
        return grown


def _untouched_zeros(shape: Sequence[int], like: Tensor) -> Tensor:
    """Zeros with device and precision of another tensor; on a CPU the memory is not touched yet."""
    if like.device.type != "cpu":
        return like.new_zeros(shape)
    untouched = np.zeros(math.prod(shape) * like.element_size(), dtype=np.uint8)
    return torch.from_numpy(untouched).view(like.dtype).view(shape)


@dataclass(frozen=True, eq=False)
class AppendingRows:
    """Append new tokens to rows of a cache, after their cached tokens."""

    kv_cache: KVCache
    rows: Integers  # [B] their indices in the cache
    cached: Integers  # [B] their cached tokens
    loops: Integers  # [B]

    def take(self, rows: Integers) -> "AppendingRows":
        return AppendingRows(self.kv_cache, self.rows[rows], self.cached[rows], self.loops[rows])

    def follows(self, other: "CachedRows | None") -> bool:
        """Whether the other rows are the same tokens, perhaps at a different loop."""
        if not isinstance(other, AppendingRows):
            return False
        if self.rows is other.rows and self.cached is other.cached:
            return True
        return np.array_equal(self.rows, other.rows) and np.array_equal(self.cached, other.cached)

    @cached_property
    def at(self) -> CachedLoops:
        """The place of their loops in the cache; all or none of the loops are 0."""
        numbers = {self.kv_cache.number(loop) for loop in dict.fromkeys(self.loops.tolist())} or {0}
        return CachedLoops(bool(self.loops.any()), min(numbers) if len(numbers) == 1 else None, min(numbers))

    @cached_property
    def places(self) -> Integers:
        """[B] their indices among the rows of their loop, or among all loops' rows if they are at several."""
        if self.at.number is not None:
            return self.rows
        numbers = np.array([self.kv_cache.number(loop) for loop in self.loops.tolist()], dtype=np.int64)
        return numbers * self.kv_cache.rows + self.rows

    def read(self, layer: str, places: Tensor | slice, upto: int) -> KeysValues:
        """[B, H, `upto`, K] the first tokens of the rows at these indices."""
        return self.kv_cache.read(layer, self.at, places, upto)


@dataclass(frozen=True, eq=False)
class SharedPrefix:
    """Continue a shared prefix that has already run; every row names its cache (with one row), or None."""

    kv_caches: NDArray[np.object_]  # [B] of KVCache | None
    cached: Integers  # [B] tokens of the prefix
    loops: Integers  # [B]

    def take(self, rows: Integers) -> "SharedPrefix":
        return SharedPrefix(self.kv_caches[rows], self.cached[rows], self.loops[rows])

    def read(self, layer: str, row: int, upto: int) -> KeysValues:
        """[1, H, `upto`, K] the prefix of this row."""
        kv_cache: KVCache = self.kv_caches[row]
        return kv_cache.read(layer, kv_cache.at(int(self.loops[row])), slice(0, 1), upto)

    @property
    def group_keys(self) -> Integers:
        """[B] keys; rows with the same key can attend together."""
        names = np.array([id(cache) for cache in self.kv_caches], dtype=np.int64)
        return np.unique(names, return_inverse=True)[1] * (int(self.loops.max(initial=0)) + 1) + self.loops


CachedRows = AppendingRows | SharedPrefix
