"""How many tokens are drafted before full depth looks at them? As many as pay, by how often it agreed so far.

A cycle of at most k tokens is up to k - 1 drafts and one token that goes through all loops and takes the drafts along:
the first that is asked and does not exit, or the k-th, which is not asked. If every draft stands with probability a, m
of them bring 1 + a + .. + a^m tokens. They cost what comes before their exits, and the rest once, for all of them
together: a few tokens in one batch take little more than one, where a model is bound by reading its weights. A
policy that reads logits costs a head at every loop that it is asked after, also of a token that does not exit.
"""

from collections.abc import Sequence

from loopscope.engine.sampling import Draft
from loopscope.models import LoopedModel

MOST_TOKENS = 16
_FEW = 4
_TOGETHER = (1.3, 2.6)
"""What a loop of 2 to 4, and of 5 to 16 tokens of one row takes, in loops of one."""
_MEMORY = 0.95
"""The weight of what was seen, a draft later."""
_PRIOR = (4.5, 5.0)
"""Drafts that stood, of those that were looked at, before there are any: enough to try."""
_PATIENCE = 8
"""Tokens at full depth before drafting is tried again where it did not pay."""


class DraftLength:
    """Of one row: what it says must not depend on its neighbours."""

    def __init__(self, model: LoopedModel, reads_logits: bool = False) -> None:
        self._depth, self._before, self._reads = float(model.num_loops), model.embed_cost, reads_logits
        self._head = model.head_cost + _vocabulary_cost(model)
        self._stood, self._tested = _PRIOR
        self._exited, self._candidates = _PRIOR
        self._exit = 1.0  # the loop at which drafts are said, on average
        self._idle = 0
        self.tokens = self._best()
        """Of a cycle, the last of which goes through all loops; 1: nothing is drafted, and nobody is asked."""

    def update(self, drafts: Sequence[Draft], stood: int, may_exit: bool = False) -> float:
        """So many of these drafts stood; those after the first that did not were not looked at.

        `may_exit`: the token after them was asked, and did not exit. What all of it took, in tokens at full depth.
        """
        for place, each in enumerate(drafts[: stood + 1]):
            self._stood = _MEMORY * self._stood + (place < stood)
            self._tested = _MEMORY * self._tested + 1
            self._exit = _MEMORY * self._exit + (1 - _MEMORY) * each.loops
        for place in range(len(drafts) + may_exit):
            self._exited = _MEMORY * self._exited + (place < len(drafts))
            self._candidates = _MEMORY * self._candidates + 1
        self.tokens = self._best()
        self._idle = self._idle + 1 if self.tokens == 1 else 0
        if self._idle > _PATIENCE:
            self.tokens, self._idle = 2, 0
        exit_loop = sum(each.loops for each in drafts) / len(drafts) if drafts else self._exit
        return self._cost(len(drafts), exit_loop, may_exit) / self._cost(0, self._exit, False)

    def _best(self) -> int:
        """The length of a cycle that brings the most tokens for what it costs."""
        share, exits = self._stood / self._tested, self._exited / self._candidates
        best, pace = 1, 0.0
        brings, cost = 0.0, 0.0  # of cycles that end before, by their probabilities
        reached, tokens = 1.0, 0.0
        for drafts in range(MOST_TOKENS):
            tokens += share**drafts
            rate = (brings + reached * tokens) / (cost + reached * self._cost(drafts, self._exit, False))
            if rate > pace:
                best, pace = drafts + 1, rate
            brings += reached * (1 - exits) * tokens
            cost += reached * (1 - exits) * self._cost(drafts, self._exit, True)
            reached *= exits
        return best

    def _cost(self, drafts: int, exit_loop: float, may_exit: bool) -> float:
        """Of drafts that exit at this loop and the token after them, in loops."""
        early = drafts * (self._before + exit_loop + (exit_loop if self._reads else 1) * self._head)
        rest = self._depth - exit_loop + self._head
        together = 1 if not drafts else _TOGETHER[drafts + 1 > _FEW]
        last = self._before + exit_loop + rest * together
        return early + last + ((self._depth - 1) * self._head if may_exit and self._reads else 0)


def _vocabulary_cost(model: LoopedModel) -> float:
    """What reading the matrix of the vocabulary takes, in loops, if a model says what its loops apply."""
    block = getattr(model, "block", None)
    if block is None:
        return 0.0
    matrices = [each.numel() for each in model.parameters() if model.vocab_size in each.shape]
    return max(matrices, default=0) / sum(each.numel() for each in block.parameters())
