"""The channels of joint training: what is swept stands together, dose by dose, and nothing else does."""

import dataclasses
from typing import Any

import pytest
from msgspec.structs import replace
from pages import figure_of, table_of
from simulated import pair

from loopscope.analysis.gaps import Gap
from loopscope.analysis.model_analysis import ModelRecordings, analyse_models
from loopscope.analysis.results import assemble_results
from loopscope.analysis.schema import Results
from loopscope.report.channels import CORNERS
from loopscope.report.products import OVERVIEW
from loopscope.training import settings

NAMES = ["channels", "channel_doses"]


def gap(value: float, accuracy: float = 0.7) -> Gap:
    bounds, shares = (value - 0.05, value + 0.05), (1.0, 1.0, 1.0)
    return Gap("entropy", "entropy", 0.7, accuracy, 1 + value, 1.0, value, *bounds, *shares, 90, 90)


def study(*runs: tuple[str, dict[str, Any], int, Gap | None]) -> Results:
    """One analysed model under many names: task, objective, seed and trajectory gap; the first is the reference."""
    analysed = analyse_models([ModelRecordings("one", *pair(rows=40))], None, [0.7])[0]
    (known,) = analysed.models
    models = []
    for number, (task, objective, seed, found) in enumerate(runs):
        whole = {"prior": "geometric", "geometric_lambda": 0.3, "beta": 0.1, **objective}
        gate = {"gate": "none" if objective["name"] == "fixed_prior" else "mlp"}
        run = {"task": {"name": task}, "model": gate, "training": {"seed": seed}, "objective": whole}
        diagnosis = dataclasses.replace(known.diagnosis, trajectory_gap=found)
        names = {"name": f"{number}", "group": f"{task}{objective}", "provenance": {"run": run}}
        models.append(replace(known, **names, diagnosis=diagnosis, is_reference=number == 0))
    return assemble_results(models, analysed.targets)


def channels(weight: float, gradient: float) -> dict[str, Any]:
    return {"name": "gate_channels", "gate_weight": weight, "gate_gradient": gradient}


@pytest.fixture(scope="module")
def results() -> Results:
    joint, apart = {"name": "learned_gate"}, {"name": "decoupled_gate"}
    return study(
        ("mano", {"name": "fixed_prior"}, 0, None),
        ("mano", joint, 0, gap(0.4)),
        ("mano", joint, 1, gap(0.6)),
        ("mano", channels(0.5, 0), 0, gap(0.1)),
        ("mano", channels(1, 0), 0, gap(0.3, accuracy=0.65)),
        ("mano", apart, 0, gap(0.0)),
        ("parity", channels(0, 1), 2, gap(-0.2)),
        ("parity", apart, 2, None),
        ("parity", {**apart, "beta": 0.5}, 2, gap(9.0)),  # a sweep of its own, which has corners only
    )


def test_a_sweep_is_a_table_of_gaps_by_channels_and_seed(results: Results) -> None:
    table, words = table_of(OVERVIEW, results, "channels"), "MLP gate, geometric 0.3, β 0.1"
    assert table.columns[4:] == ["loop 1", "loop 2", "gap over seeds", "seed 0", "seed 1", "seed 2"]
    assert [row[:4] + row[6:] for row in table.rows] == [
        ["mano", words, "0", "0", "0.00", "+0.00 [-0.05, +0.05]", "-", "-"],
        ["mano", words, "0.5", "0", "0.10", "+0.10 [+0.05, +0.15]", "-", "-"],
        ["mano", words, "1", "0", "0.30 (from @65 % on)", "+0.30 [+0.25, +0.35] @65 %", "-", "-"],
        ["mano", words, "1", "1", "0.50 ± 0.14 (2 of 2)", "+0.40 [+0.35, +0.45]", "+0.60 [+0.55, +0.65]", "-"],
        ["parity", words, "0", "0", "-", "-", "-", "nothing above chance"],
        ["parity", words, "0", "1", "-0.20", "-", "-", "-0.20 [-0.25, -0.15]"],
    ]
    assert all(row[4].endswith(" %") for row in table.rows)


def test_a_dose_is_drawn_for_every_share_of_the_gradient(results: Results) -> None:
    figure = figure_of(OVERVIEW, results, "channel_doses")
    mano, parity, *_ = figure["vconcat"][0]["concat"]
    points = [[row["line"], row["dose"], round(row["value"], 9)] for row in mano["data"]["values"]]
    assert points == [["gradient 0", 0, 0.0], ["gradient 0", 0.5, 0.1], ["gradient 0", 1, 0.3], ["gradient 1", 1, 0.5]]
    ends = mano["data"]["values"][-1]
    assert (ends["low"], ends["high"], ends["seeds"]) == (0.4, 0.6, 2)
    assert [row["dose"] for row in parity["data"]["values"]] == [0]
    for panel in (mano, parity):  # every dose of any panel has its place in all
        x = panel["layer"][2]["encoding"]["x"]
        assert x["scale"]["domain"] == [0, 1]
        assert x["axis"] == {"values": [0, 0.5, 1], "labelExpr": "'' + datum.value"}
    (low, high) = mano["layer"][2]["encoding"]["y"]["scale"]["domain"]
    assert low < -0.25 < 0.6 < high


def test_corners_alone_are_no_sweep_and_have_the_names_that_training_gives_them(results: Results) -> None:
    assert {name: tuple(corner) for corner, name in settings.CORNERS.items()} == CORNERS
    corners = [model for model in results.models if model.provenance["run"]["objective"]["name"] in CORNERS]
    assert OVERVIEW.make(replace(results, models=corners), NAMES) == []
