"""Coverage where the truth is known: promises are kept, at a fair price, and the usual way breaks them."""

from functools import cache

import pytest
from conftest import random_trajectory

from loopscope.bench import guarantees
from loopscope.bench.guarantees import CONFIDENCE, MAX_DROP, Coverage, bench_guarantees, coverage, populations

DELTA = 1 - CONFIDENCE
NAMES = [population.name for population in populations()]
SEQUENCES = [name for name in NAMES if name.startswith("sequences")]
QUICK = ("not monotone",)
EACH = [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in NAMES]


@cache
def measured(name: str, calibrations: int = 1_000) -> dict[str, Coverage]:
    population = populations()[NAMES.index(name)]
    size = {"calm": 10_000, "sequences": 500}.get(name, 2_000)
    return {each.method: each for each in coverage(population, size, calibrations=calibrations)}


@pytest.mark.parametrize("name", EACH)
def test_learn_then_test_keeps_its_promise(name: str) -> None:
    guarantee = measured(name)["promise"]
    assert guarantee.calibrations == 1_000
    assert guarantee.broken <= DELTA + 2 * (DELTA * (1 - DELTA) / 1_000) ** 0.5


@pytest.mark.parametrize("name", [each for each in EACH if "five" not in str(each)])  # there it is for each of five
def test_conformal_risk_control_keeps_its_promise_on_average(name: str) -> None:
    average = measured(name)["on average"]
    assert average.risk <= MAX_DROP + 2 * average.risk_error


@pytest.mark.parametrize("name", EACH)
def test_the_usual_way_breaks_it_far_more_often(name: str) -> None:
    assert measured(name)["usual"].broken >= 0.3
    assert measured(name)["usual"].broken >= 5 * measured(name)["promise"].broken


def test_it_is_not_kept_by_never_exiting() -> None:
    tight = measured("calm", 300)["promise"]
    assert tight.examples == 10_000
    assert tight.broken >= DELTA / 4
    assert tight.loops <= 1.15 * tight.hindsight_loops
    assert tight.hindsight_loops < 4  # of 6


@pytest.mark.long
def test_decisions_of_a_sequence_are_no_examples() -> None:
    counted = measured("sequences")["promise, decisions counted"]
    assert counted.broken > DELTA + 2 * counted.broken_error


@pytest.mark.long
@pytest.mark.parametrize("name", SEQUENCES)
def test_bets_save_loops_that_hoeffding_bentkus_does_not(name: str) -> None:
    found = measured(name)
    assert found["promise"].loops < found["promise, Hoeffding-Bentkus"].loops
    assert found["promise, Hoeffding-Bentkus"].broken <= DELTA


def test_the_populations_are_what_they_say() -> None:
    known = {population.name: population for population in populations()}
    thinking = known["overthinking"].trajectory.correct
    assert (thinking[:, 0] & ~thinking[:, -1]).mean() > 0.05  # a right answer lost at a deeper loop
    bump = known["not monotone"]
    thresholds = guarantees.gap_grid("margin", bump.trajectory, 200)
    risk, _ = guarantees._risks(bump, "margin", thresholds, bump.trajectory)
    strict = risk[::-1][:60]
    peak = int(strict[:25].argmax())
    assert strict[peak] > MAX_DROP > 1.2 * strict[peak:].min()  # it rises above the limit, and falls below it again


def test_a_recording_serves_as_a_population(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarantees, "SIZES", (400, 800))
    done: list[tuple[int, int]] = []
    recorded = {"mine": random_trajectory(rows=900, split="test")}
    result = bench_guarantees(recorded, 400, 5, lambda now, total, _: done.append((now, total)))
    assert [each.population for each in result.price[-2:]] == ["mine", "mine"]
    assert [each.examples for each in result.price[-2:]] == [400, 800]
    assert len(result.coverage) == 3 * len(NAMES) + 2 * len(SEQUENCES)
    assert done[-1][0] == done[-1][1] == len(done)
