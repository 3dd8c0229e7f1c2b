"""Causal self-attention and rotary positions, shared by the looped models.

Shapes: B rows of one length, H heads, M tokens, P tokens of all rows, K head width.
"""

import math
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

_SHORT = 64
"""Up to this length plain matrix products beat the fused kernel on a CPU, whose per-call work dominates there."""


def rotary_angles(head_width: int, positions: Tensor, longest: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin [P, 1, K] of the positions [P] (below `longest`) in the rotate-half convention, in float32."""
    device = positions.device
    frequencies = theta ** -(torch.arange(0, head_width, 2, device=device, dtype=torch.float32) / head_width)
    angles = torch.arange(longest, device=device, dtype=torch.float32)[:, None] * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos()[positions, None], angles.sin()[positions, None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [P, H, K] turned by its positions."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """[B, H, M, K]; every token attends to itself and to what stands before it."""
    length = query.shape[-2]
    if query.device.type != "cpu" or length > _SHORT:
        grouped = key.shape[1] != query.shape[1]
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
    if key.shape[1] != query.shape[1]:
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = (query * (1.0 / math.sqrt(query.shape[-1]))) @ key.transpose(-1, -2)
    return scores.masked_fill(_future(length), float("-inf")).softmax(dim=-1) @ value


@lru_cache(maxsize=_SHORT)
def _future(length: int) -> Tensor:
    """[M, M] what a token must not look at."""
    with torch.inference_mode(False):  # a tensor born in inference mode could not be used in training
        return torch.ones(length, length, dtype=torch.bool).triu(1)
