"""`loopscope generate`: text from a looped language model, each token as deep as its policy wants."""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from loopscope.cli.calibrating import check_any_model, load_policy, promises_answers
from loopscope.cli.options import any_model, compute_options, count, verb
from loopscope.cli.show import say
from loopscope.cli.verbs import device_of
from loopscope.errors import UserError

if TYPE_CHECKING:
    from loopscope.engine.generation import Token
    from loopscope.exits import ExitPolicy
    from loopscope.models import LoopedModel


def define(subparsers: Any) -> None:
    parser = verb(
        subparsers,
        "generate",
        "continue text with a looped language model",
        """\
  loopscope generate ByteDance/Ouro-1.4B "The capital of France is" --max-new-tokens 20
  loopscope generate runs/small-ouro "Question: " --readout gate --threshold 0.6 --show-loops
  loopscope generate ByteDance/Ouro-1.4B-Thinking "Why is the sky blue?" --chat --policy policy.json
  loopscope generate MODEL --prompts prompts.jsonl --loops 3 --out answers.jsonl --batch-size 16

A policy comes from `loopscope record MODEL --text FILE` and `loopscope calibrate RECORDING --loss disagreement`. In a
file of prompts every line is one: plain text, or in a .jsonl file {"prompt": ...} or {"messages": [...]}. Answers are
JSON lines, in the order of the prompts, each written when it and those before it are finished; an interrupted run
leaves all that were finished, each with the number of its prompt.""",
        generate,
    )
    parser.add_argument("model", help="the folder of a checkpoint, or its name on the Hub")
    parser.add_argument("prompt", nargs="?", help="the text to be continued")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="many prompts: one a line, or .jsonl")
    parser.add_argument("--chat", action="store_true", help="the prompt is a user's turn, in the model's chat template")
    rule = parser.add_mutually_exclusive_group()
    rule.add_argument("--policy", type=Path, metavar="FILE", help="the exit policy (default: all loops)")
    rule.add_argument("--readout", metavar="NAME", help="an exit rule, with --threshold")
    rule.add_argument("--loops", type=count, metavar="N", help="every token through so many loops")
    parser.add_argument("--threshold", type=float, metavar="X", help="of --readout")
    any_model(parser)
    parser.add_argument(
        "--cache",
        default="all",
        choices=("all", "fill", "last"),
        help="what later tokens find of one that exited early. all (default): every loop's keys and values, made when "
        "they are needed; fill: its exit loop's in the deeper ones; last: one place for all loops",
    )
    parser.add_argument("--max-new-tokens", type=count, default=128, metavar="N", help="default: 128")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="X", help="0 (default): the likeliest token")
    parser.add_argument("--top-k", type=int, default=0, metavar="N", help="draw among the likeliest N")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="X", help="draw among the likeliest that make up X")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the draws (default: 0)")
    parser.add_argument("--batch-size", type=count, default=8, metavar="N", help="prompts at a time (default: 8)")
    parser.add_argument("--dtype", metavar="NAME", help="float32, bfloat16 or float16 (default: the file's)")
    parser.add_argument("--show-loops", action="store_true", help="after each token, the loops that it took")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON lines, one a prompt")
    compute_options(parser)


def generate(options: argparse.Namespace) -> int:
    from loopscope.config import build
    from loopscope.engine.generation import Prompt, Sampling, Work, room, stream
    from loopscope.models import load_model
    from loopscope.models.checkpoint import end_tokens
    from loopscope.models.hub import find_checkpoint
    from loopscope.models.tokenizer import load_tokenizer, stop_tokens

    if (options.prompt is None) == (options.prompts is None):
        raise UserError("Give a prompt, or a file of them with --prompts.")
    if options.out is not None and options.out.exists():
        raise UserError(f"{options.out} is there already; choose another --out, or remove it.")
    names = ("temperature", "top_k", "top_p", "seed")
    sampling = build(Sampling, {name: getattr(options, name) for name in names}, "the sampling")
    asked = [options.prompt] if options.prompts is None else list(_read(options.prompts))
    if not asked:
        raise UserError(f"There is no prompt in {options.prompts}; write one a line.")
    folder = find_checkpoint(options.model)
    tokenizer = load_tokenizer(folder)
    prompts = [Prompt(number, _tokens(tokenizer, text, options.chat)) for number, text in enumerate(asked)]
    model = load_model(folder, device_of(options), options.dtype)
    for prompt in prompts:
        room(model, prompt, options.max_new_tokens)  # before anything is said, not when its turn comes
    policy, work = _policy(options, model), Work()
    began = time.perf_counter()
    tokens = stream(
        model,
        prompts,
        policy,
        max_new_tokens=options.max_new_tokens,
        stop=stop_tokens(tokenizer, end_tokens(folder)),
        cache=options.cache,
        sampling=sampling,
        batch_size=options.batch_size,
        work=work,
    )
    live = len(asked) == 1 and not options.json and options.out is None
    try:
        if live:
            _print_live(tokens, tokenizer, options.show_loops)
        else:
            with _opened(options.out) as out:
                _write_lines(tokens, tokenizer, asked, out)
    except KeyboardInterrupt:
        say("\nloopscope: interrupted." if live else "loopscope: interrupted; prompts that were finished are written.")
        return 130
    seconds = time.perf_counter() - began
    say(
        f"{work.tokens:,} tokens in {seconds:.1f} s ({work.tokens / seconds:.1f} a second), "
        f"{work.loops / max(1, work.tokens):.2f} of {model.num_loops} loops on average."
    )
    return 0


def _read(path: Path) -> Iterator[Any]:
    """The prompts of a file: texts, or lists of messages."""
    if not path.is_file():
        raise UserError(f"There is no file {path}; give one with a prompt a line.")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text; convert it.") from None
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        if path.suffix != ".jsonl":
            yield line
            continue
        try:
            asked = _asked(json.loads(line))
        except ValueError:
            asked = None
        if asked is None:
            raise UserError(
                f'{path}, line {number} is neither {{"prompt": "..."}} nor {{"messages": [{{"role": "...", "content": '
                '"..."}, ...]}; correct it.'
            )
        yield asked


def _asked(entry: Any) -> str | list[dict[str, str]] | None:
    """The text of a prompt, or the messages of a chat; None where it is neither."""
    if not isinstance(entry, dict):
        return None
    messages, prompt = entry.get("messages"), entry.get("prompt")
    if "messages" not in entry:
        return prompt if isinstance(prompt, str) else None
    said = isinstance(messages, list) and all(
        isinstance(each, dict) and all(isinstance(each.get(name), str) for name in ("role", "content"))
        for each in messages
    )
    return messages if said and messages else None


def _tokens(tokenizer: Any, asked: Any, chat: bool) -> Any:
    import numpy as np

    from loopscope.models.tokenizer import chat_prompt

    if chat or not isinstance(asked, str):
        messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
        return np.array(chat_prompt(tokenizer, messages), dtype=np.int64)
    tokens = tokenizer(asked)["input_ids"]
    if not tokens:
        raise UserError("A prompt has no token; give it at least one word.")
    return np.array(tokens, dtype=np.int64)


def _policy(options: argparse.Namespace, model: "LoopedModel") -> "ExitPolicy":
    from loopscope.exits import ExitPolicy

    check_any_model(options)
    if (options.readout is None) != (options.threshold is None):
        raise UserError("An exit rule is --readout with its --threshold; give both.")
    if options.policy is not None:
        policy = load_policy(options.policy, options.any_model)
        if promises_answers(policy):
            say("The policy's promise is about whole answers: it does not hold for the tokens of a text.")
        return policy
    if options.readout is not None:
        return ExitPolicy(options.readout, options.threshold)
    return ExitPolicy("fixed", options.loops or model.num_loops)


def _print_live(tokens: Iterator["Token"], tokenizer: Any, show_loops: bool) -> None:
    """Prints a text as it comes."""
    text = Spelled(tokenizer)
    for token in tokens:
        print(text.add(token.token), end=f"[{token.loops}]" if show_loops else "", flush=True)
    print(text.rest())


class Spelled:
    """Tokens become text as they come, none of it decoded twice but the last few tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []  # the last that were told, before them nothing matters, and those that were not
        self._told = 0  # how many of them were

    def add(self, token: int) -> str:
        """What is sure now; the rest of a character may be still to come."""
        self._tokens.append(token)
        new = self._new()
        if new.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self._tokens = self._tokens[self._told :]
        self._told = len(self._tokens)
        return new

    def rest(self) -> str:
        return self._new()

    def _new(self) -> str:
        return self._decoded(self._tokens)[len(self._decoded(self._tokens[: self._told])) :]

    def _decoded(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))


@contextmanager
def _opened(path: Path | None) -> Iterator[TextIO]:
    """Where the lines go; a file that got none is not left."""
    if path is None:
        yield sys.stdout
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("x", encoding="utf-8") as out:
        try:
            yield out
        finally:
            out.flush()
            if not out.tell():
                path.unlink()


def _write_lines(tokens: Iterator["Token"], tokenizer: Any, asked: list[Any], out: TextIO) -> None:
    """A line for every prompt that is finished, in their order; at the end, whatever it is, also for those after it."""
    said: dict[int, list[Token]] = {}
    finished: set[int] = set()
    following = 0

    def write(number: int) -> None:
        finished.remove(number)
        told = said.pop(number)
        line = {
            "number": number + 1,
            "prompt": asked[number],
            "text": tokenizer.decode([each.token for each in told], skip_special_tokens=True),
            "tokens": [each.token for each in told],
            "loops": [each.loops for each in told],
            "finished": told[-1].finished,
        }
        print(json.dumps(line, ensure_ascii=False), file=out, flush=True)

    try:
        for token in tokens:
            said.setdefault(token.key, []).append(token)
            if token.finished:
                finished.add(token.key)
            while following in finished:
                write(following)
                following += 1
    finally:
        for number in sorted(finished):
            write(number)
