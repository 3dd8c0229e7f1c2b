"""Signals of a whole vocabulary on the device: the numbers of `readouts.signals`, however many rows there are?"""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.special import log_softmax

from loopscope.engine import logit_signals
from loopscope.readouts.readout import find_readout
from loopscope.readouts.replay import replayed
from loopscope.readouts.signals import CONVERGENCE

NAMES = logit_signals.LOGIT_SIGNALS
ROWS, LOOPS = 23, 5


def by_definition(name: str, rows: NDArray[np.float32]) -> NDArray[np.float64]:
    """[N, T] of logits [N, T, V], as a replay has it."""
    definition = find_readout(name)
    assert definition is not None
    return replayed(definition, rows)


def some_logits(classes: int, missing: bool = False) -> NDArray[np.float32]:
    """[T, N, V] with rows that are undecided, tied, sure, and the same at every loop."""
    rng = np.random.default_rng(classes)
    logits = rng.normal(size=(LOOPS, ROWS, classes)).astype(np.float32) * rng.choice([0.1, 3, 30], (ROWS, 1))
    logits[:, 0] = 0
    logits[:, 1] = np.round(logits[:, 1])  # the likeliest are several
    logits[:, 2, 7] = 1e4
    logits[:, 3, 5] = logits[:, 3].max(axis=1) + np.array([20, 25, 30, 35, 40])
    logits[:, 4] = logits[0, 4]
    if missing:
        logits[:, :, classes // 2 :: 3] = -np.inf
    return logits.astype(np.float32)


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("classes", [50, 900])
def test_a_recording_has_the_same_numbers(classes: int, missing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = some_logits(classes, missing)
    rows = logits.swapaxes(0, 1)
    labels = np.arange(ROWS) % (classes // 2)
    for numbers in (37, 7 * classes, 1 << 24):
        monkeypatch.setattr(logit_signals, "_CACHED_LOGITS", numbers)
        signals = logit_signals.logit_signals(torch.from_numpy(logits), torch.from_numpy(labels))
        assert set(signals) == {"predictions", "label_log_probs", *NAMES}
        assert np.array_equal(signals["predictions"], rows.argmax(axis=-1))
        expected = log_softmax(rows.astype(np.float64), axis=-1)[np.arange(ROWS), :, labels]
        assert signals["label_log_probs"] == pytest.approx(expected, rel=1e-9, abs=1e-9)
        for name in NAMES:
            assert signals[name] == pytest.approx(by_definition(name, rows), rel=1e-9, abs=1e-9, nan_ok=True), name
            assert np.isnan(signals[name][:, 0]).all() == (name in (*CONVERGENCE, "settling"))


@pytest.mark.parametrize("name", NAMES)
def test_rows_at_different_loops_are_followed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They come when they like, and a place that is free again takes another one, at its first loop."""
    monkeypatch.setattr(logit_signals, "_CACHED_LOGITS", 2 * 50)
    logits = some_logits(50)
    expected = by_definition(name, logits.swapaxes(0, 1))
    looking, rng = logit_signals.StreamedSignals([name]), np.random.default_rng(0)
    waiting = list(range(ROWS))
    at: dict[int, int] = {}  # who is at a place
    loop: dict[int, int] = {}
    while waiting or at:
        for place in range(6):
            if place not in at and waiting and rng.random() < 0.5:
                at[place], loop[place] = waiting.pop(), 0
        places = rng.permutation(list(at)).astype(np.int64)
        if not len(places):
            continue
        who, when = np.array([at[p] for p in places]), np.array([loop[p] + 1 for p in places])
        values = looking.values(places, when, torch.from_numpy(logits[when - 1, who]))[name]
        assert values == pytest.approx(expected[who, when - 1], rel=1e-9, abs=1e-9, nan_ok=True)
        for place in places.tolist():
            loop[place] += 1
            if loop[place] == LOOPS:
                del at[place]


@pytest.mark.parametrize(
    ("logits_in", "sums_in", "near"), [(torch.bfloat16, torch.float64, 1e-9), (torch.float32, torch.float32, 1e-4)]
)
def test_a_low_precision_is_read_as_it_is_and_a_device_without_double_precision_does_what_it_can(
    logits_in: torch.dtype, sums_in: torch.dtype, near: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logit_signals, "accumulator", lambda device: sums_in)
    logits = torch.from_numpy(some_logits(50)).to(logits_in)
    before = logits.clone()
    signals = logit_signals.logit_signals(logits, torch.zeros(ROWS, dtype=torch.int64))
    assert torch.equal(logits, before)
    for name in NAMES:
        expected = by_definition(name, logits.float().numpy().swapaxes(0, 1))
        assert signals[name] == pytest.approx(expected, rel=near, abs=near, nan_ok=True), name
