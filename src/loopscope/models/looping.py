"""How does an ordinary decoder become a looped model? Its checkpoint is written again, with how its layers are looped.

It reads a Llama, SmolLM, Mistral, Qwen 2 or Qwen 3 in the layout of the Hub, or in a GGUF file through transformers,
and writes a checkpoint of `looped_llama.py`. Nothing is trained here.
"""

import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import torch
from torch import Tensor

from loopscope.arguments import as_count, as_number, as_path, check_flag, check_kind
from loopscope.artifacts import artifact_folder
from loopscope.config import build, plain, read_json
from loopscope.errors import UserError
from loopscope.models.checkpoint import BESIDE_WEIGHTS, check_layers, fill, first_not_finite, save_model
from loopscope.models.configuration import CONFIG, SOURCES, ModelType, require_config
from loopscope.models.hub import find_checkpoint
from loopscope.models.looped_llama import LoopedLlama, LoopedLlamaConfig, Looping
from loopscope.reading import is_file, is_folder, is_there
from loopscope.writing import remove_leftovers, write_json

_DEFAULTS = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "hidden_act": "silu"}
"""What a configuration of the Hub means where it says nothing."""
_WINDOW = 4096
"""The sliding window of a Mistral whose configuration does not say."""
_LEFT_OUT = ("architectures", "auto_map", "layer_types", "_name_or_path")
"""They speak of the original's code, or of all its layers."""
_OF_GGUF = (*LoopedLlamaConfig.__struct_fields__, "dtype", "bos_token_id", "eos_token_id", "pad_token_id")
"""What a configuration that transformers made of a GGUF file is needed for."""


class LoopedCheckpoint(msgspec.Struct, frozen=True):
    """What was made."""

    folder: str
    looping: Looping
    coda: int  # layers that run at every exit
    original_layers: int
    parameters: int
    original_parameters: int
    cost: float  # weights that a full-depth pass multiplies a token with, by the original's


class _Original(NamedTuple):
    config: dict[str, Any]
    layers: int
    tensors: Mapping[str, Tensor]
    copy_beside: Callable[[Path], None]
    """Puts the tokenizer into a folder."""


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
    """Writes the checkpoint `source` (a folder, a name on the Hub, or a GGUF file) to `out` as a looped model.

    The layers in `drop` are left out. Of the others the first `prelude` run once, the next `core` in each of `loops`
    loops, and the rest at every exit; with all layers and no damping, loop 1 is the original model.
    """
    target = as_path(out, "out")
    prelude, core, loops = as_count(prelude, "prelude", 0), as_count(core, "core"), as_count(loops, "loops")
    check_flag(injection, "injection")
    if not 0 < (damping := as_number(damping, "damping")) <= 1:
        raise UserError(f"damping must be above 0 and at most 1 (the plain update), got {damping:g}.")
    if not isinstance(gate, str) or gate not in ("none", "linear"):
        raise UserError(f"There is no gate '{gate}' for a looped decoder; choose none or linear.")
    check_kind(drop, Iterable, "drop", "a list of layers")
    dropped = sorted({as_count(number, "a dropped layer", 0) for number in drop})
    if is_there(target):
        remove_leftovers(target)
        raise UserError(f"{target} is there already; choose another place, or remove it.")
    config, layers, tensors, copy_beside = _read(as_path(source, "A checkpoint's folder or name"), source)
    if outside := [number for number in dropped if number >= layers]:
        raise UserError(f"There is no layer {outside[0]} to drop: the model's {layers} layers are 0 to {layers - 1}.")
    kept = [number for number in range(layers) if number not in dropped]
    if prelude + core > len(kept):
        raise UserError(
            f"A prelude of {prelude} and a core of {core} layers are more than the {len(kept)} layers that are there; "
            "choose fewer."
        )
    parts = {"source": config["model_type"], "prelude": prelude, "core": core, "loops": loops, "dropped": dropped}
    parts |= {"damping": damping, "injection": injection, "gate": gate}
    looping = build(Looping, parts, "how it is looped")
    written = {key: value for key, value in config.items() if key not in _LEFT_OUT}
    written |= {"model_type": "looped_llama", "num_hidden_layers": len(kept), "looping": plain(looping)}
    with torch.device("meta"):
        model = LoopedLlama(build(LoopedLlamaConfig, written, str(source)))
    kept_tensors = _kept(tensors, kept)
    precision = next(iter(kept_tensors.values())).dtype
    looped = {
        name: kept_tensors[name] if name in kept_tensors else torch.zeros(tensor.shape, dtype=precision)
        for name, tensor in model.state_dict().items()
        if name not in model.tied
    }
    with artifact_folder(target, "checkpoint") as scratch:
        write_json(scratch / CONFIG, written)
        save_model(looped, scratch)
        copy_beside(scratch)
    return _described(target, model, tensors, layers)


def _read(path: Path, source: str | Path) -> _Original:
    files: list[Path] = []
    if is_folder(path) and not (path / CONFIG).is_file():
        files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        raise UserError(f"{path} holds {len(files)} GGUF files; name the one to loop.")
    if files or (path.suffix == ".gguf" and is_file(path)):
        return _read_gguf(files[0] if files else path)
    folder = find_checkpoint(source)
    require_config(folder)
    _check_type(folder, read_json(ModelType, folder / CONFIG, "model configuration").model_type)
    config = _explicit(read_json(dict[str, Any], folder / CONFIG, "model configuration"))
    shape = _as_one_loop(config, str(folder / CONFIG))
    check_layers(folder, shape.num_hidden_layers)
    with torch.device("meta"):
        model = LoopedLlama(shape)
    fill(model, folder, "cpu", None)
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name not in model.tied}
    return _Original(config, shape.num_hidden_layers, tensors, lambda place: _copy(folder, place))


def _read_gguf(file: Path) -> _Original:
    """Through transformers, which dequantises the weights; in float32."""
    try:
        import accelerate  # noqa: F401 - transformers asks for it
        import gguf
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError:
        raise UserError("GGUF files are read through transformers; install: pip install 'loopscope[gguf]'.") from None
    try:
        stretched = any(tensor.name == "rope_freqs.weight" for tensor in gguf.GGUFReader(file).tensors)
        with redirect_stderr(StringIO()):  # progress bars
            model = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
        config = msgspec.json.decode(model.config.to_json_string(use_diff=False))
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # no GGUF, one of an unknown model, cut off: each with an error of its own
        reason = " ".join(str(error).split())[:200].rstrip(".") or type(error).__name__
        raise UserError(f"{file} cannot be read as a language model ({reason}).") from None
    _check_type(file, config["model_type"])
    if stretched:
        raise UserError(
            f"{file} stretches its rotary positions by a tensor (rope_freqs), which transformers does not read; take "
            "the model's safetensors instead."
        )
    config = _explicit({key: config[key] for key in _OF_GGUF if config.get(key) is not None})
    shape = _as_one_loop(config, str(file))
    with torch.device("meta"):
        expected = LoopedLlama(shape)
    found = model.state_dict()
    tensors = {name: found[name].contiguous() for name in expected.state_dict() if name not in expected.tied}
    if (wrong := first_not_finite(tensors)) is not None:
        raise UserError(f"In {file} the tensor '{wrong}' holds a value that is not finite; fetch it again.")
    return _Original(config, shape.num_hidden_layers, tensors, lambda place: tokenizer.save_pretrained(str(place)))


def _check_type(place: Path, kind: str) -> None:
    if kind not in SOURCES:
        raise UserError(f"{place} holds a model of type '{kind}'; what can be looped is {', '.join(SOURCES)}.")


def _explicit(config: dict[str, Any]) -> dict[str, Any]:
    """With what the original means where it says nothing."""
    config = _DEFAULTS | config
    if config["model_type"] == "mistral":
        config.setdefault("sliding_window", _WINDOW)
    rope = config.get("rope_parameters")
    if config.get("rope_theta") is None and not (isinstance(rope, dict) and rope.get("rope_theta") is not None):
        config["rope_theta"] = 10_000.0
    return config


def _as_one_loop(config: Mapping[str, Any], source: str) -> LoopedLlamaConfig:
    """The original itself, of which every layer is the core and runs once."""
    layers = config.get("num_hidden_layers", 1)
    looping = {"source": config["model_type"], "prelude": 0, "core": layers, "loops": 1}
    return build(LoopedLlamaConfig, {**config, "model_type": "looped_llama", "looping": looping}, source)


def _kept(tensors: Mapping[str, Tensor], kept: Sequence[int]) -> dict[str, Tensor]:
    """The tensors without those of dropped layers; the others are numbered anew."""
    places = {number: place for place, number in enumerate(kept)}
    found = {}
    for name, tensor in tensors.items():
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        if layer is None:
            found[name] = tensor
        elif int(layer[1]) in places:
            found[f"model.layers.{places[int(layer[1])]}.{name[layer.end() :]}"] = tensor
    return found


def _copy(folder: Path, place: Path) -> None:
    for name in BESIDE_WEIGHTS:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, place / name)


def _described(folder: Path, model: LoopedLlama, original: Mapping[str, Tensor], layers: int) -> LoopedCheckpoint:
    config, looping = model.config, model.config.looping
    layer = sum(parameter.numel() for parameter in model.model.layers[0].parameters())
    head = model.lm_head.weight.numel()
    run = looping.prelude + looping.loops * looping.core + config.coda
    added = sum(part.numel() for part in model.model.injection.parameters()) if model.model.injection else 0
    return LoopedCheckpoint(
        folder=str(folder),
        looping=looping,
        coda=config.coda,
        original_layers=layers,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        original_parameters=sum(tensor.numel() for tensor in original.values()),
        cost=(run * layer + looping.loops * added + head) / (layers * layer + head),
    )
