"""How do rows of text go on token by token, each token as deep as its policy wants? A batch of rows and a KV cache.

Every step is one loop of everybody: a row whose token has just exited begins its next token while others go deeper.
A token that exits early leaves no keys and values in the deeper loops, where later tokens would look for them:

- `full`: they are made when somebody needs them, for all tokens that lack them at once; nothing differs from a run in
  which every token goes through every loop;
- `propagate`: those of the exit loop stand in for them;
- `latest`: there is one place for all loops, which holds what a token's last loop left.

With `propagate` and `latest` a prompt goes through all loops before the first token after it, and what a head that
attends keeps of a token is from the loop at which it was read last.

Lossless text stands on the same rows (`engine/wavefront.py`).

Shapes: R rows of the cache, B of a step, T loops, D width, V vocabulary.
"""

import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loopscope.engine.draft_spacing import DraftGain
from loopscope.engine.exit_decision import DecisionRows, ExitDecision, Integers, exits_and_answers
from loopscope.models.device import upload
from loopscope.models.kv_cache import AppendingRows, KVCache
from loopscope.models.looped_model import LoopedModel, LoopState
from loopscope.models.packing import Layout, count_up
from loopscope.policy import ExitPolicy
from loopscope.scope import CacheMode

CACHE_MODES: tuple[CacheMode, ...] = ("full", "propagate", "latest")
_CHUNK = 1024
"""Tokens that go through a loop together at most, unless there are more rows: long prompts take no more memory."""
MAX_IN_FLIGHT = 4
"""Tokens of a row at most: one whose exit is due, and drafts."""
NO_ROWS: Integers = np.empty(0, dtype=np.int64)


class TextRows:
    """Rows of tokens, through how many loops each token has been, and what takes it through the next.

    At every loop a row's tokens have come up to some position; those after it that have been through the loop before
    are pending there. Rows, and loops of a row, run together; a token meets at a loop the keys and values that the
    tokens before it have there.
    """

    def __init__(self, model: LoopedModel, rows: int, cache: CacheMode, one_head_cache: bool) -> None:
        self._model, self._cache, self._depth = model, cache, model.num_loops
        self._device = next(model.parameters()).device
        self._kv_cache = KVCache(1, 64, latest_only=cache == "latest", most_loops=self._depth)
        self._head_cache = KVCache(1, 64, one_head_cache, most_loops=self._depth)  # of a head that attends
        self._tokens: Integers = np.zeros((rows, 64), dtype=np.int64)
        self._lengths: Integers = np.zeros(rows, dtype=np.int64)
        self._prompts: Integers = np.zeros(rows, dtype=np.int64)  # how many of them are the prompt's
        self._cached: Integers = np.zeros((rows, self._depth + 1), dtype=np.int64)  # tokens through each loop
        self._head_cached: Integers = np.zeros_like(self._cached)  # tokens that the head has read at each loop
        self._kind: type[LoopState] = LoopState
        self.token_loops = 0
        """Tokens times loops that were run, those for the cache included."""
        self.prompt_loops = 0
        """Those of them that were tokens of prompts, whenever they were run."""

    @property
    def cache_bytes(self) -> int:
        return self._kv_cache.nbytes + self._head_cache.nbytes

    def _start_row(self, row: int, prompt: Integers, budget: int = 0) -> None:
        """A row has these tokens, which have been through nothing; so many may come after them."""
        self._grow(len(prompt), row + 1, len(prompt) + budget)
        self._tokens[row, : len(prompt)] = prompt
        self._lengths[row] = self._prompts[row] = len(prompt)
        self._cached[row] = self._head_cached[row] = 0

    def _add_tokens(self, rows: Integers, tokens: Sequence[int]) -> None:
        """One more token of each of these rows."""
        self._grow(int(self._lengths[rows].max()) + 1, 0)
        self._tokens[rows, self._lengths[rows]] = tokens
        self._lengths[rows] += 1

    def _take_back(self, row: int, length: int) -> None:
        """Of a row, only so many tokens were ever there."""
        self._lengths[row] = length
        for counted in (self._cached, self._head_cached):
            counted[row] = np.minimum(counted[row], length)

    def _run_loop(self, rows: Integers, loops: Integers, ahead: int = 1, upto: Integers | None = None) -> None:
        """Takes what is pending in rows (of their first `upto` tokens) at these loops through them, or through so many
        from them on."""
        reached = np.where(loops == 1, self._lengths[rows], self._cached[rows, loops - 1])
        reached = reached if upto is None else np.minimum(reached, upto)
        pending = reached - self._cached[rows, loops]
        # With one place for all loops, the later part of a row must not see keys of deeper loops.
        in_parts = self._cache == "latest" and pending.max() > _CHUNK
        apart = (self._cached[rows, loops + more] != self._cached[rows, loops] for more in range(1, ahead))
        if ahead > 1 and (in_parts or any(each.any() for each in apart)):
            for more in range(ahead):
                self._run_loop(rows, loops + more, upto=upto)
            return
        order = np.lexsort((rows, pending, loops))  # neighbours in the cache stand together: they are read in place
        rows, loops = rows[order], loops[order]
        for counts in _portions(pending[order]):
            some = counts > 0
            self._run_tokens(rows[some], loops[some], counts[some], ahead)

    def _run_tokens(self, rows: Integers, loops: Integers, counts: Integers, ahead: int) -> None:
        """Takes the next `counts` tokens of rows, which are sorted by loop, through `ahead` loops from these on."""
        cached, fresh = self._cached[rows, loops], int((loops == 1).sum())
        state = self._embed_new(rows[:fresh], counts[:fresh]) if fresh else None
        if state is None or fresh < len(rows):
            if state is not None:
                self._write_states(
                    state.hidden, rows[:fresh], np.zeros(fresh, np.int64), cached[:fresh], counts[:fresh]
                )
            state = self._stored_states(rows, loops - 1, cached, counts)
        for more in range(ahead):
            state = self._model.step(state.with_cache(AppendingRows(self._kv_cache, rows, cached, loops + more)))
        self._cached[rows[:, None], loops[:, None] + np.arange(ahead)] += counts[:, None]
        self.token_loops += ahead * int(counts.sum())
        self.prompt_loops += ahead * int(np.minimum(np.maximum(self._prompts[rows] - cached, 0), counts).sum())
        self._write_states(state.hidden, rows, loops + ahead - 1, cached, counts)

    def _embed_new(self, rows: Integers, counts: Integers) -> LoopState:
        """The next `counts` tokens of rows, which have not been through anything."""
        none = np.zeros_like(rows)
        cached = self._cached[rows, none]
        indices = self._host_indices(rows, none, cached, counts)
        cache = AppendingRows(self._kv_cache, rows, cached, none)
        tokens = upload(self._tokens.reshape(-1)[indices], self._device)
        state = self._model.begin_packed(tokens, Layout(counts, self._device, cache=cache))
        if self._kind is not type(state):
            self._kind = type(state)
            assert {*self._kind._tensors()} == {*self._kind.tokenwise, "loop"}, (
                "name the state's tensors in `tokenwise`"
            )
        for name in self._extra_states:
            self._kv_cache.write_states(name, 0, upload(indices, self._device), getattr(state, name))
        self._cached[rows, 0] += counts
        return state

    def _write_states(
        self, hidden: Tensor, rows: Integers, loops: Integers, starts: Integers, counts: Integers
    ) -> None:
        """Keeps what these loops (0: the embedding) left of `counts` tokens of rows, from these positions on."""
        deepest = int(loops[-1])
        self._kv_cache.write_states("hidden", deepest, self._indices(rows, loops, starts, counts), hidden)

    def _stored_states(self, rows: Integers, loops: Integers, starts: Integers, counts: Integers) -> LoopState:
        """`counts` tokens of rows, from these positions on, as these loops left them."""
        cache, extra = self._kv_cache, {}
        if self._extra_states:
            places = self._indices(rows, np.zeros_like(rows), starts, counts)
            extra = {name: cache.read_states(name, places) for name in self._extra_states}
        hidden = cache.read_states("hidden", self._indices(rows, loops, starts, counts))
        layout = Layout(counts, self._device)
        return self._kind(hidden=hidden, layout=layout, loop=upload(loops, self._device), **extra)

    def _logits(self, rows: Integers, positions: Integers, loops: Integers) -> Tensor:
        """[n, V] what tokens of rows, at these positions, say after these loops."""
        if not len(rows):
            return torch.empty((0, self._model.vocab_size), device=self._device)
        read = self._head_read if self._model.head_attends else self._pooled
        return self._model.predict(read(rows, positions, loops))

    def _pooled(self, rows: Integers, positions: Integers, loops: Integers) -> Tensor:
        """[n, D]"""
        return self._model.pooled(self._stored_states(rows, loops, positions, np.ones_like(rows)))

    def _head_read(self, rows: Integers, positions: Integers, loops: Integers) -> Tensor:
        """[n, D] what a head that attends reads, which has read all tokens before these."""
        missing = positions + 1 - self._head_cached[rows, loops]
        order = np.lexsort((rows, missing, loops))
        rows, loops, missing = rows[order], loops[order], missing[order]
        if missing.sum() > _CHUNK:
            for portion in _portions(missing - 1):
                some = portion > 0
                self._run_head(rows[some], loops[some], portion[some])
            missing = np.ones_like(missing)
        read = self._run_head(rows, loops, missing)
        return reordered(read, (missing.cumsum() - 1)[np.argsort(order)])

    def _run_head(self, rows: Integers, loops: Integers, counts: Integers) -> Tensor:
        """What the head, which attends, reads of the next `counts` tokens of rows."""
        cached = self._head_cached[rows, loops]
        state = self._stored_states(rows, loops, cached, counts)
        read = self._model.head_input(state.with_cache(AppendingRows(self._head_cache, rows, cached, loops)))
        self._head_cached[rows, loops] += counts
        return read

    def _indices(self, rows: Integers, loops: Integers, starts: Integers, counts: Integers) -> Tensor:
        """Where `counts` tokens of rows, from the positions `starts` on, lie in the cache as these loops left them."""
        return upload(self._host_indices(rows, loops, starts, counts), self._device)

    def _host_indices(self, rows: Integers, loops: Integers, starts: Integers, counts: Integers) -> Integers:
        return count_up((loops * self._kv_cache.rows + rows) * self._kv_cache.capacity + starts, counts)

    @property
    def _extra_states(self) -> list[str]:
        """What a model keeps of a token besides its state."""
        return [name for name in self._kind.tokenwise if name != "hidden"]

    def _grow(self, tokens: int, rows: int, reserve: int = 0) -> None:
        """Nobody pays for rows that no prompt ever takes."""
        for cache in (self._kv_cache, self._head_cache):
            cache.grow(tokens, rows, reserve)
        missing = self._kv_cache.capacity - self._tokens.shape[1]
        if missing > 0:
            self._tokens = np.pad(self._tokens, ((0, 0), (0, missing)))


class Exits(NamedTuple):
    """The rows whose token exits."""

    rows: Integers  # [n]
    loops: Integers  # [n] that it took
    logits: Tensor  # [n, V] after it
    likeliest: Integers  # [n] token by these


class _HeldExit(NamedTuple):
    """The exit of a draft, which counts when the draft stands."""

    logits: Tensor  # [V]
    likeliest: int


class Decoder(TextRows):
    """The rows that are being continued; who they are is the caller's business.

    A row has an oldest token, whose exit is due, and drafts after it. A token in flight has a slot, by its row and its
    position, under which its policy follows it.
    """

    def __init__(self, model: LoopedModel, rows: int, cache: CacheMode) -> None:
        super().__init__(model, rows, cache, cache != "full")
        drafts = cache != "latest" and not model.head_attends  # else a token is read as its exit leaves it
        self._most = min(MAX_IN_FLIGHT, model.num_loops) if drafts else 1
        self._oldest: Integers = np.zeros(rows, dtype=np.int64)  # the position of each row's oldest token
        self._ends: Integers = np.zeros(rows, dtype=np.int64)  # tokens that a row may have
        self._loops: Integers = np.zeros(rows * self._most, dtype=np.int64)  # [slots] that the token has been through
        self._positions: Integers = np.zeros_like(self._loops)  # [slots]
        self._next: Integers = np.full_like(self._loops, -1)  # [slots] what it last said the next token is
        self._since: Integers = np.zeros_like(self._loops)  # [slots] the loop from which on it has said that
        self._held: dict[int, _HeldExit] = {}  # by slot
        self._running: set[int] = set()  # rows
        self._groups: list[ExitDecision] = []  # one a policy
        self._group_of: NDArray[np.object_] = np.full(rows, None, dtype=object)
        self._gain = DraftGain(model)

    def prefill(self, row: int, prompt: Integers, policy: ExitPolicy, budget: int = 0) -> None:
        """A row begins with its prompt, which runs with the next steps; so many tokens may come after it."""
        self._start_row(row, prompt, budget)
        self._oldest[row], self._ends[row] = len(prompt) - 1, len(prompt) + budget
        self._group_of[row] = self._group(policy, row)
        self._running.add(row)
        self._begin(np.array([row]))

    @torch.inference_mode()
    def append(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """Rows whose token has exited go on with these tokens: with a draft, where that is it."""
        index, answers = np.asarray(rows, dtype=np.int64), np.asarray(tokens, dtype=np.int64)
        self._backfill(index)
        slots = self._slots(index, self._oldest[index])
        self._gain.count(
            np.where(self._next[slots] == answers, self._since[slots], self._loops[slots]), self._loops[slots]
        )
        self._oldest[index] += 1
        stands = self._token_at(index, self._oldest[index]) == answers
        self._cut(index[~stands], self._oldest[index[~stands]])
        if not stands.all():
            self._add_tokens(index[~stands], answers[~stands].tolist())
            self._begin(index[~stands])
        held = [key for key in self._slots(index[stands], self._oldest[index[stands]]).tolist() if key in self._held]
        self._draft(np.array(held, dtype=np.int64))

    def finish(self, row: int) -> None:
        """A row is finished, and its drafts with it."""
        self._running.remove(row)
        self._cut(np.array([row]), np.zeros(1, dtype=np.int64))

    @torch.inference_mode()
    def step(self) -> Exits:
        """One loop of every token in flight, and the rows whose oldest exits: it waits until they go on.

        Where all are at the same loop, those after it before which none exits run at once.
        """
        start, before = time.perf_counter(), self.token_loops
        active = np.concatenate([NO_ROWS, *(group.rows for group in self._groups)])
        ahead = self._loops_ahead(active) if len(active) else 0
        begins = not self._loops[active].all()
        if len(active):
            self._pass_held()
            self._run_loop(active // self._most, self._loops[active] + 1, ahead, self._positions[active] + 1)
        run = time.perf_counter()
        self._loops[active] += ahead
        done = []
        for group in self._groups:
            done.append(group.keep(self._loops[group.rows] < self._depth))
            if not group.reads_logits:
                done.append(group.keep(~self._ask(group)))
        readers = [group for group in self._groups if group.reads_logits]
        slots = np.concatenate([NO_ROWS, *(group.rows for group in readers), *done])
        # one call of the head for all: it is bound by reading its weights
        logits = self._logits(*self._places(slots))
        exits, likeliest = self._exits(readers, slots, logits)
        out = self._due_exits(slots, exits, logits, likeliest)
        if self._most > 1:
            self._follow(slots, self._proposed(slots, likeliest), exits)
        if ahead and self._device.type == "cpu":
            tokens = (self.token_loops - before) // ahead
            self._gain.see(ahead, tokens, begins, len(slots), (start, run, time.perf_counter()))
        return out

    def _due_exits(self, slots: Integers, exits: NDArray[np.bool_], logits: Tensor, likeliest: Integers) -> Exits:
        """The exits of rows' oldest tokens: those of now, and those that were held. Others are held from now on."""
        due = [key for key in self._held if self._positions[key] == self._oldest[key // self._most]]
        held = [self._held.pop(key) for key in due]
        oldest = self._positions[slots] == self._oldest[slots // self._most]
        for place in np.flatnonzero(exits & ~oldest).tolist():
            self._held[int(slots[place])] = _HeldExit(logits[place].clone(), int(likeliest[place]))
        if self._cache == "propagate":
            self._propagate(slots[exits & ~oldest])
        found = np.flatnonzero(exits & oldest)
        own, answers, slots = reordered(logits, found), likeliest[found], slots[found]
        if held:
            own = torch.cat((own, torch.stack([each.logits for each in held])))
            answers, slots = np.append(answers, [each.likeliest for each in held]), np.append(slots, due)
        return Exits(slots // self._most, self._loops[slots], own, answers)

    def _exits(
        self, readers: list[ExitDecision], slots: Integers, logits: Tensor
    ) -> tuple[NDArray[np.bool_], Integers]:
        """[n] which of the slots exit, of which those of `readers` come first, and the likeliest token of all."""
        reading, first = [], 0
        for group in readers:
            part = slice(first, first + len(group.rows))
            pooled = partial(self._pooled, *self._places(group.rows))
            reading.append(DecisionRows(group, self._loops[group.rows], logits[part], pooled))
            first = part.stop
        decided, likeliest = exits_and_answers(reading, logits)
        for group, exits in zip(readers, decided, strict=True):
            group.keep(~exits)
        return np.concatenate((*decided, np.ones(len(slots) - first, dtype=bool))), likeliest

    def _proposed(self, slots: Integers, likeliest: Integers) -> Integers:
        """[n] what these say the next token is."""
        return likeliest

    def _follow(self, slots: Integers, proposed: Integers, exits: NDArray[np.bool_]) -> None:
        """What tokens that were read now say comes next: drafts stay, or make room for others."""
        changed = self._next[slots] != proposed
        self._next[slots[changed]] = proposed[changed]
        self._since[slots[changed]] = self._loops[slots[changed]]
        rows, positions = slots // self._most, self._positions[slots]
        others = ~(exits & (positions == self._oldest[rows])) & (self._token_at(rows, positions + 1) != proposed)
        if others.any():
            slots = slots[others][np.argsort(positions[others], kind="stable")]  # what an older one says comes first
            slots = slots[np.unique(slots // self._most, return_index=True)[1]]
            self._cut(slots // self._most, self._positions[slots] + 1)
            self._draft(slots)

    def _draft(self, slots: Integers) -> None:
        """Begins what the newest tokens of rows say comes next, where that pays and there is room."""
        rows, positions = slots // self._most, self._positions[slots] + 1
        room = (positions < self._ends[rows]) & (positions - self._oldest[rows] < self._most) & (self._next[slots] >= 0)
        room &= positions == self._lengths[rows]
        if room.any() and self._gain.pays(len(self._running)):
            self._add_tokens(rows[room], self._next[slots[room]].tolist())
            self._begin(rows[room])

    def _cut(self, rows: Integers, lengths: Integers) -> None:
        """Drop the drafts of rows from these positions on."""
        longer = self._lengths[rows] > lengths
        if not longer.any():
            return
        for row, length in zip(rows[longer].tolist(), lengths[longer].tolist(), strict=True):
            self._take_back(row, length)
        for group in self._groups:
            group.keep(self._positions[group.rows] < self._lengths[group.rows // self._most])
        for key in [*self._held]:
            if self._positions[key] >= self._lengths[key // self._most]:
                del self._held[key]

    def _token_at(self, rows: Integers, positions: Integers) -> Integers:
        """[n] the tokens of rows at these positions; -1: there is none."""
        there = positions < self._lengths[rows]
        return np.where(there, self._tokens[rows, np.where(there, positions, 0)], -1)

    def _slots(self, rows: Integers, positions: Integers) -> Integers:
        return rows * self._most + positions % self._most

    def _places(self, slots: Integers) -> tuple[Integers, Integers, Integers]:
        """Rows, positions and loops."""
        return slots // self._most, self._positions[slots], self._loops[slots]

    def _loops_ahead(self, active: Integers) -> int:
        """How many loops run before anybody is asked."""
        loops = self._loops[active]
        if loops.min() != loops.max():
            return 1
        exits = [self._depth, *(group.first_exit for group in self._groups if len(group.rows))]
        return max(1, min(exits) - int(loops[0]))

    def _ask(self, group: ExitDecision) -> NDArray[np.bool_]:
        """[n] who of a group that reads no logits exits now."""
        return group.exits(self._loops[group.rows], None, partial(self._pooled, *self._places(group.rows)))

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

    def _begin(self, rows: Integers) -> None:
        """The last tokens of rows are active."""
        slots = self._slots(rows, self._lengths[rows] - 1)
        self._loops[slots], self._next[slots], self._positions[slots] = 0, -1, self._lengths[rows] - 1
        for group in self._groups:
            group.admit(slots[self._group_of[rows] == group])

    def _backfill(self, rows: Integers) -> None:
        """What the oldest tokens of rows, which have exited, leave to those after them."""
        if self._cache == "full":
            return
        written = self._oldest[rows] + 1
        prefilling = written == self._prompts[rows]
        prompts = rows[prefilling]
        for loop in range(2, self._depth + 1):  # those that the last token of a prompt did not need
            if len(short := prompts[self._cached[prompts, loop] < self._prompts[prompts]]):
                self._run_loop(short, np.full(len(short), loop), upto=self._prompts[short])
        if self._cache == "propagate":
            decoded = rows[~prefilling]
            self._propagate(self._slots(decoded, self._oldest[decoded]))
        for counted in (self._cached, self._head_cached):
            counted[rows] = np.maximum(counted[rows], written[:, None])

    def _propagate(self, slots: Integers) -> None:
        """Keys and values of the loop after which these exited stand in for those of deeper loops."""
        rows, positions, loops = self._places(slots)
        for loop in set(loops.tolist()):
            own = loops == loop
            none, ones = np.zeros_like(rows[own]), np.ones_like(rows[own])
            places = self._indices(rows[own], none, positions[own], ones)
            self._kv_cache.propagate(loop, range(loop + 1, self._depth + 1), places)

    def _pass_held(self) -> None:
        """Where the tokens before a draft that has exited have been through a loop, what came after it may follow."""
        if self._cache == "propagate":
            drafts = np.array([*self._held])
            for draft in drafts[np.argsort(self._positions[drafts])] if len(drafts) else ():
                row, position, loop = (int(each[0]) for each in self._places(draft[None]))
                deeper = self._cached[row, loop + 1 :]
                deeper[deeper == position] += 1


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


def reordered(values: Tensor, order: Integers) -> Tensor:
    """values[order], which all of them in their own order are already."""
    if len(order) == len(values) and np.array_equal(order, np.arange(len(values))):
        return values
    return values.index_select(0, upload(order, values.device))
