"""What becomes of an input? It is tried within limits of time and memory, and its outcome judged.

An input is right if it is refused in one sentence (exit code 2, or `UserError`), or accepted and what it says holds:
the kinds know what that is, and assert it. Whatever else happens is a failure. Input I of a
kind is drawn from the seed, the kind and I alone, so that it can be repeated alone.
"""

import faulthandler
import io
import json
import logging
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import unicodedata
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from loopscope.cli import main
from loopscope.errors import UserError
from loopscope.files import is_scratch

from .mutations import Rng, spoil
from .world import World

MAX_MESSAGE = 500
"""Characters."""
SECONDS = 30.0
"""Of computing; an input takes 20 ms, a whole demo with all its figures twenty seconds."""
MAX_WAIT = 300.0
"""Seconds by the clock, computing or not: a shared machine may be slow."""
MEMORY = 3 << 30
"""Bytes that an input may take."""
ON_TERMINAL = 0.2
"""The share of commands that run on a terminal: then progress is a bar, and a title is bold."""
_CODES = re.compile(r"\x1b\[(?:[0-4]?m|\?25[lh]|1A|2K)|\r")
"""What bars and titles without colours have to say to a terminal."""
_READING = re.compile(r"\r(?:Generating \w+ split: [^\r\n\x1b]*)?")
"""The bar of the library that reads tasks' data."""
_REORDERS = "\u2028\u2029\u202e\u2066\u2067\u2068"


class RefusedError(Exception):
    """The command line refused an input in one sentence."""


class TooLongError(BaseException):
    """An input takes longer than any should; no handler of ours or of a library may swallow it."""


class _Stream(io.StringIO):
    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


@dataclass
class Case:
    """One input: where it lies, and what was done to it."""

    rng: Rng
    folder: Path
    verb: str = ""  # whose options are tried
    notes: list[str] = field(default_factory=list)
    before: dict[Path, tuple[int, ...]] = field(default_factory=dict)  # the files that must stay as they are

    def __post_init__(self) -> None:
        self.inputs, self.out = self.folder / "in", self.folder / "out" / "new"
        for place in (self.inputs, self.out.parent, self.folder / "here"):
            place.mkdir(parents=True)

    def copy(self, source: Path, name: str = "") -> Path:
        """A copy of a file or a folder, to be spoilt."""
        place = self.inputs / (name or source.name)
        place.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, place, copy_function=shutil.copyfile, dirs_exist_ok=True)
        else:
            shutil.copyfile(source, place)
        return place

    def spoil(self, path: Path, others: Sequence[Path] = (), writes: bool = False) -> None:
        """Spoils a file; from now on nothing of the inputs may change, unless what is tried `writes` there."""
        self.notes.append(spoil(self.rng, path, others))
        if not writes:
            self.before = _stamps(self.inputs)

    def spoilt_copy(self, source: Path, name: str = "", writes: bool = False) -> Path:
        """A copy of a file, spoilt."""
        place = self.copy(source, name)
        self.spoil(place, writes=writes)
        return place

    def command(self, *words: object, verdicts: Sequence[int] = (0,)) -> str:
        """What a command prints, if it goes well; `RefusedError` if it ends in one sentence."""
        given = [str(word) for word in words]
        on_terminal = self.rng.random() < ON_TERMINAL
        self.notes.append(f"{'on a terminal: ' * on_terminal}loopscope " + " ".join(map(repr, given))[:2_000])
        os.environ |= {"NO_COLOR": "1", "TERM": "xterm"} if on_terminal else {}
        with (
            redirect_stdout(_Stream(on_terminal)) as out,
            redirect_stderr(_Stream(on_terminal)) as err,
            patch("sys.stdin", io.StringIO("")),
        ):
            try:
                code = main(given)
            except SystemExit as end:  # of --help
                code = int(end.code or 0)
        printed, said = out.getvalue(), err.getvalue()
        if on_terminal:
            printed, said = _CODES.sub("", printed), _CODES.sub("", said)
        elif given[:1] == ["harness"]:
            said = _READING.sub("", said)
        check_text(said)
        if on_terminal or given[:1] != ["generate"] or "--json" in given:  # else it is what the model says, as it is
            check_text(printed, keep="\n\t")
        if code == 2:
            check_message(said)
            raise RefusedError(said)
        assert code in verdicts, f"exit code {code}: {said[-300:]}"
        if "--json" in given:
            check_json(printed)
        return printed


def check_message(said: str) -> None:
    """One sentence, after whatever was noted before."""
    sentences = [line for line in said.splitlines() if line.startswith("loopscope")]
    last = said.rstrip("\n").splitlines()[-1:]
    assert sentences == last != [], f"not one sentence: {said[-300:]!r}"
    check_length(sentences[0].partition(": ")[2])


def check_length(message: str) -> None:
    one = message.splitlines() == [message[:MAX_MESSAGE]]
    assert one, f"a message is too long, or has several lines: {message[:300]!r}"


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def check_json(printed: str) -> None:
    """JSON values, one after the other, as every reader takes them: NaN is none."""
    try:
        list(json_values(printed, _no_number))
    except ValueError as error:
        raise AssertionError(f"--json prints what is no JSON: {error}, {printed[:200]!r}") from None


def json_values(text: str, constant: Callable[[str], Any] = float) -> Iterator[Any]:
    """JSON values, one after the other; `constant` makes something of NaN, or refuses it."""
    decoder, text = json.JSONDecoder(parse_constant=constant, parse_int=float), text.strip()
    while text:
        value, end = decoder.raw_decode(text)
        yield value
        text = text[end:].lstrip()


def check_text(text: str, keep: str = "\n") -> None:
    """Nothing that a terminal would obey."""
    for character in set(text) - set(keep):
        obeyed = unicodedata.category(character) in ("Cc", "Cs") or character in _REORDERS
        around = text[max(0, text.index(character) - 150) :][:200]
        assert not obeyed, f"a raw character is printed: {character!r} in {around!r}"


@dataclass(frozen=True)
class Kind:
    attempt: Callable[[World, Case], str | None]
    """Tries one input: "same" (accepted, and means what it meant) or "other" (accepted, and what it says holds)."""
    share: int  # of the inputs, against those of the other kinds
    needs: str = ""  # names of good artifacts of the world, made before the time of an input counts
    quick: bool = True  # whether it is in the short run of the tests


@dataclass(frozen=True)
class Failure:
    kind: str
    index: int
    what: str  # in a line
    place: str  # the same for inputs that fail for the same reason
    notes: list[str]
    trace: str


class Fuzzer:
    """Tries inputs of some kinds, and counts what became of them."""

    def __init__(self, world: World, kinds: Mapping[str, Kind], seed: int = 0, keep: Path | None = None) -> None:
        self.world, self.kinds, self.seed, self.keep = world, kinds, seed, keep
        self.work = world.folder.with_name(f"{world.folder.name}-inputs")
        self.outcomes: dict[str, Counter[str]] = defaultdict(Counter)
        self.verbs: dict[str, Counter[str]] = defaultdict(Counter)
        """Outcomes by the verb whose options were tried."""
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.failures: list[Failure] = []

    def __str__(self) -> str:
        names = ("refused", "same", "other", "FAILED")
        lines = [f"{'kind':<22}" + "".join(f"{name:>9}" for name in ("inputs", *names, "s", "slowest"))]
        for kind, counts in sorted(self.outcomes.items()):
            times = self.seconds[kind]
            numbers = [counts.total(), *(counts[name] for name in names), sum(times), max(times)]
            lines.append(f"{kind:<22}" + "".join(f"{number:>9.4g}" for number in numbers))
        accepted = [f"{verb} {counts['other']} of {counts.total()}" for verb, counts in sorted(self.verbs.items())]
        lines += ["", f"Options accepted: {', '.join(accepted)}"]
        alike = Counter((failure.kind, failure.place) for failure in self.failures)
        first = {(failure.kind, failure.place): failure for failure in reversed(self.failures)}
        for (kind, place), failure in sorted(first.items(), key=lambda each: each[0]):
            again = f"python -m tests.fuzz --seed {self.seed} --only {kind} --index {failure.index}"
            lines += ["", f"FAILED {kind}, {alike[kind, place]} times, {place}: {failure.what}", f"  again: {again}"]
            lines += [f"  {note}" for note in failure.notes]
        return "\n".join(lines)

    def run(self, inputs: int, progress: Callable[[int], None] = lambda done: None) -> None:
        """Tries so many inputs, of every kind its share."""
        shares, numbers = [kind.share for kind in self.kinds.values()], Counter[str]()
        for done, kind in enumerate(random.Random(self.seed).choices(list(self.kinds), shares, k=inputs), start=1):
            self.attempt(kind, numbers[kind])
            numbers[kind] += 1
            progress(done)

    def attempt(self, kind: str, index: int) -> str:
        """Tries one input, and says what became of it."""
        self.world.make(self.kinds[kind].needs)
        case = Case(random.Random(f"{self.seed}/{kind}/{index}"), self.work / f"{kind}-{index}")
        (self.work / "now").write_text(f"--seed {self.seed} --only {kind} --index {index}\n")
        before, start = _stamps(self.world.folder), time.monotonic()
        with _limits(case.folder / "here"):
            try:
                outcome = self._outcome(kind, case)
                self._check_files(case, before)
            except (Exception, TooLongError) as error:
                _stop_timers()
                outcome = "FAILED"
                self.failures.append(_failure(kind, index, error, case))
        if outcome == "FAILED" and self.keep is not None:
            shutil.move(case.folder, self.keep / case.folder.name)
        shutil.rmtree(case.folder, ignore_errors=True)
        self.outcomes[kind][outcome] += 1
        if case.verb:
            self.verbs[case.verb][outcome] += 1
        self.seconds[kind].append(time.monotonic() - start)
        return outcome

    def _outcome(self, kind: str, case: Case) -> str:
        try:
            return self.kinds[kind].attempt(self.world, case) or "same"
        except UserError as error:
            check_length(str(error))
            check_text(str(error))
        except RefusedError:
            pass
        return "refused"

    def _check_files(self, case: Case, before: dict[Path, tuple[int, ...]]) -> None:
        """Nothing is left behind, and nothing that was there has changed."""
        for root in (case.folder, self.world.folder):
            left = next(filter(is_scratch, root.rglob("*")), None)
            assert left is None, f"{left} was left behind"
        for root, known in ((self.world.folder, before), (case.inputs, case.before)):
            after = _stamps(root)
            lost = [str(path.relative_to(root)) for path, stamp in known.items() if after.get(path) != stamp]
            assert not lost, f"{lost[0]} was changed or lost"


def _stamps(folder: Path) -> dict[Path, tuple[int, ...]]:
    files = (Path(place, name) for place, _, names in os.walk(folder) for name in names)
    states = ((path, path.lstat()) for path in files)
    return {path: (state.st_size, state.st_mtime_ns, state.st_ino) for path, state in states}


@contextmanager
def _limits(folder: Path) -> Iterator[None]:
    """Within `folder`, with limits of time and memory, and as many threads afterwards as before."""

    def stop(*_: Any) -> None:
        raise TooLongError(f"more than {SECONDS:g} s of computing, or {MAX_WAIT:g} s of waiting")

    here = Path.cwd()
    before = [(number, signal.signal(number, stop)) for number in (signal.SIGPROF, signal.SIGALRM)]
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, hard))
    os.chdir(folder)
    logging.disable()  # libraries warn of what is then refused
    signal.setitimer(signal.ITIMER_PROF, SECONDS, 1.0)  # again, if something swallows the first
    signal.setitimer(signal.ITIMER_REAL, MAX_WAIT, 1.0)
    faulthandler.dump_traceback_later(3 * MAX_WAIT, exit=True, file=sys.__stderr__)  # a hang that no signal ends
    try:
        with warnings.catch_warnings(), patch.dict(os.environ):
            warnings.simplefilter("ignore")
            yield
    finally:
        _stop_timers()
        faulthandler.cancel_dump_traceback_later()
        for number, handler in before:
            signal.signal(number, handler)
        os.chdir(here)
        logging.disable(logging.NOTSET)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        torch.set_num_threads(1)


def _stop_timers() -> None:
    for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL):
        signal.setitimer(timer, 0)


def _failure(kind: str, index: int, error: BaseException, case: Case) -> Failure:
    """An error and where it came from: the innermost line of ours, without the fuzzer's."""
    frames = traceback.extract_tb((error.__cause__ or error).__traceback__)
    ours = [frame for frame in frames if f"{os.sep}loopscope{os.sep}" in frame.filename]
    place = f"{ours[-1].filename.rpartition('loopscope' + os.sep)[2]}:{ours[-1].name}" if ours else ""
    if isinstance(error, AssertionError) and frames[-1] not in ours:  # ours of the fuzzer
        place = str(error).partition(":")[0][:60]
    what = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    trace = "".join(traceback.format_exception(error, limit=-12))
    notes = [ascii(note)[1:-1] for note in case.notes]
    return Failure(kind, index, ascii(what)[1:-1], f"{type(error).__name__} in {place}", notes, trace)


@contextmanager
def working_folder() -> Iterator[Path]:
    """A folder for good artifacts; beside it `...-inputs` is for spoilt ones."""
    with tempfile.TemporaryDirectory(prefix="loopscope-fuzz-") as name:
        for folder in ("world", "world-inputs"):
            Path(name, folder).mkdir()
        yield Path(name, "world")
