"""How many tokens are drafted before full depth looks at them? As many as pay, by how often it agreed so far.

A cycle of k tokens is k - 1 drafts and one token that goes through all loops and takes the drafts along. If every draft
stands with probability a, it brings 1 + a + .. + a^(k-1) tokens. It costs k times what comes before the exit, and the
rest once, for all of them together: a few tokens in one batch take about twice what one takes, where a model is bound
by reading its weights.
"""

from collections.abc import Sequence

from loopscope.engine.sampling import Draft
from loopscope.models import LoopedModel

MOST_TOKENS = 16
_TOGETHER = 2.0
"""What a loop of 2 to 16 tokens of one row takes, in loops of one."""
_MEMORY = 0.95
"""The weight of what was seen, a draft later."""
_PRIOR = (4.5, 5.0)
"""Drafts that stood, of those that were looked at, before there are any: enough to try."""
_PATIENCE = 8
"""Tokens at full depth before drafting is tried again where it did not pay."""


class DraftLength:
    """Of one row: what it says must not depend on its neighbours."""

    def __init__(self, model: LoopedModel) -> None:
        self._depth, self._before = float(model.num_loops), model.embed_cost
        self._head = model.head_cost + _vocabulary_cost(model)
        self._stood, self._tested = _PRIOR
        self._exit = 1.0  # the loop at which drafts are said, on average
        self._idle = 0
        self.tokens = self._best()
        """Of a cycle, the last of which goes through all loops; 1: nothing is drafted."""

    def update(self, drafts: Sequence[Draft], stood: int) -> None:
        """So many of these drafts stood; those after the first that did not were not looked at."""
        for place, each in enumerate(drafts[: stood + 1]):
            self._stood = _MEMORY * self._stood + (place < stood)
            self._tested = _MEMORY * self._tested + 1
            self._exit = _MEMORY * self._exit + (1 - _MEMORY) * each.loops
        self.tokens = self._best()
        self._idle = self._idle + 1 if self.tokens == 1 else 0
        if self._idle > _PATIENCE:
            self.tokens, self._idle = 2, 0

    def _best(self) -> int:
        return max(range(1, MOST_TOKENS + 1), key=self._pace)

    def _pace(self, tokens: int) -> float:
        """Tokens that a cycle brings for what a loop costs."""
        share = self._stood / self._tested
        brings = sum(share**place for place in range(tokens))
        once = self._depth - self._exit + self._head
        drafts = tokens * (self._before + self._exit) + (tokens - 1) * self._head
        return brings / (drafts + once * (1 if tokens == 1 else _TOGETHER))


def _vocabulary_cost(model: LoopedModel) -> float:
    """What reading the matrix of the vocabulary takes, in loops, if a model says what its loops apply."""
    block = getattr(model, "block", None)
    if block is None:
        return 0.0
    matrices = [each.numel() for each in model.parameters() if model.vocab_size in each.shape]
    return max(matrices, default=0) / sum(each.numel() for each in block.parameters())
