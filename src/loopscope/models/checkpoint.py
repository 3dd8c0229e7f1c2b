"""How is a model saved and loaded? As `config.json` and safetensors in a folder, whose code is never run.

LoopScope's own checkpoints have `"model_type": "loopscope"` and the settings of the run that made them, so that a run's
folder is its checkpoint. Ouro and Huginn checkpoints have their published layout, looped decoders the layout that
`loopscope loop` writes.
"""

import errno
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from loopscope.config import read_json, write_json
from loopscope.errors import UserError, check_known
from loopscope.files import atomic_file, require_file
from loopscope.model_identity import with_configuration
from loopscope.models.checkpoint_folder import (
    CONFIG,
    INDEX,
    WEIGHTS,
    CheckpointConfig,
    check_hashes,
    check_plain,
    find_checkpoint,
    looped_model_type,
    read_checkpoint_config,
    stored_sha256,
    weight_files,
)
from loopscope.models.custom_model import custom_model
from loopscope.models.decoder_layers import NetworkConfig
from loopscope.models.device import check_device
from loopscope.models.huginn import Huginn, HuginnConfig
from loopscope.models.linear import pack_weights, quantise_weights
from loopscope.models.looped_llama import LoopedLlama, LoopedLlamaConfig
from loopscope.models.looped_model import LoopedModel, plain_tensors
from loopscope.models.ouro import Ouro, OuroConfig
from loopscope.models.transformer import Gate, LoopedTransformer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
INT8 = "int8"
"""A precision of linear layers; all other layers are float32."""
STORED_FLOATS = ("F64", "F32", "F16", "BF16")
NETWORKS: dict[str, tuple[type[NetworkConfig], Callable[[Any], LoopedModel]]] = {
    "ouro": (OuroConfig, Ouro),
    "huginn_raven": (HuginnConfig, Huginn),
    "looped_llama": (LoopedLlamaConfig, LoopedLlama),
}
"""The networks besides LoopScope's own, by `model_type`."""


def load_model(
    source: str | Path,
    device: str | torch.device = "cpu",
    dtype: str | None = None,
    revision: str | None = None,
    pack: bool = True,
) -> LoopedModel:
    """Load a looped model for evaluation.

    LoopScope rejects weights that are not finite, and files that changed after training.

    Parameters
    ----------
    source
        The folder of a run or a checkpoint, or a name on the Hub.
    device
        The device on which the model runs (default: "cpu").
    dtype
        "float32", "bfloat16", "float16" or, on a CPU, "int8" (default: as in the checkpoint). With int8, linear layers
        compute in int8 and all other layers in float32; such a model cannot be trained.
    revision
        The revision on the Hub (default: the newest).
    pack
        On a CPU, rearrange large matrices if that is faster (default: yes). A model with rearranged matrices cannot be
        trained.

    Returns
    -------
    LoopedModel
        The model in evaluation mode; its parameters have no gradients.

    Raises
    ------
    UserError
        If the checkpoint does not exist, if its files were altered, or if it needs a class that is not registered.

    Examples
    --------
    >>> ls.load_model(checkpoint).num_loops
    4
    """
    if dtype is not None:
        check_known(dtype, (*DTYPES, INT8), "precision")
    device = check_device(device)
    if dtype == INT8 and device.type != "cpu":
        raise UserError(
            "int8 weights run on the CPU here (--device cpu); on a GPU quantise with torchao, in transformers "
            "(docs/how-to/fine-tuning.md)."
        )
    path = find_checkpoint(source, revision)
    check_hashes(path)
    check_plain(path)
    model = model_without_weights(path)
    load_weights_into(model, path, device, None if dtype is None else DTYPES.get(dtype))
    model.to(device)  # constants of a custom class, which no file holds
    model.eval().requires_grad_(False)
    if dtype == INT8:
        quantise_weights(model)
    model.identify_by(partial(stored_sha256, path.resolve()))
    if pack:
        pack_weights(model)
    return model


def model_without_weights(folder: Path) -> LoopedModel:
    """The model of a checkpoint's configuration: on the meta device; a custom model on the CPU."""
    config = read_config(folder)
    if isinstance(config, CheckpointConfig) and config.model.is_custom:
        with torch.random.fork_rng(devices=[]):
            return custom_model(config.model, config.vocab_size, config.block_size)
    with torch.device("meta"):
        if isinstance(config, CheckpointConfig):
            return LoopedTransformer(config.model, config.vocab_size, config.block_size)
        return NETWORKS[looped_model_type(folder)][1](config)


def read_config(folder: Path) -> Any:
    """Read the whole configuration of a checkpoint: a CheckpointConfig of LoopScope, or a NetworkConfig."""
    kind = looped_model_type(folder)
    if kind == "loopscope":
        return read_checkpoint_config(folder)
    return read_json(NETWORKS[kind][0], folder / CONFIG, "model configuration")


def load_weights_into(model: LoopedModel, folder: Path, device: str | torch.device, dtype: torch.dtype | None) -> None:
    """Load the tensors of `folder` into `model`, in `dtype` or in the precision of the largest tensor."""
    expected = model.state_dict()
    weights: dict[str, Tensor] = {}
    for file in weight_files(folder):
        with _open_tensors(file, str(device)) as stored:
            for name in stored.keys():  # noqa: SIM118 - safe_open is no mapping
                if not name.endswith(model.unneeded):
                    _check_tensor(folder, name, stored.get_slice(name), expected)
                    tensor = stored.get_tensor(name)
                    weights[name] = tensor if dtype is None else tensor.to(dtype)
    for name in expected:
        if name not in weights and name not in model.tied:
            raise UserError(f"The checkpoint in {folder} has no tensor '{name}'.")
    dtype = dtype or max(weights.values(), key=Tensor.numel).dtype  # a file may keep its norms in a higher precision
    weights = {name: tensor.to(dtype) for name, tensor in weights.items()}
    require_finite(weights, folder)
    for name, other in model.tied.items():
        if name in weights and not torch.equal(weights[name], weights[other]):
            raise UserError(
                f"In {folder} the tensor '{name}' is not '{other}', and the configuration says that they are one "
                "(tied); correct the configuration."
            )
        weights[name] = weights[other]
    model.load_state_dict(weights, assign=True)


def _check_tensor(folder: Path, name: str, stored: Any, expected: Mapping[str, Tensor]) -> None:
    """Reject a tensor of a checkpoint with an unexpected name, shape or type."""
    kind, shape = stored.get_dtype(), list(stored.get_shape())
    if name not in expected:
        problem = f"The checkpoint in {folder} has a tensor that its configuration does not know: '{name}'."
    elif kind not in STORED_FLOATS:
        problem = f"In {folder} the tensor '{name}' holds {kind}, not floating-point numbers."
    elif shape != (configured := list(expected[name].shape)):
        problem = f"In {folder} the tensor '{name}' has shape {shape}, the configuration asks for {configured}."
    else:
        return
    raise UserError(problem)


def require_finite(tensors: Mapping[str, Tensor], source: Path) -> None:
    """Reject a checkpoint with a weight that is NaN or infinite."""
    if (name := first_not_finite(tensors)) is not None:
        precision = str(tensors[name].dtype).removeprefix("torch.")
        raise UserError(
            f"In {source} the tensor '{name}' holds a value that is not finite in {precision}, so every answer would "
            "be meaningless; fetch or train the checkpoint again, or choose another precision (--dtype)."
        )


def first_not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """The name of the first tensor with NaN or infinity; None if there is none."""
    parts = (part for each in tensors.items() for part in plain_tensors(*each))
    filled = {name: tensor.detach() for name, tensor in parts if tensor.numel()}
    if not filled:
        return None
    finite = torch.stack([torch.stack(torch.aminmax(tensor)).isfinite().all() for tensor in filled.values()])
    return next((name for name, held in zip(filled, finite.tolist(), strict=True) if not held), None)


@contextmanager
def _open_tensors(file: Path, device: str = "cpu") -> Iterator[Any]:
    """Open a safetensors file; a file that cannot be read is a UserError."""
    try:
        if file.exists():
            require_file(file, "file of weights")  # reading a pipe would wait
        with safe_open(file, framework="pt", device=device) as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} cannot be read ({error}); fetch or make it again.") from None


def write_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write one safetensors file; an error of the system is an OSError, as for any other file."""
    try:
        save_file(dict(tensors), path, None if metadata is None else dict(metadata))
    except SafetensorError as error:
        found = re.search(r"os error (\d+)", str(error))
        number = errno.EIO if found is None else int(found[1])
        raise OSError(number, os.strerror(number), str(path)) from error


def save_model(tensors: Mapping[str, Tensor], folder: Path, shard_bytes: int = 5 << 30) -> None:
    """Write weights in the layout of the Hub: one file, or shards of at most so many bytes and their index."""
    shards: list[dict[str, Tensor]] = [{}]
    room = shard_bytes
    for name, tensor in tensors.items():
        if shards[-1] and tensor.nbytes > room:
            shards.append({})
            room = shard_bytes
        shards[-1][name] = tensor
        room -= tensor.nbytes
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = WEIGHTS if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        with atomic_file(folder / file) as scratch:
            write_tensors(shard, scratch, {"format": "pt"})
        index |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        size = sum(tensor.nbytes for tensor in tensors.values())
        write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": index})
        (folder / WEIGHTS).unlink(missing_ok=True)  # of an earlier save; loading would prefer it


def gate_tensors(folder: Path) -> dict[str, str]:
    """The tensor names of a checkpoint's own gate, by part; empty without a gate."""
    config = read_config(folder)
    if isinstance(config, CheckpointConfig):
        return {} if config.model.is_custom else Gate.tensors(config.model.gate, "gate.")
    looped = isinstance(config, LoopedLlamaConfig) and config.looping.gate == "linear"
    gated = looped or isinstance(config, OuroConfig)
    return {part: f"model.early_exit_gate.{part}" for part in ("weight", "bias")} if gated else {}


def weights_sha256(folder: Path) -> str:
    """The identity of a checkpoint's model: the hash of its weights, and of its configuration if that matters.

    A run of LoopScope adds a configuration only if the same weights can compute differently; `hashes.json` has the
    rest.
    """
    config = read_config(folder)
    own = config.model.sha256 if isinstance(config, CheckpointConfig) else config.sha256
    return with_configuration(stored_sha256(folder), own)
