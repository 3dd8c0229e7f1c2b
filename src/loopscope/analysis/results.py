"""What do several models say together? Their results under labels, and runs that differ in their seed as a group."""

from collections.abc import Callable, Sequence

import msgspec

from loopscope.analysis.difficulty import ORDERED_SIGNALS
from loopscope.analysis.labels import group_labels, run_labels, tell_apart
from loopscope.analysis.schema import RESULTS_SCHEMA, FrontierResult, GroupResult, ModelResult, Results
from loopscope.analysis.seeds import OverSeeds, over_seeds
from loopscope.analysis.targets import Target
from loopscope.analysis.timings import QuestionBench
from loopscope.artifacts import loopscope_version


def assemble_results(
    models: list[ModelResult], targets: Sequence[Target], latency: Sequence[QuestionBench] = ()
) -> Results:
    """The results of several models together, under labels that tell them apart."""
    labels = run_labels(models)
    models = [msgspec.structs.replace(model, label=label) for model, label in zip(models, labels, strict=True)]
    return Results(
        RESULTS_SCHEMA, loopscope_version(), list(targets), models, group_models(models, targets), list(latency)
    )


def group_models(models: list[ModelResult], targets: Sequence[Target]) -> list[GroupResult]:
    """Runs that differ in their seed only, together."""
    groups: dict[str, list[ModelResult]] = {}
    for model in models:
        groups.setdefault(model.group, []).append(model)
    firsts = [members[0] for members in groups.values()]
    labels = tell_apart(group_labels(firsts), firsts)
    return [_group_result(members, label, targets) for members, label in zip(groups.values(), labels, strict=True)]


def _group_result(members: list[ModelResult], label: str, targets: Sequence[Target]) -> GroupResult:
    """Every summary is over all members; one that lacks a readout or a signal counts as not reaching it."""
    frontiers = [{frontier.readout: frontier for frontier in model.frontiers} for model in members]
    readouts = list(dict.fromkeys(name for known in frontiers for name in known))

    def over(readout: str, value: Callable[[FrontierResult], float | None]) -> OverSeeds:
        return over_seeds([value(known[readout]) if readout in known else None for known in frontiers])

    def depth(target: Target) -> Callable[[FrontierResult], float | None]:
        return lambda frontier: frontier.depth_at[target.key]

    orderings = [model.ordering for model in members]
    return GroupResult(
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
