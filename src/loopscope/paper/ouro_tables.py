"""Checkpoints on benchmarks: the counterparts of the paper's tables on Ouro, and what stands beside them.

Operating points are chosen on validation data (the most accurate threshold, ties to fewer loops), as table 7's are.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from loopscope.analysis.bootstrap import Interval
from loopscope.analysis.formatting import percent_text, rounded_percent
from loopscope.analysis.schema import BenchmarkResult, FrontierResult, ModelResult, Results
from loopscope.analysis.verdict_text import with_bounds
from loopscope.paper.published import PublishedPoint, published
from loopscope.questions import BENCHMARKS
from loopscope.readouts.readout import POST_HOC
from loopscope.readouts.signals import FITTED, FITTED_GATE
from loopscope.report.tables import Table, loop_table

_CHOSEN = (
    "Operating points chosen on validation data (the most accurate threshold, ties to fewer loops), on test data, with "
    "95 % bootstrap intervals over its questions. Of the readouts without a gate, the one that validation prefers. "
)
_THEIRS = "Paper: as it printed them; it does not say how it chose its points."
_THINKING = "-Thinking"
_TIMED = "Ouro-1.4B"
"""The model that the paper timed."""


class BenchmarkModel(NamedTuple):
    """An Ouro checkpoint on a benchmark, with its result."""

    benchmark: BenchmarkResult
    result: ModelResult

    @property
    def names(self) -> tuple[str, str]:
        """The names of checkpoint and benchmark, as in the paper."""
        return self.benchmark.model, self.benchmark.title

    @property
    def gate(self) -> FrontierResult | None:
        return self.result.frontier("gate")

    @property
    def post_hoc(self) -> FrontierResult | None:
        """The readout without a gate that validation prefers."""
        return self.result.best(POST_HOC)

    @property
    def reasons(self) -> bool:
        return self.benchmark.model.endswith(_THINKING)


def benchmark_models(results: Results) -> list[BenchmarkModel]:
    """The checkpoints on benchmarks in a report."""
    return [BenchmarkModel(model.benchmark, model) for model in results.models if model.benchmark is not None]


def row_winners(results: Results) -> list[str]:
    """The readouts without a gate that win a row of an Ouro table, the paper's or ours; figures show all of them."""
    names = [row.readout for row in published().ouro]
    names += [row.readout for row in published().ouro_thinking]
    for each in benchmark_models(results):
        on_grid = msgspec.structs.replace(each.result, frontiers=each.result.paper_grid.frontiers)
        for model in (each.result, on_grid):
            best = model.best(POST_HOC)
            if best is not None:
                names.append(best.readout)
    return [name for name in dict.fromkeys(names) if name in POST_HOC]


def ouro_summary(results: Results) -> Table:
    """The Ouro table of the gate beside the best readout without one; reasoning-tuned models have their own table."""
    rows = []
    for each in benchmark_models(results):
        if each.reasons or each.post_hoc is None:
            continue
        row = next((row for row in published().ouro if (row.model, row.benchmark) == each.names), None)
        paper = ["", ""] if row is None else [_printed(row.gate), f"{row.readout} {_printed(row.post_hoc)}"]
        gate = _point_cells(each.gate) if each.gate else ("no gate", "")
        rows.append([*each.names, *gate, each.post_hoc.readout, *_point_cells(each.post_hoc), *paper])
    columns = ["model", "benchmark", "gate: accuracy", "loops", "post-hoc", "accuracy", "loops"]
    columns += ["paper: gate", "paper: post-hoc"]
    return Table("The model's own gate and the best post-hoc readout", _CHOSEN + _THEIRS, columns, rows)


def ouro_thinking(results: Results) -> Table:
    """The Ouro table of reasoning-tuned models: their best readout, the gate among them."""
    rows = []
    for each in benchmark_models(results):
        best = each.result.best(("gate", *POST_HOC)) if each.reasons else None
        if best is None:
            continue
        paper = next((row for row in published().ouro_thinking if (row.model, row.benchmark) == each.names), None)
        rows.append(
            [*each.names, best.readout, *_point_cells(best), f"{paper.readout} {_printed(paper)}" if paper else ""]
        )
    note = _CHOSEN + "Here the gate competes with them. " + _THEIRS
    columns = ["model", "benchmark", "readout", "accuracy", "loops", "paper"]
    return Table("The best readout of reasoning-tuned models", note, columns, rows)


def ouro_claims(results: Results) -> Table:
    """The claims that the paper counts in its Ouro tables, counted in ours."""
    counted: dict[str, list[tuple[bool, bool]]] = defaultdict(list)  # whether it holds, and beyond chance
    for each in benchmark_models(results):
        if each.reasons:
            best = each.result.best(("gate", *POST_HOC))
            counted["thinking_not_the_gate"].append((best is not None and best.readout != "gate", False))
        elif each.gate and each.post_hoc:
            gate, other, pair = each.gate.selected, each.post_hoc.selected, each.result.paired[0]  # gate minus post-hoc
            accurate = other.accuracy > gate.accuracy, pair.accuracy.high < 0
            fewer = other.average_loops < gate.average_loops, pair.loops.low > 0
            counted["ouro_more_accurate"].append(accurate)
            counted["ouro_fewer_loops"].append(fewer)
            counted["ouro_both"].append((accurate[0] and fewer[0], accurate[1] and fewer[1]))
    timed = [bench for bench in results.latency if bench.model == _TIMED]
    speedups = [way.speedup.median for bench in timed for way in bench.policies if way.readout == "gate"]
    rows = []
    for claim in published().claims:
        if claim.key in counted:
            ours, sure = zip(*counted[claim.key], strict=True)
            beyond = "" if claim.key == "thinking_not_the_gate" else str(sum(sure))
            paper = f"{claim.low:g} of {claim.of}" + ("" if claim.borne_out else " (its own table has another number)")
            rows.append([claim.about, f"{sum(ours)} of {len(ours)}", beyond, paper])
        elif claim.key == "ouro_gate_speedup" and speedups:
            found = f"{min(speedups):.2f} to {max(speedups):.2f}"
            rows.append([claim.about, found, "", f"{claim.low:g} to {claim.high:g}"])
    note = (
        "What the paper counts in its tables 3 and 8, in ours, whichever models they have. Beyond chance: where the "
        "paired 95 % interval on the same test questions lies on that side of zero."
    )
    return Table("The paper's counts", note, ["claim", "ours", "beyond chance", "paper"], rows)


def ouro_readouts(results: Results) -> Table:
    """The Ouro table of fixed depth, gate, readouts, fitted gates and oracle: one column per benchmark."""
    every = benchmark_models(results)
    titles = list(dict.fromkeys(each.benchmark.title for each in every))
    rows = []
    for model in dict.fromkeys(each.benchmark.model for each in every):
        cells: dict[str, dict[str, str]] = {}
        for each in (each for each in every if each.benchmark.model == model):
            for name, text in _operating_points(each.result):
                cells.setdefault(name, {})[each.benchmark.title] = text
        order = sorted(cells, key=lambda name: (name == "oracle", name.startswith(FITTED)))
        rows += [[model, name, *(cells[name].get(title, "") for title in titles)] for name in order]
    note = (
        "Test accuracy at average loops. Static depth: every question at the same loop. All others at the threshold "
        f"that validation chose; {FITTED_GATE}KIND-OBJECTIVE are gates fitted to the frozen trajectory on the "
        "benchmark's train split. The oracle exits at the first correct loop."
    )
    return Table("Every readout on every benchmark", note, ["model", "readout", *titles], rows)


def ouro_refitted(results: Results) -> Table:
    """The Ouro table of gates that were fitted to the frozen trajectory, against the released gate."""
    rows = []
    for each in benchmark_models(results):
        for gap in each.result.fitted_gaps:
            fitted, other = each.result.frontier(gap.first), each.result.frontier(gap.second)
            if fitted is not None and other is not None:
                more = f"{with_bounds(gap)} @{percent_text(gap.accuracy)}"
                points = [gap.second, _operating_point_text(other), gap.first, _operating_point_text(fitted)]
                rows.append([*each.names, *points, more])
    note = (
        "Section 5.4 on a checkpoint: gates fitted to its frozen trajectory on the benchmark's train split, beside its "
        "own gate (margin where it has none). Points as validation chooses them, on test data; then the loops that the "
        "fitted gate takes more to reach the same accuracy, the highest whole percent that both reach (95 % interval)."
    )
    columns = ["model", "benchmark", "released", "accuracy at loops", "refitted", "accuracy at loops", "more loops"]
    return Table("The released gate and refitted ones", note, columns, rows)


def ouro_metrics(results: Results) -> Table:
    """The Ouro table of both metrics at every loop."""
    rows = []
    for each in benchmark_models(results):
        for metric, values in each.benchmark.accuracy.items():
            scored = metric + (" (scored)" if metric == each.benchmark.metric else "")
            rows.append([*each.names, f"{each.result.test_examples:,}", scored, *map(rounded_percent, values)])
    note = "Every test question at the same loop; acc_norm divides the score of a choice by its characters."
    return loop_table("Both metrics at every loop", note, ["model", "benchmark", "questions", "metric"], rows, "")


def mmlu_subjects(results: Results) -> Table:
    """The table of MMLU's subjects, and of all of them together."""
    rows = []
    for each in (each for each in benchmark_models(results) if each.benchmark.subjects):
        parts = [(part.name, part.questions, part.accuracy) for part in each.benchmark.subjects]
        parts.append(("all", each.result.test_examples, each.result.forced_accuracy))
        for name, count, values in parts:
            rows.append([each.benchmark.model, name, f"{count:,}", *map(rounded_percent, values)])
    note = "Every test question at the same loop. All: over questions, so that a large subject counts for more."
    return loop_table("MMLU by subject", note, ["model", "subject", "questions"], rows, "")


def ouro_latency(results: Results) -> Table:
    """The Ouro table of the time per question: final loop, gate and best other readout, live."""
    printed = {(row.benchmark, _timed_role(row.readout)): row for row in published().ouro_latency}
    rows = []
    for bench in results.latency:
        if bench.benchmark is None:
            continue
        title = BENCHMARKS[bench.benchmark].title if bench.benchmark in BENCHMARKS else bench.benchmark
        for timing in bench.policies:
            point = [rounded_percent(timing.accuracy), f"{timing.average_loops:.2f}"]
            times = [str(timing.milliseconds), str(timing.speedup), f"{100 * bench.realised(timing):.0f} %"]
            row = printed.get((title, _timed_role(timing.readout))) if bench.model == _TIMED else None
            paper = "" if row is None else f"{row.readout} {_printed(row)}, {row.milliseconds:g} ms, {row.speedup:.2f}"
            rows.append([bench.model, title, timing.readout, *point, *times, paper])
    note = (
        "Questions run live, one way after the other within a round; median and quartiles over rounds. Accuracy and "
        "loops are of the questions that were timed. Realised: the speed-up as a share of loops saved (T / average "
        "loops; with the layers around the loops, where there are any). Paper: of its own GPU; its times are "
        "proportional to its loops, so that overhead does not show."
    )
    columns = ["model", "benchmark", "readout", "accuracy", "loops", "ms a question", "speed-up", "realised", "paper"]
    return Table("Time a question", note, columns, rows)


def _operating_points(model: ModelResult) -> Iterable[tuple[str, str]]:
    """The operating points of a checkpoint on a benchmark: every fixed depth, and every readout's."""
    for loop, accuracy in enumerate(model.forced_accuracy, start=1):
        yield f"static depth {loop}", rounded_percent(accuracy)
    for frontier in model.frontiers:
        name = "static depth, chosen" if frontier.readout == "fixed" else frontier.readout
        yield name, _operating_point_text(frontier)


def _operating_point_text(frontier: FrontierResult) -> str:
    """An operating point in an Ouro table: accuracy at average loops."""
    return f"{rounded_percent(frontier.selected.accuracy)} at {frontier.selected.average_loops:.2f}"


def _point_cells(frontier: FrontierResult) -> tuple[str, str]:
    """The accuracy and average loops of a readout's operating point, with their intervals."""
    point = frontier.selected
    accuracy = f"{rounded_percent(point.accuracy)}{_bounds_text(point.accuracy_interval, 100, 1)}"
    return accuracy, f"{point.average_loops:.2f}{_bounds_text(point.loops_interval, 1, 2)}"


def _bounds_text(interval: Interval | None, scale: float, digits: int) -> str:
    """The bounds of an interval in an Ouro table."""
    return "" if interval is None else f" [{scale * interval.low:.{digits}f}, {scale * interval.high:.{digits}f}]"


def _timed_role(readout: str) -> str:
    """The role of a readout in the table of times: fixed depth, gate, or the best other readout."""
    return readout if readout in ("fixed", "gate") else "other"


def _printed(point: PublishedPoint) -> str:
    """A published operating point in an Ouro table."""
    return f"{rounded_percent(point.accuracy)} at {point.loops:.2f}"
