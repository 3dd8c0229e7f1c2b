"""Huginn, the recurrent-depth language model, in native PyTorch and in the parameter names of its checkpoints.

A prelude embeds the tokens once: e. Every loop mixes the state with e and runs the core: s = core(adapter([s, e])). The
state is read through a coda: its own layers, with attention, between the final norm applied twice. The pooled state
is s itself, which the model's own exit criteria read. `head_input` costs the coda: a readout of logits pays it at every
loop, a readout of the state's change does not. There is no gate.

Shapes: B rows, S states, D width, V vocabulary.
"""

import math
from dataclasses import replace
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loopscope.config import Epsilon, Layers, Loops, Positions, RotaryBase, Vocabulary, Width, digest, require_values
from loopscope.models.attention import Rotary, cached_attention
from loopscope.models.decoder_layers import Linear, NetworkConfig, run_layers
from loopscope.models.device import upload
from loopscope.models.looped_model import InjectedState, LoopedModel, LoopState
from loopscope.models.packing import Layout


class HuginnConfig(NetworkConfig, frozen=True, kw_only=True):
    """Hold the `config.json` keys of Huginn."""

    beside_network = ("mean_recurrence", "num_key_value_heads", "head_dim")

    vocab_size: Vocabulary
    n_embd: Width
    n_heads: Width
    intermediate_size: Width
    block_size: Positions
    n_layers_in_prelude: Layers
    n_layers_in_recurrent_block: Layers
    n_layers_in_coda: Layers
    mean_recurrence: Loops
    rope_base: RotaryBase
    norm_eps: Epsilon
    tie_embeddings: Literal[True]
    qk_bias: Literal[True]
    bias: Literal[False] | None = None
    num_key_value_heads: Width | None = None
    head_dim: Width | None = None
    injection_type: Literal["linear"] = "linear"
    block_class_name: Literal["SandwichBlock"] = "SandwichBlock"
    norm_class_name: Literal["RMSNorm_llama"] = "RMSNorm_llama"
    mlp_class_name: Literal["GatedMLP"] = "GatedMLP"
    test_time_noise: float = 0

    def __post_init__(self) -> None:
        width, heads, head_width = self.n_embd, self.n_heads, self.head_width
        even = width % heads == 0 and head_width % 2 == 0
        require_values(
            (not self.test_time_noise, "test_time_noise is not supported"),
            (even, f"n_embd {width} does not divide into {heads} heads of an even width"),
            (self.num_key_value_heads in (None, heads), "num_key_value_heads other than n_heads is not supported"),
            (self.head_dim in (None, head_width), f"head_dim must be n_embd / n_heads = {head_width}"),
        )

    @property
    def head_width(self) -> int:
        return self.n_embd // self.n_heads


class Huginn(LoopedModel):
    """Huginn as a looped model: prelude, recurrent core and coda."""

    kv_cache = branches = True
    head_attends = True
    unneeded = ("lm_head.weight", "freqs_cis")  # the embedding again, and the angles of the rotary positions

    def __init__(self, config: HuginnConfig) -> None:
        super().__init__()
        self.config = config
        self.num_loops = config.mean_recurrence
        self.block_size = config.block_size
        self.vocab_size = config.vocab_size
        core = config.n_layers_in_recurrent_block
        self.embed_cost, self.head_cost = config.n_layers_in_prelude / core, config.n_layers_in_coda / core
        self.initial_state: Literal["zeros", "random"] = "zeros"
        """The state before loop 1; "random" as in training, but from `seed`, the same for all rows at a position."""
        self.seed = 0
        self.transformer = HuginnBackbone(config)

    @property
    def configuration_sha256(self) -> str:
        if self.initial_state == "zeros":
            return self.config.sha256
        return digest([self.config.sha256, self.initial_state, self.seed])[:16]

    @property
    def block(self) -> nn.Module:
        """The core that every loop applies."""
        return nn.ModuleList([self.transformer.adapter, self.transformer.core_block])

    @property
    def gate(self) -> None:
        """None: Huginn has no gate."""

    def embed(self, tokens: Tensor, layout: Layout) -> LoopState:
        embedded = self.transformer.wte(tokens) * math.sqrt(self.config.n_embd)
        embedded = run_layers(self.transformer.prelude, embedded, layout)
        start = torch.zeros_like(embedded)
        if self.initial_state == "random":
            noise = _initial_noise(self.seed, layout.max_context, self.config.n_embd)
            start = upload(noise, embedded.device).to(embedded)[layout.positions]
        return InjectedState(start, layout, torch.zeros_like(layout.lengths), embedded)

    def step(self, state: LoopState) -> LoopState:
        assert isinstance(state, InjectedState)
        mixed = self.transformer.adapter(torch.cat((state.hidden, state.embedded), dim=1))
        hidden = run_layers(self.transformer.core_block, mixed, state.layout)
        return replace(state, hidden=hidden, loop=state.loop + 1)

    def head_input(self, state: LoopState, positions: Tensor | None = None) -> Tensor:
        """The output of the coda on the state; the coda attends, so it runs on whole rows."""
        layout = state.layout
        hidden = run_layers(self.transformer.coda, self.transformer.ln_f(state.hidden), layout)
        if positions is not None:
            hidden = hidden.index_select(0, layout.states_at(positions))
        return self.transformer.ln_f(hidden)

    def predict(self, head_input: Tensor) -> Tensor:
        return F.linear(head_input, self.transformer.wte.weight)


@lru_cache(maxsize=8)
def _initial_noise(seed: int, length: int, width: int) -> Tensor:
    """[M, D] truncated normal numbers with standard deviation sqrt(2/5); longer rows have the same beginning."""
    bits = np.random.Philox(key=seed).random_raw(length * width).reshape(length, width)
    share = ((bits >> np.uint64(11)).astype(np.float64) * 2.0**-53 * 2 - 1) * math.erf(3 / math.sqrt(2))
    with torch.inference_mode(False):  # cached, also for later training
        return torch.erfinv(torch.from_numpy(share)).mul_(math.sqrt(2) * math.sqrt(2 / 5)).float()


class HuginnBackbone(nn.Module):
    """Hold embedding, prelude, core, coda and norms of Huginn, under its checkpoint's names."""

    def __init__(self, config: HuginnConfig) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.prelude = _huginn_blocks(config, "prelude", config.n_layers_in_prelude)
        self.adapter = Linear(2 * config.n_embd, config.n_embd, bias=False)
        self.core_block = _huginn_blocks(config, "core", config.n_layers_in_recurrent_block)
        self.coda = _huginn_blocks(config, "coda", config.n_layers_in_coda)
        self.ln_f = nn.RMSNorm(config.n_embd, config.norm_eps)


def _huginn_blocks(config: HuginnConfig, name: str, count: int) -> nn.ModuleList:
    """The layers of Huginn's prelude, core or coda."""
    return nn.ModuleList(HuginnBlock(config, f"{name}.{number}") for number in range(count))


class HuginnBlock(nn.Module):
    """A layer of Huginn with norms around the sums: x = norm(attention(norm(x)) + x), the MLP likewise."""

    def __init__(self, config: HuginnConfig, layer: str) -> None:
        super().__init__()
        self.norm_1, self.norm_2, self.norm_3, self.norm_4 = (
            nn.RMSNorm(config.n_embd, config.norm_eps) for _ in range(4)
        )
        self.attn = HuginnAttention(config, layer)
        self.mlp = HuginnMLP(config)

    def forward(self, hidden: Tensor, layout: Layout) -> Tensor:
        hidden = self.norm_2(self.attn(self.norm_1(hidden), layout) + hidden)
        return self.norm_4(self.mlp(self.norm_3(hidden)) + hidden)


class HuginnAttention(nn.Module):
    """Causal attention of Huginn, with biases of queries and keys."""

    def __init__(self, config: HuginnConfig, layer: str) -> None:
        super().__init__()
        self.layer_name = layer  # the name of its keys and values in the cache
        self.heads, self.head_width = config.n_heads, config.head_width
        self.rotary = Rotary(config.head_width, config.rope_base, interleaved=True)
        self.Wqkv = Linear(config.n_embd, 3 * config.n_embd, bias=False)
        self.qk_bias = nn.Parameter(torch.zeros(2, 1, config.n_heads, config.head_width))
        self.proj = Linear(config.n_embd, config.n_embd, bias=False)

    def forward(self, hidden: Tensor, layout: Layout) -> Tensor:
        projected = self.Wqkv(hidden).view(-1, 3 * self.heads, self.head_width)
        projected = projected + F.pad(self.qk_bias.view(2 * self.heads, -1), (0, 0, 0, self.heads))
        return self.proj(cached_attention(projected, (self.heads,) * 3, layout, self.rotary, self.layer_name))


class HuginnMLP(nn.Module):
    """The gated MLP of Huginn."""

    def __init__(self, config: HuginnConfig) -> None:
        super().__init__()
        self.fc = Linear(config.n_embd, 2 * config.intermediate_size, bias=False)
        self.proj = Linear(config.intermediate_size, config.n_embd, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        gate, up = self.fc(hidden).chunk(2, dim=-1)
        return self.proj(F.silu(gate) * up)
