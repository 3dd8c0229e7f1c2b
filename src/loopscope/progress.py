"""How far is long work, and how long will it take? A bar on a terminal, a line now and then in a log."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from loopscope.errors import visible

ProgressCallback = Callable[[int, int, str], None]
"""`advance(done, total, note)`: how much of the work is done by now, and a few words on its state."""


_LOG_SECONDS = 10.0
"""Between two lines of a log."""


def silent(done: int, total: int, note: str) -> None:
    """Show no progress: the default `ProgressCallback`."""


@contextmanager
def track(title: str, unit: str = "") -> Iterator[ProgressCallback]:
    """Show progress and the time left on standard error; `unit` names the things that are counted."""
    out, title = sys.stderr, visible(title, keep="")
    if out.isatty():
        yield from _progress_bar(title, out, unit)
    else:
        yield _log_lines(title, out, unit)


def _progress_bar(title: str, out: TextIO, unit: str) -> Iterator[ProgressCallback]:
    """Show progress as a bar on a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        *([TextColumn(unit, markup=False)] if unit else []),
        TimeRemainingColumn(elapsed_when_finished=True),
        TextColumn("{task.fields[note]}", markup=False),
    )
    with Progress(*columns, console=Console(file=out)) as bar:
        task = bar.add_task(title, total=None, note="")
        yield lambda done, total, note: bar.update(task, completed=done, total=total, note=note)


def _log_lines(title: str, out: TextIO, unit: str) -> ProgressCallback:
    """Show progress as a line now and then, for a log."""
    first: tuple[float, int] | None = None  # when the work began to be watched, and how much was done then
    last = time.monotonic()

    def advance(done: int, total: int, note: str) -> None:
        nonlocal first, last
        now = time.monotonic()
        if first is None or done < first[1]:  # a resumed run may go back to its last checkpoint
            first = now, done
        if done < total and (now - last < _LOG_SECONDS or done == first[1]):
            return
        last = now
        left = (now - first[0]) / max(done - first[1], 1) * (total - done)
        out.write(f"{title}: {done:,}/{total:,}{unit and f' {unit}'}, {clock(left)} left. {note}\n")
        out.flush()

    return advance


def clock(seconds: float) -> str:
    """A duration in words: `45 s`, `12 min`, `3.5 h`, `12 days`."""
    for size, unit, digits in ((86400.0, "days", 0), (3600.0, "h", 1), (60.0, "min", 0)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.{digits}f} {unit}"
    return f"{seconds:.0f} s"
