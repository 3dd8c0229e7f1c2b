"""How is a model saved and loaded? `config.json` and safetensors in a folder, one file or sharded, no code from it.

LoopScope's own checkpoints say `"model_type": "loopscope"` and keep the settings of the run that made them, so that a
run's folder is its checkpoint. Ouro checkpoints are read in the layout in which they are published.
"""

from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from loopscope.artifacts import sha256
from loopscope.config import digest, read_json
from loopscope.errors import UserError
from loopscope.models.gates import Gate
from loopscope.models.ouro import Ouro, read_ouro_config
from loopscope.models.protocol import LoopedModel
from loopscope.models.transformer import LoopedTransformer, TransformerSettings

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


class ModelType(msgspec.Struct, frozen=True):
    model_type: str


class CheckpointConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The `config.json` of LoopScope's own checkpoints."""

    model_type: Literal["loopscope"] = "loopscope"
    schema_version: Literal[1] = 1
    vocab_size: int
    block_size: int
    model: TransformerSettings
    run: dict[str, Any]  # the settings of the run that trained it


class ShardIndex(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


def load_model(folder: str | Path, device: str | torch.device = "cpu") -> LoopedModel:
    """The model in `folder`, LoopScope's own or Ouro's, ready to be evaluated."""
    path = Path(folder)
    if not path.is_dir():
        raise UserError(f"There is no folder {path}; give the folder of a checkpoint.")
    if not (path / CONFIG).is_file():
        raise UserError(f"{path} is not a checkpoint: it has no {CONFIG}.")
    kind = read_json(ModelType, path / CONFIG, "model configuration").model_type
    if kind not in _BUILDERS:
        raise UserError(f"{path} holds a model of type '{kind}'; LoopScope reads {' and '.join(_BUILDERS)}.")
    with torch.device("meta"):
        model = _BUILDERS[kind](path)
    _fill(model, path, device)
    model.identify = partial(weights_sha256, path.resolve())
    return model.eval().requires_grad_(False)


def read_checkpoint_config(folder: Path) -> CheckpointConfig:
    return read_json(CheckpointConfig, folder / CONFIG, "checkpoint configuration")


def _own(folder: Path) -> LoopedModel:
    config = read_checkpoint_config(folder)
    if not (folder / WEIGHTS).is_file():
        raise UserError(
            f"The run in {folder} is not finished: it has no {WEIGHTS}; continue it with `loopscope train`."
        )
    return LoopedTransformer(config.model, config.vocab_size, config.block_size)


def _ouro(folder: Path) -> LoopedModel:
    return Ouro(read_ouro_config(folder))


_BUILDERS = {"loopscope": _own, "ouro": _ouro}


def _fill(model: LoopedModel, folder: Path, device: str | torch.device) -> None:
    """Gives `model` the tensors of `folder`, each read once and straight to its place."""
    wanted = model.state_dict()
    found: dict[str, Tensor] = {}
    for file in weight_files(folder):
        try:
            with safe_open(file, framework="pt", device=str(device)) as tensors:
                for name in tensors.keys():  # noqa: SIM118 - safe_open is no mapping
                    found[name] = tensors.get_tensor(name)
        except (SafetensorError, FileNotFoundError) as error:
            raise UserError(f"{file} cannot be read ({error}); fetch or make it again.") from None
    if "lm_head.weight" in wanted and getattr(getattr(model, "config", None), "tie_word_embeddings", False):
        found["lm_head.weight"] = found.get("model.embed_tokens.weight", torch.empty(0))
    for name, tensor in wanted.items():
        if name not in found:
            raise UserError(f"The checkpoint in {folder} has no tensor '{name}'.")
        if not found[name].is_floating_point():
            raise UserError(f"In {folder} the tensor '{name}' holds {found[name].dtype}, not floating-point numbers.")
        if found[name].shape != tensor.shape:
            have, need = list(found[name].shape), list(tensor.shape)
            raise UserError(f"In {folder} the tensor '{name}' has shape {have}, the configuration asks for {need}.")
    if surplus := sorted(set(found) - set(wanted)):
        raise UserError(
            f"The checkpoint in {folder} has a tensor that its configuration does not know: '{surplus[0]}'."
        )
    model.load_state_dict(found, assign=True)


def gate_tensors(folder: Path) -> dict[str, str]:
    """Where a checkpoint keeps the parts of its own gate: part -> tensor; nothing without a gate."""
    if not (folder / CONFIG).is_file():
        raise UserError(f"{folder} is not a checkpoint: it has no {CONFIG}.")
    if read_json(ModelType, folder / CONFIG, "model configuration").model_type == "ouro":
        return {"weight": "model.early_exit_gate.weight", "bias": "model.early_exit_gate.bias"}
    return Gate.tensors(read_checkpoint_config(folder).model.gate, "gate.")


def weights_sha256(folder: Path) -> str:
    """What tells this model from any other: the hash of its weights' file, or of the hashes of several."""
    files = weight_files(folder)
    if len(files) == 1:
        return sha256(files[0])
    return digest({file.name: sha256(file) for file in files})


def weight_files(folder: Path) -> list[Path]:
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / INDEX).is_file():
        index = read_json(ShardIndex, folder / INDEX, "shard index")
        return [folder / name for name in sorted(set(index.weight_map.values()))]
    raise UserError(f"{folder} has no weights: neither {WEIGHTS} nor {INDEX} is there.")
