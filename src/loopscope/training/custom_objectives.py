"""How does a function of the user's become what training minimises?

`objective = "module:function"` names it. Its module is found where Python finds modules, the current folder included,
and its source text enters the run's settings as a hash (`with_source`, which imports nothing): a changed text is
another run. Only training imports it (`load_objective`), and tries it on made-up numbers before anything is written.

Shapes: T loops, B rows.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from msgspec import UNSET

from loopscope.arguments import check_mapping
from loopscope.config import build, digest
from loopscope.errors import UserError, reason
from loopscope.objectives import LoopLosses, Objective, Option

if TYPE_CHECKING:
    import torch
    from torch import Tensor

LossFunction = Callable[[LoopLosses], "Tensor"]
"""The mean loss of a batch."""
GateTraining = Literal["none", "joint", "decoupled"]
"""Whether a gate is trained, and whether what it learns reaches the states that it reads."""
UserFunction = Callable[..., "Tensor"]
"""Of `LoopLosses`, and of the options as keyword arguments: the loss of the batch, or [B] of every row."""


@dataclass(frozen=True)
class CustomObjective:
    settings: Objective
    function: UserFunction
    seed: int

    def __call__(self, loops: LoopLosses) -> Tensor:
        """Its random numbers follow from the run's seed and the step, so a resumed run draws the same ones."""
        import torch
        from torch import Tensor

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(digest([self.seed, loops.step])[:8], 16))
            try:
                loss = self.function(loops, **(self.settings.options or {}))
            except (Exception, SystemExit) as error:
                raise UserError(f"The objective '{self.settings.name}' failed: {reason(error)}.") from error
        rows = loops.cross_entropy.shape[1]
        if not isinstance(loss, Tensor) or not loss.is_floating_point() or loss.shape not in ((), (rows,)):
            got = (
                f"a tensor of shape {list(loss.shape)} and {loss.dtype}"
                if isinstance(loss, Tensor)
                else type(loss).__name__
            )
            raise UserError(
                f"The objective '{self.settings.name}' returned {got}; it must return the loss of the batch, a tensor "
                "with one number, or that of every row [B]."
            )
        if not loss.requires_grad:
            raise UserError(
                f"The loss of the objective '{self.settings.name}' has no gradient; compute it from "
                "loops.cross_entropy or loops.gate_logits, without detach() or item()."
            )
        return loss.mean()


def custom_objective(objective: UserFunction | str, options: Mapping[str, Option] | None = None) -> Objective:
    """The settings that name this function, with these options."""
    if not isinstance(objective, str) and not callable(objective):
        raise UserError(f"An objective is a function, or the name of one, got {type(objective).__name__}.")
    if options is not None:
        check_mapping(options, "options")
    name = objective if isinstance(objective, str) else f"{objective.__module__}:{_name(objective)}"
    if options is not None:
        check_mapping(options, "The options of an objective")
    values = {"name": name} | ({} if options is None else {"options": dict(options)})
    return build(Objective, values, "the objective")


def with_source(objective: Objective, function: UserFunction | None = None) -> Objective:
    """The objective with the hash of its source text, which must be the one that it has already, if it has one."""
    if not objective.is_custom:
        return objective
    found = hashlib.sha256(_source(objective.name, function)[0]).hexdigest()
    if objective.source_sha256 not in (UNSET, found):
        raise UserError(
            f"The source text of the objective '{objective.name}' is not the one that these settings name "
            f"(source_sha256); put it back, or begin another run."
        )
    return msgspec.structs.replace(objective, source_sha256=found)


def load_objective(objective: Objective, seed: int, function: UserFunction | None = None) -> LossFunction:
    """What training minimises; a function of the user's is imported, unless it is given."""
    if not objective.is_custom:
        decoupled = objective.name == "decoupled_gate"
        return lambda loops: objective.loss(
            loops.cross_entropy, loops.detached_gate_logits if decoupled else loops.gate_logits
        )
    text, path = _source(objective.name, function)
    function = function or _imported(objective.name)
    if path is not None and not _is_current(function, text):
        raise UserError(
            f"{path} was changed after Python had imported it, so the objective '{objective.name}' is not what its "
            "source says; start Python again."
        )
    return CustomObjective(objective, function, seed)


def try_objective(
    objective: LossFunction, loops: int, has_gate: bool, steps: int, device: torch.device
) -> GateTraining:
    """Tries it on made-up numbers, at the first step and the last; says how it would train a gate."""
    import torch

    joint = decoupled = False
    for step in (0, steps - 1):
        rows = loops + 2  # not as many as loops: a loss [T] is no loss [B]
        made_up = torch.linspace(2.0, 0.5, loops * rows, device=device).view(loops, rows)
        losses = made_up.clone().requires_grad_()
        halts, detached = ((1 - made_up).requires_grad_() if has_gate else None for _ in range(2))
        loss = objective(LoopLosses(losses, halts, step, detached))
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = [each.grad for each in (losses, halts, detached) if each is not None and each.grad is not None]
        if not all(torch.isfinite(value).all() for value in (loss, *gradients)):
            raise UserError(
                "The objective or its gradient is not finite on cross-entropies from 0.5 to 2 (and halt logits from -1 "
                "to 0.5); mend it."
            )
        joint |= halts is not None and halts.grad is not None
        decoupled |= detached is not None and detached.grad is not None
    return "joint" if joint else "decoupled" if decoupled else "none"


def _name(function: UserFunction) -> str:
    """A name under which a function can be found again, which one without a name of its own has not."""
    name = getattr(function, "__qualname__", "")
    if not name.isidentifier():
        raise UserError(
            f"An objective is a function of a module, and '{name or function!r}' is made inside of something else; "
            "define it at the top of a module, and give it what it needs as options."
        )
    return str(name)


def _source(name: str, function: UserFunction | None) -> tuple[bytes, Path | None]:
    """The text of the function's module and its file; of a function in a notebook its own text, and no file."""
    module = name.partition(":")[0]
    if function is None:
        path = _module_file(name, module)
    else:
        path = getattr(sys.modules.get(module), "__file__", None)
        if path is None:
            try:
                return inspect.getsource(function).encode(), None
            except (OSError, TypeError):
                pass
    if path is None or not path.endswith(".py") or not Path(path).is_file():
        raise UserError(f"The objective '{name}' has no source text; define it in a Python file.")
    return Path(path).read_bytes(), Path(path)


def _module_file(name: str, module: str) -> str | None:
    """Where Python finds a module; of its packages it runs the `__init__`, of the module itself nothing."""
    if "" not in sys.path:  # the current folder, which a script that pip installed does not look into
        sys.path.append("")
    importlib.invalidate_caches()
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):
            raise _not_imported(name, error) from error
        spec = None
    except Exception as error:
        raise _not_imported(name, error) from error
    if spec is None:
        raise UserError(
            f"There is no module '{module}' for the objective '{name}'; it must be in the current folder, in "
            "PYTHONPATH, or installed."
        )
    return spec.origin


def _imported(name: str) -> UserFunction:
    place, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(place)
    except (Exception, SystemExit) as error:
        raise _not_imported(name, error) from error
    if not hasattr(module, attribute):
        there = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == place]
        has = f"it has {', '.join(there)}" if there else "it has no functions"
        raise UserError(f"The module '{place}' has no '{attribute}' to be the objective; {has}.")
    function: Any = getattr(module, attribute)
    if not callable(function):
        raise UserError(f"The objective '{name}' is not a function, but of type {type(function).__name__}.")
    home = getattr(function, "__module__", None)
    if home != place:
        raise UserError(
            f"The objective '{name}' is defined in '{home}', and the source text of '{place}' does not hold it; name "
            "it where it is defined, or write a function there that calls it."
        )
    return function


def _not_imported(name: str, error: BaseException) -> UserError:
    return UserError(f"The module of the objective '{name}' cannot be imported: {reason(error)}.")


def _is_current(function: UserFunction, text: bytes) -> bool:
    """Whether the function is what Python makes of the text now; pytest makes something else of its tests."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    loader = getattr(sys.modules.get(function.__module__), "__loader__", None)
    if code is None or type(loader) is not SourceFileLoader:
        return True
    try:
        return code in set(_compiled(compile(text, code.co_filename, "exec", dont_inherit=True)))
    except SyntaxError:
        return False


def _compiled(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _compiled(constant)
