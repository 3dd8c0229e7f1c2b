"""Low-rank adapters: PEFT's LoRA on the linear layers of a model, and their merging into its weights."""

from typing import Any

import torch
from torch import nn

from loopscope.errors import UserError
from loopscope.models import LoopedModel


def add_adapters(model: LoopedModel, rank: int, alpha: int, seed: int) -> None:
    """Holds all weights still but the gate's, and gives every linear layer of the model a trainable low-rank part.

    The head is left out (it may be the embedding), and so is the gate. The parts begin at zero, so nothing changes yet.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise UserError("Adapters need PEFT; install it with: pip install 'loopscope[peft]'.") from None
    gate, chosen = getattr(model, "gate", None), adaptable_layers(model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=alpha, target_modules=chosen), model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    if gate is not None:
        gate.requires_grad_(True)


def adaptable_layers(model: LoopedModel) -> list[str]:
    """The names of the linear layers that an adapter may change: all but the head and the gate."""
    gate = getattr(model, "gate", None)
    within = set() if gate is None else {id(each) for each in gate.modules()}
    named = {name for name, each in model.named_modules() if isinstance(each, nn.Linear) and id(each) not in within}
    chosen = sorted(name for name in named if "lm_head" not in name)
    if not chosen:
        raise UserError("The model has no linear layers to adapt; train all of its weights.")
    return chosen


def merge_adapters(model: Any) -> Any:
    """The model with its adapters added to its weights, and no trace of them left."""
    from peft.tuners.lora import LoraLayer

    for name, module in list(model.named_modules()):
        if isinstance(module, LoraLayer):
            module.merge()
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, module.get_base_layer())
    return model
