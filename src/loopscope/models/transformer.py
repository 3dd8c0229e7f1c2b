"""The paper's looped Transformer: a few pre-norm layers, applied again and again, one head for every loop.

h_t = block(h_{t-1}), without a norm between the loops. The pooled state is r_t = LayerNorm(h_t) at the position that
is read, the same final norm for all loops; the tied head and the gate both read r_t. Attention is causal.

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
from loopscope.models.checkpoint_folder import GateKind, TransformerSettings
from loopscope.models.decoder_layers import through
from loopscope.models.looped_model import LoopedModel, LoopState, initial_loop_state
from loopscope.models.packing import Layout

ROTARY_BASE = 10_000.0


class LoopedTransformer(LoopedModel):
    kv_cache = branches = True

    def __init__(self, settings: TransformerSettings, vocab_size: int, block_size: int) -> None:
        super().__init__()
        self.num_loops = settings.loops
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.embedding = nn.Embedding(vocab_size, settings.width)
        self.position = nn.Embedding(block_size, settings.width) if settings.positions == "learned" else None
        self.block = nn.ModuleList(TransformerLayer(settings, str(number)) for number in range(settings.layers))
        self.norm = nn.LayerNorm(settings.width, bias=settings.bias)
        self.gate = None if settings.gate == "none" else Gate(settings.gate, settings.width)
        self._initialise(settings.layers)

    def _initialise(self, layers: int) -> None:
        """std 1/sqrt(fan_in) at every width: GPT-2's fixed 0.02 is far too small for a width of 64."""
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
        return initial_loop_state(hidden, layout)

    def step(self, state: LoopState) -> LoopState:
        return LoopState(through(self.block, state.hidden, state.layout), state.layout, state.loop + 1)

    def last_pooled(self, state: LoopState, positions: Tensor) -> Tensor:
        """The last layer's keys and values come from all tokens, all else only from where it is read."""
        *before, last = self.block
        assert isinstance(last, TransformerLayer)
        hidden = through(before, state.hidden, state.layout)
        return self.norm(last.at(positions, hidden, state.layout))

    def early_pooled(self, state: LoopState, positions: Tensor) -> tuple[Tensor, LoopState]:
        """The MLP of the last layer, and what comes after it, run only where they are read."""
        *before, last = self.block
        assert isinstance(last, TransformerLayer)
        attended = last.attended(through(before, state.hidden, state.layout), state.layout)
        pooled = self.norm(last.with_mlp(attended.index_select(0, state.layout.states_at(positions))))
        return pooled, replace(state, hidden=attended)

    def finish_step(self, begun: LoopState) -> LoopState:
        last = self.block[-1]
        assert isinstance(last, TransformerLayer)
        return replace(begun, hidden=last.with_mlp(begun.hidden), loop=begun.loop + 1)

    def pooled(self, state: LoopState, positions: Tensor | None = None) -> Tensor:
        return self.norm(state.at(positions))

    def predict(self, head_input: Tensor) -> Tensor:
        return F.linear(head_input, self.embedding.weight)

    def halt(self, pooled: Tensor) -> Tensor | None:
        return None if self.gate is None else self.gate(pooled)


class TransformerLayer(nn.Module):
    """z = h + attention(LN(h)); h = z + MLP(LN(z))."""

    def __init__(self, settings: TransformerSettings, layer: str) -> None:
        super().__init__()
        self.layer_name = layer  # under which the cache keeps its keys and values
        width, bias = settings.width, settings.bias
        self.heads, self.head_width = settings.heads, width // settings.heads
        self.rotary = Rotary(self.head_width, ROTARY_BASE) if settings.positions == "rotary" else None
        self.attention_norm = nn.LayerNorm(width, bias=bias)
        self.attention_in = nn.Linear(width, 3 * width, bias=bias)
        self.attention_out = nn.Linear(width, width, bias=bias)
        self.mlp_norm = nn.LayerNorm(width, bias=bias)
        self.mlp_in = nn.Linear(width, 4 * width, bias=bias)
        self.mlp_out = nn.Linear(4 * width, width, bias=bias)

    def forward(self, hidden: Tensor, layout: Layout) -> Tensor:
        return self.with_mlp(self.attended(hidden, layout))

    def attended(self, hidden: Tensor, layout: Layout) -> Tensor:
        """z, the first half of the layer."""
        projected = self.attention_in(self.attention_norm(hidden)).view(-1, 3 * self.heads, self.head_width)
        attended = cached_attention(projected, (self.heads,) * 3, layout, self.rotary, self.layer_name)
        return hidden + self.attention_out(attended)

    def at(self, positions: Tensor, hidden: Tensor, layout: Layout) -> Tensor:
        """What `forward` makes of one position a row [B, D]: from all states only keys and values are needed."""
        index = layout.states_at(positions)
        normed, width = self.attention_norm(hidden), hidden.shape[1]
        weight, bias = self.attention_in.weight, self.attention_in.bias
        query_bias, other_bias = (None, None) if bias is None else (bias[:width], bias[width:])
        query = F.linear(normed.index_select(0, index), weight[:width], query_bias)
        others = F.linear(normed, weight[width:], other_bias).view(-1, 2 * self.heads, self.head_width)
        query = query.view(-1, self.heads, self.head_width)
        attended = packed_attention_at(query, others, positions, layout, self.rotary)
        return self.with_mlp(hidden.index_select(0, index) + self.attention_out(attended))

    def with_mlp(self, hidden: Tensor) -> Tensor:
        """The second half, of each state by itself."""
        return hidden + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(hidden))))


class Gate(nn.Module):
    """A linear projection, or a two-layer network as wide as the model, to one halt logit."""

    def __init__(self, kind: Literal["linear", "mlp"], width: int) -> None:
        super().__init__()
        self.net: nn.Module = nn.Linear(width, 1)
        if kind == "mlp":
            self.net = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1))

    @staticmethod
    def tensors(kind: GateKind, prefix: str = "") -> dict[str, str]:
        """The names of its tensors by part: `weight` and `bias`, with `_1` those of the hidden layer."""
        if kind == "mlp":
            parts = {"weight_1": "net.0.weight", "bias_1": "net.0.bias", "weight": "net.2.weight", "bias": "net.2.bias"}
        else:
            parts = {} if kind == "none" else {"weight": "net.weight", "bias": "net.bias"}
        return {part: prefix + name for part, name in parts.items()}

    def forward(self, pooled: Tensor) -> Tensor:
        """In float32 at least: in bf16 the exit distribution would round to 1 too early."""
        wide = torch.promote_types(pooled.dtype, torch.float32)
        parameters = {name: value.to(wide) for name, value in self.net.named_parameters()}
        with torch.autocast(pooled.device.type, enabled=False):
            logit: Tensor = functional_call(self.net, parameters, pooled.to(wide)).squeeze(-1)
        return logit


def training_flops(settings: TransformerSettings, vocab_size: int, tokens: int, rows: int) -> float:
    """Multiply-adds x 2 of one training step (forward and backward), for an estimate of its time."""
    layer = 2 * tokens * 12 * settings.width**2 + 4 * tokens * (tokens / rows) * settings.width
    head = 2 * rows * settings.width * vocab_size
    return 3.0 * settings.loops * (settings.layers * layer + head)


def training_bytes(settings: TransformerSettings, vocab_size: int, block_size: int, tokens: int, rows: int) -> float:
    """A rough size of what training keeps in float32: weights, gradients, two moments, and a step's activations."""
    per_token = 20 * settings.width + 3 * settings.heads * tokens / rows
    with torch.device("meta"):
        model = LoopedTransformer(settings, vocab_size, block_size)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return 4.0 * (4 * parameters + settings.loops * settings.layers * tokens * per_token)
