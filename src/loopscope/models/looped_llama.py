"""A looped model made from an ordinary decoder of the Llama family: Llama, SmolLM, Mistral, Qwen 2 and 3.

Its first layers, the prelude, run once. Every loop runs the core, the next layers: h = core(h). The state is read
through the coda: the last layers and the final norm. With all layers and before training, loop 1 is the original model.
Three parts may be added; before training, they do not change loop 1 (except a damping other than 1):

- damping a: h = h + a (core(h) - h);
- injection: a linear map of the prelude's output is added to the state before every loop;
- gate: a linear map of the pooled state to a halt logit.

The pooled state is the state, normalised to a mean square of 1 because a Llama's state grows from layer to layer;
without a coda, the final norm normalises it. `head_input` costs the coda: a readout of logits pays it at every loop, a
readout of the state or of the gate only at the exit.

Shapes: S states, D width, V vocabulary.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Annotated, Any, Literal

import msgspec
from torch import Tensor, nn

from loopscope.config import Layers, Loops, Settings, plain, require_values
from loopscope.models.checkpoint_folder import Source
from loopscope.models.decoder_layers import DecoderBackbone, DecoderConfig, LoopedDecoder, rms_normalised, run_layers
from loopscope.models.looped_model import InjectedState, LoopState, initial_loop_state
from loopscope.models.packing import Layout

LayerNumber = Annotated[int, msgspec.Meta(ge=0, lt=4096)]
Damping = Annotated[float, msgspec.Meta(gt=0, le=1)]


class Looping(Settings, frozen=True, kw_only=True):
    """Describe how a decoder is looped; dropped layers are not counted."""

    source: Source
    prelude: LayerNumber
    core: Layers
    loops: Loops
    damping: Damping = 1.0
    injection: bool = False
    gate: Literal["none", "linear"] = "none"
    dropped: tuple[LayerNumber, ...] = ()  # by their numbers in the original


class LoopedLlamaConfig(DecoderConfig, frozen=True, kw_only=True):
    """Hold the original's `config.json` keys and its looping; unsupported values are rejected, other keys ignored."""

    model_type: Literal["looped_llama"]
    looping: Looping
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    sliding_window: int | None = None
    num_experts: None = None  # no mixture of experts
    num_local_experts: None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        looping, window = self.looping, self.sliding_window
        layers = f"the prelude ({looping.prelude}) and the core ({looping.core})"
        whole = looping.source != "mistral" or window is None or window >= self.max_position_embeddings
        require_values(
            (self.coda >= 0, f"{layers} are more than the {self.num_hidden_layers} layers"),
            (whole, f"a sliding window (of {window} tokens) is not supported"),
            (looping.source != "qwen3" or self.head_dim, "head_dim is missing"),
        )

    @property
    def network(self) -> dict[str, Any]:
        looping = {name: value for name, value in plain(self.looping).items() if name != "loops"}
        return super().network | {"looping": looping}

    @property
    def coda(self) -> int:
        """The number of layers that run after the last loop."""
        return self.num_hidden_layers - self.looping.prelude - self.looping.core


class LoopedLlama(LoopedDecoder):
    """A decoder of the Llama family as a looped model: prelude, looped core, and coda."""

    config: LoopedLlamaConfig
    unneeded = ("self_attn.rotary_emb.inv_freq",)

    def __init__(self, config: LoopedLlamaConfig) -> None:
        looping, source = config.looping, config.looping.source
        biased = bool(config.attention_bias) and source in ("llama", "qwen3")
        backbone = DecoderBackbone(
            config,
            looping.gate == "linear",
            looping.injection,
            qkv_bias=biased or source == "qwen2",
            output_bias=biased,
            mlp_bias=bool(config.mlp_bias) and source == "llama",
            qk_norm=source == "qwen3",
        )
        super().__init__(config, looping.loops, backbone)
        self.head_attends = config.coda > 0
        self.embed_cost, self.head_cost = looping.prelude / looping.core, config.coda / looping.core
        for added in (backbone.injection, backbone.early_exit_gate):
            for parameter in () if added is None else added.parameters():
                nn.init.zeros_(parameter)  # without effect before training

    @property
    def block(self) -> nn.Module:
        """The core that every loop applies."""
        return nn.ModuleList(self._core)

    @property
    def _core(self) -> Iterator[nn.Module]:
        looping = self.config.looping
        return islice(self.model.layers, looping.prelude, looping.prelude + looping.core)

    def embed(self, tokens: Tensor, layout: Layout) -> LoopState:
        layers = islice(self.model.layers, self.config.looping.prelude)
        embedded = run_layers(layers, self.model.embed_tokens(tokens), layout)
        state = initial_loop_state(embedded, layout)
        return state if self.model.injection is None else InjectedState(embedded, layout, state.loop, embedded)

    def step(self, state: LoopState) -> LoopState:
        looping, hidden = self.config.looping, state.hidden
        if self.model.injection is not None:
            assert isinstance(state, InjectedState)
            hidden = hidden + self.model.injection(state.embedded)
        updated = run_layers(self._core, hidden, state.layout)
        if looping.damping != 1:
            updated = state.hidden + looping.damping * (updated - state.hidden)
        return replace(state, hidden=updated, loop=state.loop + 1)

    def pooled(self, state: LoopState, positions: Tensor | None = None) -> Tensor:
        hidden = state.at(positions)
        if self.head_attends:
            return rms_normalised(hidden, self.config.rms_norm_eps)
        return self.model.norm(hidden)

    def head_input(self, state: LoopState, positions: Tensor | None = None) -> Tensor:
        """The output of the coda on the state; the coda attends, so it runs on whole rows."""
        if not self.head_attends:
            return self.pooled(state, positions)
        coda = islice(self.model.layers, self.config.looping.prelude + self.config.looping.core, None)
        hidden = run_layers(coda, state.hidden, state.layout)
        if positions is not None:
            hidden = hidden.index_select(0, state.layout.states_at(positions))
        return self.model.norm(hidden)
