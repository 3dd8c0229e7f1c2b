"""Checkpoints that somebody else made have no hashes: what is loaded must be what their files say, and be finite.

The answers that a spoilt checkpoint gives are tried, too: weights that are no numbers must not answer.
"""

import json
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import loopscope as ls
from loopscope.models.checkpoint import load_model, weight_files
from loopscope.models.tokenizer import chat_prompt, load_tokenizer

from .runner import Case
from .sealed import held
from .world import World

_CONFIGURED = {
    "ouro": {"num_loops": "total_ut_steps", "vocab_size": "vocab_size", "block_size": "max_position_embeddings"},
    "huginn_raven": {"num_loops": "mean_recurrence", "vocab_size": "vocab_size", "block_size": "block_size"},
    "looped_llama": {"num_loops": "looping.loops", "vocab_size": "vocab_size", "block_size": "max_position_embeddings"},
}
PROMPT = np.array([5, 6, 7])


def _answer(model: Any) -> None:
    """Two tokens, or what every loop says of some."""
    if model.kv_cache and model.num_loops < 50:
        (completion,) = ls.generate(model, [ls.Prompt(0, PROMPT)], max_new_tokens=2)
        assert completion.tokens, "a model says nothing"
    elif model.num_loops < 50:
        with torch.inference_mode():
            model.loops(torch.from_numpy(PROMPT)[None])


def _check_finite(model: Any) -> None:
    finite = (bool(torch.isfinite(tensor).all()) for tensor in model.state_dict().values())
    assert all(finite), "weights that are not finite gave an answer"


def _drawn(world: World, case: Case) -> tuple[str, Path]:
    """A copy of a checkpoint of some kind."""
    places = {**world.golden, "checkpoint": world.checkpoint, "looped": world.looped}
    name = case.rng.choice(list(places))
    return name, case.copy(places[name], "model")


def configuration(world: World, case: Case) -> str:
    _, folder = _drawn(world, case)
    case.spoil(folder / "config.json")
    model = load_model(folder)
    values = json.loads((folder / "config.json").read_bytes(), parse_int=float)  # some integers are no integers
    for ours, theirs in _CONFIGURED[values["model_type"]].items():
        said = reduce(getitem, theirs.split("."), values)
        assert getattr(model, ours) == said, f"{theirs} is not what the configuration says"
    assert max(model.num_loops * 10_000, model.block_size) <= 10**8, "a depth or a length without bound is accepted"
    _answer(model)
    return "other"


def looping(world: World, case: Case) -> str:
    """What is looped has the tensors of its original, and loops as was asked."""
    folder = case.copy(world.llama, "model")
    case.spoil(folder / case.rng.choice(("config.json", "config.json", "model.safetensors")))
    made = ls.loop(folder, case.out, 1, 1, 2, drop=[1])
    model, original = load_model(case.out), {}
    for file in weight_files(folder):
        original |= load_file(file)
    assert (model.num_loops, made.looping.prelude) == (2, 1), "it loops otherwise than was asked"
    _answer(model)
    _check_finite(model)
    for name, tensor in model.state_dict().items():
        theirs = name.replace("layers.1.", "layers.2.")
        if model.tied:
            theirs = theirs.replace("lm_head.", "model.embed_tokens.")
        assert held(original[theirs].to(tensor.dtype)) == held(tensor), f"a tensor is not the original's: {name}"
    return "other"


def weights(world: World, case: Case) -> str:
    name, folder = _drawn(world, case)
    files = sorted((*folder.glob("*.safetensors"), *folder.glob("*.index.json")))
    file = case.rng.choice(files)
    case.spoil(file, [other for other in files if other != file])
    if case.rng.random() < 0.1 and name == "checkpoint":
        case.command("generate", folder, "1 and 2", "--max-new-tokens", 2, "--json")
    model = load_model(folder)
    _answer(model)
    _check_finite(model)
    _check_stored(model, folder)
    return "other"


def _check_stored(model: Any, folder: Path) -> None:
    """Every tensor is that of the file, as the library reads it; where several have one, that of any."""
    stored: dict[str, list[Any]] = {}
    for file in weight_files(folder):
        assert folder.resolve() in file.resolve().parents, "weights from outside the folder are accepted"
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - safe_open is no mapping
                stored.setdefault(name, []).append(tensors.get_tensor(name))
    for name, tensor in model.state_dict().items():
        found = stored.get(name) or stored.get(model.tied.get(name, ""), [])
        alike = any(held(each.to(tensor.dtype)) == held(tensor) for each in found)
        assert alike, f"a tensor is not that of its file: {name}"


TEMPLATES = (
    *("{{ 1 / 0 }}", "{{ raise_exception('\x1b[31mno\nway') }}", "{{ messages[0].content.x.y }}", "{{ 2 ** 10**8 }}"),
    *("{% for i in range(10**8) %}x{% endfor %}", "{{ 'a' * 10**10 }}", "{{ range(10**9) | list }}"),
    *("{{ messages.__class__.__mro__ }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{% for m in messages %}"),
    *(
        "{% include 'x' %}",
        "{{ undefined_function() }}",
        "",
        "{{ '\ud800' }}",
        "{{ [1] + 1 }}",
        "{{ messages | tojson(indent=10**9) }}",
    ),
    *("{{ '%s' * 5 % 1 }}", "{{ messages[7] }}", "{{ {}['x'] }}", "{% set x = namespace(a=1) %}{{ x.b.c }}"),
)


def tokenizer(world: World, case: Case) -> str:
    folder = case.copy(world.checkpoint, "model")
    name = case.rng.choice(("tokenizer.json", "tokenizer_config.json", "generation_config.json", "template"))
    if name == "template":
        path = folder / "tokenizer_config.json"
        values = json.loads(path.read_bytes())
        values["chat_template"] = case.rng.choice(TEMPLATES)
        case.notes.append(f"chat_template = {values['chat_template']!r}")
        path.write_text(json.dumps(values))
    else:
        case.spoil(folder / name)
    if name == "generation_config.json" or case.rng.random() < 0.15:
        chat = ["--chat"] if case.rng.random() < 0.5 else []
        case.command("generate", folder, "1 and 2", "--max-new-tokens", 2, "--json", *chat)
        return "other"
    found = load_tokenizer(folder)
    ids = chat_prompt(found, [{"role": "user", "content": "1 and 2"}])
    assert all(isinstance(token, int) for token in ids), "a chat is not made of tokens"
    return "other"
