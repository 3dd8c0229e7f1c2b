"""The counterparts of the paper's figures."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from loopscope.analysis.schema import ModelResult, Results
from loopscope.paper.ouro_tables import BenchmarkModel, benchmark_models, row_winners
from loopscope.paper.trained_tables import GEOMETRIC, UNIFORM, TaskVariants, TrainedVariant, VariantPrior, prior_words
from loopscope.readouts.readout import POST_HOC
from loopscope.readouts.signals import FITTED_GATE
from loopscope.report.charts import Drawing, difficulty_chart, frontiers
from loopscope.report.curves import SIGNAL_TITLES, Line, Seeds, continued, frontier_panel, readout_lines, signal_panels

_READOUTS = ("fixed", "gate", "oracle", *POST_HOC)
_HEURISTICS = ("entropy", "top1", "margin")
_OF_FIXED = "fixed, oracle, readouts: {}"
_OF_HOST = "fixed, oracle: this trajectory"
"""The note on the trajectory of a panel's gates: each gate runs on its own trajectory."""
GATES = {"linear": "linear gate", "mlp": "MLP gate"}
_MANO = "mano"


def teaser(results: Results) -> Drawing | None:
    """The paper's first figure: heuristics on a fixed prior, beside an MLP gate's own exits."""
    mano = TaskVariants(results, _MANO)
    fixed, gate = mano.fixed(GEOMETRIC), mano.best("mlp", GEOMETRIC)
    if fixed is None or gate is None:
        return None
    lines = [*readout_lines(fixed.models, ("fixed", "oracle", *_HEURISTICS)), *_gate_lines([gate])]
    panel = frontier_panel("fixed prior, and an MLP gate's own exits", lines, fixed.models)
    return frontiers([replace(panel, note=_OF_FIXED.format(fixed.words))])


def benchmark_frontiers(
    results: Results, shown: Callable[[BenchmarkModel], object], named: bool = True, fitted: bool = False
) -> Drawing | None:
    """The paper's figure of Ouro: one panel per benchmark, with gate, other readouts and fixed depth.

    Every readout that wins a row of a table, the paper's or ours, is in every panel.
    """
    panels, winners = [], row_winners(results)
    for each in filter(shown, benchmark_models(results)):
        title = ", ".join(each.names) if named else each.benchmark.title
        legend = fitted_legend(each.result) if fitted else {}
        lines = readout_lines([each.result], ("fixed", "gate", *legend) if fitted else _READOUTS, legend)
        panel = frontier_panel(title, lines, [each.result])
        panels.append(replace(panel, chosen=(*panel.chosen, *winners)))
    return frontiers(panels, scaled_alone=True)


def fitted_legend(model: ModelResult, kinds: Sequence[str] = ("",)) -> dict[str, str]:
    """The names of gates that were fitted to the trajectory in a figure's legend, by readout."""
    starts = tuple(FITTED_GATE + kind for kind in kinds)
    names = [frontier.readout for frontier in model.frontiers if frontier.readout.startswith(starts)]
    return {name: f"fitted {name.removeprefix(FITTED_GATE)}" for name in names}


def _gate_lines(groups: Sequence[TrainedVariant]) -> list[Line]:
    """The native gate of every beta on its own trajectory, as lines of a figure."""
    legends = [(group.models, {"gate": f"gate, β {group.beta:g}"}) for group in groups]
    return [line for models, legend in legends for line in readout_lines(models, legend, legend)]


def fixed_prior_frontiers(results: Results, priors: Sequence[VariantPrior] = ()) -> Drawing | None:
    """The paper's figure of frontiers on fixed priors: on `priors`, or on every geometric one."""
    mano = TaskVariants(results, _MANO)
    priors = priors or [prior for prior in mano.priors if prior != UNIFORM]
    groups = [group for prior in priors if (group := mano.fixed(prior)) is not None]
    panels = [frontier_panel(group.words, readout_lines(group.models, _READOUTS), group.models) for group in groups]
    return frontiers(panels)


def fixed_prior_signals(
    results: Results, prior: VariantPrior, names: Iterable[str] = SIGNAL_TITLES, task: str = _MANO, beyond: bool = False
) -> Drawing | None:
    """The paper's figure of signals on a fixed prior; `beyond` adds difficulties harder than training's."""
    group = TaskVariants(results, task).fixed(prior)
    models = group.models if group else []
    runs, trained = [model.signals for model in models], None
    if beyond:
        trained = max((model.forced_accuracy_by_difficulty.levels[-1] for model in models), default=None)
        pairs = [(model.signals, model.extrapolation.signals) for model in models if model.extrapolation]
        runs = [{name: continued(known[name], more[name]) for name in known if name in more} for known, more in pairs]
    return difficulty_chart(signal_panels(runs, names, trained=trained))


def gate_comparison(
    results: Results,
    gates: Iterable[str] = GATES,
    priors: Sequence[VariantPrior] = (UNIFORM, GEOMETRIC),
    task: str = _MANO,
) -> Drawing | None:
    """The paper's figure of heuristics on a fixed prior beside native gates; no priors mean every prior."""
    chosen = TaskVariants(results, task)
    panels = []
    for gate in gates:
        for prior in priors or chosen.priors:
            fixed, learned = chosen.fixed(prior), chosen.gated(gate, prior)
            if fixed is not None and learned:
                lines = [*readout_lines(fixed.models, ("fixed", "oracle", *_HEURISTICS)), *_gate_lines(learned)]
                best = chosen.best(gate, prior)
                choice = f" (validation: β {best.beta:g})" if best is not None and len(learned) > 1 else ""
                panel = frontier_panel(f"{GATES[gate]}, {prior_words(prior)}{choice}", lines, fixed.models)
                panels.append(replace(panel, note=_OF_FIXED.format(fixed.words)))
    return frontiers(panels)


def by_family(
    results: Results, draw: Callable[[list[tuple[str, Seeds]]], Drawing | None], priors: Sequence[VariantPrior] = ()
) -> Drawing | None:
    """A paper figure by family: fixed prior and both gates, with beta 0.1 or else the best beta."""
    mano = TaskVariants(results, _MANO)
    families = [(gate, prior) for prior in priors or mano.priors for gate in ("none", *GATES)]
    found = [mano.at(*family) or mano.best(*family) for family in families]
    return draw([(group.words, group.models) for group in found if group is not None])


def posthoc(
    results: Results, gates: Sequence[str], priors: Sequence[VariantPrior] = (UNIFORM, GEOMETRIC)
) -> Drawing | None:
    """The paper's figure of frozen trajectories: fitted gates, own gate, heuristics and fixed depth.

    Of one kind of trajectory, linear and MLP gates have their own panels.
    """
    kinds = [list(GATES)] if len(gates) > 1 else [[kind] for kind in GATES]
    mano = TaskVariants(results, _MANO)
    hosts = [host for gate in gates for prior in priors if (host := mano.at(gate, prior)) is not None]
    panels = []
    for host in hosts:
        for shown in kinds:
            legend = fitted_legend(host.first, shown)
            if legend:
                lines = readout_lines(host.models, ("fixed", "gate", "oracle", *legend, *_HEURISTICS), legend)
                which = f"; {GATES[shown[0]]} fitted" if len(shown) == 1 else ""
                panels.append(replace(frontier_panel(host.words + which, lines, host.models), note=_OF_HOST))
    return frontiers(panels)
