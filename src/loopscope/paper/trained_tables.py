"""The counterparts of the paper's tables on models that LoopScope trained: our numbers, and the paper's beside them.

A table finds its models by what they were trained with: `TaskVariants`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from statistics import fmean
from typing import Any, Literal

from loopscope.analysis.bootstrap import ENOUGH, Interval
from loopscope.analysis.formatting import percent_text, rounded_percent
from loopscope.analysis.results import architecture_words, depth_words, model_label, over_seeds, recorded_run
from loopscope.analysis.schema import FrontierResult, GroupResult, ModelResult, OverSeeds, PolicyLatency, Results
from loopscope.analysis.verdict_text import with_bounds
from loopscope.paper.published import PublishedValue, TrainedWith, published
from loopscope.readouts.signals import FITTED, FITTED_GATE
from loopscope.report.curves import continued
from loopscope.report.tables import Table, share_text

VariantPrior = Literal["uniform"] | float
UNIFORM: VariantPrior = "uniform"
GEOMETRIC: VariantPrior = 0.3
"""The geometric prior of the paper's main text."""
_OURS = (
    "Mean ± sample standard deviation over the seeds that reach it (how many of how many); then the first seed's own "
    "value with its 95 % bootstrap interval over test examples (or the share of resamples that reach it, if they are "
    "fewer than 95 %). N/A: no seed reaches it."
)
_THEIRS = " Paper: as it printed them, on its own, larger scale: compare orderings, not values."


@dataclass(frozen=True)
class TrainedVariant:
    """Trained runs that differ only in their seed, and their training in the paper's terms."""

    task: str
    gate: str
    prior: VariantPrior
    beta: float | None
    group: GroupResult
    models: list[ModelResult]

    @property
    def first(self) -> ModelResult:
        """The first seed's run: tables show its value and interval beside the mean over seeds."""
        return self.models[0]

    @property
    def words(self) -> str:
        """The training in words, without the task."""
        return model_label(self.first.provenance, self.first.name)

    @property
    def counted(self) -> str:
        """The training in words, with the number of runs."""
        return self.counting(len(self.models))

    def counting(self, seeds: int) -> str:
        """The training in words, with the number of some of its runs."""
        return f"{self.words} ({seeds} {'seed' if seeds == 1 else 'seeds'})"

    @property
    def seeded(self) -> list[tuple[int, ModelResult]]:
        """Every run with its seed."""
        return [(model.provenance["run"]["training"]["seed"], model) for model in self.models]

    def matches(self, training: TrainedWith) -> bool:
        """Whether the paper trained a model like this one; it does not always say beta."""
        prior = training.prior if training.prior == "uniform" else training.geometric_lambda
        gates = ("linear", "mlp") if training.gate == "unstated" else (training.gate,)
        return self.gate in gates and prior == self.prior


Rule = tuple[TrainedVariant | None, str]
"""A group of runs (None: the report has none), and the rule by which it exits."""


def trained_variants(
    results: Results, objectives: Sequence[str] = ("fixed_prior", "learned_gate")
) -> list[TrainedVariant]:
    """The groups of runs that LoopScope trained with one of these objectives (default: the paper's).

    They are of one architecture and depth: the paper's, or else that which differs least from it.
    """
    variants = []
    runs = [(group, models, recorded_run(models[0].provenance)) for group, models in results.grouped]
    found = [(group, models, run) for group, models, run in runs if run and run["objective"]["name"] in objectives]
    usual = min((_architecture_options(models[0], run) for _, models, run in found), key=len, default=[])
    for group, models, run in found:
        if _architecture_options(models[0], run) != usual:
            continue
        if run["objective"]["prior"] not in ("uniform", "geometric"):  # the paper has no others
            continue
        objective, gate = run["objective"], run["model"]["gate"]
        prior: VariantPrior = "uniform" if objective["prior"] == "uniform" else float(objective["geometric_lambda"])
        beta = None if gate == "none" else float(objective["beta"])
        variants.append(TrainedVariant(run["task"]["name"], gate, prior, beta, group, models))
    return variants


def _architecture_options(model: ModelResult, run: dict[str, Any]) -> list[str]:
    """The architecture options of a run that the paper's models do not have."""
    return [*architecture_words(run["model"]), *depth_words(model.provenance)]


class TaskVariants:
    """The trained models of one task, by the paper's objectives."""

    def __init__(self, results: Results, task: str) -> None:
        self.first_target = results.targets[0].key
        self.groups = [group for group in trained_variants(results) if group.task == task]

    @property
    def priors(self) -> list[VariantPrior]:
        """Uniform first, then by lambda."""
        return sorted({group.prior for group in self.groups}, key=lambda prior: 0.0 if prior == "uniform" else prior)

    def fixed(self, prior: VariantPrior) -> TrainedVariant | None:
        return self.at("none", prior)

    def gated(self, gate: str, prior: VariantPrior) -> list[TrainedVariant]:
        """The models of this gate and prior, by beta."""
        found = [group for group in self.groups if (group.gate, group.prior) == (gate, prior)]
        return sorted(found, key=lambda group: group.beta or 0.0)

    def at(self, gate: str, prior: VariantPrior, beta: float | None = 0.1) -> TrainedVariant | None:
        """With this beta, which fixed priors do not have."""
        return next((group for group in self.gated(gate, prior) if group.beta in (None, beta)), None)

    def best(self, gate: str, prior: VariantPrior) -> TrainedVariant | None:
        """The beta that validation data choose: the least D@X of the gate at the first target, then the most accurate.

        Betas are compared on the seeds that all of them have. One that misses the target counts as infinitely deep.
        """
        groups = self.gated(gate, prior)
        seeds = [{seed for seed, _ in group.seeded} for group in groups]

        def score(group: TrainedVariant) -> tuple[float, float]:
            """Smaller is better; without seeds that all have, over the group's own."""
            models = [model for seed, model in group.seeded if all(seed in each for each in seeds)]
            gates = [gate for model in models or group.models if (gate := model.frontier("gate"))]
            depths = [gate.calibration_depth_at[self.first_target] for gate in gates]
            accuracies = [gate.selected.calibration_accuracy for gate in gates]
            return fmean([inf if depth is None else depth for depth in depths] or [inf]), -fmean(accuracies or [inf])

        return min(groups, key=score, default=None)


def prior_words(prior: VariantPrior) -> str:
    """A depth prior in the words of the paper's tables."""
    return "uniform" if prior == "uniform" else f"geometric {prior:g}"


def fixed_prior_summary(results: Results) -> Table:
    """The paper's table of fixed-prior models: D@X."""
    mano = TaskVariants(results, "mano")
    groups = [group for prior in mano.priors if (group := mano.fixed(prior)) is not None]
    shown = ("fixed", "entropy", "top1", "margin")
    rows = [_depth_row(group, readout, results) for group in groups for readout in shown]
    return _depth_table("Fixed-prior models: depth to accuracy", rows, results)


def gate_summary(results: Results) -> Table:
    """The paper's table of fixed-prior margin beside the native gates, each with its best beta: D@X."""
    mano = TaskVariants(results, "mano")
    rows = [
        _depth_row(group, readout, results)
        for prior in mano.priors
        for gate, readout in (("none", "margin"), ("linear", "gate"), ("mlp", "gate"))
        if (group := mano.best(gate, prior)) is not None
    ]
    title = "Fixed priors and learned gates: depth to accuracy"
    return _depth_table(title, rows, results, " β is chosen on validation.")


def parity_summary(results: Results) -> Table:
    """The paper's table of parity: the operating points that validation chose."""
    parity = TaskVariants(results, "parity")
    groups = [parity.best(gate, prior) for prior in (UNIFORM, GEOMETRIC) for gate in ("none", "linear", "mlp")]
    rows = []
    for group in groups:
        if group is not None:
            readout = "gate" if group.gate != "none" else _best_confidence_readout(group)
            row = next((row for row in published().parity if group.matches(row.training)), None)
            paper = ["", "", ""]
            if row is not None:
                accuracy = share_text(OverSeeds(row.accuracy.mean, row.accuracy.deviation, 3, 3))
                paper = [row.readout, accuracy, _published_text(row.loops)]
            rows.append([group.counted, readout, *_operating_point_cells(group, readout), *paper])
    columns = ["training", "readout", "accuracy", "loops", "paper: readout", "paper: accuracy", "paper: loops"]
    note = (
        "Operating points chosen on validation data (the most accurate threshold, ties to fewer loops), on test data. "
        "Fixed priors: the confidence readout that validation prefers. " + _OURS + _THEIRS
    )
    return Table("Parity: operating points", note, columns, rows)


def posthoc_summary(results: Results) -> Table:
    """The table of frozen trajectories: D@X of every readout, gates fitted to them among these."""
    rows = []
    for group in TaskVariants(results, "mano").groups:
        over = group.group
        fitted = [name for name in over.depth_at if name.startswith(FITTED_GATE)]
        for readout in ("fixed", "gate", "margin", *fitted) if fitted else ():
            if readout in over.depth_at:
                selected = [share_text(over.selected_accuracy[readout]), str(over.selected_loops[readout])]
                rows.append([group.counted, readout, *_depth_cells(group, readout, results), *selected])
    columns = ["trajectory", "readout", *_depth_columns(results), "selected: accuracy", "loops"]
    note = f"Gates fitted to frozen trajectories ({FITTED_GATE}kind-objective) beside its own gate and margin. " + _OURS
    return Table("Post-hoc gates: depth to accuracy", note, columns, rows)


def posthoc_gaps(results: Results) -> Table:
    """The table of fitted gates against the model's own gate, or against margin for a model without a gate."""
    rows = []
    for group in TaskVariants(results, "mano").groups:
        for gap in group.first.fitted_gaps:
            over = [each for model in group.models for each in model.fitted_gaps if each.first == gap.first]
            signs = [each.sign for each in over]
            gaps = [str(over_seeds([each.value for each in over])), with_bounds(gap)]
            counts = f"{signs.count(-1)}, {signs.count(1)}"
            rows.append([group.counted, f"{gap.first} - {gap.second}", percent_text(gap.accuracy), *gaps, counts])
    note = (
        "D@X of a gate fitted to the frozen trajectory minus that of the model's own gate (of margin, where it has "
        "none), paired on the same test examples and on a fine grid of thresholds: over seeds, of the first seed with "
        "its 95 % interval, and in how many seeds the fitted gate is better or worse (interval without zero)."
    )
    columns = ["trajectory", "between", "at", "over seeds", "first seed", "seeds better, worse"]
    return Table("Fitted gates against the model's own", note, columns, rows)


def decoupled_gate(results: Results) -> Table:
    """The table of one stop-gradient: the decoupled gate beside joint gate, fitted gate and fixed prior."""
    rows = []
    for decoupled in trained_variants(results, ["decoupled_gate"]):
        task = TaskVariants(results, decoupled.task)
        joint = task.best(decoupled.gate, decoupled.prior)
        if joint is None:
            continue
        same = task.at(decoupled.gate, decoupled.prior, decoupled.beta)
        fixed = task.fixed(decoupled.prior)
        gated = [decoupled, joint] if same is joint else [decoupled, same, joint]
        rules: list[Rule] = [(group, "its own gate") for group in gated]
        rules += [(fixed, "best single readout"), (fixed, "best fitted gate")]
        rows += _remedy_rows(rules, decoupled, results)
    target = results.targets[0]
    note = (
        "The decoupled gate's trajectory is shaped by the fixed prior, and the gate learns behind a stop-gradient; the "
        "joint gate shapes its trajectory, too (at the same β, and at the one that validation data choose, where that "
        "is another). Best single readout, and gates fitted afterwards to the frozen trajectory: those that validation "
        "data choose for every seed and target. D@X: least average loops on the test curve that reach X, mean ± "
        "sample standard deviation over the seeds that reach it (how many of how many). Last: a rule's "
        f"{target.label} minus that of the decoupled gate with the same seed; positive where the decoupled gate is "
        "quicker."
    )
    return Table("One stop-gradient: decoupled gates", note, _remedy_columns(results), rows)


def gate_stages(results: Results) -> Table:
    """The table of Ouro's stages: a joint gate, gates fitted to the same trajectory, and a decoupled gate."""
    rows = []
    for decoupled in trained_variants(results, ["decoupled_gate"]):
        task = TaskVariants(results, decoupled.task)
        joint, fixed = task.at(decoupled.gate, decoupled.prior, decoupled.beta), task.fixed(decoupled.prior)
        if joint is None or not any(_frontiers_of_rule(model, "best fitted gate") for model in joint.models):
            continue
        rules: list[Rule] = [(joint, "its own gate"), (joint, "best fitted gate"), (decoupled, "its own gate")]
        rules += [(fixed, "best fitted gate"), (fixed, "best single readout")]
        rows += _remedy_rows(rules, decoupled, results)
    note = (
        "Stage I trains trunk and gate jointly, with a KL to a prior (to a uniform one: an entropy bonus). Stage II "
        "holds the trunk still and fits a gate to it: the best fitted gate on the same trajectory. Beside them: the "
        "decoupled gate, and a gate fitted to the fixed prior's trajectory. D@X: least average loops on the test curve "
        "that reach X, mean ± sample standard deviation over the seeds that reach it (how many of how many). Last: a "
        f"rule's {results.targets[0].label} minus that of the decoupled gate with the same seed."
    )
    return Table("Stage I, stage II, and a decoupled gate", note, _remedy_columns(results), rows)


def _remedy_columns(results: Results) -> list[str]:
    """The columns of the tables on decoupled gates."""
    return ["task", "training", "exits by", *_depth_columns(results), f"{results.targets[0].label} - decoupled gate's"]


def _remedy_rows(rules: Sequence[Rule], decoupled: TrainedVariant, results: Results) -> list[list[str]]:
    """The rows of the tables on decoupled gates, for models that the report has."""
    return [
        [group.task, group.counted, rule, *_remedy_cells(group, rule, decoupled, results)]
        for group, rule in rules
        if group is not None and any(_frontiers_of_rule(model, rule) for model in group.models)
    ]


def mano_latency(results: Results) -> Table:
    """The paper's table of the time per example of MANO: final loop, and readouts that exit earlier, live."""
    timed = {bench.model: bench for bench in results.latency if bench.benchmark is None}
    rows = []
    for group in trained_variants(results):
        benches = [timed[model.name] for model in group.models if model.name in timed]
        for first in benches[0].policies if benches else ():
            runs = [(bench, way) for bench in benches for way in bench.policies if way.readout == first.readout]
            speedup = str(over_seeds([way.speedup.median for _, way in runs]))
            cells = [
                share_text(over_seeds([way.accuracy for _, way in runs])),
                str(over_seeds([way.average_loops for _, way in runs])),
                str(first.milliseconds),
                str(first.speedup) if len(runs) == 1 else f"{speedup}; {first.speedup}",
                f"{100 * fmean(bench.realised(way) for bench, way in runs):.0f} %",
            ]
            rows.append([group.task, group.counting(len(benches)), first.readout, *cells, _paper_latency(group, first)])
    note = (
        "Test examples run live, one way after the other within a round, at the points that validation chose. "
        "Accuracy, loops and speed-up: mean ± sample standard deviation over seeds; milliseconds, and the speed-up "
        "that stands after it: the first seed's, median and quartiles over rounds. Realised: the speed-up as a share "
        "of loops saved (T / average loops). Paper: of its own GPU and scale; it does not say which gate it timed."
    )
    columns = ["task", "training", "readout", "accuracy", "loops", "ms an example", "speed-up", "realised", "paper"]
    return Table("Time an example", note, columns, rows)


def _paper_latency(group: TrainedVariant, way: PolicyLatency) -> str:
    """The time that the paper printed for a model and readout, if it did."""
    for row in published().mano_latency:
        training = row.training
        if training is None or not group.matches(training) or training.beta not in (None, group.beta):
            continue
        if (group.task, row.readout) == ("mano", way.readout):
            return f"{rounded_percent(row.accuracy)} at {row.loops:.2f}, {row.milliseconds:g} ms, {row.speedup:.2f}"
    return ""


def _frontiers_of_rule(model: ModelResult, rule: str) -> list[FrontierResult]:
    """The frontiers among which a rule of the decoupled-gate tables chooses."""
    names = {frontier.readout: frontier for frontier in model.frontiers if frontier.readout != "oracle"}
    if rule == "its own gate":
        return [names["gate"]] if "gate" in names else []
    prefix, included = (FITTED_GATE, True) if rule == "best fitted gate" else (FITTED, False)
    return [frontier for name, frontier in names.items() if name.startswith(prefix) == included]


def _remedy_cells(group: TrainedVariant, rule: str, decoupled: TrainedVariant, results: Results) -> list[str]:
    """The cells of a rule: D@X at every target over seeds, and the difference from the decoupled gate's."""
    keys = [target.key for target in results.targets]
    cells = [str(over_seeds([_best_depth(model, rule, key) for model in group.models])) for key in keys]
    if group is decoupled:
        return [*cells, ""]
    gates = {seed: _best_depth(model, "its own gate", keys[0]) for seed, model in decoupled.seeded}
    pairs = [(_best_depth(model, rule, keys[0]), gates[seed]) for seed, model in group.seeded if seed in gates]
    more = [None if depth is None or gate is None else depth - gate for depth, gate in pairs]
    return [*cells, str(over_seeds(more))]


def _best_depth(model: ModelResult, rule: str, target: str) -> float | None:
    """D@X of the readout that is best on validation data, among a rule's readouts."""
    frontiers = _frontiers_of_rule(model, rule)
    reaching = [each for each in frontiers if each.calibration_depth_at[target] is not None]
    if reaching:
        return min(reaching, key=lambda each: each.calibration_depth_at[target] or 0.0).depth_at[target]
    return min(frontiers, key=lambda each: each.selected.rank).depth_at[target] if frontiers else None


def extrapolation_summary(results: Results) -> Table:
    """The paper's table of extrapolation: accuracy and entropy by difficulty, within and beyond training."""
    mano = TaskVariants(results, "mano")
    rows, levels = [], []
    for group in map(mano.fixed, mano.priors):
        if group is None or group.first.extrapolation is None:
            continue
        model, beyond = group.first, group.first.extrapolation
        accuracy = continued(model.forced_accuracy_by_difficulty, beyond.forced_accuracy_by_difficulty)
        entropy = continued(model.signals["entropy"], beyond.signals["entropy"]).values
        levels = accuracy.levels
        last = ["" if row[-1] is None else rounded_percent(row[-1]) for row in accuracy.values]
        rows.append([group.words, "accuracy, last loop", *last])
        rows.append([group.words, "entropy, loop 1", *(f"{row[0]:.3f}" for row in entropy)])
        rows.append([group.words, "entropy, last loop", *(f"{row[-1]:.3f}" for row in entropy)])
    note = "Bin means of the first seed; difficulties beyond those of training are out of distribution."
    return Table("Extrapolation", note, ["training", "", *(f"{level:g}" for level in levels)], rows)


def ordering_of_fixed_prior(results: Results, prior: VariantPrior) -> Table:
    """The paper's table of difficulty ordering: how well signals order difficulties."""
    group = TaskVariants(results, "mano").fixed(prior)
    paper = published().uniform_ordering if prior == UNIFORM else published().geometric_ordering
    known = {} if group is None else group.group.ordering
    rows = [
        [signal, str(known[signal]), _published_text(paper[signal]) if signal in paper else ""]
        for signal in ("entropy", "margin", "kl", "hidden_change")
        if signal in known
    ]
    note = (
        "Signed Spearman correlation between difficulty and the bin means of a signal, averaged over loops, mean ± "
        "sample standard deviation over seeds: 1 means that harder examples always look harder."
    )
    return Table(f"Difficulty ordering, fixed prior, {prior_words(prior)}", note, ["signal", "ours", "paper"], rows)


def _depth_table(title: str, rows: list[list[str]], results: Results, more: str = "") -> Table:
    """A table of D@X beside the paper's."""
    columns = ["training", "readout", *_depth_columns(results), *(f"paper: D@{x}" for x in (95, 98, 99))]
    note = f"D@X: least average loops that reach X % test accuracy.{more} {_OURS}{_THEIRS}"
    return Table(title, note, columns, rows)


def _depth_columns(results: Results) -> list[str]:
    """The D@X columns, one per target."""
    return [target.label for target in results.targets]


def _depth_row(group: TrainedVariant, readout: str, results: Results) -> list[str]:
    """A row of D@X, ours and the paper's; N/A if the paper prints that."""
    rows = (*published().fixed_prior, *published().fixed_vs_gate)
    row = next((row for row in rows if row.readout == readout and group.matches(row.training)), None)
    known = {} if row is None else row.depth_at
    absent = "" if row is None else "N/A"
    printed = [_published_text(known[x]) if x in known else absent for x in ("0.95", "0.98", "0.99")]
    return [group.counted, readout, *_depth_cells(group, readout, results), *printed]


def _depth_cells(group: TrainedVariant, readout: str, results: Results) -> list[str]:
    """The cells of our D@X, over seeds, with the first seed's interval."""
    first = group.first.frontier(readout)
    cells = []
    for key in (target.key for target in results.targets):
        bounds = first.depth_interval[key] if first and readout != "fixed" else None
        own = first.depth_at[key] if first else None
        cells.append(f"{group.group.depth_at[readout][key]}{_first_seed_text(group, own, bounds)}")
    return cells


def _best_confidence_readout(group: TrainedVariant) -> str:
    """The most accurate of entropy, top1 and margin on validation data over seeds, ties to fewer loops."""

    def rank(readout: str) -> tuple[float, float]:
        points = [frontier.selected for model in group.models if (frontier := model.frontier(readout)) is not None]
        return -sum(p.calibration_accuracy for p in points), sum(p.calibration_average_loops for p in points)

    return min(("entropy", "top1", "margin"), key=rank)


def _operating_point_cells(group: TrainedVariant, readout: str) -> tuple[str, str]:
    """The accuracy and loops of the operating point that validation chose, as cells."""
    accuracy, loops = share_text(group.group.selected_accuracy[readout]), str(group.group.selected_loops[readout])
    frontier = group.first.frontier(readout)
    assert frontier is not None
    point = frontier.selected
    accuracy += _first_seed_text(group, point.accuracy, point.accuracy_interval, percent=True)
    return accuracy, loops + _first_seed_text(group, point.average_loops, point.loops_interval)


def _first_seed_text(group: TrainedVariant, value: float | None, bounds: Interval | None, percent: bool = False) -> str:
    """The first seed's value and interval in a counterpart table; an interval of few resamples is a share."""
    if bounds is None or bounds.reached < 0.01:
        return ""
    scale, digits = (100, 1) if percent else (1, 2)
    text = f"[{scale * bounds.low:.{digits}f}, {scale * bounds.high:.{digits}f}]"
    if bounds.reached < ENOUGH:
        text = f"[{100 * bounds.reached:.0f} % of resamples]"
    if len(group.models) == 1:
        return f" {text}"
    return f"; {text}" if value is None else f"; {scale * value:.{digits}f} {text}"


def _published_text(value: PublishedValue) -> str:
    """A published value in a counterpart table: mean ± deviation."""
    return f"{value.mean:.2f} ± {value.deviation:.2f}"
