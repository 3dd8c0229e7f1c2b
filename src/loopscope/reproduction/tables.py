"""The counterparts of the paper's tables: our numbers, and the paper's beside them."""

from collections.abc import Callable, Mapping

from loopscope.analysis import ENOUGH, Interval, OverSeeds, over_seeds
from loopscope.analysis.schema import FrontierResult, ModelResult, Results
from loopscope.analysis.targets import percent_text
from loopscope.exits.signals import FITTED, FITTED_GATE
from loopscope.report.tables import Table, share
from loopscope.reproduction.published import PublishedValue, TrainedWith, published
from loopscope.reproduction.variants import (
    DECOUPLED,
    GEOMETRIC,
    UNIFORM,
    TaskVariants,
    TrainedVariant,
    VariantPrior,
    prior_words,
    trained_variants,
)

_OURS = (
    "Mean ± sample standard deviation over the seeds that reach it (how many of how many); then the first seed's own "
    "value with its 95 % bootstrap interval over test examples (or the share of resamples that reach it, if they are "
    "fewer than 95 %). N/A: no seed reaches it."
)
_THEIRS = " Paper: as it printed them, on its own, larger scale: compare orderings, not values."


def fixed_prior_summary(results: Results) -> Table | None:
    """D@X of fixed-prior models."""
    mano = TaskVariants(results, "mano")
    rows = [
        row
        for prior in mano.priors
        if (group := mano.fixed(prior)) is not None
        for row in [
            [group.counted, readout, *_depths(group, readout, results), *_printed(group, readout)]
            for readout in ("fixed", "entropy", "top1", "margin")
        ]
    ]
    return _depth_table("Fixed-prior models: depth to accuracy", rows, results)


def gate_summary(results: Results) -> Table | None:
    """D@X of fixed-prior margin beside the native gates, each with its best beta."""
    mano = TaskVariants(results, "mano")
    rows = []
    for prior in mano.priors:
        for gate, readout in (("none", "margin"), ("linear", "gate"), ("mlp", "gate")):
            group = mano.best(gate, prior)
            if group is not None:
                rows.append([group.counted, readout, *_depths(group, readout, results), *_printed(group, readout)])
    return _depth_table(
        "Fixed priors and learned gates: depth to accuracy", rows, results, " β is chosen on validation."
    )


def uniform_ordering(results: Results) -> Table | None:
    return _ordering(results, UNIFORM, published().uniform_ordering)


def geometric_ordering(results: Results) -> Table | None:
    return _ordering(results, GEOMETRIC, published().geometric_ordering)


def parity_summary(results: Results) -> Table | None:
    """The operating points that validation chose."""
    parity = TaskVariants(results, "parity")
    rows = []
    for prior in (UNIFORM, GEOMETRIC):
        for gate in ("none", "linear", "mlp"):
            group = parity.best(gate, prior)
            if group is None:
                continue
            readout = "gate" if gate != "none" else _best_confidence(group)
            paper = next((row for row in published().parity if matches(row.training, group)), None)
            rows.append(
                [
                    group.counted,
                    readout,
                    *_selected(group, readout),
                    paper.readout if paper else "",
                    _paper_share(paper.accuracy) if paper else "",
                    _paper(paper.loops) if paper else "",
                ]
            )
    if not rows:
        return None
    columns = ["training", "readout", "accuracy", "loops", "paper: readout", "paper: accuracy", "paper: loops"]
    note = (
        "Operating points chosen on validation data (the most accurate threshold, ties to fewer loops), on test data. "
        "Fixed priors: the confidence readout that validation prefers. " + _OURS + _THEIRS
    )
    return Table("Parity: operating points", note, columns, rows)


def posthoc_summary(results: Results) -> Table | None:
    """D@X of every readout that stops a frozen trajectory, gates fitted to it among them."""
    mano = TaskVariants(results, "mano")
    rows = []
    for group in mano.groups:
        fitted = [name for name in group.group.depth_at if name.startswith(FITTED_GATE)]
        if fitted:
            for readout in ("fixed", "gate", "margin", *fitted):
                if readout in group.group.depth_at:
                    accuracy, loops = group.group.selected_accuracy[readout], group.group.selected_loops[readout]
                    rows.append(
                        [group.counted, readout, *_depths(group, readout, results), share(accuracy), str(loops)]
                    )
    if not rows:
        return None
    columns = ["trajectory", "readout", *_depth_columns(results), "selected: accuracy", "loops"]
    note = f"Gates fitted to frozen trajectories ({FITTED_GATE}kind-objective) beside its own gate and margin. " + _OURS
    return Table("Post-hoc gates: depth to accuracy", note, columns, rows)


def posthoc_gaps(results: Results) -> Table | None:
    """Fitted gates against the model's own gate, or against margin where it has none."""
    rows = []
    for group in TaskVariants(results, "mano").groups:
        for gap in group.first.fitted_gaps:
            over = [each for model in group.models for each in model.fitted_gaps if each.first == gap.first]
            values = over_seeds([each.value for each in over])
            rows.append(
                [
                    group.counted,
                    f"{gap.first} - {gap.second}",
                    percent_text(gap.accuracy),
                    str(values),
                    f"{gap.value:+z.2f} [{gap.low:+z.2f}, {gap.high:+z.2f}]",
                    f"{sum(each.sign < 0 for each in over)}, {sum(each.sign > 0 for each in over)}",
                ]
            )
    note = (
        "D@X of a gate fitted to the frozen trajectory minus that of the model's own gate (of margin, where it has "
        "none), paired on the same test examples and on a fine grid of thresholds: over seeds, of the first seed with "
        "its 95 % interval, and in how many seeds the fitted gate is better or worse (interval without zero)."
    )
    columns = ["trajectory", "between", "at", "over seeds", "first seed", "seeds better, worse"]
    return Table("Fitted gates against the model's own", note, columns, rows)


def decoupled_gate(results: Results) -> Table | None:
    """What one stop-gradient changes: the decoupled gate beside the joint one, the fitted one and the fixed prior."""
    rows = []
    for decoupled in trained_variants(results, DECOUPLED):
        task = TaskVariants(results, decoupled.task)
        joint = task.best(decoupled.gate, decoupled.prior)
        if joint is None:
            continue
        same = task.at(decoupled.gate, decoupled.prior, decoupled.beta or 0.0)
        fixed = task.fixed(decoupled.prior)
        gated = [decoupled, joint] if same is joint else [decoupled, same, joint]
        rules: list[tuple[TrainedVariant | None, str, _Among]] = [(group, "its own gate", _own_gate) for group in gated]
        rules += [(fixed, "best single readout", _single), (fixed, "best fitted gate", _fitted)]
        for group, words, among in rules:
            if group is not None and any(map(among, group.models)):
                rows.append([group.task, group.counted, words, *_remedy_cells(group, among, decoupled, results)])
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
    columns = ["task", "training", "exits by", *_depth_columns(results), f"{target.label} - decoupled gate's"]
    return Table("One stop-gradient: decoupled gates", note, columns, rows)


_Among = Callable[[ModelResult], list[FrontierResult]]


def _own_gate(model: ModelResult) -> list[FrontierResult]:
    return [each for each in model.frontiers if each.readout == "gate"]


def _single(model: ModelResult) -> list[FrontierResult]:
    return [each for each in model.frontiers if each.readout != "oracle" and not each.readout.startswith(FITTED)]


def _fitted(model: ModelResult) -> list[FrontierResult]:
    return [each for each in model.frontiers if each.readout.startswith(FITTED_GATE)]


def _remedy_cells(group: TrainedVariant, among: _Among, decoupled: TrainedVariant, results: Results) -> list[str]:
    """D@X at every target over seeds, and at the first of them how much more than the decoupled gate's."""
    cells = [
        str(over_seeds([_best_depth(among(each), target.key) for each in group.models])) for target in results.targets
    ]
    if group is decoupled:
        return [*cells, ""]
    key = results.targets[0].key
    own = {
        seed: _best_depth(_own_gate(each), key) for seed, each in zip(decoupled.seeds, decoupled.models, strict=True)
    }
    pairs = [
        (_best_depth(among(each), key), own[seed])
        for seed, each in zip(group.seeds, group.models, strict=True)
        if seed in own
    ]
    more = [None if rule is None or gate is None else rule - gate for rule, gate in pairs]
    return [*cells, str(over_seeds(more))]


def _best_depth(frontiers: list[FrontierResult], target: str) -> float | None:
    """D@X of the readout with the least on validation data; where none reaches it there, of the most accurate one."""
    reaching = [each for each in frontiers if each.calibration_depth_at[target] is not None]
    if reaching:
        return min(reaching, key=lambda each: each.calibration_depth_at[target] or 0.0).depth_at[target]
    return min(frontiers, key=lambda each: each.selected.rank).depth_at[target] if frontiers else None


def extrapolation_summary(results: Results) -> Table | None:
    """Accuracy at the last loop and entropy by difficulty, within and beyond the range of training."""
    mano = TaskVariants(results, "mano")
    rows, levels = [], []
    for prior in mano.priors:
        group = mano.fixed(prior)
        if group is None or group.first.extrapolation is None:
            continue
        model, beyond = group.first, group.first.extrapolation
        levels = [*model.forced_accuracy_by_difficulty.levels, *beyond.forced_accuracy_by_difficulty.levels]
        accuracy = [*model.forced_accuracy_by_difficulty.values, *beyond.forced_accuracy_by_difficulty.values]
        entropy = [*model.signals["entropy"].values, *beyond.signals["entropy"].values]
        name = group.words
        last = ["" if row[-1] is None else f"{100 * row[-1]:.1f} %" for row in accuracy]
        rows.append([name, "accuracy, last loop", *last])
        rows.append([name, "entropy, loop 1", *(f"{row[0]:.3f}" for row in entropy)])
        rows.append([name, "entropy, last loop", *(f"{row[-1]:.3f}" for row in entropy)])
    if not rows:
        return None
    note = "Bin means of the first seed; difficulties beyond those of training are out of distribution."
    return Table("Extrapolation", note, ["training", "", *(f"{level:g}" for level in levels)], rows)


def _ordering(results: Results, prior: VariantPrior, paper: Mapping[str, PublishedValue]) -> Table | None:
    group = TaskVariants(results, "mano").fixed(prior)
    if group is None:
        return None
    rows = [
        [signal, str(group.group.ordering[signal]), _paper(paper[signal]) if signal in paper else ""]
        for signal in ("entropy", "margin", "kl", "hidden_change")
        if signal in group.group.ordering
    ]
    note = (
        "Signed Spearman correlation between difficulty and the bin means of a signal, averaged over loops, mean ± "
        "sample standard deviation over seeds: 1 means that harder examples always look harder."
    )
    return Table(f"Difficulty ordering, fixed prior, {prior_words(prior)}", note, ["signal", "ours", "paper"], rows)


def _depth_table(title: str, rows: list[list[str]], results: Results, more: str = "") -> Table | None:
    if not rows:
        return None
    columns = ["training", "readout", *_depth_columns(results), *(f"paper: D@{x}" for x in (95, 98, 99))]
    note = f"D@X: least average loops that reach X % test accuracy.{more} {_OURS}{_THEIRS}"
    return Table(title, note, columns, rows)


def _depth_columns(results: Results) -> list[str]:
    return [target.label for target in results.targets]


def _depths(group: TrainedVariant, readout: str, results: Results) -> list[str]:
    first = group.first.frontier(readout)
    cells = []
    for target in (target.key for target in results.targets):
        bounds = first.depth_interval[target] if first and readout != "fixed" else None
        own = first.depth_at[target] if first else None
        cells.append(f"{group.group.depth_at[readout][target]}{_first(group, own, bounds)}")
    return cells


def _printed(group: TrainedVariant, readout: str) -> list[str]:
    """What the paper printed for the same training and readout; N/A where it did, nothing where it has no such row."""
    rows = (*published().fixed_prior, *published().fixed_vs_gate)
    row = next((row for row in rows if row.readout == readout and matches(row.training, group)), None)
    if row is None:
        return ["", "", ""]
    return [_paper(row.depth_at[x]) if x in row.depth_at else "N/A" for x in ("0.95", "0.98", "0.99")]


def matches(training: TrainedWith, group: TrainedVariant) -> bool:
    prior: VariantPrior = "uniform" if training.prior == "uniform" else training.geometric_lambda or 0.0
    return (training.gate, prior) == (group.gate, group.prior)


def _best_confidence(group: TrainedVariant) -> str:
    """By the mean accuracy on validation data over the seeds, ties to fewer loops."""

    def rank(readout: str) -> tuple[float, float]:
        points = [frontier.selected for model in group.models if (frontier := model.frontier(readout)) is not None]
        return -sum(p.calibration_accuracy for p in points), sum(p.calibration_average_loops for p in points)

    return min(("entropy", "top1", "margin"), key=rank)


def _selected(group: TrainedVariant, readout: str) -> tuple[str, str]:
    """Accuracy and loops of the operating point that validation chose."""
    accuracy, loops = group.group.selected_accuracy[readout], group.group.selected_loops[readout]
    frontier = group.first.frontier(readout)
    if frontier is None:
        return share(accuracy), str(loops)
    point = frontier.selected
    return (
        share(accuracy) + _first(group, point.accuracy, point.accuracy_interval, percent=True),
        str(loops) + _first(group, point.average_loops, point.loops_interval),
    )


def _first(group: TrainedVariant, value: float | None, bounds: Interval | None, percent: bool = False) -> str:
    """What the first seed says; an interval over the lucky resamples only would say too much."""
    if bounds is None or bounds.reached < 0.01:
        return ""
    scale, digits = (100, 1) if percent else (1, 2)
    text = f"[{scale * bounds.low:.{digits}f}, {scale * bounds.high:.{digits}f}]"
    if bounds.reached < ENOUGH:
        text = f"[{100 * bounds.reached:.0f} % of resamples]"
    if len(group.models) == 1:
        return f" {text}"
    return "; " + (f"{scale * value:.{digits}f} " if value is not None else "") + text


def _paper(value: PublishedValue) -> str:
    return f"{value.mean:.2f} ± {value.deviation:.2f}"


def _paper_share(value: PublishedValue) -> str:
    return str(share(OverSeeds(value.mean, value.deviation, 3, 3)))
