"""The figures of a report: those that show every model, and the counterparts of the paper's."""

from collections.abc import Iterable, Sequence

from loopscope.exits import READOUTS
from loopscope.exits.signals import CONVERGENCE, FITTED
from loopscope.report.benchmark_tables import Answered, answered
from loopscope.report.charts import Binning, Line, Panel, Specification, by_difficulty, frontiers, in_rows
from loopscope.report.chosen import GEOMETRIC, UNIFORM, Chosen, Prior, Trained, prior_words
from loopscope.report.schema import Binned, ModelResult, Results

_SIGNALS = {
    "entropy": "entropy",
    "margin": "logit margin",
    "kl": "predictive KL",
    "hidden_change": "hidden-state displacement",
}
_HEURISTICS = ("entropy", "top1", "margin")
_GATES = {"linear": "linear gate", "mlp": "MLP gate"}
_MANO, _PARITY = "mano", "parity"
_OURO = ("Ouro-1.4B", "Ouro-2.6B")
"""The models with a figure of their own."""


def every_frontier(results: Results) -> Specification | None:
    return frontiers([_all_readouts(model, model.label) for model in results.models], results.targets[0])


def every_forced_exit(results: Results) -> Specification | None:
    return _forced(in_rows([(model.label, model) for model in results.models], 2))


def every_exit_distribution(results: Results) -> Specification | None:
    return _exits(in_rows([(model.label, model) for model in results.models if model.exit_distribution], 2))


def every_signal(results: Results) -> Specification | None:
    rows = [_signal_panels(model, _SIGNALS, f"{model.label}: ") for model in results.models]
    return by_difficulty(rows, shared=False)


def teaser(results: Results) -> Specification | None:
    mano = Chosen(results, _MANO)
    fixed, gate = mano.fixed(GEOMETRIC), mano.best("mlp", GEOMETRIC)
    if fixed is None or gate is None:
        return None
    lines = [*_lines(fixed.first, (*_HEURISTICS, "fixed", "oracle")), *_gate_lines([gate])]
    return frontiers([_panel("fixed prior, and an MLP gate's own exits", lines, fixed.first)], results.targets[0])


def fixed_prior_frontiers(results: Results) -> Specification | None:
    return _fixed_frontiers(results, [UNIFORM, GEOMETRIC])


def lambda_frontiers(results: Results) -> Specification | None:
    return _fixed_frontiers(results, [prior for prior in Chosen(results, _MANO).priors if prior != UNIFORM])


def main_signals(results: Results) -> Specification | None:
    return _signals(results, _MANO, GEOMETRIC, ("entropy", "hidden_change"))


def uniform_signals(results: Results) -> Specification | None:
    return _signals(results, _MANO, UNIFORM, _SIGNALS)


def geometric_signals(results: Results) -> Specification | None:
    return _signals(results, _MANO, GEOMETRIC, _SIGNALS)


def parity_signals(results: Results) -> Specification | None:
    return _signals(results, _PARITY, GEOMETRIC, ("entropy", "margin", "hidden_change"))


def gate_comparison(results: Results) -> Specification | None:
    return _gate_comparison(results, _MANO, _GATES, [UNIFORM, GEOMETRIC])


def linear_gate_comparison(results: Results) -> Specification | None:
    return _gate_comparison(results, _MANO, ["linear"], Chosen(results, _MANO).priors)


def mlp_gate_comparison(results: Results) -> Specification | None:
    return _gate_comparison(results, _MANO, ["mlp"], Chosen(results, _MANO).priors)


def parity_frontiers(results: Results) -> Specification | None:
    return _gate_comparison(results, _PARITY, _GATES, [UNIFORM, GEOMETRIC])


def main_forced_exits(results: Results) -> Specification | None:
    return _forced(_families(Chosen(results, _MANO), [GEOMETRIC]))


def main_exit_distributions(results: Results) -> Specification | None:
    return _exits(_families(Chosen(results, _MANO), [GEOMETRIC]))


def all_forced_exits(results: Results) -> Specification | None:
    mano = Chosen(results, _MANO)
    return _forced(_families(mano, mano.priors))


def all_exit_distributions(results: Results) -> Specification | None:
    mano = Chosen(results, _MANO)
    return _exits(_families(mano, mano.priors))


def posthoc_main(results: Results) -> Specification | None:
    mano = Chosen(results, _MANO)
    return _posthoc(results, [mano.fixed(GEOMETRIC), mano.at("linear", GEOMETRIC, 0.1)], [("linear", "mlp")])


def posthoc_fixed(results: Results) -> Specification | None:
    return _posthoc_by_prior(results, "none")


def posthoc_linear(results: Results) -> Specification | None:
    return _posthoc_by_prior(results, "linear")


def posthoc_mlp(results: Results) -> Specification | None:
    return _posthoc_by_prior(results, "mlp")


def ouro_frontiers(results: Results) -> Specification | None:
    shown = (("Ouro-1.4B", "hellaswag"), ("Ouro-2.6B", "mmlu"))
    return _benchmarks(
        [each for each in answered(results) if (each.benchmark.model, each.benchmark.name) in shown], per_row=2
    )


def ouro_14b_frontiers(results: Results) -> Specification | None:
    return _benchmarks([each for each in answered(results) if each.benchmark.model == _OURO[0]], named=False)


def ouro_26b_frontiers(results: Results) -> Specification | None:
    return _benchmarks([each for each in answered(results) if each.benchmark.model == _OURO[1]], named=False)


def benchmark_frontiers(results: Results) -> Specification | None:
    """Every model that has no figure of its own."""
    return _benchmarks([each for each in answered(results) if each.benchmark.model not in _OURO])


def refitted_frontiers(results: Results) -> Specification | None:
    return _benchmarks([each for each in answered(results) if each.fitted], fitted=True)


def uniform_extrapolation(results: Results) -> Specification | None:
    return _extrapolation(results, UNIFORM)


def geometric_extrapolation(results: Results) -> Specification | None:
    return _extrapolation(results, GEOMETRIC)


def _benchmarks(
    every: Iterable[Answered], named: bool = True, fitted: bool = False, per_row: int = 3
) -> Specification | None:
    """A panel a benchmark: the gate, every readout without one (or gates fitted to the trajectory), static depth."""
    panels = []
    for each in every:
        title = f"{each.benchmark.model}, {each.benchmark.title}" if named else each.benchmark.title
        lines = _lines(each.result, ("fixed", "gate") if fitted else READOUTS)
        lines += [Line.of(gate, f"fitted {gate.readout.removeprefix(FITTED)}") for gate in each.fitted if fitted]
        panels.append(_panel(title, lines, each.result))
    return frontiers(panels, None, per_row)


def _all_readouts(model: ModelResult, title: str) -> Panel:
    return _panel(title, _lines(model, [frontier.readout for frontier in model.frontiers]), model)


def _panel(title: str, lines: list[Line], model: ModelResult) -> Panel:
    return Panel(title, lines, len(model.forced_accuracy))


def _lines(model: ModelResult, readouts: Iterable[str]) -> list[Line]:
    return [Line.of(frontier) for name in readouts if (frontier := model.frontier(name)) is not None]


def _gate_lines(groups: Sequence[Trained]) -> list[Line]:
    """The native gate of every beta, on its own trajectory."""
    named = [(group, group.first.frontier("gate")) for group in groups]
    return [Line.of(gate, f"{_GATES[group.gate]}, β {group.beta:g}") for group, gate in named if gate is not None]


def _fixed_frontiers(results: Results, priors: list[Prior]) -> Specification | None:
    mano = Chosen(results, _MANO)
    groups = [group for prior in priors if (group := mano.fixed(prior)) is not None]
    panels = [_panel(group.words, _lines(group.first, READOUTS), group.first) for group in groups]
    return frontiers(panels, results.targets[0])


def _signal_panels(
    model: ModelResult, names: Iterable[str], prefix: str, more: dict[str, Binned] | None = None
) -> list[Binning]:
    """`more` continues the difficulties of the test split."""
    panels = []
    for name in names:
        if name in model.signals:
            table = model.signals[name]
            if more is not None:
                extra = more[name]
                table = Binned(table.levels + extra.levels, table.counts + extra.counts, table.values + extra.values)
            panels.append(Binning(prefix + _SIGNALS[name], _SIGNALS[name], table, 2 if name in CONVERGENCE else 1))
    return panels


def _signals(results: Results, task: str, prior: Prior, names: Iterable[str]) -> Specification | None:
    group = Chosen(results, task).fixed(prior)
    if group is None:
        return None
    panels = _signal_panels(group.first, names, "")
    return by_difficulty(in_rows(panels, 3 if len(panels) == 3 else 2), shared=False)


def _extrapolation(results: Results, prior: Prior) -> Specification | None:
    group = Chosen(results, _MANO).fixed(prior)
    if group is None or group.first.extrapolation is None:
        return None
    names = ("entropy", "margin", "hidden_change")
    panels = _signal_panels(group.first, names, "", group.first.extrapolation.signals)
    return by_difficulty([panels], shared=False)


def _gate_comparison(
    results: Results, task: str, gates: Iterable[str], priors: Sequence[Prior]
) -> Specification | None:
    """The heuristics on the fixed-prior trajectory beside the native gates of every beta."""
    chosen = Chosen(results, task)
    panels = []
    for gate in gates:
        for prior in priors:
            fixed, learned = chosen.fixed(prior), chosen.gated(gate, prior)
            if fixed is not None and learned:
                lines = [*_lines(fixed.first, (*_HEURISTICS, "fixed", "oracle")), *_gate_lines(learned)]
                best = chosen.best(gate, prior)
                choice = f" (validation: β {best.beta:g})" if best is not None and len(learned) > 1 else ""
                panels.append(_panel(f"{_GATES[gate]}, {prior_words(prior)}{choice}", lines, fixed.first))
    return frontiers(panels, results.targets[0])


_Row = list[tuple[str, ModelResult]]


def _families(chosen: Chosen, priors: Sequence[Prior]) -> list[_Row]:
    """A row a prior: the fixed prior, the linear gate and the MLP gate, with beta 0.1 or else the beta that is best."""
    rows = []
    for prior in priors:
        groups = [chosen.fixed(prior), *(chosen.at(g, prior, 0.1) or chosen.best(g, prior) for g in _GATES)]
        rows.append([(group.words, group.first) for group in groups if group is not None])
    return rows


def _forced(rows: Iterable[Sequence[tuple[str, ModelResult]]]) -> Specification | None:
    panels = [[Binning(title, "accuracy", model.forced_accuracy_by_difficulty) for title, model in row] for row in rows]
    return by_difficulty(panels, percent=True)


def _exits(rows: Iterable[Sequence[tuple[str, ModelResult]]]) -> Specification | None:
    panels = [
        [
            Binning(title, "exit probability", model.exit_distribution)
            for title, model in row
            if model.exit_distribution is not None
        ]
        for row in rows
    ]
    return by_difficulty(panels, percent=True)


def _posthoc_by_prior(results: Results, gate: str) -> Specification | None:
    """Both priors, and a panel for each kind of fitted gate."""
    mano = Chosen(results, _MANO)
    hosts = [mano.fixed(prior) if gate == "none" else mano.at(gate, prior, 0.1) for prior in (UNIFORM, GEOMETRIC)]
    return _posthoc(results, hosts, [("linear",), ("mlp",)])


def _posthoc(results: Results, hosts: Sequence[Trained | None], kinds: Sequence[Sequence[str]]) -> Specification | None:
    """On each frozen trajectory: gates fitted to it, its own gate, the heuristics and fixed depth."""
    panels = []
    for host in hosts:
        for shown in kinds:
            if host is None:
                continue
            model = host.first
            fitted = [frontier for frontier in model.frontiers if frontier.readout.startswith(FITTED)]
            fitted = [each for each in fitted if each.readout.removeprefix(FITTED).split("-")[0] in shown]
            if fitted:
                lines = _lines(model, ("fixed", "gate", *_HEURISTICS, "oracle"))
                lines += [Line.of(each, f"fitted {each.readout.removeprefix(FITTED)}") for each in fitted]
                which = f"; {_GATES[shown[0]]} fitted" if len(shown) == 1 else ""
                panels.append(_panel(host.words + which, lines, model))
    return frontiers(panels, results.targets[0])
