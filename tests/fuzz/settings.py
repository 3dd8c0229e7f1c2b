"""Settings are the user's to change: what was built must hold the value that the file or the assignment says.

What is accepted and small is trained; what is large must be refused by the estimate, as the command line does it.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loopscope.config import plain
from loopscope.studies.plan import make_plan
from loopscope.studies.study_file import expand_study
from loopscope.training.estimate import check_memory, estimate_time
from loopscope.training.settings import RunSettings, read_pretrain_settings, read_settings

from .mutations import STRINGS, toml_text
from .runner import Case, WrongError
from .world import CPU, World

SMALL = 50_000
"""Layers x width x loops x rows x steps that are trained in no time."""
ODD_KEYS = (
    *("objective.options.x", "objective", "training", "task", "model", "x", "", ".", "a..b", "model.loops.x"),
    *(" training.seed ", "\x1b[31m", "a." * 3_000 + "b"),
)


def check_holds(built: Mapping[Any, Any], said: Mapping[Any, Any]) -> None:
    """Every value of a file is in what was built from it."""
    for key, value in said.items():
        if key not in built:
            raise WrongError(f"a key was ignored: {key}")
        if isinstance(value, Mapping) and isinstance(built[key], Mapping):
            check_holds(built[key], value)
        elif key == "objective" and isinstance(value, str):
            check_holds(built[key], {"name": value})
        elif isinstance(value, list) and isinstance(built[key], list | tuple) and len(value) == len(built[key]):
            check_holds(dict(enumerate(built[key])), dict(enumerate(value)))
        elif built[key] not in (plain(value), float(value) if isinstance(value, int) else value):
            raise WrongError(f"{key} is not what the file says")


def read_toml(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))


def run_settings(world: World, case: Case) -> str:
    path = case.copy(world.settings)
    case.spoil(path)
    settings = read_settings(str(path))
    check_holds(plain(settings), read_toml(path))
    _try(case, path, settings)
    return "other"


def _try(case: Case, path: Path, settings: RunSettings, *words: str) -> None:
    """What the command line asks before it trains; then what is small is trained."""
    check_memory(settings, CPU)
    estimate_time(settings, CPU).check()
    task, model, training = settings.task, settings.model, settings.training
    size = float(model.layers) * model.width * model.loops * training.batch_size * training.steps
    few = task.train_examples + task.validation_examples + task.test_examples < 10_000 and task.positions < 1_000
    if size < SMALL and few and case.rng.random() < 0.3:
        case.command("train", path, "--out", case.out, "--device", "cpu", *words)


def assignment(world: World, case: Case) -> str:
    """`--set`, alone or twice."""
    words, known = [], [f"{table}.{key}" for table, keys in read_toml(world.settings).items() for key in keys]
    for _ in range(case.rng.choice((1, 1, 2))):
        key = case.rng.choice((*known, *ODD_KEYS))
        value = case.rng.choice((toml_text(case.rng), toml_text(case.rng), case.rng.choice(STRINGS)))
        words.append(case.rng.choice((f"{key}={value}", f"{key}={value}", f"{key} = {value}", value, key)))
    case.notes.append(f"--set {[word[:200] for word in words]!r}")
    settings = read_settings(str(world.settings), words)
    built = plain(settings)
    key, _, text = (part.strip() for part in words[-1].partition("="))
    for part in key.split("."):
        built = built[part]
    try:
        said = tomllib.loads(f"value = {text}")
        value = said["value"] if len(said) == 1 else text
    except tomllib.TOMLDecodeError:
        value = text
    if key == "objective" and isinstance(value, str):
        value = {"name": value}
    check_holds({"value": built}, {"value": value})
    _try(case, world.settings, settings, *(each for word in words for each in ("--set", word)))
    return "other"


def pretrain_settings(world: World, case: Case) -> str:
    path = case.copy(world.language_settings)
    case.spoil(path)
    settings = read_pretrain_settings(path, [])
    check_holds(plain(settings), read_toml(path))
    return "other"


def study_file(world: World, case: Case) -> str:
    path = case.copy(world.study)
    case.spoil(path)
    if case.rng.random() < 0.1:
        where = ("--store", case.out, "--out", case.folder / "out" / "study", "--device", "cpu")
        case.command("study", case.rng.choice(("plan", "status")), path, *where, "--json")
    plan = make_plan(expand_study(str(path)))
    check_holds(plain(plan.study), read_toml(path))
    if len(plan.models) > 10_000:
        raise WrongError("a study without bound is accepted")
    return "other"
