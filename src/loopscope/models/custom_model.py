"""How does a custom class become a model? `model = "module:Class"`, made with the sizes and options of a run.

LoopScope only makes registered classes, and only the user registers a class: with settings or a study that name it,
with `--with-model module:Class`, or with `register_model`. A class name in a checkpoint's file never imports code.
"""

from dataclasses import fields, replace

import torch
from torch import nn

from loopscope.errors import UserError, reason, reject
from loopscope.models.looped_model import LoopedModel
from loopscope.models.model_settings import ModelSettings, not_registered
from loopscope.user_code import is_user_name, load_code, source_sha256

MODELS: dict[str, type[LoopedModel]] = {}
"""The registered custom classes, by module:Class."""
_SIZES = {"num_loops": "loops", "block_size": "block_size", "vocab_size": "vocab_size"}
"""The attributes of a model that give its sizes, and the keyword arguments for them."""


def register_model(model: str | type[LoopedModel]) -> str:
    """Register a custom class of models, so that LoopScope can train, load, record and run such models.

    Parameters
    ----------
    model
        The class, or its name "module:Class", which LoopScope imports.

    Returns
    -------
    str
        The name of the class for the settings of a run: `model = NAME`.

    Raises
    ------
    UserError
        If the class cannot be imported, or if it is not a `LoopedModel`.

    Examples
    --------
    >>> ls.register_model(Tiny)
    'my_model:Tiny'
    """
    name = model if isinstance(model, str) else f"{model.__module__}:{model.__qualname__}"
    if not is_user_name(name):
        raise UserError(f"'{name}' is no name of a model; define the class in a module, and name it as module:Class.")
    kind = load_code(name, "model", MODELS.get(name) if isinstance(model, str) else model)
    if not (isinstance(kind, type) and issubclass(kind, LoopedModel)):
        raise UserError(f"'{name}' is no looped model; derive it from loopscope.SimpleLoopedModel or LoopedModel.")
    MODELS[name] = kind
    return name


def custom_model(settings: ModelSettings, vocab_size: int, block_size: int) -> LoopedModel:
    """Make the custom model of these settings; its class must be registered, and have the source that they name."""
    name = str(settings.name)
    if name not in MODELS:
        raise not_registered(name)
    register_model(name)  # its source may have changed since
    source_sha256(name, "model", settings.source_sha256 or None, MODELS[name])
    given = {"vocab_size": vocab_size, "block_size": block_size, "loops": settings.loops}
    chosen = {} if settings.gate == "none" else {"gate": settings.gate}
    try:
        model = MODELS[name](**given, **chosen, **(settings.options or {}))
    except (Exception, SystemExit) as error:
        raise UserError(f"The model '{name}' cannot be made: {reason(error)}.") from error
    reject(
        f"The model '{name}' was made with {argument}={given[argument]}, and its {attribute} is "
        f"{getattr(model, attribute, 'not set')}; set self.{attribute} = {argument}."
        for attribute, argument in _SIZES.items()
        if getattr(model, attribute, None) != given[argument]
    )
    if not model.tied:
        model.tied = tied_tensors(model)
    return model


def tied_tensors(model: nn.Module) -> dict[str, str]:
    """The shared tensors of a custom model: the later names of each parameter, with its first name."""
    first: dict[int, str] = {}
    every = model.named_parameters(remove_duplicate=False)
    return {name: other for name, value in every if (other := first.setdefault(id(value), name)) != name}


def looped_parameters(model: LoopedModel) -> list[nn.Parameter]:
    """The parameters that every loop applies again: the block's, or all on which the result of a step depends."""
    block = getattr(model, "block", None)
    if isinstance(block, nn.Module):
        return list(block.parameters())
    parameters = [value for value in model.parameters() if value.requires_grad]
    with torch.enable_grad():
        state = model.begin(torch.zeros((1, 1), dtype=torch.int64))
        tensors = {each.name: getattr(state, each.name) for each in fields(state) if each.name != "layout"}
        before = replace(state, **{name: tensor.detach() for name, tensor in tensors.items()})
        result = model.step(before).hidden.sum()
    gradients = torch.autograd.grad(result, parameters, allow_unused=True)
    return [value for value, gradient in zip(parameters, gradients, strict=True) if gradient is not None]
