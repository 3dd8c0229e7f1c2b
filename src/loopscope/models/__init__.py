"""What is a looped model? The protocol, the paper's looped Transformer, Ouro, Huginn, gates and checkpoints."""

from loopscope.models.checkpoint import CheckpointConfig, load_model, read_checkpoint_config
from loopscope.models.huginn import Huginn, HuginnConfig
from loopscope.models.ouro import Ouro, OuroConfig
from loopscope.models.packing import Layout
from loopscope.models.protocol import LoopedModel, Loops, LoopState, first_state
from loopscope.models.transformer import LoopedTransformer, TransformerSettings

__all__ = [
    "CheckpointConfig",
    "Huginn",
    "HuginnConfig",
    "Layout",
    "LoopState",
    "LoopedModel",
    "LoopedTransformer",
    "Loops",
    "Ouro",
    "OuroConfig",
    "TransformerSettings",
    "first_state",
    "load_model",
    "read_checkpoint_config",
]
