"""The counterparts of the paper's figures."""

from collections.abc import Iterable, Sequence

from loopscope.analysis.schema import Results
from loopscope.paper.ouro_tables import BenchmarkModel, benchmark_models
from loopscope.paper.variants import GEOMETRIC, UNIFORM, TaskVariants, TrainedVariant, VariantPrior, prior_words
from loopscope.readouts.readout import POST_HOC
from loopscope.readouts.signals import FITTED_GATE
from loopscope.report.charts import Drawing, difficulty_chart, frontiers
from loopscope.report.curves import SIGNAL_TITLES, Line, Seeds, continued, frontier_panel, readout_lines, signal_panels
from loopscope.report.products import exit_distributions, forced_exits

_READOUTS = ("fixed", "gate", "oracle", *POST_HOC)
_HEURISTICS = ("entropy", "top1", "margin")
GATES = {"linear": "linear gate", "mlp": "MLP gate"}
_MANO = "mano"
OURO_MODELS = ("Ouro-1.4B", "Ouro-2.6B")
"""The models with a figure of their own."""


def teaser(results: Results) -> Drawing | None:
    mano = TaskVariants(results, _MANO)
    fixed, gate = mano.fixed(GEOMETRIC), mano.best("mlp", GEOMETRIC)
    if fixed is None or gate is None:
        return None
    lines = [*readout_lines(fixed.models, ("fixed", "oracle", *_HEURISTICS)), *_gate_lines([gate])]
    return frontiers([frontier_panel("fixed prior, and an MLP gate's own exits", lines, fixed.models)])


def posthoc_main(results: Results) -> Drawing | None:
    mano = TaskVariants(results, _MANO)
    return _posthoc([mano.fixed(GEOMETRIC), mano.at("linear", GEOMETRIC, 0.1)], [("linear", "mlp")])


def forced_exits_by_family(results: Results, priors: Sequence[VariantPrior] | None = None) -> Drawing | None:
    return forced_exits(_families(results, priors))


def exit_distributions_by_family(results: Results, priors: Sequence[VariantPrior] | None = None) -> Drawing | None:
    return exit_distributions(_families(results, priors))


def ouro_frontiers(results: Results) -> Drawing | None:
    shown = (("Ouro-1.4B", "hellaswag"), ("Ouro-2.6B", "mmlu"))
    every = benchmark_models(results)
    return _benchmarks([each for each in every if (each.benchmark.model, each.benchmark.name) in shown])


def frontiers_of_model(results: Results, model: str) -> Drawing | None:
    return _benchmarks([each for each in benchmark_models(results) if each.benchmark.model == model], named=False)


def benchmark_frontiers(results: Results) -> Drawing | None:
    """Every model that has no figure of its own."""
    return _benchmarks([each for each in benchmark_models(results) if each.benchmark.model not in OURO_MODELS])


def refitted_frontiers(results: Results) -> Drawing | None:
    return _benchmarks([each for each in benchmark_models(results) if each.fitted], fitted=True)


def _benchmarks(every: Iterable[BenchmarkModel], named: bool = True, fitted: bool = False) -> Drawing | None:
    """A panel a benchmark: the gate, every readout without one (or gates fitted to the trajectory), static depth."""
    panels = []
    for each in every:
        title = ", ".join(each.names) if named else each.benchmark.title
        legend = {gate.readout: f"fitted {gate.readout.removeprefix(FITTED_GATE)}" for gate in each.fitted}
        lines = readout_lines([each.result], ("fixed", "gate", *legend) if fitted else _READOUTS, legend)
        panels.append(frontier_panel(title, lines, [each.result]))
    return frontiers(panels, scaled_alone=True)


def _gate_lines(groups: Sequence[TrainedVariant]) -> list[Line]:
    """The native gate of every beta, on its own trajectory; the panel says of which kind they are."""
    legends = [(group.models, {"gate": f"gate, β {group.beta:g}"}) for group in groups]
    return [line for models, legend in legends for line in readout_lines(models, legend, legend)]


def fixed_prior_frontiers(results: Results, priors: Sequence[VariantPrior] | None = None) -> Drawing | None:
    """Of these priors, or of every geometric one."""
    mano = TaskVariants(results, _MANO)
    priors = [prior for prior in mano.priors if prior != UNIFORM] if priors is None else priors
    groups = [group for prior in priors if (group := mano.fixed(prior)) is not None]
    panels = [frontier_panel(group.words, readout_lines(group.models, _READOUTS), group.models) for group in groups]
    return frontiers(panels)


def fixed_prior_signals(
    results: Results, prior: VariantPrior, names: Iterable[str] = SIGNAL_TITLES, task: str = _MANO
) -> Drawing | None:
    group = TaskVariants(results, task).fixed(prior)
    runs = [model.signals for model in group.models] if group else []
    return difficulty_chart(signal_panels(runs, names), shared=False) if runs else None


def extrapolation(results: Results, prior: VariantPrior) -> Drawing | None:
    """Signals whose difficulties go on with those beyond training's."""
    group = TaskVariants(results, _MANO).fixed(prior)
    pairs = [(model.signals, model.extrapolation) for model in group.models] if group else []
    runs = [
        {name: continued(table, more.signals[name]) for name, table in known.items() if name in more.signals}
        for known, more in pairs
        if more is not None
    ]
    return difficulty_chart(signal_panels(runs, ("entropy", "margin", "hidden_change")), shared=False) if runs else None


def gate_comparison(
    results: Results,
    gates: Iterable[str] = GATES,
    priors: Sequence[VariantPrior] | None = (UNIFORM, GEOMETRIC),
    task: str = _MANO,
) -> Drawing | None:
    """The heuristics on the fixed-prior trajectory beside the native gates of every beta. Priors: None is every one."""
    chosen = TaskVariants(results, task)
    panels = []
    for gate in gates:
        for prior in chosen.priors if priors is None else priors:
            fixed, learned = chosen.fixed(prior), chosen.gated(gate, prior)
            if fixed is not None and learned:
                lines = [*readout_lines(fixed.models, ("fixed", "oracle", *_HEURISTICS)), *_gate_lines(learned)]
                best = chosen.best(gate, prior)
                choice = f" (validation: β {best.beta:g})" if best is not None and len(learned) > 1 else ""
                panels.append(frontier_panel(f"{GATES[gate]}, {prior_words(prior)}{choice}", lines, fixed.models))
    return frontiers(panels)


def _families(results: Results, priors: Sequence[VariantPrior] | None) -> list[tuple[str, Seeds]]:
    """Of every prior: the fixed one, the linear gate and the MLP gate, with beta 0.1 or else the beta that is best."""
    chosen = TaskVariants(results, _MANO)
    found: list[tuple[str, Seeds]] = []
    for prior in chosen.priors if priors is None else priors:
        groups = [chosen.fixed(prior), *(chosen.at(g, prior, 0.1) or chosen.best(g, prior) for g in GATES)]
        found += [(group.words, group.models) for group in groups if group is not None]
    return found


def posthoc_by_prior(results: Results, gate: str) -> Drawing | None:
    """Both priors, and a panel for each kind of fitted gate."""
    mano = TaskVariants(results, _MANO)
    hosts = [mano.fixed(prior) if gate == "none" else mano.at(gate, prior, 0.1) for prior in (UNIFORM, GEOMETRIC)]
    return _posthoc(hosts, [("linear",), ("mlp",)])


def _posthoc(hosts: Sequence[TrainedVariant | None], kinds: Sequence[Sequence[str]]) -> Drawing | None:
    """On each frozen trajectory: gates fitted to it, its own gate, the heuristics and fixed depth."""
    panels = []
    for host in (host for host in hosts if host is not None):
        for shown in kinds:
            fitted = [each.readout for each in host.first.frontiers if each.readout.startswith(FITTED_GATE)]
            names = {readout: readout.removeprefix(FITTED_GATE) for readout in fitted}
            legend = {readout: f"fitted {name}" for readout, name in names.items() if name.split("-")[0] in shown}
            if legend:
                lines = readout_lines(host.models, ("fixed", "gate", "oracle", *legend, *_HEURISTICS), legend)
                which = f"; {GATES[shown[0]]} fitted" if len(shown) == 1 else ""
                panels.append(frontier_panel(host.words + which, lines, host.models))
    return frontiers(panels)
