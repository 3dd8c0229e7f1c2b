"""Through which channel does a gate spoil the trajectory that it is trained with? Trajectory gaps, dose by dose.

Runs belong together if they differ in their seed and in the channels of their gate only: how much of the trunk's loss
weights is the gate's (its weight), and how much of its gradient reaches the trunk.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from loopscope.analysis.gaps import Gap
from loopscope.analysis.results import model_label, over_seeds, recorded_run
from loopscope.analysis.schema import ModelResult, Results
from loopscope.config import digest
from loopscope.report.charts import DosePanel, Drawing, dose_chart
from loopscope.report.curves import Dose
from loopscope.report.tables import NOTHING, Table, gap_cells, gap_over_seeds, has_reference, share_text

Channels = tuple[float, float]
"""A gate's weight, and its gradient's share."""
CORNERS: dict[str, Channels] = {"learned_gate": (1.0, 1.0), "decoupled_gate": (0.0, 0.0)}
"""Objectives that are named after their channels: both open, and both closed."""
_BETWEEN = "gate_channels"


@dataclass(frozen=True)
class GateSweep:
    """Runs of a report that differ only in their seed and in the channels of their gate."""

    task: str
    training: str
    models: dict[Channels, dict[int, ModelResult]] = field(default_factory=dict)  # by channels and seed

    @property
    def ordered(self) -> list[tuple[Channels, dict[int, ModelResult]]]:
        return sorted(self.models.items(), key=lambda each: each[0])


def channel_sweeps(results: Results) -> list[GateSweep]:
    """The channel sweeps of a report, if a run has channels that no objective is named after."""
    found: dict[str, GateSweep] = {}
    for model in results.models:
        run = recorded_run(model.provenance)
        if run is None or run["objective"]["name"] not in (*CORNERS, _BETWEEN):
            continue
        objective, seed = run["objective"], run["training"]["seed"]
        channels = CORNERS.get(objective["name"]) or (objective["gate_weight"], objective["gate_gradient"])
        rest = _but_channels_and_seed(model.provenance["run"])
        sweep = found.setdefault(digest(rest), GateSweep(run["task"]["name"], model_label({"run": rest}, model.name)))
        sweep.models.setdefault(channels, {})[seed] = model
    return [sweep for sweep in found.values() if sweep.models.keys() - CORNERS.values()]


def _but_channels_and_seed(run: dict[str, Any]) -> dict[str, Any]:
    """The settings of a run with the joint objective's channels and seed 0, to find runs that differ only in these."""
    objective = {key: value for key, value in run["objective"].items() if not key.startswith("gate_")}
    return {**run, "objective": {**objective, "name": "learned_gate"}, "training": {**run["training"], "seed": 0}}


def channel_table(results: Results) -> Table:
    """The table of channels: the trajectory gap of every run, by task, training, channels and seed."""
    found, referenced = channel_sweeps(results), has_reference(results)
    seeds = sorted({seed for sweep in found for models in sweep.models.values() for seed in models})
    rows = []
    for sweep in found:
        for (weight, gradient), models in sweep.ordered:
            first_loops = [share_text(over_seeds(_accuracies_at_loop(models.values(), loop))) for loop in (0, 1)]
            cells = [_trajectory_gap_cell(models[seed], referenced) if seed in models else NOTHING for seed in seeds]
            gaps = [model.diagnosis.trajectory_gap for model in models.values()]
            whole = gap_over_seeds(gaps) or NOTHING
            rows.append([sweep.task, sweep.training, f"{weight:g}", f"{gradient:g}", *first_loops, whole, *cells])
    target = results.targets[0]
    note = (
        "How much of the trunk's loss weights is the gate's exit distribution (weight; the rest is the prior's), and "
        "how much of the gate's own gradient reaches the trunk (gradient). 1 and 1 is joint training, 0 and 0 a "
        f"decoupled gate. Trajectory gap at {target.meaning}: average loops of the best readout minus those of the "
        "reference with the same seed, both among the readouts that the two have, without gates; at a lower accuracy "
        "(@) where that is out of reach. Every seed with its 95 % bootstrap interval over test examples; over seeds "
        "mean ± sample standard deviation (how many). All runs of a seed begin with the trunk of its fixed prior's "
        "run, but for joint training."
    )
    columns = ["task", "training", "weight", "gradient", "loop 1", "loop 2", "gap over seeds"]
    return Table("The two channels of joint training", note, [*columns, *(f"seed {seed}" for seed in seeds)], rows)


def _accuracies_at_loop(models: Iterable[ModelResult], loop: int) -> list[float | None]:
    """The accuracy of every run at one loop; None for a run without it."""
    return [model.forced_accuracy[loop] if loop < len(model.forced_accuracy) else None for model in models]


def _trajectory_gap_cell(model: ModelResult, referenced: bool) -> str:
    """The trajectory gap of a run, as a cell of the table of channels."""
    return gap_cells(model, referenced, shares=False)["trajectory gap"]


def channel_doses(results: Results) -> Drawing | None:
    """The figure of channels: the trajectory gap against the gate's weight, one panel per sweep."""
    panels = []
    for sweep in channel_sweeps(results):
        lines: dict[str, list[Dose]] = {}
        for (weight, gradient), models in sorted(sweep.ordered, key=lambda each: each[0][1]):
            gaps = [gap for model in models.values() if (gap := model.diagnosis.trajectory_gap) is not None]
            if gaps:
                lines.setdefault(f"gradient {gradient:g}", []).append(_dose(weight, gaps))
        panels.append(DosePanel(f"{sweep.task}: {sweep.training}", lines))
    return dose_chart(panels, "gate's share of the loss weights", "trajectory gap (loops)")


def _dose(weight: float, gaps: list[Gap]) -> Dose:
    """The mean trajectory gap at one weight of the gate, with its range over seeds."""
    values = [gap.value for gap in gaps]
    if len(gaps) == 1:
        return Dose(weight, values[0], gaps[0].low, gaps[0].high)
    return Dose(weight, sum(values) / len(values), min(values), max(values), len(gaps))
