"""How far is long work, and how long will it take? A bar on a terminal, a line now and then in a log."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

Advance = Callable[[int, str], None]
"""`advance(done, note)`: how much of the total is done by now, and a few words on the state of the work."""


def silent(done: int, note: str) -> None:
    """The `Advance` of work that nobody watches."""


@contextmanager
def track(title: str, total: int, start: int = 0, stream: TextIO | None = None) -> Iterator[Advance]:
    """Shows progress with the time left on `stream` (stderr by default) while the work runs."""
    out = stream or sys.stderr
    if out.isatty():
        yield from _bar(title, total, start, out)
    else:
        yield _log_lines(title, total, start, out)


def _bar(title: str, total: int, start: int, out: TextIO) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=Console(file=out)) as bar:
        task = bar.add_task(title, total=total, completed=start, note="")
        yield lambda done, note: bar.update(task, completed=done, note=note)


def _log_lines(title: str, total: int, start: int, out: TextIO, every: float = 10.0) -> Advance:
    began = last = time.monotonic()

    def advance(done: int, note: str) -> None:
        nonlocal last
        now = time.monotonic()
        if done < total and now - last < every:
            return
        last = now
        left = (now - began) / max(done - start, 1) * (total - done)
        out.write(f"{title}: {done}/{total}, {clock(left)} left. {note}\n")
        out.flush()

    return advance


def clock(seconds: float) -> str:
    """A duration as a person would say it: `45 s`, `12 min`, `3.5 h`, `12 days`."""
    for size, unit, digits in ((86400.0, "days", 0), (3600.0, "h", 1), (60.0, "min", 0)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.{digits}f} {unit}"
    return f"{seconds:.0f} s"
