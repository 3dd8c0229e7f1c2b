"""The bench of the monitor: false alarms where nothing changes, and changes that it finds."""

import numpy as np
import pytest
from conftest import random_trajectory

from benchmarks import drift
from benchmarks.drift import CHANGE, CHANGES, bench_drift, detections, false_alarms, on_average
from benchmarks.guarantees import POPULATIONS, Population, populations
from loopscope.errors import UserError


def known(name: str) -> Population:
    return populations(name)[-1]


@pytest.mark.long
@pytest.mark.parametrize("name", [*POPULATIONS, "on average"])
def test_false_alarms_are_at_most_what_they_may_be(name: str) -> None:
    size = 500 if name == "sequences" else 2_000
    population = on_average(known("calm")) if name == "on average" else known(name)
    measured = false_alarms(population, 0.1, 1_000, size, 2_000)
    assert measured.alarms <= measured.limit
    assert max(measured.by_exits, measured.by_risk) <= measured.alarms <= measured.by_exits + measured.by_risk


@pytest.mark.parametrize("change", sorted(CHANGES))
def test_changes_are_found_by_the_test_that_can_see_them(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drift, "AUDIT", 1.0)
    levels = drift._by_margin(known("five difficulties"))
    found = detections(levels, change, 0.01, 6, 2_000, CHANGE + 3_000)
    assert found.before == 0
    assert found.detected > 0.6
    low, middle, _ = found.delays
    assert low is not None
    assert 0 < low < 3_000
    assert middle is not None
    assert found.risk[1] > found.risk[0]
    if change == "other answers":
        assert found.by_exits == 0
        assert found.loops[0] == found.loops[1]
        assert middle < 1_000
    else:
        assert found.by_exits > 0.5
        assert (found.loops[1] < found.loops[0]) == (change == "another model")


def test_recordings_serve_as_populations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drift, "populations", lambda: [known("calm")])
    recorded = random_trajectory(rows=900, split="test", labels=np.zeros(900, int))
    recorded = type(recorded)(
        logits=recorded.logits, labels=recorded.logits[:, -1].argmax(-1), difficulty=recorded.difficulty
    )
    done: list[tuple[int, int]] = []
    result = bench_drift({"mine": recorded}, 0.2, 2, 3_000, 1_200, lambda now, total, _: done.append((now, total)))
    assert [each.population for each in result.without] == ["calm", "calm, on average", "mine"]
    assert result.without[1].by_risk == 0
    assert [(each.population, each.change) for each in result.changed] == [("mine", change) for change in CHANGES]
    assert done[-1] == (14, 14)
    with pytest.raises(UserError, match="streams that are longer"):
        bench_drift({}, 0.2, 2, 3_000, CHANGE, lambda *_: None)
    with pytest.raises(UserError, match="prove nothing; give more"):
        bench_drift({}, 0.2, 2, 100, 1_200, lambda *_: None)
