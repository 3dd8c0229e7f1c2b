"""Do two recordings hold the same examples? By their content, and told apart from chance repeats of few inputs.

An example is known by its text, or else by its label and answers, rounded; a sequence of decisions by all of them. Of
many examples a sketch holds those with the lowest hashes: the same ones in every recording, so sketches can be compared
in place of recordings. A gate or a stopper keeps the sketch of the examples that it was fitted to.
"""

import hashlib
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from loopscope.config import Settings, Tally
from loopscope.readouts.signals import FITTED
from loopscope.trajectory import Trajectory

Hashes = NDArray[np.uint64]
Hash = Annotated[int, msgspec.Meta(ge=0)]

_SKETCHED = 1024
"""Different examples that a sketch holds at most."""
_KEY_BITS = 53
"""Of a hash, so that any reader of JSON keeps it."""
_DECIMALS = 3
"""Of answers: the same example, recorded twice, differs by less."""
_MIN_SHARED = 5
_MIN_DEVIATIONS = 4.0
"""Standard deviations above what chance would share from which on examples are the same."""


class ExampleSketch(Settings, frozen=True, kw_only=True):
    """Which examples (or sequences) a recording holds."""

    units: Tally  # all of them
    complete: bool  # whether all are below
    hashes: list[Hash]  # rising
    counts: list[Tally]  # how often each occurs


def sketch_of(recording: Trajectory, size: int | None = _SKETCHED) -> ExampleSketch:
    """The examples of a recording with the lowest hashes, at most `size` different ones; None: all."""
    found = unit_hashes(recording)
    hashes, counts = np.unique(found >> np.uint64(64 - _KEY_BITS), return_counts=True)
    complete = size is None or len(hashes) <= size
    kept = slice(None if complete else size)
    return ExampleSketch(
        units=len(found), complete=complete, hashes=hashes[kept].tolist(), counts=counts[kept].tolist()
    )


def num_shared(ours: ExampleSketch, theirs: ExampleSketch) -> int:
    """About how many examples of `ours` are among `theirs`; 0 if chance explains that they share some.

    Two independent draws of N and M examples from few inputs share many. An input that occurs n times in both together
    occurs c times in the first, where c is binomial with the rate N / (N + M). So c (n - c), the pairs across, are
    n (n - 1) N M / (N + M)^2 on average; where the same examples are in both, there are more.
    """
    last = [np.inf if each.complete else each.hashes[-1] for each in (ours, theirs)]
    counted = [dict(zip(each.hashes, each.counts, strict=True)) for each in (ours, theirs)]
    within = [each for each in {*counted[0], *counted[1]} if each <= min(last)]
    first, second = (np.array([each.get(value, 0) for value in within], dtype=np.float64) for each in counted)
    total = first + second
    repeated = total > 1
    n, pairs = total[repeated], (first * second)[repeated]
    rate = ours.units / (ours.units + theirs.units)
    mixed = rate * (1 - rate)
    expected = n * (n - 1) * mixed
    squared = expected * ((n - 2) * (n - 3) * mixed + n - 1)
    weights = 1 / (n - 1)
    excess = float(((pairs - expected) * weights).sum())
    deviation = float(np.sqrt(((squared - expected**2) * weights**2).sum()))
    shared, there = np.minimum(first, second).sum(), first.sum()
    if shared < _MIN_SHARED or excess < _MIN_DEVIATIONS * deviation:
        return 0
    return max(1, round(ours.units * float(shared / there)))


def unit_hashes(recording: Trajectory) -> Hashes:
    """[units] of the examples of a recording, or of its sequences."""
    if recording.sequences is None:
        return _text_hashes(recording) if recording.examples is not None else _answer_hashes(recording)
    rows = _answer_hashes(recording)
    _, unit = np.unique(recording.sequences, return_inverse=True)
    order = np.argsort(unit, kind="stable")
    starts = np.searchsorted(unit[order], np.arange(unit.max() + 1))
    place = (np.arange(len(order)) - starts[unit[order]]).astype(np.uint64)
    result = np.zeros(len(starts), dtype=np.uint64)
    np.add.at(result, unit[order], _mixed(rows[order] + _mixed(place)))
    return _mixed(result)


def _text_hashes(recording: Trajectory) -> Hashes:
    assert recording.examples is not None
    texts = (text.encode("utf-8", "surrogatepass") for text in recording.examples)
    digests = b"".join(hashlib.blake2b(text, digest_size=8).digest() for text in texts)
    return np.frombuffer(digests, dtype=np.uint64)


def _answer_hashes(recording: Trajectory) -> Hashes:
    """[N] of labels and answers; where neither logits nor log-probabilities were kept, of the recorded signals, too."""
    count = recording.num_examples
    parts: list[NDArray[Any]] = [recording.predicted]
    if recording.labels is not None:
        parts.append(recording.labels[:, None])
    if recording.logits is not None:
        parts.append(recording.logits.reshape(count, -1))
    elif recording.label_log_probs is not None:
        parts.append(recording.label_log_probs)
    else:
        parts += [recording.signals[name] for name in sorted(recording.signals) if not name.startswith(FITTED)]
    factors, result = np.random.default_rng(0), np.zeros(count, dtype=np.uint64)
    for part in parts:
        values = np.nan_to_num(np.asarray(part, dtype=np.float64), nan=-1e6, posinf=1e6, neginf=-1e6)
        whole = np.rint(values * 10**_DECIMALS).astype(np.int64).astype(np.uint64)
        result += whole @ factors.integers(1, 2**63, whole.shape[1], dtype=np.uint64)
    return _mixed(result)


def _mixed(values: Hashes) -> Hashes:
    """Every bit depends on every other (the last step of splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(values ^ (values >> np.uint64(31)))
