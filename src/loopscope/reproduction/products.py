"""The counterparts of the paper's tables and figures, each under a name, beside those that every report has."""

from dataclasses import replace
from functools import partial

from loopscope.analysis.schema import Results
from loopscope.report.charts import Drawing
from loopscope.report.products import CURVES, OVERVIEW, SIGNALS, Catalogue, Figure, Recipe, TableOf
from loopscope.report.tables import Table
from loopscope.reproduction import figures, ouro_tables, tables
from loopscope.reproduction.published import published
from loopscope.reproduction.variants import GEOMETRIC, UNIFORM, on_paper_grid

_FRONTIERS, _SIGNALS = CURVES, SIGNALS
_GATES = CURVES + "Readouts without a gate run on the fixed-prior trajectory, gates on their own. "
_FORCED = "Accuracy of every loop, without any exit rule. "
_EXITS = "How the gates spread their exits over the loops. "
_BEYOND = SIGNALS + "Difficulties beyond those of training are included. "

PAPER: dict[str, Recipe] = {
    "teaser": Figure(figures.teaser, "Teaser", _FRONTIERS, "fig:teaser"),
    "fixed_prior_frontiers": Figure(
        partial(figures.fixed_prior_frontiers, priors=(UNIFORM, GEOMETRIC)),
        "Frontiers of fixed-prior models",
        _FRONTIERS,
        "fig:fixed_prior_pareto",
    ),
    "fixed_prior_summary": TableOf(tables.fixed_prior_summary, "tab:fixed_prior_frontier_summary"),
    "main_signals": Figure(
        partial(figures.fixed_prior_signals, prior=GEOMETRIC, names=("entropy", "hidden_change")),
        "Signals by difficulty, geometric prior",
        _SIGNALS,
        "fig:fixed_prior_convergence",
    ),
    "gate_comparison": Figure(figures.gate_comparison, "Fixed priors and learned gates", _GATES, "fig:gate_vs_fixed"),
    "gate_summary": TableOf(tables.gate_summary, "tab:fixed_vs_gate_multiseed_summary"),
    "main_forced_exits": Figure(
        partial(figures.forced_exits_by_family, priors=(GEOMETRIC,)),
        "Forced exits, geometric prior",
        _FORCED,
        "fig:gate_shapes_trajectory",
    ),
    "main_exit_distributions": Figure(
        partial(figures.exit_distributions_by_family, priors=(GEOMETRIC,)),
        "Learned exit distributions, geometric prior",
        _EXITS,
        "fig:gate_shapes_trajectory",
    ),
    "posthoc_main": Figure(
        figures.posthoc_main, "Gates fitted to frozen trajectories", _FRONTIERS, "fig:posthoc_gate_main"
    ),
    "posthoc_summary": TableOf(tables.posthoc_summary),
    "posthoc_gaps": TableOf(tables.posthoc_gaps),
    "decoupled_gate": TableOf(tables.decoupled_gate),
    "lambda_frontiers": Figure(
        figures.fixed_prior_frontiers,
        "Frontiers of fixed geometric priors",
        _FRONTIERS,
        "fig:appendix_fixed_prior_pareto_sweep",
    ),
    "uniform_signals": Figure(
        partial(figures.fixed_prior_signals, prior=UNIFORM),
        "Signals, uniform prior",
        _SIGNALS,
        "fig:app_uniform_convergence_by_ops",
    ),
    "uniform_ordering": TableOf(tables.uniform_ordering, "tab:uniform_difficulty_ordering"),
    "geometric_signals": Figure(
        partial(figures.fixed_prior_signals, prior=GEOMETRIC),
        "Signals, geometric prior",
        _SIGNALS,
        "fig:app_geom03_convergence_by_ops",
    ),
    "geometric_ordering": TableOf(tables.geometric_ordering, "tab:geom_difficulty_ordering"),
    "geometric_extrapolation": Figure(
        partial(figures.extrapolation, prior=GEOMETRIC),
        "Extrapolation, geometric prior",
        _BEYOND,
        "fig:mano_difficulty_extrapolation_geom",
    ),
    "uniform_extrapolation": Figure(
        partial(figures.extrapolation, prior=UNIFORM),
        "Extrapolation, uniform prior",
        _BEYOND,
        "fig:mano_difficulty_extrapolation_uniform",
    ),
    "extrapolation_summary": TableOf(tables.extrapolation_summary),
    "linear_gate_comparison": Figure(
        partial(figures.gate_comparison, gates=("linear",), priors=None),
        "Linear gates under every prior",
        _GATES,
        "fig:app_linear_gate_vs_fixed_all_priors",
    ),
    "mlp_gate_comparison": Figure(
        partial(figures.gate_comparison, gates=("mlp",), priors=None),
        "MLP gates under every prior",
        _GATES,
        "fig:app_mlp_gate_vs_fixed_all_priors",
    ),
    "all_forced_exits": Figure(
        figures.forced_exits_by_family,
        "Forced exits under every prior",
        _FORCED,
        "fig:app_forced_exit_performance_by_difficulty",
    ),
    "all_exit_distributions": Figure(
        figures.exit_distributions_by_family,
        "Learned exit distributions under every prior",
        _EXITS,
        "fig:app_exit_distribution_by_difficulty",
    ),
    "parity_frontiers": Figure(
        partial(figures.gate_comparison, task="parity"),
        "Parity: fixed priors and gates",
        _GATES,
        "fig:parity_fixed_vs_gate",
    ),
    "parity_summary": TableOf(tables.parity_summary, "tab:parity_seed_summary"),
    "parity_signals": Figure(
        partial(
            figures.fixed_prior_signals, prior=GEOMETRIC, names=("entropy", "margin", "hidden_change"), task="parity"
        ),
        "Parity: signals by length",
        _SIGNALS,
        "fig:parity_difficulty_diagnostics",
    ),
    "posthoc_fixed": Figure(
        partial(figures.posthoc_by_prior, gate="none"),
        "Gates fitted to fixed-prior trajectories",
        _FRONTIERS,
        "fig:posthoc_gate_fixed_appendix",
    ),
    "posthoc_linear": Figure(
        partial(figures.posthoc_by_prior, gate="linear"),
        "Gates fitted to linear-gate trajectories",
        _FRONTIERS,
        "fig:posthoc_gate_linear_learned_appendix",
    ),
    "posthoc_mlp": Figure(
        partial(figures.posthoc_by_prior, gate="mlp"),
        "Gates fitted to MLP-gate trajectories",
        _FRONTIERS,
        "fig:posthoc_gate_mlp_learned_appendix",
    ),
}
_READOUTS = "Test accuracy against average loops on a benchmark; every panel has its own scale. "
OURO: dict[str, Recipe] = {
    "ouro_summary": TableOf(ouro_tables.ouro_summary, "tab:ouro_readout_summary"),
    "ouro_claims": TableOf(ouro_tables.ouro_claims),
    "ouro_frontiers": Figure(
        figures.ouro_frontiers,
        "Ouro frontiers",
        _READOUTS + "The oracle exits at the first correct loop.",
        "fig:ouro_pareto_main",
    ),
    "ouro_latency": TableOf(ouro_tables.ouro_latency, "tab:ouro_latency"),
    "ouro_14b_frontiers": Figure(
        partial(figures.frontiers_of_model, model="Ouro-1.4B"),
        "Ouro-1.4B on every benchmark",
        _READOUTS,
        "fig:app_ouro_14b_all",
    ),
    "ouro_26b_frontiers": Figure(
        partial(figures.frontiers_of_model, model="Ouro-2.6B"),
        "Ouro-2.6B on every benchmark",
        _READOUTS,
        "fig:app_ouro_26b_all",
    ),
    "ouro_thinking": TableOf(ouro_tables.ouro_thinking, "tab:ouro_thinking_diagnostic"),
    "benchmark_frontiers": Figure(figures.benchmark_frontiers, "Every other model on every benchmark", _READOUTS),
    "ouro_refitted": TableOf(ouro_tables.ouro_refitted),
    "refitted_frontiers": Figure(
        figures.refitted_frontiers, "The released gate and gates fitted to the same trajectory", _READOUTS
    ),
    "ouro_readouts": TableOf(ouro_tables.ouro_readouts),
    "ouro_metrics": TableOf(ouro_tables.ouro_metrics),
    "mmlu_subjects": TableOf(ouro_tables.mmlu_subjects),
}


def _counterpart(label: str) -> str:
    known = {each.label: f"figure {each.number}" for each in published().figures}
    known |= {each.label: f"table {each.number}" for each in published().tables}
    return known[label] if label else ""


_GRID = (
    " Thresholds: the paper's grids (51 quantiles of the validation signal, 100 values of the gate's CDF), coarser "
    "than those of other tables, where depths can be less, mostly by hundredths of a loop."
)
_BESIDE = {
    *("teaser", "fixed_prior_frontiers", "fixed_prior_summary", "gate_comparison", "gate_summary", "posthoc_main"),
    *("lambda_frontiers", "linear_gate_comparison", "mlp_gate_comparison", "parity_frontiers", "parity_summary"),
    *("posthoc_fixed", "posthoc_linear", "posthoc_mlp", "ouro_summary", "ouro_claims", "ouro_frontiers"),
    *("ouro_14b_frontiers", "ouro_26b_frontiers", "ouro_thinking"),
}
"""What sweeps thresholds and stands beside published numbers: it is on the paper's grid."""


def _on_grid(recipe: Recipe) -> Recipe:
    if isinstance(recipe, Figure):
        return replace(recipe, make=partial(_figure_on_grid, recipe), note=recipe.note.rstrip() + _GRID)
    return replace(recipe, make=partial(_table_on_grid, recipe))


def _figure_on_grid(recipe: Figure, results: Results) -> Drawing | None:
    return recipe.make(on_paper_grid(results))


def _table_on_grid(recipe: TableOf, results: Results) -> Table | None:
    table = recipe.make(on_paper_grid(results))
    return None if table is None else replace(table, note=table.note + _GRID)


PRODUCTS = Catalogue(
    {
        **OVERVIEW.recipes,
        **{name: _on_grid(recipe) if name in _BESIDE else recipe for name, recipe in (PAPER | OURO).items()},
    },
    {
        "overview": (*OVERVIEW.groups["overview"], "decoupled_gate"),
        "paper": ("headline", "diagnosis", "stoppers", "certified", *PAPER, "paired", "depths", "forced"),
        "ouro": (*OURO, "diagnosis", "stoppers", "certified", "paired"),
    },
    _counterpart,
)
