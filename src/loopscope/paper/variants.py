"""Which models of the results does a product need? They are found by what they were trained with."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from loopscope.analysis.results import group_models, model_label, recorded_run
from loopscope.analysis.schema import GroupResult, ModelResult, Results
from loopscope.paper.published import TrainedWith

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
    def seeded(self) -> list[tuple[int, ModelResult]]:
        """Every run with its seed."""
        return [(model.provenance["run"]["training"]["seed"], model) for model in self.models]

    def matches(self, training: TrainedWith) -> bool:
        """Whether the paper trained a model like this one; it does not always say beta."""
        prior = training.prior if training.prior == "uniform" else training.geometric_lambda
        return (training.gate, prior) == (self.gate, self.prior)


def trained_variants(results: Results, objectives: Sequence[str] = _OF_THE_PAPER) -> list[TrainedVariant]:
    """All groups of runs that LoopScope trained with one of these objectives; without any, the paper's."""
    variants = []
    for group, models in results.grouped:
        run = recorded_run(models[0].provenance)
        if run is None or run["objective"]["name"] not in objectives:
            continue
        objective, gate = run["objective"], run["model"]["gate"]
        prior: VariantPrior = "uniform" if objective["prior"] == "uniform" else float(objective["geometric_lambda"])
        beta = None if gate == "none" else float(objective["beta"])
        variants.append(TrainedVariant(run["task"]["name"], gate, prior, beta, group, models))
    return variants


class TaskVariants:
    """The models of one task that were trained with one of the paper's objectives."""

    def __init__(self, results: Results, task: str) -> None:
        self.first_target = results.targets[0].key
        self.groups = [group for group in trained_variants(results) if group.task == task]

    @property
    def priors(self) -> list[VariantPrior]:
        """Uniform first, then by lambda."""
        return sorted({group.prior for group in self.groups}, key=lambda prior: 0.0 if prior == "uniform" else prior)

    def fixed(self, prior: VariantPrior) -> TrainedVariant | None:
        return next(iter(self.gated("none", prior)), None)

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
        common = set.intersection(*({seed for seed, _ in group.seeded} for group in groups))
        scores = {group.beta: self._score(group, common) for group in groups}
        return min(groups, key=lambda group: scores[group.beta])

    def _score(self, group: TrainedVariant, seeds: set[int]) -> tuple[float, float]:
        """Smaller is better; without seeds that all have, over the group's own."""
        models = [model for seed, model in group.seeded if seed in seeds] or group.models
        gates = [frontier for model in models if (frontier := model.frontier("gate")) is not None]
        depths = [gate.calibration_depth_at[self.first_target] for gate in gates]
        depth = _mean([float("inf") if depth is None else depth for depth in depths])
        return depth, -_mean([gate.selected.calibration_accuracy for gate in gates])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("inf")


def prior_words(prior: VariantPrior) -> str:
    return "uniform" if prior == "uniform" else f"geometric {prior:g}"
