"""Which layers do language models share? RMSNorm, SwiGLU, grouped-query attention with rotary positions, head and gate,
and the keys of `config.json` with their sizes; in the names of the Hub.

Shapes: S states, D width, M tokens, K inputs, N outputs.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any, ClassVar, Literal

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loopscope.config import (
    Epsilon,
    Layers,
    Positions,
    Positive,
    RotaryBase,
    Vocabulary,
    Width,
    digest,
    plain,
    require_values,
)
from loopscope.errors import UserError
from loopscope.models.attention import Llama3Scaling, Rotary, cached_attention
from loopscope.models.linear import Linear
from loopscope.models.looped_model import LoopedModel
from loopscope.models.packing import Layout

RopeType = Literal["default", "llama3"]
LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


class NetworkConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the keys of `config.json` that a network depends on; other keys are ignored, unsupported values rejected."""

    beside_network: ClassVar[tuple[str, ...]] = ()
    """Keys that follow from other keys, that have two spellings, or that give the number of loops."""

    @property
    def network(self) -> dict[str, Any]:
        """The keys that the network depends on, in one spelling."""
        return {name: value for name, value in plain(self).items() if name not in self.beside_network and value}

    @property
    def sha256(self) -> str:
        """The hash that distinguishes networks with the same weights."""
        return digest([type(self).__name__, self.network])[:16]


class RopeParameters(msgspec.Struct, frozen=True):
    """Read rotary positions as newer configurations write them: plain, or scaled as in Llama 3."""

    rope_theta: RotaryBase | None = None
    rope_type: RopeType | None = None
    type: RopeType | None = None
    partial_rotary_factor: Positive | None = None
    factor: Positive | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    original_max_position_embeddings: Positions | None = None

    def __post_init__(self) -> None:
        require_values((self.partial_rotary_factor in (None, 1), "partial_rotary_factor other than 1 is not supported"))
        scaling = self.scaling
        for name, value in zip(LLAMA3_KEYS, scaling or (), strict=False):
            require_values((value, f"{name} is missing"))
        require_values(
            (scaling is None or scaling.low < scaling.high, "low_freq_factor must be below high_freq_factor")
        )

    @property
    def scaling(self) -> Llama3Scaling | None:
        if "llama3" not in (self.rope_type, self.type):
            return None
        return Llama3Scaling(*(getattr(self, name) for name in LLAMA3_KEYS))


class DecoderConfig(NetworkConfig, frozen=True, kw_only=True):
    """Read the `config.json` keys of decoders of the Llama family."""

    beside_network: ClassVar[tuple[str, ...]] = (
        *("head_dim", "num_key_value_heads", "layer_types"),
        *("rope_theta", "rope_scaling", "rope_parameters"),
    )

    vocab_size: Vocabulary
    hidden_size: Width
    intermediate_size: Width
    num_hidden_layers: Layers
    num_attention_heads: Width
    num_key_value_heads: Width | None = None  # default: as many as attention heads
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
        heads, divides = self.num_attention_heads, self.hidden_size % self.num_attention_heads == 0
        require_values(
            (self._ropes("rope_theta"), "rope_theta is missing"),
            (len(self._ropes("rope_theta")) < 2, "rope_theta is given twice, and differs"),
            (len(self._ropes("scaling")) < 2, "rope_scaling is given twice, and differs"),
            (heads % self.key_value_heads == 0, "num_attention_heads must be a multiple of num_key_value_heads"),
            (
                divides or self.head_dim,
                f"hidden_size {self.hidden_size} does not divide into {heads} heads, and there is no head_dim",
            ),
            (self.head_width % 2 == 0, f"heads must have an even width for rotary positions, got {self.head_width}"),
        )

    @property
    def rotary(self) -> Rotary:
        (theta,) = self._ropes("rope_theta")
        return Rotary(self.head_width, theta, scaling=next(iter(self._ropes("scaling")), None))

    def _ropes(self, key: Literal["rope_theta", "scaling"]) -> set[Any]:
        """All values of this key that the configuration gives for rotary positions."""
        ropes = (RopeParameters(rope_theta=self.rope_theta), self.rope_scaling, self.rope_parameters)
        return {getattr(rope, key) for rope in ropes if rope is not None} - {None}

    @property
    def head_width(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def key_value_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def network(self) -> dict[str, Any]:
        rotary = self.rotary
        return super().network | {
            "head_width": self.head_width,
            "key_value_heads": self.key_value_heads,
            "rotary": [rotary.theta, None if rotary.scaling is None else list(rotary.scaling)],
        }


class LoopedDecoder(LoopedModel):
    """Be the base of Ouro and looped Llamas; `model` is the network without the head."""

    kv_cache = branches = True

    def __init__(self, config: DecoderConfig, loops: int, model: "DecoderBackbone") -> None:
        super().__init__()
        self.config = config
        self.num_loops = loops
        self.block_size = config.max_position_embeddings
        self.vocab_size = config.vocab_size
        self.model = model
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = model.embed_tokens.weight
            self.tied = {"lm_head.weight": "model.embed_tokens.weight"}

    @property
    def configuration_sha256(self) -> str:
        return self.config.sha256

    @property
    def gate(self) -> nn.Linear | None:
        """The gate that `halt` applies; None without a gate."""
        return self.model.early_exit_gate

    def predict(self, head_input: Tensor) -> Tensor:
        return self.lm_head(head_input)

    def halt(self, pooled: Tensor) -> Tensor | None:
        return None if self.gate is None else linear_halt(self.gate, pooled)


class DecoderBackbone(nn.Module):
    """Hold embedding, layers, final norm and gate of a decoder, under the Hub's names."""

    def __init__(self, config: DecoderConfig, gate: bool, injection: bool = False, **options: bool) -> None:
        """`options` are the options of every layer."""
        super().__init__()
        width = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, width)
        numbers = range(config.num_hidden_layers)
        self.layers = nn.ModuleList(DecoderLayer(config, str(number), **options) for number in numbers)
        self.norm = RMSNorm(width, config.rms_norm_eps)
        self.injection = Linear(width, width, bias=False) if injection else None
        self.early_exit_gate = nn.Linear(width, 1) if gate else None


def run_layers(layers: Iterable[nn.Module], hidden: Tensor, layout: Layout) -> Tensor:
    """Run hidden states [S, D] through layers."""
    for layer in layers:
        hidden = layer(hidden, layout)
    return hidden


def linear_halt(gate: nn.Linear, pooled: Tensor) -> Tensor:
    """Halt logits [...] of a language model's gate, in float32: in bf16 the exit CDF would round to 1 too early.

    A gate with an adapter around it, or with weights of another kind (quantised weights), computes in its own
    precision.
    """
    if not isinstance(gate.weight, Tensor):
        raise UserError(
            "The gate was replaced by a module without plain weights, and no other layer was: torch.ao.quantization "
            "knows nn.Linear alone, not what is derived from it. For int8 weights take torchao "
            "(from_pretrained(..., quantization_config=TorchAoConfig(Int8WeightOnlyConfig())))."
        )
    if hasattr(gate, "base_layer") or type(gate.weight) is not nn.Parameter:
        own: Tensor = gate(pooled.to(gate.weight.dtype))
        return own.float().squeeze(-1)
    with torch.autocast(pooled.device.type, enabled=False):
        return F.linear(pooled.float(), gate.weight.float(), gate.bias.float()).squeeze(-1)


class DecoderLayer(nn.Module):
    """A decoder layer: attention and MLP with pre-norms, with the biases and query and key norms of its model.

    With `sandwich`, the outputs of attention and MLP are normalised, too.
    """

    def __init__(
        self,
        config: DecoderConfig,
        layer: str,
        qkv_bias: bool = False,
        output_bias: bool = False,
        mlp_bias: bool = False,
        qk_norm: bool = False,
        sandwich: bool = False,
    ) -> None:
        super().__init__()
        norm = partial(RMSNorm, config.hidden_size, config.rms_norm_eps)
        norm_after = norm if sandwich else nn.Identity
        self.self_attn = Attention(config, layer, qkv_bias, output_bias, qk_norm)
        self.mlp = SwiGLU(config, mlp_bias)
        self.input_layernorm = norm()
        self.input_layernorm_2 = norm_after()
        self.post_attention_layernorm = norm()
        self.post_attention_layernorm_2 = norm_after()

    def forward(self, hidden: Tensor, layout: Layout) -> Tensor:
        hidden = hidden + self.input_layernorm_2(self.self_attn(self.input_layernorm(hidden), layout))
        return hidden + self.post_attention_layernorm_2(self.mlp(self.post_attention_layernorm(hidden)))


class Attention(nn.Module):
    """Causal attention with grouped heads and rotary positions."""

    def __init__(self, config: DecoderConfig, layer: str, qkv_bias: bool, output_bias: bool, qk_norm: bool) -> None:
        super().__init__()
        self.layer_name = layer  # the name of its keys and values in the cache
        self.head_width, self.rotary = config.head_width, config.rotary
        self.heads = (config.num_attention_heads, config.key_value_heads, config.key_value_heads)
        inner, shared = (heads * self.head_width for heads in self.heads[:2])
        self.q_proj = Linear(config.hidden_size, inner, bias=qkv_bias)
        self.k_proj = Linear(config.hidden_size, shared, bias=qkv_bias)
        self.v_proj = Linear(config.hidden_size, shared, bias=qkv_bias)
        self.o_proj = Linear(inner, config.hidden_size, bias=output_bias)
        self.query_key_norm = qk_norm
        if qk_norm:
            self.q_norm, self.k_norm = (RMSNorm(self.head_width, config.rms_norm_eps) for _ in range(2))

    def forward(self, hidden: Tensor, layout: Layout) -> Tensor:
        projections = (self.q_proj, self.k_proj, self.v_proj)
        projected = torch.cat([projection(hidden) for projection in projections], dim=1)
        projected = projected.view(-1, sum(self.heads), self.head_width)
        if self.query_key_norm:
            query, key, value = torch.split(projected, list(self.heads), 1)
            projected = torch.cat((self.q_norm(query), self.k_norm(key), value), dim=1)
        return self.o_proj(cached_attention(projected, self.heads, layout, self.rotary, self.layer_name))


class SwiGLU(nn.Module):
    """The gated MLP of the Llama family."""

    def __init__(self, config: DecoderConfig, bias: bool) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, bias=bias)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=bias)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class RMSNorm(nn.Module):
    """Normalise states to mean square 1, and scale them."""

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
    """[..., D] normalised to mean square 1; computed in float32, then rounded to the model's precision."""
    return F.rms_norm(hidden.float(), hidden.shape[-1:], eps=eps).to(hidden.dtype)
