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
from .runner import Case, MisledError
from .world import CPU, World

SMALL = 50_000
"""Layers x width x loops x rows x steps that are trained in no time."""
KEYS = (
    *("task.modulus", "task.max_operations", "task.operators", "task.train_examples", "task.name", "task.disjoint"),
    *("task.validation_examples", "task.train_seed", "model.layers", "model.heads", "model.width", "model.loops"),
    *("model.block_size", "model.gate", "model.bias", "model.positions", "objective.name", "objective.prior"),
    *("objective.beta", "objective.geometric_lambda", "objective.options.x", "objective", "training.steps"),
    *("training.batch_size", "training.seed", "training.learning_rate", "training.warmup_steps", "training.beta1"),
    *("training.clip_norm", "training.bf16", "training.log_every", "training.validation_sample", "training", "task"),
    *("model", "x", "", ".", "a..b", "model.loops.x", " training.seed ", "\x1b[31m", "a." * 3_000 + "b"),
)


def check_holds(built: Mapping[Any, Any], said: Mapping[Any, Any]) -> None:
    """Every value of a file is in what was built from it."""
    for key, value in said.items():
        if key not in built:
            raise MisledError(f"a key was ignored: {key}")
        if isinstance(value, Mapping) and isinstance(built[key], Mapping):
            check_holds(built[key], value)
        elif key == "objective" and isinstance(value, str):
            check_holds(built[key], {"name": value})
        elif isinstance(value, list) and isinstance(built[key], list | tuple) and len(value) == len(built[key]):
            check_holds(dict(enumerate(built[key])), dict(enumerate(value)))
        elif plain(value) != built[key] and not _rounds_to(value, built[key]):
            raise MisledError(f"{key} is not what the file says")


def _rounds_to(value: Any, built: Any) -> bool:
    """Whether a whole number of a file became the nearest floating-point number."""
    return isinstance(value, int) and isinstance(built, float) and float(value) == built


def read_toml(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))


def _size(settings: RunSettings) -> float:
    model, training = settings.model, settings.training
    return float(model.layers) * model.width * model.loops * training.batch_size * training.steps


def _check_cost(settings: RunSettings) -> None:
    """What the command line asks before it trains."""
    check_memory(settings, CPU)
    estimate_time(settings, CPU).check()


def run_settings(world: World, case: Case) -> str:
    path = case.copy(world.settings)
    case.spoil(path)
    settings = read_settings(str(path))
    check_holds(plain(settings), read_toml(path))
    _try(case, path, settings)
    return "other"


def _try(case: Case, path: Path, settings: RunSettings, *words: str) -> None:
    _check_cost(settings)
    few = settings.task.train_examples + settings.task.validation_examples + settings.task.test_examples < 10_000
    if _size(settings) < SMALL and few and settings.task.positions < 1_000 and case.rng.random() < 0.3:
        case.command("train", path, "--out", case.out, "--device", "cpu", *words)


def assignment(world: World, case: Case) -> str:
    """`--set`, alone or twice."""
    words = []
    for _ in range(case.rng.choice((1, 1, 2))):
        key = case.rng.choice(KEYS)
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
    check_holds(
        {"value": built}, {"value": {"name": value} if key == "objective" and isinstance(value, str) else value}
    )
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
        raise MisledError("a study without bound is accepted")
    return "other"
