"""A page that would be too large: fewer examples and coarser histograms, of the same data."""

import numpy as np
import pytest
from pages import TARGETS, source

from loopscope.analysis.model_analysis import analyse_models
from loopscope.analysis.schema import Results
from loopscope.report.page import _with_fewer_difficulties, _with_fewer_examples, thinned


@pytest.fixture(autouse=True)
def unlearned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without learned stoppers, which take longest."""
    monkeypatch.setattr("loopscope.analysis.diagnosis.with_stoppers", lambda *recordings: recordings)


def test_a_large_study_keeps_fewer_examples() -> None:
    rng = np.random.default_rng(0)
    noise = ["".join(map(chr, rng.integers(0x4E00, 0x9FFF, 2000))) for _ in range(200)]  # does not compress
    results, details = analyse_models([source("a", 0, examples=noise)], None, TARGETS)
    few, note = thinned(results, details, 5_000_000)
    assert "at most 200 test examples" in note
    many = Results(results.schema_version, results.loopscope, results.targets, results.models * 20, results.groups)
    parts, note = thinned(many, details * 20, 5_000_000)
    assert "at most 200 test examples" not in note
    assert sum(map(len, parts)) < 5_000_000 < 20 * len(few[0])


def test_fewer_examples_are_of_every_pattern_still() -> None:
    made = source("a", 0, rows=1500)
    _, details = analyse_models([made], None, TARGETS)
    patterns = {tuple(row) for row in made.test.correct.tolist()}
    short = _with_fewer_examples(details[0].deep.examples, 25, 100)
    assert len(short.rows) == 25
    assert short.rows == sorted(short.rows)
    assert {tuple(made.test.correct[row].tolist()) for row in short.rows} == patterns


def test_joined_difficulties_count_the_same_examples() -> None:
    rng = np.random.default_rng(0)
    _, details = analyse_models([source("a", 0, rows=300, difficulty=rng.integers(0, 30, 300))], None, TARGETS)
    deep, coarse = details[0].deep, _with_fewer_difficulties(details[0].deep, 7)
    assert len(coarse.levels) == len(coarse.counts) == 7
    assert coarse.levels == sorted(coarse.levels)
    assert sum(coarse.counts) == 300
    for name, line in deep.lines.items():
        for place in (0, -1):
            exits, right = np.array(coarse.lines[name].exits[place]), coarse.lines[name].right[place]
            assert exits.shape == (7, 4)
            assert exits.sum(axis=0).tolist() == np.array(line.exits[place]).sum(axis=0).tolist()
            assert sum(right) == sum(line.right[place])
            assert exits.sum(axis=1).tolist() == coarse.counts


def test_histograms_become_coarser_where_fewer_examples_do_not_help() -> None:
    """Of 32 loops and 50 difficulties histograms are what is large."""
    rng = np.random.default_rng(0)
    changes = {"rows": 400, "loops": 32, "difficulty": rng.integers(0, 50, 400)}
    results, details = analyse_models([source("a", 0, **changes)], None, TARGETS)
    (part,), note = thinned(results, details, 170_000)
    assert len(part) < 170_000
    assert "Histograms join neighbouring difficulties" in note
