"""What is a looped model? The protocol, the paper's looped Transformer, Ouro, gates and checkpoints."""

from loopscope.models.checkpoint import CheckpointConfig, load_model, read_checkpoint_config
from loopscope.models.ouro import Ouro, OuroConfig
from loopscope.models.protocol import LoopedModel, Loops, LoopState
from loopscope.models.transformer import LoopedTransformer, TransformerSettings

__all__ = [
    "CheckpointConfig",
    "LoopState",
    "LoopedModel",
    "LoopedTransformer",
    "Loops",
    "Ouro",
    "OuroConfig",
    "TransformerSettings",
    "load_model",
    "read_checkpoint_config",
]
