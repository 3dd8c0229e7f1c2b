"""The tables of every report, for the terminal, for Markdown and for the page; empty tables are left out."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from loopscope.analysis.diagnosis import GIVEN, NO_VERDICT
from loopscope.analysis.formatting import percent_text, rounded_percent
from loopscope.analysis.gaps import EQUIVALENCE_MARGIN, Gap
from loopscope.analysis.results import over_seeds
from loopscope.analysis.schema import ModelResult, OverSeeds, Results
from loopscope.analysis.targets import Target
from loopscope.analysis.transfer import TransferResult
from loopscope.analysis.verdict_text import with_bounds
from loopscope.learned.stopper import STOPPER_KINDS
from loopscope.policy import Guarantee
from loopscope.readouts.signals import FITTED, OWN_GATES, STOPPER, own_gate
from loopscope.report.curves import Binning, joined_mean

UNLEARNED = "nothing learned"
"""Where there were too few examples, or no signals, to learn a stopper from."""
NOTHING = "-"
"""The text of a cell that can have no value."""
MAX_LISTED_MODELS = 5
"""Models that a note names."""


@dataclass(frozen=True)
class Table:
    """A table of a report: title, note, columns and rows."""

    title: str
    note: str
    columns: list[str]
    rows: list[list[str]]


def of_sequences(results: Results) -> str:
    """The end of a table's note that says what an example is, if examples are parts of sequences."""
    known = {model.label: model for model in results.models if model.sequences is not None}
    if not known:
        return ""
    listed = "; ".join(f"{label}: {model.tested}" for label, model in list(known.items())[:MAX_LISTED_MODELS])
    more = f"; {len(known) - MAX_LISTED_MODELS} more" if len(known) > MAX_LISTED_MODELS else ""
    units = "/".join(dict.fromkeys(model.unit for model in known.values()))
    head = f"Examples are {units}" if len(known) == len(results.models) else f"Some examples are {units}"
    return f" {head} ({listed}{more}): means are over {units}, and intervals draw whole sequences."


def headline(results: Results) -> Table:
    """The first table of a report: the depth that each model needs, and the part to blame."""
    target = results.targets[0]
    relative = next((each for each in results.targets if each.accuracy is None), target)
    rows = []
    for group, members in results.grouped:
        at = f" @{percent_text(min(model.targets[relative.key].reached for model in members))}"
        verdicts = Counter(model.verdict for model in members)
        counted = [name if len(verdicts) == 1 else f"{name} ({count})" for name, count in verdicts.items()]
        lower = lower_accuracy_suffix(members, target)
        own = {name: values[relative.key] for name, values in group.depth_at.items()}
        gate = own_gate(own)
        shown = [
            _depth_cell(group.depth_at["fixed"][target.key], lower, own["fixed"], at),
            _depth_cell(group.depth_at[gate][target.key], lower, own[gate], at) if gate else "no gate",
            _best_readouts_cell(members, target, lower) or _best_readouts_cell(members, relative, at) or "N/A",
        ]
        if without_depths(members):
            shown = [cell if cell == "no gate" else NO_VERDICT for cell in shown]
        label = group.label if len(members) > 1 else members[0].label
        best_loop = share_text(over_seeds([max(model.forced_accuracy) for model in members]))
        rows.append([label, best_loop, *shown, ", ".join(counted)])
    missed = "@: at a lower one, where test data do not reach it"
    if target.accuracy is not None:
        missed = "N/A: none does" if relative is target else f"@: where none does, that of {relative.label}"
    note = (
        f"Least average loops on the test curve that reach {target.meaning} ({missed}), with a fixed depth, with the "
        "model's own gate, and with the readout that validation data choose. Over several seeds: mean ± sample "
        "standard deviation of those that reach it (how many); verdicts are counted."
    )
    columns = ["model", "best loop", "fixed depth", "own gate", "best readout", "to blame"]
    return Table(f"{target.label} and the part to blame", note + of_sequences(results), columns, rows)


def _depth_cell(depth: OverSeeds, lower: str, other: OverSeeds, at: str) -> str:
    """A cell with a depth, or else the depth at a relative target with its accuracy."""
    return f"{other}{at}" if depth.mean is None and other.mean is not None else f"{depth}{lower}"


def _best_readouts_cell(members: Sequence[ModelResult], target: Target, at: str) -> str:
    """A cell with the depth of the best readouts at a target, and their names; empty if none reaches it."""
    best = [best_readout_at(model, target) for model in members]
    depths = [_depth_of(model, readout, target.key) for model, readout in zip(members, best, strict=True)]
    reach = dict.fromkeys(name for name, depth in zip(best, depths, strict=True) if depth is not None)
    return f"{over_seeds(depths)}{at}, {'/'.join(reach)}" if reach else ""


def best_readout_at(model: ModelResult, target: Target) -> str:
    """The readout that validation data choose at a target, which the room left is measured from."""
    rooms = model.rooms.get(target.key)
    room = rooms.room_left if rooms else None
    at_target = room and room.accuracy == model.targets[target.key].reached
    return room.first if room and at_target else model.diagnosis.best_readout


def _depth_of(model: ModelResult, readout: str, target: str) -> float | None:
    """D@X of a model's readout at a target; None if it does not reach the target."""
    frontier = model.frontier(readout)
    return None if frontier is None else frontier.depth_at[target]


def without_depths(models: Sequence[ModelResult]) -> bool:
    """Whether none of these models gets a verdict, so that the tables show no depths."""
    return all(model.diagnosis.verdict == NO_VERDICT for model in models)


def lower_accuracy_suffix(models: Sequence[ModelResult], target: Target) -> str:
    """The suffix with the (lowest) accuracy of a depth if test data do not reach the target."""
    levels = [model.targets[target.key] for model in models]
    if all(level.reached == level.accuracy for level in levels):
        return ""
    return f" @{percent_text(min(level.reached for level in levels))}"


def gaps(results: Results) -> Table:
    """The table of the four gaps of every model."""
    referenced = has_reference(results)
    rows = [[model.label, model.verdict, *gap_cells(model, referenced).values()] for model in results.models]
    target = results.targets[0]
    sought = f"at {target.meaning}"
    if target.accuracy is None:
        sought += " (for the trajectory gap the lower of both models)"
    note = (
        f"Average loops {sought}, with 95 % bootstrap intervals over test examples; at a lower accuracy (@) where that "
        "is out of reach, with the shares of resamples in which the first and the second of the two reach it. Readout "
        "gap: the model's own gate minus its best readout. Trajectory gap: its best readout minus the reference's, "
        "both among the readouts that the two have, without gates. "
        "Room left: its best readout minus the cheapest rule that knows the labels. Reachable room, a part of it: its "
        "best readout minus the better of two rules that were learned from validation data on all signals together "
        "(from more data one might learn more). A part is blamed where the interval lies above zero and not within "
        f"{EQUIVALENCE_MARGIN:g} loops, or where it alone misses the target. {GIVEN} No verdict: the model is not "
        "above chance, or has one loop."
    )
    columns = ["model", "blamed", "readout gap", "trajectory gap", "room left", "reachable room"]
    return Table("Diagnosis", note + of_sequences(results), columns, rows)


def learned_stoppers(results: Results) -> Table:
    """The table of learned stoppers: their gain over the best single readout, and the rest of the room."""
    learned = [f"{STOPPER}{kind}" for kind in STOPPER_KINDS]
    several, rows = len(results.targets) > 1, []
    for group, members in results.grouped:
        if without_depths(members) or not any(name in group.depth_at for name in learned):
            continue
        name = group.label if len(members) > 1 else members[0].label
        for target in results.targets:
            rows.append([name, *[target.label] * several, *_stopper_cells(members, target, learned)])
    note = (
        f"{'D@X' if several else results.targets[0].label} of the single readout that validation data choose, and of "
        "two rules learned from validation data on all signals together: optimal stopping by backward induction, and a "
        "classifier that says whether exiting here loses nothing. Room left: the single readout minus the cheapest "
        "rule that knows the labels. Reachable room, a part of it: the single readout minus the learned rule that "
        "validation data choose, on the same test examples, of every seed with its 95 % bootstrap interval; in how "
        "many seeds the learned rule is better or worse (interval without zero). It is a lower bound: what was learned "
        "from this much data and these signals. Remaining: room left minus reachable room, where both are at one "
        "accuracy. Gaps are at a lower accuracy (@) where the target is out of reach. "
        "Over several seeds: mean ± sample standard deviation (how many)."
    )
    columns = ["model", *["target"] * several, "best single readout", *STOPPER_KINDS, "room left", "reachable room"]
    columns += ["seeds better, worse", "remaining"]
    return Table("Learned stoppers", note + of_sequences(results), columns, rows)


def _stopper_cells(members: Sequence[ModelResult], target: Target, learned: Sequence[str]) -> list[str]:
    """The row of the stopper table for one group of seeds at one target."""
    rooms = [model.rooms.get(target.key) for model in members]
    room = [each.room_left if each else None for each in rooms]
    reachable = [each.reachable_room if each else None for each in rooms]
    best = [gap.first if gap else model.diagnosis.best_readout for gap, model in zip(room, members, strict=True)]
    single = [_depth_of(model, readout, target.key) for model, readout in zip(members, best, strict=True)]
    depths = [over_seeds([_depth_of(model, name, target.key) for model in members]) for name in learned]
    remaining = [
        whole.value - part.value if whole and part and whole.accuracy == part.accuracy else None
        for whole, part in zip(room, reachable, strict=True)
    ]
    lower, signs = lower_accuracy_suffix(members, target), [gap.sign for gap in reachable if gap is not None]
    each = "; ".join(_gap_text(gap, "N/A", False, gap.target if gap else 0.0) for gap in reachable)
    return [
        f"{over_seeds(single)}{lower}, {'/'.join(dict.fromkeys(best))}",
        *(f"{depth}{lower}" for depth in depths),
        gap_over_seeds(room) or "N/A",
        f"{gap_over_seeds(reachable) or 'N/A'}: {each}" if len(members) > 1 else each,
        f"{signs.count(1)}, {signs.count(-1)}",
        str(over_seeds(remaining)),
    ]


def gap_over_seeds(gaps: Sequence[Gap | None]) -> str:
    """The mean gap over seeds with its deviation; empty without a gap."""
    known = [gap for gap in gaps if gap is not None]
    if not known:
        return ""
    lowest = min(gap.accuracy for gap in known)
    below = f" (from @{percent_text(lowest)} on)" if any(gap.accuracy < gap.target for gap in known) else ""
    return f"{over_seeds([None if gap is None else gap.value for gap in gaps])}{below}"


def depths(results: Results) -> Table:
    """The table of D@X for every readout, with the operating point that validation chose."""
    rows = []
    for group, members in results.grouped:
        lower = {target.key: lower_accuracy_suffix(members, target) for target in results.targets}
        judged = [model for model in members if model.diagnosis.verdict != NO_VERDICT]
        silent = {
            key for key in lower if all(model.targets[key].accuracy <= model.diagnosis.chance for model in judged)
        }
        for readout, values in group.depth_at.items():
            accuracy, loops = group.selected_accuracy[readout], group.selected_loops[readout]
            reached = [NO_VERDICT if key in silent else f"{values[key]}{at}" for key, at in lower.items()]
            reached = [NOTHING] * len(reached) if readout == "oracle" else reached
            rows.append([group.label, readout, *reached, share_text(accuracy), str(loops)])
    note = (
        "D@X: the least average loops on the test curve that reach X % accuracy, N/A: not reached; D@full-Y: that "
        "reach an accuracy Y points below the model's own at full depth, which validation data fix (@: at a lower one, "
        "where test data do not reach it). No verdict: model or target are not above chance, or it has one loop. "
        "Selected: the most accurate threshold on validation data (ties to fewer loops), as it does on test data. The "
        "oracle exits at the first correct loop: it has one point and no D@X, which of a rule that knows the labels is "
        "part of the room left. "
        f"{STOPPER}NAME: rules learned from validation data on all signals together. "
        "Over several seeds: mean ± sample standard deviation of those that reach it (how many)."
    )
    columns = ["model", "readout", *(target.label for target in results.targets), "selected: accuracy", "loops"]
    return Table("Depth to accuracy", note + of_sequences(results), columns, rows)


def forced(results: Results) -> Table:
    """The table of forced exits: the accuracy at every loop."""
    rows = []
    for model in results.models:
        rows.append([model.label, "accuracy", *map(rounded_percent, model.forced_accuracy)])
        if model.forced_cross_entropy is not None:
            rows.append([model.label, "cross-entropy", *(f"{value:.3f}" for value in model.forced_cross_entropy)])
    note = "Every test example at the same loop, without any exit rule." + of_sequences(results)
    return loop_table("Forced exits", note, ["model", "measure"], rows, NOTHING)


def forced_by_difficulty(results: Results) -> Table:
    """The table of forced exits by difficulty: which examples need which loop."""
    rows = []
    for group, members in results.grouped:
        binned = Binning(group.label, "accuracy", [model.forced_accuracy_by_difficulty for model in members])
        tables, loops = binned.tables[: binned.seeds], range(1, len(members[0].forced_accuracy) + 1)
        for line in binned.difficulties:
            found = [[joined_mean(table, line.places, loop) for table in tables] for loop in loops]
            shares = [share_text(over_seeds([mean and mean[0] for mean in means])) for means in found]
            rows.append([group.label, line.name, *shares])
    note = (
        "Test examples of a difficulty at the same loop, without any exit rule; neighbouring difficulties are joined "
        "where there are many. Over seeds: mean ± sample standard deviation." + of_sequences(results)
    )
    return loop_table("Forced exits by difficulty", note, ["model", "difficulty"], rows, NOTHING)


def loop_table(title: str, note: str, columns: Sequence[str], rows: Sequence[list[str]], absent: str) -> Table:
    """A table with one column per loop at its end; models with fewer loops have `absent` there."""
    loops = max(map(len, rows), default=len(columns)) - len(columns)
    names = [*columns, *(f"loop {loop}" for loop in range(1, loops + 1))]
    return Table(title, note, names, [row + [absent] * (len(names) - len(row)) for row in rows])


def ordering(results: Results) -> Table:
    """The table of difficulty ordering: the correlation of each signal with difficulty."""
    rows = []
    for group, members in results.grouped:
        for signal, value in group.ordering.items():
            single = [model.ordering[signal].per_example for model in members]
            known = [correlation for correlation in single if correlation is not None]
            rows.append([group.label, signal, str(value), f"{sum(known) / len(known):.2f}" if known else "N/A"])
    note = (
        "Spearman correlation between difficulty and the signal, averaged over loops, signed so that 1 means that "
        "harder examples always look harder: of the bin means, as in the paper, and of single examples."
        + of_sequences(results)
    )
    return Table("Difficulty ordering", note, ["model", "signal", "bin means", "examples"], rows)


def paired_table(results: Results) -> Table:
    """The table of paired comparisons: the model's own gate against readouts without a gate."""
    rows = []
    for model in results.models:
        for each in model.paired:
            differences = [with_bounds(each.accuracy, 100), with_bounds(each.loops)]
            counts = f"{each.only_first_right:,} / {each.only_second_right:,}"
            rows.append([model.label, f"{each.first} - {each.second}", *differences, counts])
    note = (
        "Both at the thresholds that validation chose, on the same test examples: difference in accuracy (points) and "
        "in average loops with paired 95 % bootstrap intervals, and how many examples only one of them gets right. The "
        "gate's opponent is the readout without a gate whose chosen threshold is the most accurate on validation data "
        "(ties to fewer loops), which need not be the best readout of other tables: that has the least D@X. Beside it "
        "stands the margin of the reference, if there is one with the same test examples."
    )
    columns = ["model", "between", "accuracy", "loops", "only first / second right"]
    return Table("Paired comparisons", note + of_sequences(results), columns, rows)


def certified(results: Results) -> Table:
    """The table of certified policies: their guarantees, and their results on test data."""
    rows = []
    for model in results.models:
        for each in model.certified:
            rule = each.readout + ("" if each.threshold is None else f" at {each.threshold:.4g}")
            held = each.held_out
            guarantee, loops, accuracy, loss, kept = "none", f"{held.average_loops.value:.2f}", *[NOTHING] * 3
            if each.guarantee is not None:
                guarantee = guarantee_cell(each.guarantee)
                loops += f" ({each.guarantee.average_loops:.2f} expected)"
            if held.accuracy is not None and held.full_depth_accuracy is not None:
                accuracy = f"{100 * held.accuracy.value:.2f} % ({100 * held.full_depth_accuracy:.2f} %)"
            if held.guarantee is not None:
                kept = held.guarantee.verdict + (" (other difficulties)" if held.guarantee.warnings else "")
                if (risk := held.guarantee.worst) is not None:
                    loss = f"{100 * risk.loss:.2f} % [{100 * risk.low:.2f}, {100 * risk.high:.2f}]"
            rows.append([model.label, rule, guarantee, loops, accuracy, loss, kept, each.counted_on(model.unit)])
        rows += [[model.label, "none", f"rejected: {sentence}", *[NOTHING] * 5] for sentence in model.refused]
    note = (
        "Thresholds that come with a guarantee: with this probability over the draw of the calibration data, exiting "
        "early loses at most so much against full depth (accuracy lost: wrong where full depth is right; disagreement: "
        "another answer). Loops on test data, and as calibration expects them. Accuracy on test data, and at full "
        "depth. Loss: observed on test data with its 95 % interval; where the guarantee is for every difficulty, of "
        "the worst one. "
        "Kept: it is within the limit; not refuted: it is above, but by no more than chance would explain; broken: the "
        "interval lies above. Counted on: what the guarantee is about; other tables may be of other examples."
    )
    title = "Certified policies"
    if any(each.held_out.sequences is not None for model in results.models for each in model.certified):
        title += " (of texts: means over sequences)"
    columns = ["model", "rule", "guarantee", "loops", "accuracy", "loss", "guarantee was", "counted on"]
    return Table(title, note, columns, rows)


def guarantee_cell(guarantee: Guarantee) -> str:
    """A guarantee as a cell of a table."""
    sure = "on average" if guarantee.confidence is None else f"{100 * guarantee.confidence:g} % sure"
    where = ", at every difficulty" if guarantee.per_difficulty else ""
    loss = "accuracy lost" if guarantee.loss == "gap" else guarantee.loss  # a gap is in loops elsewhere
    return f"{loss} ≤ {percent_text(guarantee.max_drop)}, {sure}{where}"


def has_reference(results: Results) -> bool:
    """Whether a report compares its models with a reference."""
    return any(model.is_reference for model in results.models)


def gap_cells(model: ModelResult, referenced: bool, shares: bool = True) -> dict[str, str]:
    """The cells of a model's gaps by name; with `shares`, the shares of resamples that reach the target.

    `referenced`: whether the report has a reference.
    """
    nothing = NO_VERDICT if model.diagnosis.verdict == NO_VERDICT else "nothing above chance"
    learned = nothing == NO_VERDICT or any(each.readout.startswith(STOPPER) for each in model.frontiers)
    judged = "weak reference" if model.diagnosis.weak_reference else nothing
    absent = {
        "readout gap": nothing if any(map(model.frontier, OWN_GATES)) else "no gate",
        "trajectory gap": "is the reference" if model.is_reference else judged if referenced else "no reference",
        "room left": nothing,
        "reachable room": nothing if learned else UNLEARNED,
    }
    own = model.diagnosis.target.accuracy
    return {name: _gap_text(gap, absent[name], shares, own) for name, gap in model.diagnosis.gaps.items()}


def _gap_text(gap: Gap | None, absent: str, with_shares: bool, target: float) -> str:
    """A gap as a cell of a table."""
    if gap is None:
        return absent
    text, reaching = with_bounds(gap), (gap.first_reaches_target, gap.second_reaches_target)
    if min(reaching) < 1 or gap.accuracy != target:  # or the reference's own is lower
        text += f" @{percent_text(gap.accuracy)}"
    if min(reaching) < 1 and with_shares:
        text += f" ({', '.join(map(rounded_percent, reaching))})"
    return text


def share_text(value: OverSeeds) -> str:
    """An accuracy over seeds, in percent."""
    if value.mean is None:
        return "N/A"
    spread = "" if value.deviation is None else f" ± {100 * value.deviation:.1f}"
    return f"{100 * value.mean:.1f}{spread} %"


_ITSELF, _OTHER_SEED = "itself", "another seed"


def transfer_table(results: Results) -> Table:
    """The table of transfer: the rules of every model on the test data of every model."""
    order = {model.name: place for place, model in enumerate(results.models)}
    group_of = {name: group.label for group in results.groups for name in group.names}
    alone = {name: len(group.names) == 1 for group in results.groups for name in group.names}
    labels = {model.name: group_of[model.name] for model in results.models}
    pairs: dict[tuple[str, str, str], list[TransferResult]] = defaultdict(list)
    for each in sorted(results.transfer, key=lambda each: order[each.fitted_on]):
        stops = labels[each.stops]
        if each.fitted_on == each.stops:
            stops = _ITSELF
        elif labels[each.fitted_on] == stops and not alone[each.stops]:
            stops = _OTHER_SEED
        pairs[labels[each.fitted_on], stops, _rule_kind(each.readout)].append(each)
    rows = [
        [fitted_on, stops, _rule_name(kind, found), *cells]
        for (fitted_on, stops, kind), found in pairs.items()
        for cells in _transfer_cells(found)
    ]
    target = results.targets[0]
    note = (
        "Rules that were fitted on one model, replayed on the test data of another: the threshold of its best readout "
        "without a gate and of its own gate, its fitted gates, and stoppers learned from all of its signals but the "
        "gate's. The best readout is that of the model that is stopped, as its validation data choose it. "
        f"{target.label}: how many loops more the rule takes than that readout, with thresholds as they lie in the "
        "validation data of the model that is stopped, so that only what the rule says is carried over. At the rule's "
        "own threshold: how many points more it is right in, and how many loops more it takes, than that readout at "
        "the threshold with which it reaches the target on its own validation data. One pair of models: with its 95 % "
        "interval. Several: mean ± sample standard deviation (how many), and in how many the interval lies on the "
        "worse side of zero. A gate for states of another model need not mean anything there; this says whether it "
        "does."
    )
    columns = ["fitted on", "stops", "rule", f"{target.label} - best readout's", "own threshold: points", "loops"]
    return Table("Rules across trajectories", note + of_sequences(results), columns, rows)


def _rule_kind(readout: str) -> str:
    """The kind of a transferred rule: its gate or stopper; empty for its best signal, which may differ by seed."""
    return readout if readout in OWN_GATES or readout.startswith(FITTED) else ""


def _rule_name(kind: str, found: Sequence[TransferResult]) -> str:
    """The name of a transferred rule, with the signals that its seeds chose."""
    return kind or "/".join(dict.fromkeys(each.readout for each in found))


def _transfer_cells(found: Sequence[TransferResult]) -> Iterator[list[str]]:
    """The cells of a transferred rule: its results, or why it could not be replayed."""
    refused = dict.fromkeys(each.refused for each in found if each.refused)
    yield from ([f"rejected: {sentence}", NOTHING, NOTHING] for sentence in refused)
    known = [each.selected for each in found if each.selected is not None]
    if not known:
        return
    gaps = [each.gap for each in found if each.selected is not None]
    if len(known) == 1:
        (gap,), (one,) = gaps, known
        at = "" if gap is None or gap.accuracy == gap.target else f" @{percent_text(gap.accuracy)}"
        yield [
            NOTHING if gap is None else with_bounds(gap) + at,
            with_bounds(one.accuracy, 100),
            with_bounds(one.loops),
        ]
        return
    worse = sum(gap is not None and gap.sign > 0 for gap in gaps)
    wrong, slower = sum(each.accuracy.high < 0 for each in known), sum(each.loops.low > 0 for each in known)
    yield [
        f"{gap_over_seeds(gaps) or NOTHING}; worse in {worse}",
        f"{over_seeds([100 * each.accuracy.value for each in known])}; worse in {wrong}",
        f"{over_seeds([each.loops.value for each in known])}; worse in {slower}",
    ]
