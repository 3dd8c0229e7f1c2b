"""How much could any rule on the recorded signals gain? Stoppers, learned from a recording with all of its signals.

A loop's forest (scikit-learn's extremely randomised trees, each grown on a bootstrap sample) learns what going on from
there is worth, the last loop's first: backward induction, for many prices of a loop at once. Whoever asks how a stopper
does on the recording that it was fitted to gets every example's answer from trees that did not have it (cross-fitting:
out of bag, or, where decisions come in sequences or inputs have copies, by folds that keep these together). So are
later loops judged while earlier ones are fitted, and so thresholds and the choice among readouts can come from the same
recording.

Shapes: N examples, T loops, F signals, E edges, K trees, G prices.
"""

from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from loopscope.config import Count, Seed, Settings, build, plain
from loopscope.errors import UserError
from loopscope.leaks import check_split, fitting_data
from loopscope.learned.attach import Fitted, attach
from loopscope.learned.stopper import STOPPER_KINDS, Stopper, StopperKind, bins_of, price_index, readout_for_stopper
from loopscope.readouts.readout import POST_HOC
from loopscope.readouts.replay import has_signal, signal
from loopscope.readouts.signals import OWN_GATES, STOPPER, Array, Signal
from loopscope.threshold_grids import gap_middles
from loopscope.trajectory import Trajectory

PRICES = np.array([0.0, 0.001, 0.002, 0.004, 0.008, 0.015, 0.03, 0.06, 0.12, 0.25, 0.5, 1.0])
"""The prices of a loop, in accuracy: at 0.01, a loop must make one more example in a hundred right."""
SIGNALS_READ = (*OWN_GATES, *POST_HOC, "patience", "settling", "hidden_acceleration")
"""The signals that a stopper reads if the recording has them."""
_EDGES, _FOLDS = 127, 3
MIN_EXAMPLES, MIN_UNITS = 100, 10
"""Examples, and sequences or different inputs, below which nothing is learned."""
MAX_EXAMPLES = 1 << 15
"""A stopper is fitted to at most this many examples, drawn at random."""


class StopperSettings(Settings, frozen=True, kw_only=True):
    """Set how a stopper is fitted to a recording.

    Parameters
    ----------
    kind
        The kind of stopper: "induction" estimates the gain of further loops, "classifier" the probability that an exit
        loses the answer.
    gain
        The gain that a loop can bring: "correct" answers, or "agreement" with full depth, which needs no labels.
    trees
        The number of trees per loop.
    leaf
        The minimum number of examples in a leaf (default: one in two hundred examples, but at least 10).
    seed
        The random seed.
    """

    kind: StopperKind = "induction"
    gain: Literal["correct", "agreement"] = "correct"
    trees: Annotated[int, msgspec.Meta(ge=32, le=1000)] = 48
    leaf: Count | None = None
    seed: Seed = 0


class FittedStopper(NamedTuple):
    """A stopper with its out-of-bag signal on the recording that it was fitted to."""

    stopper: Stopper
    out_of_bag: (
        Signal  # [N, T] its signal on the recording that it was fitted to, by trees that did not have the example
    )


def fit_stopper(
    recording: Trajectory, settings: StopperSettings | None = None, *, signals: list[str] | None = None, **changes: Any
) -> Stopper:
    """Fit a rule that reads all signals of a recording together.

    Parameters
    ----------
    recording
        A recording of the train split, or a recording without a split.
    settings
        `StopperSettings` (default: `StopperSettings()`).
    signals
        The names of the signals to read (default: all signals of the recording).
    **changes
        Changes of the settings, such as `kind="classifier"` or `gain="agreement"` (which needs no labels); also
        `trees=`, `leaf=` and `seed=`.

    Returns
    -------
    Stopper
        The fitted stopper. `attach` adds the stopper to a recording as the readout `stopper:NAME`.

    Raises
    ------
    UserError
        If the recording is too small, is for evaluation, or has no signal.

    Examples
    --------
    >>> stopper = ls.fit_stopper(recording("train", 2), trees=32)
    >>> both = [ls.attach(each, {"price": stopper}) for each in (validation, test)]
    >>> ls.sweep("stopper:price", *both).depth_at(0.9) < 4
    True
    """
    return fit_out_of_bag(recording, settings, signals=signals, **changes).stopper


def fit_out_of_bag(
    recording: Trajectory, settings: StopperSettings | None = None, *, signals: list[str] | None = None, **changes: Any
) -> FittedStopper:
    """Fit a stopper, and give its signal on the recording by trees that did not see each example."""
    settings = build(StopperSettings, {**({} if settings is None else plain(settings)), **changes}, "the stopper")
    check_split(recording, "A stopper must not be fitted", "train")
    if too_little := why_not_learned(recording):
        raise UserError(too_little)
    names = tuple(stopper_signals(recording) if signals is None else signals)
    if not names:
        raise UserError("The recording has no signal that a stopper could read; record logits, states or a gate.")
    for name in names:
        readout_for_stopper(name)
    right = recording.correct if settings.gain == "correct" else recording.predicted == recording.predicted[:, -1:]
    rows, units = _fitting_examples(recording, settings.seed)
    values = [signal(name, recording) for name in names]
    edges, bins = [], []
    for loop in range(recording.num_loops - 1):
        now = np.stack([each[rows, loop] for each in values], axis=1)
        edges.append(_bin_edges(now))
        bins.append(bins_of(now, edges[-1]))
    provenance = {"stopper": plain(settings), **fitting_data(recording)}
    fitting = _StopperFitting(settings, names, np.stack(edges), bins, right[rows].astype(np.float64), units)
    stopper, out_of_bag = fitting.run(provenance)
    if len(out_of_bag) == recording.num_examples:
        return FittedStopper(stopper, out_of_bag)
    everywhere = stopper.values(recording)
    everywhere[rows] = out_of_bag
    return FittedStopper(stopper, everywhere)


def why_not_learned(recording: Trajectory) -> str:
    """The reason why no stopper can be learned from a recording; empty if one can."""
    if recording.num_loops < 2:
        return "With one loop there is no exit to choose, so no stopper to fit."
    if recording.num_examples < MIN_EXAMPLES:
        return f"A stopper is learned from {MIN_EXAMPLES} examples or more; there are {recording.num_examples}."
    together = _fold_units(recording)
    if together is not None and together.max() + 1 < MIN_UNITS:
        units = "different inputs" if recording.sequences is None else "sequences"
        return f"A stopper is learned from {MIN_UNITS} {units} or more; there are {together.max() + 1}."
    return ""


def _fold_units(recording: Trajectory) -> Array | None:
    """[N] the sequence of an example, or its input if inputs have copies: one fold holds all of it."""
    return recording.copies if recording.units is None else recording.units


def _fitting_examples(recording: Trajectory, seed: int) -> tuple[Any, Array | None]:
    """The examples that a stopper is fitted to, and the unit [n] of each if some belong together.

    All of them, or of many some units drawn by lot: more would hardly change a forest of such coarse trees.
    """
    together = _fold_units(recording)
    if recording.num_examples <= MAX_EXAMPLES:
        return slice(None), together
    drawn = np.random.default_rng(seed)
    if together is None:
        return np.sort(drawn.permutation(recording.num_examples)[:MAX_EXAMPLES]), None
    order = drawn.permutation(together.max() + 1)
    enough = int(np.searchsorted(np.bincount(together)[order].cumsum(), MAX_EXAMPLES, side="right"))
    chosen = np.zeros(len(order), dtype=bool)
    chosen[order[: max(enough, MIN_UNITS)]] = True
    rows = np.flatnonzero(chosen[together])
    return rows, np.unique(together[rows], return_inverse=True)[1]


def stopper_signals(*recordings: Trajectory) -> list[str]:
    """The signals that a stopper can read on all of these recordings."""
    return [name for name in SIGNALS_READ if all(has_signal(name, each) for each in recordings)]


def with_stoppers(validation: Trajectory, test: Trajectory) -> tuple[Trajectory, Trajectory]:
    """Add learned stoppers to both recordings: one of each kind, learned from all signals of validation data.

    On validation data their signals are cross-fitted, so that thresholds and the choice of a readout can come from
    there, as for every other readout. The recordings stay as they are where none can be learned.
    """
    names = stopper_signals(validation, test)
    if validation.labels is None or test.labels is None or not names or why_not_learned(validation):
        return validation, test
    learned, stoppers = dict[str, Signal](), dict[str, Fitted]()
    for kind in STOPPER_KINDS:
        stoppers[kind], learned[STOPPER + kind] = fit_out_of_bag(validation, signals=names, kind=kind)
    return validation.with_signals(learned, validation.provenance), attach(test, stoppers)


class _StopperFitting:
    """Fits the trees of a stopper by backward induction, from the last loop to the first."""

    def __init__(
        self,
        settings: StopperSettings,
        names: tuple[str, ...],
        edges: Array,
        bins: list[Array],
        right: Signal,
        units: Array | None,
    ) -> None:
        self._settings, self._names, self._edges, self._bins, self._right = settings, names, edges, bins, right
        self._forests: list[_StopperTrees] = []
        self._fold: Array | None = None  # [N] of whole sequences, or of all copies of an input
        if units is not None:
            self._fold = np.random.default_rng(settings.seed).permutation(units.max() + 1)[units] % _FOLDS

    def run(self, provenance: dict[str, Any]) -> FittedStopper:
        loops = self._right.shape[1]
        out_of_bag = np.zeros(self._right.shape)
        prices = PRICES if self._settings.kind == "induction" else PRICES[:0]
        later = np.repeat(self._right[:, -1:], max(len(prices), 1), axis=1)  # [N, G] from the next loop on
        for loop in range(loops - 2, -1, -1):
            now = self._right[:, loop, None]
            if self._settings.kind == "induction":
                gains = self._forest(loop, later - prices - now)
                out_of_bag[:, loop] = price_index(gains, prices)
                goes_on = np.minimum.accumulate(gains, axis=1) > 0
                later = np.where(goes_on, later - prices, now)
            else:
                out_of_bag[:, loop] = self._forest(loop, np.maximum(later - now, 0.0))[:, 0]
        parts = _joined_loops(self._forests[::-1])
        stopper = Stopper(self._settings.kind, self._names, self._edges, *parts, prices, provenance)
        return FittedStopper(stopper, out_of_bag)

    def _forest(self, loop: int, targets: Signal) -> Signal:
        """Fit one loop's forest to targets [N, G]; return out-of-bag predictions [N, G]."""
        now = self._bins[loop]
        before = self._bins[loop - 1] if loop else np.zeros_like(now)
        features = np.concatenate((now, before), axis=1).astype(np.float32)
        fitted_to = targets if targets.shape[1] > 1 else targets[:, 0]
        forest = self._grown(loop, features, fitted_to)
        self._forests.append(_StopperTrees.of(forest))
        if self._fold is None:
            return np.asarray(forest.oob_prediction_).reshape(targets.shape)
        found = np.empty(targets.shape)
        for fold in range(_FOLDS):
            left_out = self._fold == fold
            others = self._grown(loop, features[~left_out], fitted_to[~left_out])
            found[left_out] = others.predict(features[left_out]).reshape(-1, targets.shape[1])
        return found

    def _grown(self, loop: int, features: Array, targets: Array) -> Any:
        from sklearn.ensemble import ExtraTreesRegressor

        forest = ExtraTreesRegressor(
            self._settings.trees,
            min_samples_leaf=self._settings.leaf or max(10, len(self._right) // 200),
            bootstrap=True,
            oob_score=_unused_forest_score if self._fold is None else False,
            random_state=self._settings.seed + loop,
            n_jobs=1,
        )
        return forest.fit(features, targets)


def _unused_forest_score(*_: Any) -> float:
    """The score that scikit-learn computes beside out-of-bag predictions; LoopScope does not use it."""
    return 0.0


class _StopperTrees(NamedTuple):
    """The trees of a stopper at one loop, as arrays of nodes."""

    roots: NDArray[np.int32]  # [K]
    feature: NDArray[np.int16]
    threshold: NDArray[np.float32]
    below: NDArray[np.int32]
    above: NDArray[np.int32]
    value: NDArray[np.float32]  # [nodes, G]

    @classmethod
    def of(cls, forest: Any) -> "_StopperTrees":
        return _joined_trees([cls._of_tree(each.tree_) for each in forest.estimators_])

    @classmethod
    def _of_tree(cls, tree: Any) -> "_StopperTrees":
        leaf, itself = tree.children_left < 0, np.arange(tree.node_count)
        return cls(
            np.zeros(1, dtype=np.int32),
            np.where(leaf, 0, tree.feature).astype(np.int16),
            np.where(leaf, 0.0, np.floor(tree.threshold)).astype(np.float32),  # bins are whole numbers
            np.where(leaf, itself, tree.children_left).astype(np.int32),
            np.where(leaf, itself, tree.children_right).astype(np.int32),
            np.where(leaf[:, None], tree.value[:, :, 0], 0.0).astype(np.float32),
        )


def _joined_trees(parts: list[_StopperTrees]) -> _StopperTrees:
    """Join trees to one array of nodes, numbered on."""
    first = np.cumsum([0, *(len(part.feature) for part in parts[:-1])]).astype(np.int32)
    moved = [
        part._replace(roots=part.roots + at, below=part.below + at, above=part.above + at)
        for part, at in zip(parts, first, strict=True)
    ]
    return _StopperTrees(*(np.concatenate(each) for each in zip(*moved, strict=True)))


def _joined_loops(forests: list[_StopperTrees]) -> _StopperTrees:
    """Join the trees of all loops, the first loop's first: [T-1, K] roots."""
    joined = _joined_trees(forests)
    return joined._replace(roots=joined.roots.reshape(len(forests), -1))


def _bin_edges(signals: Signal) -> Signal:
    """[F, E] the bin edges of each signal [N, F] of one loop: about as many examples per bin, none on an edge."""
    result = np.full((signals.shape[1], _EDGES), np.inf)
    ranks = np.linspace(0, len(signals), _EDGES + 2)[1:-1]
    for row, values in zip(result, signals.T, strict=True):
        rising = np.sort(values[~np.isnan(values)])
        middles = gap_middles(np.unique(rising))
        if len(middles) > _EDGES:
            below = np.searchsorted(rising, middles)
            middles = middles[np.unique(np.searchsorted(below, ranks).clip(max=len(middles) - 1))]
        row[: len(middles)] = middles
    return result
