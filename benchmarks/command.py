"""How is a benchmark started? By a parser and with sentences like those of `loopscope`."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from loopscope.cli import run_command
from loopscope.cli.options import Execute, Parser, described
from loopscope.cli.output import machine_line, print_json, print_table
from loopscope.progress import track

T = TypeVar("T")


def run_benchmark(
    name: str, text: str | None, define: Callable[[Parser], None], execute: Execute, words: Sequence[str] | None
) -> int:
    """Executes `python -m benchmarks.NAME` with these words (default: those that were typed); the exit code."""

    def make() -> Parser:
        parser = Parser(prog=f"python -m benchmarks.{name}", **described(text or name))
        parser.set_defaults(execute=execute, resumes=False, parser=parser)
        define(parser)
        return parser

    return run_command(sys.argv[1:] if words is None else list(words), make)


def print_measured(result: Any, title: str, columns: list[str], rows: list[list[str]], as_json: bool) -> None:
    """What a benchmark measured, and on which machine."""
    if as_json:
        print_json(result)
    else:
        print_table(f"{title} {machine_line(result.machine)}", columns, rows)


def simulate(
    work: str,
    measure: Callable[..., T],
    kinds: Sequence[Sequence[Any]],
    title: str,
    columns: Mapping[str, Callable[[T], str]],
    as_json: bool,
) -> None:
    """Measures every kind of simulation, and prints a row of each; the first three columns say which."""
    found = []
    with track(work) as advance:
        for done, kind in enumerate(kinds):
            advance(done, len(kinds), ", ".join(map(str, kind)))
            found.append(measure(*kind))
        advance(len(kinds), len(kinds), "")
    if as_json:
        print_json(found)
    else:
        rows = [[cell(each) for cell in columns.values()] for each in found]
        print_table(title, list(columns), rows, keys=3)
