"""What is a study? A file that lists runs or checkpoints, what is recorded of and fitted to them, and the products.

A study has parts, one a task or scale. Every `[[parts.runs]]` is the product of its lists: gates x priors x betas x
seeds, or the user's own objectives x gates x seeds. Or it has `[[checkpoints]]`: models that are there already x
benchmarks. docs/studies.md describes the format.
"""

import re
from collections.abc import Mapping
from importlib.resources import files
from itertools import product
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from loopscope.config import Count, NonNegative, Seed, Settings, Tally, build, plain, read_toml
from loopscope.errors import UserError, did_you_mean
from loopscope.exits.risk_target import RiskTarget
from loopscope.models.configuration import GateKind
from loopscope.objectives import BUILT_IN, Objective
from loopscope.questions import BENCHMARKS, benchmark_named
from loopscope.reading import is_file, no_such_toml
from loopscope.studies.external_sources import external_checkpoint, external_data
from loopscope.training.custom_objectives import with_source
from loopscope.training.settings import RunSettings, read_settings

Lambda = Annotated[float, msgspec.Meta(gt=0, lt=1)]
Prior = Literal["uniform", "final"] | Lambda
Target = Annotated[float, msgspec.Meta(gt=0, le=1)]
Name = Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9][A-Za-z0-9._-]*$")]
T = TypeVar("T")
Some = Annotated[tuple[T, ...], msgspec.Meta(min_length=1)]

_RESERVED = ("report", "store")
_MOST_RUNS = 10_000
_LISTED = ("objective", "model.gate", "training.seed")
"""Settings that the lists of `[[parts.runs]]` decide."""


_PRIORS: tuple[Prior, ...] = ("uniform",)
_BETAS = (0.1,)
_USUAL = ("final", "fixed_prior", "learned_gate")
"""Objectives that gate and prior decide."""


class RunGrid(Settings, frozen=True, kw_only=True):
    """Training runs: every combination of the lists. A gate is trained jointly; without one a run has a fixed prior.

    `objective` says where it is otherwise: built-in ones that have a prior, or functions of one's own
    (module:function), which have neither prior nor beta.
    """

    objective: tuple[str, ...] = ()
    gate: Some[GateKind] = ("none",)
    prior: Some[Prior] = _PRIORS  # "uniform", the lambda of a geometric prior, or "final": the last loop only
    beta: Some[NonNegative] = _BETAS  # of runs with a gate
    seed: Some[Seed] = (0,)
    set: tuple[str, ...] = ()  # a.b=c, on top of the part's
    fit: bool = False  # fit the part's post-hoc gates to these trajectories
    extrapolate: bool = False  # record examples harder than those of training, too
    name: Name | None = None  # of a single run; otherwise it is made from what the run is

    def __post_init__(self) -> None:
        if usual := [name for name in self.objective if name in _USUAL]:
            raise ValueError(f"objective does not list '{usual[0]}': gate and prior decide it")
        if len(set(map(_is_built_in, self.objective))) > 1:
            raise ValueError(
                "objective lists built-in ones and functions of one's own; give each kind a [[parts.runs]] of its own"
            )
        if any(not _is_built_in(name) for name in self.objective) and (self.prior, self.beta) != (_PRIORS, _BETAS):
            raise ValueError(
                "prior and beta are of the built-in objectives; a function of one's own takes "
                'set = ["objective.options.NAME=VALUE"]'
            )


def _is_built_in(objective: str) -> bool:
    return objective in BUILT_IN


class Gates(Settings, frozen=True, kw_only=True):
    """The post-hoc gates that are fitted to every trajectory with `fit`."""

    kind: Some[Literal["linear", "mlp"]] = ("linear", "mlp")
    objective: Some[Literal["ponder", "utility"]] = ("ponder", "utility")
    pairing: Literal["next", "ouro"] = "next"
    examples: Count | None = None  # of the train split (default: all)
    steps: Count = 2_000


class Reference(Settings, frozen=True, kw_only=True):
    """The run against whose trajectory (of the same seed) the others of its part are measured."""

    gate: GateKind = "none"
    prior: Prior
    beta: NonNegative = 0.1  # of one with a gate


class StudyPart(Settings, frozen=True, kw_only=True):
    settings: str  # a preset, or a TOML file beside the study's
    name: Name | None = None  # what the names of its runs begin with (default: the task)
    set: tuple[str, ...] = ()
    unseen: bool = False  # count only examples that training did not have
    reference: Reference | None = None
    runs: Some[RunGrid]
    gates: Gates = Gates()
    extrapolation_examples: Count | None = None
    guarantees: tuple[RiskTarget, ...] = ()  # sought for every run; for unseen inputs where the part is


class Checkpoints(Settings, frozen=True, kw_only=True):
    """Checkpoints that are there already, on benchmarks: every model on every benchmark."""

    models: Some[str]  # folders (seen from where the command is run), or ids of the Hub
    benchmarks: Some[str]
    data: str | None = None  # a folder with the benchmarks' files (default: they come from the Hub)
    limit: Count | None = None  # questions of every split (default: all)
    shots: Tally | None = None  # few-shot examples (default: each benchmark's own)
    dtype: Literal["float32", "bfloat16", "float16"] | None = None  # default: as the checkpoint is stored
    shards: Count = 1  # parts in which the test split is scored
    gates: Gates | None = None  # fitted to every trajectory, on the benchmark's own train split
    guarantees: tuple[RiskTarget, ...] = ()  # sought for every model on every benchmark
    latency: tuple[str, ...] = ()  # the benchmarks on which exits are timed
    timed: Count = 100  # questions of each

    def __post_init__(self) -> None:
        for name in (*self.benchmarks, *self.latency):
            if name not in BENCHMARKS:
                hint = did_you_mean(name, BENCHMARKS)
                raise ValueError(f"there is no benchmark '{name}'{hint}; choose one of {', '.join(BENCHMARKS)}")
        if missing := [name for name in self.latency if name not in self.benchmarks]:
            raise ValueError(f"latency has '{missing[0]}', which is not among the benchmarks")


class Study(Settings, frozen=True, kw_only=True):
    title: str
    targets: tuple[Target, ...] = ()  # accuracies (default: 1 point below the model's own at full depth)
    products: tuple[str, ...] = ("paper",)  # names of products, or of groups of them
    parts: tuple[StudyPart, ...] = ()
    checkpoints: tuple[Checkpoints, ...] = ()

    def __post_init__(self) -> None:
        if not self.parts and not self.checkpoints:
            raise ValueError("a study needs [[parts]] with training runs, or [[checkpoints]]")


class StudyRun(Settings, frozen=True, kw_only=True):
    """One training run of a study."""

    name: str
    settings: RunSettings
    objective: str
    gate: GateKind
    prior: Prior | None  # None where the objective is a function of the user's
    beta: NonNegative | None
    seed: Seed
    of: RunGrid


def read_study(source: str) -> tuple[Study, Path]:
    """A study that ships with LoopScope, or one in a file; and the folder that its own files are beside."""
    folder = files("loopscope.studies") / "shipped"
    shipped = sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir())
    path = Path(str(folder / f"{source}.toml")) if source in shipped else Path(source)
    if not is_file(path):
        raise no_such_toml(source, shipped, "study")
    return build(Study, read_toml(path), source), path.parent


def check_study(source: str, overrides: list[str], changes: Mapping[str, Any]) -> tuple[Study, Path]:
    """What `read_study` gives, after every run and checkpoint of it was read, without PyTorch."""
    study, beside = read_study(source)
    if overrides and not study.parts:
        raise UserError(f"'--set {overrides[0]}' changes training runs, and {source} has none.")
    for entry in checkpoints_of(study, changes):
        for model in entry.models:
            external_checkpoint(model)
        for benchmark in () if entry.data is None else entry.benchmarks:
            external_data(str(entry.data), benchmark)
    for part in study.parts:
        runs_of(part, beside, overrides)
    return study, beside


def checkpoints_of(study: Study, changes: Mapping[str, Any]) -> list[Checkpoints]:
    """The checkpoints of a study, with what the command line says in place of what the file says."""
    if changes and not study.checkpoints:
        raise UserError(f"--{next(iter(changes)).rstrip('s')} is of checkpoints, and this study has none.")
    for name in changes.get("benchmarks", ()):
        benchmark_named(name)
    made = []
    for entry in study.checkpoints:
        values = {**plain(entry), **changes}
        timed = [name for name in entry.latency if name in values["benchmarks"]]
        made.append(build(Checkpoints, {**values, "latency": timed}, "the checkpoints"))
    return made


def runs_of(part: StudyPart, beside: Path, overrides: list[str]) -> list[StudyRun]:
    """Every run of a part, in the order of the file; overrides are for what the file's lists do not decide."""
    if decided := [text for text in overrides if text.strip().startswith(_LISTED)]:
        raise UserError(f"'--set {decided[0]}': in a study the lists of its runs decide this; change its file.")
    source = str(beside / part.settings) if is_file(beside / part.settings) else part.settings
    made: list[StudyRun] = []
    for entry in part.runs:
        combinations = _combinations(entry)
        if entry.name is not None and len(combinations) > 1:
            raise UserError(f"'{entry.name}' names {len(combinations)} runs; a name is for one run.")
        if entry.name in _RESERVED:
            raise UserError(f"'{entry.name}' cannot be the name of a run; choose another.")
        for name, gate, prior, beta, seed in combinations:
            if prior is None:
                own = [*entry.set, f"training.seed={seed}", f"model.gate={gate}"]
                changes = [*part.set, f'objective={{name="{name}"}}', *own]
            else:
                changes = [*part.set, *entry.set, *_changes(name, gate, prior, beta, seed)]
            settings = read_settings(source, overrides, of_study=changes)
            objective = with_source(settings.objective)
            settings = msgspec.structs.replace(settings, objective=objective)
            task = part.name or type(settings.task).__name__.lower()
            words = _custom_name(objective, gate, seed) if prior is None else _name(objective, gate, prior, beta, seed)
            made.append(
                StudyRun(
                    name=entry.name or f"{task}-{words}",
                    settings=settings,
                    objective=name,
                    gate=gate,
                    prior=prior,
                    beta=beta,
                    seed=seed,
                    of=entry,
                )
            )
    return made


def usual_objective(gate: GateKind, prior: Prior) -> str:
    """What trains a run whose file names no objective."""
    return "learned_gate" if gate != "none" else "final" if prior == "final" else "fixed_prior"


def _combinations(grid: RunGrid) -> list[tuple[str, GateKind, Prior | None, float | None, int]]:
    count = prod(max(1, len(axis)) for axis in (grid.objective, grid.gate, grid.prior, grid.beta, grid.seed))
    if count > _MOST_RUNS:
        raise UserError(f"The lists of these runs make {count:,} of them; shorten them to {_MOST_RUNS:,} at most.")
    if grid.objective and not _is_built_in(grid.objective[0]):
        return [
            (custom, gate, None, None, seed) for custom, gate, seed in product(grid.objective, grid.gate, grid.seed)
        ]
    every = product(grid.objective or ("",), grid.gate, grid.prior, grid.beta, grid.seed)
    return list(
        dict.fromkeys((o or usual_objective(g, p), g, p, None if g == "none" else b, s) for o, g, p, b, s in every)
    )


def _changes(objective: str, gate: GateKind, prior: Prior, beta: float | None, seed: int) -> list[str]:
    if prior == "final":
        if objective != "final":
            raise UserError(
                f"A run with the objective '{objective}' needs a prior over all loops: 'uniform', or a lambda."
            )
        return [f"training.seed={seed}", "objective.name=final", "model.gate=none"]
    changes = [f"training.seed={seed}", f"objective.name={objective}", f"model.gate={gate}"]
    changes += [] if beta is None else [f"objective.beta={beta}"]
    if prior == "uniform":
        return [*changes, "objective.prior=uniform"]
    return [*changes, "objective.prior=geometric", f"objective.geometric_lambda={prior}"]


def _name(objective: Objective, gate: GateKind, prior: Prior, beta: float | None, seed: int) -> str:
    family = "fixed" if beta is None else f"{gate}-b{beta:g}"
    if objective.name == "decoupled_gate":
        family = f"decoupled-{family}"
    elif objective.name == "random_depth":
        family = f"random-truncated{objective.truncated}" if objective.truncated else "random"
    words = prior if isinstance(prior, str) else f"geometric{prior:g}"
    return f"{words}-{family}-s{seed}"


def _custom_name(objective: Objective, gate: GateKind, seed: int) -> str:
    """By the function's name and its options, with nothing that a folder's name cannot have."""
    options = [f"{key}{value}" for key, value in (objective.options or {}).items()]
    words = [objective.name.partition(":")[2], *options, *([] if gate == "none" else [gate]), f"s{seed}"]
    return re.sub(r"[^\w.-]", "_", "-".join(words))
