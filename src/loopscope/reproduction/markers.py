"""Where would the paper's numbers lie in a chart of our frontiers? A marker each, beside the models that match it."""

from collections.abc import Iterable

from loopscope.analysis.schema import Results
from loopscope.report.page.data import Marker
from loopscope.reproduction.ouro_tables import benchmark_models
from loopscope.reproduction.published import published
from loopscope.reproduction.tables import matches
from loopscope.reproduction.variants import TaskVariants, on_paper_grid


def markers(results: Results) -> list[Marker]:
    """D@X of MANO, the operating points of parity and Ouro: as the paper printed them, on its own scale."""
    results = on_paper_grid(results)
    return [*_depths(results), *_parity(results), *_ouro(results)]


def _depths(results: Results) -> Iterable[Marker]:
    mano, paper = TaskVariants(results, "mano"), published()
    known = {(row.training, row.readout): row for row in (*paper.fixed_prior, *paper.fixed_vs_gate)}
    for (training, readout), row in known.items():
        for group in mano.groups:
            if matches(training, group) and group is mano.best(group.gate, group.prior):
                for target, depth in row.depth_at.items():
                    words = (
                        f"D@{100 * float(target):g} {depth.mean:.2f} ± {depth.deviation:.2f}, {readout}, {group.words}"
                    )
                    yield Marker(group.group.names, readout, depth.mean, float(target), words)


def _parity(results: Results) -> Iterable[Marker]:
    parity = TaskVariants(results, "parity")
    for row in published().parity:
        for group in parity.groups:
            if matches(row.training, group) and group is parity.best(group.gate, group.prior):
                point = f"accuracy {100 * row.accuracy.mean:.2f} %, {row.loops.mean:.2f} loops"
                words = f"{point}, {row.readout}, {group.words}"
                yield Marker(group.group.names, row.readout, row.loops.mean, row.accuracy.mean, words)


def _ouro(results: Results) -> Iterable[Marker]:
    points = [
        (row.model, row.benchmark, readout, point)
        for row in published().ouro
        for readout, point in (("gate", row.gate), (row.readout, row.post_hoc))
    ]
    points += [(row.model, row.benchmark, row.readout, row) for row in published().ouro_thinking]
    for model, benchmark, readout, point in points:
        for each in benchmark_models(results):
            if (each.benchmark.model, each.benchmark.title) == (model, benchmark):
                words = (
                    f"accuracy {100 * point.accuracy:.1f} %, {point.loops:.2f} loops, {readout}, {model} on {benchmark}"
                )
                yield Marker([each.result.name], readout, point.loops, point.accuracy, words)
