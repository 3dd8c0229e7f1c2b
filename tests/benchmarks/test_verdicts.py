"""A quick run of the simulated verdicts: gates have no part in the trajectory's."""

import json

import pytest

from benchmarks import verdicts
from benchmarks.verdicts import GATES, Verdicts


@pytest.mark.parametrize("trajectory", verdicts.TRAJECTORIES)
def test_gates_do_not_change_the_verdict_on_the_trajectory(trajectory: str) -> None:
    found = [verdicts.verdicts(500, trajectory, gates, 12) for gates in GATES]
    judged = {(each.trajectory_blamed, each.trajectory_better, each.average_gap) for each in found}
    assert len(judged) == 1
    ((blamed, better, gap),) = judged
    if trajectory == "the same":
        assert (blamed, better, gap) == (0, 0, 0)
    elif trajectory == "alike":
        assert max(blamed, better) <= 0.25
    else:
        assert blamed >= 0.75
        assert better == 0
    assert [each.readout_blamed >= 0.9 for each in found] == ["poor" in gates for gates in GATES]


def test_the_command_prints_every_kind(capsys: pytest.CaptureFixture[str]) -> None:
    assert verdicts.main(["--diagnoses", "2", "--examples", "200", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found) == len(verdicts.TRAJECTORIES) * len(GATES)
    assert set(found[0]) == set(Verdicts.__struct_fields__)
