"""Measurements: no way has a better place than another."""

from functools import partial

from loopscope.bench.measure import interleaved
from loopscope.progress import silent


def test_every_round_begins_with_another_way() -> None:
    called: list[str] = []
    seconds, _ = interleaved({name: partial(called.append, name) for name in "abc"}, 5, 8, silent)
    rounds = ["".join(called[start : start + 3]) for start in range(0, len(called), 3)]
    assert rounds == ["abc", "bca", "cab"] * 2  # the first one warms up
    assert {name: len(times) for name, times in seconds.items()} == {"a": 5, "b": 5, "c": 5}
