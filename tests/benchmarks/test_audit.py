"""The audit of guarantees: kept on populations that were made to break them, quiet on recordings in any order."""

import json
import warnings

import numpy as np
import pytest

import loopscope as ls
from benchmarks import audit as bench
from benchmarks.audit import ALPHA, CONFIDENCE, SETTINGS, audit, setting, watch

QUICK = ("ties", "tolerance: signals that mislead", "new inputs, 600 with 80 %")
EACH = [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in SETTINGS]
_MAX_ERRORS = 3
"""Standard errors by which a measured rate may lie above the true one."""


@pytest.mark.parametrize("name", EACH)
def test_at_most_one_calibration_in_twenty_is_broken(name: str) -> None:
    size = 500 if name in QUICK else 2_000
    found = audit(name, size, 0.05, 80 if name in QUICK else 300)
    assert found.broken <= 1 - CONFIDENCE + _MAX_ERRORS * found.error
    assert found.refused < found.calibrations
    assert found.loops < bench.LOOPS


@pytest.mark.parametrize("name", EACH)
def test_monitors_of_sorted_recordings_are_quiet(name: str) -> None:
    found = watch(name, 10 if name in QUICK else 100, size=1_000)
    assert found.alarms <= ALPHA + _MAX_ERRORS * found.error


def test_inputs_that_count_once_say_nothing_of_new_ones() -> None:
    """Where frequent inputs are easy, a guarantee for distinct inputs is broken on new ones most of the time."""
    new = setting("new inputs, 600 with 80 %")
    rng, broken = np.random.default_rng(0), []
    for _ in range(20):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            policy = ls.calibrate(new.draw(2_000, rng), 0.05, readout="margin", distinct=True)
        broken.append(new.risk(policy, 2_000) > 0.05)
    assert np.mean(broken) > 0.5


def test_the_risk_of_new_inputs_is_that_of_draws_which_the_others_do_not_hold() -> None:
    new, rng = setting("new inputs, 600 with 80 %"), np.random.default_rng(1)
    policy = ls.ExitPolicy("margin", 1.0)
    loops = policy.exit_loops(new.trajectory)
    lost = ~new.trajectory.correct[np.arange(len(loops)), loops - 1] & new.trajectory.correct[:, -1]
    alone = []
    for _ in range(200):
        inputs, counts = np.unique(rng.choice(len(lost), 400, p=new.weights), return_counts=True)
        alone.append(lost[inputs[counts == 1]])
    measured = np.concatenate(alone)
    assert new.risk(policy, 400) == pytest.approx(measured.mean(), abs=4 * measured.std() / len(measured) ** 0.5)


def test_its_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "SIZES", (500,))
    words = ["--calibrations", "2", "--setting", "ties", "--setting", "sequences of unequal lengths"]
    assert bench.main([*words, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [(each["setting"], each["max_drop"]) for each in result["coverage"]][:2] == [("ties", 0.01), ("ties", 0.05)]
    assert len(result["monitors"]) == 2
    assert bench.main(words) == 0
    assert "share whose guarantee is broken" in capsys.readouterr().out
