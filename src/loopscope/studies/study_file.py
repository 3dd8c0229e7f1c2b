"""What is a study? A file that lists runs or checkpoints, what is recorded of and fitted to them, and the products.

A study has parts, one a task or scale. Every `[[parts.runs]]` is the product of its lists: gates x priors x betas x
seeds, or the user's own objectives x gates x seeds. Or it has `[[checkpoints]]`: models that are there already x
benchmarks. `expand_study` writes all lists out, once and without PyTorch. docs/how-to/studies.md describes the format.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import product
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from loopscope.analysis.results import architecture_words
from loopscope.artifacts import sha256
from loopscope.certify.risk_target import AUTO, RiskTarget
from loopscope.config import Count, NonNegative, Seed, Settings, Tally, build, digest, plain, read_toml, require_values
from loopscope.errors import UserError, did_you_mean
from loopscope.files import is_file, is_folder, no_folder, no_such_toml
from loopscope.models.checkpoint_folder import CONFIG, require_config, weight_files
from loopscope.models.model_settings import GateKind
from loopscope.questions import BENCHMARKS
from loopscope.readouts.readout import needs_labels
from loopscope.training.settings import (
    ACT,
    BUILT_IN,
    GATE_CHANNELS,
    WITH_PRIOR,
    Channels,
    Objective,
    RunSettings,
    Share,
    read_settings,
    with_sources,
)
from loopscope.user_code import is_user_name

Lambda = Annotated[float, msgspec.Meta(gt=0, lt=1)]
Prior = Lambda | str | tuple[Share, ...]
"""The lambda of a geometric prior, "uniform", "final", module:function, or the weights of all loops."""
Target = Annotated[float, msgspec.Meta(gt=0, le=1)]
Name = Annotated[str, msgspec.Meta(pattern="^(?!(report|store)$)[A-Za-z0-9][A-Za-z0-9._-]*$")]
T = TypeVar("T")
Some = Annotated[tuple[T, ...], msgspec.Meta(min_length=1)]
Shards = Annotated[int, msgspec.Meta(ge=1, le=1_000)]

_MAX_RUNS = 10_000
_HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+(@[\w.-]+)?")
_TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "vocab.json", "merges.txt")
_LISTED = ("objective", "model.gate", "training.seed")
"""Settings that the lists of `[[parts.runs]]` decide."""
_PRIORS: tuple[Prior, ...] = ("uniform",)
_BETAS = (0.1,)
_JOINT = (1.0,)
_PRIOR_NAMES = ("uniform", "final")
_USUAL = ("final", "fixed_prior", "learned_gate", GATE_CHANNELS)
"""Objectives that gate, prior, gate_weight and gate_gradient decide."""
_Combination = tuple[str, GateKind, Prior | None, float | None, Channels | None, int]
"""The objective, the gate, the prior, beta, how far the gate shapes the trunk, and the seed."""


class RunGrid(Settings, frozen=True, kw_only=True):
    """List training runs: every combination of the lists.

    Gates are trained jointly with the model; runs without a gate have a fixed prior. If `gate_weight` and
    `gate_gradient` are 1, training is joint; if both are 0, the gate is decoupled.

    Parameters
    ----------
    objective
        Objectives to train with (default: the objective that `gate` and `prior` determine): built-in names, or custom
        functions as module:function. Custom functions have neither prior nor beta.
    gate
        Gates: "none", "linear", "mlp".
    prior
        Priors: the lambda of a geometric prior, "uniform", "final", module:function, or a list of weights.
    beta
        Weights of the KL term in the loss, only for runs with a gate; for `act`, prices of a loop.
    gate_weight
        The gate's shares of the trunk's loss weights, only for runs with a gate.
    gate_gradient
        Shares of the gate's gradient that reach the trunk, only for runs with a gate.
    seed
        Random seeds of the runs.
    set
        Changes of settings as a.b=c, applied after the changes of the part.
    fit
        Whether to fit the gates of the part to the trajectories of the listed runs.
    extrapolate
        Whether to also record examples that are harder than the training examples.
    name
        The name of the run, if the lists describe a single run (default: made from its settings).
    """

    objective: tuple[str, ...] = ()
    gate: Some[GateKind] = ("none",)
    prior: Some[Prior] = _PRIORS
    beta: Some[NonNegative] = _BETAS
    gate_weight: Some[Share] = _JOINT
    gate_gradient: Some[Share] = _JOINT
    seed: Some[Seed] = (0,)
    set: tuple[str, ...] = ()
    fit: bool = False
    extrapolate: bool = False
    name: Name | None = None

    def __post_init__(self) -> None:
        custom = {name for name in self.objective if name not in BUILT_IN}
        decided = ", ".join(name for name in self.objective if name in _USUAL)
        with_prior, usual = self.objective or {*self.gate} != {"none"}, (self.prior, self.beta) == (_PRIORS, _BETAS)
        named = [prior for prior in self.prior if isinstance(prior, str)]
        unknown = [prior for prior in named if prior not in _PRIOR_NAMES and not is_user_name(prior)]
        is_joint = self.gate_weight == self.gate_gradient == _JOINT
        require_values(
            (not decided, f"objective does not list '{decided}': gate, prior, gate_weight and gate_gradient decide it"),
            (is_joint or not self.objective, "gate_weight and gate_gradient are of runs without a list of objectives"),
            (custom in (set(), {*self.objective}), "give a custom objective a [[parts.runs]] of its own"),
            (usual or not custom, "prior and beta are of the built-in objectives; a custom one has objective.options"),
            (not with_prior or "final" not in self.prior, "this objective needs a prior over all loops"),
            (not unknown, f"there is no prior '{', '.join(unknown)}'; docs/how-to/studies.md lists what a prior is"),
            (
                ACT not in self.objective or self.prior == _PRIORS,
                "act has no prior; give it a [[parts.runs]] of its own",
            ),
        )


class Gates(Settings, frozen=True, kw_only=True):
    """Set the gates that are fitted to the trajectories of runs with `fit`: every combination of the lists.

    Parameters
    ----------
    kind
        Kinds of gates to fit.
    objective
        Objectives of the gates.
    pairing
        The step that the objective `utility` judges, as in the settings of a fitted gate.
    examples
        The number of examples of the train split to which the gates are fitted (default: all).
    steps
        The number of optimizer steps.
    """

    kind: Some[Literal["linear", "mlp"]] = ("linear", "mlp")
    objective: Some[Literal["ponder", "utility"]] = ("ponder", "utility")
    pairing: Literal["next", "ouro"] = "next"
    examples: Count | None = None
    steps: Count = 2_000


class Reference(Settings, frozen=True, kw_only=True):
    """Select runs of a part by their training settings.

    Parameters
    ----------
    gate
        The gate of the runs.
    prior
        The prior of the runs, as in `[[parts.runs]]`.
    beta
        The weight of the KL term in the loss; only for runs with a gate.
    """

    gate: GateKind = "none"
    prior: Prior
    beta: NonNegative = 0.1


class StudyPart(Settings, frozen=True, kw_only=True):
    """Describe the runs of one task or one scale.

    Parameters
    ----------
    settings
        A preset, or a TOML file in the folder of the study's file.
    name
        The prefix of the names of the part's runs (default: the task).
    set
        Changes of settings as a.b=c.
    unseen
        Whether to count only examples that are not in the training data.
    reference
        The run with whose trajectory the report compares the other runs of the same seed.
    latency
        The runs whose exits LoopScope times, at every seed.
    runs
        The tables `[[parts.runs]]`.
    gates
        The table of gates to fit.
    extrapolation_examples
        The number of harder examples that runs with `extrapolate` record (default: the size of the test split).
    guarantees
        Tables of guarantees to calibrate for every run.
    """

    settings: str
    name: Name | None = None
    set: tuple[str, ...] = ()
    unseen: bool = False
    reference: Reference | None = None
    latency: tuple[Reference, ...] = ()
    runs: Some[RunGrid]
    gates: Gates = Gates()
    extrapolation_examples: Count | None = None
    guarantees: tuple[RiskTarget, ...] = ()

    def __post_init__(self) -> None:
        _check_guarantees(self.guarantees)


class Checkpoints(Settings, frozen=True, kw_only=True):
    """List existing checkpoints and benchmarks: every model runs on every benchmark.

    Parameters
    ----------
    models
        Folders of checkpoints (relative to the working folder), or names on the Hub.
    benchmarks
        Names of benchmarks.
    data
        A folder with the benchmarks' files (default: download them from the Hub).
    limit
        The maximum number of questions per split (default: all).
    shots
        The number of few-shot examples per question (default: each benchmark's own number).
    dtype
        The precision (default: as the checkpoint is stored).
    shards
        The number of parts into which the test split is divided for recording.
    gates
        Gates to fit to every trajectory, on the train split of the benchmark (default: none).
    guarantees
        Tables of guarantees to calibrate for every model on every benchmark.
    latency
        The benchmarks on which LoopScope times exits.
    timed
        The number of questions to time on each benchmark of `latency`.
    """

    models: Some[str]
    benchmarks: Some[str]
    data: str | None = None
    limit: Count | None = None
    shots: Tally | None = None
    dtype: Literal["float32", "bfloat16", "float16", "int8"] | None = None
    shards: Shards = 1
    gates: Gates | None = None
    guarantees: tuple[RiskTarget, ...] = ()
    latency: tuple[str, ...] = ()
    timed: Count = 100

    def __post_init__(self) -> None:
        _check_guarantees(self.guarantees)
        for name in (*self.benchmarks, *self.latency):
            unknown = f"there is no benchmark '{name}'{did_you_mean(name, BENCHMARKS)}; choose one of "
            require_values(
                (name in BENCHMARKS, unknown + ", ".join(BENCHMARKS)),
                (name in self.benchmarks, f"latency has '{name}', which is not among the benchmarks"),
            )


def _check_guarantees(guarantees: Sequence[RiskTarget]) -> None:
    """Reject a guarantee for the oracle in a study, because the oracle needs labels."""
    known = all(target.readout == AUTO or not needs_labels(target.readout) for target in guarantees)
    require_values((known, "the oracle needs the labels, so it cannot be guaranteed; choose another readout"))


class Study(Settings, frozen=True, kw_only=True):
    """Describe a study: runs or checkpoints, and the products of its report.

    Parameters
    ----------
    title
        The title of the study.
    targets
        The target accuracies at which the report compares depths (default: 1 percentage point below each model's
        full-depth accuracy).
    products
        Names of tables and figures of the report, or names of groups of tables and figures.
    parts
        The tables `[[parts]]`.
    checkpoints
        The tables `[[checkpoints]]`.
    transfer
        Names or patterns of runs, such as `mano-*-s0`; LoopScope replays the exit rules of each run on the other runs.
    """

    title: str
    targets: tuple[Target, ...] = ()
    products: tuple[str, ...] = ("paper",)
    parts: tuple[StudyPart, ...] = ()
    checkpoints: tuple[Checkpoints, ...] = ()
    transfer: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require_values((self.parts or self.checkpoints, "a study needs [[parts]] with runs, or [[checkpoints]]"))


class ExternalSource(Settings, frozen=True, kw_only=True):
    """A checkpoint or data from outside the store: its place and its hash.

    A folder is told by the hashes of its files, wherever it lies; what comes from the Hub by its id, and by its
    revision where the study pins one (`ByteDance/Ouro-1.4B@0123abc`).
    """

    source: str
    identity: str

    @property
    def name(self) -> str:
        """How a reader knows it: the last part of its folder's name or its id."""
        return Path(self.source).name.partition("@")[0]


@dataclass(frozen=True)
class StudyRun:
    """One training run of a study: name, settings, seed."""

    name: str
    settings: RunSettings
    prior: Prior | None  # None where the objective is a function of the user's
    beta: float | None
    of: RunGrid

    @property
    def seed(self) -> int:
        return self.settings.training.seed


@dataclass(frozen=True)
class StudyCheckpoint:
    """One checkpoint of a study on one benchmark."""

    checkpoint: ExternalSource
    benchmark: str
    data: ExternalSource | None
    of: Checkpoints


@dataclass(frozen=True)
class ExpandedStudy:
    """A study with every run and checkpoint listed."""

    source: str
    study: Study
    runs: list[list[StudyRun]]  # of every part
    checkpoints: list[StudyCheckpoint]


def expand_study(source: str, overrides: Sequence[str] = (), changes: Mapping[str, Any] | None = None) -> ExpandedStudy:
    """Read a study, from a file or shipped with LoopScope, and list all of its runs and checkpoints.

    `a.b=c` overrides change every run, `changes` (models, benchmarks, data, limit, dtype) all checkpoints.
    """
    folder = files("loopscope.studies") / "shipped"
    shipped = sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir())
    path = Path(str(folder / f"{source}.toml")) if source in shipped else Path(source)
    if not is_file(path):
        raise no_such_toml(source, shipped, "study")
    study = build(Study, read_toml(path), source)
    listed = [text for text in overrides if text.strip().startswith(_LISTED)]
    if overrides and not study.parts:
        raise UserError(f"'--set {overrides[0]}' changes training runs, and {source} has none.")
    if listed:
        raise UserError(f"'--set {listed[0]}': in a study the lists of its runs decide this; change its file.")
    if changes and not study.checkpoints:
        raise UserError(f"--{next(iter(changes)).rstrip('s')} is of checkpoints, and this study has none.")
    checkpoints = [found for entry in study.checkpoints for found in _checkpoints_of(entry, changes or {})]
    runs = [_runs_of(part, path.parent, overrides) for part in study.parts]
    return ExpandedStudy(source, study, runs, checkpoints)


def _checkpoints_of(entry: Checkpoints, changes: Mapping[str, Any]) -> list[StudyCheckpoint]:
    """List every checkpoint on every benchmark; options of the command line replace settings of the file."""
    values = {**plain(entry), **changes}
    timed = [name for name in entry.latency if name in values["benchmarks"]]
    entry = build(Checkpoints, {**values, "latency": timed}, "the checkpoints")
    models = [_external_checkpoint(model) for model in entry.models]
    data = {name: None if entry.data is None else _external_data(entry.data, name) for name in entry.benchmarks}
    return [StudyCheckpoint(model, name, data[name], entry) for model, name in product(models, entry.benchmarks)]


def _external_checkpoint(model: str) -> ExternalSource:
    """A checkpoint from a folder or the Hub, with its hash."""
    folder = Path(model)
    if is_folder(folder):
        require_config(folder)
        tokenizer = (file for kind in _TOKENIZER_FILES for file in folder.glob(kind))
        files = {folder / CONFIG, *weight_files(folder), *tokenizer}
        if missing := sorted(file.name for file in files if not file.is_file()):
            raise UserError(f"The checkpoint in {folder} lacks the file {missing[0]}; fetch or make it again.")
        return ExternalSource(source=str(folder.resolve()), identity=_hash_files(folder, files))
    if not _HUB_ID.fullmatch(model) or is_folder(Path(folder.parts[0])):
        raise no_folder(folder, "the folder of a checkpoint, or an id such as ByteDance/Ouro-1.4B")
    return ExternalSource(source=model, identity=model)


def _external_data(folder: str, benchmark: str) -> ExternalSource:
    """The local files of a benchmark, with their hash."""
    place = Path(folder) / benchmark
    files = {file for file in place.rglob("*") if file.is_file()}
    if not files:
        raise UserError(
            f"There are no files of {benchmark} in {place}; docs/how-to/benchmarks.md shows the layout of --data."
        )
    return ExternalSource(source=str(Path(folder).resolve()), identity=_hash_files(place, files))


def _hash_files(folder: Path, files: set[Path]) -> str:
    """The hash of some files of a folder."""
    return digest({str(file.relative_to(folder)): sha256(file) for file in files})


def _runs_of(part: StudyPart, beside: Path, overrides: Sequence[str]) -> list[StudyRun]:
    """List every run of a part of a study, in the file's order, with overrides for single settings."""
    source = str(beside / part.settings) if is_file(beside / part.settings) else part.settings
    runs: list[StudyRun] = []
    for entry in part.runs:
        for name, gate, prior, beta, channels, seed in _grid_combinations(entry):
            decided = [f"training.seed={seed}", f"model.gate={gate}"]
            if prior is None:
                decided += [] if beta is None else [f"objective.beta={beta}"]
                changes = [f'objective={{name="{name}"}}', *entry.set, *decided]
            else:
                changes = [*entry.set, *decided, *_objective_overrides(name, prior, beta, channels)]
            settings = with_sources(read_settings(source, overrides, of_study=[*part.set, *changes]))
            task = part.name or settings.task_name.rpartition(":")[2].lower()
            words = [task, *architecture_words(plain(settings.model))]
            words.append(_run_name(settings.objective, gate, prior, beta, seed))
            made = entry.name or re.sub(r"[^\w.-]", "_", "-".join(words))
            runs.append(StudyRun(made, settings, prior, beta, entry))
    return runs


def usual_objective(gate: GateKind, prior: Prior) -> str:
    """The usual objective for a gate and a depth prior."""
    return "learned_gate" if gate != "none" else "final" if prior == "final" else "fixed_prior"


def _grid_combinations(grid: RunGrid) -> list[_Combination]:
    """Every combination of the lists in a grid of runs."""
    axes = (grid.gate, grid.prior, grid.beta, grid.gate_weight, grid.gate_gradient, grid.seed)
    count = prod(map(len, axes)) * max(1, len(grid.objective))
    if count > _MAX_RUNS:
        raise UserError(f"The lists of these runs make {count:,} of them; shorten them to {_MAX_RUNS:,} at most.")
    runs: list[_Combination] = []
    for objective, gate, prior, beta, weight, gradient, seed in product(grid.objective or ("",), *axes):
        name = objective or (usual_objective(gate, prior) if gate == "none" else GATE_CHANNELS)
        runs.append(
            (
                name,
                gate,
                prior if name in WITH_PRIOR else None,
                beta if name in BUILT_IN and gate != "none" else None,
                Channels(weight, gradient) if name == GATE_CHANNELS else None,
                seed,
            )
        )
    return list(dict.fromkeys(runs))  # without a gate every beta and channel is the same run


def _objective_overrides(objective: str, prior: Prior, beta: float | None, channels: Channels | None) -> list[str]:
    """The settings of a run's objective as overrides."""
    changes = [f"objective.name={objective}"]
    if channels is not None:
        changes += [f"objective.gate_weight={channels.weight}", f"objective.gate_gradient={channels.gradient}"]
    if beta is not None:
        changes.append(f"objective.beta={beta}")
    if isinstance(prior, float):
        changes += ["objective.prior=geometric", f"objective.geometric_lambda={prior}"]
    elif prior != "final":
        changes.append(f"objective.prior={prior if isinstance(prior, str) else list(prior)}")
    return changes


def _run_name(objective: Objective, gate: GateKind, prior: Prior | None, beta: float | None, seed: int) -> str:
    """The folder name of a run, from its objective, gate, prior, beta and seed."""
    if prior is None and objective.name in BUILT_IN:
        return f"{objective.name}-{gate}-b{beta:g}-s{seed}"
    if prior is None:  # a function of the user's, with its options
        options = [f"{key}{value}" for key, value in (objective.options or {}).items()]
        words = [objective.name.partition(":")[2], *options, *([] if gate == "none" else [gate]), f"s{seed}"]
        return re.sub(r"[^\w.-]", "_", "-".join(words))
    family = "fixed" if beta is None else f"{gate}-b{beta:g}"
    if objective.name == GATE_CHANNELS:
        family = f"{gate}-w{objective.gate_weight:g}-g{objective.gate_gradient:g}-b{beta:g}"
    elif objective.name == "decoupled_gate":
        family = f"decoupled-{family}"
    elif objective.name == "random_depth":
        family = f"random-truncated{objective.truncated}" if objective.truncated else "random"
    if isinstance(prior, float):
        return f"geometric{prior:g}-{family}-s{seed}"
    weights = prior.rpartition(":")[2] if isinstance(prior, str) else f"weights{'_'.join(f'{w:g}' for w in prior)}"
    return re.sub(r"[^\w.-]", "_", f"{weights}-{family}-s{seed}")
