"""How does a piece of work run in a process of its own that can be killed or stopped at a chosen moment?

The parent has imported everything once; every process is a fork of it, in a session and a group of its own, so that it
costs milliseconds and is real all the same. What a fork had to import besides, `learn` imports for those after it. A
moment is a time, or the n-th file operation below the folder that it works in: Python's audit events name them just
before they happen, renames and removals among them.
"""

import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

LONGEST = 300.0
"""Seconds after which a process counts as hanging."""
_CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.symlink", "os.link", "os.truncate"}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

Work = Callable[[], int | None]


@dataclass(frozen=True)
class At:
    """The file operation, counted from 0, at which a process sends itself a signal."""

    operation: int
    signal: signal.Signals


@dataclass(frozen=True)
class Ended:
    code: int  # the exit code, or minus the signal
    seconds: float
    stderr: str
    operations: list[str]
    """What it did to files, in order, up to its end."""

    @property
    def sentence(self) -> str | None:
        """The one sentence of a refusal; None where there is another number of them, or a traceback."""
        lines = [line for line in self.stderr.splitlines() if line.startswith("loopscope: ")]
        plain = len(lines) == 1 and lines[0].endswith(".") and "Traceback" not in self.stderr
        return lines[0] if plain else None

    def was_ended_by(self, number: signal.Signals) -> bool:
        """Whether a signal ended it, at once or in its own way."""
        return self.code in (-number, 128 + number)

    @property
    def refused(self) -> bool:
        return self.code == 2 and self.sentence is not None

    def __str__(self) -> str:
        how = f"signal {-self.code}" if self.code < 0 else f"exit code {self.code}"
        lines = self.stderr.strip().splitlines()
        return f"{how}: {lines[-1][:300] if lines else 'nothing was said'}"


class Process:
    """`work` in a fork whose working directory is `folder`."""

    def __init__(self, work: Work, folder: Path, log: Path, at: At | None = None) -> None:
        self._log = log
        shutil.rmtree(log, ignore_errors=True)
        log.mkdir(parents=True)
        ready, told = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if not self.pid:
            os.close(ready)
            _become(work, folder, log, at, told)
        os.close(told)
        os.read(ready, 1)  # it has a group of its own that can be killed
        os.close(ready)
        self._begun = time.monotonic()

    def wait(self, seconds: float) -> bool:
        """Whether it has ended so many seconds after it began."""
        while not (ended := self.ended()) and (left := self._begun + seconds - time.monotonic()) > 0:
            time.sleep(min(0.001, left))
        return ended

    def end(self) -> Ended:
        """How it ended, by itself; a process that hangs is killed, which is no end that anybody wants."""
        hangs = not self.wait(LONGEST)
        if hangs:
            self.kill()
        _, status = os.waitpid(self.pid, 0)
        files = [self._log / name for name in ("stderr", "operations")]
        stderr, operations = (file.read_text(errors="replace") if file.exists() else "" for file in files)
        if hangs:
            return Ended(1, LONGEST, f"it still ran after {LONGEST:.0f} s", operations.splitlines())
        seconds = time.monotonic() - self._begun
        return Ended(os.waitstatus_to_exitcode(status), seconds, stderr, operations.splitlines())

    def wait_until_stopped(self) -> bool:
        """Whether it stopped itself, and did not end before."""
        status = os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        return status is not None and status.si_code == os.CLD_STOPPED

    def ended(self) -> bool:
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def kill(self, group: bool = True, by: signal.Signals = signal.SIGKILL) -> None:
        (os.killpg if group else os.kill)(self.pid, by)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def alive(self) -> list[int]:
        """The processes of its session that still run."""
        found = []
        for entry in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):  # it has just ended
                state, _, _, session, *_ = entry.read_text().rpartition(")")[2].split()
                found += [int(entry.parent.name)] if int(session) == self.pid and state not in "ZX" else []
        return found


def run(work: Work, folder: Path, log: Path) -> Ended:
    """Work that is left alone."""
    return Process(work, folder, log).end()


def learn(log: Path) -> None:
    """Imports what a process that has ended had imported."""
    for name in (log / "modules").read_text().split():
        if name not in sys.modules:
            with suppress(Exception):  # some are made, not imported
                import_module(name)


def _become(work: Work, folder: Path, log: Path, at: At | None, told: int) -> None:
    """What the fork does; it never returns."""
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.write(told, b".")
        os.close(told)
        os.chdir(folder)
        for name, stream in (("stdout", 1), ("stderr", 2)):
            os.dup2(os.open(log / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
        operations = os.open(log / "operations", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        sys.addaudithook(_hook(str(folder), operations, at))
        code = work() or 0
        (log / "modules").write_text("\n".join(sys.modules))
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _hook(folder: str, log: int, at: At | None) -> Callable[[str, tuple[Any, ...]], None]:
    count = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        opens = event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITES
        if not (opens or event in _CHANGES) or not isinstance(arguments[0], (str, bytes, os.PathLike)):
            return
        path = os.fsdecode(arguments[0])
        if path.startswith("/") and not path.startswith(folder):
            return
        number, count = count, count + 1
        os.write(log, f"{event} {path.removeprefix(folder)}\n".encode())
        if at is not None and number == at.operation:
            os.kill(os.getpid() if at.signal == signal.SIGSTOP else 0, at.signal)  # 0: all of its group

    return hook
