"""The table of rules across trajectories: single pairs with intervals, seeds together, refusals in words."""

from pathlib import Path

import msgspec
import pytest
from pages import of_seeds, table_of
from simulated import pair

from loopscope.analysis.bootstrap import Estimate
from loopscope.analysis.comparison import Paired
from loopscope.analysis.gaps import Gap
from loopscope.analysis.model_analysis import ModelRecordings, analyse_models
from loopscope.analysis.schema import Results
from loopscope.analysis.transfer import TransferResult
from loopscope.config import read_json, write_json
from loopscope.report.products import OVERVIEW, markdown


@pytest.fixture(scope="module")
def results() -> Results:
    """Two seeds of one model, and another one."""
    sources = [*of_seeds("seed"), ModelRecordings("third", *pair(right=0.8, rows=90))]
    return analyse_models(sources, None, [0.7])[0]


def replayed(fitted_on: str, stops: str, readout: str, more: float, points: float, at: float = 0.7) -> TransferResult:
    """Whose intervals reach 0.1 loops, or points, to both sides."""
    depths = {"first_depth": 2 + more, "second_depth": 2.0, "value": more, "low": more - 0.1, "high": more + 0.1}
    shares = {"reached": 1.0, "first_reaches_target": 1.0, "second_reaches_target": 1.0}
    gap = Gap(readout, "entropy", 0.7, at, **depths, **shares, examples=90, units=90)
    estimates = [Estimate(value, value - 0.1, value + 0.1) for value in (points, more)]
    return TransferResult(
        fitted_on, stops, readout, 1.0, gap, 0.7, 2.0, Paired(readout, "entropy", *estimates, 3, 4, 90)
    )


def refused(fitted_on: str, stops: str, sentence: str) -> TransferResult:
    return TransferResult(fitted_on, stops, "gate:own", 0.5, None, None, None, None, sentence)


def test_seeds_are_put_together_and_single_pairs_have_intervals(results: Results) -> None:
    found = [
        replayed("seed-0", "seed-0", "margin", 0.0, 0.0),
        replayed("seed-1", "seed-1", "entropy", 0.0, 0.0),
        replayed("seed-0", "seed-1", "margin", 0.4, -0.2),
        replayed("seed-1", "seed-0", "entropy", 0.2, 0.0),
        replayed("third", "third", "margin", 0.05, 0.0),
        replayed("third", "seed-0", "gate:own", 0.3, -0.3, at=0.6),
        refused("seed-0", "third", "The gate reads states of width 2, and these have 3."),
    ]
    made = msgspec.structs.replace(results, transfer=found)
    table = table_of(OVERVIEW, made, "transfer")
    seeds = "mano: linear gate, uniform, β 0.1"
    zero, none = "0.00 ± 0.00 (2 of 2); worse in 0", "-"
    assert table.rows == [
        [seeds, "itself", "margin/entropy", zero, zero, zero],
        [
            *(seeds, "another seed", "margin/entropy", "0.30 ± 0.14 (2 of 2); worse in 2"),
            *("-10.00 ± 14.14 (2 of 2); worse in 1", "0.30 ± 0.14 (2 of 2); worse in 2"),
        ],
        [seeds, "third", "gate:own", "rejected: The gate reads states of width 2, and these have 3.", none, none],
        ["third", "itself", "margin", "+0.05 [-0.05, +0.15]", "+0.00 [-10.00, +10.00]", "+0.05 [-0.05, +0.15]"],
        [
            *("third", seeds, "gate:own", "+0.30 [+0.20, +0.40] @60 %", "-30.00 [-40.00, -20.00]"),
            "+0.30 [+0.20, +0.40]",
        ],
    ]
    assert "Rules across trajectories" in markdown(OVERVIEW.make(made, ["transfer"]))
    assert OVERVIEW.make(results, ["transfer"]) == []  # where it was not asked for


def test_results_hold_what_was_transferred_and_read_back(results: Results, tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    write_json(file, results)
    assert b"transfer" not in file.read_bytes()
    made = msgspec.structs.replace(results, transfer=[replayed("third", "seed-0", "margin", 0.3, 0.0)])
    write_json(file, made)
    assert read_json(Results, file, "results") == made
