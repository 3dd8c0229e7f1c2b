"""Answer the examples in a file with adaptive depth.

loopscope answer runs/demo/fixed-geometric examples.txt --readout margin
echo "+ 1 * 0 1" | loopscope answer runs/demo/fixed-geometric - \\
    --readout margin --threshold 4
loopscope answer runs/mine examples.txt --readout fixed --threshold 4 \\
    --out answers.jsonl
loopscope answer runs/mine examples.txt --fitted gates/linear
# as `loopscope calibrate` wrote it
loopscope answer runs/mine examples.txt --policy policy.json

The file has one example per line, in the text format of the task: for instance `+ 1 * 0 1` (prefix notation) or `0110`.
The answers are JSON lines in the order of the examples. Without --threshold, LoopScope chooses the threshold on the
run's validation recording.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from io import TextIOWrapper
from itertools import chain, islice
from pathlib import Path
from typing import Any, TextIO

import loopscope as ls
from loopscope.cli import inputs
from loopscope.cli.options import add_shared, add_verb, loops, option
from loopscope.cli.output import announce_device, percent, print_note
from loopscope.errors import UserError
from loopscope.files import atomic_file, new_path
from loopscope.frontier import choose
from loopscope.learned.attach import attach, load_fitted
from loopscope.policy import ExitPolicy
from loopscope.recording_paths import find_recording, recordings_at
from loopscope.tasks import Examples
from loopscope.training.run_folder import task_of_run
from loopscope.trajectory import Trajectory

Parse = Callable[[list[str]], Examples]

_CHUNK = 1024
"""Lines that are read and parsed at a time."""
_MAX_LINE = 1 << 16
"""Characters; a longer one is no example."""


def define(subparsers: Any) -> None:
    """Add the arguments of `loopscope answer` to the parser."""
    parser = add_verb(subparsers, "answer", __doc__, execute)
    add_shared(parser, "run")
    option(parser, "examples", "a file with one example per line, or - for standard input", type=_examples_file)
    rule = parser.add_mutually_exclusive_group()
    names = f"the exit rule: {inputs.READOUT_NAMES}"
    option(rule, "--readout NAME", names, type=inputs.readout_name, default="margin")
    option(rule, "--fitted DIR", "folder of a fitted gate or stopper to use as the exit rule")
    option(rule, "--policy FILE", "policy file with the exit rule and its threshold")
    inputs.add_policy_options(parser)
    parser.excludes("policy", "threshold")
    option(
        parser,
        "--threshold X",
        "threshold of the exit rule (default: LoopScope chooses a threshold on validation data)",
    )
    deeper = "number of loops to run (default: the number of loops in training)"
    option(parser, "--loops N", deeper, type=loops)
    option(parser, "--batch-size N", "number of rows per batch", default=256)
    option(parser, "--out FILE", "file for the answers (default: standard output)", type=new_path)
    inputs.add_custom_tasks(parser)
    add_shared(parser, "--device NAME", "--threads N")
    inputs.add_custom_model(parser)


def _examples_file(text: str) -> str:
    """A file of examples, or `-` for standard input."""
    if text != "-":
        inputs.text_file(text, "file with one example a line (- is the standard input)")
    return text


def execute(options: argparse.Namespace) -> None:
    """Execute `loopscope answer` with its parsed arguments."""
    settings = inputs.finished_run(options.run, options.with_model)
    task = task_of_run(options.run, settings, options.with_task)
    inputs.check_readouts(options.readout)
    options.loops = options.loops or settings.num_loops
    policy = _answering_policy(options, settings.num_loops)
    inputs.check_runs_on(policy, options.run, options.loops)
    with _example_lines(options.examples) as lines:
        reader = _ExampleReader(options.examples, lines, partial(task.parse, longest=settings.block_size))
        requests = reader.requests()
        piped = options.examples == "-"  # whoever writes to a pipe need not have begun
        first = list(islice(requests, not piped))
        if not piped and not first and reader.error is None:
            raise UserError(f"There is no example in {options.examples}; write one a line.")
        if reader.error is None:
            _answer_examples(options, policy, reader, chain(first, requests))
    if reader.error is not None:
        raise reader.error


def _answer_examples(
    options: argparse.Namespace, policy: ExitPolicy, reader: "_ExampleReader", requests: Iterable["ls.Request"]
) -> None:
    """Answer the examples of a file or of standard input, and print a summary."""
    from loopscope.engine.scheduler import in_order, run

    inputs.import_models(options)
    model = ls.load_model(options.run, inputs.device_of(options))
    model.set_depth(options.loops)
    notes, total, right, taken = inputs.unnamed_model(options.policy, policy), 0, 0, 0
    with _answers_output(options.out) as out:
        for answer in in_order(run(model, requests, policy, options.batch_size)):
            announce_device(options)  # now nothing but a line is refused any more
            while notes:
                print_note(notes.pop())
            line, text, label = reader.unanswered.pop(answer.key)
            is_right = answer.prediction == label
            entry = {"line": line, "example": text, "answer": answer.prediction, "loop": answer.loop}
            print(json.dumps(entry | {"right": is_right}), file=out)
            total, right, taken = total + 1, right + is_right, taken + answer.loop
    if total:
        measured = f"{percent(right / total)} right, {taken / total:.2f} loops on average"
        print_note(f"{total:,} {'example' if total == 1 else 'examples'} under {policy}: {measured}.")
        if policy.guarantee is not None:
            print_note(policy.guarantee.sentence)


def _example_lines(source: str) -> AbstractContextManager[TextIO]:
    """The lines of the examples; bytes that are no text become a character that no example has."""
    if source != "-":
        return Path(source).open(encoding="utf-8-sig", errors="replace")
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    return nullcontext(sys.stdin)


@contextmanager
def _answers_output(path: Path | None) -> Iterator[TextIO]:
    """Standard output, or a file that appears when all answers are written."""
    if path is None:
        yield sys.stdout
        return
    with atomic_file(path) as scratch, scratch.open("w", encoding="utf-8") as out:
        yield out


def _answering_policy(options: argparse.Namespace, trained: int) -> ExitPolicy:
    """The policy that answers examples: from a file, or from a readout of the run's recordings."""
    if options.policy is not None:
        return inputs.load_policy(options.policy, options.any_model)
    readout, gate = options.readout, None
    if options.fitted is not None:
        gate = load_fitted(options.fitted)
        readout = gate.prefix + options.fitted.absolute().name
    if options.threshold is not None:
        return inputs.policy_by_hand(readout, options.threshold, gate)
    place = options.run if options.loops == trained else recordings_at(options.run, options.loops, trained)
    validation = Trajectory.load(find_recording(place, "validation"))
    if validation.num_loops != options.loops:
        raise UserError(
            f"The validation recording in {place} has {validation.num_loops} loops, and here {options.loops} are run; "
            f"give --loops {validation.num_loops}, or a threshold."
        )
    if gate is not None:
        gate.check_calibration(validation)
        validation = attach(validation, {options.fitted.absolute().name: gate})
    return replace(choose(readout, validation), gate=gate)


class _ExampleReader:
    """Reads examples up to the first line that is none; the examples before it are answered."""

    def __init__(self, name: str, lines: TextIO, parse: Parse) -> None:
        self._name, self._lines, self._parse = name, lines, parse
        self.unanswered: dict[int, tuple[int, str, int]] = {}  # line, text and label by key
        self.error: UserError | None = None

    def requests(self) -> Iterator["ls.Request"]:
        read = enumerate(iter(partial(self._lines.readline, _MAX_LINE), ""), start=1)
        numbered = ((number, line.strip()) for number, line in read if line.strip())
        key, size = 0, 1  # the first line alone, so that its error comes before a model is loaded
        while self.error is None and (chunk := list(islice(numbered, size))):
            examples = self._parsed(chunk)
            rows = zip(examples.tokens, examples.lengths.tolist(), examples.labels.tolist(), strict=True)
            for (number, text), (tokens, length, label) in zip(chunk, rows, strict=False):
                self.unanswered[key] = (number, text, label)
                yield ls.Request(key, (tokens[:length],))
                key += 1
            size = _CHUNK

    def _parsed(self, chunk: list[tuple[int, str]]) -> Examples:
        """The examples of these lines up to the first that is none, which becomes the error."""
        texts = [text for _, text in chunk]
        try:
            return self._parse(texts)
        except UserError as error:
            if len(chunk) > 1:
                good = next(place for place, line in enumerate(chunk) if not len(self._parsed([line]).labels))
                return self._parse(texts[:good])
            self.error = UserError(f"{self._name}, line {chunk[0][0]}: {error}")
            return self._parse([])
