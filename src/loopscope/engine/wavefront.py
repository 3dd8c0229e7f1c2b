"""How is full depth's text written sooner? By a wavefront over depth: several tokens of a row, each at its own loop.

After its first loops, the newest token proposes the next token: a draft, which begins at once, while the tokens before
it go on. A step runs all of them some loops deeper: the oldest token reaches full depth and is verified, the newest
token drafts the next, and no token waits for another:

    step      1    2    3    4    5    6    7      the loop that each token runs, at a depth of 4
    token a   1    2    3    4                     proposes b, after its last loop finally
    token b        1    2    3    4                drafted by a's loop 1; it stays if a's loop 4 proposes b, too
    token c             1    2    3    4
    token d                  1    2    3    4

This is exact. At each loop, a token attends to the keys of that loop of all tokens before it, which an earlier step
computed. If full depth chooses a different token than the draft, LoopScope drops the draft and all tokens after it. In
a looped model the draft's loops are part of its verification, so no loop of a token that stays runs twice.

The spacing of the tokens (`draft_spacing.py`) depends on measured speed; the text does not depend on it. At a spacing
of all loops no token is drafted, and all rows run full depth together.

Shapes: n tokens that are read, T loops, V vocabulary.
"""

import time
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loopscope.engine.decoder import NO_ROWS, TextRows, reordered
from loopscope.engine.draft_spacing import MAX_MEASURED, DraftSpacing, Spacing
from loopscope.engine.exit_decision import DecisionRows, ExitDecision, exits_and_answers
from loopscope.engine.logit_signals import Integers, check_answers
from loopscope.engine.requests import require_vocabulary
from loopscope.engine.sampling import Sampling, race_times, race_winners
from loopscope.models.looped_model import LoopedModel
from loopscope.policy import ExitPolicy


class ConfirmedToken(NamedTuple):
    """Hold the token that full depth chooses after a row's last token."""

    row: int
    token: int
    loops: int  # that the token ran; in lossless text all of them
    logits: Tensor  # [V]
    accepted: bool  # whether the token was drafted before
    taken_back: int  # drafts that were dropped since the previous confirmed token


@dataclass(eq=False)
class _RowInFlight:
    """Hold the tokens of a row that full depth has not confirmed yet, and the decision that drafts them."""

    number: int  # of its random draws
    budget: int  # tokens after the prompt
    policy: ExitPolicy
    decision: ExitDecision | None  # of a policy that reads a signal
    confirmed: int  # tokens that full depth has confirmed, with those of the prompt
    drafted_at: list[int] = field(default_factory=list)  # the loops after which the tokens in flight were drafted
    followed: set[int] = field(default_factory=set)  # the positions that the policy has followed
    answers: dict[int, dict[int, int]] = field(default_factory=dict)  # by position, the proposal of every loop
    times: dict[int, Tensor] = field(default_factory=dict)  # [V] by position, if tokens are drawn
    fallen: int = 0

    def cut(self, length: int) -> None:
        """Drop the drafts from this position on."""
        del self.drafted_at[length - self.confirmed :]
        self.followed = {position for position in self.followed if position < length}
        self.answers = {position: each for position, each in self.answers.items() if position < length}


class _Reached(NamedTuple):
    """Hold tokens that have just reached some loop, and may be read there."""

    rows: Integers  # [n]
    positions: Integers  # [n]
    loops: Integers  # [n]

    def at(self, chosen: Integers | NDArray[np.bool_] | slice) -> "_Reached":
        return _Reached(*(each[chosen] for each in self))

    def then(self, others: "_Reached") -> "_Reached":
        return _Reached(*(np.concatenate(pair) for pair in zip(self, others, strict=True)))


class Wavefront(TextRows):
    """Write rows of lossless text by a wavefront over depth."""

    def __init__(self, model: LoopedModel, rows: int, stop: Collection[int], sampling: Sampling) -> None:
        super().__init__(model, rows, "full", one_head_cache=True)
        self._stop, self._sampling = stop, sampling
        self._flights: dict[int, _RowInFlight] = {}
        self._decisions: list[ExitDecision] = []  # one for each policy that reads a signal
        self._spacing = DraftSpacing(model)
        self.cost = 0.0
        """The estimated cost of the text, in tokens at full depth."""

    def begin(self, row: int, prompt: Integers, policy: ExitPolicy, budget: int, number: int) -> None:
        """Start a row with its prompt, which runs in the next steps; at most `budget` tokens follow."""
        self._start_row(row, prompt, budget)
        decision = None if policy.fixed_depth is not None else self._decision(policy)
        self._flights[row] = _RowInFlight(number, budget, policy, decision, len(prompt))

    def end(self, row: int) -> int:
        """Finish a row; return the number of its drafts that full depth did not check."""
        self._ask_no_more(row)
        flight = self._flights.pop(row)
        used = [each.decision for each in self._flights.values()]
        self._decisions = [each for each in self._decisions if each in used]  # unused decisions would keep logits
        return len(flight.drafted_at)

    @torch.inference_mode()
    def advance(self) -> list[ConfirmedToken]:
        """Run every token in flight some loops deeper; return the tokens that full depth confirms now."""
        fixed = [flight.policy.fixed_depth for flight in self._flights.values()]
        spacing = self._spacing.choose(len(fixed), min(depth or 1 for depth in fixed), None in fixed)
        start, before = time.perf_counter(), self.token_loops
        rows, loops = self._in_flight(spacing.loops)
        ahead = int((spacing.loops - loops % spacing.loops).min())
        self._run_loop(rows, loops + 1, ahead)
        run, tokens = time.perf_counter(), (self.token_loops - before) // ahead
        reached = _Reached(rows, self._cached[rows, loops + ahead] - 1, loops + ahead)
        self._ask_about_new(reached.at(loops == 0), spacing)
        reads, logits, likeliest = self._read(reached, spacing)
        tokens_after = self._next_tokens(reads, logits, likeliest) if len(reads.rows) else []
        confirmed = self._settle(reads, tokens_after, logits)
        if tokens <= MAX_MEASURED:
            self._measure(ahead, tokens, bool((loops == 0).any()), len(reads.rows), (start, run, time.perf_counter()))
        return confirmed

    def _in_flight(self, spacing: int) -> tuple[Integers, Integers]:
        """Rows, and the loops that some token of each row has run and continues from.

        New tokens begin when all others have reached a multiple of the spacing: then one call of the head reads all
        tokens.
        """
        rows = np.fromiter(self._flights, dtype=np.int64)
        reached = self._cached[rows]
        reached[:, 0] = self._lengths[rows]
        place, loops = np.nonzero(reached[:, :-1] > reached[:, 1:])
        if (loops % spacing).any():
            place, loops = place[loops > 0], loops[loops > 0]
        return rows[place], loops

    def _ask_about_new(self, begun: _Reached, spacing: Spacing) -> None:
        """Let the policies follow the tokens that have just begun, unless no token is drafted."""
        if spacing == self._spacing.full_depth:
            for decision in self._decisions:
                decision.keep(np.zeros(len(decision.rows), dtype=bool))
            return
        for row, position in zip(begun.rows.tolist(), begun.positions.tolist(), strict=True):
            flight = self._flights[row]
            if flight.decision is not None and self._may_draft(row, position):
                flight.followed.add(position)
                flight.decision.admit(np.array([row]))

    def _read(self, reached: _Reached, spacing: Spacing) -> tuple[_Reached, Tensor, Integers]:
        """The tokens that are read now, their logits [n, V] and the likeliest next token [n].

        At full depth these are all tokens; before it, tokens that draft, and with an early spacing tokens that have
        drafted.
        """
        last = reached.positions == self._lengths[reached.rows] - 1
        final = reached.loops == self._depth
        inside = ~final & (reached.loops % spacing.loops == 0) & (spacing != self._spacing.full_depth)
        readers, exited = self._ask(reached, last)
        drafting = [
            inside[place]
            and last[place]
            and flight.decision is None
            and loop >= (flight.policy.fixed_depth or 0)
            and self._may_draft(row, position)
            for place, (row, position, loop) in enumerate(zip(*(each.tolist() for each in reached), strict=True))
            for flight in (self._flights[row],)
        ]
        others = final | np.array(drafting, dtype=bool) | (inside & ~last & spacing.early)
        others[exited] = True
        deciding = np.concatenate([NO_ROWS, *(places for _, places in readers)])
        others[deciding] = False
        reads = reached.at(np.concatenate((deciding, np.flatnonzero(others))))
        if self._model.head_attends:  # the head reads a draft after the tokens before it, as far as it has cached them
            early = reads.at(reads.loops < self._depth)
            self._head_cached[early.rows, early.loops] = early.positions
        logits, rows, first = self._logits(*reads), [], 0
        for decision, places in readers:
            part = slice(first, first + len(places))
            pooled = partial(self._pooled, *reads.at(part))
            rows.append(DecisionRows(decision, reads.loops[part], logits[part], pooled))
            first = part.stop
        exits, likeliest = exits_and_answers(rows, logits)
        for (decision, _), gone in zip(readers, exits, strict=True):
            decision.keep(~gone)
        found = np.flatnonzero(np.concatenate((*exits, np.ones(len(reads.rows) - first, dtype=bool))))
        return reads.at(found), reordered(logits, found), likeliest[found]

    def _ask(self, reached: _Reached, last: NDArray[np.bool_]) -> tuple[list[tuple[ExitDecision, Integers]], Integers]:
        """Decisions that read logits, with the indices of their rows' last tokens; and tokens that exit otherwise."""
        place_of = np.full(len(self._lengths), -1)
        place_of[reached.rows[last]] = np.flatnonzero(last)
        readers, exited = [], [NO_ROWS]
        for decision in self._decisions:
            decision.keep(reached.loops[place_of[decision.rows]] < self._depth)
            places = place_of[decision.rows]
            if decision.reads_logits:
                readers.append((decision, places))
            elif len(places):
                newest = reached.at(places)
                exits = decision.exits(newest.loops, None, partial(self._pooled, *newest))
                decision.keep(~exits)
                exited.append(places[exits])
        return readers, np.concatenate(exited)

    def _next_tokens(self, reads: _Reached, logits: Tensor, likeliest: Integers) -> list[int]:
        """The next token by each row of logits [n, V]: the likeliest, or the winner of its race."""
        require_vocabulary(self._model, logits)
        if self._sampling.temperature == 0:
            return check_answers(likeliest).tolist()
        times = []
        for row, position in zip(reads.rows.tolist(), reads.positions.tolist(), strict=True):
            flight = self._flights[row]
            if position not in flight.times:
                flight.times[position] = race_times(
                    self._sampling, flight.number, position, logits.shape[1], self._device
                )
            times.append(flight.times[position])
        return race_winners(logits.float(), torch.stack(times), self._sampling)

    def _settle(self, reads: _Reached, tokens: list[int], logits: Tensor) -> list[ConfirmedToken]:
        """Start, keep or drop drafts by the tokens that were read now; return the tokens that full depth confirms."""
        confirmed = []
        order = np.lexsort((reads.positions, reads.rows))  # older tokens first: a dropped draft takes newer ones along
        cut_row = -1
        for place in order.tolist():
            row, position, loop = (int(each[place]) for each in reads)
            if row == cut_row:
                continue
            flight, token, length = self._flights[row], tokens[place], int(self._lengths[row])
            flight.answers.setdefault(position, {})[loop] = token
            stands = position + 1 < length and bool(self._tokens[row, position + 1] == token)
            if not stands and position + 1 < length:
                flight.fallen += length - position - 1
                flight.cut(position + 1)
                self._take_back(row, position + 1)
                self._ask_no_more(row)
                cut_row = row
            if loop == self._depth:
                confirmed.append(self._confirm(row, token, stands, logits[place]))
            elif not stands and token not in self._stop and self._may_draft(row, position):
                self._add_tokens(np.array([row]), [token])
                flight.drafted_at.append(loop)
        return confirmed

    def _confirm(self, row: int, token: int, stands: bool, logits: Tensor) -> ConfirmedToken:
        """Confirm the token of a row that full depth chose; `stands` if it was drafted already."""
        flight = self._flights[row]
        position, loops = flight.confirmed - 1, self._depth
        if stands:
            loops = flight.drafted_at.pop(0)
        else:
            self._add_tokens(np.array([row]), [token])
        answers = flight.answers.pop(position)
        flight.times.pop(position, None)
        if flight.decision is None:
            self._spacing.count(answers, token, flight.policy.fixed_depth or 1)
        elif position in flight.followed:
            flight.followed.remove(position)
            self._spacing.count_begun(loops)
        self._spacing.count_token()
        flight.confirmed += 1
        fallen, flight.fallen = flight.fallen, 0
        return ConfirmedToken(row, token, self._depth, logits, stands, fallen)

    def _may_draft(self, row: int, position: int) -> bool:
        """Whether this token may draft its successor: the budget has room for a further token after it.

        A head that attends would have to read the whole prompt for the draft.
        """
        written = int(self._lengths[row] - self._prompts[row])
        in_prompt = position < self._prompts[row]
        return written + 1 < self._flights[row].budget and not (in_prompt and self._model.head_attends)

    def _decision(self, policy: ExitPolicy) -> ExitDecision:
        for decision in self._decisions:
            if decision.policy is policy:
                return decision
        self._decisions.append(ExitDecision(self._model, policy))
        return self._decisions[-1]

    def _ask_no_more(self, row: int) -> None:
        """Let no policy follow the last token of this row any more."""
        for decision in self._decisions:
            decision.keep(decision.rows != row)

    def _measure(self, ahead: int, tokens: int, begins: bool, read: int, times: tuple[float, float, float]) -> None:
        """Record the time of a step on the CPU; on other devices, measuring would wait for the device."""
        start, run, end = times
        seconds, full = self._spacing.seconds, self._spacing.token_seconds(self._spacing.full_depth, len(self._flights))
        if self._device.type == "cpu":
            seconds.see_loops(ahead, tokens, begins, run - start)
            seconds.see_rest(read, end - run)
            self.cost += (end - start) / full
        else:
            self.cost += seconds.estimate(ahead, tokens, read) / full
