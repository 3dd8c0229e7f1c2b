"""Coverage where the truth is known: guarantees are kept, at a fair price, and the usual way breaks them."""

from functools import cache

import pytest

from benchmarks import guarantees
from benchmarks.guarantees import CONFIDENCE, MAX_DROP, POPULATIONS, Coverage, coverage, populations

DELTA = 1 - CONFIDENCE
SEQUENCES = [name for name in POPULATIONS if name.startswith("sequences")]
EACH = [name if name == "not monotone" else pytest.param(name, marks=pytest.mark.long) for name in POPULATIONS]
CALIBRATIONS = 300


@cache
def measured(name: str) -> dict[str, Coverage]:
    size = {"calm": 10_000, "sequences": 500}.get(name, 2_000)
    return {each.method: each for each in coverage(populations(name)[-1], size, CALIBRATIONS)}


@pytest.mark.parametrize("name", EACH)
def test_guarantees_are_kept_and_the_usual_way_breaks_them(name: str) -> None:
    """By learn-then-test with its confidence, and by conformal risk control on average."""
    guarantee, average, usual = (measured(name)[method] for method in ("guarantee", "on average", "usual"))
    assert guarantee.calibrations == CALIBRATIONS
    assert guarantee.broken <= DELTA + 2 * (DELTA * (1 - DELTA) / CALIBRATIONS) ** 0.5
    if "five" not in name:  # there it is for each of five
        assert average.risk <= MAX_DROP + 2 * average.risk_error
    assert usual.broken >= max(0.3, 5 * guarantee.broken)


def test_it_is_not_kept_by_never_exiting() -> None:
    (tight,) = coverage(populations("calm")[-1], 10_000, 150, only=["guarantee"])
    assert tight.broken >= DELTA / 4
    assert tight.loops <= 1.15 * tight.hindsight_loops
    assert tight.hindsight_loops < 4  # of 6


@pytest.mark.long
def test_decisions_of_a_sequence_are_no_examples() -> None:
    counted = measured("sequences")["guarantee, decisions counted"]
    assert counted.broken > DELTA + 2 * counted.broken_error


@pytest.mark.long
@pytest.mark.parametrize("name", SEQUENCES)
def test_bets_save_loops_that_hoeffding_bentkus_does_not(name: str) -> None:
    found = measured(name)
    assert found["guarantee"].loops < found["guarantee, Hoeffding-Bentkus"].loops
    assert found["guarantee, Hoeffding-Bentkus"].broken <= DELTA


def test_the_populations_are_what_they_say() -> None:
    known = {population.name: population for population in populations("not monotone")}
    thinking = known["overthinking"].trajectory.correct
    assert (thinking[:, 0] & ~thinking[:, -1]).mean() > 0.05  # a right answer lost at a deeper loop
    bump = known["not monotone"]
    thresholds = guarantees.gap_grid("margin", bump.trajectory, 200)
    risk, _ = guarantees._risks(bump, "margin", thresholds, bump.trajectory)
    strict = risk[::-1][:60]
    peak = int(strict[:25].argmax())
    assert strict[peak] > MAX_DROP > 1.2 * strict[peak:].min()  # it rises above the limit, and falls below it again
