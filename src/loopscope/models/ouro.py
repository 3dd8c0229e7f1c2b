"""Ouro, the looped language model, in native PyTorch and in the parameter names of its checkpoints.

Sandwich-norm layers with rotary attention and SwiGLU; after every loop the final norm is applied, and that normed
state feeds the gate, the LM head and the next loop. So the pooled state r_t is the normed state itself.

Shapes: B rows, P tokens of all rows, D width, V vocabulary.
"""

from pathlib import Path
from typing import Any, Literal

import msgspec
from torch import Tensor, nn

from loopscope.config import Loops, Width, read_json
from loopscope.errors import UserError
from loopscope.models.contract import LoopedModel, LoopState, initial_loop_state
from loopscope.models.decoder_layers import Attention, DecoderConfig, RMSNorm, SwiGLU
from loopscope.models.gates import linear_halt
from loopscope.models.layout import Layout
from loopscope.models.linear import Linear

EARLY_EXIT = (
    "early_exit_threshold has no effect here and must be 1; exits are a policy's: the readout `gate` with that "
    "threshold"
)


class OuroConfig(DecoderConfig, frozen=True, kw_only=True):
    """The keys of `config.json` that the network depends on; others are ignored, unsupported values refused."""

    num_key_value_heads: Width
    total_ut_steps: Loops
    tie_word_embeddings: bool
    attention_bias: Literal[False] | None = None
    mlp_bias: Literal[False] | None = None
    early_exit_threshold: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.early_exit_threshold not in (None, 1):
            raise ValueError(EARLY_EXIT)

    @property
    def network(self) -> dict[str, Any]:
        beside = ("total_ut_steps", "early_exit_threshold")
        return {name: value for name, value in super().network.items() if name not in beside}


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
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
            self.tied = {"lm_head.weight": "model.embed_tokens.weight"}

    @property
    def configuration_sha256(self) -> str:
        return self.config.sha256

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
        return linear_halt(self.gate, pooled)


class OuroModel(nn.Module):
    def __init__(self, config: OuroConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(OuroLayer(config, str(number)) for number in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.early_exit_gate = nn.Linear(config.hidden_size, 1)


class OuroLayer(nn.Module):
    def __init__(self, config: OuroConfig, layer: str) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Attention(config, layer)
        self.mlp = SwiGLU(config)
        self.input_layernorm = RMSNorm(width, eps)
        self.input_layernorm_2 = RMSNorm(width, eps)
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.post_attention_layernorm_2 = RMSNorm(width, eps)

    def forward(self, hidden: Tensor, layout: Layout) -> Tensor:
        hidden = hidden + self.input_layernorm_2(self.self_attn(self.input_layernorm(hidden), layout))
        out: Tensor = hidden + self.post_attention_layernorm_2(self.mlp(self.post_attention_layernorm(hidden)))
        return out
