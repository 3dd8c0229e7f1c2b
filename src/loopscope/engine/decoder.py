"""How do rows of text go on token by token, each token as deep as its policy wants? A batch of rows and a KV cache.

Every step is one loop of everybody: a row whose token has just exited begins its next token while others go deeper.
A token that exits early leaves no keys and values in the deeper loops, where later tokens would look for them:

- `full`: they are made when somebody needs them, for all tokens that lack them at once; nothing differs from a run in
  which every token goes through every loop;
- `propagate`: those of the exit loop stand in for them;
- `latest`: there is one place for all loops, which holds what a token's last loop left.

With `propagate` and `latest` a prompt goes through all loops before the first token after it, and what a head that
attends keeps of a token is from the loop at which it was read last.

Shapes: R rows of the cache, B of a step, T loops, D width, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loopscope.engine.logit_stats import (
    LOGIT_SIGNALS,
    StreamedSignals,
    check_answers,
    check_finite,
    check_logits,
    likeliest_classes,
)
from loopscope.errors import UserError
from loopscope.exits.exit_state import ExitState
from loopscope.models import LoopedModel, LoopState
from loopscope.models.device import upload
from loopscope.models.kv_cache import AppendingRows, KVCache
from loopscope.models.layout import Layout, count_up

CacheMode = Literal["full", "propagate", "latest"]
CACHE_MODES: tuple[CacheMode, ...] = ("full", "propagate", "latest")
Integers = NDArray[np.int64]


class Decoder:
    """The rows that are being continued; who they are is the caller's business."""

    def __init__(self, model: LoopedModel, exit_state: ExitState, rows: int, cache: CacheMode) -> None:
        self._model, self._exit_state, self._cache, self._depth = model, exit_state, cache, exit_state.num_loops
        self._device = next(model.parameters()).device
        self._kv_cache = KVCache(1, 64, latest_only=cache == "latest")
        self._head_cache = KVCache(1, 64, latest_only=cache != "full")  # of a head that attends
        self._tokens: Integers = np.zeros((rows, 64), dtype=np.int64)
        self._lengths: Integers = np.zeros(rows, dtype=np.int64)
        self._loops: Integers = np.zeros(rows, dtype=np.int64)  # that the last token has been through
        self._cached: Integers = np.zeros((rows, self._depth + 1), dtype=np.int64)  # tokens through each loop
        self._head_cached: Integers = np.zeros_like(self._cached)  # tokens that the head has read at each loop
        self._prefilling: NDArray[np.bool_] = np.zeros(rows, dtype=bool)  # no token after the prompt yet
        self._active: Integers = np.empty(0, dtype=np.int64)  # the active rows, in the order of the exit state
        self._kind: type[LoopState] = LoopState
        streamed = [name for name in exit_state.signals if name in LOGIT_SIGNALS]
        self._streamed = StreamedSignals(streamed) if streamed else None
        self._sources = exit_state.sources(streamed)
        self.token_loops = 0
        """Tokens times loops that were run, those for the cache included."""

    @property
    def cache_bytes(self) -> int:
        return self._kv_cache.nbytes + self._head_cache.nbytes

    def prefill(self, row: int, prompt: Integers) -> None:
        """A row begins with its prompt, which runs with the next steps."""
        self._grow(len(prompt), row + 1)
        self._tokens[row, : len(prompt)] = prompt
        self._lengths[row], self._loops[row], self._prefilling[row] = len(prompt), 0, True
        self._cached[row] = self._head_cached[row] = 0
        self._active = np.append(self._active, row)
        self._exit_state.admit(1)

    @torch.inference_mode()
    def append(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """Rows whose token has exited go on with these tokens."""
        index = np.asarray(rows, dtype=np.int64)
        self._backfill(index)
        self._grow(int(self._lengths[index].max()) + 1, 0)
        self._tokens[index, self._lengths[index]] = tokens
        self._lengths[index] += 1
        self._loops[index] = 0
        self._prefilling[index] = False
        self._active = np.concatenate((self._active, index))
        self._exit_state.admit(len(index))

    @torch.inference_mode()
    def step(self) -> tuple[Integers, Integers, Tensor]:
        """One loop of every active row; the rows whose token exits, the loops it took and the logits [n, V] there.

        Those rows are not active any more, until they go on.
        """
        rows = self._active
        self._loops[rows] += 1
        state, place = self._run_loop(rows, self._loops[rows])
        pooled = _reordered(self._model.pooled(state, state.lengths - 1), place)
        loops, logits, now = self._loops[rows], None, {}
        if self._streamed is not None or not {"logits", "predictions"}.isdisjoint(self._sources):
            logits = self._logits(rows, pooled)
        computed = {} if self._streamed is None or logits is None else self._streamed.values(rows, loops, logits)
        for source in self._sources:
            if source == "logits" and logits is not None:
                now[source] = check_logits(logits.float().cpu().numpy())
            elif source == "predictions" and logits is not None:
                now[source] = check_answers(likeliest_classes(logits).cpu().numpy())
            else:
                outputs = pooled if source == "hidden" else self._model.halt(pooled)
                if outputs is None:
                    raise UserError("The model has no gate, so it cannot be run with the readout 'gate'.")
                what = "states" if source == "hidden" else "halt logits"
                now[source] = check_finite(outputs.float().cpu().numpy(), what)
        stops = self._exit_state.stops(loops, now, computed)
        self._exit_state.keep(~stops)
        leaving, exits = np.flatnonzero(stops), rows[stops]
        self._active = rows[~stops]
        if logits is None:
            exit_logits = self._logits(exits, _reordered(pooled, leaving))
        else:
            exit_logits = _reordered(logits, leaving)
        return exits, loops[stops], exit_logits

    def _run_loop(self, rows: Integers, loops: Integers) -> tuple[LoopState, Integers]:
        """Takes rows to these loops, with all their tokens that lack them; where each row lies in the state."""
        counts = self._lengths[rows] - self._cached[rows, loops]
        order = np.lexsort((counts, loops))
        rows, loops, counts = rows[order], loops[order], counts[order]
        indices, fresh = self._cache_indices(rows, counts), int((loops == 1).sum())
        states = []
        if fresh:
            states.append(self._embed_new(rows[:fresh], counts[:fresh], indices[: counts[:fresh].sum()]))
        if fresh < len(rows):
            places = indices[counts[:fresh].sum() :]
            states.append(self._stored_states(counts[fresh:], loops[fresh:] - 1, places))
        state = states[0] if len(states) == 1 else self._kind.join(states)
        cache = AppendingRows(self._kv_cache, rows, self._cached[rows, loops], loops)
        state = self._model.step(state.with_cache(cache))
        self.token_loops += int(counts.sum())
        for loop, part in _loop_slices(counts, loops):
            self._kv_cache.write_states("hidden", loop, indices[part], state.hidden[part])
        self._cached[rows, loops] = self._lengths[rows]
        return state, np.argsort(order)

    def _embed_new(self, rows: Integers, counts: Integers, indices: Tensor) -> LoopState:
        """Tokens that have not been through anything."""
        none = np.zeros_like(rows)
        tokens = self._tokens.flatten()[self._host_indices(rows, counts)]
        cache = AppendingRows(self._kv_cache, rows, self._cached[rows, none], none)
        layout = Layout.from_host(counts, self._device, cache=cache)
        state = self._model.begin_packed(upload(tokens, self._device), layout)
        self._kind = type(state)
        if by_row := sorted({*self._kind._tensors()} - {*self._kind.tokenwise, "loop"}):
            raise UserError(
                f"The state's '{by_row[0]}' goes by row, and what is kept of a row that is continued goes by token; "
                "name it in `tokenwise`, or do not declare kv_cache."
            )
        for name in self._extra_states:
            self._kv_cache.write_states(name, 0, indices, getattr(state, name))
        self._cached[rows, 0] = self._lengths[rows]
        return state

    def _stored_states(self, counts: Integers, loops: Integers, indices: Tensor) -> LoopState:
        """The last `counts` tokens of rows, which lie at `indices`, as these loops left them."""
        layout, cache = Layout.from_host(counts, self._device), self._kv_cache
        extra = {name: cache.read_states(name, 0, indices) for name in self._extra_states}
        hidden = [cache.read_states("hidden", loop, indices[part]) for loop, part in _loop_slices(counts, loops)]
        return self._kind(hidden=torch.cat(hidden), layout=layout, loop=upload(loops, self._device), **extra)

    def _logits(self, rows: Integers, pooled: Tensor) -> Tensor:
        """[n, V] what the last tokens of rows say now."""
        if not len(rows) or not self._model.head_attends:
            return self._model.predict(pooled)
        loops = self._loops[rows]
        order = np.lexsort((self._lengths[rows] - self._head_cached[rows, loops], loops))
        rows, loops = rows[order], loops[order]
        counts = self._lengths[rows] - self._head_cached[rows, loops]
        cache = AppendingRows(self._head_cache, rows, self._head_cached[rows, loops], loops)
        state = self._stored_states(counts, loops, self._cache_indices(rows, counts)).with_cache(cache)
        read = self._model.head_input(state, state.lengths - 1)
        self._head_cached[rows, loops] = self._lengths[rows]
        return self._model.predict(_reordered(read, np.argsort(order)))

    def _backfill(self, rows: Integers) -> None:
        """What the last tokens of rows, which have exited, leave to those after them."""
        if self._cache == "full":
            return
        self._finish_prefill(rows[self._prefilling[rows]])
        if self._cache == "propagate":
            decoded = rows[~self._prefilling[rows]]
            for loop in set(self._loops[decoded].tolist()):
                exited = decoded[self._loops[decoded] == loop]
                deeper = range(loop + 1, self._depth + 1)
                self._kv_cache.propagate(loop, deeper, self._cache_indices(exited, np.ones_like(exited)))
        self._cached[rows] = self._head_cached[rows] = self._lengths[rows, None]

    def _finish_prefill(self, rows: Integers) -> None:
        """Takes prompts through the loops that their last token did not need."""
        for loop in range(2, self._depth + 1):
            if len(short := rows[self._cached[rows, loop] < self._lengths[rows]]):
                self._run_loop(short, np.full(len(short), loop))

    def _cache_indices(self, rows: Integers, counts: Integers) -> Tensor:
        """Where the last `counts` tokens of rows lie in the cache."""
        return upload(self._host_indices(rows, counts), self._device)

    def _host_indices(self, rows: Integers, counts: Integers) -> Integers:
        return count_up(rows * self._kv_cache.capacity + self._lengths[rows] - counts, counts)

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


def _loop_slices(counts: Integers, loops: Integers) -> Iterator[tuple[int, slice]]:
    """The tokens of rows of so many tokens at each loop; the rows are sorted by loop."""
    first = 0
    for loop in np.unique(loops).tolist():
        last = first + int(counts[loops == loop].sum())
        yield loop, slice(first, last)
        first = last


def _reordered(values: Tensor, order: Integers) -> Tensor:
    """values[order], which all of them in their own order are already."""
    if np.array_equal(order, np.arange(len(values))):
        return values
    return values.index_select(0, upload(order, values.device))
