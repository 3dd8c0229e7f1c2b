"""What is a looped model? The contract, the paper's looped Transformer, Ouro, Huginn, decoders that are looped, gates
and checkpoints.
"""

from typing import TYPE_CHECKING

from loopscope.on_demand import offered

if TYPE_CHECKING:
    from loopscope.models.checkpoint import load_model
    from loopscope.models.configuration import CheckpointConfig, TransformerSettings, read_checkpoint_config
    from loopscope.models.contract import LoopedModel, Loops, LoopState, initial_loop_state
    from loopscope.models.huginn import Huginn, HuginnConfig
    from loopscope.models.layout import Layout
    from loopscope.models.looped_llama import LoopedLlama, LoopedLlamaConfig
    from loopscope.models.looping import LoopedCheckpoint, loop
    from loopscope.models.ouro import Ouro, OuroConfig
    from loopscope.models.simple import SimpleLoopedModel
    from loopscope.models.transformer import LoopedTransformer
else:
    __getattr__ = offered(
        __name__,
        {
            "checkpoint": "load_model",
            "configuration": "CheckpointConfig TransformerSettings read_checkpoint_config",
            "contract": "LoopedModel Loops LoopState initial_loop_state",
            "huginn": "Huginn HuginnConfig",
            "layout": "Layout",
            "looped_llama": "LoopedLlama LoopedLlamaConfig",
            "looping": "LoopedCheckpoint loop",
            "ouro": "Ouro OuroConfig",
            "simple": "SimpleLoopedModel",
            "transformer": "LoopedTransformer",
        },
    )
