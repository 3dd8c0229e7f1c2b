"""What does a checkpoint say of itself? Its `config.json` and the names of its files, read without weights and PyTorch.

Of LoopScope's own all of it; `checkpoint.py` makes models of it. Those of others keep their configurations beside the
models: here is what all of them say, how deep they are and how long a text they take.
"""

from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from loopscope.config import Layers, Loops, Positions, Settings, Vocabulary, Width, build, read_json
from loopscope.errors import UserError
from loopscope.reading import is_plain_name

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

LOOPED = ("loopscope", "ouro", "huginn_raven", "looped_llama")
"""The `model_type` of what LoopScope reads."""
Source = Literal["llama", "mistral", "qwen2", "qwen3"]
SOURCES: tuple[Source, ...] = ("llama", "mistral", "qwen2", "qwen3")
"""That of what can be looped; SmolLM is a Llama."""
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


def require_config(folder: Path) -> None:
    if not (folder / CONFIG).is_file():
        raise UserError(f"{folder} is not a checkpoint: it has no {CONFIG}; give the folder of a model.")


def is_of_task(folder: Path) -> bool:
    """Whether it is a model of a task's examples, not of text."""
    return read_json(ModelType, folder / CONFIG, "model configuration").model_type == "loopscope"


def looped_model_type(folder: Path) -> str:
    """The `model_type` of a checkpoint, if it is a looped model's."""
    require_config(folder)
    kind = read_json(ModelType, folder / CONFIG, "model configuration").model_type
    if kind not in LOOPED:
        loops = "; loop it first (`loopscope loop`)" if kind in SOURCES else ""
        raise UserError(f"{folder} holds a model of type '{kind}'; LoopScope reads {', '.join(LOOPED)}{loops}.")
    return kind


class ModelShape(NamedTuple):
    num_loops: int
    block_size: int  # tokens of the longest row


class _Looping(msgspec.Struct, frozen=True):
    loops: Loops


class _Shape(msgspec.Struct, frozen=True):
    """Each kind of model has its own keys."""

    model: _Looping | None = None  # LoopScope's own
    total_ut_steps: Loops | None = None  # Ouro
    mean_recurrence: Loops | None = None  # Huginn
    looping: _Looping | None = None  # looped Llamas
    block_size: Positions | None = None
    max_position_embeddings: Positions | None = None


def read_model_shape(folder: Path) -> ModelShape:
    """How deep the model of a checkpoint is, and how long a row it takes."""
    looped_model_type(folder)
    found = read_json(_Shape, folder / CONFIG, "model configuration")
    looping = found.model or found.looping
    loops = found.total_ut_steps or found.mean_recurrence if looping is None else looping.loops
    longest = found.block_size or found.max_position_embeddings
    if loops is None or longest is None:
        raise UserError(f"{folder / CONFIG} does not say how deep the model is, or how long a text it takes.")
    return ModelShape(loops, longest)


class ShardIndex(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


def weight_files(folder: Path) -> list[Path]:
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / INDEX).is_file():
        names = sorted(set(read_json(ShardIndex, folder / INDEX, "shard index").weight_map.values()))
        if outside := [name for name in names if not is_plain_name(name)]:
            raise UserError(
                f"{folder / INDEX} names the file '{outside[0]}', which does not lie beside it; fetch or make it again."
            )
        return [folder / name for name in names]
    raise UserError(f"{folder} has no weights: neither {WEIGHTS} nor {INDEX} is there.")
