"""Ouro, the looped language model, in native PyTorch and in the parameter names of its checkpoints.

Sandwich-norm layers with rotary attention and SwiGLU; after every loop the final norm is applied, and that normed
state feeds the gate, the LM head and the next loop. So the pooled state r_t is the normed state itself.

Shapes: S states, D width, V vocabulary.
"""

from typing import Literal

from torch import Tensor, nn

from loopscope.config import Loops, Width, require_values
from loopscope.models.decoder_layers import DecoderBackbone, DecoderConfig, LoopedDecoder, run_layers
from loopscope.models.looped_model import LoopState, initial_loop_state
from loopscope.models.packing import Layout

EARLY_EXIT = (
    "early_exit_threshold has no effect here and must be 1; exits are a policy's: the readout `gate` with that "
    "threshold"
)


class OuroConfig(DecoderConfig, frozen=True, kw_only=True):
    """Hold the `config.json` keys of Ouro."""

    beside_network = (*DecoderConfig.beside_network, "total_ut_steps", "early_exit_threshold")

    num_key_value_heads: Width
    total_ut_steps: Loops
    tie_word_embeddings: bool
    attention_bias: Literal[False] | None = None
    mlp_bias: Literal[False] | None = None
    early_exit_threshold: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_values((self.early_exit_threshold in (None, 1), EARLY_EXIT))


class Ouro(LoopedDecoder):
    """Ouro as a looped model: every loop runs all layers and the final norm."""

    config: OuroConfig

    def __init__(self, config: OuroConfig) -> None:
        super().__init__(config, config.total_ut_steps, DecoderBackbone(config, gate=True, sandwich=True))

    @property
    def block(self) -> nn.Module:
        """The layers that every loop applies; the final norm, applied too, has no large matrix."""
        return self.model.layers

    def embed(self, tokens: Tensor, layout: Layout) -> LoopState:
        return initial_loop_state(self.model.embed_tokens(tokens), layout)

    def step(self, state: LoopState) -> LoopState:
        hidden = run_layers(self.model.layers, state.hidden, state.layout)
        return LoopState(self.model.norm(hidden), state.layout, state.loop + 1)
