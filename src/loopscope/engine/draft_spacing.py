"""After how many loops is the next token drafted? After as many as give the most tokens a second, by measurements.

Tokens of a wavefront are a spacing of d loops apart, and d divides the depth T. A step runs d loops of all of them, and
one read of their heads. Drafts after one loop come soonest. Later drafts are accepted more often, leave fewer tokens in
flight and need fewer heads. With d = T there are no drafts: the text runs at full depth. `early` drafts are also
compared at the loops between, so that a draft that a deeper loop contradicts is replaced before the last loop.

If b is the loop at which the right next token begins, a row takes b / d steps for a token on average. LoopScope counts
accepted drafts, and measures the time of steps on the CPU while it writes text. Later texts of a model in this process
use both. The text does not depend on the spacing: full depth confirms every draft or drops it.

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
"""Steps with at most so many tokens are timed: larger steps contain a prompt."""
MIN_GAIN = 1.03
"""The estimated speedup over full depth from which on drafting begins."""
_STANDING = 0.85
"""The share of accepted drafts that is assumed before any was observed: enough to try drafting."""
_PRIOR_WEIGHT, _RETRIAL_WEIGHT = 3.0, 1.0
"""The number of tokens that this assumption weighs, at first and whenever drafting is tried again."""
_MEMORY = 0.95
"""The factor by which older observations lose weight with each token."""
_ANOTHER_TOKEN = 0.03
"""The cost of a further token in a step, relative to a step of one token, before it was measured."""
_SLOWER = 1.05
"""The growth of the least time of a step with each measurement that was slower, so that an old minimum fades."""
_PATIENCE = (16, 256)
"""Tokens of a row at full depth before drafting is tried again: doubled each time, up to a limit."""
_CHOICE_EVERY = 4
_CHOICE_EVERY_OF_ROW = 2
"""Tokens after which the spacing is chosen again: over all rows, and for each row."""


class Spacing(NamedTuple):
    """Hold the loops between a token and its draft, and whether drafts are compared early."""

    loops: int  # between a token and the next
    early: bool = False  # whether drafts are also compared at the loops between


class StepSeconds:
    """Keep the measured seconds of a step: of its loops by number and tokens, and of the rest by tokens read.

    A step that was not measured yet is estimated from others, or from the sizes of the model's matrices. A step that
    was only measured while it was slow, such as its first run, counts as no slower than larger steps.
    """

    def __init__(self, model: LoopedModel) -> None:
        self._embed, self._head = model.embed_cost, model.head_cost + _vocabulary_cost(model)
        self._loop: dict[tuple[int, int], float] = {}  # seconds of one loop, by (loops, tokens) of the step
        self._rest: dict[int, float] = {}

    def see_loops(self, loops: int, tokens: int, embeds: bool, seconds: float) -> None:
        _keep_least_seconds(self._loop, (loops, _size_class(tokens)), seconds / (loops + embeds * self._embed))

    def see_rest(self, read: int, seconds: float) -> None:
        _keep_least_seconds(self._rest, _size_class(read), seconds)

    def estimate(self, loops: int, tokens: float, read: float) -> float:
        """Estimate the seconds of a step that begins tokens."""
        return (loops + self._embed) * self._one_loop(loops, _size_class(tokens)) + self._reading(_size_class(read))

    def _one_loop(self, loops: int, tokens: int) -> float:
        if (loops, tokens) in self._loop:
            return min(seconds for (own, many), seconds in self._loop.items() if own == loops and many >= tokens)
        if not self._loop:
            return _prior_cost(tokens)
        near = min(self._loop, key=lambda each: (abs(each[1] - tokens), abs(each[0] - loops)))
        return self._loop[near] * _prior_cost(tokens) / _prior_cost(near[1])

    def _reading(self, read: int) -> float:
        if read in self._rest:
            return min(seconds for many, seconds in self._rest.items() if many >= read)
        if not self._rest:
            return self._head * _prior_cost(read) * self._one_loop(1, 1)
        near = min(self._rest, key=lambda each: abs(each - read))
        return self._rest[near] * _prior_cost(read) / _prior_cost(near)


_step_seconds: WeakKeyDictionary[LoopedModel, StepSeconds] = WeakKeyDictionary()
"""The step times measured in this process, shared by all texts of a model."""


class _DraftRecord:
    """Count accepted and dropped drafts by spacing, and the tokens since drafting stopped."""

    def __init__(self, spacings: Iterable[Spacing], depth: int) -> None:
        self.counts = {spacing: _DraftBegins(spacing, depth) for spacing in spacings}
        self.idle, self.kept, self.patience = 0, 0, _PATIENCE[0]


_draft_records: WeakKeyDictionary[LoopedModel, _DraftRecord] = WeakKeyDictionary()
"""The draft records by loop, which depend more on the model than on the text."""


class DraftSpacing:
    """Choose the spacing of drafts for the texts that are written together."""

    def __init__(self, model: LoopedModel) -> None:
        self.seconds = _step_seconds.setdefault(model, StepSeconds(model))
        self._depth = depth = model.num_loops
        divisors = [loops for loops in range(1, depth) if depth % loops == 0]
        between = [loops for loops in divisors if 2 * loops < depth and not model.head_attends]
        self.full_depth = Spacing(depth)
        self._drafting = [Spacing(loops) for loops in divisors] + [Spacing(loops, early=True) for loops in between]
        self._by_loop = _draft_records.setdefault(model, _DraftRecord(self._drafting, depth))
        self._by_policy = _DraftRecord(self._drafting, depth)  # of these texts alone: other texts have other policies
        self._record = self._by_loop
        self.current, self._rows, self._since = self.full_depth, 0, 0

    def choose(self, rows: int, first: int, every_loop: bool) -> Spacing:
        """Choose the spacing for so many rows, none of which drafts before its `first` loop: 1 if `every_loop` decides
        whether to draft, else any spacing."""
        if rows == self._rows and self._since < max(_CHOICE_EVERY, _CHOICE_EVERY_OF_ROW * rows):
            return self.current
        self._rows, self._since = rows, 0
        self._record = record = self._by_policy if every_loop else self._by_loop
        allowed = [each for each in self._drafting if -(-first // each.loops) * each.loops < self._depth]
        allowed = [each for each in allowed if each.loops == 1] if every_loop else allowed
        if record.idle > record.patience * rows:
            record.idle, record.patience = 0, min(2 * record.patience, _PATIENCE[1])
            for spacing in allowed:
                record.counts[spacing] = _DraftBegins(spacing, self._depth, _RETRIAL_WEIGHT)
        taken = {spacing: self.token_seconds(spacing, rows) * MIN_GAIN for spacing in allowed}
        taken[self.full_depth] = self.token_seconds(self.full_depth, rows)
        if self.current in taken and self.current != self.full_depth:
            taken[self.current] /= MIN_GAIN  # a different spacing must be better by this factor
        best = min(taken, key=lambda spacing: taken[spacing])
        if record.kept > _PATIENCE[1] * rows:
            record.patience = _PATIENCE[0]
        self.current = best
        return best

    def token_seconds(self, spacing: Spacing, rows: int) -> float:
        """Estimate the seconds of a token with so many rows."""
        loops, early = spacing
        if loops == self._depth:
            return self.seconds.estimate(loops, rows, rows) / rows
        begins, wasted = self._record.counts[spacing].averages
        in_flight = rows * (self._depth + loops * wasted) / begins
        read = in_flight if early else rows * (1 + loops / begins)
        return begins / loops * self.seconds.estimate(loops, in_flight, read) / rows

    def count(self, answers: Mapping[int, int], token: int, first: int) -> None:
        """Count when the loops of a token proposed `token`, which full depth chose; drafts may begin at loop `first`.

        `answers` are the proposals by loop. Every spacing whose first loop was read records when it would have begun
        the right draft. If the loops between were not read, an early draft counts as found half way to full depth.
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
        """Count that the right next token began after this loop, under a policy that decides when to draft."""
        self._by_policy.counts[self.current if self.current in self._drafting else self._drafting[0]].add(loop, 1)

    def count_token(self) -> None:
        """Count a token of any row."""
        self._since += 1
        drafts, record = self.current != self.full_depth, self._record
        record.idle, record.kept = (0, record.kept + 1) if drafts else (record.idle + 1, 0)


class DraftGain:
    """Decide whether a token of a text with exits drafts its successor after each loop, before it exits.

    The policy's signal was computed from logits already, so the proposals cost nothing more. A right draft that began
    after loop b of a token saves the loops from b to its exit: a row takes b steps for a token.
    """

    def __init__(self, model: LoopedModel) -> None:
        self._seconds = _step_seconds.setdefault(model, StepSeconds(model))
        self._counts = _DraftBegins(Spacing(1), model.num_loops)
        self._loops = (1 + model.num_loops) / 2

    def count(self, begun: NDArray[np.int64], loops: NDArray[np.int64]) -> None:
        """Count [n] tokens that exited after `loops`, and proposed the same next token from the loop `begun` on."""
        for own_begun, own_loops in zip(begun.tolist(), loops.tolist(), strict=True):
            self._counts.add(own_begun, 1)
            self._loops += (1 - _MEMORY) * (own_loops - self._loops)

    def pays(self, rows: int) -> bool:
        """Whether drafting pays by estimate, for so many tokens that run without drafts."""
        begun, wasted = self._counts.averages
        in_flight = rows * (self._loops + wasted) / begun
        drafting = begun * self._seconds.estimate(1, in_flight, in_flight)
        return drafting * MIN_GAIN < self._loops * self._seconds.estimate(1, rows, rows)

    def see(self, loops: int, tokens: int, begins: bool, read: int, times: tuple[float, float, float]) -> None:
        """Record the times of a step: its beginning, the end of its loops, and its end."""
        start, run, end = times
        if tokens <= MAX_MEASURED:
            self._seconds.see_loops(loops, tokens, begins, run - start)
            self._seconds.see_rest(read, end - run)


class _DraftBegins:
    """Average the loop at which the right draft began, with a spacing; older tokens weigh less."""

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
        """The mean loop at which the right draft began, and the mean steps that tokens after a wrong draft took."""
        return self._begun / self._weight, self._wasted / self._weight


def _steps_wasted(loops: int, spacing: int) -> float:
    """The steps of tokens after a draft that was dropped so many loops later: every step adds one more of them."""
    steps = loops / spacing
    return steps * (steps + 1) / 2


def _keep_least_seconds(known: dict[_Key, float], key: _Key, seconds: float) -> None:
    """Keep the least measured seconds of a step, which fade with every slower measurement."""
    known[key] = min(seconds, _SLOWER * known.get(key, seconds))


def _size_class(tokens: float) -> int:
    """Round the tokens of a step whose seconds are kept: exact up to eight, then in steps of about a third."""
    whole = max(0, round(tokens))
    if whole <= 8:
        return whole
    step = 1 << (whole.bit_length() - 3)
    return -(-whole // step) * step


def _prior_cost(tokens: int) -> float:
    """The cost of a step of so many tokens before it was measured, relative to a step of one token."""
    return 1 + _ANOTHER_TOKEN * (tokens - 1)


def _vocabulary_cost(model: LoopedModel) -> float:
    """The cost of reading the vocabulary matrix, in loops, if the model has a `block`."""
    block = getattr(model, "block", None)
    if block is None:
        return 0.0
    matrices = [each.numel() for each in model.parameters() if model.vocab_size in each.shape]
    return max(matrices, default=0) / sum(each.numel() for each in block.parameters())
