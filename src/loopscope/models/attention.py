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


class Llama3Scaling(NamedTuple):
    """How Llama 3 stretches rotary positions: slow pairs turn slower by `factor`, quick ones as before."""

    factor: float
    low: float  # turns within the old context: fewer are slow
    high: float  # more are quick
    old_context: int

    def scaled(self, frequencies: Tensor) -> Tensor:
        turns = self.old_context * frequencies / (2 * math.pi)
        quick = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return (1 - quick) * frequencies / self.factor + quick * frequencies


class Rotary(NamedTuple):
    """Rotary positions: pairs are halves of the head apart (rotate-half), or neighbours (interleaved)."""

    head_width: int
    theta: float
    interleaved: bool = False
    scaling: Llama3Scaling | None = None

    def rotate(self, x: Tensor, positions: Tensor | None = None, count: int | None = None) -> Tensor:
        """x [B, H, M, K] turned by its positions [B, M] (default: 0, 1, ..), which are below `count`."""
        if positions is None:
            return self.apply_rotary(x, _angles(self, x.shape[2], x.dtype, x.device))
        cos, sin = self.angles(positions, x.dtype, count)
        return self.apply_rotary(x, (cos[:, None], sin[:, None]))

    def angles(self, positions: Tensor, dtype: torch.dtype, count: int | None = None) -> tuple[Tensor, Tensor]:
        """cos and sin [..., K] of these positions [...], below `count`; without one, their device is asked."""
        last = int(positions.max()) if count is None else count - 1
        longest = 1 << last.bit_length()  # a power of two: growing rows do not make a new table a token
        cos, sin = _angles(self, longest, dtype, positions.device)
        return cos[positions], sin[positions]

    def apply_rotary(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """x [..., K] turned by cos and sin."""
        cos, sin = angles
        if self.interleaved:
            other = x.reshape(*x.shape[:-1], -1, 2).flip(-1).flatten(-2)
        else:
            other = x.roll(self.head_width // 2, -1)
        return (x * cos).addcmul_(other, sin)


@lru_cache(maxsize=64)
def _angles(rotary: Rotary, longest: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin [M, K], sin negative for the first of each pair; angles are float32 whatever the precision."""
    width, theta, interleaved, scaling = rotary
    with torch.inference_mode(False):  # a tensor born in inference mode could not be used in training
        frequencies = theta ** -(torch.arange(0, width, 2, device=device, dtype=torch.float32) / width)
        frequencies = frequencies if scaling is None else scaling.scaled(frequencies)
        angles = torch.arange(longest, device=device, dtype=torch.float32)[:, None] * frequencies
        cos, sin = angles.cos(), angles.sin()
        pairs = ((cos, cos), (-sin, sin))
        both = [torch.stack(pair, 2).flatten(1) if interleaved else torch.cat(pair, 1) for pair in pairs]
        return both[0].to(dtype), both[1].to(dtype)


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """[B, H, M, K]; every token attends to itself and to what stands before it."""
    length = query.shape[-2]
    if query.device.type != "cpu" or length > _SHORT:
        grouped = key.shape[1] != query.shape[1]
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
    return _attention(query, key, value, _future(length, query.dtype))


def masked_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """[B, H, M, K]; every token attends to what it has `mask` [B or 1, 1, M, N] (None: to all N)."""
    grouped = key.shape[1] != query.shape[1]
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=grouped)


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
    with torch.inference_mode(False):
        return torch.full((length, length), float("-inf"), dtype=dtype).triu(1)
