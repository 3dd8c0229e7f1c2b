"""Continue text with a looped language model.

loopscope generate ByteDance/Ouro-1.4B "The capital of France is" --max-new-tokens 20
loopscope generate runs/small-ouro "Question: " --readout gate --threshold 0.6 --show-loops
loopscope generate ByteDance/Ouro-1.4B-Thinking "Why is the sky blue?" --chat --policy policy.json
loopscope generate MODEL --prompts prompts.jsonl --loops 3 --out answers.jsonl --batch-size 16
loopscope generate runs/small-ouro "Question: " --readout top1 --threshold 0.8 --lossless

A policy comes from `loopscope record text MODEL FILE` and `loopscope calibrate RECORDING --loss disagreement`. In a
file of prompts every line is one: plain text, or in a .jsonl file {"prompt": ...} or {"messages": [...]}. Answers are
JSON lines, in the order of the prompts, each written when it and those before it are finished; an interrupted run
leaves all that were finished, each with the number of its prompt.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from loopscope.cli.devices import device_of
from loopscope.cli.options import COMPUTE, add_shared, add_verb, check_new, count, values
from loopscope.cli.output import print_note
from loopscope.cli.policies import check_any_model, load_policy
from loopscope.errors import UserError, visible
from loopscope.reading import read_text

if TYPE_CHECKING:
    from loopscope.engine.generation import GenerationStats, Token
    from loopscope.exits import ExitPolicy


def define(subparsers: Any) -> None:
    parser = add_verb(subparsers, "generate", __doc__, execute)
    parser.add_argument("model", help="the folder of a checkpoint, or its name on the Hub")
    parser.add_argument("prompt", nargs="?", help="the text to be continued")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="many prompts: one a line, or .jsonl")
    parser.add_argument("--chat", action="store_true", help="the prompt is a user's turn, in the model's chat template")
    rule = parser.add_mutually_exclusive_group()
    rule.add_argument("--policy", type=Path, metavar="FILE", help="the exit policy (default: all loops)")
    rule.add_argument("--readout", metavar="NAME", help="an exit rule, with --threshold")
    rule.add_argument("--loops", type=count, metavar="N", help="every token through so many loops")
    parser.add_argument("--threshold", type=float, metavar="X", help="of --readout")
    add_shared(parser, "--any-model", "--with-readout")
    parser.add_argument(
        "--cache",
        default="full",
        metavar="MODE",
        help="what later tokens find of one that exited early. full (default): every loop's keys and values, made when "
        "they are needed; propagate: its exit loop's in the deeper ones; latest: one place for all loops",
    )
    parser.add_argument(
        "--lossless",
        action="store_true",
        help="the text of full depth: the exit rule only says which tokens are drafts, which are verified together",
    )
    parser.add_argument("--max-new-tokens", type=count, default=128, metavar="N", help="default: 128")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="X", help="0 (default): the likeliest token")
    parser.add_argument("--top-k", type=int, default=0, metavar="N", help="draw among the likeliest N")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="X", help="draw among the likeliest that make up X")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the draws (default: 0)")
    parser.add_argument("--batch-size", type=count, default=8, metavar="N", help="prompts at a time (default: 8)")
    parser.add_argument("--show-loops", action="store_true", help="after each token, the loops that it took")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON lines, one a prompt")
    add_shared(parser, "--dtype", *COMPUTE)


def execute(options: argparse.Namespace) -> int:
    given = _given_prompts(options)
    from loopscope.config import build
    from loopscope.engine.generation import GenerationStats, Prompt, stream, token_budget
    from loopscope.engine.sampling import Sampling
    from loopscope.models import load_model
    from loopscope.models.checkpoint import end_tokens
    from loopscope.models.hub import find_checkpoint
    from loopscope.models.tokenizer import load_tokenizer, stop_tokens

    sampling = build(Sampling, values(options, "temperature", "top_k", "top_p", "seed"), "the sampling")
    folder = find_checkpoint(options.model)
    tokenizer = load_tokenizer(folder)
    prompts = [Prompt(number, _encode(tokenizer, each, options.chat)) for number, each in enumerate(given)]
    model = load_model(folder, device_of(options), options.dtype)
    for prompt in prompts:
        token_budget(model, prompt, options.max_new_tokens)  # before anything is printed, not when its turn comes
    policy, stats, start = _policy(options, model.num_loops), GenerationStats(), time.perf_counter()
    tokens = stream(
        model,
        prompts,
        policy,
        stop=stop_tokens(tokenizer, end_tokens(folder)),
        sampling=sampling,
        stats=stats,
        **values(options, "max_new_tokens", "cache", "lossless", "batch_size"),
    )
    if not _print_tokens(tokens, tokenizer, given, options):
        return 130
    print_note(_summary(stats, time.perf_counter() - start, model.num_loops, options.lossless))
    return 0


def _summary(stats: "GenerationStats", seconds: float, num_loops: int, lossless: bool) -> str:
    speed = f"{stats.tokens:,} tokens in {seconds:.1f} s ({stats.tokens / seconds:.1f} a second)"
    if not lossless:
        return f"{speed}, {stats.loops / max(1, stats.tokens):.2f} of {num_loops} loops on average."
    stood = f"{stats.accepted:,} of {stats.drafted:,} drafts stood ({stats.accepted / max(1, stats.drafted):.0%})"
    return f"{speed}, as at full depth; {stood}, {stats.token_loops:,} loops of a token were run."


def _given_prompts(options: argparse.Namespace) -> list[Any]:
    """Texts, or lists of messages; what does not go together is refused before."""
    if (options.prompt is None) == (options.prompts is None):
        raise UserError("Give a prompt, or a file of them with --prompts.")
    check_new(options.out)
    check_any_model(options)
    if (options.readout is None) != (options.threshold is None):
        raise UserError("An exit rule is --readout with its --threshold; give both.")
    if options.lossless and options.policy is None and options.readout is None and options.loops is None:
        raise UserError(
            "--lossless needs a rule that says which tokens are drafts; give --policy, --readout or --loops."
        )
    if options.prompts is None:
        return [options.prompt]
    given = list(_read_prompts(options.prompts))
    if not given:
        raise UserError(f"There is no prompt in {options.prompts}; write one a line.")
    return given


def _read_prompts(path: Path) -> Iterator[Any]:
    for number, line in enumerate(read_text(path, "file with a prompt a line").split("\n"), start=1):
        if not line.strip():
            continue
        prompt = line if path.suffix != ".jsonl" else _parse_prompt(line)
        if prompt is None:
            raise UserError(
                f'{path}, line {number} is neither {{"prompt": "..."}} nor {{"messages": [{{"role": "...", "content": '
                '"..."}, ...]}; correct it.'
            )
        yield prompt


def _parse_prompt(line: str) -> str | list[dict[str, str]] | None:
    """The text of a prompt, or the messages of a chat; None where it is neither."""
    try:
        entry = json.loads(line)
        json.dumps(entry, allow_nan=False)  # NaN and numbers without end are Python's, not JSON's
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict):
        return None
    messages, prompt = entry.get("messages"), entry.get("prompt")
    if "messages" not in entry:
        return prompt if isinstance(prompt, str) else None
    well_formed = isinstance(messages, list) and all(
        isinstance(each, dict) and all(isinstance(each.get(name), str) for name in ("role", "content"))
        for each in messages
    )
    return messages if well_formed and messages else None


def _encode(tokenizer: Any, prompt: Any, chat: bool) -> Any:
    import numpy as np

    from loopscope.models.tokenizer import chat_prompt, encode

    if chat or not isinstance(prompt, str):
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return np.array(chat_prompt(tokenizer, messages), dtype=np.int64)
    tokens = encode(tokenizer, prompt)
    if not tokens:
        raise UserError("A prompt has no token; give it at least one word.")
    return np.array(tokens, dtype=np.int64)


def _policy(options: argparse.Namespace, num_loops: int) -> "ExitPolicy":
    from loopscope.exits import ExitPolicy

    if options.policy is not None:
        return load_policy(options.policy, options.any_model)
    if options.readout is not None:
        return ExitPolicy(options.readout, options.threshold)
    return ExitPolicy("fixed", options.loops or num_loops)


def _print_tokens(tokens: Iterator["Token"], tokenizer: Any, given: list[Any], options: argparse.Namespace) -> bool:
    """Prints one text as it comes, or writes lines of many; False where that was interrupted."""
    live = len(given) == 1 and not options.json and options.out is None
    try:
        if live:
            _print_live(tokens, tokenizer, options.show_loops)
        else:
            with _opened(options.out) as out:
                _write_lines(tokens, tokenizer, given, out, options.lossless)
    except KeyboardInterrupt:
        print_note(
            "\nloopscope: interrupted." if live else "loopscope: interrupted; prompts that were finished are written."
        )
        return False
    return True


def _print_live(tokens: Iterator["Token"], tokenizer: Any, show_loops: bool) -> None:
    from loopscope.models.tokenizer import Detokenizer

    text, shown = Detokenizer(tokenizer), visible if sys.stdout.isatty() else str
    for token in tokens:
        print(shown(text.add(token.token)), end=f"[{token.loops}]" if show_loops else "", flush=True)
    print(shown(text.rest()))


@contextmanager
def _opened(path: Path | None) -> Iterator[TextIO]:
    """Where the lines go; a file that got none is not left."""
    if path is None:
        yield sys.stdout
        return
    from loopscope.writing import locked, room_for

    with room_for(path), locked(path), path.open("a", encoding="utf-8") as out:
        check_new(path)
        try:
            yield out
        finally:
            out.flush()
            if not out.tell():
                path.unlink()


def _write_lines(tokens: Iterator["Token"], tokenizer: Any, given: list[Any], out: TextIO, lossless: bool) -> None:
    """A line for every prompt that is finished, in their order; at the end, whatever it is, also for those after it."""
    from loopscope.models.tokenizer import decode

    generated: dict[int, list[Token]] = {}
    finished: set[int] = set()
    following = 0

    def write(number: int) -> None:
        finished.remove(number)
        own = generated.pop(number)
        line = {
            "number": number + 1,
            "prompt": given[number],
            "text": decode(tokenizer, [each.token for each in own]),
            "tokens": [each.token for each in own],
            "loops": [each.loops for each in own],
            "finish_reason": own[-1].finish_reason,
        }
        if lossless:
            stood = sum(each.accepted for each in own)
            line |= {"drafted": stood + sum(each.taken_back for each in own), "accepted": stood}
        print(visible(json.dumps(line, ensure_ascii=False)), file=out, flush=True)

    try:
        for token in tokens:
            generated.setdefault(token.key, []).append(token)
            if token.finish_reason:
                finished.add(token.key)
            while following in finished:
                write(following)
                following += 1
    finally:
        for number in sorted(finished):
            write(number)
