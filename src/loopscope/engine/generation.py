"""How is text generated at adaptive depth? Prompts in, tokens out as they are ready, with the loops that each took.

`lossless` text is full depth's: a token that a policy lets exit early is a draft, from which the text goes on, and
which full depth looks at later, several tokens at once. The drafts' own states are where that begins, so that none of
their work is done twice; the first that full depth would not have said takes back what follows it.

Shapes: V vocabulary.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from torch import Tensor

from loopscope.engine.decoder import CACHE_MODES, Decoder, Exits
from loopscope.engine.draft_length import DraftLength
from loopscope.engine.exit_decision import Integers, check_policy
from loopscope.engine.requests import check_tokens, require_vocabulary
from loopscope.engine.sampling import Draft, Sampling, draw_drafts, greedy_tokens, verify, verify_greedy
from loopscope.errors import UserError
from loopscope.exit_state import check_drafts
from loopscope.models.device import upload
from loopscope.models.looped_model import LoopedModel
from loopscope.models.packing import count_up
from loopscope.models.tokenizer import Detokenizer, decode
from loopscope.policy import ExitPolicy
from loopscope.scope import CacheMode, Scope
from loopscope.trajectory_checks import as_token_row

FinishReason = Literal["stop", "length"]
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
    finish_reason: FinishReason | None  # why this is the last one
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

    def count(self, token: Token, decoder: Decoder) -> None:
        self.tokens += 1
        self.loops += token.loops
        self.accepted += token.accepted
        self.drafted += token.accepted + token.taken_back
        self.token_loops, self.prompt_loops = decoder.token_loops, decoder.prompt_loops
        self.cache_bytes = decoder.cache_bytes


@dataclass(eq=False)
class Completion:
    key: Any
    tokens: list[int] = field(default_factory=list)
    loops: list[int] = field(default_factory=list)
    finish_reason: str = ""
    drafted: int = 0  # of lossless text: tokens that were said early
    accepted: int = 0  # those that full depth says, too


def generate(
    model: LoopedModel, prompts: Iterable[Prompt], policy: ExitPolicy | None = None, **options: Any
) -> list[Completion]:
    """All continuations, in the order of the prompts; the options are those of `stream`."""
    given = list(prompts)
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
    if min(max_new_tokens, batch_size) < 1:
        raise UserError(f"New tokens and a batch are at least 1; got {max_new_tokens} and {batch_size}.")
    if cache not in CACHE_MODES:
        raise UserError(f"There is no cache '{cache}'; choose one of {', '.join(CACHE_MODES)}.")
    if lossless and cache != "full":
        raise UserError(f"Lossless text needs the keys and values of every loop: the cache 'full', not '{cache}'.")
    model.require_evaluation()
    model.require("causal", "Writing text")
    model.require("kv_cache", "Writing text")
    usual = policy or ExitPolicy("fixed", model.num_loops)
    # Lossless text does not depend on the policy, so that the cache that it was calibrated for does not matter.
    here = Scope(unit="tokens", cache=None if lossless else cache, precision=model.precision)
    checked: dict[int, ExitPolicy] = {}  # by identity: to compare two is dear

    def policy_of(prompt: Prompt) -> ExitPolicy:
        """The policy that this text is written with, checked before it decides anything."""
        if lossless and prompt.forced is not None:
            raise UserError("What is forced after a prompt is no draft; leave out `forced`, or do without lossless.")
        own = prompt.policy or usual
        if id(own) not in checked:
            check_policy(model, own, model.num_loops, here)
            if lossless:
                check_drafts(own, model.num_loops)
            checked[id(own)] = own
        return own

    if isinstance(prompts, Sequence):
        for prompt in prompts:  # before the first token, not when its turn comes
            policy_of(prompt)
    batch_size = min(batch_size, max(1, len(prompts)) if isinstance(prompts, Sized) else MOST_ROWS)
    stats = stats or GenerationStats()
    texts = _RunningTexts(model, Decoder(model, batch_size, cache, lossless), stop, sampling or Sampling(), lossless)
    waiting = enumerate(prompts)
    while True:
        for row in sorted(set(range(batch_size)) - set(texts.rows)):
            if (following := next(waiting, None)) is None:
                break
            number, prompt = following
            texts.begin(row, prompt, policy_of(prompt), max_new_tokens, number)
        if not texts.rows:
            return
        for decoded in texts.step():
            stats.drafting_cost += decoded.cost
            text = texts.rows[decoded.row]
            for place, token in enumerate(decoded.tokens):
                finish_reason = text.add(token, stop)
                if stopping_criterion is not None and stopping_criterion(text.prompt.key, token):
                    finish_reason = "stop"
                accepted = place + 1 < len(decoded.tokens)
                last = finish_reason is not None or not accepted
                taken_back = decoded.drafted - min(place + 1, len(decoded.tokens) - 1) if last else 0
                logits = decoded.logits[place] if with_logits else None
                made = Token(text.prompt.key, token, decoded.loops[place], finish_reason, logits, accepted, taken_back)
                stats.count(made, texts.decoder)
                yield made
                if finish_reason is not None:
                    del texts.rows[decoded.row]
                    break
        texts.go_on()


class _Text:
    """A prompt that is being continued."""

    def __init__(self, prompt: Prompt, token_budget: int, draws: np.random.Generator) -> None:
        self.prompt, self.token_budget, self.draws = prompt, token_budget, draws
        self.generated = 0
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

    def add(self, token: int, stop: Collection[int]) -> FinishReason | None:
        self.generated += 1
        if token in stop and self.prompt.forced is None:
            return "stop"
        return "length" if self.generated == self.token_budget else None


class _Decoded(NamedTuple):
    """What a row has to say at once: drafts that stand, and one token after them."""

    row: int
    tokens: list[int]
    loops: list[int]
    logits: Tensor  # [at least as many, V]
    drafted: int  # since it last said something
    cost: float  # of drafting, in tokens at full depth


class _RunningTexts:
    """The texts that are being written, by the row of the decoder that they have."""

    def __init__(
        self, model: LoopedModel, decoder: Decoder, stop: Collection[int], sampling: Sampling, lossless: bool
    ) -> None:
        self._model, self.decoder, self._stop, self._sampling, self._lossless = model, decoder, stop, sampling, lossless
        self.rows: dict[int, _Text] = {}
        self._decoded: list[_Decoded] = []

    def begin(self, row: int, prompt: Prompt, policy: ExitPolicy, max_new_tokens: int, number: int) -> None:
        """A prompt takes a row; `number` is that of its random numbers, unless it has its own."""
        budget = token_budget(self._model, prompt, max_new_tokens)
        number = number if prompt.number is None else prompt.number
        text = _Text(prompt, budget, np.random.Generator(np.random.Philox(key=[self._sampling.seed, number])))
        self.rows[row] = text
        tokens = as_token_row(prompt.tokens, "A prompt")
        decision = self.decoder.prefill(row, tokens, policy, ask=not self._lossless)
        if self._lossless:
            text.draft_length = DraftLength(self._model, decision.reads_logits, decision.first_exit)

    def step(self) -> list[_Decoded]:
        """One loop of every row; what rows say whose token exits (in lossless text: at full depth)."""
        self._decoded = []
        exits = self.decoder.step()
        if not len(exits.rows):
            return []
        require_vocabulary(self._model, exits.logits)
        exits = exits._replace(logits=exits.logits.float())
        starts = exits.counts.cumsum() - exits.counts
        chosen = greedy_tokens(exits.logits) if self._sampling.temperature == 0 else None  # fetched once for all
        final = exits.loops == self._model.num_loops if self._lossless else np.ones(len(exits.rows), dtype=bool)
        if not final.all():
            self._draft(exits, chosen, starts, np.flatnonzero(~final))
        if final.any():
            self._confirm(exits, chosen, starts, np.flatnonzero(final))
        return self._decoded

    def go_on(self) -> None:
        """The rows that have just said something, and are not finished, go on with their last token."""
        going_on = [decoded for decoded in self._decoded if decoded.row in self.rows]
        if not going_on:
            return
        rows = [decoded.row for decoded in going_on]
        ask_until = [self.rows[row].next_ask_until() for row in rows] if self._lossless else None
        self.decoder.append(rows, [decoded.tokens[-1] for decoded in going_on], ask_until)

    def _confirm(self, exits: Exits, chosen: list[int] | None, starts: Integers, final: Integers) -> None:
        """What these rows say: the drafts that full depth confirms, and the token after them."""
        rows, loops = exits.rows[final].tolist(), exits.loops[final].tolist()
        texts = [self.rows[row] for row in rows]
        drafts = [text.drafts for text in texts]
        places = count_up(starts[final], exits.counts[final])
        if chosen is not None:
            verdicts = verify_greedy([chosen[place] for place in places.tolist()], drafts)
        else:
            logits = exits.logits.index_select(0, upload(places, exits.logits.device))
            verdicts = verify(logits, drafts, [text.draws for text in texts], self._sampling)
        for row, loop, text, start, (stood, token) in zip(
            rows, loops, texts, starts[final].tolist(), verdicts, strict=True
        ):
            kept, drafted, cost = text.drafts[:stood], len(text.drafts), 0.0
            if text.draft_length is not None:
                cost = text.draft_length.update(text.drafts, stood, text.checked_until)
            if stood < drafted:
                self.decoder.take_back(row, len(text.prompt.tokens) + text.generated + stood)
            if text.prompt.forced is not None:
                token = int(text.prompt.forced[text.generated])
            tokens, all_loops = [draft.token for draft in kept], [draft.loops for draft in kept]
            self._decoded.append(
                _Decoded(row, [*tokens, token], [*all_loops, loop], exits.logits[start:], drafted, cost)
            )
            text.drafts = []

    def _draft(self, exits: Exits, chosen: list[int] | None, starts: Integers, early: Integers) -> None:
        """Rows that exit early go on from what they say; where that would end the text, full depth is asked at once.

        Not of what was drawn: rejection sampling has the right probabilities only if every draft is put to it.
        """
        rows, loops = exits.rows[early].tolist(), exits.loops[early].tolist()
        if chosen is not None:
            tokens = [chosen[place] for place in starts[early].tolist()]
            drafts = [Draft(token, loop, None) for token, loop in zip(tokens, loops, strict=True)]
        else:
            logits = exits.logits.index_select(0, upload(starts[early], exits.logits.device))
            drafts = draw_drafts(logits, loops, [self.rows[row].draws for row in rows], self._sampling)
        going_on = []
        for row, draft in zip(rows, drafts, strict=True):
            text = self.rows[row]
            if draft.token in self._stop and draft.shares is None:
                self.decoder.deepen(row)
                text.checked_until = 0  # it did exit
                continue
            text.drafts.append(draft)
            going_on.append((row, draft.token, text.next_ask_until()))
        if going_on:
            self.decoder.append(*zip(*going_on, strict=True))


def token_budget(model: LoopedModel, prompt: Prompt, most: int) -> int:
    """How many tokens may follow a prompt; rejects a prompt that the model cannot take."""
    tokens = as_token_row(prompt.tokens, "A prompt")
    if prompt.forced is not None:
        tokens = np.concatenate((tokens, as_token_row(prompt.forced, "What is forced after a prompt")))
    check_tokens(model, tokens, "A prompt")
    model.check_length(len(tokens) + (prompt.forced is None))
    return min(most, model.block_size - len(tokens)) if prompt.forced is None else len(prompt.forced)


class StopStrings:
    """Keeps the texts, and sees the strings that end them; what comes before `think_end` is no part of a text."""

    def __init__(self, tokenizer: Any, until: Sequence[str], think_end: str | None = None) -> None:
        self._tokenizer, self._until, self._think_end = tokenizer, list(until), think_end
        self._longest = max(map(len, self._until), default=0)
        self._texts: dict[int, Detokenizer] = {}

    def __call__(self, key: int, token: int) -> bool:
        """Whether the text ends with this token of it."""
        stream = self._texts.setdefault(key, Detokenizer(self._tokenizer))
        new = stream.add(token)
        if not new or not self._ended(stream.text[-len(new) - self._longest :]):
            return False
        text = stream.text
        return (self._think_end is None or self._think_end in text) and self._ended(self._answer(text))

    def text(self, key: int, ends: Collection[int]) -> str:
        """Up to the first string, or the token, that ended it."""
        tokens = self._texts[key].tokens
        return self._cut(self._answer(decode(self._tokenizer, tokens[:-1] if tokens[-1] in ends else tokens)))

    def sure(self, key: int) -> str:
        """The text so far, without what may be the beginning of a string that ends it."""
        text = self._cut(self._answer(self._texts[key].text))
        for count in range(min(self._longest - 1, len(text)), 0, -1):
            if any(string.startswith(text[-count:]) for string in self._until):
                return text[:-count]
        return text

    def forget(self, key: int) -> None:
        """A text that is not asked for again."""
        self._texts.pop(key, None)

    def _cut(self, text: str) -> str:
        """Before the first of the strings in it, whichever was named first."""
        ends = [place for string in self._until if (place := text.find(string)) >= 0]
        return text[: min(ends, default=len(text))]

    def _answer(self, text: str) -> str:
        return text if self._think_end is None else text.rsplit(self._think_end, 1)[-1].lstrip()

    def _ended(self, text: str) -> bool:
        return any(string in text for string in self._until)
