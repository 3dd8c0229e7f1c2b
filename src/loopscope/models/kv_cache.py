"""What do later tokens need of earlier ones? Their keys and values: in every layer, and in every loop.

A cache keeps them for some rows, in every layer (by its name) and loop (0 is what comes before the first). Two kinds of
layout reach into one: appending rows add their new tokens to it, and rows that begin with one shared prefix only read
it. All loops of a layer lie in one tensor, so that rows at different loops are read and written together.

Shapes: L loops that the cache has room for, R its rows, C tokens it has room for, B rows of a batch, P tokens of all
its rows, H heads, K head width, D width.
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
"""Rows are made longer by multiples of this."""
MAX_RESERVED = 4096
"""Tokens after a prompt for which room is made at once."""


class KeysValues(NamedTuple):
    keys: Tensor  # [L, R, C, H, K] as they are stored
    values: Tensor


class _LoopViews(NamedTuple):
    """The same memory of one loop of a layer, or of all: every token needs them again."""

    tokens: KeysValues  # [R C, H, K] by token, where they are written
    rows: KeysValues  # [R, H, C, K] by row and head, as attention reads them


class CachedLoops(NamedTuple):
    """The loops that tokens are at, by the number that the cache gives each."""

    looped: bool  # or before the loops
    number: int | None  # of the one loop that all are at; None: they are at several
    first: int  # the smallest number


@dataclass(eq=False)
class KVCache:
    """With `latest_only`, all loops share one place, which holds what the last loop that a token went through left."""

    rows: int
    capacity: int
    latest_only: bool = False
    most_loops: int = 1  # that it will be asked for, as far as one knows
    _filled: int = field(default=0, init=False)  # tokens that some row may have, of those there is room for
    _numbers: dict[int, int] = field(default_factory=dict, init=False)  # where each loop lies, from 1 on
    _keys_values: dict[tuple[str, bool], KeysValues] = field(default_factory=dict, init=False)  # looped, or before
    _views: dict[tuple[str, bool, int | None], _LoopViews] = field(default_factory=dict, init=False)  # parts of those
    _firsts: dict[tuple[str, bool], int] = field(default_factory=dict, init=False)  # the first loop that a layer has
    _states: dict[str, Tensor] = field(default_factory=dict, init=False)  # [loops, R, C, D], from loop 0 on

    def __post_init__(self) -> None:
        self._filled = self.capacity

    def number(self, loop: int) -> int:
        return 0 if self.latest_only or not loop else self._numbers.setdefault(loop, len(self._numbers))

    def at(self, loop: int) -> CachedLoops:
        """Where tokens that are all at this loop lie."""
        return CachedLoops(loop > 0, self.number(loop), self.number(loop))

    def write(self, layer: str, at: CachedLoops, indices: Tensor, keys: Tensor, values: Tensor) -> None:
        """Keys and values [P, H, K] of tokens: row (of several loops: of all) times capacity plus position."""
        if at.number is None or (layer, at.looped, at.number) not in self._views:
            self._allocate(layer, at, keys, values)
        if at.number is None and (before := self._firsts[layer, at.looped]):
            indices = indices - before * self.rows * self.capacity
        stored = self._view(layer, at).tokens
        stored.keys.index_copy_(0, indices, keys)
        stored.values.index_copy_(0, indices, values)

    def read(self, layer: str, at: CachedLoops, rows: Tensor | slice, upto: int) -> KeysValues:
        """[B, H, `upto`, K] the first tokens of rows (of several loops: of all): of neighbours there, else a copy."""
        keys, values = (stored.narrow(2, 0, upto) for stored in self._view(layer, at).rows)
        before = self._firsts[layer, at.looped] * self.rows if at.number is None else 0
        if isinstance(rows, slice):
            if rows.stop - rows.start == len(keys):
                return KeysValues(keys, values)
            there = slice(rows.start - before, rows.stop - before)
            return KeysValues(keys[there], values[there])
        chosen = rows - before if before else rows
        copies = (stored.transpose(1, 2).index_select(0, chosen) for stored in (keys, values))  # whole tokens at a time
        return KeysValues(*(copy.transpose(1, 2) for copy in copies))

    def write_states(self, name: str, deepest: int, indices: Tensor, states: Tensor) -> None:
        """States [P, D] of tokens, from which their next loop can begin later, after loops up to the `deepest`.

        Each lies at (loop times rows plus row) times capacity plus position.
        """
        there = self._states.get(name)
        if there is None or len(there) <= deepest:
            before = states.new_empty((0, self.rows, self.capacity, states.shape[1])) if there is None else there
            loops = min(max(deepest + 1, 2 * len(before)), self.most_loops + 1) if deepest else 1
            self._states[name] = there = self._grown(before, loops)
        there.view(-1, there.shape[-1]).index_copy_(0, indices, states)

    def read_states(self, name: str, indices: Tensor) -> Tensor:
        """[P, D]"""
        there = self._states[name]
        return there.view(-1, there.shape[-1]).index_select(0, indices)

    def propagate(self, loop: int, loops: Iterable[int], indices: Tensor) -> None:
        """Fills the deeper `loops` of tokens (row times capacity plus position) with what their `loop` has."""
        own, deeper = self.number(loop), [self.at(each) for each in loops]
        for (layer, looped), found in list(self._keys_values.items()):
            place = own - self._firsts[layer, looped]
            if looped and 0 <= place < len(found.keys):
                keys, values = (stored[place].flatten(0, 1).index_select(0, indices) for stored in found)
                for at in deeper:
                    self.write(layer, at, indices, keys, values)

    def grow(self, tokens: int, rows: int = 0, reserve: int = 0) -> None:
        """Makes room for longer rows, or for more of them.

        With `reserve`, room for so many tokens is made at once: what is there is then not copied again, and on a CPU
        memory is taken as it fills, page by page.
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
        for key, found in self._keys_values.items():  # one after the other, so that no more than one is there twice
            self._keys_values[key] = KeysValues(*(self._grown(stored, len(stored)) for stored in found))
        for name, states in self._states.items():
            self._states[name] = self._grown(states, len(states))

    def take(self, rows: Tensor) -> None:
        """Keeps the rows of these numbers, in that order, each as often as it is named: the beams of a search."""
        self.rows = len(rows)
        self._views.clear()
        for key, found in self._keys_values.items():
            self._keys_values[key] = KeysValues(*(stored.index_select(1, rows.to(stored.device)) for stored in found))
        for name, states in self._states.items():
            self._states[name] = states.index_select(1, rows.to(states.device))

    @property
    def nbytes(self) -> int:
        """What the keys and values take."""
        return sum(stored.nbytes for found in self._keys_values.values() for stored in found)

    def _view(self, layer: str, at: CachedLoops) -> _LoopViews:
        """Of one loop, or of all: then their rows follow each other."""
        found = self._views.get((layer, at.looped, at.number))
        if found is None:
            stored, first = self._keys_values[layer, at.looped], self._firsts[layer, at.looped]
            own = [each.flatten(0, 1) if at.number is None else each[at.number - first] for each in stored]
            tokens = KeysValues(*(each.flatten(0, 1) for each in own))
            found = _LoopViews(tokens, KeysValues(*(each.transpose(1, 2) for each in own)))
            self._views[layer, at.looped, at.number] = found
        return found

    def _allocate(self, layer: str, at: CachedLoops, keys: Tensor, values: Tensor) -> None:
        """Makes tensors for a layer, with room for the loops from these on that were asked for."""
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
        """The same in a larger tensor, with room for so many loops before what there is."""
        grown = _untouched_zeros((loops, self.rows, self.capacity, *stored.shape[3:]), stored)
        filled = stored[:, :, : self._filled]
        grown[before : before + len(stored), : filled.shape[1], : filled.shape[2]] = filled
        return grown


def _untouched_zeros(shape: Sequence[int], like: Tensor) -> Tensor:
    """Zeros on the device and in the precision of another tensor; on a CPU memory that nobody has written to yet."""
    if like.device.type != "cpu":
        return like.new_zeros(shape)
    untouched = np.zeros(math.prod(shape) * like.element_size(), dtype=np.uint8)
    return torch.from_numpy(untouched).view(like.dtype).view(shape)


@dataclass(frozen=True, eq=False)
class AppendingRows:
    """Rows whose new tokens come after what the cache has of them, and join it."""

    kv_cache: KVCache
    rows: Integers  # [B] of the cache
    cached: Integers  # [B] how many tokens are there already
    loops: Integers  # [B]

    def take(self, rows: Integers) -> "AppendingRows":
        return AppendingRows(self.kv_cache, self.rows[rows], self.cached[rows], self.loops[rows])

    def follows(self, other: "CachedRows | None") -> bool:
        """Whether these are the same tokens, perhaps at another loop."""
        if not isinstance(other, AppendingRows):
            return False
        if self.rows is other.rows and self.cached is other.cached:
            return True
        return np.array_equal(self.rows, other.rows) and np.array_equal(self.cached, other.cached)

    @cached_property
    def at(self) -> CachedLoops:
        """Where their loops lie in the cache; all or none of them are 0."""
        numbers = {self.kv_cache.number(loop) for loop in dict.fromkeys(self.loops.tolist())} or {0}
        return CachedLoops(bool(self.loops.any()), min(numbers) if len(numbers) == 1 else None, min(numbers))

    @cached_property
    def places(self) -> Integers:
        """[B] where they lie among the rows of their loop, or of all loops where they are at several."""
        if self.at.number is not None:
            return self.rows
        numbers = np.array([self.kv_cache.number(loop) for loop in self.loops.tolist()], dtype=np.int64)
        return numbers * self.kv_cache.rows + self.rows

    def read(self, layer: str, places: Tensor | slice, upto: int) -> KeysValues:
        """[B, H, `upto`, K] the first tokens at these places."""
        return self.kv_cache.read(layer, self.at, places, upto)


@dataclass(frozen=True, eq=False)
class SharedPrefix:
    """Rows that begin with a prefix that was run before; each names its cache (of one row), or None."""

    kv_caches: NDArray[np.object_]  # [B] of KVCache | None
    cached: Integers  # [B] how many tokens it has
    loops: Integers  # [B]

    def take(self, rows: Integers) -> "SharedPrefix":
        return SharedPrefix(self.kv_caches[rows], self.cached[rows], self.loops[rows])

    def read(self, layer: str, row: int, upto: int) -> KeysValues:
        """[1, H, `upto`, K] what this row comes after."""
        kv_cache: KVCache = self.kv_caches[row]
        return kv_cache.read(layer, kv_cache.at(int(self.loops[row])), slice(0, 1), upto)

    @property
    def group_keys(self) -> Integers:
        """[B] rows with the same key can attend together."""
        names = np.array([id(cache) for cache in self.kv_caches], dtype=np.int64)
        return np.unique(names, return_inverse=True)[1] * (int(self.loops.max(initial=0)) + 1) + self.loops


CachedRows = AppendingRows | SharedPrefix
