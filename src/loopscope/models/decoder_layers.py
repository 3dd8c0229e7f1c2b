"""What do decoders of the Llama family have in common? RMSNorm, SwiGLU, rotary attention with grouped heads, and the
keys of `config.json` that say how large they are; all in the parameter names of the Hub.

Shapes: S states, D width.
"""

from typing import Any, Literal

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loopscope.config import Epsilon, Layers, Positions, Positive, RotaryBase, Vocabulary, Width, digest, plain
from loopscope.models.attention import Llama3Scaling, Rotary
from loopscope.models.cached_attention import cached_attention
from loopscope.models.layout import Layout
from loopscope.models.linear import Linear

RopeType = Literal["default", "llama3"]


class RopeParameters(msgspec.Struct, frozen=True):
    """Rotary positions as newer configurations write them: the plain ones, or those of Llama 3."""

    rope_theta: RotaryBase | None = None
    rope_type: RopeType | None = None
    type: RopeType | None = None
    partial_rotary_factor: Positive | None = None
    factor: Positive | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    original_max_position_embeddings: Positions | None = None

    def __post_init__(self) -> None:
        if self.partial_rotary_factor not in (None, 1):
            raise ValueError("partial_rotary_factor other than 1 is not supported")
        if "llama3" in (self.rope_type, self.type):
            for name in ("factor", *_BOUNDS):
                if getattr(self, name) is None:
                    raise ValueError(f"{name} is missing")
            low, high, _ = (getattr(self, name) for name in _BOUNDS)
            if low >= high:
                raise ValueError("low_freq_factor must be below high_freq_factor")

    @property
    def scaling(self) -> Llama3Scaling | None:
        if "llama3" not in (self.rope_type, self.type):
            return None
        return Llama3Scaling(*(getattr(self, name) for name in ("factor", *_BOUNDS)))


_BOUNDS = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


class DecoderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of `config.json` that the networks depend on; others are ignored, unsupported values refused."""

    vocab_size: Vocabulary
    hidden_size: Width
    intermediate_size: Width
    num_hidden_layers: Layers
    num_attention_heads: Width
    num_key_value_heads: Width | None = None  # as many as attention heads
    max_position_embeddings: Positions
    rope_theta: RotaryBase | None = None  # here, or in rope_parameters
    rms_norm_eps: Epsilon
    tie_word_embeddings: bool = False
    hidden_act: Literal["silu"]
    head_dim: Width | None = None
    use_sliding_window: Literal[False] | None = None
    layer_types: list[Literal["full_attention"]] | None = None
    rope_scaling: RopeParameters | None = None
    rope_parameters: RopeParameters | None = None

    def __post_init__(self) -> None:
        if len(self._bases) != 1:
            what = "is missing" if not self._bases else "is given twice, and differs"
            raise ValueError(f"rope_theta {what}")
        if len(self._scalings) > 1:
            raise ValueError("rope_scaling is given twice, and differs")
        if self.num_attention_heads % self.key_value_heads:
            raise ValueError("num_attention_heads must be a multiple of num_key_value_heads")
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} does not divide into {self.num_attention_heads} heads, and there is "
                "no head_dim"
            )
        if self.head_width % 2:
            raise ValueError(f"heads must have an even width for rotary positions, got {self.head_width}")

    @property
    def rotary(self) -> Rotary:
        (theta,) = self._bases
        return Rotary(self.head_width, theta, scaling=next(iter(self._scalings), None))

    @property
    def _bases(self) -> set[float]:
        """What the configuration says of rotary positions, in either place."""
        given = (self.rope_theta, None if self.rope_parameters is None else self.rope_parameters.rope_theta)
        return {base for base in given if base is not None}

    @property
    def _scalings(self) -> set[Llama3Scaling]:
        given = (each.scaling for each in (self.rope_scaling, self.rope_parameters) if each is not None)
        return {scaling for scaling in given if scaling is not None}

    @property
    def head_width(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def key_value_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def network(self) -> dict[str, Any]:
        """What these keys say of the network, in whichever way they say it; how many loops it runs is not in it."""
        given = {name: value for name, value in plain(self).items() if name not in _RESOLVED and value}
        rotary = self.rotary
        scaling = None if rotary.scaling is None else list(rotary.scaling)
        return given | {
            "head_width": self.head_width,
            "key_value_heads": self.key_value_heads,
            "rotary": [rotary.theta, scaling],
        }

    @property
    def sha256(self) -> str:
        """What tells this network from another with the same weights."""
        return digest([type(self).__name__, self.network])[:16]


_RESOLVED = ("head_dim", "num_key_value_heads", "rope_theta", "rope_scaling", "rope_parameters", "layer_types")
"""What can be written in two ways, or left out; the network has what it comes to."""


class Attention(nn.Module):
    """With biases and with norms of queries and keys where a model has them."""

    def __init__(
        self,
        config: DecoderConfig,
        layer: str,
        qkv_bias: bool = False,
        output_bias: bool = False,
        query_key_norm: bool = False,
    ) -> None:
        super().__init__()
        self.layer_name = layer  # under which the cache keeps its keys and values
        self.head_width, self.rotary = config.head_width, config.rotary
        self.heads = (config.num_attention_heads, config.key_value_heads, config.key_value_heads)
        inner, shared = (heads * self.head_width for heads in self.heads[:2])
        self.q_proj = Linear(config.hidden_size, inner, bias=qkv_bias)
        self.k_proj = Linear(config.hidden_size, shared, bias=qkv_bias)
        self.v_proj = Linear(config.hidden_size, shared, bias=qkv_bias)
        self.o_proj = Linear(inner, config.hidden_size, bias=output_bias)
        if query_key_norm:
            self.q_norm, self.k_norm = (RMSNorm(self.head_width, config.rms_norm_eps) for _ in range(2))
        self.query_key_norm = query_key_norm

    def forward(self, hidden: Tensor, layout: Layout) -> Tensor:
        projections = (self.q_proj, self.k_proj, self.v_proj)
        projected = torch.cat([projection(hidden) for projection in projections], dim=1)
        projected = projected.view(-1, sum(self.heads), self.head_width)
        if self.query_key_norm:
            query, key, value = torch.split(projected, list(self.heads), 1)
            projected = torch.cat((self.q_norm(query), self.k_norm(key), value), dim=1)
        out: Tensor = self.o_proj(cached_attention(projected, self.heads, layout, self.rotary, self.layer_name))
        return out


class SwiGLU(nn.Module):
    def __init__(self, config: DecoderConfig, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, bias=bias)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=bias)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=bias)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return out


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        weight = self.weight
        if hidden.dtype == weight.dtype == torch.float32:
            return F.rms_norm(hidden, weight.shape, weight, self.eps)
        return weight * rms_normalised(hidden, self.eps)


def rms_normalised(hidden: Tensor, eps: float) -> Tensor:
    """[..., D] of mean square 1; computed in float32, whatever the model's precision, and rounded to it."""
    return F.rms_norm(hidden.float(), hidden.shape[-1:], eps=eps).to(hidden.dtype)
