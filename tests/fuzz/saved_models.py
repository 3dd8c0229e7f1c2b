"""A model folder as transformers saved it, with its exit policy and its model card: what is read of it is what it says.

The policy is the model's, or is refused; the card is the user's, and what LoopScope did not write of it stays.
"""

import json
import os
import traceback
import warnings
from codecs import BOM_UTF8
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import loopscope as ls
from loopscope.errors import UserError
from loopscope.integrations.transformers.saved_policy import CARD
from loopscope.models.checkpoint_folder import GENERATION, POLICY, named_exits

from .mutations import STRINGS
from .runner import Case, RefusedError, check_length, check_text
from .sealed import files_of
from .world import World

_PROMPT = torch.tensor([[5, 6, 7]])
_NAMED = ("policy.json", "../policy.json", "/etc/hostname", POLICY, f"./{POLICY}", "config.json", ".", "", "/dev/null")
_SCHEMES = ({"quant_method": "bitsandbytes"}, {"quant_method": "no such"}, {}, {"bits": 4}, None, "int8", [])
OURS = "<!-- loopscope: begins -->"


def _load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    import loopscope.integrations.transformers  # noqa: F401

    return AutoModelForCausalLM.from_pretrained(folder)


@contextmanager
def _refusals_of_transformers() -> Iterator[None]:
    """What transformers says of its own files is its own; an error of ours is a sentence."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        innermost = traceback.extract_tb(error.__traceback__)[-1].filename
        if f"{os.sep}loopscope{os.sep}" in innermost:
            raise
        raise RefusedError(str(error)) from None


def saved_model(world: World, case: Case) -> str:
    """With a policy that a file of the folder names, transformers and the command line write the same tokens."""
    folder = case.copy(world.saved_models[case.rng.choice(sorted(world.saved_models))], "model")
    kind = case.rng.choice(("any", "generation", "generation", "policy", "policy", "named", "scheme"))
    if kind in ("named", "scheme"):
        file, key = (GENERATION, "policy") if kind == "named" else ("config.json", "quantization_config")
        values = json.loads((folder / file).read_bytes())
        values[key] = case.rng.choice((*_NAMED, *STRINGS) if kind == "named" else _SCHEMES)
        case.notes.append(f"{key} = {str(values[key])[:200]!r}")
        (folder / file).write_text(json.dumps(values))
    else:
        of_policy = sorted((folder / POLICY).parent.iterdir())
        chosen = {"generation": [folder / GENERATION], "policy": of_policy}.get(kind, files_of(folder))
        case.spoil(case.rng.choice(chosen))
    if case.rng.random() < 0.3:
        case.command("generate", folder, "1 and 2", "--max-new-tokens", 2, "--json", "--device", "cpu")
        return "other"
    policy = None if (file := named_exits(folder).policy) is None else ls.ExitPolicy.load(file)
    if case.rng.random() < 0.4:
        model = ls.load_model(folder)
        assert ls.generate(model, [ls.Prompt(0, _PROMPT[0].numpy())], policy, max_new_tokens=2)[0].tokens
        return "other"
    with _refusals_of_transformers():
        model = _load(folder)
        options = {"attention_mask": torch.ones_like(_PROMPT), "max_new_tokens": 2, "do_sample": False}
        written = model.generate(_PROMPT, **options)
    assert written.shape[1] > _PROMPT.shape[1], "a model says nothing"
    assert (model.exit_policy is None) == (policy is None), "a policy is lost, or invented"
    return "other"


def model_card(world: World, case: Case) -> str:
    """A model is saved beside a card that is there: what stands before the section of ours stays, or all of it does."""
    folder = case.copy(world.saved_models["by-hand"], "model")
    card = folder / CARD
    case.spoil(card, writes=True)
    before = card.read_bytes() if card.is_file() and card.stat().st_mode & 0o400 else b""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        good_model(world).save_pretrained(folder)
    said = [str(each.message) for each in warned if "model card" in str(each.message)]
    for message in said:
        check_length(message)
        check_text(message)
    if said:
        assert not card.is_file() or card.read_bytes() == before, "a card was changed, and is said not to be"
        return "refused"
    after = card.read_bytes()
    assert OURS.encode() in after, "the card has no section"
    head = before.removeprefix(BOM_UTF8).partition(OURS.encode())[0].rstrip()
    assert after.replace(b"\r\n", b"\n").startswith(head.replace(b"\r\n", b"\n")), "what the user wrote is lost"
    return "other"


_MODELS: dict[Path, Any] = {}


def good_model(world: World) -> Any:
    """The model of the good folder, loaded once."""
    folder = world.saved_models["by-hand"]
    if folder not in _MODELS:
        _MODELS[folder] = _load(folder)
    return _MODELS[folder]
