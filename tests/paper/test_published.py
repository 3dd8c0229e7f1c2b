"""The paper's numbers: are they typed as printed, and do its own counts follow from them?"""

import re

import msgspec
import pytest

from loopscope.paper.published import Paper, PublishedFrontier, PublishedValue, published
from loopscope.questions import BENCHMARKS
from loopscope.readouts.readout import POST_HOC, READOUTS

PAPER = published()
CLAIMS = {claim.key: claim for claim in PAPER.claims}


def frontier(rows: tuple[PublishedFrontier, ...], gate: str, prior: str, readout: str) -> PublishedFrontier:
    [row] = [row for row in rows if (row.training.gate, row.training.prior, row.readout) == (gate, prior, readout)]
    return row


def value(mean: float, deviation: float) -> PublishedValue:
    return PublishedValue(mean=mean, deviation=deviation)


def test_values_are_as_printed() -> None:
    uniform = frontier(PAPER.fixed_prior, "none", "uniform", "entropy")
    assert uniform.depth_at == {"0.95": value(2.19, 0.51), "0.98": value(2.66, 0.44)}  # at 0.99: N/A
    geometric = frontier(PAPER.fixed_prior, "none", "geometric", "top1")
    assert geometric.training.geometric_lambda == 0.3
    assert (geometric.depth_at["0.95"], geometric.depth_at["0.99"]) == (value(1.38, 0.17), value(1.5, 0.16))
    assert frontier(PAPER.fixed_vs_gate, "mlp", "geometric", "gate").depth_at == {"0.95": value(3.58, 0.36)}
    assert PAPER.uniform_ordering["hidden_change"] == value(0.35, 0.48)
    assert PAPER.geometric_ordering["kl"] == value(0.87, 0.2)
    mlp = next(row for row in PAPER.parity if (row.training.gate, row.training.prior) == ("mlp", "geometric"))
    assert (mlp.accuracy, mlp.loops) == (value(0.987, 0.002), value(2.28, 0.65))
    row = PAPER.ouro[4]
    assert (row.model, row.benchmark, row.readout) == ("Ouro-1.4B", "HellaSwag", "hidden_change")
    points = (row.gate.accuracy, row.gate.loops, row.post_hoc.accuracy, row.post_hoc.loops)
    assert points == (0.728, 3.94, 0.729, 3.13)
    last = PAPER.ouro_thinking[-1]
    assert (last.model, last.benchmark, last.readout) == ("Ouro-2.6B-Thinking", "OpenBookQA", "top1")
    assert (last.accuracy, last.loops) == (0.406, 2.72)


def test_tables_have_the_rows_of_the_paper() -> None:
    rows = {table.number: len(getattr(PAPER, table.key)) for table in PAPER.tables}
    assert rows == {"1": 8, "2": 6, "3": 12, "4a": 12, "4b": 7, "5": 4, "6": 4, "7": 6, "8": 12}
    assert [figure.number for figure in PAPER.figures] == [str(number) for number in range(1, 24)]
    rest = {"tables", "figures", "claims", "inconsistencies"}
    assert {table.key for table in PAPER.tables} == {field.name for field in msgspec.structs.fields(Paper)} - rest
    for model in ("Ouro-1.4B", "Ouro-2.6B"):
        benchmarks = [row.benchmark for row in PAPER.ouro if row.model == model]
        assert len(set(benchmarks)) == 6
        assert sorted(benchmarks) == sorted(
            row.benchmark for row in PAPER.ouro_thinking if row.model == f"{model}-Thinking"
        )


def test_names_are_loopscopes() -> None:
    tables = (PAPER.fixed_prior, PAPER.fixed_vs_gate, PAPER.parity, PAPER.ouro, PAPER.ouro_thinking)
    readouts = {row.readout for table in (*tables, PAPER.ouro_latency, PAPER.mano_latency) for row in table}
    assert readouts <= {"fixed", "gate", *POST_HOC} <= set(READOUTS)
    assert {*PAPER.uniform_ordering, *PAPER.geometric_ordering} <= set(READOUTS)
    titles = {benchmark.title for benchmark in BENCHMARKS.values()}
    assert titles == {row.benchmark for row in PAPER.ouro} == {row.benchmark for row in PAPER.ouro_thinking}
    assert {row.benchmark for row in PAPER.ouro_latency} <= titles
    targets = {target for row in PAPER.fixed_prior + PAPER.fixed_vs_gate for target in row.depth_at}
    assert targets == {"0.95", "0.98", "0.99"}


def test_the_counts_follow_from_the_tables() -> None:
    more_accurate = [row.post_hoc.accuracy > row.gate.accuracy for row in PAPER.ouro]
    fewer_loops = [row.post_hoc.loops < row.gate.loops for row in PAPER.ouro]
    assert sum(more_accurate) == CLAIMS["ouro_more_accurate"].low == 5
    assert sum(fewer_loops) == CLAIMS["ouro_fewer_loops"].low == 7
    assert sum(a and b for a, b in zip(more_accurate, fewer_loops, strict=True)) == CLAIMS["ouro_both"].low == 3
    assert sum(row.gate.accuracy > row.post_hoc.accuracy for row in PAPER.ouro) == 6
    gate_dominates = [r.gate.accuracy >= r.post_hoc.accuracy and r.gate.loops < r.post_hoc.loops for r in PAPER.ouro]
    assert sum(gate_dominates) == 3
    assert sum(row.readout != "gate" for row in PAPER.ouro_thinking) == 8
    assert CLAIMS["thinking_not_the_gate"].low == 7
    assert [claim.key for claim in PAPER.claims if not claim.borne_out] == ["thinking_not_the_gate"]


def test_claims_about_depth_and_speed_follow_from_the_tables() -> None:
    adaptive = [row for row in PAPER.fixed_prior if row.readout != "fixed" and row.training.prior == "geometric"]
    at_99 = [row.depth_at["0.99"].mean for row in adaptive]
    assert at_99 == pytest.approx([CLAIMS["confidence_99"].low] * 3, abs=0.051)
    margin = frontier(PAPER.fixed_vs_gate, "none", "geometric", "margin").depth_at
    assert margin["0.95"].mean == pytest.approx(CLAIMS["margin_95_to_99"].low, abs=0.051)
    assert margin["0.99"].mean == pytest.approx(CLAIMS["margin_95_to_99"].high, abs=0.051)
    gates = [row.speedup for row in PAPER.ouro_latency if row.readout == "gate"]
    assert (min(gates), max(gates)) == (CLAIMS["ouro_gate_speedup"].low, CLAIMS["ouro_gate_speedup"].high)
    mano = {(row.training.gate, row.readout): row for row in PAPER.mano_latency if row.training}
    for readout in ("top1", "margin", "kl"):
        assert mano["none", readout].speedup == CLAIMS[f"mano_{readout}_speedup"].low
    for readout in ("top1", "margin"):
        assert mano["none", readout].loops == CLAIMS["mano_confidence_loops"].low
        assert mano["none", readout].accuracy == CLAIMS["mano_confidence_accuracy"].low
    gate = mano["unstated", "gate"]
    assert (gate.loops, gate.speedup) == (CLAIMS["mano_gate_loops"].low, CLAIMS["mano_gate_speedup"].low)
    assert gate.accuracy == pytest.approx(CLAIMS["mano_gate_accuracy"].low, abs=0.005)
    ordering = PAPER.geometric_ordering
    for readout in ("entropy", "margin"):
        assert ordering[readout].mean == CLAIMS["geometric_confidence_ordering"].low
    assert ordering["kl"].mean == CLAIMS["geometric_kl_ordering"].low > PAPER.uniform_ordering["kl"].mean
    assert ordering["hidden_change"].mean == CLAIMS["geometric_hidden_ordering"].low
    ratio = ordering["hidden_change"].mean / PAPER.uniform_ordering["hidden_change"].mean
    assert ratio == pytest.approx(CLAIMS["hidden_ordering_ratio"].low, abs=0.05)


def test_references_lead_somewhere() -> None:
    labels = [item.label for item in (*PAPER.tables, *PAPER.figures)]
    assert len(set(labels)) == len(labels)
    for claim in PAPER.claims:
        assert claim.table in labels
        assert claim.low <= claim.high
    for found in PAPER.inconsistencies:
        assert found.where
        assert all(place in labels for place in found.where if ":" in place)
        assert all(re.fullmatch(r"abstract|[A-I1-6](\.\d)?", place) for place in found.where if ":" not in place)
    for keys in ([claim.key for claim in PAPER.claims], [found.key for found in PAPER.inconsistencies]):
        assert len(set(keys)) == len(keys)
