"""Is the trajectory to blame, or the readout? Three gaps in average loops at a target accuracy X, with intervals.

- readout gap: D@X of the model's own gate minus D@X of the best readout on the same trajectory;
- trajectory gap: D@X of the best readout here minus the same on a reference trajectory;
- room left: D@X of the best readout minus that of the cheapest rule that knows the labels.

The best readout is the one that validation data choose. Where X is out of reach, the comparison moves down to the
highest whole percent that both sides reach. A part is blamed only where its interval excludes zero.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from loopscope.analysis.bootstrap import (
    RESAMPLES,
    SEED,
    Curves,
    Sums,
    resampled_curves,
    resampled_label_aware,
)
from loopscope.exits import READOUTS, Frontier, sweep
from loopscope.exits.sweep import available
from loopscope.trajectory import Trajectory

_LEVEL = 0.95
_ENOUGH = 0.95
"""A comparison is made where both sides reach its accuracy in at least this share of the resamples."""


@dataclass(frozen=True)
class Gap:
    """A difference in average loops; positive means that the first is the slower one."""

    first: str
    second: str
    accuracy: float  # at which the two are compared
    first_depth: float
    second_depth: float
    value: float
    low: float
    high: float
    reached: float  # share of resamples in which both reach that accuracy
    reached_target: float  # share of resamples in which both reach the target that was asked for

    @property
    def sign(self) -> int:
        """1 or -1 where the interval excludes zero, 0 where nothing can be said."""
        return 1 if self.low > 0 else -1 if self.high < 0 else 0


@dataclass(frozen=True)
class Diagnosis:
    target: float
    best_readout: str
    readout_gap: Gap | None  # None without a gate
    trajectory_gap: Gap | None  # None without a reference
    room_left: Gap | None  # None only where nothing is ever reached together
    blamed: tuple[str, ...]  # of 'readout' and 'trajectory'
    sentence: str


class Subject:
    """A model as the diagnosis sees it: its frontiers, chosen on validation and resampled on test data."""

    def __init__(self, validation: Trajectory, test: Trajectory, resamples: int = RESAMPLES, seed: int = SEED) -> None:
        both = (validation, test)
        names = [name for name in READOUTS if name != "oracle" and all(available(name, tr) for tr in both)]
        self.frontiers: dict[str, Frontier] = {name: sweep(name, validation, test) for name in names}
        self.ceiling = max(float(frontier.accuracy.max()) for frontier in self.frontiers.values())
        self.has_gate = "gate" in self.frontiers
        self._test, self._resamples, self._seed = test, resamples, seed
        self._curves: dict[str, Curves] = {}
        self.label_aware = resampled_label_aware(test, resamples, seed)

    def curves(self, readout: str) -> Curves:
        if readout not in self._curves:
            thresholds = self.frontiers[readout].thresholds
            self._curves[readout] = resampled_curves(readout, thresholds, self._test, self._resamples, self._seed)
        return self._curves[readout]

    def best(self, accuracy: float) -> str:
        """The readout with the least D@X on validation data; where none reaches X, the most accurate one."""
        depths = {name: _calibration_depth(frontier, accuracy) for name, frontier in self.frontiers.items()}
        if min(depths.values()) < np.inf:
            return min(depths, key=depths.__getitem__)
        return max(self.frontiers, key=lambda name: float(self.frontiers[name].calibration_accuracy.max()))


def diagnose(subject: Subject, reference: Subject | None = None, target: float = 0.95) -> Diagnosis:
    """The three gaps of a model, and which part they blame."""
    readout = None
    if subject.has_gate:
        readout = _gap(
            target, lambda x: ("gate", subject.curves("gate").depth_at(x)), lambda x: _best_depth(subject, x, "")
        )
    trajectory = None
    if reference is not None and reference is not subject:
        trajectory = _gap(
            target, lambda x: _best_depth(subject, x, ""), lambda x: _best_depth(reference, x, " on the reference")
        )
    room = _gap(
        target, lambda x: _best_depth(subject, x, ""), lambda x: ("labels known", subject.label_aware.depth_at(x))
    )
    parts = {"readout": readout, "trajectory": trajectory}
    blamed = tuple(name for name, gap in parts.items() if gap is not None and gap.sign > 0)
    sentence = _sentence(subject, reference, target, readout, trajectory)
    return Diagnosis(target, subject.best(target), readout, trajectory, room, blamed, sentence)


def _best_depth(subject: Subject, accuracy: float, where: str) -> tuple[str, Sums]:
    name = subject.best(accuracy)
    return name + where, subject.curves(name).depth_at(accuracy)


_Side = Callable[[float], tuple[str, Sums]]


def _gap(target: float, first: _Side, second: _Side) -> Gap | None:
    """The gap at the highest accuracy, from the target down, that both reach in nearly every resample."""
    at_target: float | None = None
    for accuracy in _accuracies(target):
        (first_name, a), (second_name, b) = first(accuracy), second(accuracy)
        difference = a - b
        resampled = difference[1:]
        reached = float(np.mean(~np.isnan(resampled)))
        at_target = reached if at_target is None else at_target
        if reached < _ENOUGH or np.isnan(difference[0]):
            continue
        tail = 50 * (1 - _LEVEL)
        low, high = np.nanpercentile(resampled, [tail, 100 - tail])
        sides = (float(a[0]), float(b[0]), float(difference[0]), float(low), float(high))
        return Gap(first_name, second_name, accuracy, *sides, reached, at_target)
    return None


def _accuracies(target: float) -> Iterator[float]:
    yield target
    for percent in range(int(np.ceil(100 * target)) - 1, 0, -1):
        yield percent / 100


def _calibration_depth(frontier: Frontier, accuracy: float) -> float:
    reached = frontier.calibration_average_loops[frontier.calibration_accuracy >= accuracy]
    return float(reached.min()) if len(reached) else np.inf


def _sentence(
    subject: Subject, reference: Subject | None, target: float, readout: Gap | None, trajectory: Gap | None
) -> str:
    ceiling = ""
    if subject.ceiling < target:
        ceiling = f" It never reaches {target:.0%} (at best {subject.ceiling:.1%})."
    if reference is subject and not subject.has_gate:
        best = subject.best(target)
        depth = subject.frontiers[best].depth_at(target)
        reach = "" if depth is None else f" With {best} it reaches {target:.0%} in {depth:.2f} loops on average."
        return f"It is the reference, and has no gate of its own.{reach}{ceiling}"
    verdicts = {"readout": readout, "trajectory": trajectory}
    blamed = [name for name, gap in verdicts.items() if gap is not None and gap.sign > 0]
    said = "; ".join(
        text for text in (_on_readout(subject, readout), _on_trajectory(subject, reference, trajectory)) if text
    )
    if readout is not None and trajectory is not None and len(blamed) == 2:
        more, less = blamed if readout.value > trajectory.value else reversed(blamed)
        head = f"Both parts are to blame, the {more} more than the {less}"
    elif blamed:
        head = f"The {blamed[0]} is to blame"
    elif readout is None and trajectory is None:
        head = "Nothing can be blamed"
    else:
        head = "Neither part can be blamed"
    return f"{head}: {said}.{ceiling}"


def _on_readout(subject: Subject, gap: Gap | None) -> str:
    if not subject.has_gate:
        return "it has no gate of its own to compare with"
    if gap is None:
        return "its gate and the best readout reach no accuracy together"
    if gap.second == "gate":
        return f"validation data choose its own gate as the best readout at {gap.accuracy:.0%}"
    if gap.sign > 0:
        return f"its own gate takes {_loops(gap)} more than {gap.second} to reach {gap.accuracy:.0%}"
    if gap.sign < 0:
        return f"its own gate takes {_loops(gap)} fewer than {gap.second} to reach {gap.accuracy:.0%}"
    return f"whether its own gate is worse than {gap.second} cannot be told ({_interval(gap)} at {gap.accuracy:.0%})"


def _on_trajectory(subject: Subject, reference: Subject | None, gap: Gap | None) -> str:
    if reference is None:
        return "without a reference the trajectory gap cannot be identified"
    if reference is subject:
        return "its trajectory is the reference itself"
    if gap is None:
        return "it reaches no accuracy together with the reference"
    if gap.sign > 0:
        return f"with its best readout it takes {_loops(gap)} more than the reference to reach {gap.accuracy:.0%}"
    if gap.sign < 0:
        return f"with its best readout it takes {_loops(gap)} fewer than the reference to reach {gap.accuracy:.0%}"
    return f"whether its trajectory is worse than the reference cannot be told ({_interval(gap)} at {gap.accuracy:.0%})"


def _loops(gap: Gap) -> str:
    low, high = sorted((abs(gap.low), abs(gap.high)))
    return f"{abs(gap.value):.2f} loops [{low:.2f}, {high:.2f}]"


def _interval(gap: Gap) -> str:
    return f"{gap.value:+.2f} loops [{gap.low:+.2f}, {gap.high:+.2f}]"
