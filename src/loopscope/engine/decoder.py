"""How do rows of text go on token by token, each token as deep as its policy wants? A batch of rows and a KV cache.

Every step is one loop of everybody: a row whose token has just exited begins its next token while others go deeper.
A token that exits early leaves no keys and values in the deeper loops, where later tokens would look for them:

- `full`: they are made when somebody needs them, for all tokens that lack them at once; nothing differs from a run in
  which every token goes through every loop;
- `propagate`: those of the exit loop stand in for them;
- `latest`: there is one place for all loops, which holds what a token's last loop left.

With `propagate` and `latest` a prompt goes through all loops before the first token after it, and what a head that
attends keeps of a token is from the loop at which it was read last.

With `drafting` (and the cache `full`) tokens that exited early are drafts: the next token of a row that goes through
all loops takes them along, and brings what full depth says after each of them. Those that are taken back leave nothing.

Shapes: R rows of the cache, B of a step, T loops, D width, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loopscope.engine.exit_decision import ExitDecision, Integers
from loopscope.models.device import upload
from loopscope.models.kv_cache import AppendingRows, KVCache
from loopscope.models.looped_model import LoopedModel, LoopState
from loopscope.models.packing import Layout, count_up
from loopscope.policy import ExitPolicy
from loopscope.scope import CacheMode

CACHE_MODES: tuple[CacheMode, ...] = ("full", "propagate", "latest")
_CHUNK = 1024
"""Tokens that go through a loop together at most, unless there are more rows: long prompts take no more memory."""
_NONE: Integers = np.empty(0, dtype=np.int64)


class Exits(NamedTuple):
    """The rows whose token exits."""

    rows: Integers  # [n]
    loops: Integers  # [n] that it took
    counts: Integers  # [n] how many of its last tokens are read: 1, but for drafts that full depth has followed
    logits: Tensor  # [sum of counts, V] after each of them


class Decoder:
    """The rows that are being continued; who they are is the caller's business."""

    def __init__(self, model: LoopedModel, rows: int, cache: CacheMode, drafting: bool = False) -> None:
        self._model, self._cache, self._drafting, self._depth = model, cache, drafting, model.num_loops
        self._device = next(model.parameters()).device
        self._kv_cache = KVCache(1, 64, latest_only=cache == "latest", most_loops=self._depth)
        latest_only = drafting or cache != "full"
        self._head_cache = KVCache(1, 64, latest_only, most_loops=self._depth)  # of a head that attends
        self._tokens: Integers = np.zeros((rows, 64), dtype=np.int64)
        self._lengths: Integers = np.zeros(rows, dtype=np.int64)
        self._prompts: Integers = np.zeros(rows, dtype=np.int64)  # how many of them are the prompt's
        self._loops: Integers = np.zeros(rows, dtype=np.int64)  # that the last token has been through
        self._cached: Integers = np.zeros((rows, self._depth + 1), dtype=np.int64)  # tokens through each loop
        self._head_cached: Integers = np.zeros_like(self._cached)  # tokens that the head has read at each loop
        self._read: Integers = np.zeros(rows, dtype=np.int64)  # tokens before the first that full depth must read
        self._groups: list[ExitDecision] = []  # one a policy
        self._group_of: NDArray[np.object_] = np.full(rows, None, dtype=object)
        self._to_full_depth: Integers = _NONE  # rows whose token goes through all loops, whatever the policy says
        self._ask_until: Integers = np.zeros(rows, dtype=np.int64)  # the last loop after which their policy is asked
        self._kind: type[LoopState] = LoopState
        self.token_loops = 0
        """Tokens times loops that were run, those for the cache included."""
        self.prompt_loops = 0
        """Those of them that were tokens of prompts, whenever they were run."""

    @property
    def cache_bytes(self) -> int:
        return self._kv_cache.nbytes + self._head_cache.nbytes

    def prefill(self, row: int, prompt: Integers, policy: ExitPolicy, ask: bool = True) -> ExitDecision:
        """A row begins with its prompt, which runs with the next steps; its policy is asked from now on, or later.

        Returns what decides about the row.
        """
        self._grow(len(prompt), row + 1)
        self._tokens[row, : len(prompt)] = prompt
        self._lengths[row] = self._prompts[row] = len(prompt)
        self._loops[row], self._read[row] = 0, len(prompt) - 1
        self._cached[row] = self._head_cached[row] = 0
        group = self._group_of[row] = self._group(policy, row)
        self._begin(np.array([row]), np.array([self._depth if ask else 0]))
        return group

    @torch.inference_mode()
    def append(self, rows: Sequence[int], tokens: Sequence[int], ask_until: Sequence[int] | None = None) -> None:
        """Rows whose token has exited go on with these tokens; each is asked whether it exits up to some loop, or 0."""
        index = np.asarray(rows, dtype=np.int64)
        self._backfill(index)
        self._grow(int(self._lengths[index].max()) + 1, 0)
        self._tokens[index, self._lengths[index]] = tokens
        self._lengths[index] += 1
        self._loops[index] = 0
        self._begin(index, np.full_like(index, self._depth) if ask_until is None else np.asarray(ask_until))

    def deepen(self, row: int) -> None:
        """The token of a row that has just exited goes on to full depth instead."""
        self._to_full_depth = np.append(self._to_full_depth, row)

    def take_back(self, row: int, length: int) -> None:
        """Of a row whose token has exited, only so many tokens were ever there."""
        self._lengths[row] = length
        for counted in (self._cached, self._head_cached, self._read):
            counted[row] = np.minimum(counted[row], length)

    @torch.inference_mode()
    def step(self) -> Exits:
        """One loop of every active row, and the rows whose token exits: they are not active until they go on.

        Where all are at the same loop, those after it before which none exits run at once.
        """
        active = np.concatenate([self._to_full_depth, *(group.rows for group in self._groups)])
        ahead = self._loops_ahead(active)
        self._run_loop(active, self._loops[active] + 1, ahead)
        self._loops[active] += ahead
        deepest = self._loops[self._to_full_depth] == self._depth
        done, self._to_full_depth = [self._to_full_depth[deepest]], self._to_full_depth[~deepest]
        for group in self._groups:
            done.append(group.keep(self._loops[group.rows] < self._depth))
            if not group.reads_logits:
                done.append(group.keep(~self._ask(group, None)))
        readers = [group for group in self._groups if group.reads_logits]
        rows = np.concatenate([*(group.rows for group in readers), *done])
        counts = np.ones_like(rows)
        if self._drafting:  # of drafts that are at full depth now, all are read
            counts = np.where(self._loops[rows] == self._depth, self._lengths[rows] - self._read[rows], 1)
        logits = self._logits(rows, counts)  # one call of the head for all: it is bound by reading its weights
        exits, first = np.ones(len(rows), dtype=bool), 0
        for group in readers:
            part = slice(first, first + len(group.rows))
            exits[part] = self._ask(group, logits[part])
            group.keep(~exits[part])
            first = part.stop
        for group in self._groups if self._drafting else ():
            gone = group.keep(self._loops[group.rows] < self._ask_until[group.rows])
            self._to_full_depth = np.concatenate((self._to_full_depth, gone))
        found = np.flatnonzero(exits)
        if len(found) < len(rows):
            logits = _reordered(logits, count_up((counts.cumsum() - counts)[found], counts[found]))
        rows, counts = rows[found], counts[found]
        read = rows[self._loops[rows] == self._depth]
        self._read[read] = self._lengths[read]
        return Exits(rows, self._loops[rows], counts, logits)

    def _loops_ahead(self, active: Integers) -> int:
        """How many loops run before anybody is asked."""
        loops = self._loops[active]
        if loops.min() != loops.max():
            return 1
        exits = [self._depth, *(group.first_exit for group in self._groups if len(group.rows))]
        return max(1, min(exits) - int(loops[0]))

    def _ask(self, group: ExitDecision, logits: Tensor | None) -> NDArray[np.bool_]:
        """[n] who of a group exits now."""
        pooled = partial(self._read_out, group.rows, np.ones_like(group.rows), head=False)
        return group.exits(self._loops[group.rows], logits, pooled)

    def _group(self, policy: ExitPolicy, row: int) -> ExitDecision:
        """What decides about this row, with others under its policy."""
        for group in self._groups:
            if group.policy is policy:
                return group
        self._group_of[row] = None
        in_use = self._group_of.tolist()
        self._groups = [group for group in self._groups if group in in_use]  # what the others keep of logits is large
        self._groups.append(ExitDecision(self._model, policy))
        return self._groups[-1]

    def _begin(self, rows: Integers, ask_until: Integers) -> None:
        """The last tokens of rows are active."""
        self._ask_until[rows] = ask_until
        self._to_full_depth = np.concatenate((self._to_full_depth, rows[ask_until == 0]))
        may_exit = rows[ask_until > 0]
        for group in self._groups:
            group.admit(may_exit[self._group_of[may_exit] == group])

    def _run_loop(self, rows: Integers, loops: Integers, ahead: int = 1) -> None:
        """Takes rows to these loops, or through so many from them on, with all their tokens that lack them."""
        missing = self._lengths[rows] - self._cached[rows, loops]
        # With one place for all loops, the later part of a row must not see keys of deeper loops.
        in_parts = self._cache == "latest" and missing.max() > _CHUNK
        apart = (self._cached[rows, loops + more] != self._cached[rows, loops] for more in range(1, ahead))
        if ahead > 1 and (in_parts or any(each.any() for each in apart)):
            for more in range(ahead):
                self._run_loop(rows, loops + more)
            return
        order = np.lexsort((rows, missing, loops))  # neighbours in the cache stand together: they are read in place
        rows, loops = rows[order], loops[order]
        for counts in _portions(missing[order]):
            some = counts > 0
            self._run_tokens(rows[some], loops[some], counts[some], ahead)

    def _run_tokens(self, rows: Integers, loops: Integers, counts: Integers, ahead: int) -> None:
        """Takes the next `counts` tokens of rows, which are sorted by loop, through `ahead` loops from these on."""
        cached = self._cached[rows, loops]
        indices, fresh = self._cache_indices(rows, cached, counts), int((loops == 1).sum())
        states = []
        if fresh:
            states.append(self._embed_new(rows[:fresh], counts[:fresh], indices[: counts[:fresh].sum()]))
        if fresh < len(rows):
            places = indices[counts[:fresh].sum() :]
            states.append(self._stored_states(counts[fresh:], loops[fresh:] - 1, places))
        state = states[0] if len(states) == 1 else self._kind.join(states)
        last = loops + ahead - 1
        for more in range(ahead):
            state = self._model.step(state.with_cache(AppendingRows(self._kv_cache, rows, cached, loops + more)))
        self._cached[rows[:, None], loops[:, None] + np.arange(ahead)] += counts[:, None]
        self.token_loops += ahead * int(counts.sum())
        self.prompt_loops += ahead * int(np.minimum(np.maximum(self._prompts[rows] - cached, 0), counts).sum())
        for loop, part in _loop_slices(counts, last):
            self._kv_cache.write_states("hidden", loop, indices[part], state.hidden[part])

    def _embed_new(self, rows: Integers, counts: Integers, indices: Tensor) -> LoopState:
        """The next `counts` tokens of rows, which have not been through anything."""
        none = np.zeros_like(rows)
        cached = self._cached[rows, none]
        tokens = self._tokens.reshape(-1)[self._host_indices(rows, cached, counts)]
        cache = AppendingRows(self._kv_cache, rows, cached, none)
        layout = Layout(counts, self._device, cache=cache)
        state = self._model.begin_packed(upload(tokens, self._device), layout)
        if self._kind is not type(state):
            self._kind = type(state)
            assert {*self._kind._tensors()} == {*self._kind.tokenwise, "loop"}, (
                "name the state's tensors in `tokenwise`"
            )
        for name in self._extra_states:
            self._kv_cache.write_states(name, 0, indices, getattr(state, name))
        self._cached[rows, 0] += counts
        return state

    def _stored_states(self, counts: Integers, loops: Integers, indices: Tensor) -> LoopState:
        """So many tokens of rows, which lie at `indices`, as these loops left them; the rows are sorted by loop."""
        layout, cache = Layout(counts, self._device), self._kv_cache
        extra = {name: cache.read_states(name, 0, indices) for name in self._extra_states}
        hidden = [cache.read_states("hidden", loop, indices[part]) for loop, part in _loop_slices(counts, loops)]
        joined = hidden[0] if len(hidden) == 1 else torch.cat(hidden)
        return self._kind(hidden=joined, layout=layout, loop=upload(loops, self._device), **extra)

    def _logits(self, rows: Integers, counts: Integers) -> Tensor:
        """[sum of counts, V] what the last tokens of rows say now."""
        if not len(rows):
            return torch.empty((0, self._model.vocab_size), device=self._device)
        return self._model.predict(self._read_out(rows, counts, head=self._model.head_attends))

    def _read_out(self, rows: Integers, counts: Integers, head: bool) -> Tensor:
        """[sum of counts, D] `pooled` of the last tokens of rows, or what the head reads of them, if that attends."""
        loops = self._loops[rows]
        missing = self._lengths[rows] - self._head_cached[rows, loops] if head else counts
        order = np.lexsort((rows, missing, loops))
        rows, loops, missing, last = rows[order], loops[order], missing[order], counts[order]
        if head and missing.sum() > _CHUNK:
            for portion in _portions(missing - last):
                some = portion > 0
                self._run_head(rows[some], loops[some], portion[some])
            missing = last
        if head:
            read = self._run_head(rows, loops, missing)
        else:
            indices = self._cache_indices(rows, self._lengths[rows] - missing, missing)
            read = self._model.pooled(self._stored_states(missing, loops, indices))
        there = np.argsort(order)
        return _reordered(read, count_up((missing.cumsum() - last)[there], counts))

    def _run_head(self, rows: Integers, loops: Integers, counts: Integers) -> Tensor:
        """What the head, which attends, reads of the next `counts` tokens of rows, which are sorted by loop."""
        cached = self._head_cached[rows, loops]
        state = self._stored_states(counts, loops, self._cache_indices(rows, cached, counts))
        read = self._model.head_input(state.with_cache(AppendingRows(self._head_cache, rows, cached, loops)))
        self._head_cached[rows, loops] += counts
        return read

    def _backfill(self, rows: Integers) -> None:
        """What the last tokens of rows, which have exited, leave to those after them."""
        if self._cache == "full":
            if self._drafting:  # a draft is read with whatever the head knows by now of those before it
                self._head_cached[rows, :-1] = self._lengths[rows, None]
            return
        prefilling = self._lengths[rows] == self._prompts[rows]
        prompts = rows[prefilling]
        for loop in range(2, self._depth + 1):  # those that the last token of a prompt did not need
            if len(short := prompts[self._cached[prompts, loop] < self._lengths[prompts]]):
                self._run_loop(short, np.full(len(short), loop))
        if self._cache == "propagate":
            decoded = rows[~prefilling]
            for loop in set(self._loops[decoded].tolist()):
                exited = decoded[self._loops[decoded] == loop]
                last = self._cache_indices(exited, self._lengths[exited] - 1, np.ones_like(exited))
                self._kv_cache.propagate(loop, range(loop + 1, self._depth + 1), last)
        self._cached[rows] = self._head_cached[rows] = self._lengths[rows, None]

    def _cache_indices(self, rows: Integers, starts: Integers, counts: Integers) -> Tensor:
        """Where `counts` tokens of rows, from the positions `starts` on, lie in the cache."""
        return upload(self._host_indices(rows, starts, counts), self._device)

    def _host_indices(self, rows: Integers, starts: Integers, counts: Integers) -> Integers:
        return count_up(rows * self._kv_cache.capacity + starts, counts)

    @property
    def _extra_states(self) -> list[str]:
        """What a model keeps of a token besides its state."""
        return [name for name in self._kind.tokenwise if name != "hidden"]

    def _grow(self, tokens: int, rows: int) -> None:
        """Nobody pays for rows that no prompt ever takes."""
        self._kv_cache.grow(tokens, rows)
        self._head_cache.grow(tokens, rows)
        missing = self._kv_cache.capacity - self._tokens.shape[1]
        if missing > 0:
            self._tokens = np.pad(self._tokens, ((0, 0), (0, missing)))


def _portions(missing: Integers) -> Iterator[Integers]:
    """So many tokens of rows, a part at a time: as many whole rows as fit in one, or a part of one."""
    while missing.any():
        fits = missing.cumsum() <= max(_CHUNK, len(missing))
        counts = np.where(fits, missing, 0)
        if not counts.any():
            first = int(np.flatnonzero(missing)[0])
            counts[first] = min(_CHUNK, missing[first])
        yield counts
        missing = missing - counts


def _loop_slices(counts: Integers, loops: Integers) -> Iterator[tuple[int, slice]]:
    """The tokens of rows of so many tokens at each loop; the rows are sorted by loop."""
    if loops[0] == loops[-1]:
        yield int(loops[0]), slice(0, int(counts.sum()))
        return
    first = 0
    for loop in np.unique(loops).tolist():
        last = first + int(counts[loops == loop].sum())
        yield loop, slice(first, last)
        first = last


def _reordered(values: Tensor, order: Integers) -> Tensor:
    """values[order], which all of them in their own order are already."""
    if len(order) == len(values) and np.array_equal(order, np.arange(len(values))):
        return values
    return values.index_select(0, upload(order, values.device))
