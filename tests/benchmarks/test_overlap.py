"""A quick run of the simulated overlaps: chance is not blamed, and data that were used again are found."""

import json

import pytest

from benchmarks import overlap


@pytest.mark.parametrize("population", overlap.POPULATIONS)
def test_chance_is_told_from_data_that_were_used_again(population: str) -> None:
    chance, again = (overlap.found(500, population, share, 100) for share in (0.0, 1.0))
    assert max(chance.in_whole, chance.by_sketch) <= 0.02
    few = population in ("10 inputs", "8 difficulties", "Zipf, 2")  # hardly a row is like no other: nothing to tell by
    assert few or min(again.in_whole, again.by_sketch) == 1


def test_the_command_prints_every_kind(capsys: pytest.CaptureFixture[str]) -> None:
    assert overlap.main(["--pairs", "2", "--examples", "100", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == len(overlap.POPULATIONS) * len(overlap.SHARES)
