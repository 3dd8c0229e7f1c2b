"""What do several models say together? Their results under labels, and runs that differ in their seed as a group.

A model is called by the settings it was trained with, in the paper's words, so that labels tell models apart.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from loopscope.analysis import schema
from loopscope.analysis.difficulty import ORDERED_SIGNALS
from loopscope.analysis.targets import Target
from loopscope.analysis.transfer import TransferResult
from loopscope.artifacts import loopscope_version
from loopscope.config import digest, plain

_LONGEST_LABEL = 100


class _RecordedTask(msgspec.Struct):
    """The task in a run's settings, as a label needs it."""

    name: str


class _RecordedModel(msgspec.Struct):
    """The model in a run's settings, as a label needs it."""

    gate: str
    name: str = ""  # of a class of the user's
    options: dict[str, Any] = {}
    injection: bool = False
    norm: str = ""
    loop_norm: bool = False


class _RecordedObjective(msgspec.Struct):
    """The training objective in a run's settings, as a label needs it."""

    name: str
    prior: str | list[float] = ""
    geometric_lambda: float = 0.0
    beta: float = 0.0
    options: dict[str, Any] = {}
    truncated: int | None = None
    gate_weight: float = 1.0
    gate_gradient: float = 1.0


class _RecordedTraining(msgspec.Struct):
    """The training in a run's settings, as a label needs it."""

    seed: int


class _RecordedRun(msgspec.Struct):
    """The settings of the run that made a recording, as far as labels of a report need them."""

    task: _RecordedTask
    model: _RecordedModel
    objective: _RecordedObjective
    training: _RecordedTraining


def assemble_results(
    models: list[schema.ModelResult],
    targets: Sequence[Target],
    latency: Sequence[schema.Latency] = (),
    transfer: Sequence[TransferResult] = (),
) -> schema.Results:
    """Put the results of several models together, under labels that tell the models apart."""
    labels = _run_labels(models)
    models = [msgspec.structs.replace(model, label=label) for model, label in zip(models, labels, strict=True)]
    groups, version = group_models(models, targets), loopscope_version()
    return schema.Results(schema.RESULTS_SCHEMA, version, list(targets), models, groups, list(latency), list(transfer))


def group_models(models: list[schema.ModelResult], targets: Sequence[Target]) -> list[schema.GroupResult]:
    """Group the runs that differ only in their seed."""
    groups: dict[str, list[schema.ModelResult]] = {}
    for model in models:
        groups.setdefault(model.group, []).append(model)
    firsts = [members[0] for members in groups.values()]
    labels = _tell_apart(_group_labels(firsts), firsts)
    return [_group_result(members, label, targets) for members, label in zip(groups.values(), labels, strict=True)]


def _group_result(members: list[schema.ModelResult], label: str, targets: Sequence[Target]) -> schema.GroupResult:
    """Summarise the members of a group over seeds; a member without the readout counts as not reaching the target."""
    frontiers = [{frontier.readout: frontier for frontier in model.frontiers} for model in members]
    readouts = list(dict.fromkeys(name for known in frontiers for name in known))

    def over(readout: str, value: Callable[[schema.FrontierResult], float | None]) -> schema.OverSeeds:
        return over_seeds([value(known[readout]) if readout in known else None for known in frontiers])

    def depth(target: Target) -> Callable[[schema.FrontierResult], float | None]:
        return lambda frontier: frontier.depth_at[target.key]

    orderings = [model.ordering for model in members]
    return schema.GroupResult(
        label=label,
        names=[model.name for model in members],
        depth_at={name: {target.key: over(name, depth(target)) for target in targets} for name in readouts},
        selected_accuracy={name: over(name, lambda frontier: frontier.selected.accuracy) for name in readouts},
        selected_loops={name: over(name, lambda frontier: frontier.selected.average_loops) for name in readouts},
        ordering={
            name: over_seeds([known[name].bin_mean if name in known else None for known in orderings])
            for name in ORDERED_SIGNALS
            if any(name in known for known in orderings)
        },
    )


def over_seeds(values: Sequence[float | None]) -> schema.OverSeeds:
    """Summarise one value per seed; None stands for a seed that does not reach the target."""
    reached = [value for value in values if value is not None]
    return schema.OverSeeds(
        mean=float(np.mean(reached)) if reached else None,
        deviation=float(np.std(reached, ddof=1)) if len(reached) > 1 else None,
        reached=len(reached),
        seeds=len(values),
    )


def _run_labels(models: list[schema.ModelResult]) -> list[str]:
    """The label of every run: task and seed if there are several of them, else the folder's name."""
    runs = [recorded_run(model.provenance) for model in models]
    members = Counter(model.group for model in models)
    labels = _group_labels(models)
    for place, (model, run) in enumerate(zip(models, runs, strict=True)):
        if run is not None and members[model.group] > 1:
            labels[place] += f", seed {run['training']['seed']}"
    return _tell_apart(labels, models)


def _tell_apart(labels: list[str], models: list[schema.ModelResult]) -> list[str]:
    """Add the folder's name to labels that occur twice."""
    shared = Counter(labels)
    return [
        _tidy_label(f"{label} [{model.name}]") if shared[label] > 1 else label
        for label, model in zip(labels, models, strict=True)
    ]


def _group_labels(models: list[schema.ModelResult]) -> list[str]:
    """The label of every group of seeds, without the seed."""
    tasks = [run["task"]["name"] if (run := recorded_run(model.provenance)) else "" for model in models]
    labels = []
    for model, task in zip(models, tasks, strict=True):
        benchmark = model.benchmark
        label = model_label(model.provenance, model.name)
        if benchmark is not None:
            label = _tidy_label(f"{benchmark.model}, {benchmark.title}")
        labels.append(_tidy_label(f"{task}: {label}") if task and len(set(tasks)) > 1 else label)
    return labels


def model_label(provenance: dict[str, Any], name: str) -> str:
    """The label of a model in the paper's words, from the settings of its training."""
    run = recorded_run(provenance)
    if run is None:
        return _tidy_label(name)
    return _tidy_label(", ".join([_training_words(run), *architecture_words(run["model"]), *depth_words(provenance)]))


def architecture_words(model: dict[str, Any]) -> list[str]:
    """The words of a label that tell an architecture from the paper's looped Transformer."""
    words = [model["name"]] if model.get("name") else []
    words += [f"{key} {value}" for key, value in model.get("options", {}).items()]
    words += ["injection"] if model.get("injection") else []
    words += ["post-norm"] if model.get("norm") == "post" else []
    return words + (["loop norm"] if model.get("loop_norm") else [])


def depth_words(provenance: dict[str, Any]) -> list[str]:
    """The words of a label for a recording with other loops than its model was trained with."""
    trained = provenance.get("trained_loops")
    return [] if trained is None else [f"{provenance.get('loops')} loops (trained with {trained})"]


def _training_words(run: dict[str, Any]) -> str:
    """The words of a label for the objective, gate, beta and depth prior of training."""
    objective, gate = run["objective"], run["model"]["gate"]
    if objective["name"] == "final":
        return "final loop only"
    gate_words = f"{'linear' if gate == 'linear' else 'MLP'} gate"
    if ":" in objective["name"]:  # a function of the user's
        options = [f"{key} {value}" for key, value in objective.get("options", {}).items()]
        return _tidy_label(", ".join([objective["name"], *options, *([] if gate == "none" else [gate_words])]))
    if objective["name"] == "act":
        return f"{gate_words} by ACT, ponder cost {objective['beta']:g}"
    prior = _prior_words(objective)
    if objective["name"] == "random_depth":
        return _tidy_label(f"random depth, {prior}") + (f", truncated {k}" if (k := objective.get("truncated")) else "")
    if gate == "none":
        return _tidy_label(f"fixed prior, {prior}")
    if objective["name"] == "decoupled_gate":
        gate_words = f"decoupled {gate_words}"
    elif objective["name"] == "gate_channels":
        gate_words += f" (weight {objective['gate_weight']:g}, gradient {objective['gate_gradient']:g})"
    return _tidy_label(f"{gate_words}, {prior}, β {objective['beta']:g}")


def _prior_words(objective: dict[str, Any]) -> str:
    """The words of a label for a depth prior: its name, its weights, or a custom function."""
    prior = objective["prior"]
    if isinstance(prior, list):
        return f"weights {' '.join(f'{weight:g}' for weight in prior)}"
    return f"geometric {objective['geometric_lambda']:g}" if prior == "geometric" else prior


def _tidy_label(text: str) -> str:
    """Shorten a label and remove its control characters, so that a figure can show it."""
    shown = "".join(letter for letter in text if letter.isprintable())
    return shown if len(shown) <= _LONGEST_LABEL else f"{shown[: _LONGEST_LABEL - 9]}…{digest(text)[:8]}"


def recorded_run(provenance: dict[str, Any]) -> dict[str, Any] | None:
    """The settings of the run that made a recording, as labels need them; None for other recordings."""
    try:
        found: dict[str, Any] = plain(msgspec.convert(provenance.get("run"), _RecordedRun))
    except msgspec.ValidationError:
        return None
    return found
