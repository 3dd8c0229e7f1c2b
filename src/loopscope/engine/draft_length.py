"""How many tokens are drafted before full depth looks at them, and up to which loop may they exit? As it pays so far.

A cycle of at most k tokens is up to k - 1 drafts and one token that goes through all loops and takes the drafts along:
the first that is asked and does not exit, or the k-th, which is not asked. If every draft stands with probability a, m
of them bring 1 + a + .. + a^m tokens. They cost what comes before their exits, and the rest once, for all of them
together: a few tokens in one batch take little more than one, where a model is bound by reading its weights. A
policy that reads logits costs a head at every loop that it is asked after, also of a token that does not exit; so
tokens are asked up to the loop at which that pays, by how many of those that were asked after each loop did exit.
"""

from collections.abc import Sequence

from loopscope.engine.sampling import Draft
from loopscope.models.looped_model import LoopedModel

MOST_TOKENS = 16
_FEW = 4
_TOGETHER = (1.3, 2.6)
"""What a loop of 2 to 4, and of 5 to 16 tokens of one row takes, in loops of one."""
_MEMORY = 0.95
"""The weight of what was seen, a draft later."""
_PRIOR = (4.5, 5.0)
"""Drafts that stood, of those that were looked at, before there are any: enough to try."""
_PATIENCE = (8, 64)
"""Tokens at full depth before drafting is tried again where it did not pay: twice as many each time, up to a limit."""


class DraftLength:
    """Of one row: what it says must not depend on its neighbours."""

    def __init__(self, model: LoopedModel, reads_logits: bool = False, first_exit: int = 1) -> None:
        self._depth, self._before, self._reads = model.num_loops, model.embed_cost, reads_logits
        self._head = model.head_cost + _vocabulary_cost(model)
        self._stood, self._tested = _PRIOR
        loops = range(1, self._depth)
        self._exited = [_PRIOR[0] if loop >= first_exit else 0.0 for loop in loops]  # after each loop,
        self._checked = [_PRIOR[1]] * len(loops)  # of those that were asked there
        self._idle, self._patience = 0, _PATIENCE[0]
        self.tokens, self.ask_until = self._best()
        """Of a cycle, the last of which goes through all loops (1: nothing is drafted); the last loop to exit at."""

    def update(self, drafts: Sequence[Draft], stood: int, checked_until: int = 0) -> float:
        """So many of these drafts stood; those after the first that did not were not looked at.

        `checked_until`: the token after them was asked up to this loop, and did not exit. What all of it took, in
        tokens at full depth.
        """
        for place in range(min(stood + 1, len(drafts))):
            self._stood = _MEMORY * self._stood + (place < stood)
            self._tested = _MEMORY * self._tested + 1
        for each in drafts:
            self._count(each.loops, exited=True)
        self._count(checked_until, exited=False)
        self.tokens, self.ask_until = self._best()
        if self.tokens > 1:
            self._idle, self._patience = 0, _PATIENCE[0]
        else:
            self._idle += 1
            if self._exited and self._idle > self._patience:  # with a single loop there is nothing to try
                self.tokens, self._idle, self._patience = 2, 0, min(2 * self._patience, _PATIENCE[1])
        exit_loop = sum(each.loops for each in drafts) / len(drafts) if drafts else 1.0
        return self._cost(len(drafts), exit_loop, checked_until) / self._cost(0, 1.0, 0)

    def _count(self, loops: int, exited: bool) -> None:
        """A token that was asked after each of these loops, and exited after the last of them, or did not."""
        for place in range(loops):
            self._exited[place] = _MEMORY * self._exited[place] + (exited and place + 1 == loops)
            self._checked[place] = _MEMORY * self._checked[place] + 1

    def _best(self) -> tuple[int, int]:
        """The length of a cycle and the last loop to ask after that bring the most tokens for what they cost."""
        best, going_on, exits, at = (0.0, 1, 1), 1.0, 0.0, 0.0
        for loop, (exited, checked) in enumerate(zip(self._exited, self._checked, strict=True), 1):
            now = going_on * exited / checked
            exits, at, going_on = exits + now, at + now * loop, going_on - now
            if exits:
                best = max(best, (*self._best_length(exits, at / exits, loop), loop), key=lambda each: each[0])
        rate, tokens, loop = best
        return (tokens if rate * self._cost(0, 1.0, 0) > 1 else 1), loop

    def _best_length(self, exits: float, exit_loop: float, ask_until: int) -> tuple[float, int]:
        """The most tokens for what they cost, and the length that brings them, where so many exit, there on average."""
        share, best, pace = self._stood / self._tested, 1, 0.0
        brings, cost = 0.0, 0.0  # of cycles that end before, by their probabilities
        reached, tokens = 1.0, 1.0
        for drafts in range(1, MOST_TOKENS):
            brings += reached * (1 - exits) * tokens
            cost += reached * (1 - exits) * self._cost(drafts - 1, exit_loop, ask_until)
            reached *= exits
            tokens += share**drafts
            rate = (brings + reached * tokens) / (cost + reached * self._cost(drafts, exit_loop, 0))
            if rate > pace:
                best, pace = drafts + 1, rate
        return pace, best

    def _cost(self, drafts: int, exit_loop: float, checked_until: int) -> float:
        """Of drafts that exit at this loop and the token after them, which was asked in vain, in loops."""
        early = drafts * (self._before + exit_loop + (exit_loop if self._reads else 1) * self._head)
        rest = self._depth - exit_loop + self._head
        together = 1 if not drafts else _TOGETHER[drafts + 1 > _FEW]
        last = self._before + exit_loop + rest * together
        return early + last + (checked_until * self._head if self._reads else 0)


def _vocabulary_cost(model: LoopedModel) -> float:
    """What reading the matrix of the vocabulary takes, in loops, if a model says what its loops apply."""
    block = getattr(model, "block", None)
    if block is None:
        return 0.0
    matrices = [each.numel() for each in model.parameters() if model.vocab_size in each.shape]
    return max(matrices, default=0) / sum(each.numel() for each in block.parameters())
