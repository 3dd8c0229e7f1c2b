"""How is a model saved and loaded? `config.json` and safetensors in a folder, one file or sharded, no code from it.

LoopScope's own checkpoints say `"model_type": "loopscope"` and keep the settings of the run that made them, so that a
run's folder is its checkpoint. Ouro and Huginn checkpoints are read in the layout in which they are published, and
looped decoders in that in which `loopscope loop` writes them.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from loopscope.config import digest, read_json
from loopscope.errors import UserError
from loopscope.model_identity import with_configuration
from loopscope.models.configuration import (
    CONFIG,
    INDEX,
    WEIGHTS,
    ModelType,
    looped_model_type,
    read_checkpoint_config,
    require_config,
    weight_files,
)
from loopscope.models.contract import LoopedModel
from loopscope.models.decoder_layers import DecoderConfig
from loopscope.models.device import check_device
from loopscope.models.gates import Gate
from loopscope.models.hub import find_checkpoint
from loopscope.models.huginn import Huginn, HuginnConfig, read_huginn_config
from loopscope.models.looped_llama import LoopedLlama, read_looped_llama_config
from loopscope.models.ouro import Ouro, read_ouro_config
from loopscope.models.run_hashes import check_hashes, known_sha256
from loopscope.models.transformer import LoopedTransformer
from loopscope.writing import atomic_file, write_json

BESIDE_WEIGHTS = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("generation_config.json", "chat_template.jinja"),
)
"""What a checkpoint may have beside its configuration and weights, and keeps when another is made of it."""


TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(
    source: str | Path, device: str | torch.device = "cpu", dtype: str | None = None, revision: str | None = None
) -> LoopedModel:
    """The model in a folder, or of this name on the Hub, ready to be evaluated; in its file's precision, or in `dtype`.

    Every tensor is read once and straight to its place, so the weights are never in memory twice. Weights that are not
    finite are refused, and so is what a run trained here wrote, if it was altered since.
    """
    if dtype is not None and (not isinstance(dtype, str) or dtype not in DTYPES):
        raise UserError(f"There is no precision '{dtype}'; choose one of {', '.join(DTYPES)}.")
    device = check_device(device)
    path = find_checkpoint(source, revision)
    model = model_without_weights(path)
    check_hashes(path)
    fill(model, path, device, None if dtype is None else DTYPES[dtype])
    model.eval().requires_grad_(False)
    model.identify_by(partial(stored_sha256, path.resolve()))
    return model


def model_without_weights(path: Path) -> LoopedModel:
    """The model of a checkpoint as its configuration describes it, on the meta device."""
    kind = looped_model_type(path)
    with torch.device("meta"):
        return _BUILDERS[kind](path)


def _own(folder: Path) -> LoopedModel:
    config = read_checkpoint_config(folder)
    if not (folder / WEIGHTS).is_file():
        raise UserError(
            f"The run in {folder} is not finished: it has no {WEIGHTS}; continue it with `loopscope train`."
        )
    check_layers(folder, config.model.layers)
    return LoopedTransformer(config.model, config.vocab_size, config.block_size)


def _ouro(folder: Path) -> LoopedModel:
    config = read_ouro_config(folder)
    check_layers(folder, config.num_hidden_layers)
    return Ouro(config)


def _huginn(folder: Path) -> LoopedModel:
    config = read_huginn_config(folder)
    check_layers(folder, config.n_layers_in_prelude, config.n_layers_in_recurrent_block, config.n_layers_in_coda)
    return Huginn(config)


def _looped_llama(folder: Path) -> LoopedModel:
    config = read_looped_llama_config(folder)
    check_layers(folder, config.num_hidden_layers)
    return LoopedLlama(config)


def check_layers(folder: Path, *layers: int) -> None:
    """Every layer has tensors: a configuration of far more than there are is refused before they are built."""
    tensors = 0
    for file in weight_files(folder):
        with _opened(file) as found:
            tensors += len(found.keys())
    if sum(layers) > tensors:
        raise UserError(
            f"The checkpoint in {folder} has {tensors:,} tensors, too few for its {sum(layers):,} layers by "
            f"{CONFIG}; fetch or make it again."
        )


_BUILDERS: dict[str, Callable[[Path], LoopedModel]] = {
    "loopscope": _own,
    "ouro": _ouro,
    "huginn_raven": _huginn,
    "looped_llama": _looped_llama,
}
_CONFIGURATIONS: dict[str, Callable[[Path], DecoderConfig | HuginnConfig]] = {
    "ouro": read_ouro_config,
    "huginn_raven": read_huginn_config,
    "looped_llama": read_looped_llama_config,
}
_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def fill(model: LoopedModel, folder: Path, device: str | torch.device, dtype: torch.dtype | None) -> None:
    """Gives `model` the tensors of `folder`, after all of them were looked at."""
    expected = model.state_dict()
    files = {name: file for file in weight_files(folder) for name in _check_file(file, expected, model.unneeded)}
    tied = {name: other for name, other in model.tied.items() if name not in files}
    for name in expected:
        if name not in files and name not in tied:
            raise UserError(f"The checkpoint in {folder} has no tensor '{name}'.")
    found: dict[str, Tensor] = {}
    dtype = dtype or _precision(files, expected)
    for file in dict.fromkeys(files.values()):
        with _opened(file, str(device)) as tensors:
            for name in (name for name, where in files.items() if where == file and name not in model.tied):
                found[name] = tensors.get_tensor(name).to(dtype)
    if (wrong := first_not_finite(found)) is not None:
        raise UserError(
            f"In {folder} the tensor '{wrong}' holds a value that is not finite in {_name(dtype)}, so every answer "
            "would be meaningless; fetch or train the checkpoint again, or choose another precision (--dtype)."
        )
    for name, other in model.tied.items():
        if name in files:
            with _opened(files[name], str(device)) as tensors:
                if not torch.equal(tensors.get_tensor(name).to(dtype), found[other]):
                    raise UserError(
                        f"In {folder} the tensor '{name}' is not '{other}', and the configuration says that they are "
                        "one (tied); correct the configuration."
                    )
        found[name] = found[other]
    model.load_state_dict(found, assign=True)


def first_not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """The name of the first tensor with a NaN or an infinity; one pass over each, and one number leaves the device."""
    filled = {name: tensor.detach() for name, tensor in tensors.items() if tensor.numel()}
    if not filled:
        return None
    finite = torch.stack([torch.stack(torch.aminmax(tensor)).isfinite().all() for tensor in filled.values()])
    return next((name for name, held in zip(filled, finite.tolist(), strict=True) if not held), None)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _precision(files: Mapping[str, Path], expected: Mapping[str, Tensor]) -> torch.dtype:
    """That of the largest tensor: one for all, where a file keeps its norms more precise than its matrices."""
    name = max(files, key=lambda name: expected[name].numel())
    with _opened(files[name]) as tensors:
        kind: torch.dtype = _FLOATS[tensors.get_slice(name).get_dtype()]
        return kind


def _check_file(file: Path, expected: dict[str, Tensor], unneeded: Sequence[str]) -> list[str]:
    """The names of its tensors, all of which the configuration knows; nothing is read but the header."""
    with _opened(file) as tensors:
        names = [name for name in tensors.keys() if name not in unneeded]  # noqa: SIM118 - safe_open is no mapping
        for name in names:
            if name not in expected:
                raise UserError(
                    f"The checkpoint in {file.parent} has a tensor that its configuration does not know: '{name}'."
                )
            stored = tensors.get_slice(name)
            if (kind := stored.get_dtype()) not in _FLOATS:
                raise UserError(f"In {file.parent} the tensor '{name}' holds {kind}, not floating-point numbers.")
            if (have := list(stored.get_shape())) != (need := list(expected[name].shape)):
                raise UserError(
                    f"In {file.parent} the tensor '{name}' has shape {have}, the configuration asks for {need}."
                )
    return names


@contextmanager
def _opened(file: Path, device: str = "cpu") -> Iterator[Any]:
    try:
        if file.exists() and not file.is_file():
            raise FileNotFoundError("it is no file")
        with safe_open(file, framework="pt", device=device) as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} cannot be read ({error}); fetch or make it again.") from None


def write_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Writes one safetensors file; what the system refuses is an OSError, as with any other file."""
    try:
        save_file(dict(tensors), path, None if metadata is None else dict(metadata))
    except SafetensorError as error:
        found = re.search(r"os error (\d+)", str(error))
        if found is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from None


def save_model(tensors: Mapping[str, Tensor], folder: Path, shard_bytes: int = 5 << 30) -> None:
    """Writes weights in the layout of the Hub: one file, or shards of at most so many bytes and their index."""
    shards: list[dict[str, Tensor]] = [{}]
    room = shard_bytes
    for name, tensor in tensors.items():
        if shards[-1] and tensor.nbytes > room:
            shards.append({})
            room = shard_bytes
        shards[-1][name] = tensor
        room -= tensor.nbytes
    if len(shards) == 1:
        with atomic_file(folder / WEIGHTS) as scratch:
            write_tensors(shards[0], scratch, {"format": "pt"})
        return
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        with atomic_file(folder / file) as scratch:
            write_tensors(shard, scratch, {"format": "pt"})
        index |= dict.fromkeys(shard, file)
    size = sum(tensor.nbytes for tensor in tensors.values())
    write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": index})
    (folder / WEIGHTS).unlink(missing_ok=True)  # of an earlier save: it would be read first


class _Ends(msgspec.Struct, frozen=True):
    eos_token_id: TokenId | list[TokenId] | None = None
    vocab_size: int | None = None


def end_tokens(folder: Path) -> set[int]:
    """The tokens that end a text, by the configurations of the model and of its generation."""
    found: set[int] = set()
    size: int | None = None
    for name in (CONFIG, "generation_config.json"):
        if (folder / name).is_file():
            read = read_json(_Ends, folder / name, "model configuration")
            ends, size = read.eos_token_id, size or read.vocab_size
            found |= set(ends) if isinstance(ends, list) else set() if ends is None else {ends}
    if size is not None and found and max(found) >= size:
        raise UserError(
            f"The checkpoint in {folder} ends texts with the token {max(found)}, and its vocabulary has {size:,}; "
            "correct its eos_token_id."
        )
    return found


def gate_tensors(folder: Path) -> dict[str, str]:
    """Where a checkpoint keeps the parts of its own gate: part -> tensor; nothing without a gate."""
    require_config(folder)
    kind = read_json(ModelType, folder / CONFIG, "model configuration").model_type
    if kind == "huginn_raven":
        return {}
    if kind == "looped_llama" and read_looped_llama_config(folder).looping.gate == "none":
        return {}
    if kind in ("ouro", "looped_llama"):
        return {"weight": "model.early_exit_gate.weight", "bias": "model.early_exit_gate.bias"}
    return Gate.tensors(read_checkpoint_config(folder).model.gate, "gate.")


def weights_sha256(folder: Path) -> str:
    """What tells this model from any other: the hash of its weights, and of the configuration where it has one.

    A run of LoopScope's own has none: `hashes.json` holds its configuration to what the run wrote.
    """
    found = (
        read_json(ModelType, folder / CONFIG, "model configuration").model_type if (folder / CONFIG).is_file() else ""
    )
    config = _CONFIGURATIONS[found](folder).sha256 if found in _CONFIGURATIONS else None
    return with_configuration(stored_sha256(folder), config)


def stored_sha256(folder: Path) -> str:
    """The hash of a checkpoint's weights alone: of their file, or of the hashes of several."""
    files = weight_files(folder)
    if len(files) == 1:
        return known_sha256(files[0])
    return digest({file.name: known_sha256(file) for file in files})
