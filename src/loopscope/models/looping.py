"""How does an ordinary decoder become a looped model? LoopScope writes its checkpoint again, with its looping added.

The source is a Llama, SmolLM, Mistral, Qwen 2 or Qwen 3 in the layout of the Hub, or a GGUF file, which transformers
reads. The result is a checkpoint of `looped_llama.py`. Nothing is trained.
"""

import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import torch
from torch import Tensor

from loopscope.artifacts import artifact_folder
from loopscope.config import build, plain, read_json, write_json
from loopscope.errors import UserError, explained
from loopscope.files import is_file, is_folder, new_path
from loopscope.models.checkpoint import load_weights_into, require_finite, save_model
from loopscope.models.checkpoint_folder import BESIDE_WEIGHTS, CONFIG, SOURCES, find_checkpoint, read_model_type
from loopscope.models.looped_llama import LoopedLlama, LoopedLlamaConfig, Looping

_DEFAULTS = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "hidden_act": "silu"}
"""The defaults of keys that a Hub configuration may leave out."""
MISTRAL_WINDOW = 4096
"""The sliding window of a Mistral whose configuration gives none."""
_LEFT_OUT = ("architectures", "auto_map", "layer_types", "_name_or_path")
"""Keys that describe the original's code, or all of its layers."""
_OF_GGUF = (*LoopedLlamaConfig.__struct_fields__, "dtype", "bos_token_id", "eos_token_id", "pad_token_id")
"""The keys kept from a configuration that transformers made of a GGUF file."""


class LoopedCheckpoint(msgspec.Struct, frozen=True):
    """Describe a looped checkpoint that was written."""

    folder: str
    looping: Looping
    coda: int  # layers that run at every exit
    original_layers: int
    parameters: int
    original_parameters: int
    cost: float  # weights that a full-depth pass multiplies a token with, relative to the original


class _Original(NamedTuple):
    """Hold the ordinary checkpoint: configuration, weights, and a function that copies its tokenizer."""

    config: dict[str, Any]
    tensors: Mapping[str, Tensor]
    copy_tokenizer: Callable[[Path], object]
    """Copy the tokenizer into a folder."""


def loop(
    source: str | Path,
    out: str | Path,
    prelude: int,
    core: int,
    loops: int,
    *,
    drop: Sequence[int] = (),
    damping: float = 1.0,
    injection: bool = False,
    gate: Literal["none", "linear"] = "none",
) -> LoopedCheckpoint:
    """Make a looped model from an ordinary language model.

    If you drop no layers and the damping is 1, loop 1 is the original model. The function trains nothing.

    Parameters
    ----------
    source
        The checkpoint: a folder, a name on the Hub, or a GGUF file.
    out
        The folder of the looped checkpoint.
    prelude
        The number of layers at the beginning of the model, which run once.
    core
        The number of layers after the prelude, which run in every loop. The remaining layers run at every exit.
    loops
        The number of loops at full depth.
    drop
        The layers to leave out, numbered from 0 (default: none).
    damping
        The factor X of a loop's update: h becomes h + X (core(h) - h) (default: 1).
    injection
        Add a linear map of the prelude's output to the state before every loop (default: no).
    gate
        "linear" adds an untrained gate (default: "none").

    Returns
    -------
    LoopedCheckpoint
        The path, the depth and the cost of the looped checkpoint.

    Raises
    ------
    UserError
        If the checkpoint cannot be looped with these settings.

    Examples
    --------
    >>> ls.loop(llama, folder / "looped", prelude=2, core=2, loops=3)
    LoopedCheckpoint(...)
    >>> ls.load_model(folder / "looped").num_loops
    3
    """
    target, dropped = new_path(out), sorted(set(drop))
    original = _read_original(source)
    layers = original.config["num_hidden_layers"]
    if outside := [number for number in dropped if not 0 <= number < layers]:
        raise UserError(f"There is no layer {outside[0]} to drop: the model's {layers} layers are 0 to {layers - 1}.")
    kept = [number for number in range(layers) if number not in dropped]
    options = {"prelude": prelude, "core": core, "loops": loops, "dropped": dropped}
    options |= {"damping": damping, "injection": injection, "gate": gate}
    looping = build(Looping, {"source": original.config["model_type"], **options}, "how it is looped")
    config = {key: value for key, value in original.config.items() if key not in _LEFT_OUT}
    config |= {"model_type": "looped_llama", "num_hidden_layers": len(kept), "looping": plain(looping)}
    with torch.device("meta"):
        model = LoopedLlama(build(LoopedLlamaConfig, config, str(source)))
    tensors = _renumber_layers(original.tensors, kept)
    precision = next(iter(tensors.values())).dtype
    for name, added in model.state_dict().items():
        if name not in tensors and name not in model.tied:
            tensors[name] = torch.zeros(added.shape, dtype=precision)
    with artifact_folder(target, "checkpoint") as scratch:
        write_json(scratch / CONFIG, config)
        save_model({name: tensors[name] for name in model.state_dict() if name not in model.tied}, scratch)
        original.copy_tokenizer(scratch)
    return _describe_looped(target, model, original)


def _read_original(source: str | Path) -> _Original:
    """Read an ordinary checkpoint: a folder, a name on the Hub, or a GGUF file."""
    path, files = Path(source), []
    if is_folder(path) and not (path / CONFIG).is_file():
        files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        raise UserError(f"{path} holds {len(files)} GGUF files; name the one to loop.")
    if files or (path.suffix == ".gguf" and is_file(path)):
        return _read_gguf(files[0] if files else path)
    folder = find_checkpoint(source)
    _check_type(folder, read_model_type(folder))
    config = _with_defaults(read_json(dict[str, Any], folder / CONFIG, "model configuration"))
    with torch.device("meta"):
        model = LoopedLlama(_as_one_loop(config, str(folder / CONFIG)))
    load_weights_into(model, folder, "cpu", None)
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name not in model.tied}

    def copy_tokenizer(place: Path) -> None:
        for name in BESIDE_WEIGHTS:
            if (folder / name).is_file():
                shutil.copyfile(folder / name, place / name)

    return _Original(config, tensors, copy_tokenizer)


def _read_gguf(file: Path) -> _Original:
    """Read a GGUF file through transformers, which converts the weights to float32."""
    import gguf
    import transformers

    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    with explained(f"{file} cannot be read as a language model"):
        stretched = any(tensor.name == "rope_freqs.weight" for tensor in gguf.GGUFReader(file).tensors)
        with redirect_stderr(StringIO()):  # without progress bars
            model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
        tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
        config = msgspec.json.decode(model.config.to_json_string(use_diff=False))
    _check_type(file, config["model_type"])
    if stretched:
        raise UserError(
            f"{file} stretches its rotary positions by a tensor (rope_freqs), which transformers does not read; take "
            "the model's safetensors instead."
        )
    config = _with_defaults({key: config[key] for key in _OF_GGUF if config.get(key) is not None})
    with torch.device("meta"):
        expected = LoopedLlama(_as_one_loop(config, str(file)))
    stored = model.state_dict()
    tensors = {name: stored[name].contiguous() for name in expected.state_dict() if name not in expected.tied}
    require_finite(tensors, file)
    return _Original(config, tensors, lambda place: tokenizer.save_pretrained(str(place)))


def _check_type(place: Path, kind: str) -> None:
    """Reject a model type that cannot be looped."""
    if kind not in SOURCES:
        raise UserError(f"{place} holds a model of type '{kind}'; what can be looped is {', '.join(SOURCES)}.")


def _with_defaults(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with the original's defaults for missing keys."""
    config = _DEFAULTS | config
    if config["model_type"] == "mistral":
        config.setdefault("sliding_window", MISTRAL_WINDOW)
    rope = config.get("rope_parameters")
    if config.get("rope_theta") is None and not (isinstance(rope, dict) and rope.get("rope_theta") is not None):
        config["rope_theta"] = 10_000.0
    return config


def _as_one_loop(config: Mapping[str, Any], source: str) -> LoopedLlamaConfig:
    """The original's configuration as one loop, with all layers in the core."""
    looping = {"source": config["model_type"], "prelude": 0, "core": config.get("num_hidden_layers", 1), "loops": 1}
    return build(LoopedLlamaConfig, {**config, "model_type": "looped_llama", "looping": looping}, source)


def _renumber_layers(tensors: Mapping[str, Tensor], kept: Sequence[int]) -> dict[str, Tensor]:
    """The tensors without those of dropped layers, with new layer numbers."""
    result = {}
    for name, tensor in tensors.items():
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        if layer is None:
            result[name] = tensor
        elif int(layer[1]) in kept:
            result[f"model.layers.{kept.index(int(layer[1]))}.{name[layer.end() :]}"] = tensor
    return result


def _describe_looped(folder: Path, model: LoopedLlama, original: _Original) -> LoopedCheckpoint:
    """Describe a looped checkpoint, with its costs relative to the original."""
    config, looping, injection = model.config, model.config.looping, model.model.injection
    layers = original.config["num_hidden_layers"]
    layer = sum(parameter.numel() for parameter in model.model.layers[0].parameters())
    head = model.lm_head.weight.numel()
    run = looping.prelude + looping.loops * looping.core + config.coda
    added = 0 if injection is None else injection.weight.numel()
    return LoopedCheckpoint(
        folder=str(folder),
        looping=looping,
        coda=config.coda,
        original_layers=layers,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        original_parameters=sum(tensor.numel() for tensor in original.tensors.values()),
        cost=(run * layer + looping.loops * added + head) / (layers * layer + head),
    )
