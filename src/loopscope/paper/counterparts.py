"""The counterparts of the paper's tables and figures, each under a name, beside those that every report has.

Its numbers are also markers in the page's charts of frontiers, beside the models that match them.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache, partial

import msgspec

from loopscope.analysis.results import group_models
from loopscope.analysis.schema import Results
from loopscope.paper import ouro_tables, paper_figures as figures, trained_tables as tables
from loopscope.paper.published import published
from loopscope.paper.trained_tables import GEOMETRIC, UNIFORM, TaskVariants, VariantPrior
from loopscope.report.charts import Drawing, exit_distributions, forced_exits
from loopscope.report.page import Marker
from loopscope.report.products import CURVES, OVERVIEW, SIGNALS, Catalogue, Figure, Recipe
from loopscope.report.tables import Table

_GRID = (
    " Thresholds: the paper's grids (51 quantiles of the validation signal, 100 values of the gate's CDF), coarser "
    "than those of other tables, where depths can be less, mostly by hundredths of a loop."
)
_GATES = CURVES + " Readouts without a gate run on the fixed-prior trajectory, gates on their own."
_FORCED = "Accuracy of every loop, without any exit rule."
_EXITS = "How the gates spread their exits over the loops."
_BEYOND = SIGNALS + " Difficulties beyond those of training are included."
_THREE_SIGNALS = ("entropy", "margin", "hidden_change")
_READOUTS = "Test accuracy against average loops on a benchmark; every panel has its own scale."


def on_paper_grid(results: Results) -> Results:
    """The same results on the paper's grid of thresholds, to stand beside the paper's numbers."""
    models = [
        msgspec.structs.replace(model, frontiers=model.paper_grid.frontiers, paired=model.paper_grid.paired)
        for model in results.models
    ]
    return msgspec.structs.replace(results, models=models, groups=group_models(models, results.targets))


def _grid_figure(title: str, make: Callable[..., Drawing | None], note: str = CURVES, **options: object) -> Figure:
    """A counterpart figure of the paper's, with thresholds on the paper's grid."""
    return Figure(lambda results: make(on_paper_grid(results), **options), title, note + _GRID)


def _counterpart_figure(title: str, make: Callable[..., Drawing | None], note: str, **options: object) -> Figure:
    """A counterpart figure that needs no thresholds."""
    return Figure(partial(make, **options), title, note)


def _signals(title: str, prior: VariantPrior, note: str = SIGNALS, **options: object) -> Figure:
    """A counterpart figure of signals for a depth prior."""
    return _counterpart_figure(title, figures.fixed_prior_signals, note, prior=prior, **options)


def _by_family(title: str, draw: Callable[..., Drawing | None], note: str, **options: object) -> Figure:
    """A counterpart figure with one panel per family of models: fixed prior, linear gate, MLP gate."""
    return _counterpart_figure(title, figures.by_family, note, draw=draw, **options)


def _every_benchmark_figure(model: str) -> Figure:
    """The figure of one Ouro checkpoint on every benchmark."""
    title, make = f"{model} on every benchmark", figures.benchmark_frontiers
    return _grid_figure(title, make, _READOUTS, shown=lambda each: each.benchmark.model == model, named=False)


def _grid_table(make: Callable[[Results], Table]) -> Callable[[Results], Table]:
    """A counterpart table with numbers of the paper, on the paper's grid of thresholds."""

    def on_grid(results: Results) -> Table:
        table = make(on_paper_grid(results))
        return replace(table, note=table.note + _GRID)

    return on_grid


PAPER: dict[str, Recipe] = {
    "teaser": _grid_figure("Teaser", figures.teaser),
    "fixed_prior_frontiers": _grid_figure(
        "Frontiers of fixed-prior models", figures.fixed_prior_frontiers, priors=(UNIFORM, GEOMETRIC)
    ),
    "fixed_prior_summary": _grid_table(tables.fixed_prior_summary),
    "main_signals": _signals("Signals by difficulty, geometric prior", GEOMETRIC, names=("entropy", "hidden_change")),
    "gate_comparison": _grid_figure("Fixed priors and learned gates", figures.gate_comparison, _GATES),
    "gate_summary": _grid_table(tables.gate_summary),
    "main_forced_exits": _by_family("Forced exits, geometric prior", forced_exits, _FORCED, priors=[GEOMETRIC]),
    "main_exit_distributions": _by_family(
        "Learned exit distributions, geometric prior", exit_distributions, _EXITS, priors=[GEOMETRIC]
    ),
    "posthoc_main": _grid_figure(
        "Gates fitted to frozen trajectories", figures.posthoc, gates=["none", "linear"], priors=[GEOMETRIC]
    ),
    "posthoc_summary": tables.posthoc_summary,
    "posthoc_gaps": tables.posthoc_gaps,
    "decoupled_gate": tables.decoupled_gate,
    "mano_latency": tables.mano_latency,
    "lambda_frontiers": _grid_figure("Frontiers of fixed geometric priors", figures.fixed_prior_frontiers),
    "uniform_signals": _signals("Signals, uniform prior", UNIFORM),
    "uniform_ordering": partial(tables.ordering_of_fixed_prior, prior=UNIFORM),
    "geometric_signals": _signals("Signals, geometric prior", GEOMETRIC),
    "geometric_ordering": partial(tables.ordering_of_fixed_prior, prior=GEOMETRIC),
    "geometric_extrapolation": _signals(
        "Extrapolation, geometric prior", GEOMETRIC, _BEYOND, names=_THREE_SIGNALS, beyond=True
    ),
    "uniform_extrapolation": _signals(
        "Extrapolation, uniform prior", UNIFORM, _BEYOND, names=_THREE_SIGNALS, beyond=True
    ),
    "extrapolation_summary": tables.extrapolation_summary,
    "linear_gate_comparison": _grid_figure(
        "Linear gates under every prior", figures.gate_comparison, _GATES, gates=["linear"], priors=[]
    ),
    "mlp_gate_comparison": _grid_figure(
        "MLP gates under every prior", figures.gate_comparison, _GATES, gates=["mlp"], priors=[]
    ),
    "all_forced_exits": _by_family("Forced exits under every prior", forced_exits, _FORCED),
    "all_exit_distributions": _by_family("Learned exit distributions under every prior", exit_distributions, _EXITS),
    "parity_frontiers": _grid_figure("Parity: fixed priors and gates", figures.gate_comparison, _GATES, task="parity"),
    "parity_summary": _grid_table(tables.parity_summary),
    "parity_signals": _signals("Parity: signals by length", GEOMETRIC, names=_THREE_SIGNALS, task="parity"),
    "posthoc_fixed": _grid_figure("Gates fitted to fixed-prior trajectories", figures.posthoc, gates=["none"]),
    "posthoc_linear": _grid_figure("Gates fitted to linear-gate trajectories", figures.posthoc, gates=["linear"]),
    "posthoc_mlp": _grid_figure("Gates fitted to MLP-gate trajectories", figures.posthoc, gates=["mlp"]),
}
OURO: dict[str, Recipe] = {
    "ouro_summary": _grid_table(ouro_tables.ouro_summary),
    "ouro_claims": _grid_table(ouro_tables.ouro_claims),
    "ouro_frontiers": _grid_figure(
        "Ouro frontiers",
        figures.benchmark_frontiers,
        _READOUTS + " The oracle exits at the first correct loop.",
        shown=lambda each: each.names in (("Ouro-1.4B", "HellaSwag"), ("Ouro-2.6B", "MMLU")),
    ),
    "ouro_latency": ouro_tables.ouro_latency,
    "ouro_14b_frontiers": _every_benchmark_figure("Ouro-1.4B"),
    "ouro_26b_frontiers": _every_benchmark_figure("Ouro-2.6B"),
    "ouro_thinking": _grid_table(ouro_tables.ouro_thinking),
    "benchmark_frontiers": _counterpart_figure(
        "Every other model on every benchmark",
        figures.benchmark_frontiers,
        _READOUTS,
        shown=lambda each: each.benchmark.model not in ("Ouro-1.4B", "Ouro-2.6B"),
    ),
    "ouro_refitted": ouro_tables.ouro_refitted,
    "refitted_frontiers": _counterpart_figure(
        "The released gate and gates fitted to the same trajectory",
        figures.benchmark_frontiers,
        _READOUTS,
        shown=lambda each: figures.fitted_legend(each.result),
        fitted=True,
    ),
    "ouro_readouts": ouro_tables.ouro_readouts,
    "ouro_metrics": ouro_tables.ouro_metrics,
    "mmlu_subjects": ouro_tables.mmlu_subjects,
}


@cache
def _paper_labels() -> Mapping[str, str]:
    """The figure or table of the paper that each product stands for."""
    kinds = {"figure": published().figures, "table": published().tables}
    return {name: f"{kind} {each.number}" for kind, known in kinds.items() for each in known for name in each.products}


PRODUCTS = Catalogue(
    {**OVERVIEW.recipes, **PAPER, **OURO, "gate_stages": tables.gate_stages},
    {
        "overview": (*OVERVIEW.groups["overview"], "decoupled_gate"),
        "paper": ("headline", "diagnosis", "stoppers", "certified", "transfer", *PAPER, "paired", "depths", "forced"),
        "ouro": (*OURO, "diagnosis", "stoppers", "certified", "transfer", "paired"),
    },
    _paper_labels,
)


def markers(results: Results) -> list[Marker]:
    """The paper's numbers as markers on the page: D@X of MANO, operating points of parity and Ouro."""
    results = on_paper_grid(results)
    return [*_trained_markers(results), *_ouro_markers(results)]


def _trained_markers(results: Results) -> Iterable[Marker]:
    """The paper's markers for models that LoopScope trained."""
    paper, tasks = published(), {task: TaskVariants(results, task) for task in ("mano", "parity")}
    known = {(row.training, row.readout): row for row in (*paper.fixed_prior, *paper.fixed_vs_gate)}
    points = []
    for row in known.values():
        for target, depth in row.depth_at.items():
            text = f"D@{100 * float(target):g} {depth.mean:.2f} ± {depth.deviation:.2f}"
            points.append(("mano", row.training, row.readout, depth.mean, float(target), text))
    for point in paper.parity:
        text = f"accuracy {100 * point.accuracy.mean:.2f} %, {point.loops.mean:.2f} loops"
        points.append(("parity", point.training, point.readout, point.loops.mean, point.accuracy.mean, text))
    for task, training, readout, loops, accuracy, text in points:
        for group in tasks[task].groups:
            if group.matches(training) and group is tasks[task].best(group.gate, group.prior):
                yield Marker(group.group.names, readout, loops, accuracy, f"{text}, {readout}, {group.words}")


def _ouro_markers(results: Results) -> Iterable[Marker]:
    """The paper's markers for Ouro checkpoints."""
    points = [
        (row.model, row.benchmark, readout, point)
        for row in published().ouro
        for readout, point in (("gate", row.gate), (row.readout, row.post_hoc))
    ]
    points += [(row.model, row.benchmark, row.readout, row) for row in published().ouro_thinking]
    for model, benchmark, readout, point in points:
        for each in ouro_tables.benchmark_models(results):
            if each.names == (model, benchmark):
                value = f"accuracy {100 * point.accuracy:.1f} %, {point.loops:.2f} loops"
                words = f"{value}, {readout}, {model} on {benchmark}"
                yield Marker([each.result.name], readout, point.loops, point.accuracy, words)
