"""How do packed rows attend? Every group of rows of about one length is gathered into a dense batch, and back.

Shapes: B rows, S states, R rows of a group, M tokens of its longest row, H heads, K head width.
"""

from typing import Any

import torch
from torch import Tensor

from loopscope.models.attention import Rotary, attention_at, causal_attention
from loopscope.models.layout import Layout


def packed_attention(projected: Tensor, heads: tuple[int, int, int], layout: Layout, rotary: Rotary | None) -> Tensor:
    """[S, query, key and value heads, K] -> [S, H K]; every token attends to itself and to its row before it."""
    layout.require_plain("packed_attention")
    if not len(projected):
        return projected[:, : heads[0]].flatten(1)
    attended = []
    for query, key, value in _dense(projected, layout.gather_indices(*heads)):
        if rotary is not None:
            query, key = rotary.rotate(query), rotary.rotate(key)
        attended.append(causal_attention(query, key, value).flatten(0, 2)[:, None])
    (outputs,) = _gather(_cat(attended), layout.scatter_index(heads[0]))
    return outputs.view(len(projected), -1)


def packed_attention_at(
    query: Tensor, projected: Tensor, positions: Tensor, layout: Layout, rotary: Rotary | None
) -> Tensor:
    """One query a row [B, H, K], at `positions` [B]; key and value heads [S, 2 H, K] of all states -> [B, H K]."""
    layout.require_plain("packed_attention_at")
    if not len(projected):
        return query.flatten(1)
    query = query[:, :, None]
    if rotary is not None:
        query = rotary.rotate(query, positions[:, None], layout.longest)
    attended = []
    dense = _dense(projected, layout.gather_indices(query.shape[1], query.shape[1]))
    for (rows, _), (key, value) in zip(layout.groups, dense, strict=True):
        rotated = key if rotary is None else rotary.rotate(key)
        attended.append(attention_at(query[rows], rotated, value, positions[rows]).flatten(1))
    return _cat(attended)


def _dense(projected: Tensor, gather_indices: list[list[Tensor]]) -> list[list[Tensor]]:
    """[S, heads, K] -> for every group [R, heads, M, K] of each kind; gathering puts the heads in front at no cost."""
    flat = iter(_gather(projected, *(index for group in gather_indices for index in group)))
    return [[next(flat) for _ in group] for group in gather_indices]


def _gather(states: Tensor, *indices: Tensor) -> tuple[Tensor, ...]:
    """Rows [.., K] of states [S, heads, K], numbered over both."""
    taken: tuple[Tensor, ...] = _Gather.apply(states, *indices)  # type: ignore[no-untyped-call]
    return taken


class _Gather(torch.autograd.Function):
    """All gradients are added into one buffer; autograd would make one for every index and add those."""

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


def _cat(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
