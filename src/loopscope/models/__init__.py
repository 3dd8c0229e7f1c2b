"""What is a looped model? The contract, the paper's looped Transformer, Ouro, Huginn, decoders that are looped, gates
and checkpoints.
"""

from loopscope.models.checkpoint import CheckpointConfig, load_model, read_checkpoint_config
from loopscope.models.contract import LoopedModel, Loops, LoopState, initial_loop_state
from loopscope.models.huginn import Huginn, HuginnConfig
from loopscope.models.layout import Layout
from loopscope.models.looped_llama import LoopedLlama, LoopedLlamaConfig
from loopscope.models.looping import LoopedCheckpoint, loop
from loopscope.models.ouro import Ouro, OuroConfig
from loopscope.models.simple import SimpleLoopedModel
from loopscope.models.transformer import LoopedTransformer, TransformerSettings
