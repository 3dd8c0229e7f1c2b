"""What does a checkpoint say of itself? The `config.json` of LoopScope's own, read without weights and without PyTorch.

`checkpoint.py` makes models of it; those of others keep their configurations beside the models.
"""

from pathlib import Path
from typing import Any, Literal

import msgspec

from loopscope.config import Layers, Loops, Positions, Settings, Vocabulary, Width, build, read_json
from loopscope.errors import UserError

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

GateKind = Literal["none", "linear", "mlp"]


class TransformerSettings(Settings, frozen=True, kw_only=True):
    """Defaults are the paper's."""

    layers: Layers = 4
    heads: Width = 4
    width: Width = 512
    loops: Loops = 6
    block_size: Positions | None = None  # None: as many positions as the task needs
    bias: bool = True
    gate: GateKind = "none"
    positions: Literal["rotary", "learned"] = "rotary"

    def __post_init__(self) -> None:
        if self.width % self.heads or (self.positions == "rotary" and self.width // self.heads % 2):
            raise ValueError(f"width {self.width} does not divide into {self.heads} heads of an even width")


class ModelType(msgspec.Struct, frozen=True):
    model_type: str


class CheckpointConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The `config.json` of LoopScope's own checkpoints."""

    model_type: Literal["loopscope"] = "loopscope"
    schema_version: Literal[1] = 1
    vocab_size: Vocabulary
    block_size: Positions
    model: TransformerSettings
    run: dict[str, Any]  # the settings of the run that trained it


class _Trained(msgspec.Struct, frozen=True):
    model: TransformerSettings


def read_checkpoint_config(folder: Path) -> CheckpointConfig:
    config = read_json(CheckpointConfig, folder / CONFIG, "checkpoint configuration")
    if "model" in config.run and build(_Trained, config.run, f"{folder / CONFIG}: run").model != config.model:
        raise UserError(
            f"{folder / CONFIG} contradicts itself: its model is not that of the run's settings; put the file back as "
            "training wrote it."
        )
    return config
