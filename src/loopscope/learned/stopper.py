"""A rule that was learned from recordings, on all of their signals together: a readout under the name `stopper:NAME`.

Two kinds, both forests that read the signals of a loop and of the one before:

- `induction`, optimal stopping by backward induction. At every loop and for every price of a loop: what does going on
  gain, on average over examples that look like this one, if one goes on optimally? The highest price at which it still
  pays is the example's signal at a loop, and it exits where that is below the price that is asked: one number, so that
  a threshold is a price.
- `classifier`: the probability that exiting here loses against full depth.

Replay and live running evaluate the forests by the same lines of NumPy. `stopper_fitting` fits them.

Shapes: N rows, T loops, F signals, E edges of a signal's bins, K trees a loop, M nodes of all trees, G prices.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, get_args

import numpy as np
from numpy.typing import NDArray

from loopscope.artifacts import load_artifact, save_artifact
from loopscope.config import Settings, plain
from loopscope.errors import UserError
from loopscope.leaks import OfSplit, check_other_data
from loopscope.learned.fitted_gate import GATE, GATE_SCHEMA, GATE_WEIGHTS, check_host
from loopscope.readouts.readout import Readout, find_readout
from loopscope.readouts.replay import signal
from loopscope.readouts.signals import STOPPER, Array, Signal, State
from loopscope.trajectory import Trajectory
from loopscope.trajectory_checks import as_array

StopperKind = Literal["induction", "classifier"]
STOPPER_KINDS: tuple[StopperKind, ...] = get_args(StopperKind)
_CHUNK = 1024
_TENSORS = {"edges": 3, "roots": 2, "feature": 1, "threshold": 1, "below": 1, "above": 1, "value": 2, "prices": 1}
"""The tensors of a stopper, and how many axes each has."""


class StopperContents(Settings, frozen=True, kw_only=True):
    """The manifest of a saved stopper: all except its arrays."""

    kind: StopperKind
    signals: list[str]


@dataclass(frozen=True, repr=False, eq=False)
class Stopper:
    """Decide on exits with a forest that reads all recorded signals of the current and the previous loop.

    `fit_stopper` makes a stopper. Its readout is `stopper:NAME`. An `induction` stopper estimates the gain of further
    loops by backward induction; its threshold is the price of a loop. A `classifier` stopper estimates the probability
    that an exit loses the answer.

    Parameters
    ----------
    kind
        "induction" or "classifier".
    signals
        The names of the F signals that the stopper reads.
    edges
        [T-1, F, E] the edges of each signal's bins; inf fills the places of missing edges.
    roots
        [T-1, K] the first node of every tree.
    feature, threshold, below, above
        [M] the test of each node, and the next nodes; a leaf leads to itself.
    value
        [M, G] the gain of another loop at each price; for a classifier, [M, 1] probabilities.
    prices
        [G] prices of a loop, in rising order from 0; empty for a classifier.
    provenance
        The settings of the fit, and the hash of the model's weights.

    Raises
    ------
    UserError
        If the arrays of the trees do not fit together.

    Examples
    --------
    >>> stopper = ls.fit_stopper(recording("train", 2), trees=32)
    >>> stopper.num_loops, stopper.kind
    (4, 'induction')
    """

    kind: StopperKind
    signals: tuple[str, ...]  # that it reads
    edges: Array  # [T-1, F, E] of the bins of each signal, inf where there are fewer
    roots: Array  # [T-1, K] the node at which every tree begins
    feature: Array  # [M] that a node asks for: the signals of this loop, then those of the loop before
    threshold: Array  # [M] it goes on to `below` from here on down, else to `above`
    below: Array  # [M] a leaf goes on to itself
    above: Array  # [M]
    value: Array  # [M, G] what going on gains at each price; of a classifier [M, 1] the probability
    prices: Array  # [G] of a loop, rising from 0; of a classifier none
    provenance: Mapping[str, Any] = field(default_factory=dict)  # how it was fitted, and to which weights

    prefix: ClassVar[str] = STOPPER
    what: ClassVar[str] = "stopper"

    def __post_init__(self) -> None:
        """A forest that was put together wrongly would walk in circles, or answer without a word."""
        object.__setattr__(self, "signals", tuple(self.signals))
        for name in self.signals:
            readout_for_stopper(name)
        arrays = {name: as_array(getattr(self, name), f"{name} of a stopper") for name in _TENSORS}
        for name, array in arrays.items():
            object.__setattr__(self, name, array.astype(np.int64) if array.dtype.kind == "u" else array)
        axes = [array.ndim for array in arrays.values()]
        known = not any(np.isnan(each).any() for each in arrays.values())
        if axes != [*_TENSORS.values()] or not known or not self._fits_together():
            raise UserError("These are not the tensors of a stopper: its trees do not fit together; fit it again.")

    def _fits_together(self) -> bool:
        nodes, loops = len(self.feature), len(self.roots)
        if {len(each) for each in (self.threshold, self.below, self.above, self.value)} != {nodes} or 0 in (
            *self.roots.shape,
            nodes,
            len(self.signals),
        ):
            return False
        at = np.arange(nodes)
        leaf = self.below == at
        return bool(
            self.edges.shape[:2] == (loops, len(self.signals))
            and self.value.shape[1] == (len(self.prices) if self.kind == "induction" else 1)
            and (self.kind == "classifier") == (len(self.prices) == 0)
            and all(each.dtype.kind == "i" for each in (self.roots, self.feature, self.below, self.above))
            and 0 <= self.roots.min() <= self.roots.max() < nodes
            and 0 <= self.feature.min() <= self.feature.max() < 2 * len(self.signals)
            and (leaf | ((self.below > at) & (self.above > at))).all()  # downwards only, so that it ends
            and (self.above[leaf] == at[leaf]).all()
            and max(self.below.max(), self.above.max()) < nodes
            and (np.diff(self.prices) > 0).all()
            and (self.prices[:1] == 0).all()
            and np.isfinite(self.value).all()
        )

    @property
    def num_loops(self) -> int:
        """Return T, the full depth to which the stopper was fitted."""
        return len(self.roots) + 1

    def __repr__(self) -> str:
        return f"Stopper({self.kind}, {self.num_loops} loops, reads {', '.join(self.signals)})"

    @property
    def tensors(self) -> dict[str, Array]:
        """Return the arrays of the stopper by name."""
        return {name: getattr(self, name) for name in _TENSORS}

    @property
    def contents(self) -> StopperContents:
        """Return the kind and the signals, in the form of a stopper file."""
        return StopperContents(kind=self.kind, signals=list(self.signals))

    def check(self, weights: str | None) -> None:
        """Reject any model except the model to which the stopper was fitted.

        Parameters
        ----------
        weights
            The hash of the model's weights; None if unknown.

        Raises
        ------
        UserError
            If the stopper was fitted to a different model.
        """
        check_host(self.provenance, weights, "stopper")

    def check_calibration(self, recording: OfSplit) -> None:
        """Reject data to which the stopper was fitted; such data must neither choose nor test a threshold.

        Parameters
        ----------
        recording
            The recording or live run to check.

        Raises
        ------
        UserError
            If the stopper was fitted to the given data.
        """
        check_other_data(self.provenance, recording, "stopper")

    def check_depth(self, num_loops: int) -> None:
        """Reject any full depth except the full depth to which the stopper was fitted.

        Parameters
        ----------
        num_loops
            The number of loops at full depth.

        Raises
        ------
        UserError
            If the stopper was fitted to a different full depth.
        """
        if num_loops != self.num_loops:
            raise UserError(
                f"This stopper was fitted to {self.num_loops} loops, and here full depth is {num_loops}; fit one to "
                "recordings of this depth."
            )

    def values(self, trajectory: Trajectory) -> Signal:
        """Compute the signal of the stopper on a recording.

        Parameters
        ----------
        trajectory
            A recording with the signals that the stopper reads.

        Returns
        -------
        NDArray[np.float64]
            [N, T] the signal, which is 0 at full depth.

        Raises
        ------
        UserError
            If the recording lacks a signal, or if the recording and the stopper differ in full depth.
        """
        self.check_depth(trajectory.num_loops)
        result, before = np.zeros((trajectory.num_examples, self.num_loops)), None
        for loop, bins in enumerate(bins_by_loop(self.signals, trajectory, self.edges)):
            result[:, loop] = self._scores(loop, bins, np.zeros_like(bins) if before is None else before)
            before = bins
        return result

    def step(self, now: Array, state: State | None) -> tuple[Signal, State]:
        """Compute the signal of the stopper for rows at different loops.

        Parameters
        ----------
        now
            [N, F] the signals at the current loop.
        state
            The state after the previous loop; None at loop 1.

        Returns
        -------
        tuple[NDArray[np.float64], State]
            [N] the signal, and the state for the next loop.
        """
        if state is None:
            state = (np.zeros(len(now), dtype=np.int64), np.zeros(now.shape, dtype=np.int32))
        loops, before = state
        scores, bins = np.zeros(len(now)), np.zeros(now.shape, dtype=np.int32)
        for loop in np.unique(loops[loops < self.num_loops - 1]).tolist():
            rows = loops == loop
            bins[rows] = bins_of(now[rows], self.edges[loop])
            scores[rows] = self._scores(loop, bins[rows], before[rows])
        return scores, (loops + 1, bins)

    def readout(self) -> Readout:
        """Make the readout with which the stopper runs live.

        Returns
        -------
        Readout
            A readout whose step reads the signals [N, F].
        """
        return Readout("stopper", "below", "hidden", self.step)

    def _scores(self, loop: int, now: Array, before: Array) -> Signal:
        """[N] the signal at the loop with this index, from the bins [N, F] of it and of the one before."""
        scores = np.empty(len(now))
        for start in range(0, len(now), _CHUNK):
            rows = slice(start, start + _CHUNK)
            found = self._forest(loop, np.concatenate((now[rows], before[rows]), axis=1))
            scores[rows] = found[:, 0] if self.kind == "classifier" else price_index(found, self.prices)
        return scores

    def _forest(self, loop: int, features: Array) -> Signal:
        """[N, G] the mean over the trees of a loop."""
        first = np.arange(len(features))[:, None] * features.shape[1]
        values, node = features.ravel(), np.tile(self.roots[loop], (len(features), 1))
        feature, children = self._walk
        while True:
            goes_above = values.take(feature.take(node) + first) > self.threshold.take(node)
            after = children.take(2 * node + goes_above)
            if np.array_equal(after, node):
                return self.value[node].mean(axis=1, dtype=np.float64)
            node = after

    @cached_property
    def _walk(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """[M] the feature of every node and [2 M] its children (below, above), in the type that indexes fastest."""
        children = np.stack((self.below, self.above), axis=1).ravel()
        return self.feature.astype(np.intp), children.astype(np.intp)

    def save(self, folder: str | Path) -> None:
        """Write the stopper to a folder; an interrupted write leaves no partial stopper.

        Parameters
        ----------
        folder
            The folder of the stopper.

        Raises
        ------
        UserError
            If the folder holds anything but a stopper.
        """
        save_artifact(folder, GATE, GATE_SCHEMA, plain(self.contents), self.provenance, {GATE_WEIGHTS: self.tensors})

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Read a stopper, and check its file against the stored hash.

        Parameters
        ----------
        folder
            The folder of the stopper.

        Returns
        -------
        Stopper
            The fitted stopper.

        Raises
        ------
        UserError
            If a file is missing or was altered.
        """
        found = load_artifact(Path(folder), GATE, GATE_SCHEMA, StopperContents, GATE_WEIGHTS)
        return cls.of_tensors(found.contents, found.arrays, found.provenance)

    @classmethod
    def of_tensors(cls, contents: StopperContents, tensors: Mapping[str, Array], provenance: Mapping[str, Any]) -> Self:
        """Make a stopper from its arrays.

        Parameters
        ----------
        contents
            The kind and the signals of the stopper.
        tensors
            The arrays of the stopper, by name.
        provenance
            The settings of the fit, and the hash of the model's weights.

        Returns
        -------
        Stopper
            The fitted stopper.

        Raises
        ------
        UserError
            If the arrays do not form a stopper.
        """
        if set(tensors) != set(_TENSORS):
            raise UserError(f"These are not the tensors of a stopper: {', '.join(sorted(tensors))}.")
        arrays = {name: np.array(value) for name, value in tensors.items()}
        return cls(contents.kind, tuple(contents.signals), **arrays, provenance=provenance)


def price_index(gains: Signal, prices: Array) -> Signal:
    """[N] the highest price of a loop at which going on pays, from the gains [N, G] at rising prices.

    Between two prices by a straight line; where going on does not even pay for nothing, what it loses. In truth the
    gains fall with the price; what was estimated is made to.
    """
    falling = np.minimum.accumulate(gains, axis=1)
    last = np.minimum((falling > 0).sum(axis=1), len(prices) - 1) - 1  # the highest price but one at which it pays
    index = falling[:, 0].copy()
    (rows,) = np.nonzero(last >= 0)
    here, after = falling[rows, last[rows]], falling[rows, last[rows] + 1]
    low, high = prices[last[rows]], prices[last[rows] + 1]
    share = np.divide(here, here - after, out=np.ones_like(here), where=here - after > here)
    index[rows] = low + (high - low) * share
    return index


def readout_for_stopper(name: str) -> Readout:
    """The built-in readout of this name, if a stopper can read its signal in a running model, too."""
    found = find_readout(name) if ":" not in name else None
    if found is None or found.is_own or found.takes != "threshold":
        raise UserError(f"A stopper reads built-in signals of one loop, such as entropy or margin; got '{name}'.")
    return found


def bins_by_loop(names: tuple[str, ...], trajectory: Trajectory, edges: Array) -> Iterator[Array]:
    """[N, F] the bins of a stopper's signals, at every loop that has edges [T-1, F, E]."""
    values = [signal(name, trajectory) for name in names]
    for loop, own in enumerate(edges):
        yield bins_of(np.stack([each[:, loop] for each in values], axis=1), own)


def bins_of(signals: Array, edges: Array) -> Array:
    """[N, F] the bin of each signal [N, F] of one loop; the first bin if a signal has no value yet."""
    columns = [np.searchsorted(own, values, side="right") for values, own in zip(signals.T, edges, strict=True)]
    bins = np.stack(columns, axis=1).astype(np.min_scalar_type(edges.shape[1]))
    bins[np.isnan(signals)] = 0
    return bins
