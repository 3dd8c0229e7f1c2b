"""What was fitted to some data is neither calibrated nor evaluated on them, however it comes there."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import random_trajectory

import loopscope as ls
from loopscope.analysis.held_out import check_policy
from loopscope.leaks import FITTED_ON
from loopscope.learned.stopper_fitting import fit_out_of_bag, why_not_learned
from loopscope.trajectory import concatenate

ROWS = 1_000


def learnable(seed: int, **more: object) -> ls.Trajectory:
    """Right from a random loop on; two signals see some of it."""
    rng = np.random.default_rng(seed)
    settled = np.minimum(rng.geometric(0.5, (ROWS, 1)), 4)
    right = np.arange(1, 5) >= settled
    signals = {name: np.arange(1, 5) - settled + rng.normal(0, 1, right.shape) for name in ("margin", "top1")}
    return ls.Trajectory(predictions=(~right).astype(int), labels=np.zeros(ROWS, int), signals=signals, **more)


FITTED = learnable(0)
STOPPER = ls.fit_stopper(FITTED)
GATE = ls.FittedGate(
    np.ones(4), np.array(0.0), provenance=dict(ls.fit_stopper(random_trajectory(0, rows=ROWS)).provenance)
)
"""Fitted to what the stopper here was; the training of gates is tested elsewhere."""


def calibrated(recording: ls.Trajectory, **options: object) -> ls.ExitPolicy:
    return ls.calibrate(recording, 0.3, **options)  # type: ignore[arg-type]


LEAKS: dict[str, Callable[[], object]] = {
    "given": lambda: calibrated(FITTED, gates={"x": STOPPER}),
    "attached": lambda: calibrated(ls.attach(FITTED, {"x": STOPPER})),
    "attached, by name": lambda: calibrated(ls.attach(FITTED, {"x": STOPPER}), readout="stopper:x"),
    "one row less": lambda: calibrated(FITTED.take(np.arange(ROWS - 1)), gates={"x": STOPPER}),
    "attached, one row less": lambda: calibrated(ls.attach(FITTED.take(np.arange(1, ROWS)), {"x": STOPPER})),
    "attached, then a part": lambda: calibrated(ls.attach(FITTED, {"x": STOPPER}).take(np.arange(600))),
    "in another order": lambda: calibrated(ls.attach(FITTED.take(np.arange(ROWS)[::-1]), {"x": STOPPER})),
    "among others": lambda: calibrated(concatenate([FITTED, learnable(1)]), gates={"x": STOPPER}),
    "a fitted gate": lambda: calibrated(
        random_trajectory(0, rows=ROWS).take(np.arange(900)), gates={"x": replace(GATE, weight=np.ones(6))}
    ),
    "held out": lambda: check_policy(calibrated(learnable(1), gates={"x": STOPPER}, readout="stopper:x"), FITTED),
    "monitored": lambda: ls.Monitor(calibrated(learnable(1), gates={"x": STOPPER}, readout="stopper:x")).replay(FITTED),
    "swept": lambda: ls.sweep("stopper:x", *(ls.attach(each, {"x": STOPPER}) for each in (FITTED, learnable(1)))),
    "evaluated": lambda: ls.sweep("stopper:x", *(ls.attach(each, {"x": STOPPER}) for each in (learnable(1), FITTED))),
}


@pytest.mark.parametrize("leak", LEAKS)
def test_data_that_something_was_fitted_to_are_rejected(leak: str) -> None:
    with pytest.raises(ls.UserError, match=r"was fitted to (this very|about [\d,]+ of these)"):
        LEAKS[leak]()


def test_other_data_and_other_readouts_are_not(tmp_path: Path) -> None:
    other, leaky = ls.attach(learnable(1), {"x": STOPPER}), ls.attach(FITTED, {"x": STOPPER})
    assert calibrated(other, readout="stopper:x").readout == "stopper:x"
    assert calibrated(leaky, readout="margin").readout == "margin"
    ls.sweep("margin", leaky, other)
    leaky.save(tmp_path / "leaky")
    again = ls.Trajectory.load(tmp_path / "leaky")
    assert set(again.provenance[FITTED_ON]) == {"stopper:x"}
    with pytest.raises(ls.UserError, match="was fitted to"):
        calibrated(again)
    with pytest.raises(ls.UserError, match="differ in their fitted signals"):
        concatenate([leaky, ls.attach(FITTED, {"x": ls.fit_stopper(learnable(2))})])
    STOPPER.save(tmp_path / "stopper")
    with pytest.raises(ls.UserError, match="was fitted to about"):
        calibrated(FITTED.take(np.arange(ROWS - 1)), gates={"x": ls.Stopper.load(tmp_path / "stopper")})


SKETCH = {"units": 5, "complete": False, "keys": "0"}


@pytest.mark.parametrize("rows", [3, {"texts": 3}, {"texts": {**SKETCH, "keys": "zz"}}, {"texts": {}}])
def test_provenance_of_another_shape_is_one_sentence(rows: object) -> None:
    with pytest.raises(ls.UserError, match="the provenance of the stopper: "):
        calibrated(FITTED, gates={"x": replace(STOPPER, provenance={"rows": rows})})
    empty = replace(STOPPER, provenance={"rows": {"signals": SKETCH}})
    assert calibrated(FITTED, gates={"x": empty}).guarantee is not None


@pytest.mark.parametrize(
    "grid",
    [
        lambda rows: FITTED.take(rows[:-1]),
        lambda rows: FITTED.take(rows[::-1][1:]),
        lambda rows: concatenate([FITTED.take(rows[:300]), learnable(1)]),
    ],
    ids=["one row less", "in another order", "partly"],
)
def test_thresholds_from_what_is_tested_are_rejected(grid: Callable[[np.ndarray], ls.Trajectory]) -> None:
    with pytest.raises(ls.UserError, match="shares examples with it"):
        calibrated(FITTED, grid=grid(np.arange(ROWS)))
    assert calibrated(FITTED, grid=learnable(1)).guarantee is not None


@pytest.mark.parametrize("texts", [True, False])
def test_copies_of_an_input_are_judged_by_trees_that_had_none_of_them(texts: bool) -> None:
    """Labels are drawn at random: there is nothing to learn, but a forest that saw a copy knows its answer."""
    noise = random_trajectory(3, rows=100, loops=4)
    inputs = [str(row) for row in range(100)] if texts else None
    copies = replace(noise, examples=inputs).take(np.repeat(np.arange(100), 10))
    out_of_bag = fit_out_of_bag(copies, leaf=1, kind="classifier").out_of_bag
    lost = ~copies.correct[:, 0] & copies.correct[:, -1]
    assert abs(np.corrcoef(out_of_bag[:, 0], lost)[0, 1]) < 0.25
    few = replace(noise, examples=["one", "two"] * 50)
    assert why_not_learned(few) == "A stopper is learned from 10 different inputs or more; there are 2."
    assert why_not_learned(noise.take(np.arange(200) % 2)).endswith("there are 2.")
    assert why_not_learned(noise) == ""
