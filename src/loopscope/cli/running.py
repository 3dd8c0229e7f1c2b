"""`loopscope run`: a file of examples through the adaptive engine, answers as JSON lines."""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from io import TextIOWrapper
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TextIO

from loopscope.cli.calibrating import check_any_model, load_policy
from loopscope.cli.show import percent, say
from loopscope.cli.verbs import device_of
from loopscope.errors import UserError

if TYPE_CHECKING:
    from loopscope.engine import Request
    from loopscope.exits import ExitPolicy
    from loopscope.tasks import Examples

    Parse = Callable[[list[str]], Examples]

_CHUNK = 1024
"""Lines that are read and parsed at a time."""


class _Asked(NamedTuple):
    line: int
    text: str
    label: int


def run(options: argparse.Namespace) -> int:
    from loopscope.engine import in_order, run
    from loopscope.models import load_model
    from loopscope.training.settings import settings_of

    if options.examples != "-" and (not Path(options.examples).exists() or Path(options.examples).is_dir()):
        raise UserError(
            f"There is no file {options.examples}; give a file with one example a line, or - for the input."
        )
    if options.out is not None and options.out.exists():
        raise UserError(f"{options.out} is there already; choose another --out, or remove it.")
    settings = settings_of(options.run)
    policy = _policy(options)
    model = load_model(options.run, device_of(options))
    asked: dict[int, _Asked] = {}
    bad: list[UserError] = []
    count = right = loops = 0
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    with (
        nullcontext(sys.stdin) if options.examples == "-" else _text(Path(options.examples)) as lines,
        nullcontext(sys.stdout) if options.out is None else _written(options.out) as out,
    ):
        parse = partial(settings.task.parse, longest=settings.block_size)
        requests = _requests(lines, options.examples, parse, asked, bad)
        for answer in in_order(run(model, policy, requests, options.batch_size)):
            line, text, label = asked.pop(answer.key)
            entry = {"line": line, "example": text, "answer": answer.prediction, "loop": answer.loop}
            print(json.dumps(entry | {"right": answer.prediction == label}), file=out)
            count, right, loops = count + 1, right + (answer.prediction == label), loops + answer.loop
    if count:
        say(f"{count:,} examples under {policy}: {percent(right / count)} right, {loops / count:.2f} loops on average.")
        if policy.promise is not None:
            say(policy.promise.sentence)
    if bad:
        raise bad[0]
    return 0


def _text(path: Path) -> TextIO:
    """Bytes that are no text become a character that no example has, so that their line is named."""
    return path.open(encoding="utf-8-sig", errors="replace")


@contextmanager
def _written(path: Path) -> Iterator[TextIO]:
    """A file that is there when all is written."""
    from loopscope.artifacts import atomic_file

    with atomic_file(path) as scratch, scratch.open("w", encoding="utf-8") as out:
        yield out


def _policy(options: argparse.Namespace) -> "ExitPolicy":
    from loopscope.exits import ExitPolicy, FittedGate, attach
    from loopscope.exits.signals import FITTED
    from loopscope.exits.sweep import choose
    from loopscope.trajectory import Trajectory

    check_any_model(options)
    if options.policy is not None and options.threshold is not None:
        raise UserError("A policy file has its own threshold; leave out --threshold.")
    if options.policy is not None:
        return load_policy(options.policy, options.any_model)
    gate = None
    if options.gate is not None:
        gate = FittedGate.load(options.gate)
        options.readout = FITTED + options.gate.absolute().name
    if options.threshold is not None or options.readout == "oracle":
        return ExitPolicy(options.readout, options.threshold, gate)
    recording = options.run / "recordings" / "validation"
    if not recording.is_dir():
        raise UserError(
            f"Without --threshold it is chosen on the validation recording, and {recording} is not there; record it "
            f"with `loopscope record {options.run} --split validation`."
        )
    validation = Trajectory.load(recording)
    if gate is not None:
        gate.check_calibration(validation.split)
        validation = attach(validation, {options.readout.removeprefix(FITTED): gate})
    return replace(choose(options.readout, validation), gate=gate)


def _requests(
    lines: Iterable[str], name: str, parse: "Parse", asked: dict[int, _Asked], bad: list[UserError]
) -> Iterator["Request"]:
    """The examples until the first that is none: it goes to `bad`, and those before it are answered all the same."""
    from loopscope.engine import Request

    numbered = ((number, line.strip()) for number, line in enumerate(lines, start=1) if line.strip())
    key = 0
    while not bad and (chunk := list(islice(numbered, _CHUNK))):
        chunk, examples = _parsed(chunk, name, parse, bad)
        rows = zip(chunk, examples.tokens, examples.lengths.tolist(), examples.labels.tolist(), strict=True)
        for (number, text), tokens, length, label in rows:
            asked[key] = _Asked(number, text, label)
            yield Request(key, (tokens[:length],))
            key += 1


def _parsed(
    chunk: list[tuple[int, str]], name: str, parse: "Parse", bad: list[UserError]
) -> tuple[list[tuple[int, str]], "Examples"]:
    """The examples of these lines, up to the first that is none."""
    try:
        return chunk, parse([text for _, text in chunk])
    except UserError:
        for place, (number, text) in enumerate(chunk):
            try:
                parse([text])
            except UserError as error:
                bad.append(UserError(f"{name}, line {number}: {error}"))
                return chunk[:place], parse([text for _, text in chunk[:place]])
        raise
