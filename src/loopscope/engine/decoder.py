"""How are rows of text decoded token by token, each token as deep as its policy decides? One batch and one KV cache.

Every step runs one loop of every row: a row whose token has just exited begins its next token while others go deeper.
A token that exits early leaves no keys and values in the deeper loops, where later tokens need them:

- `full`: LoopScope computes them when a later token needs them, for all tokens that lack them at once; the result is
  the same as in a run in which every token runs all loops;
- `propagate`: the keys and values of the exit loop stand in for them;
- `latest`: all loops share one entry of a token, which holds the keys and values of its last loop.

With `propagate` and `latest` a prompt runs all loops before the first token after it, and an attending head caches
a token at the loop at which the head last read the token.

Lossless text uses the same rows (`engine/wavefront.py`).

Shapes: R rows of the cache, B rows of a step, T loops, D width, V vocabulary.
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
from loopscope.engine.exit_decision import DecisionRows, ExitDecision, exits_and_answers
from loopscope.engine.logit_signals import Integers
from loopscope.models.device import upload
from loopscope.models.kv_cache import AppendingRows, KVCache
from loopscope.models.looped_model import LoopedModel, LoopState
from loopscope.models.packing import Layout, count_up
from loopscope.policy import ExitPolicy
from loopscope.scope import CacheMode

CACHE_MODES: tuple[CacheMode, ...] = ("full", "propagate", "latest")
_CHUNK = 1024
"""Tokens that run a loop together at most, unless there are more rows: long prompts take no more memory."""
MAX_IN_FLIGHT = 4
"""Tokens of a row in flight at most: the token whose exit is due, and drafts."""
NO_ROWS: Integers = np.empty(0, dtype=np.int64)


class TextRows:
    """Hold rows of tokens with their KV cache, and run their pending tokens through the next loop.

    At every loop, the tokens of a row up to some position have run it. Later tokens that have run the loop before are
    pending there. Different rows, and different loops of a row, run together. At each loop, a token attends to the keys
    and values of that loop of the tokens before it.
    """

    def __init__(self, model: LoopedModel, rows: int, cache: CacheMode, one_head_cache: bool) -> None:
        self._model, self._cache, self._depth = model, cache, model.num_loops
        self._device = next(model.parameters()).device
        self._kv_cache = KVCache(1, 64, latest_only=cache == "latest", most_loops=self._depth)
        self._head_cache = KVCache(1, 64, one_head_cache, most_loops=self._depth)  # of a head that attends
        self._tokens: Integers = np.zeros((rows, 64), dtype=np.int64)
        self._lengths: Integers = np.zeros(rows, dtype=np.int64)
        self._prompts: Integers = np.zeros(rows, dtype=np.int64)  # [R] tokens of each row's prompt
        self._cached: Integers = np.zeros((rows, self._depth + 1), dtype=np.int64)  # tokens that have run each loop
        self._head_cached: Integers = np.zeros_like(self._cached)  # tokens that the head has read at each loop
        self._kind: type[LoopState] = LoopState
        self.token_loops = 0
        """Tokens times loops that have run, with those that only fill the cache."""
        self.prompt_loops = 0
        """The part of `token_loops` that belongs to tokens of prompts."""

    @property
    def cache_bytes(self) -> int:
        return self._kv_cache.nbytes + self._head_cache.nbytes

    def _start_row(self, row: int, prompt: Integers, budget: int = 0) -> None:
        """Start a row with these tokens, which have run no loop; reserve space for `budget` further tokens."""
        self._grow(len(prompt), row + 1, len(prompt) + budget)
        self._tokens[row, : len(prompt)] = prompt
        self._lengths[row] = self._prompts[row] = len(prompt)
        self._cached[row] = self._head_cached[row] = 0

    def _add_tokens(self, rows: Integers, tokens: Sequence[int]) -> None:
        """Add one token to each of the rows."""
        self._grow(int(self._lengths[rows].max()) + 1, 0)
        self._tokens[rows, self._lengths[rows]] = tokens
        self._lengths[rows] += 1

    def _take_back(self, row: int, length: int) -> None:
        """Cut a row to its first `length` tokens."""
        self._lengths[row] = length
        for counted in (self._cached, self._head_cached):
            counted[row] = np.minimum(counted[row], length)

    def _run_loop(self, rows: Integers, loops: Integers, ahead: int = 1, upto: Integers | None = None) -> None:
        """Run rows' pending tokens (of the first `upto`) through these loops, or through `ahead` loops from them on."""
        reached = np.where(loops == 1, self._lengths[rows], self._cached[rows, loops - 1])
        reached = reached if upto is None else np.minimum(reached, upto)
        pending = reached - self._cached[rows, loops]
        # With one entry for all loops, the later part of a row must not see keys of deeper loops.
        in_parts = self._cache == "latest" and pending.max() > _CHUNK
        apart = (self._cached[rows, loops + more] != self._cached[rows, loops] for more in range(1, ahead))
        if ahead > 1 and (in_parts or any(each.any() for each in apart)):
            for more in range(ahead):
                self._run_loop(rows, loops + more, upto=upto)
            return
        order = np.lexsort((rows, pending, loops))  # neighbours stay neighbours, so the cache is read in place
        rows, loops = rows[order], loops[order]
        for counts in _prefill_portions(pending[order]):
            some = counts > 0
            self._run_tokens(rows[some], loops[some], counts[some], ahead)

    def _run_tokens(self, rows: Integers, loops: Integers, counts: Integers, ahead: int) -> None:
        """Run the next `counts` tokens of rows, sorted by loop, through `ahead` loops from the given loops on."""
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
        """Embed the next `counts` tokens of rows, which have run no loop yet."""
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
        """Store the states of `counts` tokens of rows after these loops (0: the embedding), from these positions on."""
        deepest = int(loops[-1])
        self._kv_cache.write_states("hidden", deepest, self._indices(rows, loops, starts, counts), hidden)

    def _stored_states(self, rows: Integers, loops: Integers, starts: Integers, counts: Integers) -> LoopState:
        """The stored states of `counts` tokens of rows after these loops, from these positions on."""
        cache, extra = self._kv_cache, {}
        if self._extra_states:
            places = self._indices(rows, np.zeros_like(rows), starts, counts)
            extra = {name: cache.read_states(name, places) for name in self._extra_states}
        hidden = cache.read_states("hidden", self._indices(rows, loops, starts, counts))
        layout = Layout(counts, self._device)
        return self._kind(hidden=hidden, layout=layout, loop=upload(loops, self._device), **extra)

    def _logits(self, rows: Integers, positions: Integers, loops: Integers) -> Tensor:
        """[n, V] the logits of the tokens at these positions of rows, after these loops."""
        if not len(rows):
            return torch.empty((0, self._model.vocab_size), device=self._device)
        read = self._head_read if self._model.head_attends else self._pooled
        return self._model.predict(read(rows, positions, loops))

    def _pooled(self, rows: Integers, positions: Integers, loops: Integers) -> Tensor:
        """[n, D] the pooled states of the tokens at these positions of rows, after these loops."""
        return self._model.pooled(self._stored_states(rows, loops, positions, np.ones_like(rows)))

    def _head_read(self, rows: Integers, positions: Integers, loops: Integers) -> Tensor:
        """[n, D] the outputs of an attending head, which first reads all earlier tokens of the rows."""
        missing = positions + 1 - self._head_cached[rows, loops]
        order = np.lexsort((rows, missing, loops))
        rows, loops, missing = rows[order], loops[order], missing[order]
        if missing.sum() > _CHUNK:
            for portion in _prefill_portions(missing - 1):
                some = portion > 0
                self._run_head(rows[some], loops[some], portion[some])
            missing = np.ones_like(missing)
        read = self._run_head(rows, loops, missing)
        return reordered(read, (missing.cumsum() - 1)[np.argsort(order)])

    def _run_head(self, rows: Integers, loops: Integers, counts: Integers) -> Tensor:
        """Run an attending head on the next `counts` tokens of rows; return its outputs."""
        cached = self._head_cached[rows, loops]
        state = self._stored_states(rows, loops, cached, counts)
        read = self._model.head_input(state.with_cache(AppendingRows(self._head_cache, rows, cached, loops)))
        self._head_cached[rows, loops] += counts
        return read

    def _indices(self, rows: Integers, loops: Integers, starts: Integers, counts: Integers) -> Tensor:
        """The cache indices of `counts` tokens of rows after these loops, from the positions `starts` on."""
        return upload(self._host_indices(rows, loops, starts, counts), self._device)

    def _host_indices(self, rows: Integers, loops: Integers, starts: Integers, counts: Integers) -> Integers:
        return count_up((loops * self._kv_cache.rows + rows) * self._kv_cache.capacity + starts, counts)

    @property
    def _extra_states(self) -> list[str]:
        """The names of the tensors that a model keeps for a token besides its hidden state."""
        return [name for name in self._kind.tokenwise if name != "hidden"]

    def _grow(self, tokens: int, rows: int, reserve: int = 0) -> None:
        """Grow the cache to so many tokens and rows; rows that no prompt takes use no memory."""
        for cache in (self._kv_cache, self._head_cache):
            cache.grow(tokens, rows, reserve)
        missing = self._kv_cache.capacity - self._tokens.shape[1]
        if missing > 0:
            self._tokens = np.pad(self._tokens, ((0, 0), (0, missing)))


class Exits(NamedTuple):
    """Hold the rows whose token exits after a step."""

    rows: Integers  # [n]
    loops: Integers  # [n] loops that the token ran
    logits: Tensor  # [n, V] the token's logits after its last loop
    likeliest: Integers  # [n] the likeliest next token by these logits


class _HeldExit(NamedTuple):
    """Hold the exit of a draft, which counts once the draft is accepted."""

    logits: Tensor  # [V]
    likeliest: int


class Decoder(TextRows):
    """Decode rows of text under exit policies; the caller decides which text is in which row.

    A row has an oldest token, whose exit is due, and drafts after it. A token in flight has a slot, computed from its
    row and its position; its policy follows the token under its slot.
    """

    def __init__(self, model: LoopedModel, rows: int, cache: CacheMode) -> None:
        super().__init__(model, rows, cache, cache != "full")
        drafts = cache != "latest" and not model.head_attends  # else a token is read as its exit leaves it
        self._most = min(MAX_IN_FLIGHT, model.num_loops) if drafts else 1
        self._oldest: Integers = np.zeros(rows, dtype=np.int64)  # the position of each row's oldest token
        self._ends: Integers = np.zeros(rows, dtype=np.int64)  # tokens that a row may have
        self._loops: Integers = np.zeros(rows * self._most, dtype=np.int64)  # [slots] loops that the token has run
        self._positions: Integers = np.zeros_like(self._loops)  # [slots]
        self._next: Integers = np.full_like(self._loops, -1)  # [slots] the token's latest proposal for the next token
        self._since: Integers = np.zeros_like(self._loops)  # [slots] the first loop of this proposal
        self._held: dict[int, _HeldExit] = {}  # by slot
        self._running: set[int] = set()  # rows
        self._groups: list[ExitDecision] = []  # one for each policy
        self._group_of: NDArray[np.object_] = np.full(rows, None, dtype=object)
        self._gain = DraftGain(model)

    def prefill(self, row: int, prompt: Integers, policy: ExitPolicy, budget: int = 0) -> None:
        """Start a row with its prompt, which runs in the next steps; at most `budget` tokens may follow it."""
        self._start_row(row, prompt, budget)
        self._oldest[row], self._ends[row] = len(prompt) - 1, len(prompt) + budget
        self._group_of[row] = self._group(policy, row)
        self._running.add(row)
        self._begin(np.array([row]))

    @torch.inference_mode()
    def append(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """Continue the rows whose token has exited with these tokens; a draft that equals its row's token is kept."""
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
        """Finish a row, and drop its drafts."""
        self._running.remove(row)
        self._cut(np.array([row]), np.zeros(1, dtype=np.int64))

    @torch.inference_mode()
    def step(self) -> Exits:
        """Run one loop of every token in flight; return the rows whose oldest token exits, to continue with `append`.

        If all tokens are at the same loop, several loops run at once, up to the first at which a token may exit.
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
        # one call of the head for all: reading its weights takes most of the time
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
        """The exits of the rows' oldest tokens, now and held ones; exits of drafts are held from now on."""
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
        """[n] which slots exit (`readers`' slots come first), and the likeliest token of every slot."""
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
        """[n] the next token that each slot proposes: the likeliest; a subclass may draw it."""
        return likeliest

    def _follow(self, slots: Integers, proposed: Integers, exits: NDArray[np.bool_]) -> None:
        """Compare drafts with the proposals of the tokens before them: keep drafts that agree, replace the others."""
        changed = self._next[slots] != proposed
        self._next[slots[changed]] = proposed[changed]
        self._since[slots[changed]] = self._loops[slots[changed]]
        rows, positions = slots // self._most, self._positions[slots]
        others = ~(exits & (positions == self._oldest[rows])) & (self._token_at(rows, positions + 1) != proposed)
        if others.any():
            slots = slots[others][np.argsort(positions[others], kind="stable")]  # older tokens come first
            slots = slots[np.unique(slots // self._most, return_index=True)[1]]
            self._cut(slots // self._most, self._positions[slots] + 1)
            self._draft(slots)

    def _draft(self, slots: Integers) -> None:
        """Start drafts from the proposals of rows' newest tokens, where drafting pays and a slot is free."""
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
        """[n] the tokens of rows at these positions; -1 where the row is shorter."""
        there = positions < self._lengths[rows]
        return np.where(there, self._tokens[rows, np.where(there, positions, 0)], -1)

    def _slots(self, rows: Integers, positions: Integers) -> Integers:
        return rows * self._most + positions % self._most

    def _places(self, slots: Integers) -> tuple[Integers, Integers, Integers]:
        """The rows, positions and loops of slots."""
        return slots // self._most, self._positions[slots], self._loops[slots]

    def _loops_ahead(self, active: Integers) -> int:
        """How many loops run before a policy has to decide."""
        loops = self._loops[active]
        if loops.min() != loops.max():
            return 1
        exits = [self._depth, *(group.first_exit for group in self._groups if len(group.rows))]
        return max(1, min(exits) - int(loops[0]))

    def _ask(self, group: ExitDecision) -> NDArray[np.bool_]:
        """[n] which slots exit now, for a policy that reads no logits."""
        return group.exits(self._loops[group.rows], None, partial(self._pooled, *self._places(group.rows)))

    def _group(self, policy: ExitPolicy, row: int) -> ExitDecision:
        """The decision for this row, shared with other rows under the same policy."""
        for group in self._groups:
            if group.policy is policy:
                return group
        self._group_of[row] = None
        in_use = self._group_of.tolist()
        self._groups = [group for group in self._groups if group in in_use]  # unused decisions hold large logits
        self._groups.append(ExitDecision(self._model, policy))
        return self._groups[-1]

    def _begin(self, rows: Integers) -> None:
        """Start the last tokens of rows at loop 0, and let their policies follow them."""
        slots = self._slots(rows, self._lengths[rows] - 1)
        self._loops[slots], self._next[slots], self._positions[slots] = 0, -1, self._lengths[rows] - 1
        for group in self._groups:
            group.admit(slots[self._group_of[rows] == group])

    def _backfill(self, rows: Integers) -> None:
        """Write the keys and values that rows' oldest tokens, which have exited, leave in deeper loops."""
        if self._cache == "full":
            return
        written = self._oldest[rows] + 1
        prefilling = written == self._prompts[rows]
        prompts = rows[prefilling]
        for loop in range(2, self._depth + 1):  # loops that the last token of a prompt did not run
            if len(short := prompts[self._cached[prompts, loop] < self._prompts[prompts]]):
                self._run_loop(short, np.full(len(short), loop), upto=self._prompts[short])
        if self._cache == "propagate":
            decoded = rows[~prefilling]
            self._propagate(self._slots(decoded, self._oldest[decoded]))
        for counted in (self._cached, self._head_cached):
            counted[rows] = np.maximum(counted[rows], written[:, None])

    def _propagate(self, slots: Integers) -> None:
        """Copy the keys and values of the exit loop of these tokens to their deeper loops."""
        rows, positions, loops = self._places(slots)
        for loop in set(loops.tolist()):
            own = loops == loop
            none, ones = np.zeros_like(rows[own]), np.ones_like(rows[own])
            places = self._indices(rows[own], none, positions[own], ones)
            self._kv_cache.propagate(loop, range(loop + 1, self._depth + 1), places)

    def _pass_held(self) -> None:
        """Let the tokens after an exited draft run a deeper loop once the tokens before the draft have run it."""
        if self._cache == "propagate":
            drafts = np.array([*self._held])
            for draft in drafts[np.argsort(self._positions[drafts])] if len(drafts) else ():
                row, position, loop = (int(each[0]) for each in self._places(draft[None]))
                deeper = self._cached[row, loop + 1 :]
                deeper[deeper == position] += 1


def _prefill_portions(missing: Integers) -> Iterator[Integers]:
    """Split the missing tokens of rows into portions: as many whole rows as fit, or a part of one row."""
    while missing.any():
        fits = missing.cumsum() <= max(_CHUNK, len(missing))
        counts = np.where(fits, missing, 0)
        if not counts.any():
            first = int(np.flatnonzero(missing)[0])
            counts[first] = min(_CHUNK, missing[first])
        yield counts
        missing = missing - counts


def reordered(values: Tensor, order: Integers) -> Tensor:
    """values[order], without a copy if the order is the identity."""
    if len(order) == len(values) and np.array_equal(order, np.arange(len(values))):
        return values
    return values.index_select(0, upload(order, values.device))
