"""What is a model called? By the settings it was trained with, in the paper's words, so that labels tell them apart."""

from collections import Counter
from typing import Any

from loopscope.analysis.schema import ModelResult
from loopscope.config import digest

_LONGEST = 100
_PARTS = ("task", "model", "objective", "training")


def run_labels(models: list[ModelResult]) -> list[str]:
    """A label says the task where there are several, the seed where there are several, and else the folder's name."""
    runs = [recorded_run(model.provenance) for model in models]
    members = Counter(model.group for model in models)
    labels = group_labels(models)
    for place, (model, run) in enumerate(zip(models, runs, strict=True)):
        if run is not None and members[model.group] > 1:
            labels[place] += f", seed {run['training']['seed']}"
    return tell_apart(labels, models)


def tell_apart(labels: list[str], models: list[ModelResult]) -> list[str]:
    """The labels, with the folder's name where two are the same."""
    shared = Counter(labels)
    return [
        _tidy(f"{label} [{model.name}]") if shared[label] > 1 else label
        for label, model in zip(labels, models, strict=True)
    ]


def group_labels(models: list[ModelResult]) -> list[str]:
    tasks = [run["task"]["name"] if (run := recorded_run(model.provenance)) else "" for model in models]
    several = len(set(tasks)) > 1
    return [
        _tidy(f"{task}: {label}") if several and task else label
        for task, label in zip(tasks, (_words(model) for model in models), strict=True)
    ]


def _words(model: ModelResult) -> str:
    if model.benchmark is None:
        return model_label(model.provenance, model.name)
    return model_label({}, f"{model.benchmark.model}, {model.benchmark.title}")


def model_label(provenance: dict[str, Any], name: str) -> str:
    """A model in the paper's words, from the settings that it was trained with."""
    run = recorded_run(provenance)
    if run is None:
        return _tidy(name)
    objective, gate = run["objective"], run["model"]["gate"]
    if objective["name"] == "final":
        return "final loop only"
    if is_custom(objective):
        options = [f"{key} {value}" for key, value in objective.get("options", {}).items()]
        return _tidy(", ".join([objective["name"], *options, *([] if gate == "none" else [_gate(gate)])]))
    prior = "uniform" if objective["prior"] == "uniform" else f"geometric {objective['geometric_lambda']:g}"
    if objective["name"] == "random_depth":
        return f"random depth, {prior}" + (f", truncated {k}" if (k := objective.get("truncated")) else "")
    if gate == "none":
        return f"fixed prior, {prior}"
    apart = "decoupled " if objective["name"] == "decoupled_gate" else ""
    return f"{apart}{_gate(gate)}, {prior}, β {objective['beta']:g}"


def is_custom(objective: dict[str, Any]) -> bool:
    """Whether a run was trained with a function of the user's: its name is module:function."""
    return ":" in objective["name"]


def _gate(kind: str) -> str:
    return f"{'linear' if kind == 'linear' else 'MLP'} gate"


def _tidy(text: str) -> str:
    """As a figure can show it: without control characters, and not endless."""
    shown = "".join(letter for letter in text if letter.isprintable())
    return shown if len(shown) <= _LONGEST else f"{shown[: _LONGEST - 9]}…{digest(text)[:8]}"


def recorded_run(provenance: dict[str, Any]) -> dict[str, Any] | None:
    """The settings of the run that made a recording, if it was one of ours."""
    run = provenance.get("run")
    ours = isinstance(run, dict) and all(isinstance(run.get(part), dict) for part in _PARTS)
    return run if ours else None
