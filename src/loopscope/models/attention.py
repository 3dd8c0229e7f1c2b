"""Causal self-attention and rotary positions, shared by the looped models.

Rows are right-padded, so under the causal mask no token ever attends to padding and no other mask is needed.
Shapes: B rows, H heads, M tokens, K head width.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

_SHORT = 64
"""Up to this length plain matrix products beat the fused kernel on a CPU, whose per-call work dominates there."""


def rotary_angles(head_width: int, length: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin [M, K] of the positions 0..M-1 in the rotate-half convention, in float32."""
    frequencies = theta ** -(torch.arange(0, head_width, 2, device=device, dtype=torch.float32) / head_width)
    angles = torch.arange(length, device=device, dtype=torch.float32)[:, None] * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, H, M, K] turned by its positions."""
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
    future = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
    return scores.masked_fill(future, float("-inf")).softmax(dim=-1) @ value
