"""After how many loops is the next token drafted? After as many as bring the most tokens a second, by what was seen.

Tokens of a wavefront are a spacing of d loops apart, which divides the depth T. A step takes all of them d loops on,
and their head is read once. Drafts after one loop come soonest; later ones stand more often, leave fewer tokens in
flight and need fewer heads. With d = T there are no drafts: that is full depth. `early` drafts are also held against
the loops between, so that one that a deeper loop would not say is replaced before the last.

If b is the loop at which the right next token begins, a row takes b / d steps for a token on average; how often drafts
stand is counted, and what a step takes is measured on the CPU while text is written. Later texts of a model in this
process know both. Nothing that is said depends on it: a draft is what full depth says, or it falls.

Shapes: T loops.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from loopscope.models.looped_model import LoopedModel

_Key = TypeVar("_Key")
MAX_MEASURED = 64
"""Tokens of a step whose time is worth knowing: with more, a prompt is among them."""
MIN_GAIN = 1.03
"""By how much drafting must be faster than full depth by estimate, before anything is drafted."""
_STANDING = 0.85
"""The share of drafts that stand, before any was looked at: enough to try."""
_PRIOR_WEIGHT, _RETRIAL_WEIGHT = 3.0, 1.0
"""How many tokens that is worth, at first and whenever drafting is tried again."""
_MEMORY = 0.95
"""The weight of what was seen, a token later."""
_ANOTHER_TOKEN = 0.03
"""What another token adds to a step, in steps of one token, before it was measured."""
_SLOWER = 1.05
"""How quickly the least time of a step is forgotten, for each time that it took longer."""
_PATIENCE = (16, 256)
"""Tokens of a row at full depth before drafting is tried again: twice as many each time, up to a limit."""
_CHOICE_EVERY = 4
_CHOICE_EVERY_OF_ROW = 2
"""Tokens after which the spacing is chosen again: of all rows, and of each."""


class Spacing(NamedTuple):
    loops: int  # between a token and the next
    early: bool = False  # whether drafts are held against the loops between, too


class StepSeconds:
    """What a step takes on this machine: its loops by their number and tokens, the rest by how many tokens are read.

    Of a step that was not seen yet, it is estimated from the others, or from the sizes of the model's matrices. A step
    that was only seen while it was slow, such as its first time, is taken to be no slower than larger ones.
    """

    def __init__(self, model: LoopedModel) -> None:
        self._embed, self._head = model.embed_cost, model.head_cost + _vocabulary_cost(model)
        self._loop: dict[tuple[int, int], float] = {}  # of one loop
        self._rest: dict[int, float] = {}

    def see_loops(self, loops: int, tokens: int, embeds: bool, seconds: float) -> None:
        _keep_least(self._loop, (loops, _rounded(tokens)), seconds / (loops + embeds * self._embed))

    def see_rest(self, read: int, seconds: float) -> None:
        _keep_least(self._rest, _rounded(read), seconds)

    def estimate(self, loops: int, tokens: float, read: float) -> float:
        """Of a step that begins tokens."""
        return (loops + self._embed) * self._one_loop(loops, _rounded(tokens)) + self._reading(_rounded(read))

    def _one_loop(self, loops: int, tokens: int) -> float:
        if (loops, tokens) in self._loop:
            return min(seconds for (own, many), seconds in self._loop.items() if own == loops and many >= tokens)
        if not self._loop:
            return _prior(tokens)
        near = min(self._loop, key=lambda each: (abs(each[1] - tokens), abs(each[0] - loops)))
        return self._loop[near] * _prior(tokens) / _prior(near[1])

    def _reading(self, read: int) -> float:
        if read in self._rest:
            return min(seconds for many, seconds in self._rest.items() if many >= read)
        if not self._rest:
            return self._head * _prior(read) * self._one_loop(1, 1)
        near = min(self._rest, key=lambda each: abs(each - read))
        return self._rest[near] * _prior(read) / _prior(near)


_seen: WeakKeyDictionary[LoopedModel, StepSeconds] = WeakKeyDictionary()
"""What was measured in this process is known to all texts of a model."""


class _DraftRecord:
    """What became of drafts, and how long nothing was drafted."""

    def __init__(self, spacings: Iterable[Spacing], depth: int) -> None:
        self.counts = {spacing: _BeginCounts(spacing, depth) for spacing in spacings}
        self.idle, self.kept, self.patience = 0, 0, _PATIENCE[0]


_records: WeakKeyDictionary[LoopedModel, _DraftRecord] = WeakKeyDictionary()
"""What became of drafts by loop, which depends on a model more than on its texts."""


class DraftSpacing:
    """Of the texts that are written together."""

    def __init__(self, model: LoopedModel) -> None:
        self.seconds = _seen.setdefault(model, StepSeconds(model))
        self._depth = depth = model.num_loops
        divisors = [loops for loops in range(1, depth) if depth % loops == 0]
        between = [loops for loops in divisors if 2 * loops < depth and not model.head_attends]
        self.full_depth = Spacing(depth)
        self._drafting = [Spacing(loops) for loops in divisors] + [Spacing(loops, early=True) for loops in between]
        self._by_loop = _records.setdefault(model, _DraftRecord(self._drafting, depth))
        self._by_policy = _DraftRecord(self._drafting, depth)  # of these texts alone: others have other policies
        self._record = self._by_loop
        self.current, self._rows, self._since = self.full_depth, 0, 0

    def choose(self, rows: int, first: int, every_loop: bool) -> Spacing:
        """The spacing for so many rows, of which none drafts before its `first` loop; of 1, where `every_loop` is asked
        whether it drafts, or of all."""
        if rows == self._rows and self._since < max(_CHOICE_EVERY, _CHOICE_EVERY_OF_ROW * rows):
            return self.current
        self._rows, self._since = rows, 0
        self._record = record = self._by_policy if every_loop else self._by_loop
        allowed = [each for each in self._drafting if -(-first // each.loops) * each.loops < self._depth]
        allowed = [each for each in allowed if each.loops == 1] if every_loop else allowed
        if record.idle > record.patience * rows:
            record.idle, record.patience = 0, min(2 * record.patience, _PATIENCE[1])
            for spacing in allowed:
                record.counts[spacing] = _BeginCounts(spacing, self._depth, _RETRIAL_WEIGHT)
        taken = {spacing: self.token_seconds(spacing, rows) * MIN_GAIN for spacing in allowed}
        taken[self.full_depth] = self.token_seconds(self.full_depth, rows)
        if self.current in taken and self.current != self.full_depth:
            taken[self.current] /= MIN_GAIN  # another one must be better, too
        best = min(taken, key=lambda spacing: taken[spacing])
        if record.kept > _PATIENCE[1] * rows:
            record.patience = _PATIENCE[0]
        self.current = best
        return best

    def token_seconds(self, spacing: Spacing, rows: int) -> float:
        """What a token of so many rows takes, by estimate."""
        loops, early = spacing
        if loops == self._depth:
            return self.seconds.estimate(loops, rows, rows) / rows
        begins, wasted = self._record.counts[spacing].averages
        in_flight = rows * (self._depth + loops * wasted) / begins
        read = in_flight if early else rows * (1 + loops / begins)
        return begins / loops * self.seconds.estimate(loops, in_flight, read) / rows

    def count(self, answers: Mapping[int, int], token: int, first: int) -> None:
        """What a token's loops said the next would be, and `token`, which full depth says; drafts may begin at `first`.

        Each spacing whose first loop was read is told when it would have begun the right one. Where loops between were
        not read, an early one is taken to have found it half way to full depth.
        """
        for spacing, counts in self._by_loop.counts.items():
            loops, early = spacing
            boundaries = range(-(-first // loops) * loops, self._depth, loops)
            if not boundaries or boundaries[0] not in answers:
                continue
            begun = boundaries[0] if answers[boundaries[0]] == token else self._depth
            if early and all(loop in answers for loop in boundaries):
                begun = max((loop + loops for loop in boundaries if answers[loop] != token), default=boundaries[0])
            elif early:
                begun = (boundaries[0] + begun + 1) // 2
            counts.add(begun, boundaries[0])

    def count_begun(self, loop: int) -> None:
        """The right next token began after this loop, where a policy says when."""
        self._by_policy.counts[self.current if self.current in self._drafting else self._drafting[0]].add(loop, 1)

    def count_token(self) -> None:
        """A token of some row came."""
        self._since += 1
        drafts, record = self.current != self.full_depth, self._record
        record.idle, record.kept = (0, record.kept + 1) if drafts else (record.idle + 1, 0)


class DraftGain:
    """Of texts with exits: whether a token drafts its successor after each loop, before it has exited.

    Its signal was computed of logits, so that they cost nothing more. A right draft that began after loop b of a token
    saves the loops from there to its exit: a row takes b steps for a token.
    """

    def __init__(self, model: LoopedModel) -> None:
        self._seconds = _seen.setdefault(model, StepSeconds(model))
        self._counts = _BeginCounts(Spacing(1), model.num_loops)
        self._loops = (1 + model.num_loops) / 2

    def count(self, begun: NDArray[np.int64], loops: NDArray[np.int64]) -> None:
        """[n] tokens exited after these loops, and said what came next from the loops `begun` on."""
        for own_begun, own_loops in zip(begun.tolist(), loops.tolist(), strict=True):
            self._counts.add(own_begun, 1)
            self._loops += (1 - _MEMORY) * (own_loops - self._loops)

    def pays(self, rows: int) -> bool:
        """By estimate, where so many tokens run without drafts."""
        begun, wasted = self._counts.averages
        in_flight = rows * (self._loops + wasted) / begun
        drafting = begun * self._seconds.estimate(1, in_flight, in_flight)
        return drafting * MIN_GAIN < self._loops * self._seconds.estimate(1, rows, rows)

    def see(self, loops: int, tokens: int, begins: bool, read: int, times: tuple[float, float, float]) -> None:
        """What a step took: its beginning, when its loops were run, and its end."""
        start, run, end = times
        if tokens <= MAX_MEASURED:
            self._seconds.see_loops(loops, tokens, begins, run - start)
            self._seconds.see_rest(read, end - run)


class _BeginCounts:
    """When the right next token began with a spacing, the later the less what was seen before weighs."""

    def __init__(self, spacing: Spacing, depth: int, weight: float = _PRIOR_WEIGHT) -> None:
        self._spacing = spacing
        falls = (1 - _STANDING) * weight
        self._weight, self._begun = weight, weight * spacing.loops + falls * (depth - spacing.loops)
        self._wasted = falls * _steps_wasted(depth - spacing.loops, spacing.loops)

    def add(self, begun: int, first: int) -> None:
        self._weight = _MEMORY * self._weight + 1
        self._begun = _MEMORY * self._begun + begun
        self._wasted = _MEMORY * self._wasted + _steps_wasted(begun - first, self._spacing.loops)

    @property
    def averages(self) -> tuple[float, float]:
        """The loop at which it began, and the steps that tokens after a wrong one took."""
        return self._begun / self._weight, self._wasted / self._weight


def _steps_wasted(loops: int, spacing: int) -> float:
    """By tokens after a draft that fell so many loops later: one more of them at each step."""
    steps = loops / spacing
    return steps * (steps + 1) / 2


def _keep_least(known: dict[_Key, float], key: _Key, seconds: float) -> None:
    known[key] = min(seconds, _SLOWER * known.get(key, seconds))


def _rounded(tokens: float) -> int:
    """Up to eight as they are, then by steps of about a third."""
    whole = max(0, round(tokens))
    if whole <= 8:
        return whole
    step = 1 << (whole.bit_length() - 3)
    return -(-whole // step) * step


def _prior(tokens: int) -> float:
    return 1 + _ANOTHER_TOKEN * (tokens - 1)


def _vocabulary_cost(model: LoopedModel) -> float:
    """What reading the matrix of the vocabulary takes, in loops, if a model says what its loops apply."""
    block = getattr(model, "block", None)
    if block is None:
        return 0.0
    matrices = [each.numel() for each in model.parameters() if model.vocab_size in each.shape]
    return max(matrices, default=0) / sum(each.numel() for each in block.parameters())
