"""How is text generated at adaptive depth? Prompts in, tokens out as they are ready, with the loops that each took.

`lossless` text is full depth's: what a policy lets exit early is a draft, from which the text goes on, and which full
depth looks at later, several tokens at once. The drafts' own states are where that begins, so that none of their work
is done twice; the first that full depth would not have said takes back what follows it.

Shapes: V vocabulary.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from loopscope.arguments import as_count, as_token_row, check_kind, check_list
from loopscope.engine.decoder import CACHE_MODES, CacheMode, Decoder, Exits
from loopscope.engine.draft_length import DraftLength
from loopscope.engine.request_batch import require_vocabulary
from loopscope.engine.sampling import Draft, Sampling, draw_drafts, greedy_tokens, next_tokens, verify, verify_greedy
from loopscope.errors import UserError
from loopscope.exits import ExitPolicy
from loopscope.exits.exit_state import ExitState, check_drafts
from loopscope.exits.scope import Scope
from loopscope.models import LoopedModel
from loopscope.models.device import upload
from loopscope.models.layout import count_up

Integers = NDArray[np.int64]
MOST_ROWS = 1 << 16
"""Texts that are written at a time, where it is not known how many there are."""


@dataclass(frozen=True, eq=False)
class Prompt:
    key: Any  # comes back with every token
    tokens: Integers
    forced: Integers | None = None  # what is said next, whatever the model would say: to see what it thinks of it
    policy: ExitPolicy | None = None  # of this prompt alone
    number: int | None = None  # of its random numbers (default: its place among the prompts)


@dataclass(frozen=True, eq=False)
class Token:
    """One token as it comes."""

    key: Any
    token: int
    loops: int  # that it took until it was said
    finish_reason: Literal["stop", "length"] | None  # why this is the last one
    logits: Tensor | None  # [V], where they were asked for
    accepted: bool = False  # of lossless text: a draft, said after `loops` of them, that full depth confirmed
    taken_back: int = 0  # drafts that this token stands in the place of, or that came after it


@dataclass
class GenerationStats:
    """What generating took."""

    tokens: int = 0
    loops: int = 0  # over all tokens
    token_loops: int = 0  # that were run: prompts, and what the cache needed, included
    prompt_loops: int = 0  # those of them that were tokens of prompts
    drafted: int = 0  # of lossless text: tokens that were said early
    accepted: int = 0  # those that full depth says, too
    drafting_cost: float = 0.0  # of lossless text: what it took by estimate, in tokens at full depth
    cache_bytes: int = 0


@dataclass(eq=False)
class Completion:
    key: Any
    tokens: list[int] = field(default_factory=list)
    loops: list[int] = field(default_factory=list)
    finish_reason: str = ""
    drafted: int = 0  # of lossless text: tokens that were said early
    accepted: int = 0  # those that full depth says, too


def stream(
    model: LoopedModel,
    prompts: Iterable[Prompt],
    policy: ExitPolicy | None = None,
    *,
    max_new_tokens: int = 128,
    stop: Collection[int] = (),
    stopping_criterion: Callable[[Any, int], bool] | None = None,
    cache: CacheMode = "full",
    sampling: Sampling | None = None,
    lossless: bool = False,
    batch_size: int = 8,
    with_logits: bool = False,
    stats: GenerationStats | None = None,
) -> Iterator[Token]:
    """Tokens as they are ready. Without a policy every token goes through all loops.

    A text ends with a token in `stop`, or when `stopping_criterion(key, token)`, which is asked of every token, says
    so. A prompt that is finished gives its place to the next. Nothing of a row depends on its neighbours, not even what
    is drawn: a prompt has random numbers of its own. A prompt's own policy is taken before `policy`.

    With `lossless`, text is what full depth says, or, where it is drawn, with the same probabilities: the policy says
    which tokens are drafts, and a token comes when full depth has confirmed it. That is exact up to rounding: several
    tokens are verified together, and where two are equally likely up to that, which is more frequent below float32, the
    other may be said.
    """
    check_kind(model, LoopedModel, "The model", "a LoopedModel, as load_model gives them")
    check_kind(policy, (ExitPolicy, type(None)), "The policy", "an ExitPolicy")
    check_kind(sampling, (Sampling, type(None)), "sampling", "a Sampling")
    check_kind(lossless, bool, "lossless", "True or False")
    check_list(prompts, "prompts", "a list of prompts")
    for name, value in (("max_new_tokens", max_new_tokens), ("batch_size", batch_size)):
        as_count(value, name)
    batch_size = min(batch_size, max(1, len(prompts)) if isinstance(prompts, Sized) else MOST_ROWS)
    stop = {as_count(token, "A token that ends a text", 0) for token in check_list(stop, "stop", "a list of tokens")}
    if cache not in CACHE_MODES:
        raise UserError(f"There is no cache '{cache}'; choose one of {', '.join(CACHE_MODES)}.")
    if lossless and cache != "full":
        raise UserError(f"Lossless text needs the keys and values of every loop: the cache 'full', not '{cache}'.")
    model.require_evaluation()
    model.require("causal", "Writing text")
    model.require("kv_cache", "Writing text")
    policies = _Policies(model, policy or ExitPolicy("fixed", model.num_loops), cache, lossless)
    sampling, stats = sampling or Sampling(), stats or GenerationStats()
    if isinstance(prompts, Sequence):
        for prompt in prompts:  # before the first token, not when its turn comes
            policies.of(prompt)
    decoder = Decoder(model, batch_size, cache, lossless)
    waiting = enumerate(prompts)
    rows: dict[int, _Row] = {}
    while True:
        for row in sorted(set(range(batch_size)) - set(rows)):
            if (following := next(waiting, None)) is None:
                break
            number, prompt = following
            own = policies.of(prompt)
            number = number if prompt.number is None else _draws_number(prompt.number)
            rows[row] = _Row(prompt, token_budget(model, prompt, max_new_tokens), sampling, number)
            decoder.prefill(row, rows[row].tokens, own, ask=not lossless)
            if lossless:
                group = decoder.exit_group(row)
                rows[row].draft_length = DraftLength(model, group.reads_logits, group.first_exit)
        if not rows:
            return
        exits = decoder.step()
        if not len(exits.rows):
            continue
        require_vocabulary(model, exits.logits)
        exits = exits._replace(logits=exits.logits.float())
        confirmed = (
            _confirmed(model, decoder, rows, exits, stop, sampling)
            if lossless
            else _exited_tokens(rows, exits, sampling)
        )
        unfinished = []
        for row, tokens, loops, first, drafted, cost in confirmed:
            stats.drafting_cost += cost
            for place, token in enumerate(tokens):
                finish_reason = rows[row].add(token, stop)
                if stopping_criterion is not None and stopping_criterion(rows[row].prompt.key, token):
                    finish_reason = "stop"
                last = finish_reason is not None or place + 1 == len(tokens)
                taken_back = drafted - min(place + 1, len(tokens) - 1) if last else 0
                stats.tokens, stats.loops = stats.tokens + 1, stats.loops + loops[place]
                stats.accepted += (stood := place + 1 < len(tokens))
                stats.drafted += stood + taken_back
                stats.token_loops, stats.prompt_loops = decoder.token_loops, decoder.prompt_loops
                stats.cache_bytes = decoder.cache_bytes
                logits = exits.logits[first + place] if with_logits else None
                yield Token(rows[row].prompt.key, token, loops[place], finish_reason, logits, stood, taken_back)
                if finish_reason is not None:
                    del rows[row]
                    break
            else:
                unfinished.append((row, tokens[-1]))
        if unfinished:
            ask_until = [rows[row].next_ask_until() for row, _ in unfinished] if lossless else None
            decoder.append([row for row, _ in unfinished], [token for _, token in unfinished], ask_until)


def generate(
    model: LoopedModel, prompts: Iterable[Prompt], policy: ExitPolicy | None = None, **options: Any
) -> list[Completion]:
    """All continuations, in the order of the prompts; the options are those of `stream`."""
    given = list(check_list(prompts, "prompts", "a list of prompts"))
    for prompt in given:
        check_kind(prompt, Prompt, "What is continued", "a Prompt")
    numbered = [replace(prompt, key=number) for number, prompt in enumerate(given)]
    texts = [Completion(prompt.key) for prompt in given]
    for token in stream(model, numbered, policy, **options):
        text = texts[token.key]
        text.tokens.append(token.token)
        text.loops.append(token.loops)
        text.finish_reason = token.finish_reason or ""
        text.drafted += token.accepted + token.taken_back
        text.accepted += token.accepted
    return texts


def _draws_number(number: int) -> int:
    """Which random numbers are a prompt's."""
    if as_count(number, "The number of a prompt", 0) >= 2**63:
        raise UserError("The number of a prompt must be below 2**63.")
    return int(number)


class _Policies:
    """Those that texts are written with here; each is checked before it decides anything."""

    def __init__(self, model: LoopedModel, usual: ExitPolicy, cache: CacheMode, lossless: bool) -> None:
        self._model, self._usual, self._lossless = model, usual, lossless
        # what lossless text is does not depend on the policy, so that it is whatever cache that was calibrated for
        self._here = Scope(unit="tokens", cache=None if lossless else cache, precision=model.precision)
        self._checked: dict[int, ExitPolicy] = {}  # by identity: to compare two is dear
        self._check(usual)

    def of(self, prompt: Prompt) -> ExitPolicy:
        check_kind(prompt, Prompt, "What is continued", "a Prompt")
        check_kind(prompt.policy, (ExitPolicy, type(None)), "The policy of a prompt", "an ExitPolicy")
        policy = prompt.policy or self._usual
        if self._lossless and prompt.forced is not None:
            raise UserError("What is forced after a prompt is no draft; leave out `forced`, or do without lossless.")
        if self._lossless:
            check_drafts(policy, self._model.num_loops)
        if id(policy) not in self._checked:
            self._check(policy)
        return policy

    def _check(self, policy: ExitPolicy) -> None:
        tied = policy.model is not None or policy.gate is not None
        policy.check(self._model.weights_sha256 if tied else None, self._model.num_loops, self._here)
        ExitState(policy, self._model.num_loops)  # refuses what can only be replayed
        self._checked[id(policy)] = policy


class _Row:
    """A prompt that is being continued."""

    def __init__(self, prompt: Prompt, token_budget: int, sampling: Sampling, number: int) -> None:
        self.prompt, self.token_budget, self.generated = prompt, token_budget, 0
        self.tokens = np.asarray(prompt.tokens, dtype=np.int64)
        self.draws = np.random.Generator(np.random.Philox(key=[sampling.seed, number]))
        self.drafts: list[Draft] = []  # after what full depth has confirmed
        self.draft_length: DraftLength | None = None
        self.checked_until = 0  # the last loop after which the token that is running may exit

    def next_ask_until(self) -> int:
        """Up to which loop the next token may be said early; 0, not at all: the last one that there is room for."""
        assert self.draft_length is not None
        drafted = len(self.drafts) + 1
        may_exit = drafted < self.draft_length.tokens and self.generated + drafted < self.token_budget
        self.checked_until = self.draft_length.ask_until if may_exit else 0
        return self.checked_until

    def add(self, token: int, stop: Collection[int]) -> Literal["stop", "length"] | None:
        self.generated += 1
        if token in stop and self.prompt.forced is None:
            return "stop"
        return "length" if self.generated == self.token_budget else None


class _Confirmed(NamedTuple):
    """What a row has to say at once: drafts that stand, and one token after them."""

    row: int
    tokens: list[int]
    loops: list[int]
    first: int  # of its logits
    drafted: int = 0  # since it last said something
    cost: float = 0.0  # of drafting, in tokens at full depth


def _exited_tokens(rows: dict[int, _Row], exits: Exits, sampling: Sampling) -> list[_Confirmed]:
    """One token of every row that exits."""
    chosen = next_tokens(exits.logits, [rows[row].draws for row in exits.rows.tolist()], sampling)
    found = []
    for place, (row, loops, token) in enumerate(zip(exits.rows.tolist(), exits.loops.tolist(), chosen, strict=True)):
        forced = rows[row].prompt.forced
        found.append(_Confirmed(row, [token if forced is None else int(forced[rows[row].generated])], [loops], place))
    return found


def _confirmed(
    model: LoopedModel, decoder: Decoder, rows: dict[int, _Row], exits: Exits, stop: Collection[int], sampling: Sampling
) -> list[_Confirmed]:
    """Rows that exit early go on from their draft; what full depth confirms of the others."""
    starts = exits.counts.cumsum() - exits.counts
    deep = exits.loops == model.num_loops
    chosen = greedy_tokens(exits.logits) if sampling.temperature == 0 else None  # fetched once, for drafts and verdicts
    _draft(decoder, rows, exits, chosen, np.flatnonzero(~deep), starts, stop, sampling)
    if not deep.any():
        return []
    done = [rows[row] for row in exits.rows[deep].tolist()]
    there, drafts = count_up(starts[deep], exits.counts[deep]), [row.drafts for row in done]
    if chosen is not None:
        outcomes = verify_greedy([chosen[place] for place in there.tolist()], drafts)
    else:
        logits = exits.logits.index_select(0, upload(there, exits.logits.device))
        outcomes = verify(logits, drafts, [row.draws for row in done], sampling)
    found = []
    for own, row, first, (stood, token) in zip(
        done, exits.rows[deep].tolist(), starts[deep].tolist(), outcomes, strict=True
    ):
        kept, drafted = own.drafts[:stood], len(own.drafts)
        assert own.draft_length is not None
        cost = own.draft_length.update(own.drafts, stood, own.checked_until)
        if stood < drafted:
            decoder.take_back(row, len(own.tokens) + own.generated + stood)
        found.append(
            _Confirmed(
                row,
                [*(each.token for each in kept), token],
                [*(each.loops for each in kept), model.num_loops],
                first,
                drafted,
                cost,
            )
        )
        own.drafts = []
    return found


def _draft(
    decoder: Decoder,
    rows: dict[int, _Row],
    exits: Exits,
    chosen: list[int] | None,
    early: Integers,
    starts: Integers,
    stop: Collection[int],
    sampling: Sampling,
) -> None:
    """Rows that exit early go on from what they say; where that would end the text, full depth is asked at once.

    Not of what was drawn: rejection sampling has the right probabilities only if every draft is put to it.
    """
    if not len(early):
        return
    index, loops = exits.rows[early].tolist(), exits.loops[early].tolist()
    if chosen is not None:
        drafts = [Draft(chosen[place], loop, None) for place, loop in zip(starts[early].tolist(), loops, strict=True)]
    else:
        logits = exits.logits.index_select(0, upload(starts[early], exits.logits.device))
        drafts = draw_drafts(logits, loops, [rows[row].draws for row in index], sampling)
    going_on = []
    for row, each in zip(index, drafts, strict=True):
        if each.token in stop and each.shares is None:
            decoder.deepen([row])
            rows[row].checked_until = 0  # it did exit
            continue
        rows[row].drafts.append(each)
        going_on.append((row, each.token, rows[row].next_ask_until()))
    if going_on:
        decoder.append(*zip(*going_on, strict=True))


def token_budget(model: LoopedModel, prompt: Prompt, most: int) -> int:
    """How many tokens may follow a prompt; one that the model cannot take is refused."""
    given = [as_token_row(prompt.tokens, "A prompt")]
    if prompt.forced is not None:
        given.append(as_token_row(prompt.forced, "What is forced after a prompt"))
    if any(part.min() < 0 or part.max() >= model.vocab_size for part in given):
        raise UserError(f"A prompt has a token outside the model's vocabulary (0..{model.vocab_size - 1}).")
    if prompt.forced is not None:
        model.check_length(sum(map(len, given)))
        return len(prompt.forced)
    model.check_length(len(given[0]) + 1)
    return min(most, model.block_size - len(given[0]))
