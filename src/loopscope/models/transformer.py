"""The paper's looped Transformer: a few pre-norm layers, applied again and again, one head for every loop.

h_t = block(h_{t-1}), without a norm between the loops. The pooled state is r_t = LayerNorm(h_t) at the position that
is read, the same final norm for all loops; the tied head and the gate both read r_t. Attention is causal.

Three options of the architecture change how the same weights compute, so that models differ in nothing else:

- injection: h_t = block(h_{t-1} + e) with the embedding e, from h_0 = 0; loop 1 is that of a model without it;
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
from loopscope.models.checkpoint_folder import GateKind, TransformerSettings
from loopscope.models.decoder_layers import run_layers
from loopscope.models.looped_model import InjectedState, LoopedModel, LoopState, initial_loop_state
from loopscope.models.packing import Layout

ROTARY_BASE = 10_000.0


class LoopedTransformer(LoopedModel):
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
        state = initial_loop_state(hidden, layout)
        return InjectedState(torch.zeros_like(hidden), layout, state.loop, hidden) if self.settings.injection else state

    def step(self, state: LoopState) -> LoopState:
        hidden = run_layers(self.block, _entering(state), state.layout)
        return replace(state, hidden=self.norm(hidden) if self.loop_norm else hidden, loop=state.loop + 1)

    def last_pooled(self, state: LoopState, positions: Tensor) -> Tensor:
        """The last layer's keys and values come from all tokens, all else only from where it is read."""
        *before, last = self.block
        assert isinstance(last, TransformerLayer)
        hidden = run_layers(before, _entering(state), state.layout)
        return self.norm(last.at(positions, hidden, state.layout))

    def early_pooled(self, state: LoopState, positions: Tensor) -> tuple[Tensor, LoopState]:
        """The MLP of the last layer, and what comes after it, run only where they are read."""
        *before, last = self.block
        assert isinstance(last, TransformerLayer)
        attended = last.with_attention(run_layers(before, _entering(state), state.layout), state.layout)
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


def _entering(state: LoopState) -> Tensor:
    """What the block of the next loop reads."""
    return state.hidden + state.embedded if isinstance(state, InjectedState) else state.hidden


class TransformerLayer(nn.Module):
    """z = h + attention(LN(h)); h = z + MLP(LN(z)). With norms after the sums, LN stands around these."""

    def __init__(self, settings: TransformerSettings, layer: str) -> None:
        super().__init__()
        self.layer_name = layer  # under which the cache keeps its keys and values
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
        """What `forward` makes of one position a row [B, D]: from all states only keys and values are needed."""
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
        """The second half, of each state by itself."""
        if self.norms_after:
            return self.mlp_norm(hidden + self.mlp_out(F.gelu(self.mlp_in(hidden))))
        return hidden + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(hidden))))

    def _attended(self, hidden: Tensor) -> Tensor:
        """What attention reads."""
        return hidden if self.norms_after else self.attention_norm(hidden)

    def _summed(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """What attention adds to."""
        hidden = hidden + self.attention_out(attended)
        return self.attention_norm(hidden) if self.norms_after else hidden


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


def training_bytes(
    settings: TransformerSettings, vocab_size: int, block_size: int, states: float, longest: int, bf16: bool = False
) -> tuple[float, float]:
    """A rough size of what training keeps: weights, gradients and two moments, and a loop's activations of S states.

    Weights and all that belongs to them are float32; autocast to bf16 keeps most activations, and a copy of the
    weights, at half the size, and its fused attention no scores. (Per state, layer and width of the paper's models 69
    to 73 bytes were counted in float32, and 41 to 42 in bf16.)
    """
    with torch.device("meta"):
        model = LoopedTransformer(settings, vocab_size, block_size)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    per_state = 44.0 * settings.width if bf16 else 80.0 * settings.width + 12.0 * settings.heads * longest
    return (18.0 if bf16 else 16.0) * parameters, settings.layers * states * per_state
