"""Causal self-attention and rotary positions, shared by the looped models.

Shapes: B rows of one length, H heads, M tokens, S states, K head width.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_SHORT = 64
"""Up to this length plain matrix products beat the fused kernel on a CPU, whose per-call work dominates there."""


Rotary = tuple[Tensor, Tensor]


class RotarySettings(NamedTuple):
    """Which heads turn, and how fast: the first `turning` ones; the `still` ones after them (of the values) do not."""

    turning: int
    still: int
    head_width: int
    theta: float


def rotary_tables(settings: RotarySettings, positions: Tensor, longest: int, dtype: torch.dtype) -> Rotary:
    """cos and sin [S, heads, K] of the positions [S] (below `longest`) in the rotate-half convention."""
    cos, sin = (
        table.index_select(0, positions).view(-1, settings.turning + settings.still, settings.head_width)
        for table in _rotary_tables(settings, longest, dtype, positions.device)
    )
    return cos, sin


@lru_cache(maxsize=64)
def _rotary_tables(settings: RotarySettings, longest: int, dtype: torch.dtype, device: torch.device) -> Rotary:
    """[longest, heads K] each; angles are float32 whatever the precision."""
    turning, still, width, theta = settings
    with torch.inference_mode(False):
        frequencies = theta ** -(torch.arange(0, width, 2, device=device, dtype=torch.float32) / width)
        angles = torch.arange(longest, device=device, dtype=torch.float32)[:, None] * frequencies
        cos = torch.cat((angles.cos(), angles.cos()), 1).repeat(1, turning)
        sin = torch.cat((-angles.sin(), angles.sin()), 1).repeat(1, turning)
        return F.pad(cos, (0, still * width), value=1.0).to(dtype), F.pad(sin, (0, still * width)).to(dtype)


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """x [S, heads, K] turned by its positions."""
    cos, sin = rotary
    return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, -1), sin)


def rotate_back(x: Tensor, rotary: Rotary) -> Tensor:
    cos, sin = rotary
    return (x * cos).add_((x * sin).roll(x.shape[-1] // 2, -1))


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """[B, H, M, K]; every token attends to itself and to what stands before it."""
    length = query.shape[-2]
    if query.device.type != "cpu" or length > _SHORT:
        grouped = key.shape[1] != query.shape[1]
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
    return _attention(query, key, value, _future(length, query.dtype))


def attention_at(query: Tensor, key: Tensor, value: Tensor, positions: Tensor) -> Tensor:
    """[B, H, 1, K]: one query a row, at `positions` [B], attends to itself and to what stands before it."""
    later = torch.arange(key.shape[-2], device=key.device) > positions[:, None]
    mask = torch.zeros_like(later, dtype=query.dtype).masked_fill_(later, float("-inf"))
    return _attention(query, key, value, mask.repeat_interleave(query.shape[1], 0)[:, None])


def _attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """`mask` is added to the scores [B H, M, M]."""
    if key.shape[1] != query.shape[1]:
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scale = 1.0 / math.sqrt(query.shape[-1])
    scores = torch.baddbmm(mask, query.flatten(0, 1), key.flatten(0, 1).transpose(1, 2), alpha=scale)
    return (scores.softmax(dim=-1) @ value.flatten(0, 1)).view_as(query)


@lru_cache(maxsize=_SHORT)
def _future(length: int, dtype: torch.dtype) -> Tensor:
    """[M, M] minus infinity where a token must not look."""
    with torch.inference_mode(False):  # a tensor born in inference mode could not be used in training
        return torch.full((length, length), float("-inf"), dtype=dtype).triu(1)
