"""How does a custom task join? As `module:Class`, a subclass of `Task`, with its own options.

Settings name the class, and hold the hash of its module's source. `load_task` imports the class, and tries it on a few
examples of every level before a model is trained or recorded. A checkpoint's file that names a class never makes
LoopScope run its code (`task_of_run` in `training/run_folder.py`).

Shapes: N examples, M tokens.
"""

from collections.abc import Iterator
from functools import lru_cache
from itertools import islice

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from loopscope.config import Option, build, digest
from loopscope.errors import UserError, reason, reject
from loopscope.tasks.examples import Draws, Examples, Integers, fingerprints
from loopscope.tasks.task import Splits, Task, are_integers
from loopscope.user_code import load_code, source_sha256

_CONTRACT = ("symbols", "levels", "length", "draw_inputs", "answers")
_TRIED_LEVELS = 50
_TRIED_EXAMPLES = 200


class CustomTask(Splits, frozen=True, kw_only=True):
    """Describe a custom task; `load_task` makes the task from these settings.

    Parameters
    ----------
    name
        The class of the custom task, as module:Class.
    options
        The settings of the custom task.
    source_sha256
        The hash of the module with the class; LoopScope adds this hash when the run begins.
    """

    name: str
    options: dict[str, Option] | UnsetType = UNSET
    source_sha256: str | UnsetType = UNSET


def with_task_source(custom: CustomTask) -> CustomTask:
    """The settings with the hash of the task module's source, which must equal the hash in the settings, if any."""
    recorded = None if custom.source_sha256 is UNSET else custom.source_sha256
    return msgspec.structs.replace(custom, source_sha256=source_sha256(custom.name, "task", recorded))


def load_task(custom: CustomTask) -> Task:
    """Import a custom task, whose source must be the one that the settings recorded, and try it on a few examples."""
    with_task_source(custom)
    kind = load_code(custom.name, "task")
    if not (isinstance(kind, type) and issubclass(kind, Task)):
        raise UserError(f"'{custom.name}' is no task: it must be a subclass of loopscope.Task.")
    splits = {name: getattr(custom, name) for name in Splits.__struct_fields__}
    options = {} if custom.options is UNSET else custom.options
    if clash := [name for name in options if name in splits]:
        raise UserError(f"{clash[0]} is a setting of every task; set task.{clash[0]} in place of an option.")
    task = build(kind, {**options, **splits}, f"task.options of '{custom.name}'")
    try:
        hash(task)
    except TypeError:
        raise UserError(
            f"Fields of '{custom.name}' must be numbers, words, true or false, or tuples of them."
        ) from None
    reject(_first_contract_violation(custom.name, task))
    return task


def examples_sha256(task: Task) -> str:
    """A hash of a few examples of every level: it stays the same while the task draws and answers the same."""
    examples = task.draw(Draws(0), _difficulties_to_try(task.levels))
    return digest([array.tolist() for array in (fingerprints(examples), examples.labels, examples.difficulty)])


@lru_cache
def _first_contract_violation(name: str, task: Task) -> list[str]:
    """Return the first violation of the task contract, as a sentence; an empty list if there is none."""
    try:
        with np.errstate(all="ignore"):
            return [f"The task '{name}' does not fit its contract: {problem}." for problem in islice(_flaws(task), 1)]
    except UserError as error:
        return [str(error)]
    except (Exception, SystemExit) as error:
        return [f"The task '{name}' failed: {reason(error)}."]


def _flaws(task: Task) -> Iterator[str]:
    """Yield the violations of the task contract, on examples that are drawn and answered several times.

    The caller takes only the first: later ones may follow from it, or fail because of it.
    """
    if missing := [name for name in _CONTRACT if getattr(type(task), name) is getattr(Task, name)]:
        yield f"it lacks {', '.join(missing)}"
    symbols, levels = task.symbols, task.levels
    written = [symbol for symbol in symbols if isinstance(symbol, str) and symbol and not any(map(str.isspace, symbol))]
    if not symbols or len({*written}) < len(symbols) or (not task.separator and max(map(len, written)) > 1):
        yield f"symbols must be different {'words' if task.separator else 'characters'} without spaces, got {symbols}"
    if not isinstance(levels, range) or not levels or levels.step != 1 or levels.start < 0:
        yield f"levels must be a range of whole numbers from 0 up, such as range(1, 9), got {levels}"
    difficulty = _difficulties_to_try(levels)
    lengths = task.length(difficulty)
    if not are_integers(lengths, difficulty.shape) or lengths.min() < 3:
        yield "length must return whole numbers from 3 up (begin, an input, the marker), one for each difficulty [N]"
    if lengths.tolist() != [task.length(level) for level in difficulty.tolist()]:
        yield "length says something else of a difficulty alone than among others"
    if task.hardest is None and task.length(levels[-1] + 1) <= lengths.max():
        yield "inputs do not get longer beyond the last level; `hardest` must say which difficulty is the last"
    first, again, other = (task.draw(Draws(seed), difficulty) for seed in (0, 0, 1))
    if not _have_same_inputs_and_labels(first, again):
        yield "the same draws gave other examples; draw_inputs may take random numbers from `draws` alone, answers none"
    if np.array_equal(fingerprints(first), fingerprints(other)):
        yield "every seed gives the same inputs; draw_inputs must take its random numbers from `draws`"
    for level in np.unique(difficulty):
        alone = first.take(first.difficulty == level)
        if not np.array_equal(task.answers(alone.tokens, alone.lengths), alone.labels):
            yield "an answer depends on other rows, or on what stands beyond a row's end (`lengths` says where it ends)"
        found = task.difficulties(alone.tokens, alone.lengths)
        if not are_integers(found, alone.lengths.shape) or (found != level).any():
            yield f"difficulties says {np.unique(found).tolist()} of inputs that were drawn with difficulty {level}"


def _have_same_inputs_and_labels(first: Examples, again: Examples) -> bool:
    """Whether two draws of examples have the same inputs and labels."""
    return np.array_equal(fingerprints(first), fingerprints(again)) and np.array_equal(first.labels, again.labels)


def _difficulties_to_try(levels: range) -> Integers:
    """[N] the difficulties on which the task is tried, from the first level to the last, easiest first."""
    some = np.unique(np.linspace(levels[0], levels[-1], _TRIED_LEVELS).astype(np.int64))
    return np.repeat(some, -(-_TRIED_EXAMPLES // len(some)))
