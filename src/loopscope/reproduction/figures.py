"""The counterparts of the paper's figures."""

from collections.abc import Iterable, Sequence

from loopscope.analysis.schema import ModelResult, Results
from loopscope.exits.readouts import POST_HOC
from loopscope.exits.signals import FITTED_GATE
from loopscope.report.charts import Line, Specification, difficulty_chart, frontiers, in_rows
from loopscope.report.figures import (
    SIGNAL_TITLES,
    exit_distributions,
    forced_exits,
    frontier_panel,
    readout_lines,
    signal_panels,
)
from loopscope.reproduction.ouro_tables import BenchmarkModel, benchmark_models
from loopscope.reproduction.variants import GEOMETRIC, UNIFORM, TaskVariants, TrainedVariant, VariantPrior, prior_words

_READOUTS = ("fixed", "gate", *POST_HOC, "oracle")
_HEURISTICS = ("entropy", "top1", "margin")
GATES = {"linear": "linear gate", "mlp": "MLP gate"}
_MANO, _PARITY = "mano", "parity"
OURO_MODELS = ("Ouro-1.4B", "Ouro-2.6B")
"""The models with a figure of their own."""


def teaser(results: Results) -> Specification | None:
    mano = TaskVariants(results, _MANO)
    fixed, gate = mano.fixed(GEOMETRIC), mano.best("mlp", GEOMETRIC)
    if fixed is None or gate is None:
        return None
    lines = [*readout_lines(fixed.first, (*_HEURISTICS, "fixed", "oracle")), *_gate_lines([gate])]
    return frontiers([frontier_panel("fixed prior, and an MLP gate's own exits", lines, fixed.first)])


def posthoc_main(results: Results) -> Specification | None:
    mano = TaskVariants(results, _MANO)
    return _posthoc(results, [mano.fixed(GEOMETRIC), mano.at("linear", GEOMETRIC, 0.1)], [("linear", "mlp")])


def forced_exits_by_family(results: Results, priors: Sequence[VariantPrior] | None = None) -> Specification | None:
    return forced_exits(_families(results, priors))


def exit_distributions_by_family(
    results: Results, priors: Sequence[VariantPrior] | None = None
) -> Specification | None:
    return exit_distributions(_families(results, priors))


def ouro_frontiers(results: Results) -> Specification | None:
    shown = (("Ouro-1.4B", "hellaswag"), ("Ouro-2.6B", "mmlu"))
    return _benchmarks(
        [each for each in benchmark_models(results) if (each.benchmark.model, each.benchmark.name) in shown], per_row=2
    )


def frontiers_of_model(results: Results, model: str) -> Specification | None:
    return _benchmarks([each for each in benchmark_models(results) if each.benchmark.model == model], named=False)


def benchmark_frontiers(results: Results) -> Specification | None:
    """Every model that has no figure of its own."""
    return _benchmarks([each for each in benchmark_models(results) if each.benchmark.model not in OURO_MODELS])


def refitted_frontiers(results: Results) -> Specification | None:
    return _benchmarks([each for each in benchmark_models(results) if each.fitted], fitted=True)


def _benchmarks(
    every: Iterable[BenchmarkModel], named: bool = True, fitted: bool = False, per_row: int = 3
) -> Specification | None:
    """A panel a benchmark: the gate, every readout without one (or gates fitted to the trajectory), static depth."""
    panels = []
    for each in every:
        title = f"{each.benchmark.model}, {each.benchmark.title}" if named else each.benchmark.title
        lines = readout_lines(each.result, ("fixed", "gate") if fitted else _READOUTS)
        lines += [Line.of(gate, f"fitted {gate.readout.removeprefix(FITTED_GATE)}") for gate in each.fitted if fitted]
        panels.append(frontier_panel(title, lines, each.result))
    return frontiers(panels, per_row, scaled_alone=True)


def _gate_lines(groups: Sequence[TrainedVariant]) -> list[Line]:
    """The native gate of every beta, on its own trajectory."""
    named = [(group, group.first.frontier("gate")) for group in groups]
    return [Line.of(gate, f"{GATES[group.gate]}, β {group.beta:g}") for group, gate in named if gate is not None]


def fixed_prior_frontiers(results: Results, priors: Sequence[VariantPrior] | None = None) -> Specification | None:
    """Of these priors, or of every geometric one."""
    mano = TaskVariants(results, _MANO)
    priors = [prior for prior in mano.priors if prior != UNIFORM] if priors is None else priors
    groups = [group for prior in priors if (group := mano.fixed(prior)) is not None]
    panels = [frontier_panel(group.words, readout_lines(group.first, _READOUTS), group.first) for group in groups]
    return frontiers(panels)


def fixed_prior_signals(
    results: Results, prior: VariantPrior, names: Iterable[str] = SIGNAL_TITLES, task: str = _MANO
) -> Specification | None:
    group = TaskVariants(results, task).fixed(prior)
    if group is None:
        return None
    panels = signal_panels(group.first, names, "")
    return difficulty_chart(in_rows(panels, 3 if len(panels) == 3 else 2), shared=False)


def extrapolation(results: Results, prior: VariantPrior) -> Specification | None:
    group = TaskVariants(results, _MANO).fixed(prior)
    if group is None or group.first.extrapolation is None:
        return None
    names = ("entropy", "margin", "hidden_change")
    panels = signal_panels(group.first, names, "", group.first.extrapolation.signals)
    return difficulty_chart([panels], shared=False)


def gate_comparison(
    results: Results,
    gates: Iterable[str] = GATES,
    priors: Sequence[VariantPrior] | None = (UNIFORM, GEOMETRIC),
    task: str = _MANO,
) -> Specification | None:
    """The heuristics on the fixed-prior trajectory beside the native gates of every beta. Priors: None is every one."""
    chosen = TaskVariants(results, task)
    panels = []
    for gate in gates:
        for prior in chosen.priors if priors is None else priors:
            fixed, learned = chosen.fixed(prior), chosen.gated(gate, prior)
            if fixed is not None and learned:
                lines = [*readout_lines(fixed.first, (*_HEURISTICS, "fixed", "oracle")), *_gate_lines(learned)]
                best = chosen.best(gate, prior)
                choice = f" (validation: β {best.beta:g})" if best is not None and len(learned) > 1 else ""
                panels.append(frontier_panel(f"{GATES[gate]}, {prior_words(prior)}{choice}", lines, fixed.first))
    return frontiers(panels)


_Row = list[tuple[str, ModelResult]]


def _families(results: Results, priors: Sequence[VariantPrior] | None) -> list[_Row]:
    """A row a prior: the fixed prior, the linear gate and the MLP gate, with beta 0.1 or else the beta that is best."""
    chosen, rows = TaskVariants(results, _MANO), []
    for prior in chosen.priors if priors is None else priors:
        groups = [chosen.fixed(prior), *(chosen.at(g, prior, 0.1) or chosen.best(g, prior) for g in GATES)]
        rows.append([(group.words, group.first) for group in groups if group is not None])
    return rows


def posthoc_by_prior(results: Results, gate: str) -> Specification | None:
    """Both priors, and a panel for each kind of fitted gate."""
    mano = TaskVariants(results, _MANO)
    hosts = [mano.fixed(prior) if gate == "none" else mano.at(gate, prior, 0.1) for prior in (UNIFORM, GEOMETRIC)]
    return _posthoc(results, hosts, [("linear",), ("mlp",)])


def _posthoc(
    results: Results, hosts: Sequence[TrainedVariant | None], kinds: Sequence[Sequence[str]]
) -> Specification | None:
    """On each frozen trajectory: gates fitted to it, its own gate, the heuristics and fixed depth."""
    panels = []
    for host in hosts:
        for shown in kinds:
            if host is None:
                continue
            model = host.first
            fitted = [frontier for frontier in model.frontiers if frontier.readout.startswith(FITTED_GATE)]
            fitted = [each for each in fitted if each.readout.removeprefix(FITTED_GATE).split("-")[0] in shown]
            if fitted:
                lines = readout_lines(model, ("fixed", "gate", *_HEURISTICS, "oracle"))
                lines += [Line.of(each, f"fitted {each.readout.removeprefix(FITTED_GATE)}") for each in fitted]
                which = f"; {GATES[shown[0]]} fitted" if len(shown) == 1 else ""
                panels.append(frontier_panel(host.words + which, lines, model))
    return frontiers(panels)
