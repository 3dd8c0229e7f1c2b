"""Checkpoints on benchmarks: the paper's tables on Ouro from known recordings, its numbers beside ours."""

import msgspec
import pytest
from conftest import answers
from pages import figure_of, table_of

from loopscope.analysis.model_analysis import ModelRecordings, analyse_models
from loopscope.analysis.results import assemble_results
from loopscope.analysis.schema import Latency, Machine, ModelResult, PolicyLatency, Results, Spread
from loopscope.paper.counterparts import OURO, PRODUCTS, on_paper_grid
from loopscope.paper.ouro_tables import row_winners
from loopscope.paper.published import published
from loopscope.questions import BENCHMARKS
from loopscope.readouts.readout import POST_HOC
from loopscope.training.gate_fitting import GateSettings, fit_gate


def source(model: str, benchmark: str, **changes: object) -> ModelRecordings:
    told = {"benchmark": benchmark, "metric": BENCHMARKS[benchmark].metric, "weights_sha256": model, "model": model}
    subjects = 3 if benchmark == "mmlu" else 1
    train, validation, test = (
        answers(benchmark, split, len(model), 90, subjects=subjects, provenance=told, **changes)
        for split in ("train", "validation", "test")
    )
    gates = {"linear-utility": fit_gate(train, GateSettings(objective="utility", steps=5))}
    return ModelRecordings(f"{model}-{benchmark}", validation, test, gates=gates if benchmark == "arc_easy" else {})


def timed(model: str, benchmark: str) -> Latency:
    def once(value: float) -> Spread:
        return Spread(value, value, value)

    ways = [("fixed", 4.0, 100.0, 1.0), ("gate", 2.0, 60.0, 1.5), ("kl", 2.5, 80.0, 1.25)]
    policies = [PolicyLatency(name, None, 0.5, loops, once(time), once(speed), 0) for name, loops, time, speed in ways]
    return Latency(model, benchmark, 10, 4, Machine(1, 1, 8, once(1.0), [1.0]), policies)


@pytest.fixture(scope="module")
def results() -> Results:
    pairs = [("Ouro-1.4B", "arc_easy"), ("Ouro-1.4B", "hellaswag"), ("Ouro-2.6B", "mmlu")]
    made = analyse_models([source(model, benchmark) for model, benchmark in pairs], None, [0.9])[0]
    others = [renamed(made.models[0], "Ouro-2.6B-Thinking"), renamed(made.models[2], "small-ouro")]
    latency = [timed("Ouro-1.4B", "arc_easy"), timed("small-ouro", "mmlu")]
    return assemble_results([*made.models, *others], made.targets, latency)


def renamed(model: ModelResult, name: str) -> ModelResult:
    """As though another checkpoint had answered the same."""
    assert model.benchmark is not None
    benchmark = msgspec.structs.replace(model.benchmark, model=name)
    return msgspec.structs.replace(model, name=name, group=name, benchmark=benchmark)


@pytest.fixture(scope="module")
def ungated() -> Results:
    return analyse_models([source("huginn", "arc_easy", gate_logits=None)], None, [0.9])[0]


def rows(results: Results, name: str) -> list[list[str]]:
    return table_of(PRODUCTS, results, name).rows


def test_products_are_made_where_their_models_are_there(results: Results, ungated: Results) -> None:
    assert [product.name for product in PRODUCTS.make(results, list(OURO))] == list(OURO)
    assert PRODUCTS.make(ungated, ["ouro_thinking", "ouro_latency"]) == []
    assert rows(ungated, "ouro_summary")[0][2:4] == ["no gate", ""]


def test_the_gate_stands_beside_the_best_other_readout_and_the_paper_s(results: Results) -> None:
    summary = {(row[0], row[1]): row for row in rows(results, "ouro_summary")}
    assert [name for name, _ in summary] == ["Ouro-1.4B", "Ouro-1.4B", "Ouro-2.6B", "small-ouro"]
    row = summary["Ouro-1.4B", "ARC-Easy"]
    assert row[-2:] == ["82.9 % at 2.72", "hidden_cosine 83.2 % at 2.69"]
    assert summary["small-ouro", "MMLU"][-2:] == ["", ""]
    model = on_paper_grid(results).models[0]
    gate = model.frontier("gate")
    assert gate is not None
    assert row[2].startswith(f"{100 * gate.selected.accuracy:.1f} % [")
    assert row[3].startswith(f"{gate.selected.average_loops:.2f} [")
    points = {frontier.readout: frontier.selected for frontier in model.frontiers if frontier.readout in POST_HOC}
    assert len(points) == 7
    best = max(points.values(), key=lambda each: (each.calibration_accuracy, -each.calibration_average_loops))
    assert points[row[4]] is best
    assert model.paired[0].second == row[4]


def test_thinking_models_have_their_own_table(results: Results) -> None:
    (row,) = rows(results, "ouro_thinking")
    best = results.models[3].best(["gate", *POST_HOC])
    assert best is not None
    assert row[:3] == ["Ouro-2.6B-Thinking", "ARC-Easy", best.readout]
    assert row[-1] == "gate 87.6 % at 2.28"


def test_the_paper_s_counts_are_counted(results: Results) -> None:
    counts = {row[0]: row[1:] for row in rows(results, "ouro_claims")}
    claims = {claim.key: claim.about for claim in published().claims}
    summary = [results.models[place] for place in (0, 1, 2, 4)]
    pairs = [(model.frontier("gate"), model.frontier(model.paired[0].second)) for model in summary]
    fewer = sum(b.selected.average_loops < a.selected.average_loops for a, b in pairs if a and b)
    sure = sum(model.paired[0].loops.low > 0 for model in summary)
    assert counts[claims["ouro_fewer_loops"]] == [f"{fewer} of 4", f"{sure}", "7 of 12"]
    assert counts[claims["ouro_more_accurate"]][-1] == "5 of 12"
    assert counts[claims["thinking_not_the_gate"]][-1] == "7 of 12 (its own table has another number)"
    assert not any("of 12" in claim for claim in counts)  # ours are of fewer
    assert counts[claims["ouro_gate_speedup"]] == ["1.50 to 1.50", "", "1.24 to 1.58"]


def test_every_readout_has_a_row_static_depth_and_the_oracle_too(results: Results) -> None:
    table = table_of(PRODUCTS, results, "ouro_readouts")
    assert table.columns == ["model", "readout", "ARC-Easy", "HellaSwag", "MMLU"]
    first = {row[1]: row[2:] for row in table.rows if row[0] == "Ouro-1.4B"}
    assert first["static depth 4"] == [f"{100 * m.forced_accuracy[3]:.1f} %" for m in results.models[:2]] + [""]
    assert list(first)[-1] == "oracle"
    assert {"static depth, chosen", "gate", "hidden_cosine", "gate:linear-utility"} <= set(first)
    assert first["gate:linear-utility"][1:] == ["", ""]


def test_both_metrics_and_every_subject(results: Results) -> None:
    metrics = [(*row[:2], row[3]) for row in rows(results, "ouro_metrics")]
    assert metrics[:2] == [("Ouro-1.4B", "ARC-Easy", metric) for metric in ("acc", "acc_norm (scored)")]
    assert metrics[4:6] == [("Ouro-2.6B", "MMLU", metric) for metric in ("acc (scored)", "acc_norm")]
    subjects = [row for row in rows(results, "mmlu_subjects") if row[0] == "Ouro-2.6B"]
    assert [row[1:3] for row in subjects] == [["s0", "30"], ["s1", "30"], ["s2", "30"], ["all", "90"]]
    test = source("Ouro-2.6B", "mmlu").test
    assert subjects[1][3] == f"{100 * test.correct[1::3, 0].mean():.1f} %"
    assert subjects[3][3] == f"{100 * test.correct[:, 0].mean():.1f} %"


def test_times_stand_beside_the_paper_s(results: Results) -> None:
    table = rows(results, "ouro_latency")
    assert [row[2] for row in table] == ["fixed", "gate", "kl"] * 2
    assert table[1][4:8] == ["2.00", "60", "1.5", "75 %"]  # of one round
    assert [row[-1] for row in table[:3]] == [
        "fixed 84.0 % at 4.00, 170.9 ms, 1.00",
        "gate 82.4 % at 2.53, 108 ms, 1.58",
        "margin 82.8 % at 2.98, 127.3 ms, 1.34",
    ]
    assert [row[-1] for row in table[3:]] == [""] * 3  # the paper timed one model


def test_refitted_gates_are_compared_with_the_released_one(results: Results) -> None:
    table = rows(results, "ouro_refitted")
    assert [row[:3] for row in table] == [[m, "ARC-Easy", "gate"] for m in ("Ouro-1.4B", "Ouro-2.6B-Thinking")]
    gap = results.models[0].fitted_gaps[0]
    assert table[0][-1] == f"{gap.value:+.2f} [{gap.low:+.2f}, {gap.high:+.2f}] @{100 * gap.accuracy:g} %"


def test_figures_show_the_models_that_they_are_of(results: Results) -> None:
    def titles(name: str) -> list[str]:
        panels = figure_of(PRODUCTS, results, name)["vconcat"][0]["concat"]
        return [" ".join(panel["title"]) for panel in panels if "title" in panel]

    assert titles("ouro_frontiers") == ["Ouro-1.4B, HellaSwag", "Ouro-2.6B, MMLU"]
    assert titles("ouro_14b_frontiers") == ["ARC-Easy", "HellaSwag"]
    assert titles("benchmark_frontiers") == ["Ouro-2.6B-Thinking, ARC-Easy", "small-ouro, MMLU"]
    assert titles("refitted_frontiers") == ["Ouro-1.4B, ARC-Easy", "Ouro-2.6B-Thinking, ARC-Easy"]


def test_figures_of_language_models_show_every_readout_that_wins_a_row(results: Results) -> None:
    """The paper's winners, of which hidden cosine has most rows, and ours, on either grid."""
    theirs = {"hidden_cosine", "hidden_change", "entropy", "top1", "margin"}
    ours = {row[4] for row in rows(results, "ouro_summary")} | {row[2] for row in rows(results, "ouro_thinking")}
    assert theirs | ours - {"gate"} <= set(row_winners(results))
    for name in ("ouro_frontiers", "ouro_14b_frontiers", "benchmark_frontiers"):
        text = str(figure_of(PRODUCTS, results, name))
        assert all(f"'line': '{readout}'" in text for readout in row_winners(results))


def test_results_say_what_they_are_of_and_read_back(results: Results, ungated: Results) -> None:
    assert [model.label for model in results.models[:2]] == ["Ouro-1.4B, ARC-Easy", "Ouro-1.4B, HellaSwag"]
    again = msgspec.json.decode(msgspec.json.encode(results), type=Results)
    assert again.models[2].benchmark is not None
    assert again.models[2].benchmark.metric == "acc"
    assert again.latency == results.latency
    assert "latency" not in msgspec.to_builtins(ungated)
