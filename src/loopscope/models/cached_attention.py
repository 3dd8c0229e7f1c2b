"""How do tokens attend beyond their row? To the trunk that they branch off from, and to tokens in a KV cache.

Shapes: B rows, S states, R rows of a group, M tokens of its longest row, N keys, W tokens of its longest tail (all
branches of a row), H heads, K head width.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from loopscope.models.attention import Rotary, causal_attention, masked_attention
from loopscope.models.device import upload
from loopscope.models.kv_cache import AppendingRows, Integers, KeysValues, SharedPrefix
from loopscope.models.layout import OF_ONE_LOOP, AttentionGroup, Layout, count_up
from loopscope.models.packed_attention import packed_attention

_COPIED = 1 << 24
"""Numbers of keys that are copied at a time: every row of a batch needs those of what it begins with beside its own."""


_FEW = {"cpu": 1 << 16}
"""Numbers of keys that are copied where that saves an attention of its own, which has a price, for rows that do not lie
together; elsewhere `_MANY`."""
_MANY = 1 << 22
_PADDING = 1.3
"""Rows attend together while they read at most this many times the keys that they have."""


class Scatter(NamedTuple):
    """Where the outputs of a dense batch belong."""

    cells: Tensor | None  # of the batch [R M], without those that are empty; None: none is
    states: Tensor | None  # theirs, in the packed layout; None: all of them, in order


def cached_attention(
    projected: Tensor, heads: tuple[int, int, int], layout: Layout, rotary: Rotary | None, layer: str
) -> Tensor:
    """[S, query, key and value heads, K] -> [S, H K], in the layer that is called `layer`."""
    cache = layout.cache
    if layout.branches is None and cache is None:
        return packed_attention(projected, heads, layout, rotary)
    turned, value = projected[:, : heads[0] + heads[1]], projected[:, heads[0] + heads[1] :]
    if rotary is not None:
        angles = layout.compute_once((rotary, value.dtype), lambda: _angles(layout, rotary, value.dtype))
        turned = rotary.apply_rotary(turned, angles)
    query, key = turned[:, : heads[0]], turned[:, heads[0] :]
    if isinstance(cache, AppendingRows):
        return _appending(query, key, value, layout, cache, layer)
    groups = (_GroupAttention(query, key, value, layout, *each, layer) for each in enumerate(layout.groups))
    return _joined(
        query, chain.from_iterable(each.branches() if cache is None else each.after_prefix(cache) for each in groups)
    )


def _joined(query: Tensor, attended: Iterable[tuple[Tensor, Scatter]]) -> Tensor:
    """[S, H K] from dense outputs and where they belong."""
    out = None
    for dense, scatter in attended:
        if scatter.states is None and dense.shape[2] == 1:  # heads lie side by side already
            return dense.flatten(1)
        tokens = dense.transpose(1, 2).flatten(0, 1)
        if scatter.states is None:
            return tokens.flatten(1)
        tokens = tokens if scatter.cells is None else tokens.index_select(0, scatter.cells)
        out = query.new_empty(query.shape) if out is None else out
        out.index_copy_(0, scatter.states, tokens)
    return query.flatten(1) if out is None else out.flatten(1)  # None: there are no rows


def _angles(layout: Layout, rotary: Rotary, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    cos, sin = rotary.angles(layout.positions, dtype, layout.max_context)
    return cos[:, None], sin[:, None]


def _appending(query: Tensor, key: Tensor, value: Tensor, layout: Layout, cache: AppendingRows, layer: str) -> Tensor:
    """Keys and values join the cache, by position; rows attend to it, or to their own where nothing was before."""
    name = _PLAN if cache.at.number is not None else (OF_ONE_LOOP, _PLAN)
    plan = layout.compute_once(name, partial(_appending_plan, layout, cache, key.shape[1:].numel(), query.dtype))
    cache.kv_cache.write(layer, cache.at, plan.written, key, value)
    return _joined(query, [(_attended(query, key, value, cache, layer, read), read.scatter) for read in plan.reads])


def _attended(
    query: Tensor, key: Tensor, value: Tensor, cache: AppendingRows, layer: str, read: "_CacheRead"
) -> Tensor:
    """[R, H, M, K] of rows of a group that attend together."""
    places, upto, cells, mask, scatter = read
    dense = _dense(query, cells, scatter)
    if places is None:
        return causal_attention(dense, _dense(key, cells, scatter), _dense(value, cells, scatter))
    return masked_attention(dense, *cache.kv_cache.read(layer, cache.at, places, upto), mask)


class _CacheRead(NamedTuple):
    """Rows of a group that attend together: what they read, and what they see of it."""

    places: slice | Tensor | None  # in the cache; None: they read their own keys, which are all
    upto: int  # tokens of each
    cells: Tensor
    mask: Tensor | None
    scatter: Scatter


class _AppendingPlan(NamedTuple):
    """What is the same in every layer, and in every loop that all rows are at together."""

    written: Tensor  # [S] where their keys and values go in the cache
    reads: list[_CacheRead]


_PLAN = "appending"


def _appending_plan(layout: Layout, cache: AppendingRows, width: int, dtype: torch.dtype) -> _AppendingPlan:
    """Of keys [., width]."""
    reads = []
    for group in layout.groups:
        if cache.cached[group.rows].any():
            reads += _cache_reads(layout, cache, group, width, dtype)
        else:
            reads.append(_CacheRead(None, 0, group.cells, None, _appending_scatter(layout, group.cells, group.rows)))
    written = np.repeat(cache.places, layout.counts.lengths) * cache.kv_cache.capacity + layout.host_positions
    return _AppendingPlan(upload(written, layout.device), reads)


class _GroupAttention(NamedTuple):
    """One group of rows: dense outputs [R, H, M, K], and where they belong."""

    query: Tensor
    key: Tensor
    value: Tensor
    layout: Layout
    number: int  # of the group
    group: AttentionGroup
    layer: str

    def after_prefix(self, cache: SharedPrefix) -> Iterator[tuple[Tensor, Scatter]]:
        rows, cells = self.group
        kv_cache, cached = cache.kv_caches[rows][0], int(cache.cached[rows][0])
        size = max(1, _COPIED // ((cached + cells.shape[1]) * self.key[0].numel()))
        parts = self._once("parts", lambda: _row_parts(self.layout, self.group, cached, size))
        stored: KeysValues | tuple[()] = ()
        if kv_cache is not None:
            stored = kv_cache.read(self.layer, kv_cache.at(int(cache.loops[rows][0])), slice(0, 1), cached)
        for own, mask, scatter in parts:
            keys, values = _dense(self.key, own), _dense(self.value, own)
            if stored:
                keys, values = (
                    torch.cat((prefix.expand(len(own), -1, -1, -1), new), 2)
                    for prefix, new in zip(stored, (keys, values), strict=True)
                )
            yield masked_attention(_dense(self.query, own), keys, values, mask), scatter

    def branches(self) -> Iterator[tuple[Tensor, Scatter]]:
        """The trunks by the kernel for causal attention, which reads no mask; then the tails, which are short."""
        cells = self.group.cells
        longest, trunk, tail, scatter, mask = self._once("tails", lambda: _tails(self.layout, self.group))
        keys, values = _dense(self.key, cells), _dense(self.value, cells)
        query = _dense(self.query, cells[:, :longest])
        yield causal_attention(query, keys[:, :, :longest], values[:, :, :longest]), trunk
        if tail.shape[1]:
            yield masked_attention(_dense(self.query, tail), keys, values, mask), scatter

    def _once(self, name: str, make: Callable[[], Any]) -> Any:
        return self.layout.compute_once((name, self.number), make)


def _cache_reads(
    layout: Layout, cache: AppendingRows, group: AttentionGroup, width: int, dtype: torch.dtype
) -> list[_CacheRead]:
    """Of all rows of a group with keys [., width]. Neighbours of about one length are read where they are."""
    contexts, places = layout.contexts[group.rows], cache.places[group.rows]
    runs = _runs(places, contexts)
    few = _FEW.get(layout.device.type, _MANY)
    if len(contexts) * int(contexts.max()) * width <= few * (len(runs) - 1):
        return [_cache_read(layout, cache, group, slice(0, len(contexts)), upload(places, layout.device), dtype)]
    found = []
    for start, stop in runs:
        there = slice(int(places[start]), int(places[start]) + stop - start)
        found.append(_cache_read(layout, cache, group, slice(start, stop), there, dtype))
    return found


def _runs(places: Integers, contexts: Integers) -> list[tuple[int, int]]:
    """Where neighbours in the cache that read about as much as each other begin and end."""
    runs, start, longest, tokens, before = [], 0, 0, 0, -1
    for number, (place, context) in enumerate(zip(places.tolist(), contexts.tolist(), strict=True)):
        wider = max(longest, context)
        together = (number - start + 1) * wider <= _PADDING * (tokens + context)
        if number > start and (place != before + 1 or not together):
            runs.append((start, number))
            start, wider, tokens = number, context, 0
        longest, tokens, before = wider, tokens + context, place
    return [*runs, (start, len(places))]


def _cache_read(
    layout: Layout, cache: AppendingRows, group: AttentionGroup, part: slice, places: slice | Tensor, dtype: torch.dtype
) -> _CacheRead:
    rows = slice(group.rows.start + part.start, group.rows.start + part.stop)
    counts, upto = layout.counts.lengths[rows], int(layout.contexts[rows].max())
    cells = group.cells[part, : int(counts.max())]
    mask = _causal_mask(layout, cells, cache.cached[rows], upto, dtype)
    return _CacheRead(places, upto, cells, mask, _appending_scatter(layout, cells, rows))


def _row_parts(layout: Layout, group: AttentionGroup, cached: int, size: int) -> list[tuple[Tensor, Tensor, Scatter]]:
    """So many rows of a group at a time: their cells, what they see, and where they go."""
    mask, counts = _prefix_and_own(layout, group, cached), layout.counts.lengths[group.rows]
    cut = zip(torch.split(group.cells, size), torch.split(mask, size), range(0, len(counts), size), strict=True)
    return [(cells, mask, _scatter_of(cells, counts[first : first + size])) for cells, mask, first in cut]


def _tails(layout: Layout, group: AttentionGroup) -> tuple[int, Scatter, Tensor, Scatter, Tensor]:
    """The longest trunk, where trunks go, the tails' tokens [R, W], where these go, what they see."""
    rows, cells = group
    trunks = layout.host_trunks[rows]
    tails = layout.counts.lengths[rows] - trunks
    longest = int(trunks.max())
    local = layout.trunks[rows, None] + torch.arange(int(tails.max()), device=cells.device)
    local = local.minimum(layout.lengths[rows, None] - 1)
    tail = cells.gather(1, local)
    where = _scatter_of(cells[:, :longest], trunks), tail, _scatter_of(tail, tails)
    return longest, *where, _own_mask(layout, cells, local)[:, None]


def _own_mask(layout: Layout, cells: Tensor, local: Tensor) -> Tensor:
    """[R, W, M] what the tokens at `local` [R, W] of a row see: all before them of the trunk or of their own branch."""
    mask = torch.arange(cells.shape[1], device=cells.device) <= local[:, :, None]
    if layout.branches is None:
        return mask
    branch = layout.branch[cells]
    own = branch.gather(1, local)
    return mask & ((branch[:, None] == 0) | (branch[:, None] == own[:, :, None]))


def _prefix_and_own(layout: Layout, group: AttentionGroup, cached: int) -> Tensor:
    cells = group.cells
    own = _own_mask(layout, cells, torch.arange(cells.shape[1], device=cells.device).expand_as(cells))
    return torch.cat((own.new_ones((*own.shape[:2], cached)), own), 2)[:, None]


def _causal_mask(layout: Layout, cells: Tensor, cached: Integers, upto: int, dtype: torch.dtype) -> Tensor | None:
    """[R, 1, M, N] 0 at the places up to a token's own, minus infinity at others; None: they are all.

    It is added to the scores: every layer would make that of a mask of truths."""
    if int(cached.min()) + 1 >= upto:
        return None
    later = torch.arange(upto, device=cells.device) > layout.positions[cells][:, :, None]
    return torch.zeros(later.shape, dtype=dtype, device=cells.device).masked_fill_(later, -torch.inf)[:, None]


def _appending_scatter(layout: Layout, cells: Tensor, rows: slice) -> Scatter:
    """Of rows that may be all there are, of one length: as one batch they lie where they do already."""
    counts = layout.counts.lengths[rows]
    if len(counts) == len(layout.counts.lengths) and cells.numel() == layout.tokens and layout.sharing is None:
        return Scatter(None, None)
    return _scatter_of(cells, counts)


def _scatter_of(cells: Tensor, counts: Integers) -> Scatter:
    """Of cells [R, M], of which the first `counts` [R] of every row are tokens of their own."""
    if int(counts.sum()) == cells.numel():
        return Scatter(None, cells.flatten())
    chosen = upload(count_up(np.arange(len(counts)) * cells.shape[1], counts), cells.device)
    return Scatter(chosen, cells.flatten().index_select(0, chosen))


def _dense(packed: Tensor, cells: Tensor, scatter: Scatter | None = None) -> Tensor:
    """[S, H, K] -> [R, H, M, K]"""
    if scatter is not None and scatter.states is None:
        if cells.shape[1] == 1:
            return packed.unsqueeze(2)
        return packed.reshape(*cells.shape, *packed.shape[1:]).transpose(1, 2)
    return packed.index_select(0, cells.flatten()).view(*cells.shape, *packed.shape[1:]).transpose(1, 2)
