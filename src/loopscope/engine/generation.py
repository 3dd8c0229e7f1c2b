"""How is text generated at adaptive depth? Prompts in, tokens out as they are ready, with the loops that each took.

`lossless` text is the text of full depth, written by a wavefront over depth (`wavefront.py`). When a policy lets a
token exit early, the token is a draft: the text continues from it, and full depth confirms the draft or takes it back.

Shapes: V vocabulary.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from torch import Tensor

from loopscope.engine.decoder import CACHE_MODES, Decoder
from loopscope.engine.exit_decision import check_executable
from loopscope.engine.logit_signals import Integers, check_answers
from loopscope.engine.requests import check_tokens, require_vocabulary
from loopscope.engine.sampling import Sampling, draw_tokens
from loopscope.engine.wavefront import ConfirmedToken, Wavefront
from loopscope.errors import UserError
from loopscope.exit_state import check_drafts
from loopscope.models.looped_model import LoopedModel
from loopscope.models.tokenizer import Detokenizer, decode
from loopscope.policy import ExitPolicy
from loopscope.scope import CacheMode, Scope
from loopscope.trajectory_checks import as_token_row

FinishReason = Literal["stop", "length"]
MOST_ROWS = 1 << 16
"""Texts that are written together, if their number is not known."""


@dataclass(frozen=True, eq=False)
class Prompt:
    """Hold a text to continue.

    Parameters
    ----------
    key
        A key that LoopScope returns with every token.
    tokens
        [M] the tokens of the prompt.
    forced
        Tokens to write next, instead of the model's own choices (default: none).
    policy
        The exit rule of this prompt (default: the rule for all prompts).
    number
        The number that selects the stream of random draws (default: the place among the prompts).

    Examples
    --------
    >>> ls.Prompt("mine", np.array([1, 2, 3])).key
    'mine'
    """

    key: Any  # returned with every token
    tokens: Integers
    forced: Integers | None = None  # tokens to write next, regardless of the model's own choice
    policy: ExitPolicy | None = None  # for this prompt alone
    number: int | None = None  # of its random draws (default: the prompt's index)


@dataclass(frozen=True, eq=False)
class Token:
    """Hold one generated token."""

    key: Any
    token: int
    loops: int  # loops that the token ran; in lossless text all of them
    finish_reason: FinishReason | None  # None unless this is the last token
    logits: Tensor | None  # [V], if requested
    accepted: bool = False  # in lossless text: whether full depth confirmed a draft
    taken_back: int = 0  # drafts that this token replaces or invalidates


@dataclass
class GenerationStats:
    """Count the tokens, loops and drafts of a generation."""

    tokens: int = 0
    loops: int = 0  # over all tokens
    token_loops: int = 0  # tokens times loops that ran, with prompts and cache entries
    prompt_loops: int = 0  # the part of `token_loops` that belongs to prompts
    drafted: int = 0  # lossless text: tokens that were drafted
    accepted: int = 0  # lossless text: drafts that full depth confirmed
    drafting_cost: float = 0.0  # lossless text: estimated cost, in tokens at full depth
    cache_bytes: int = 0

    def count(self, token: Token, texts: "_ExitingTexts | Wavefront") -> None:
        self.tokens += 1
        self.loops += token.loops
        self.accepted += token.accepted
        self.drafted += token.accepted + token.taken_back
        self.token_loops, self.prompt_loops = texts.token_loops, texts.prompt_loops
        self.drafting_cost, self.cache_bytes = texts.cost, texts.cache_bytes


@dataclass(eq=False)
class Completion:
    """Hold the continuation of a prompt."""

    key: Any
    tokens: list[int] = field(default_factory=list)
    loops: list[int] = field(default_factory=list)
    finish_reason: str = ""
    drafted: int = 0  # lossless text: tokens that were drafted
    accepted: int = 0  # lossless text: drafts that full depth confirmed


def generate(
    model: LoopedModel, prompts: Iterable[Prompt], policy: ExitPolicy | None = None, **options: Any
) -> list[Completion]:
    """Continue prompts with a looped language model.

    Parameters
    ----------
    model
        A model with a KV cache, in evaluation mode.
    prompts
        The prompts to continue.
    policy
        The rule by which a token exits (default: every token runs all loops).
    **options
        The options of `stream`, such as `max_new_tokens=` and `lossless=`.

    Returns
    -------
    list[Completion]
        The continuations in the order of the prompts, with the loops of every token.

    Raises
    ------
    UserError
        If the policy does not fit the model, or if the model cannot write text.

    Examples
    --------
    >>> writer = ls.load_model(checkpoint)
    >>> (text,) = ls.generate(writer, [ls.Prompt("mine", np.array([1, 2, 3]))], max_new_tokens=4)
    >>> len(text.tokens), len(text.loops)
    (4, 4)
    """
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
    cache: CacheMode | None = None,
    sampling: Sampling | None = None,
    lossless: bool = False,
    batch_size: int = 8,
    with_logits: bool = False,
    stats: GenerationStats | None = None,
) -> Iterator[Token]:
    """Continue prompts, and yield every token as soon as it is ready.

    The continuation of a prompt does not depend on other prompts, even if tokens are drawn at random.

    Parameters
    ----------
    model
        A model with a KV cache, in evaluation mode.
    prompts
        The prompts; when a text is finished, the next prompt takes its place.
    policy
        The rule by which a token exits (default: every token runs all loops). The policy of a prompt replaces this
        rule.
    max_new_tokens
        The maximum length of a continuation, in tokens (default: 128).
    stop
        Tokens that end a text.
    stopping_criterion
        A function that takes a prompt's key and a token, and returns whether the text ends.
    cache
        Keys and values of a token that exited early: "full", "propagate" or "latest" (default: the cache that `policy`
        was calibrated for, or "full").
    sampling
        The settings of random sampling (default: always take the likeliest token).
    lossless
        Write the text of full depth, up to rounding: early exits only draft tokens, which full depth confirms or
        replaces.
    batch_size
        The number of prompts per batch (default: 8).
    with_logits
        Return the logits with every token.
    stats
        An object that counts tokens and loops.

    Returns
    -------
    Iterator[Token]
        The tokens, each as soon as it is ready.

    Raises
    ------
    UserError
        If the policy does not fit the model, or if the model cannot write text.

    Examples
    --------
    >>> writer = ls.load_model(checkpoint)
    >>> tokens = list(ls.stream(writer, [ls.Prompt("mine", np.array([1, 2, 3]))], max_new_tokens=4))
    >>> tokens[-1].finish_reason
    'length'
    """
    if min(max_new_tokens, batch_size) < 1:
        raise UserError(f"New tokens and a batch are at least 1; got {max_new_tokens} and {batch_size}.")
    if cache is None:
        cache = "full" if lossless or policy is None else policy.cache
    if cache not in CACHE_MODES:
        raise UserError(f"There is no cache '{cache}'; choose one of {', '.join(CACHE_MODES)}.")
    if lossless and cache != "full":
        raise UserError(f"Lossless text needs the keys and values of every loop: the cache 'full', not '{cache}'.")
    model.require_evaluation()
    model.require("causal", "Writing text")
    model.require("kv_cache", "Writing text")
    usual = policy or ExitPolicy("fixed", model.num_loops)
    # Lossless text does not depend on the policy, so the cache mode of the policy's calibration does not matter.
    here = Scope(unit="tokens", cache=None if lossless else cache, precision=model.precision)
    checked: dict[int, ExitPolicy] = {}  # by id: comparing two policies is expensive

    def policy_of(prompt: Prompt) -> ExitPolicy:
        """The policy of this prompt, checked before it decides anything."""
        if lossless and prompt.forced is not None:
            raise UserError("What is forced after a prompt is no draft; leave out `forced`, or do without lossless.")
        own = prompt.policy or usual
        if id(own) not in checked:
            check_executable(model, own, model.num_loops, here)
            if lossless:
                check_drafts(own, model.num_loops)
            checked[id(own)] = own
        return own

    if isinstance(prompts, Sequence):
        for prompt in prompts:  # checked before the first token, not when the prompt's turn comes
            policy_of(prompt)
    batch_size = min(batch_size, max(1, len(prompts)) if isinstance(prompts, Sized) else MOST_ROWS)
    stats, sampling = stats or GenerationStats(), sampling or Sampling()
    texts: _ExitingTexts | Wavefront
    if lossless:
        texts = Wavefront(model, batch_size, stop, sampling)
    else:
        texts = _ExitingTexts(model, batch_size, cache, sampling)
    running: dict[int, _Text] = {}
    waiting = enumerate(prompts)
    while True:
        for row in sorted(set(range(batch_size)) - set(running)):
            if (following := next(waiting, None)) is None:
                break
            place, prompt = following
            policy_here, budget = policy_of(prompt), token_budget(model, prompt, max_new_tokens)
            number = place if prompt.number is None else prompt.number
            running[row] = text = _Text(prompt, budget)
            texts.begin(row, as_token_row(prompt.tokens, "A prompt"), policy_here, budget, number)
            if isinstance(texts, _ExitingTexts) and prompt.forced is not None:
                texts.force(row, as_token_row(prompt.forced, "What is forced after a prompt"))
        if not running:
            return
        for found in texts.advance():
            text = running[found.row]
            finish_reason = text.add(found.token, stop)
            if stopping_criterion is not None and stopping_criterion(text.prompt.key, found.token):
                finish_reason = "stop"
            taken_back = found.taken_back
            if finish_reason is not None:
                taken_back += texts.end(found.row)
                del running[found.row]
            logits = found.logits if with_logits else None
            made = Token(text.prompt.key, found.token, found.loops, finish_reason, logits, found.accepted, taken_back)
            stats.count(made, texts)
            yield made


class _Text:
    """Follow a prompt while it is continued: its tokens so far, and its budget."""

    def __init__(self, prompt: Prompt, token_budget: int) -> None:
        self.prompt, self.token_budget = prompt, token_budget
        self.generated = 0

    def add(self, token: int, stop: Collection[int]) -> FinishReason | None:
        self.generated += 1
        if token in stop and self.prompt.forced is None:
            return "stop"
        return "length" if self.generated == self.token_budget else None


class _ExitingTexts(Decoder):
    """Decode rows of text whose tokens are returned as they exit."""

    cost = 0.0

    def __init__(self, model: LoopedModel, rows: int, cache: CacheMode, sampling: Sampling) -> None:
        super().__init__(model, rows, cache)
        self._sampling = sampling
        self._draws: dict[int, np.random.Generator] = {}
        self._forced: dict[int, Iterator[int]] = {}
        self._exited: dict[int, int] = {}  # the rows whose token has exited, with their next token

    def begin(self, row: int, tokens: Integers, policy: ExitPolicy, budget: int, number: int) -> None:
        """Start a row with a prompt; `number` is that of its random draws."""
        self.prefill(row, tokens, policy, budget)
        self._draws[row] = np.random.Generator(np.random.Philox(key=[self._sampling.seed, number]))
        self._forced[row] = iter(())

    def force(self, row: int, tokens: Integers) -> None:
        """Force a row to continue with these tokens, regardless of the model's own choice."""
        self._forced[row] = iter(tokens.tolist())

    def end(self, row: int) -> int:
        """Finish a row; return the number of its drafts that were not returned."""
        del self._exited[row]
        self.finish(row)
        return 0

    def advance(self) -> list[ConfirmedToken]:
        """Continue the rows that returned a token, run one loop of every row, and return the tokens that exit."""
        if self._exited:
            self.append([*self._exited], [*self._exited.values()])
        exits = self.step()
        if len(exits.rows):
            require_vocabulary(self._model, exits.logits)
        logits, rows = exits.logits.float(), exits.rows.tolist()
        if self._sampling.temperature == 0:
            tokens = check_answers(exits.likeliest).tolist()
        else:
            tokens = draw_tokens(logits, [self._draws[row] for row in rows], self._sampling)
        self._exited = {row: next(self._forced[row], token) for row, token in zip(rows, tokens, strict=True)}
        return [
            ConfirmedToken(row, self._exited[row], loops, own_logits, False, 0)
            for row, loops, own_logits in zip(rows, exits.loops.tolist(), logits, strict=True)
        ]


def token_budget(model: LoopedModel, prompt: Prompt, most: int) -> int:
    """The number of tokens that may follow a prompt; rejects a prompt that the model cannot take."""
    tokens = as_token_row(prompt.tokens, "A prompt")
    if prompt.forced is not None:
        tokens = np.concatenate((tokens, as_token_row(prompt.forced, "What is forced after a prompt")))
    check_tokens(model, tokens, "A prompt")
    model.check_length(len(tokens) + (prompt.forced is None))
    return min(most, model.block_size - len(tokens)) if prompt.forced is None else len(prompt.forced)


class StopStrings:
    """Keep generated texts, and detect the strings that end them; text up to `think_end` is no part of the answer."""

    def __init__(self, tokenizer: Any, until: Sequence[str], think_end: str | None = None) -> None:
        self._tokenizer, self._until, self._think_end = tokenizer, list(until), think_end
        self._longest = max(map(len, self._until), default=0)
        self._texts: dict[int, Detokenizer] = {}

    def __call__(self, key: int, token: int) -> bool:
        """Whether this token ends its text."""
        stream = self._texts.setdefault(key, Detokenizer(self._tokenizer))
        new = stream.add(token)
        if not new or not self._ended(stream.text[-len(new) - self._longest :]):
            return False
        text = stream.text
        return (self._think_end is None or self._think_end in text) and self._ended(self._answer(text))

    def text(self, key: int, ends: Collection[int]) -> str:
        """The text up to the first stop string, or up to the token that ended it."""
        tokens = self._texts[key].tokens
        return self._cut(self._answer(decode(self._tokenizer, tokens[:-1] if tokens[-1] in ends else tokens)))

    def sure(self, key: int) -> str:
        """The text so far, without an end that may be the beginning of a stop string."""
        text = self._cut(self._answer(self._texts[key].text))
        for count in range(min(self._longest - 1, len(text)), 0, -1):
            if any(string.startswith(text[-count:]) for string in self._until):
                return text[:-count]
        return text

    def forget(self, key: int) -> None:
        """Forget a text that is not needed again."""
        self._texts.pop(key, None)

    def _cut(self, text: str) -> str:
        """The text before the first stop string in it, in any order of the stop strings."""
        ends = [place for string in self._until if (place := text.find(string)) >= 0]
        return text[: min(ends, default=len(text))]

    def _answer(self, text: str) -> str:
        return text if self._think_end is None else text.rsplit(self._think_end, 1)[-1].lstrip()

    def _ended(self, text: str) -> bool:
        return any(string in text for string in self._until)
