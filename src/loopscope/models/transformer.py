"""The paper's looped Transformer: a few pre-norm layers, applied in every loop, with one head for every loop.

h_t = block(h_{t-1}), without a norm between loops. The pooled state is r_t = LayerNorm(h_t) at the position that is
read, with the same final norm for all loops; the tied head and the gate both read r_t. Attention is causal.

Three options of the architecture change how the same weights compute, so that models differ only in these options:

- injection: h_t = block(h_{t-1} + e) with the embedding e, from h_0 = 0; loop 1 is as in a model without injection;
- norm = "post": the norms stand after the residual sums, z = LN(h + attention(h)), h = LN(z + MLP(z));
- loop_norm: h_t = LN(block(h_{t-1})) by the final norm, so that r_t = h_t and the next loop starts from it, as in Ouro.

Shapes: B rows, S states, D width, V vocabulary.
"""

import math
from dataclasses import replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from loopscope.models.attention import Rotary, cached_attention, packed_attention_at
from loopscope.models.decoder_layers import run_layers
from loopscope.models.looped_model import InjectedState, LoopedModel, LoopState, initial_loop_state
from loopscope.models.model_settings import GateKind, TransformerSettings
from loopscope.models.packing import Layout

ROTARY_BASE = 10_000.0


class LoopedTransformer(LoopedModel):
    """The paper's looped Transformer as a looped model."""

    kv_cache = branches = True

    def __init__(self, settings: TransformerSettings, vocab_size: int, block_size: int) -> None:
        super().__init__()
        self.num_loops = settings.loops
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.settings, self.loop_norm = settings, bool(settings.loop_norm)
        self.embedding = nn.Embedding(vocab_size, settings.width)
        self.position = nn.Embedding(block_size, settings.width) if settings.positions == "learned" else None
        self.block = nn.ModuleList(TransformerLayer(settings, str(number)) for number in range(settings.layers))
        self.norm = nn.LayerNorm(settings.width, bias=settings.bias)
        self.gate = None if settings.gate == "none" else Gate(settings.gate, settings.width)
        self._initialise(settings.layers)

    @property
    def configuration_sha256(self) -> str | None:
        return self.settings.sha256

    def _initialise(self, layers: int) -> None:
        """Draw weights with std 1/sqrt(fan_in) at every width: GPT-2's 0.02 is far too small for a width of 64."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=module.embedding_dim**-0.5)
        for layer in self.block:
            assert isinstance(layer, TransformerLayer)
            for residual in (layer.attention_out, layer.mlp_out):
                residual.weight.data /= math.sqrt(2 * layers)

    def embed(self, tokens: Tensor, layout: Layout) -> LoopState:
        hidden = self.embedding(tokens)
        if self.position is not None:
            hidden = hidden + self.position(layout.positions)
        state = initial_loop_state(hidden, layout)
        return InjectedState(torch.zeros_like(hidden), layout, state.loop, hidden) if self.settings.injection else state

    def step(self, state: LoopState) -> LoopState:
        hidden = run_layers(self.block, _block_input(state), state.layout)
        return replace(state, hidden=self.norm(hidden) if self.loop_norm else hidden, loop=state.loop + 1)

    def last_pooled(self, state: LoopState, positions: Tensor) -> Tensor:
        """Compute the last layer's keys and values for all tokens, and everything else only at the positions."""
        *before, last = self.block
        assert isinstance(last, TransformerLayer)
        hidden = run_layers(before, _block_input(state), state.layout)
        return self.norm(last.at(positions, hidden, state.layout))

    def early_pooled(self, state: LoopState, positions: Tensor) -> tuple[Tensor, LoopState]:
        """Run the last layer's MLP, and the layers' final norm, only at the positions."""
        *before, last = self.block
        assert isinstance(last, TransformerLayer)
        attended = last.with_attention(run_layers(before, _block_input(state), state.layout), state.layout)
        pooled = self.norm(last.with_mlp(attended.index_select(0, state.layout.states_at(positions))))
        return pooled, replace(state, hidden=attended)

    def finish_step(self, begun: LoopState) -> LoopState:
        last = self.block[-1]
        assert isinstance(last, TransformerLayer)
        hidden = last.with_mlp(begun.hidden)
        return replace(begun, hidden=self.norm(hidden) if self.loop_norm else hidden, loop=begun.loop + 1)

    def pooled(self, state: LoopState, positions: Tensor | None = None) -> Tensor:
        hidden = state.at(positions)
        return hidden if self.loop_norm else self.norm(hidden)

    def predict(self, head_input: Tensor) -> Tensor:
        return F.linear(head_input, self.embedding.weight)

    def halt(self, pooled: Tensor) -> Tensor | None:
        return None if self.gate is None else self.gate(pooled)


def _block_input(state: LoopState) -> Tensor:
    """The input of the next loop's block."""
    return state.hidden + state.embedded if isinstance(state, InjectedState) else state.hidden


class TransformerLayer(nn.Module):
    """A layer with z = h + attention(LN(h)), h = z + MLP(LN(z)), or with the norms after the sums."""

    def __init__(self, settings: TransformerSettings, layer: str) -> None:
        super().__init__()
        self.layer_name = layer  # the name of its keys and values in the cache
        width, bias = settings.width, settings.bias
        self.norms_after = settings.norm == "post"
        self.heads, self.head_width = settings.heads, width // settings.heads
        self.rotary = Rotary(self.head_width, ROTARY_BASE) if settings.positions == "rotary" else None
        self.attention_norm = nn.LayerNorm(width, bias=bias)
        self.attention_in = nn.Linear(width, 3 * width, bias=bias)
        self.attention_out = nn.Linear(width, width, bias=bias)
        self.mlp_norm = nn.LayerNorm(width, bias=bias)
        self.mlp_in = nn.Linear(width, 4 * width, bias=bias)
        self.mlp_out = nn.Linear(4 * width, width, bias=bias)

    def forward(self, hidden: Tensor, layout: Layout) -> Tensor:
        return self.with_mlp(self.with_attention(hidden, layout))

    def with_attention(self, hidden: Tensor, layout: Layout) -> Tensor:
        """z, the first half of the layer."""
        projected = self.attention_in(self._attended(hidden)).view(-1, 3 * self.heads, self.head_width)
        attended = cached_attention(projected, (self.heads,) * 3, layout, self.rotary, self.layer_name)
        return self._summed(hidden, attended)

    def at(self, positions: Tensor, hidden: Tensor, layout: Layout) -> Tensor:
        """The output of `forward` at one position a row [B, D]: other states only give keys and values."""
        index = layout.states_at(positions)
        normed, width = self._attended(hidden), hidden.shape[1]
        weight, bias = self.attention_in.weight, self.attention_in.bias
        query_bias, other_bias = (None, None) if bias is None else (bias[:width], bias[width:])
        query = F.linear(normed.index_select(0, index), weight[:width], query_bias)
        others = F.linear(normed, weight[width:], other_bias).view(-1, 2 * self.heads, self.head_width)
        query = query.view(-1, self.heads, self.head_width)
        attended = packed_attention_at(query, others, positions, layout, self.rotary)
        return self.with_mlp(self._summed(hidden.index_select(0, index), attended))

    def with_mlp(self, hidden: Tensor) -> Tensor:
        """The second half of the layer, for each state independently."""
        if self.norms_after:
            return self.mlp_norm(hidden + self.mlp_out(F.gelu(self.mlp_in(hidden))))
        return hidden + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(hidden))))

    def _attended(self, hidden: Tensor) -> Tensor:
        """The input of attention."""
        return hidden if self.norms_after else self.attention_norm(hidden)

    def _summed(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """The sum of residual and attention output, after its norm if norms come after the sums."""
        hidden = hidden + self.attention_out(attended)
        return self.attention_norm(hidden) if self.norms_after else hidden


class Gate(nn.Module):
    """An exit gate: a linear projection, or a two-layer network as wide as the model, to one halt logit."""

    def __init__(self, kind: Literal["linear", "mlp"], width: int) -> None:
        super().__init__()
        self.net: nn.Module = nn.Linear(width, 1)
        if kind == "mlp":
            self.net = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1))

    @staticmethod
    def tensors(kind: GateKind, prefix: str = "") -> dict[str, str]:
        """The names of a gate's tensors by part: `weight` and `bias`, with `_1` for the hidden layer."""
        if kind == "mlp":
            parts = {"weight_1": "net.0.weight", "bias_1": "net.0.bias", "weight": "net.2.weight", "bias": "net.2.bias"}
        else:
            parts = {} if kind == "none" else {"weight": "net.weight", "bias": "net.bias"}
        return {part: prefix + name for part, name in parts.items()}

    def forward(self, pooled: Tensor) -> Tensor:
        """Compute in float32 at least: in bf16 the exit distribution would round to 1 too early."""
        wide = torch.promote_types(pooled.dtype, torch.float32)
        parameters = {name: value.to(wide) for name, value in self.net.named_parameters()}
        with torch.autocast(pooled.device.type, enabled=False):
            logit: Tensor = functional_call(self.net, parameters, pooled.to(wide)).squeeze(-1)
        return logit
