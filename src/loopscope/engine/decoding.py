"""How do rows of text go on token by token, each token as deep as its policy wants? A batch of rows and their memory.

Every step is one loop of everybody: a row whose token has just exited begins its next token while others go deeper.
A token that exits early leaves no keys and values in the deeper loops, where later tokens would look for them:

- `all`: they are made when somebody needs them, for all tokens that lack them at once; nothing differs from a run in
  which every token goes through every loop;
- `fill`: those of the exit loop stand in for them;
- `last`: there is one place for all loops, which holds what a token's last loop left.

With `fill` and `last` a prompt goes through all loops before the first token after it, and what a head that attends
keeps of a token is from the loop at which it was read last.

Shapes: R rows of the memory, B of a step, T loops, D width, V vocabulary.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loopscope.engine.wide import Looking
from loopscope.errors import UserError
from loopscope.exits.live import Follower
from loopscope.models import LoopedModel, LoopState
from loopscope.models.memory import GoingOn, Memory
from loopscope.models.packing import Layout

Cache = Literal["all", "fill", "last"]
CACHES: tuple[Cache, ...] = ("all", "fill", "last")
Integers = NDArray[np.int64]


class Decoder:
    """The rows that are being continued; who they are is the caller's business."""

    def __init__(self, model: LoopedModel, follower: Follower, rows: int, cache: Cache) -> None:
        self._model, self._follower, self._cache, self._depth = model, follower, cache, follower.num_loops
        self._device = next(model.parameters()).device
        self._memory = Memory(1, 64, single=cache == "last")
        self._heard = Memory(1, 64, single=cache != "all")  # of a head that attends
        self._tokens: Integers = np.zeros((rows, 64), dtype=np.int64)
        self._lengths: Integers = np.zeros(rows, dtype=np.int64)
        self._loops: Integers = np.zeros(rows, dtype=np.int64)  # that the last token has been through
        self._made: Integers = np.zeros((rows, self._depth + 1), dtype=np.int64)  # tokens that have each level
        self._read: Integers = np.zeros_like(self._made)  # tokens that the head has read at each level
        self._prompted: NDArray[np.bool_] = np.zeros(rows, dtype=bool)  # no token after the prompt yet
        self._order: Integers = np.empty(0, dtype=np.int64)  # the active rows, as the follower has them
        self._kind: type[LoopState] = LoopState
        self._looking = Looking(follower.policy.readout) if follower.source == "logits" else None
        self.token_loops = 0
        """Tokens times loops that were run, those for the memory included."""

    @property
    def active(self) -> Integers:
        return self._order

    @property
    def cache_bytes(self) -> int:
        return self._memory.nbytes + self._heard.nbytes

    def admit(self, row: int, prompt: Integers) -> None:
        """A row begins with its prompt."""
        self._grow(len(prompt), row + 1)
        self._tokens[row, : len(prompt)] = prompt
        self._lengths[row], self._loops[row], self._prompted[row] = len(prompt), 0, True
        self._made[row] = self._read[row] = 0
        self._order = np.append(self._order, row)
        self._follower.admit(1)

    @torch.inference_mode()
    def go_on(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """Rows whose token has exited go on with these tokens."""
        there = np.asarray(rows, dtype=np.int64)
        self._settle(there)
        self._grow(int(self._lengths[there].max()) + 1, 0)
        self._tokens[there, self._lengths[there]] = tokens
        self._lengths[there] += 1
        self._loops[there] = 0
        self._prompted[there] = False
        self._order = np.concatenate((self._order, there))
        self._follower.admit(len(there))

    @torch.inference_mode()
    def step(self) -> tuple[Integers, Integers, Tensor]:
        """One loop of every active row; the rows whose token exits, the loops it took and the logits [n, V] there.

        Those rows are not active any more, until they go on.
        """
        rows = self._order
        self._loops[rows] += 1
        state, place = self._advance(rows, self._loops[rows])
        pooled = self._model.pooled(state, state.lengths - 1)[torch.from_numpy(place).to(self._device)]
        loops, source = self._loops[rows], self._follower.source
        logits, now, values = None, None, None
        if self._looking is not None:
            logits = self._logits(rows, pooled)
            values = self._looking.values(rows, loops, logits)
        elif source is not None:
            said = pooled if source == "hidden" else self._model.halt(pooled)
            if said is None:
                raise UserError("The model has no gate, so it cannot be run with the readout 'gate'.")
            now = said.float().cpu().numpy()
        stops = self._follower.stops(loops, now, values)
        self._follower.keep(~stops)
        leaving = torch.from_numpy(np.flatnonzero(stops)).to(self._device)
        exits = rows[stops]
        self._order = rows[~stops]
        told = self._logits(exits, pooled[leaving]) if logits is None else logits[leaving]
        return exits, loops[stops], told

    def _advance(self, rows: Integers, levels: Integers) -> tuple[LoopState, Integers]:
        """Takes rows to these levels, with all their tokens that lack it; where each row lies in the state."""
        counts = self._lengths[rows] - self._made[rows, levels]
        order = np.lexsort((counts, levels))
        rows, levels, counts = rows[order], levels[order], counts[order]
        fresh = int((levels == 1).sum())
        states = []
        if fresh:
            states.append(self._first(rows[:fresh], counts[:fresh]))
        if fresh < len(rows):
            states.append(self._kept(rows[fresh:], counts[fresh:], levels[fresh:] - 1))
        state = states[0] if len(states) == 1 else self._kind.join(states)
        state = self._model.step(state.after(GoingOn(self._memory, rows, self._made[rows, levels], levels)))
        self.token_loops += int(counts.sum())
        self._keep("hidden", state.hidden, rows, counts, levels)
        self._made[rows, levels] = self._lengths[rows]
        return state, np.argsort(order)

    def _first(self, rows: Integers, counts: Integers) -> LoopState:
        """Tokens that have not been through anything."""
        none = np.zeros_like(rows)
        tokens = self._tokens.flatten()[self._places(rows, counts).cpu().numpy()]
        past = GoingOn(self._memory, rows, self._made[rows, none], none)
        layout = Layout(torch.from_numpy(counts).to(self._device), past=past)
        state = self._model.begin_packed(torch.from_numpy(tokens).to(self._device), layout)
        self._kind = type(state)
        for name in self._others:
            self._keep(name, getattr(state, name), rows, counts, none)
        self._made[rows, 0] = self._lengths[rows]
        return state

    def _kept(self, rows: Integers, counts: Integers, levels: Integers) -> LoopState:
        """The last `counts` tokens of rows as these levels left them."""
        layout = Layout(torch.from_numpy(counts).to(self._device))
        parts = {name: self._memory.states(name, 0, self._places(rows, counts)) for name in self._others}
        hidden = [
            self._memory.states("hidden", int(level), self._places(rows[levels == level], counts[levels == level]))
            for level in dict.fromkeys(levels.tolist())  # rows are sorted by level
        ]
        loop = torch.from_numpy(levels).to(self._device)
        return self._kind(hidden=torch.cat(hidden), layout=layout, loop=loop, **parts)

    def _logits(self, rows: Integers, pooled: Tensor) -> Tensor:
        """[n, V] what the last tokens of rows say now."""
        if not len(rows) or not self._model.head_attends:
            return self._model.predict(pooled)
        levels = self._loops[rows]
        order = np.lexsort((self._lengths[rows] - self._read[rows, levels], levels))
        rows, levels = rows[order], levels[order]
        counts = self._lengths[rows] - self._read[rows, levels]
        past = GoingOn(self._heard, rows, self._read[rows, levels], levels)
        state = self._kept(rows, counts, levels).after(past)
        read = self._model.readable(state, state.lengths - 1)
        self._read[rows, levels] = self._lengths[rows]
        return self._model.predict(read[torch.from_numpy(np.argsort(order)).to(self._device)])

    def _settle(self, rows: Integers) -> None:
        """What the last tokens of rows, which have exited, leave to those after them."""
        if self._cache == "all":
            return
        prompts, others = rows[self._prompted[rows]], rows[~self._prompted[rows]]
        for level in range(2, self._depth + 1):
            if len(short := prompts[self._made[prompts, level] < self._lengths[prompts]]):
                self._advance(short, np.full(len(short), level))
        if self._cache == "fill":
            for loop in set(self._loops[others].tolist()):
                those = others[self._loops[others] == loop]
                deeper = range(loop + 1, self._depth + 1)
                self._memory.hand_down(loop, deeper, self._places(those, np.ones_like(those)))
        self._made[rows] = self._read[rows] = self._lengths[rows, None]

    def _keep(self, name: str, values: Tensor, rows: Integers, counts: Integers, levels: Integers) -> None:
        places = self._places(rows, counts)
        each = torch.from_numpy(np.repeat(levels, counts)).to(self._device)
        for level in dict.fromkeys(levels.tolist()):
            here = each == level
            self._memory.keep(name, level, places[here], values[here])

    def _places(self, rows: Integers, counts: Integers) -> Tensor:
        """Where the last `counts` tokens of rows lie in the memory."""
        layout = Layout(torch.from_numpy(counts))
        first = torch.from_numpy(rows * self._memory.capacity + self._lengths[rows] - counts)
        return layout.counting(first).to(self._device)

    @property
    def _others(self) -> list[str]:
        """What a model keeps of a token besides its state."""
        return [name for name in self._kind.tokenwise if name != "hidden"]

    def _grow(self, tokens: int, rows: int) -> None:
        """Nobody pays for rows that no prompt ever takes."""
        self._memory.grow(tokens, rows)
        self._heard.grow(tokens, rows)
        missing = self._memory.capacity - self._tokens.shape[1]
        if missing > 0:
            self._tokens = np.pad(self._tokens, ((0, 0), (0, missing)))
