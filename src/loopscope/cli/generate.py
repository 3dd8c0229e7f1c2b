"""Continue text with a looped language model.

loopscope generate ByteDance/Ouro-1.4B "The capital of France is" \\
    --max-new-tokens 20
loopscope generate runs/small-ouro "Question: " --readout gate \\
    --threshold 0.6 --show-loops
loopscope generate ByteDance/Ouro-1.4B-Thinking "Why is the sky blue?" \\
    --chat --policy policy.json
loopscope generate MODEL --prompts prompts.jsonl --loops 3 \\
    --out answers.jsonl --batch-size 16
loopscope generate runs/small-ouro "Question: " --readout top1 \\
    --threshold 0.8 --lossless

To make a policy, run `loopscope record text MODEL FILE` and then `loopscope calibrate RECORDING --loss disagreement`. A
file of prompts has one prompt per line. In a .jsonl file, a line is {"prompt": ...} or {"messages": [...]}. The line of
a prompt may also set the exit rule of this prompt: "loops", "readout" and "threshold", or "policy". For a file of
prompts, LoopScope writes the answers as JSON lines, in the order of the prompts. With --out, LoopScope keeps finished
texts in FILE.unfinished. After an interruption, the same command continues from this file.
"""

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TextIO, TypeVar, get_args

import msgspec
import numpy as np

import loopscope as ls
from loopscope.cli import inputs
from loopscope.cli.options import COMPUTE, add_shared, add_verb, given, non_negative, option, share, whole
from loopscope.cli.output import announce_device, print_note
from loopscope.config import Loops
from loopscope.errors import UserError, visible
from loopscope.exit_state import check_drafts
from loopscope.files import BusyError, atomic_file, locked, new_path, read_text, remove_leftovers, room_for
from loopscope.models.checkpoint_folder import named_exits, read_model_shape
from loopscope.models.tokenizer import Detokenizer, chat_prompt, decode, encode, load_tokenizer, stop_tokens
from loopscope.policy import ExitPolicy
from loopscope.readouts.readout import readout_definition
from loopscope.scope import CacheMode, Scope

if TYPE_CHECKING:
    from loopscope.engine.generation import GenerationStats, StopStrings, Token


T = TypeVar("T")
_MIN_SAVED = 0.05
"""The least share of full depth's work that a policy must save; a note names one that saves less."""
_NO_PROMPT = 'is neither {"prompt": "..."} nor {"messages": [{"role": "...", "content": "..."}, ...]}; correct it'
_NO_RULE = 'has a rule of its own that is none: give "loops", or "readout" with "threshold", or "policy" with a file'


class _ChatMessage(msgspec.Struct):
    """One message of a chat in a .jsonl file."""

    role: str
    content: str


class _PromptLine(msgspec.Struct):
    """A line of a .jsonl file of prompts: a prompt, or the messages of a chat, with its exit rule."""

    prompt: str | None = None
    messages: Annotated[list[_ChatMessage], msgspec.Meta(min_length=1)] | None = None


class PromptRule(msgspec.Struct, frozen=True):
    """The exit rule of one prompt: a policy's file, a readout with its threshold, or a depth."""

    policy: Annotated[str, msgspec.Meta(pattern=r"^[^\0]+$")] | None = None
    readout: str | None = None
    threshold: float | None = None
    loops: Loops | None = None

    def __post_init__(self) -> None:
        rules = sum(given is not None for given in (self.policy, self.readout, self.loops))
        if rules > 1 or (self.readout is None) != (self.threshold is None):
            raise ValueError("a prompt has one rule, and a readout has a threshold")

    def exit_policy(self, any_model: bool) -> ExitPolicy | None:
        if self.policy is not None:
            return inputs.load_policy(Path(self.policy), any_model)
        if self.readout is not None:
            return inputs.policy_by_hand(self.readout, self.threshold)
        return None if self.loops is None else ExitPolicy("fixed", self.loops)


class GivenPrompt(NamedTuple):
    """A prompt from the command line or from a file, with its exit rule."""

    prompt: Any  # a text, or the messages of a chat
    rule: PromptRule = PromptRule()


def define(subparsers: Any) -> None:
    """Add the arguments of `loopscope generate` to the parser."""
    parser = add_verb(subparsers, "generate", __doc__, execute)
    add_shared(parser, "model")
    prompts = parser.add_mutually_exclusive_group(required=True)
    option(prompts, "prompt", "the text to continue", nargs="?")
    option(prompts, "--prompts FILE", "a file of prompts: one per line, or .jsonl")
    rule = parser.add_mutually_exclusive_group()
    option(rule, "--policy FILE", "policy file with the exit rule (default: the model's own policy, or else all loops)")
    names = f"readout of the exit rule (needs --threshold): {inputs.READOUT_NAMES}"
    option(rule, "--readout NAME", names, type=inputs.readout_name)
    option(rule, "--loops N", "run every token through this many loops")
    option(parser, "--threshold X", "value of the readout at which a token exits")
    inputs.add_policy_options(parser)
    caches = "keys and values of a token that exited early: computed at every loop (full), copied from its exit loop "
    caches += "to deeper loops (propagate), or one set for all loops (latest; default: the policy's cache, else full)"
    option(parser, "--cache MODE", caches, choices=get_args(CacheMode))
    drafts = "write the same text as full depth, up to rounding, but faster: early exits only draft tokens"
    option(parser, "--lossless", drafts)
    option(parser, "--max-new-tokens N", "maximum length of the continuation, in tokens", default=128)
    option(parser, "--stop TEXT", "end the text before this string (repeatable)", action="append", type=_prompt_text)
    heat = "sampling temperature; 0 takes the likeliest token"
    option(parser, "--temperature X", heat, type=non_negative, default=0.0)
    option(parser, "--top-k N", "draw among the N likeliest tokens; 0 draws among all tokens", type=whole, default=0)
    option(parser, "--top-p X", "draw among the likeliest tokens whose probabilities sum to X", type=share, default=1.0)
    option(parser, "--batch-size N", "number of prompts per batch", default=8)
    option(parser, "--show-loops", "print the number of loops of each token")
    lines = "write JSON lines, one per prompt; after an interruption, the same command continues"
    option(parser, "--out FILE", lines, type=new_texts_file)
    add_shared(parser, "--chat", "--seed N", "--dtype NAME", "--compile", *COMPUTE)
    parser.needs(readout="threshold", threshold="readout", top_k="temperature", top_p="temperature")


def _prompt_text(text: str) -> str:
    """Reject an empty prompt."""
    if not text:
        raise UserError("--stop takes a text of at least one character.")
    return text


def execute(options: argparse.Namespace) -> None:
    """Execute `loopscope generate` with its parsed arguments."""
    requested = _given_prompts(options)
    inputs.check_readouts(*filter(None, [options.readout]))
    rules = {each.rule: each.rule.exit_policy(options.any_model) for each in requested}  # a policy is loaded once
    by_hand = PromptRule(None, options.readout, options.threshold, options.loops)
    usual = by_hand.exit_policy(options.any_model)
    folder = inputs.find_model(options.model, text=True)
    if options.policy is None and usual is None:
        exits = named_exits(folder, drafts=True)
        options.policy = None if exits.policy is None else Path(exits.policy)
        options.cache, options.lossless = options.cache or exits.cache, options.lossless or exits.lossless
    file = None if options.policy is None else str(options.policy)
    if file is not None:
        usual = PromptRule(file).exit_policy(options.any_model)
    options.cache = options.cache or ("full" if usual is None or options.lossless else usual.cache)
    _check_prompt_rules(options, [policy or usual for policy in rules.values()], folder)
    from loopscope.engine import generation, sampling
    from loopscope.engine.generation import StopStrings
    from loopscope.models.checkpoint_folder import end_tokens

    draws = sampling.Sampling(**given(options, "temperature", "top_k", "top_p", "seed"))
    tokenizer = load_tokenizer(folder)
    prompts = [
        ls.Prompt(place, _encode_prompt(tokenizer, each.prompt, options.chat), policy=rules[each.rule], number=place)
        for place, each in enumerate(requested)
    ]
    model = inputs.load_text_model(folder, options)
    # of all of them before anything is printed, not when their turn comes
    room = {prompt.key: generation.token_budget(model, prompt, options.max_new_tokens) for prompt in prompts}
    used_rules = {PromptRule(file): usual, **rules}
    notes = [note for rule, policy in used_rules.items() for note in inputs.unnamed_model(rule.policy, policy)]
    if options.lossless and model.precision != "float32":
        either = "where two tokens are about equally likely, either may come; --dtype float32 is nearly exact"
        notes.append(f"In {model.precision}, lossless text is full depth's up to rounding: {either}.")
    texts, stats = StopStrings(tokenizer, options.stop), generation.GenerationStats()
    ends, start, cut = stop_tokens(tokenizer, end_tokens(folder)), time.perf_counter(), 0

    def tokens(left: list["ls.Prompt"]) -> "Iterator[Token]":
        nonlocal cut
        for token in generation.stream(
            model,
            left,
            usual or ExitPolicy("fixed", model.num_loops),
            stop=ends,
            stopping_criterion=texts if options.stop else None,
            sampling=draws,
            stats=stats,
            **given(options, "max_new_tokens", "cache", "lossless", "batch_size"),
        ):
            announce_device(options)  # now nothing is refused any more
            while notes:
                print_note(notes.pop())
            cut += token.finish_reason == "length" and room[token.key] < options.max_new_tokens
            yield token

    output = _TextOutput(options, requested, prompts, tokenizer, texts, ends)
    if options.out is not None:
        options.resumes = True
        used = {policy.readout for policy in (usual, *rules.values()) if policy is not None}
        output.keep_lines(tokens, _text_settings(options, requested, prompts, model, ends, used))
    elif len(requested) == 1 and not options.json:
        output.print_live(tokens(prompts))
    else:
        output.print_lines(tokens(prompts))
    if cut:
        what = "The text ends" if len(requested) == 1 else f"{cut:,} texts end"
        print_note(f"{what} at {model.block_size:,} tokens, the most that the model takes, before --max-new-tokens.")
    if stats.tokens:
        print_note(_generation_summary(stats, time.perf_counter() - start, model.num_loops, options.lossless))
        processed = stats.tokens + sum(len(prompt.tokens) - 1 for prompt in output.prompts)
        if (wasted := _no_saving_note(stats, processed, model.num_loops, options.lossless)) is not None:
            print_note(wasted)


def _check_prompt_rules(options: argparse.Namespace, policies: list[ExitPolicy | None], folder: Path) -> None:
    """Reject exit rules of prompts that the model cannot run with, by its configuration."""
    num_loops = read_model_shape(folder).num_loops
    here = Scope(unit="tokens", cache=None if options.lossless else options.cache)
    for policy in policies:
        if policy is not None:
            inputs.check_runnable(policy, num_loops, here)
        if options.lossless:
            check_drafts(policy or ExitPolicy("fixed", num_loops), num_loops)


def _text_settings(
    options: argparse.Namespace,
    requested: list[GivenPrompt],
    prompts: list["ls.Prompt"],
    model: "ls.LoopedModel",
    ends: set[int],
    readouts: set[str],
) -> dict[str, Any]:
    """The settings that the texts depend on: options, prompts, model, tokenizer and exit rules."""
    names = ("chat", "readout", "threshold", "loops", "cache", "lossless", "max_new_tokens", "stop", "temperature")
    found = {name: getattr(options, name) for name in (*names, "top_k", "top_p", "seed", "any_model")}
    files = {Path(each.rule.policy) for each in requested if each.rule.policy} | {*filter(None, [options.policy])}
    policies = {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    found |= {"weights": model.weights_sha256, "num_loops": model.num_loops, "precision": model.precision}
    found |= {"policies": policies, "definitions": {name: readout_definition(name) for name in sorted(readouts)}}
    found |= {"prompts": [each.prompt for each in requested], "rules": [str(each.rule) for each in requested]}
    return found | {"tokens": [prompt.tokens.tolist() for prompt in prompts], "ends": sorted(ends)}


def _generation_summary(stats: "GenerationStats", seconds: float, num_loops: int, lossless: bool) -> str:
    """The summary line after the texts: tokens, loops and time."""
    speed = f"{stats.tokens:,} tokens in {seconds:.1f} s ({stats.tokens / seconds:.1f} per second)"
    if not lossless:
        return f"{speed}, {stats.loops / max(1, stats.tokens):.2f} of {num_loops} loops per token on average."
    share = 100 * stats.accepted / max(1, stats.drafted)
    stood = f"{stats.accepted:,} of {stats.drafted:,} drafts stood ({share:.0f} %)"
    return f"{speed}, as at full depth; {stood}, {stats.token_loops:,} token-loops were run."


def _no_saving_note(stats: "GenerationStats", processed: int, num_loops: int, lossless: bool) -> str | None:
    """The note that a policy saved no work; average loops alone do not show that."""
    if lossless:
        if not stats.drafted:
            return "No time was saved: nothing was drafted. Loosen the threshold, or give fewer prompts at a time."
        if stats.drafting_cost < (1 - _MIN_SAVED) * stats.tokens:
            return None
        return "By estimate this was no faster than full depth: too many drafts fell; draft later, or not at all."
    full = processed * num_loops
    if stats.loops > 0.9 * stats.tokens * num_loops or stats.token_loops < (1 - _MIN_SAVED) * full:
        return None
    ran = f"{stats.token_loops:,} of full depth's {full:,} loops were run, many for tokens that had exited"
    return f"This saved no time: {ran}, because later ones went deeper; --cache propagate runs fewer."


def _given_prompts(options: argparse.Namespace) -> list[GivenPrompt]:
    """The prompts to continue; reject options that do not go together."""
    if options.lossless and options.cache not in (None, "full"):
        raise UserError(f"--lossless needs the cache 'full', not '{options.cache}'; leave out --cache.")
    requested = [GivenPrompt(options.prompt)] if options.prompts is None else list(read_prompts(options.prompts))
    if not requested or (not options.chat and any(each.prompt == "" for each in requested)):
        there = "A prompt is empty" if requested else f"There is no prompt in {options.prompts}"
        raise UserError(f"{there}; give at least one word a line.")
    return requested


def _encode_prompt(tokenizer: Any, prompt: Any, chat: bool) -> Any:
    """Encode a prompt, or the messages of a chat."""
    if chat or not isinstance(prompt, str):
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return np.array(chat_prompt(tokenizer, messages), dtype=np.int64)
    tokens = encode(tokenizer, prompt)
    if not tokens:
        raise UserError(f"The model's tokenizer makes no tokens of the prompt {prompt!r:.60}; give another one.")
    return np.array(tokens, dtype=np.int64)


def read_prompts(path: Path) -> Iterator[GivenPrompt]:
    """Read the prompts of a .txt or .jsonl file."""
    for number, line in enumerate(read_text(path, "file with a prompt a line").split("\n"), start=1):
        if not line.strip():
            continue
        if path.suffix != ".jsonl":
            yield GivenPrompt(line)
            continue
        text, rule = _decoded_line(line, _PromptLine), _decoded_line(line, PromptRule)
        if text is None or rule is None or (text.prompt is None and text.messages is None):
            raise UserError(f"{path}, line {number} {_NO_RULE if rule is None and text is not None else _NO_PROMPT}.")
        if rule.policy is not None:
            rule = msgspec.structs.replace(rule, policy=str(path.parent / rule.policy))
        yield GivenPrompt(text.prompt if text.messages is None else msgspec.json.decode(line)["messages"], rule)


def _decoded_line(line: str, kind: type[T]) -> T | None:
    """A line of a .jsonl file of prompts as a struct; None if it does not fit."""
    try:
        return msgspec.json.decode(line.encode(), type=kind)
    except (ValueError, RecursionError):
        return None


@dataclass
class _TextOutput:
    """The output of `generate`: one text as it comes, or one line per text."""

    options: argparse.Namespace
    requested: list[GivenPrompt]
    prompts: list["ls.Prompt"]  # those that are continued now; others were finished before
    tokenizer: Any
    texts: "StopStrings"
    ends: set[int]

    def print_live(self, tokens: Iterator["Token"]) -> None:
        """A text that may end at a string is shown as far as that cannot have begun."""
        text, shown, printed = Detokenizer(self.tokenizer), visible if sys.stdout.isatty() else str, 0
        for token in tokens:
            new = text.add(token.token)
            if self.options.stop:
                sure = self.texts.sure(token.key)
                new, printed = sure[printed:], max(printed, len(sure))
            print(shown(new), end=f"[{token.loops}]" if self.options.show_loops else "", flush=True)
        print(shown(self.texts.text(0, self.ends)[printed:] if self.options.stop else text.rest()))

    def print_lines(self, tokens: Iterator["Token"]) -> None:
        """A line for every prompt that is finished, in their order."""
        finished: dict[int, dict[str, Any]] = {}
        following = 0
        try:
            for number, line in self._lines(tokens):
                finished[number] = line
                while following in finished:
                    _print_json_line(finished.pop(following))
                    following += 1
        finally:  # whatever ended it, also those after one that is not finished
            for _, line in sorted(finished.items()):
                _print_json_line(line)

    def keep_lines(self, tokens: Callable[[list["ls.Prompt"]], Iterator["Token"]], settings: object) -> None:
        with text_journal(self.options.out, settings, len(self.requested)) as journal:
            if journal.lines:
                print_note(f"{len(journal.lines):,} of {len(self.requested):,} texts were finished before; going on.")
            self.prompts = [prompt for prompt in self.prompts if prompt.key not in journal.lines]
            for number, line in self._lines(tokens(self.prompts)) if self.prompts else ():
                journal.add(number, line)

    def _lines(self, tokens: Iterator["Token"]) -> Iterator[tuple[int, dict[str, Any]]]:
        """The numbers of prompts as their texts finish, with the lines to write."""
        generated: dict[int, list[Token]] = {}
        for token in tokens:
            generated.setdefault(token.key, []).append(token)
            if token.finish_reason is None:
                continue
            own, number = generated.pop(token.key), token.key
            written = [each.token for each in own]
            stopped = self.texts.text(number, self.ends) if self.options.stop else None
            text = decode(self.tokenizer, written) if stopped is None else stopped
            line = {"number": number + 1, "prompt": self.requested[number].prompt, "text": text, "tokens": written}
            line |= {"loops": [each.loops for each in own], "finish_reason": token.finish_reason}
            self.texts.forget(number)
            yield number, line


def _print_json_line(line: dict[str, Any]) -> None:
    """Print one line of JSON."""
    print(visible(json.dumps(line, ensure_ascii=False)), flush=True)


class TextJournal:
    """The journal of a file of texts: the lines of finished prompts, by their numbers from 0."""

    def __init__(self, lines: dict[int, str], file: TextIO) -> None:
        self.lines, self._file = lines, file

    def add(self, number: int, line: dict[str, Any]) -> None:
        self.lines[number] = text = visible(json.dumps(line, ensure_ascii=False))
        print(_journal_hash(text), text, file=self._file, flush=True)


def _unfinished_texts_file(out: Path) -> Path:
    """The path of the journal beside a file of texts."""
    return out.with_name(f"{out.name}.unfinished")


def new_texts_file(text: str) -> Path:
    """A new file for texts; finish an earlier file first if its writer was killed at the end."""
    out = Path(text)
    journal = _unfinished_texts_file(out)
    if out.is_file() and out.stat().st_size:
        remove_leftovers(journal)
        if journal.is_file():
            with suppress(BusyError), locked(journal):
                kept = {line.partition(b" ")[2] for line in journal.read_bytes().split(b"\n")[1:-1]}
                if kept <= set(out.read_bytes().split(b"\n")):
                    journal.unlink()
    return new_path(text)


@contextmanager
def text_journal(out: Path, settings: object, prompts: int) -> Iterator[TextJournal]:
    """Continue the journal of earlier texts with these settings; `out` appears when all texts are finished."""
    journal = _unfinished_texts_file(out)
    digest = _journal_hash(json.dumps(settings, sort_keys=True))
    with room_for(out), locked(journal):
        new_path(out)
        lines = _journal_lines(journal, digest, prompts) if journal.exists() else {}
        try:
            with journal.open("a", encoding="utf-8") as file:
                if not file.tell():
                    print(json.dumps({"settings": digest}), file=file, flush=True)
                yield TextJournal(lines, file)
        finally:
            if not lines:
                journal.unlink(missing_ok=True)
        with atomic_file(out) as scratch:
            scratch.write_text("".join(f"{lines[number]}\n" for number in range(prompts)), encoding="utf-8")
        journal.unlink()


def _journal_lines(journal: Path, digest: str, prompts: int) -> dict[int, str]:
    """The complete lines of a journal; the last line may have been cut off."""
    data = journal.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    first, *lines = whole.decode(errors="replace").split("\n")[:-1] or [""]
    if whole and first != json.dumps({"settings": digest}):
        other = (
            "other prompts, another model or other settings; finish that one, remove the file, or choose another --out"
        )
        raise UserError(f"{journal} has the texts of another command: {other}.")
    os.truncate(journal, len(whole))
    texts = (line.partition(" ") for line in lines)
    found = {json.loads(text)["number"] - 1: text for known, _, text in texts if known == _journal_hash(text)}
    return {number: text for number, text in found.items() if 0 <= number < prompts}


def _journal_hash(text: str) -> str:
    """The hash of a journal's line or settings."""
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
