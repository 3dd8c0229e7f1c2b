"""Everything that a report can show, each under a name; a product is made where the models that it needs are there."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from loopscope.errors import UserError
from loopscope.published import published
from loopscope.report import benchmark_tables as asked
from loopscope.report import figures as draw
from loopscope.report import paper_tables as compare
from loopscope.report import tables as tell
from loopscope.report.charts import Specification
from loopscope.report.schema import Results
from loopscope.report.tables import Table


@dataclass(frozen=True)
class Product:
    """A table, or a figure with its caption."""

    name: str
    title: str
    note: str
    paper: str  # what it is the counterpart of, or nothing
    table: Table | None = None
    figure: Specification | None = None


@dataclass(frozen=True)
class _Figure:
    make: Callable[[Results], Specification | None]
    title: str
    note: str
    labels: tuple[str, ...] = ()  # of the paper's figures


@dataclass(frozen=True)
class _Table:
    make: Callable[[Results], Table | None]
    labels: tuple[str, ...] = ()


_CURVES = (
    "Test accuracy against average loops as each readout's threshold is swept; the upper left is better. Dashed: the "
    "target accuracy. The oracle exits at the first correct loop. "
)
_FIRST = "One seed (the first) is drawn. "
_SIGNALS = "Bin means of the signals at every loop. Convergence signals compare a loop with the one before: no loop 1. "
_GATED = "Readouts without a gate run on the fixed-prior trajectory, gates on their own. "

OVERVIEW: dict[str, _Figure | _Table] = {
    "headline": _Table(tell.headline),
    "diagnosis": _Table(tell.gaps),
    "certified": _Table(tell.certified),
    "frontiers": _Figure(draw.every_frontier, "Frontiers", _CURVES),
    "forced_exits": _Figure(
        draw.every_forced_exit,
        "Forced exits by difficulty",
        "Accuracy of every loop, without any exit rule: the trajectory itself.",
    ),
    "exit_distributions": _Figure(
        draw.every_exit_distribution,
        "Learned exit distributions",
        "How the model's own gate spreads its exits over the loops, on average, by difficulty.",
    ),
    "signals": _Figure(draw.every_signal, "Signals by difficulty", _SIGNALS),
    "depths": _Table(tell.depths),
    "forced": _Table(tell.forced),
    "ordering": _Table(tell.ordering),
    "paired": _Table(compare.paired_table),
}
PAPER: dict[str, _Figure | _Table] = {
    "teaser": _Figure(draw.teaser, "Teaser", _CURVES + _FIRST, ("fig:teaser",)),
    "fixed_prior_frontiers": _Figure(
        draw.fixed_prior_frontiers, "Frontiers of fixed-prior models", _CURVES + _FIRST, ("fig:fixed_prior_pareto",)
    ),
    "fixed_prior_summary": _Table(compare.fixed_prior_summary, ("tab:fixed_prior_frontier_summary",)),
    "main_signals": _Figure(
        draw.main_signals, "Signals by difficulty, geometric prior", _SIGNALS + _FIRST, ("fig:fixed_prior_convergence",)
    ),
    "gate_comparison": _Figure(
        draw.gate_comparison, "Fixed priors and learned gates", _CURVES + _GATED + _FIRST, ("fig:gate_vs_fixed",)
    ),
    "gate_summary": _Table(compare.gate_summary, ("tab:fixed_vs_gate_multiseed_summary",)),
    "main_forced_exits": _Figure(
        draw.main_forced_exits,
        "Forced exits, geometric prior",
        "Accuracy of every loop, without any exit rule. " + _FIRST,
        ("fig:gate_shapes_trajectory",),
    ),
    "main_exit_distributions": _Figure(
        draw.main_exit_distributions,
        "Learned exit distributions, geometric prior",
        "How the gates spread their exits over the loops. " + _FIRST,
        ("fig:gate_shapes_trajectory",),
    ),
    "posthoc_main": _Figure(
        draw.posthoc_main, "Gates fitted to frozen trajectories", _CURVES + _FIRST, ("fig:posthoc_gate_main",)
    ),
    "posthoc_summary": _Table(compare.posthoc_summary),
    "posthoc_gaps": _Table(compare.posthoc_gaps),
    "lambda_frontiers": _Figure(
        draw.lambda_frontiers,
        "Frontiers of fixed geometric priors",
        _CURVES + _FIRST,
        ("fig:appendix_fixed_prior_pareto_sweep",),
    ),
    "uniform_signals": _Figure(
        draw.uniform_signals, "Signals, uniform prior", _SIGNALS + _FIRST, ("fig:app_uniform_convergence_by_ops",)
    ),
    "uniform_ordering": _Table(compare.uniform_ordering, ("tab:uniform_difficulty_ordering",)),
    "geometric_signals": _Figure(
        draw.geometric_signals, "Signals, geometric prior", _SIGNALS + _FIRST, ("fig:app_geom03_convergence_by_ops",)
    ),
    "geometric_ordering": _Table(compare.geometric_ordering, ("tab:geom_difficulty_ordering",)),
    "geometric_extrapolation": _Figure(
        draw.geometric_extrapolation,
        "Extrapolation, geometric prior",
        _SIGNALS + "Difficulties beyond those of training are included. " + _FIRST,
        ("fig:mano_difficulty_extrapolation_geom",),
    ),
    "uniform_extrapolation": _Figure(
        draw.uniform_extrapolation,
        "Extrapolation, uniform prior",
        _SIGNALS + "Difficulties beyond those of training are included. " + _FIRST,
        ("fig:mano_difficulty_extrapolation_uniform",),
    ),
    "extrapolation_summary": _Table(compare.extrapolation_summary),
    "linear_gate_comparison": _Figure(
        draw.linear_gate_comparison,
        "Linear gates under every prior",
        _CURVES + _GATED + _FIRST,
        ("fig:app_linear_gate_vs_fixed_all_priors",),
    ),
    "mlp_gate_comparison": _Figure(
        draw.mlp_gate_comparison,
        "MLP gates under every prior",
        _CURVES + _GATED + _FIRST,
        ("fig:app_mlp_gate_vs_fixed_all_priors",),
    ),
    "all_forced_exits": _Figure(
        draw.all_forced_exits,
        "Forced exits under every prior",
        "Accuracy of every loop, without any exit rule. " + _FIRST,
        ("fig:app_forced_exit_performance_by_difficulty",),
    ),
    "all_exit_distributions": _Figure(
        draw.all_exit_distributions,
        "Learned exit distributions under every prior",
        "How the gates spread their exits over the loops. " + _FIRST,
        ("fig:app_exit_distribution_by_difficulty",),
    ),
    "parity_frontiers": _Figure(
        draw.parity_frontiers,
        "Parity: fixed priors and gates",
        _CURVES + _GATED + _FIRST,
        ("fig:parity_fixed_vs_gate",),
    ),
    "parity_summary": _Table(compare.parity_summary, ("tab:parity_seed_summary",)),
    "parity_signals": _Figure(
        draw.parity_signals, "Parity: signals by length", _SIGNALS + _FIRST, ("fig:parity_difficulty_diagnostics",)
    ),
    "posthoc_fixed": _Figure(
        draw.posthoc_fixed,
        "Gates fitted to fixed-prior trajectories",
        _CURVES + _FIRST,
        ("fig:posthoc_gate_fixed_appendix",),
    ),
    "posthoc_linear": _Figure(
        draw.posthoc_linear,
        "Gates fitted to linear-gate trajectories",
        _CURVES + _FIRST,
        ("fig:posthoc_gate_linear_learned_appendix",),
    ),
    "posthoc_mlp": _Figure(
        draw.posthoc_mlp,
        "Gates fitted to MLP-gate trajectories",
        _CURVES + _FIRST,
        ("fig:posthoc_gate_mlp_learned_appendix",),
    ),
}
_READOUTS = "Test accuracy against average loops on a benchmark; every panel has its own scale. "
OURO: dict[str, _Figure | _Table] = {
    "ouro_summary": _Table(asked.ouro_summary, ("tab:ouro_readout_summary",)),
    "ouro_claims": _Table(asked.ouro_claims),
    "ouro_frontiers": _Figure(
        draw.ouro_frontiers,
        "Ouro frontiers",
        _READOUTS + "The oracle exits at the first correct loop.",
        ("fig:ouro_pareto_main",),
    ),
    "ouro_latency": _Table(asked.ouro_latency, ("tab:ouro_latency",)),
    "ouro_14b_frontiers": _Figure(
        draw.ouro_14b_frontiers, "Ouro-1.4B on every benchmark", _READOUTS, ("fig:app_ouro_14b_all",)
    ),
    "ouro_26b_frontiers": _Figure(
        draw.ouro_26b_frontiers, "Ouro-2.6B on every benchmark", _READOUTS, ("fig:app_ouro_26b_all",)
    ),
    "ouro_thinking": _Table(asked.ouro_thinking, ("tab:ouro_thinking_diagnostic",)),
    "benchmark_frontiers": _Figure(draw.benchmark_frontiers, "Every other model on every benchmark", _READOUTS),
    "ouro_refitted": _Table(asked.ouro_refitted),
    "refitted_frontiers": _Figure(
        draw.refitted_frontiers, "The released gate and gates fitted to the same trajectory", _READOUTS
    ),
    "ouro_readouts": _Table(asked.ouro_readouts),
    "ouro_metrics": _Table(asked.ouro_metrics),
    "mmlu_subjects": _Table(asked.mmlu_subjects),
}
PRODUCTS = OVERVIEW | PAPER | OURO
_GROUPS = {
    "overview": tuple(OVERVIEW),
    "paper": ("headline", "diagnosis", "certified", *PAPER, "paired", "depths", "forced"),
    "ouro": (*OURO, "diagnosis", "certified", "paired"),
}


def make_products(results: Results, names: Sequence[str]) -> list[Product]:
    """The products of these names (or groups of products), as far as the results have what they need."""
    made = (_make(name, PRODUCTS[name], results) for name in product_names(names))
    return [product for product in made if product is not None]


def product_names(names: Sequence[str]) -> list[str]:
    """The products of these names or groups, each once; one that does not exist is refused."""
    wanted = list(dict.fromkeys(each for name in names for each in _GROUPS.get(name, (name,))))
    if unknown := [name for name in wanted if name not in PRODUCTS]:
        raise UserError(f"There is no product '{unknown[0]}'; choose of {', '.join(_GROUPS)}, {', '.join(PRODUCTS)}.")
    return wanted


def _make(name: str, recipe: _Figure | _Table, results: Results) -> Product | None:
    paper = _counterpart(recipe.labels)
    if isinstance(recipe, _Figure):
        figure = recipe.make(results)
        return None if figure is None else Product(name, recipe.title, recipe.note, paper, figure=figure)
    table = recipe.make(results)
    if table is None or not table.rows:
        return None
    return Product(name, table.title, table.note, paper, table=table)


def _counterpart(labels: Sequence[str]) -> str:
    known = {each.label: f"figure {each.number}" for each in published().figures}
    known |= {each.label: f"table {each.number}" for each in published().tables}
    return ", ".join(known[label] for label in labels)
