"""How do tokens look beyond their row? At the trunk that they branch off from, and at tokens that are remembered.

Shapes: B rows, S states, R rows of a group, M tokens of its longest row, N keys, W tokens of its longest tail (all
branches of a row), H heads, K head width.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from loopscope.models.attention import Rotary, causal_attention, masked_attention
from loopscope.models.memory import GoingOn, Prefixed
from loopscope.models.packing import Group, Layout, packed_attention

_FIRST = np.zeros(1, dtype=np.int64)
_COPIED = 1 << 24
"""Numbers of keys that are copied at a time: every row of a batch needs those of what it begins with beside its own."""


class Places(NamedTuple):
    """Where what a dense batch says belongs."""

    slots: Tensor  # of the batch [R M], without those that are empty
    states: Tensor  # theirs


def attend(projected: Tensor, heads: tuple[int, int, int], layout: Layout, rotary: Rotary | None, slot: str) -> Tensor:
    """[S, query, key and value heads, K] -> [S, H K], in the layer that is called `slot`."""
    if layout.branches is None and layout.past is None:
        return packed_attention(projected, heads, layout, rotary)
    query, key, value = torch.split(projected, list(heads), 1)
    if rotary is not None:
        angles = layout.once((rotary, key.dtype), lambda: _angles(layout, rotary, key.dtype))
        query, key = (rotary.turned(part, angles) for part in (query, key))
    if isinstance(layout.past, GoingOn):
        _remember(layout, layout.past, slot, key, value)
    out = torch.empty_like(query)
    for number, group in enumerate(layout.groups):
        if isinstance(layout.past, GoingOn):
            _going_on(out, query, key, value, layout, number, group, slot)
        elif layout.past is not None:
            _after_prefix(out, query, key, value, layout, number, group, slot)
        else:
            _branching(out, query, key, value, layout, number, group)
    return out.flatten(1)


def _angles(layout: Layout, rotary: Rotary, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    cos, sin = rotary.angles(layout.positions, dtype)
    return cos[:, None], sin[:, None]


def _remember(layout: Layout, past: GoingOn, slot: str, key: Tensor, value: Tensor) -> None:
    for level, (tokens, places) in layout.once("places", lambda: _places(layout, past)).items():
        whole = len(tokens) == len(key)
        past.memory.write(slot, level, places, *(part if whole else part[tokens] for part in (key, value)))


def _places(layout: Layout, past: GoingOn) -> dict[int, tuple[Tensor, Tensor]]:
    """For every level its tokens, and where they go in the memory."""
    device = layout.lengths.device
    rows = layout.spread(torch.from_numpy(past.rows).to(device))
    levels = layout.spread(torch.from_numpy(past.levels).to(device))
    places = rows * past.memory.capacity + layout.positions
    found = {}
    for level in sorted(set(past.levels.tolist())):
        tokens = torch.nonzero(levels == level)[:, 0]
        found[level] = (tokens, places[tokens])
    return found


def _going_on(
    out: Tensor, query: Tensor, key: Tensor, value: Tensor, layout: Layout, number: int, group: Group, slot: str
) -> None:
    """All keys are in the memory by now, by position; where nothing was before, the rows' own are at hand."""
    past = layout.past
    assert isinstance(past, GoingOn)
    rows, slots = group
    places = layout.once(("inside", number), lambda: _inside(layout, group))
    if not past.before[rows].any():
        mixed = causal_attention(*(_dense(part, slots) for part in (query, key, value)))
    else:
        upto = layout.once(("upto", number), lambda: int(layout.positions[slots].max()) + 1)
        there = past.memory.read(slot, int(past.levels[rows][0]), past.rows[rows], upto)
        seen = layout.once(("seen", number), lambda: _earlier(layout, slots, upto))
        mixed = masked_attention(_dense(query, slots), there.keys.transpose(1, 2), there.values.transpose(1, 2), seen)
    _put(out, mixed, places)


def _after_prefix(
    out: Tensor, query: Tensor, key: Tensor, value: Tensor, layout: Layout, number: int, group: Group, slot: str
) -> None:
    past = layout.past
    assert isinstance(past, Prefixed)
    rows, slots = group
    memory, before = past.texts[rows][0], int(past.before[rows][0])
    size = (before + slots.shape[1]) * key[0].numel()
    parts = layout.once(("parts", number), lambda: _parts(layout, group, before, max(1, _COPIED // size)))
    there = () if memory is None else memory.read(slot, int(past.levels[rows][0]), _FIRST, before)
    for own, seen, places in parts:
        keys, values = _dense(key, own), _dense(value, own)
        if there:
            keys, values = (
                torch.cat((kept.transpose(1, 2).expand(len(own), -1, -1, -1), new), 2)
                for kept, new in zip(there, (keys, values), strict=True)
            )
        _put(out, masked_attention(_dense(query, own), keys, values, seen), places)


def _branching(
    out: Tensor, query: Tensor, key: Tensor, value: Tensor, layout: Layout, number: int, group: Group
) -> None:
    """The trunks by the kernel for causal attention, which reads no mask; then the tails, which are short."""
    slots = group.slots
    longest, trunk, tail, places, seen = layout.once(("tails", number), lambda: _tails(layout, group))
    keys, values = _dense(key, slots), _dense(value, slots)
    mixed = causal_attention(_dense(query, slots[:, :longest]), keys[:, :, :longest], values[:, :, :longest])
    _put(out, mixed, trunk)
    if tail.shape[1]:
        _put(out, masked_attention(_dense(query, tail), keys, values, seen), places)


def _parts(layout: Layout, group: Group, before: int, size: int) -> list[tuple[Tensor, Tensor, Places]]:
    """So many rows of a group at a time: their slots, what they see, and where they go."""
    seen, inside = _before_and_own(layout, group, before), _real(layout, group)
    cut = (torch.split(whole, size) for whole in (group.slots, seen, inside))
    return [(slots, sees, _places_of(slots, real)) for slots, sees, real in zip(*cut, strict=True)]


def _tails(layout: Layout, group: Group) -> tuple[int, Places, Tensor, Places, Tensor]:
    """The longest trunk, where trunks go, the tails' tokens [R, W], where these go, what they see."""
    rows, slots = group
    trunks, lengths = layout.trunks[rows, None], layout.lengths[rows, None]
    longest, widest = int(trunks.max()), int((lengths - trunks).max())
    local = trunks + torch.arange(widest, device=slots.device)
    real = local < lengths
    local = local.minimum(lengths - 1)
    trunk = torch.arange(longest, device=slots.device) < trunks
    tail = slots.gather(1, local)
    where = _places_of(slots[:, :longest], trunk), tail, _places_of(tail, real)
    return longest, *where, _own(layout, slots, local)[:, None]


def _own(layout: Layout, slots: Tensor, local: Tensor) -> Tensor:
    """[R, W, M] what the tokens at `local` [R, W] of a row see: all before them of the trunk or of their own branch."""
    seen = torch.arange(slots.shape[1], device=slots.device) <= local[:, :, None]
    if layout.branches is None:
        return seen
    branch = layout.branch[slots]
    own = branch.gather(1, local)
    return seen & ((branch[:, None] == 0) | (branch[:, None] == own[:, :, None]))


def _before_and_own(layout: Layout, group: Group, before: int) -> Tensor:
    slots = group.slots
    own = _own(layout, slots, torch.arange(slots.shape[1], device=slots.device).expand_as(slots))
    return torch.cat((own.new_ones((*own.shape[:2], before)), own), 2)[:, None]


def _earlier(layout: Layout, slots: Tensor, upto: int) -> Tensor | None:
    """[R, 1, M, N] the places up to a token's own; None: all of them."""
    seen = torch.arange(upto, device=slots.device) <= layout.positions[slots][:, :, None]
    return None if bool(seen.all()) else seen[:, None]


def _inside(layout: Layout, group: Group) -> Places:
    return _places_of(group.slots, _real(layout, group))


def _real(layout: Layout, group: Group) -> Tensor:
    """[R, M] which slots are tokens of their own."""
    rows, slots = group
    return torch.arange(slots.shape[1], device=slots.device) < layout.lengths[rows, None]


def _places_of(slots: Tensor, real: Tensor) -> Places:
    chosen = torch.nonzero(real.flatten())[:, 0]
    return Places(chosen, slots.flatten()[chosen])


def _dense(packed: Tensor, slots: Tensor) -> Tensor:
    """[S, H, K] -> [R, H, M, K]"""
    return packed.index_select(0, slots.flatten()).view(*slots.shape, *packed.shape[1:]).transpose(1, 2)


def _put(out: Tensor, mixed: Tensor, places: Places) -> None:
    """Puts [R, H, M, K] where its tokens are."""
    out.index_copy_(0, places.states, mixed.transpose(1, 2).flatten(0, 1).index_select(0, places.slots))
