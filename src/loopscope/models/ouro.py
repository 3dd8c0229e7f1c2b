"""Ouro, the looped language model, in native PyTorch and in the parameter names of its checkpoints.

Sandwich-norm layers with rotary attention and SwiGLU; after every loop the final norm is applied, and that normed
state feeds the gate, the LM head and the next loop. So the pooled state r_t is the normed state itself.

Shapes: B rows, P tokens of all rows, D width, V vocabulary.
"""

from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loopscope.config import Epsilon, Layers, Loops, Positions, RotaryBase, Vocabulary, Width, read_json
from loopscope.errors import UserError
from loopscope.models.attention import Rotary
from loopscope.models.cached_attention import cached_attention
from loopscope.models.contract import LoopedModel, LoopState, initial_loop_state
from loopscope.models.layout import Layout


class RopeParameters(msgspec.Struct, frozen=True):
    """Rotary positions as newer configurations write them; only the plain ones are supported."""

    rope_theta: RotaryBase | None = None
    rope_type: Literal["default"] | None = None
    type: Literal["default"] | None = None


class OuroConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of `config.json` that the network depends on; others are ignored, unsupported values refused."""

    vocab_size: Vocabulary
    hidden_size: Width
    intermediate_size: Width
    num_hidden_layers: Layers
    num_attention_heads: Width
    num_key_value_heads: Width
    max_position_embeddings: Positions
    rope_theta: RotaryBase | None = None  # here, or in rope_parameters
    rms_norm_eps: Epsilon
    total_ut_steps: Loops
    tie_word_embeddings: bool
    hidden_act: Literal["silu"]
    head_dim: Width | None = None
    attention_bias: Literal[False] | None = None
    mlp_bias: Literal[False] | None = None
    use_sliding_window: Literal[False] | None = None
    layer_types: list[Literal["full_attention"]] | None = None
    rope_scaling: RopeParameters | None = None
    rope_parameters: RopeParameters | None = None

    def __post_init__(self) -> None:
        if len(self._bases) != 1:
            what = "is missing" if not self._bases else "is given twice, and differs"
            raise ValueError(f"rope_theta {what}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError("num_attention_heads must be a multiple of num_key_value_heads")
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} does not divide into {self.num_attention_heads} heads, and there is "
                "no head_dim"
            )
        if self.head_width % 2:
            raise ValueError(f"heads must have an even width for rotary positions, got {self.head_width}")

    @property
    def theta(self) -> float:
        (theta,) = self._bases
        return theta

    @property
    def _bases(self) -> set[float]:
        """What the configuration says of rotary positions, in either place."""
        given = (self.rope_theta, None if self.rope_parameters is None else self.rope_parameters.rope_theta)
        return {base for base in given if base is not None}

    @property
    def head_width(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads


class _Run(msgspec.Struct, frozen=True):
    model: dict[str, Any] = {}


class _Trained(msgspec.Struct, frozen=True):
    run: _Run | None = None  # of one that was trained here


def read_ouro_config(folder: Path) -> OuroConfig:
    file = folder / "config.json"
    config = read_json(OuroConfig, file, "Ouro configuration")
    run = read_json(_Trained, file, "Ouro configuration").run
    for name, value in (run.model if run else {}).items():
        if value is not None and value != getattr(config, name, value):
            raise UserError(
                f"{file} contradicts itself: {name} is {getattr(config, name)}, and {value} in the settings of the run "
                "that trained it; put the file back as training wrote it."
            )
    return config


class Ouro(LoopedModel):
    kv_cache = branches = True

    def __init__(self, config: OuroConfig) -> None:
        super().__init__()
        self.config = config
        self.num_loops = config.total_ut_steps
        self.block_size = config.max_position_embeddings
        self.vocab_size = config.vocab_size
        self.model = OuroModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
            self.tied = {"lm_head.weight": "model.embed_tokens.weight"}

    @property
    def block(self) -> nn.Module:
        """What every loop applies; only its matrices are large."""
        return self.model.layers

    @property
    def gate(self) -> nn.Linear:
        """What `halt` applies."""
        return self.model.early_exit_gate

    def embed(self, tokens: Tensor, layout: Layout) -> LoopState:
        return initial_loop_state(self.model.embed_tokens(tokens), layout)

    def step(self, state: LoopState) -> LoopState:
        hidden = state.hidden
        for layer in self.model.layers:
            hidden = layer(hidden, state.layout)
        return LoopState(self.model.norm(hidden), state.layout, state.loop + 1)

    def predict(self, head_input: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(head_input)
        return logits

    def halt(self, pooled: Tensor) -> Tensor:
        """In float32 whatever the model's precision: in bf16 the exit CDF would round to 1 too early."""
        gate = self.gate
        with torch.autocast(pooled.device.type, enabled=False):
            return F.linear(pooled.float(), gate.weight.float(), gate.bias.float()).squeeze(-1)


class OuroModel(nn.Module):
    def __init__(self, config: OuroConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(OuroLayer(config, str(number)) for number in range(config.num_hidden_layers))
        self.norm = OuroRMSNorm(config)
        self.early_exit_gate = nn.Linear(config.hidden_size, 1)


class OuroLayer(nn.Module):
    def __init__(self, config: OuroConfig, layer: str) -> None:
        super().__init__()
        self.self_attn = OuroAttention(config, layer)
        self.mlp = OuroMLP(config)
        self.input_layernorm = OuroRMSNorm(config)
        self.input_layernorm_2 = OuroRMSNorm(config)
        self.post_attention_layernorm = OuroRMSNorm(config)
        self.post_attention_layernorm_2 = OuroRMSNorm(config)

    def forward(self, hidden: Tensor, layout: Layout) -> Tensor:
        hidden = hidden + self.input_layernorm_2(self.self_attn(self.input_layernorm(hidden), layout))
        out: Tensor = hidden + self.post_attention_layernorm_2(self.mlp(self.post_attention_layernorm(hidden)))
        return out


class OuroAttention(nn.Module):
    def __init__(self, config: OuroConfig, layer: str) -> None:
        super().__init__()
        self.layer_name = layer  # under which the cache keeps its keys and values
        self.head_width = config.head_width
        self.rotary = Rotary(config.head_width, config.theta)
        self.heads = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
        inner, shared = (heads * self.head_width for heads in self.heads[:2])
        self.q_proj = nn.Linear(config.hidden_size, inner, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, shared, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, shared, bias=False)
        self.o_proj = nn.Linear(inner, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor, layout: Layout) -> Tensor:
        projections = (self.q_proj, self.k_proj, self.v_proj)
        projected = torch.cat([projection(hidden) for projection in projections], dim=1)
        projected = projected.view(-1, sum(self.heads), self.head_width)
        out: Tensor = self.o_proj(cached_attention(projected, self.heads, layout, self.rotary, self.layer_name))
        return out


class OuroMLP(nn.Module):
    def __init__(self, config: OuroConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return out


class OuroRMSNorm(nn.Module):
    """Computed in float32, whatever the model's precision."""

    def __init__(self, config: OuroConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.hidden_size))
        self.eps = config.rms_norm_eps

    def forward(self, hidden: Tensor) -> Tensor:
        single = hidden.float()
        normed = single * torch.rsqrt(single.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(hidden.dtype)
