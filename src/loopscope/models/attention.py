"""How do packed rows attend? To themselves, to the trunk that they branch off from, and to tokens in a KV cache.

Neighbouring rows of about the same length attend as one dense batch, which may leave a few cells empty: attention is a
small part of the arithmetic, and many small batches would cost more. LoopScope plans once for a layout which rows
attend together, which keys they see and where their outputs go; the plan is the same in every layer.

Shapes: B rows, S states, R rows of a group, M tokens of its longest row, N keys, H heads, K head width.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from loopscope.models.device import upload
from loopscope.models.kv_cache import AppendingRows, Integers, SharedPrefix
from loopscope.models.packing import Layout, count_up

MAX_PADDING = 1.3
"""Rows attend together while their cells are at most this many times their tokens."""
MAX_SHORT = 64
"""Up to this length plain matrix products beat the fused kernel on a CPU, whose per-call work dominates there."""
MAX_COPIED = 1 << 24
"""Numbers of keys that are copied at a time, when every row of a batch needs a copy of its shared prefix."""
MAX_GATHERED = 1 << 22
MAX_GATHERED_ON_CPU = 1 << 16
"""Numbers of keys that are copied at most to save a separate call of attention, for rows that are not neighbours."""


class Llama3Scaling(NamedTuple):
    """Scale rotary frequencies as Llama 3 does: slow pairs turn slower by `factor`, fast pairs as before."""

    factor: float
    low: float  # turns within the old context: fewer are slow
    high: float  # more are quick
    old_context: int

    def scaled(self, frequencies: Tensor) -> Tensor:
        turns = self.old_context * frequencies / (2 * math.pi)
        quick = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return (1 - quick) * frequencies / self.factor + quick * frequencies


class Rotary(NamedTuple):
    """Define rotary positions: pairs are halves of the head apart (rotate-half), or neighbours (interleaved)."""

    head_width: int
    theta: float
    interleaved: bool = False
    scaling: Llama3Scaling | None = None

    @property
    def numbers(self) -> list[float]:
        """The numbers from which `of` restores it, since a compiled operator takes only numbers."""
        return [self.head_width, self.theta, self.interleaved, *(self.scaling or ())]

    @classmethod
    def of(cls, numbers: Sequence[float]) -> "Rotary | None":
        """Restore rotary positions from their numbers; None from none."""
        if not numbers:
            return None
        width, theta, interleaved, *scaling = numbers
        stretched = Llama3Scaling(scaling[0], scaling[1], scaling[2], int(scaling[3])) if scaling else None
        return cls(int(width), theta, bool(interleaved), stretched)

    def rotate(self, x: Tensor) -> Tensor:
        """x [B, H, M, K] rotated by its positions 0, 1, .. M - 1."""
        return self.apply_rotary(x, _rotary_table(self, x.shape[2], x.dtype, x.device))

    def angles(self, positions: Tensor, dtype: torch.dtype, count: int) -> tuple[Tensor, Tensor]:
        """cos and sin [..., K] of positions [...], all below `count`."""
        longest = 1 << (count - 1).bit_length()  # a power of two: growing rows reuse the table
        cos, sin = _rotary_table(self, longest, dtype, positions.device)
        return cos[positions], sin[positions]

    def apply_rotary(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """x [..., K] rotated by cos and sin."""
        cos, sin = angles
        if self.interleaved:
            other = x.reshape(*x.shape[:-1], -1, 2).flip(-1).flatten(-2)
        else:
            other = x.roll(self.head_width // 2, -1)
        return (x * cos).addcmul_(other, sin)


@lru_cache(maxsize=64)
def _rotary_table(rotary: Rotary, longest: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """The rotary table: cos and sin [M, K], sin negative for the first of each pair, always computed in float32."""
    width, theta, interleaved, scaling = rotary
    with torch.inference_mode(False):  # a tensor born in inference mode could not be used in training
        frequencies = theta ** -(torch.arange(0, width, 2, device=device, dtype=torch.float32) / width)
        frequencies = frequencies if scaling is None else scaling.scaled(frequencies)
        angles = torch.arange(longest, device=device, dtype=torch.float32)[:, None] * frequencies
        cos, sin = angles.cos(), angles.sin()
        pairs = ((cos, cos), (-sin, sin))
        both = [torch.stack(pair, 2).flatten(1) if interleaved else torch.cat(pair, 1) for pair in pairs]
        return both[0].to(dtype), both[1].to(dtype)


def takes_fused_kernels(device: torch.device) -> bool:
    """Whether all attention on this device uses `scaled_dot_product_attention`."""
    return device.type != "cpu"


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """[B, H, M, K] the attention of every token to itself and to all tokens before it."""
    length = query.shape[-2]
    if takes_fused_kernels(query.device) or length > MAX_SHORT:
        return fused_attention(query, key, value, is_causal=True)
    return _short_attention(query, key, value, _causal_mask(length, query.dtype))


def fused_attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """[B, H, M, K] attention by a fused kernel; `attn_mask` [B or 1, 1, M, N] limits the keys (None: all N)."""
    grouped = key.shape[1] != query.shape[1]
    return F.scaled_dot_product_attention(query, key, value, enable_gqa=grouped, **options)


def attention_at(query: Tensor, key: Tensor, value: Tensor, positions: Tensor) -> Tensor:
    """[B, H, 1, K] the attention of one query a row, at `positions` [B], to its own and all earlier keys."""
    later = torch.arange(key.shape[-2], device=key.device) > positions[:, None]
    if takes_fused_kernels(query.device):
        return fused_attention(query, key, value, attn_mask=~later[:, None, None])
    mask = torch.zeros_like(later, dtype=query.dtype).masked_fill_(later, -torch.inf)
    return _short_attention(query, key, value, mask.repeat_interleave(query.shape[1], 0)[:, None])


def _short_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Attention of short rows by plain matrix products; `mask` is added to the scores [B H, M, M]."""
    if key.shape[1] != query.shape[1]:
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scale = 1.0 / math.sqrt(query.shape[-1])
    scores = torch.baddbmm(mask, query.flatten(0, 1), key.flatten(0, 1).transpose(1, 2), alpha=scale)
    return (scores.softmax(dim=-1) @ value.flatten(0, 1)).view_as(query)


@lru_cache(maxsize=MAX_SHORT)
def _causal_mask(length: int, dtype: torch.dtype) -> Tensor:
    """[M, M] the causal mask: minus infinity for keys after the query."""
    with torch.inference_mode(False):
        return torch.full((length, length), -torch.inf, dtype=dtype).triu(1)


class AttentionGroup(NamedTuple):
    """Hold neighbouring rows of a layout that attend as one dense batch."""

    rows: slice
    cells: Tensor  # [R, M] the state in each cell; cells beyond a row's end hold its last state


def attention_groups(layout: Layout) -> list[AttentionGroup]:
    """The groups of rows of a layout that attend as one dense batch, computed once."""
    return layout.compute_once("groups", partial(_form_groups, layout))


def _form_groups(layout: Layout) -> list[AttentionGroup]:
    """Group neighbouring rows whose common batch has few empty cells."""
    lengths = layout.host_lengths
    if not len(lengths):
        return []
    found = [(slice(0, len(lengths)), int(lengths[0]))]  # text that goes on by a token
    prefixes = layout.cache if isinstance(layout.cache, SharedPrefix) else None
    if prefixes is not None or (lengths != lengths[0]).any():
        keys = np.zeros_like(lengths) if prefixes is None else prefixes.group_keys
        differs = (lengths[1:] != lengths[:-1]) | (keys[1:] != keys[:-1])
        firsts = np.concatenate(([0], np.flatnonzero(differs) + 1))
        found = _similar_neighbours(lengths[firsts], keys[firsts], np.diff(firsts, append=len(lengths)))
    groups = []
    for rows, longest in found:
        cells = torch.arange(longest, device=layout.device).minimum(layout.lengths[rows, None] - 1)
        groups.append(AttentionGroup(rows, layout.states(layout.starts[rows, None] + cells)))
    return groups


def _similar_neighbours(lengths: Integers, keys: Integers, counts: Integers) -> list[tuple[slice, int]]:
    """Split rows into neighbours of one key whose common batch has few empty cells, with their longest row."""
    found, first, row, tokens, longest, previous = [], 0, 0, 0, 0, None
    for length, key, count in zip(lengths.tolist(), keys.tolist(), counts.tolist(), strict=True):
        wider = max(longest, length)
        padded = (row - first + count) * wider > MAX_PADDING * (tokens + count * length)
        if row > first and (key != previous or padded):
            found.append((slice(first, row), longest))
            first, tokens, wider = row, 0, length
        row, tokens, longest, previous = row + count, tokens + count * length, wider, key
    return [*found, (slice(first, row), longest)]


def packed_attention(projected: Tensor, heads: tuple[int, int, int], layout: Layout, rotary: Rotary | None) -> Tensor:
    """Causal attention within packed rows: [S, query, key and value heads, K] -> [S, H K]."""
    layout.require_plain("packed_attention")
    if not len(projected):
        return projected[:, : heads[0]].flatten(1)
    attended = []
    for query, key, value in _gather_groups(projected, heads, layout):
        if rotary is not None:
            query, key = rotary.rotate(query), rotary.rotate(key)
        attended.append(causal_attention(query, key, value).flatten(0, 2)[:, None])
    back = layout.compute_once(("scatter", heads[0]), partial(_scatter_index, layout, heads[0]))
    (outputs,) = _Gather.apply(_concatenate_groups(attended), back)  # type: ignore[no-untyped-call]
    return outputs.view(len(projected), -1)


def packed_attention_at(
    query: Tensor, projected: Tensor, positions: Tensor, layout: Layout, rotary: Rotary | None
) -> Tensor:
    """Attention of one query a row [B, H, K], at `positions` [B], to key and value heads [S, 2 H, K] -> [B, H K]."""
    layout.require_plain("packed_attention_at")
    if not len(projected):
        return query.flatten(1)
    if rotary is not None:
        cos, sin = rotary.angles(positions, query.dtype, layout.longest)
        query = rotary.apply_rotary(query, (cos[:, None], sin[:, None]))
    attended = []
    dense = _gather_groups(projected, (query.shape[1],) * 2, layout)
    for (rows, _), (key, value) in zip(attention_groups(layout), dense, strict=True):
        rotated = key if rotary is None else rotary.rotate(key)
        attended.append(attention_at(query[rows, :, None], rotated, value, positions[rows]).flatten(1))
    return _concatenate_groups(attended)


def _gather_groups(projected: Tensor, heads: tuple[int, ...], layout: Layout) -> list[list[Tensor]]:
    """Gather packed heads [S, heads, K] into groups: for each group [R, heads, M, K] of each kind of head."""
    indices = layout.compute_once(("gather", heads), partial(_gather_indices, layout, heads))
    flat = iter(_Gather.apply(projected, *(index for group in indices for index in group)))  # type: ignore[no-untyped-call]
    return [[next(flat) for _ in group] for group in indices]


def _gather_indices(layout: Layout, heads: tuple[int, ...]) -> list[list[Tensor]]:
    """The indices [R, heads, M] of states [S heads, K] that every group gathers, for each kind of head."""
    numbers = torch.arange(sum(heads), device=layout.device)[:, None]
    rows = (cells[:, None] * sum(heads) + numbers for _, cells in attention_groups(layout))
    return [[kind.contiguous() for kind in torch.split(group, list(heads), dim=1)] for group in rows]


def _scatter_index(layout: Layout, heads: int) -> Tensor:
    """[S H] the index of every state's output among the outputs [R, H, M] of all groups."""
    widths = np.concatenate([np.full(*cells.shape) for _, cells in attention_groups(layout)])
    first = count_up(heads * (widths.cumsum() - widths), layout.host_lengths)
    index = upload(first, layout.device)[:, None]
    width = upload(np.repeat(widths, layout.host_lengths), layout.device)[:, None]
    return layout.to_states(index + torch.arange(heads, device=layout.device) * width).flatten()


class _Gather(torch.autograd.Function):
    """Gather rows [.., K] of states [S, heads, K] by a flat index over states and heads.

    The backward pass adds all gradients into one buffer; autograd would make a buffer for every index.
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, *indices: Tensor) -> tuple[Tensor, ...]:
        ctx.shape, ctx.indices = states.shape, indices
        rows = states.flatten(0, 1)
        return tuple(rows.index_select(0, index.flatten()).view(*index.shape, -1) for index in indices)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        states = gradients[0].new_zeros(ctx.shape)
        for index, gradient in zip(ctx.indices, gradients, strict=True):
            states.flatten(0, 1).index_add_(0, index.flatten(), gradient.reshape(-1, ctx.shape[-1]))
        return states, *(None for _ in ctx.indices)


def _concatenate_groups(parts: list[Tensor]) -> Tensor:
    """Concatenate the attention outputs of groups, without a copy if there is only one."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


_OUTSIDE = Layout(np.zeros(0, dtype=np.int64))
"""A placeholder for the layout in a compiled step, because the compiler must not look into a layout."""
_attending: list[Layout] = []
"""The layouts of the compiled steps that run now, innermost last."""


@contextmanager
def attending(layout: Layout) -> Iterator[Layout]:
    """Let a compiled step, which runs with the placeholder layout that this yields, attend as `layout` defines.

    The host computes the plan of attention for every batch. So attention is one operator of the compiled graph, and the
    compiler does not look into it.
    """
    _attending.append(layout)
    try:
        yield _OUTSIDE
    finally:
        _attending.pop()


@torch.library.custom_op("loopscope::attention", mutates_args=())
def _attention_outside(projected: Tensor, heads: list[int], rotary: list[float], layer: str) -> Tensor:
    """Run attention as one operator of a compiled graph, with the layout of the innermost running step."""
    kinds = heads[0], heads[1], heads[2]
    attended = cached_attention(projected, kinds, _attending[-1], Rotary.of(rotary), layer)
    return attended.contiguous() if len(projected) else attended.clone()


@_attention_outside.register_fake
def _(projected: Tensor, heads: list[int], rotary: list[float], layer: str) -> Tensor:
    """The shape of this operator's output, for the compiler."""
    return projected.new_empty((projected.shape[0], heads[0] * projected.shape[2]))


class _AttentionPart(NamedTuple):
    """Hold rows that attend together: their queries, keys and mask, and the destination of their outputs."""

    cells: Tensor  # [R, M] the states with queries
    own: Tensor | None  # [R, N] the states whose keys they read; None: only cached keys
    mask: Tensor | None  # [R, 1, M, N] added to the scores, or true where a key is seen; None: causal, or a whole cache
    filled: Tensor | None  # the cells [R M] that are not empty; None: all
    states: Tensor | None  # their states in the packed layout; None: all states, in order
    cached: Any = None  # the rows of the cache, or a row of the batch, to read; None: no cache
    upto: int = 0  # how many cached tokens are read


class _AttentionPlan(NamedTuple):
    """Hold the attention plan that all layers share, and all loops while the rows stay at one loop together."""

    parts: list[_AttentionPart]
    written: Tensor | None  # [S] the cache indices of new keys and values, in a cache that rows append to


def cached_attention(
    projected: Tensor, heads: tuple[int, int, int], layout: Layout, rotary: Rotary | None, layer: str
) -> Tensor:
    """Attention with a KV cache: [S, query, key and value heads, K] -> [S, H K], for the layer named `layer`."""
    if layout is _OUTSIDE:
        numbers = [] if rotary is None else rotary.numbers
        return _attention_outside(projected, list(heads), numbers, layer)
    cache = layout.cache
    # Shared states are gathered: otherwise each row would write them, and count their gradient again.
    gathers = layout.sharing is not None or not takes_fused_kernels(projected.device)
    if gathers and layout.host_branches is None and cache is None:
        return packed_attention(projected, heads, layout, rotary)
    turned, value = projected[:, : heads[0] + heads[1]], projected[:, heads[0] + heads[1] :]
    if rotary is not None:
        angles = layout.compute_once((rotary, value.dtype), partial(_head_angles, layout, rotary, value.dtype))
        turned = rotary.apply_rotary(turned, angles)
    query, key = turned[:, : heads[0]], turned[:, heads[0] :]
    name: Any = "plan"
    if isinstance(cache, AppendingRows) and cache.at.number is None:
        name = cache.loops.tobytes()  # rows at several loops have a plan for each step
    plan = layout.compute_once(name, partial(_plan_attention, layout, key))
    if isinstance(cache, AppendingRows) and plan.written is not None:
        cache.kv_cache.write(layer, cache.at, plan.written, key, value)
    out = None
    for part in plan.parts:
        attended = _attend_part(part, query, key, value, layout, layer)
        if part.states is None and attended.shape[2] == 1:  # heads lie side by side already
            return attended.flatten(1)
        tokens = attended.transpose(1, 2).flatten(0, 1)
        if part.states is None:
            return tokens.flatten(1)
        tokens = tokens if part.filled is None else tokens.index_select(0, part.filled)
        out = query.new_empty(query.shape) if out is None else out
        out.index_copy_(0, part.states, tokens)
    return query.flatten(1) if out is None else out.flatten(1)  # None: there are no rows


def _attend_part(part: _AttentionPart, query: Tensor, key: Tensor, value: Tensor, layout: Layout, layer: str) -> Tensor:
    """[R, H, M, K] the attention of one part of the plan."""
    dense = _packed_to_cells(query, part.cells, part)
    if part.own is not None:
        key, value = _packed_to_cells(key, part.own, part), _packed_to_cells(value, part.own, part)
    if part.cached is not None:
        assert layout.cache is not None
        keys, values = layout.cache.read(layer, part.cached, part.upto)
        if part.own is None:
            key, value = keys, values
        else:
            key = torch.cat((keys.expand(len(key), -1, -1, -1), key), 2)
            value = torch.cat((values.expand(len(value), -1, -1, -1), value), 2)
    elif part.mask is None:
        return causal_attention(dense, key, value)
    return fused_attention(dense, key, value, attn_mask=part.mask)


def _packed_to_cells(packed: Tensor, cells: Tensor, part: _AttentionPart) -> Tensor:
    """[S, H, K] -> [R, H, M, K] the packed heads in the cells of a part."""
    if part.states is not None:
        return packed.index_select(0, cells.flatten()).view(*cells.shape, *packed.shape[1:]).transpose(1, 2)
    if cells.shape[1] == 1:
        return packed.unsqueeze(2)
    return packed.reshape(*cells.shape, *packed.shape[1:]).transpose(1, 2)


def _head_angles(layout: Layout, rotary: Rotary, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[S, 1, K] cos and sin of every state's position."""
    cos, sin = rotary.angles(layout.positions, dtype, layout.max_context)
    return cos[:, None], sin[:, None]


def _plan_attention(layout: Layout, key: Tensor) -> _AttentionPlan:
    """Plan the attention of a layout, for keys like [S, H, K]."""
    cache, parts, written = layout.cache, [], None
    for group in attention_groups(layout):
        if cache is None:
            parts += _branch_parts(layout, group)
        elif isinstance(cache, SharedPrefix):
            parts += _prefix_parts(layout, cache, group, key[0].numel())
        elif cache.cached[group.rows].any():
            parts += _cache_parts(layout, cache, group, key)
        else:
            belongs = _own_cells(layout, group.cells, layout.host_lengths[group.rows])
            parts.append(_AttentionPart(group.cells, group.cells, None, *belongs))
    if isinstance(cache, AppendingRows):
        places = np.repeat(cache.places, layout.host_lengths) * cache.kv_cache.capacity + layout.host_positions
        written = upload(places, layout.device)
    return _AttentionPlan(parts, written)


def _cache_parts(layout: Layout, cache: AppendingRows, group: AttentionGroup, key: Tensor) -> list[_AttentionPart]:
    """The parts of appending rows: neighbours of similar length read the cache in place; few tokens are copied."""
    contexts, places = layout.host_contexts[group.rows], cache.places[group.rows]
    runs = _similar_neighbours(contexts, places - np.arange(len(places)), np.ones_like(places))
    few = MAX_GATHERED if takes_fused_kernels(layout.device) else MAX_GATHERED_ON_CPU
    copied = len(contexts) * int(contexts.max()) * key[0].numel() <= few * (len(runs) - 1)
    if copied:
        runs = [(slice(0, len(contexts)), int(contexts.max()))]
    parts = []
    for run, upto in runs:
        rows = slice(group.rows.start + run.start, group.rows.start + run.stop)
        counts = layout.host_lengths[rows]
        cells = group.cells[run, : int(counts.max())]
        mask = None
        if int(cache.cached[rows].min()) + 1 < upto:
            # The mask is added to the scores: every layer would convert a boolean mask.
            later = torch.arange(upto, device=cells.device) > layout.positions[cells][:, None, :, None]
            mask = torch.zeros(later.shape, dtype=key.dtype, device=key.device).masked_fill_(later, -torch.inf)
        start = int(places[run.start])
        there = upload(places, layout.device) if copied else slice(start, start + run.stop - run.start)
        parts.append(_AttentionPart(cells, None, mask, *_own_cells(layout, cells, counts), there, upto))
    return parts


def _branch_parts(layout: Layout, group: AttentionGroup) -> list[_AttentionPart]:
    """The parts of rows with branches: trunks by the causal kernel without a mask, then the short branches."""
    rows, cells = group
    trunks = layout.host_trunks[rows]
    tails = layout.host_lengths[rows] - trunks
    trunk = cells[:, : int(trunks.max())]
    parts = [_AttentionPart(trunk, trunk, None, *_own_cells(layout, trunk, trunks))]
    if tails.any():
        local = layout.trunks[rows, None] + torch.arange(int(tails.max()), device=cells.device)
        local = local.minimum(layout.lengths[rows, None] - 1)
        tail = cells.gather(1, local)
        parts.append(_AttentionPart(tail, cells, _own_mask(layout, cells, local), *_own_cells(layout, tail, tails)))
    return parts


def _prefix_parts(layout: Layout, cache: SharedPrefix, group: AttentionGroup, key_width: int) -> list[_AttentionPart]:
    """The parts of rows after a shared prefix, a few at a time: each reads a copy of the prefix beside its own keys."""
    rows, cells = group
    upto, counts = int(cache.cached[rows.start]), layout.host_lengths[rows]
    cached = None if cache.kv_caches[rows.start] is None else rows.start
    own = _own_mask(layout, cells, torch.arange(cells.shape[1], device=cells.device).expand_as(cells))
    mask = F.pad(own, (upto, 0), value=True)
    size = max(1, MAX_COPIED // ((upto + cells.shape[1]) * key_width))
    parts = []
    for first in range(0, len(counts), size):
        some = slice(first, first + size)
        belongs = _own_cells(layout, cells[some], counts[some])
        parts.append(_AttentionPart(cells[some], cells[some], mask[some], *belongs, cached, upto))
    return parts


def _own_mask(layout: Layout, cells: Tensor, local: Tensor) -> Tensor:
    """[R, 1, W, M] the keys that the tokens at `local` [R, W] see: earlier tokens of their trunk or branch."""
    mask = torch.arange(cells.shape[1], device=cells.device) <= local[:, None, :, None]
    if layout.host_branches is None:
        return mask
    branch = layout.branch[cells]
    own = branch.gather(1, local)[:, None, :, None]
    seen = branch[:, None, None]
    return mask & ((seen == 0) | (seen == own))


def _own_cells(layout: Layout, cells: Tensor, counts: Integers) -> tuple[Tensor | None, Tensor | None]:
    """`filled` and `states` of a part with cells [R, M], whose first `counts` [R] cells of a row are its tokens."""
    if int(counts.sum()) < cells.numel():
        filled = upload(count_up(np.arange(len(counts)) * cells.shape[1], counts), cells.device)
        return filled, cells.flatten().index_select(0, filled)
    whole = cells.numel() == layout.host_lengths.sum() and layout.sharing is None
    return None, None if whole else cells.flatten()
