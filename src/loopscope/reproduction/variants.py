"""Which models of the results does a product need? They are found by what they were trained with."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from loopscope.analysis.labels import model_label, recorded_run
from loopscope.analysis.results import group_models
from loopscope.analysis.schema import GroupResult, ModelResult, Results

VariantPrior = Literal["uniform"] | float
UNIFORM: VariantPrior = "uniform"
GEOMETRIC: VariantPrior = 0.3
"""The geometric prior of the paper's main text."""
_OF_THE_PAPER = ("fixed_prior", "learned_gate")
DECOUPLED = ("decoupled_gate",)
"""The objectives of variants."""


def on_paper_grid(results: Results) -> Results:
    """The same results on the paper's grid of thresholds, for what stands beside its numbers."""
    models = [
        msgspec.structs.replace(model, frontiers=model.paper_grid.frontiers, paired=model.paper_grid.paired)
        for model in results.models
    ]
    return msgspec.structs.replace(results, models=models, groups=group_models(models, results.targets))


@dataclass(frozen=True)
class TrainedVariant:
    """Runs that differ in their seed only, and what they were trained with."""

    task: str
    gate: str
    prior: VariantPrior
    beta: float | None
    group: GroupResult
    models: list[ModelResult]

    @property
    def first(self) -> ModelResult:
        """The run that figures show."""
        return self.models[0]

    @property
    def words(self) -> str:
        """What it was trained with; the task goes without saying."""
        return model_label(self.first.provenance, self.first.name)

    @property
    def counted(self) -> str:
        """The same with the number of its runs."""
        return f"{self.words} ({len(self.models)} {'seed' if len(self.models) == 1 else 'seeds'})"

    @property
    def seeds(self) -> list[int]:
        return [model.provenance["run"]["training"]["seed"] for model in self.models]


def trained_variants(results: Results, objectives: Sequence[str] = _OF_THE_PAPER) -> list[TrainedVariant]:
    """All groups of runs that LoopScope trained with one of these objectives; without any, the paper's."""
    models = {model.name: model for model in results.models}
    found = []
    for group in results.groups:
        run = recorded_run(models[group.names[0]].provenance)
        if run is None:
            continue
        objective, gate = run["objective"], run["model"]["gate"]
        if objective["name"] not in objectives:
            continue
        prior: VariantPrior = "uniform" if objective["prior"] == "uniform" else float(objective["geometric_lambda"])
        beta = None if gate == "none" else float(objective["beta"])
        found.append(
            TrainedVariant(run["task"]["name"], gate, prior, beta, group, [models[name] for name in group.names])
        )
    return found


class TaskVariants:
    """The models of one task that were trained with one of these objectives."""

    def __init__(self, results: Results, task: str, objectives: Sequence[str] = _OF_THE_PAPER) -> None:
        self.targets = results.targets
        self.groups = [group for group in trained_variants(results, objectives) if group.task == task]

    @property
    def priors(self) -> list[VariantPrior]:
        """Uniform first, then by lambda."""
        return sorted({group.prior for group in self.groups}, key=lambda prior: 0.0 if prior == "uniform" else prior)

    def fixed(self, prior: VariantPrior) -> TrainedVariant | None:
        return next((group for group in self.gated("none", prior)), None)

    def gated(self, gate: str, prior: VariantPrior) -> list[TrainedVariant]:
        """By beta."""
        found = [group for group in self.groups if (group.gate, group.prior) == (gate, prior)]
        return sorted(found, key=lambda group: group.beta or 0.0)

    def at(self, gate: str, prior: VariantPrior, beta: float) -> TrainedVariant | None:
        return next((group for group in self.gated(gate, prior) if group.beta == beta), None)

    def best(self, gate: str, prior: VariantPrior) -> TrainedVariant | None:
        """The beta that validation data choose: the least D@X of the gate at the first target, then the most accurate.

        Betas are compared on the seeds that all of them have. One that misses the target counts as infinitely deep.
        """
        groups = self.gated(gate, prior)
        if len(groups) < 2:
            return groups[0] if groups else None
        common = set.intersection(*(set(group.seeds) for group in groups))
        scores = {group.beta: self._score(group, common or set(group.seeds)) for group in groups}
        return min(groups, key=lambda group: scores[group.beta])

    def _score(self, group: TrainedVariant, seeds: set[int]) -> tuple[float, float]:
        """Smaller is better."""
        gates = [
            frontier
            for model, seed in zip(group.models, group.seeds, strict=True)
            if seed in seeds and (frontier := model.frontier("gate")) is not None
        ]
        depths = [gate.calibration_depth_at[self.targets[0].key] for gate in gates]
        depth = _mean([float("inf") if depth is None else depth for depth in depths])
        return depth, -_mean([gate.selected.calibration_accuracy for gate in gates])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("inf")


def prior_words(prior: VariantPrior) -> str:
    return "uniform" if prior == "uniform" else f"geometric {prior:g}"
