"""Does a writer that is killed, meets a full disk or has company leave what it should?

- A kill, mostly by SIGKILL, else by SIGTERM or SIGINT: the same command again ends with 0 and leaves byte for byte what
  an undisturbed one leaves, and nothing else: no scratch, no shared memory, no process. Before that, whoever reads gets
  the old artifact, the new one or a sentence.
- Two writers of one target, some by way of a link: each ends with 0 or with one sentence and 2, at least one with 0,
  and what is there is whole. Two targets of which one's name begins like the other's: neither notices the other.
- A full disk: one sentence and 2, nothing left behind, what was there is as it was; with room, it works.
"""

import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

from loopscope.errors import UserError
from loopscope.files import is_scratch

from .processes import At, Process, Work, learn, run
from .scenes import Inputs, Scene

Tree = dict[str, str]
"""What every path below a folder is: the hash of a file, the place that a link points to, or a folder."""

SHARED_MEMORY = Path("/dev/shm")
PRIVATE = "LOOPSCOPE_KILLS_PRIVATE"
"""Set where this process has mounts of its own: it may mount small disks, and its shared memory is nobody else's."""
_SIGNALS = (*[signal.SIGKILL] * 5, *[signal.SIGTERM] * 2, signal.SIGINT)
_READ_EVERY = 3
_SIZES = (0.0, 0.15, 0.3, 0.45, 0.6, 0.75, 0.9, 0.98, 1.2)
_FEW_SIZES = (0.3, 0.75)
"""Of the room on a disk, as a share of what the verb writes."""
_ROOMY = 1 << 18
"""Pages of 4 KiB."""


@dataclass
class Count:
    """What was tried with a scene, and what was not as it should be."""

    scene: str
    what: str
    tries: int = 0
    faults: list[str] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def trying(self, outcome: str, how: str) -> Iterator[None]:
        """One more try, and how it was disturbed; an assertion that fails is a fault of it."""
        self.tries += 1
        self.outcomes[outcome] += 1
        try:
            yield
        except AssertionError as fault:
            self.faults.append(f"{how}: {fault}")


@dataclass(frozen=True)
class Reference:
    """What a scene does undisturbed."""

    folder: Path
    tree: Tree
    before: Tree
    seconds: float
    operations: list[str]


class Tester:
    def __init__(self, folder: Path, seed: int = 0) -> None:
        self._folder, self._seed = folder, seed
        self.inputs = Inputs(folder / "inputs")
        self._references: dict[str, Reference] = {}
        self._disk, self._log = folder / "disk", folder / "log"
        self._work = self._disk / "work"

    def kills(self, scene: Scene, count: int) -> Count:
        """Half of them at a time, half at a file operation, where this process alone does those."""
        rng, reference, counted = self._rng(scene, "kill"), self._reference(scene), Count(scene.name, "kill")
        operations, missed, seconds = _in_turn(len(reference.operations), rng), 0, reference.seconds
        late = 0  # how often it had ended before, since the last kill
        while counted.tries < count and missed < 2 * count + 10:
            number, by = counted.tries, rng.choice(_SIGNALS if scene.act is None else _SIGNALS[:-1])
            with self._place(scene):
                work = scene.work(self.inputs)
                at_operation = bool(reference.operations) and (number % 2 == 1 or late > 2)
                if at_operation:
                    operation = next(operations)
                    process = Process(work, self._work, self._log, At(operation, by))
                    how = f"killed by {by.name} before file operation {operation}"
                else:
                    moment = (number // 2 + rng.random()) / ((count + 1) // 2) * seconds
                    whole = rng.random() < 0.7
                    process = Process(work, self._work, self._log)
                    process.wait(moment)
                    how = f"{'killed' if whole else 'its first process alone killed'} by {by.name} after {moment:.3f} s"
                    process.kill(whole, by)
                ended = process.end()
                if by == signal.SIGINT and ended.code == 130 and ended.sentence is None:
                    counted.faults.append(f"{how}: it did not say so in a sentence: {ended}")
                if not ended.was_ended_by(by):
                    missed, late, seconds = missed + 1, late + 1, min(seconds, ended.seconds)
                    if ended.code:
                        counted.faults.append(f"it ended before it was {how}: {ended}")
                    continue
                late = 0
                how += f" ({ended.operations[-1]})" if at_operation and ended.operations else ""
                with counted.trying(by.name, how):
                    self._check_visible(scene, reference, read=number % _READ_EVERY == 0)
                    self._check_again(scene, reference)
                    self._check_nothing_runs(process)
        counted.outcomes["had ended before"] = missed
        return counted

    def pairs(self, scene: Scene, count: int, neighbours: bool = False) -> Count:
        """Two writers at once: the second begins at some time, or while the first stands at a file operation."""
        what = "neighbours" if neighbours else "two writers"
        rng, reference, counted = self._rng(scene, what), self._reference(scene), Count(scene.name, what)
        operations = _in_turn(len(reference.operations), rng)
        second = f"{scene.target}-2" if neighbours else scene.target
        for number in range(count):
            with self._place(scene, *([second] if neighbours else [])):
                through = scene.neighbours and not neighbours and number % 3 == 1  # what is written has no name of it
                works = scene.work(self.inputs), scene.work(self.inputs, f"../link/{second}" if through else second)
                if number % 2 and reference.operations:
                    operation = next(operations)
                    how = f"the second began at the first's operation {operation} ({reference.operations[operation]})"
                    processes = self._interleaved(works, operation, reference.seconds)
                else:
                    delay = rng.random() * reference.seconds
                    how = f"the second began after {delay:.3f} s"
                    first = Process(works[0], self._work, self._log / "first")
                    first.wait(delay)
                    processes = first, Process(works[1], self._work, self._log / "second")
                ended = [process.end() for process in processes]
                how += ", through a link" if through else ""
                with counted.trying(" and ".join(sorted(str(each.code) for each in ended)), how):
                    for each in ended:
                        assert each.code == 0 or (each.refused and not neighbours), f"one ended with {each}"
                    assert any(each.code == 0 for each in ended), f"both were refused: {ended[0]}; {ended[1]}"
                    self._check_whole(scene, reference, second if neighbours else None)
                    for process in processes:
                        self._check_nothing_runs(process)
        return counted

    def full_disks(self, scene: Scene, few: bool = False) -> Count:
        """A disk of every size; the old content is there before it becomes full."""
        reference, counted = self._reference(scene), Count(scene.name, "full disk")
        needed = _pages(reference.folder, reference.tree)
        for free in sorted({round(share * needed) for share in (_FEW_SIZES if few else _SIZES)}):
            with self._place(scene, free=free):
                before = tree_of(self._work)
                process = Process(scene.work(self.inputs), self._work, self._log)
                ended = process.end()
                outcome = "refused" if ended.refused else f"ended with {ended.code}"
                with counted.trying(outcome, f"{free} pages for {needed}"):
                    if ended.code == 0:
                        self._check_whole(scene, reference)
                    else:
                        assert ended.refused, str(ended)
                        tree = tree_of(self._work)
                        left = [name for name in leftovers(tree) if not name.endswith(".unfinished")]  # goes on later
                        lost = [name for name in before if before[name] != tree.get(name)]
                        assert not left + lost, f"left behind: {_some(left)}; lost: {_some(lost)}"
                        self._check_visible(scene, reference, read=True)
                        _mount(self._disk, _ROOMY, again=True)
                        self._check_again(scene, reference)
                    self._check_nothing_runs(process)
        return counted

    def _rng(self, scene: Scene, what: str) -> random.Random:
        return random.Random(f"{self._seed} {scene.name} {what}")

    def _reference(self, scene: Scene) -> Reference:
        """What it leaves undisturbed, twice the same; the second time nothing is left to be imported."""
        if scene.name not in self._references:
            first = self._undisturbed(scene)
            learn(self._log)
            second = self._undisturbed(scene)
            differing = _some(differences(second.tree, first.tree))
            assert not differing, f"{scene.name}: {differing}, undisturbed"
            self._references[scene.name] = second
        return self._references[scene.name]

    def _undisturbed(self, scene: Scene) -> Reference:
        with self._place(scene):
            before, work = tree_of(self._work), scene.work(self.inputs)
            ended = run(work, self._work, self._log)
            tree = tree_of(self._work)
            assert ended.code == 0, f"{scene.name} failed undisturbed: {ended}\n{ended.stderr}"
            assert not leftovers(tree), f"{scene.name} left {leftovers(tree)} undisturbed"
            folder = self._folder / "references" / scene.name
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(self._work, folder, symlinks=True)
            return Reference(folder, tree, before, ended.seconds, ended.operations)

    @contextmanager
    def _place(self, scene: Scene, *others: str, free: int | None = None) -> Iterator[None]:
        """A fresh working directory with what the target holds before; on a disk with so many free pages, if given."""
        self._shared_before = _shared()
        shutil.rmtree(self._disk, ignore_errors=True)
        self._disk.mkdir(parents=True)
        if free is not None:
            _mount(self._disk, _ROOMY)
        try:
            self._work.mkdir()
            (self._disk / "link").symlink_to(self._work.name)
            for target in (scene.target, *others):
                if scene.before is not None:
                    made = run(scene.before(self.inputs, target), self._work, self._log)
                    assert made.code == 0, str(made)
            if free is not None:
                (self._disk / "page").write_bytes(bytes(4096))  # no disk is so small that it has none
                _mount(self._disk, 1 + free + _pages(self._work, tree_of(self._work)), again=True)
            yield
        finally:
            if free is not None:
                subprocess.run(["umount", "--lazy", str(self._disk)], check=True)

    def _check_nothing_runs(self, process: Process) -> None:
        """Nothing outlives a process; shared memory that others use is not looked at."""
        until = time.monotonic() + 5  # a worker sees within half a second that its parent is gone
        while (alive := process.alive()) and time.monotonic() < until:
            time.sleep(0.01)
        assert not alive, f"{len(alive)} of its processes still run"
        found = _shared() - self._shared_before
        for path in found:
            path.unlink()
        assert not found, f"left in shared memory: {_some(sorted(map(str, found)))}"

    def _check_visible(self, scene: Scene, reference: Reference, read: bool) -> None:
        """All that others see is old or new, and what can be read is a whole artifact."""
        for name, value in visible(tree_of(self._work)).items():
            if value in (reference.tree.get(name), reference.before.get(name)):
                continue
            form = next((form for pattern, form in scene.growing.items() if fnmatch(name, pattern)), None)
            becomes = reference.folder / name
            begins = not becomes.exists() or becomes.read_bytes().startswith((self._work / name).read_bytes())
            assert form == "any" or (form == "beginning" and begins), f"{name} is half written, or nobody's"
        if not read or scene.read is None:
            return
        target, reading = self._work / scene.target, scene.read
        ended = run(lambda: _read(reading, target), self._work, self._log / "reader")
        if ended.code == 0:
            trees = (tree_of(self._work), reference.tree, reference.before)
            found, *wanted = (_without(visible(tree), *scene.growing) for tree in trees)
            assert found in wanted, "half an artifact was read as a whole one"
        else:
            assert ended.refused, f"reading ended with {ended}"

    def _check_again(self, scene: Scene, reference: Reference) -> None:
        """The next call of the same command leaves all that an undisturbed one leaves."""
        was_whole = not differences(visible(tree_of(self._work)), reference.tree)
        ended = run(scene.work(self.inputs), self._work, self._log)
        used_again = ended.refused and scene.refuses and was_whole
        assert ended.code == 0 or used_again, f"again, it ended with {ended}"
        self._check_whole(scene, reference)

    def _check_whole(self, scene: Scene, reference: Reference, second: str | None = None) -> None:
        tree, wanted = tree_of(self._work), dict(reference.tree)
        assert not leftovers(tree), f"left behind: {_some(leftovers(tree))}"
        if second is not None:
            own = {name: value for name, value in wanted.items() if Path(name).parts[0] == scene.target}
            wanted |= {name.replace(scene.target, second, 1): value for name, value in own.items()}
        if scene.outliving:
            older = [name for name in tree if fnmatch(name, scene.outliving)]
            assert len(older) <= 2, f"left behind: one of {_some(older)}"
            tree, wanted = (_without(each, scene.outliving) for each in (tree, wanted))
            self._check_visible(scene, reference, read=True)
        assert tree == wanted, _some(differences(tree, wanted))

    def _interleaved(self, works: tuple[Work, ...], operation: int, seconds: float) -> list[Process]:
        """The first stands at its operation until the second has ended, or waits for it."""
        first = Process(works[0], self._work, self._log / "first", At(operation, signal.SIGSTOP))
        stopped = first.wait_until_stopped()
        second = Process(works[1], self._work, self._log / "second")
        until = time.monotonic() + 2 * seconds + 1
        while stopped and time.monotonic() < until and not second.ended():
            time.sleep(0.005)
        if stopped:
            first.go_on()
        return [first, second]


def _shared() -> set[Path]:
    return set(SHARED_MEMORY.iterdir()) if PRIVATE in os.environ else set()


def _in_turn(count: int, rng: random.Random) -> Iterator[int]:
    """Numbers below `count` in random order, all of them before any comes again."""
    while True:
        yield from rng.sample(range(count), count)


def _without(tree: Tree, *patterns: str) -> Tree:
    return {name: value for name, value in tree.items() if not any(fnmatch(name, each) for each in patterns)}


def _read(read: Callable[[Path], object], target: Path) -> int:
    if not target.exists():
        print("loopscope: there is none.", file=sys.stderr)
        return 2
    try:
        read(target)
    except (UserError, OSError) as error:
        print(f"loopscope: {str(error).rstrip('.')}.", file=sys.stderr)
        return 2
    return 0


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _pages(folder: Path, tree: Tree) -> int:
    files = [folder / name for name, value in tree.items() if value != "a folder" and not value.startswith("-> ")]
    return sum(-(-path.stat().st_size // 4096) for path in files if path.exists())


def _mount(folder: Path, pages: int, again: bool = False) -> None:
    options = f"{'remount,' * again}size={4 * pages}k"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True)


def tree_of(folder: Path) -> Tree:
    return {str(path.relative_to(folder)): _content(path, folder) for path in sorted(folder.rglob("*"))}


def _content(path: Path, folder: Path) -> str:
    """The hash of a file. A PDF bears the time at which it was made: of that, only whether it is whole."""
    if path.is_symlink():
        return f"-> {os.path.relpath(path.readlink(), folder)}"
    if path.is_dir():
        return "a folder"
    data = path.read_bytes()
    if path.suffix == ".pdf" and data.startswith(b"%PDF") and data.rstrip().endswith(b"%%EOF"):
        return "a whole PDF"
    return hashlib.sha256(data).hexdigest()


def leftovers(tree: Iterable[str]) -> list[str]:
    """What a writer that ended did not remove."""
    return [name for name in tree if _is_unfinished(name)]


def visible(tree: Tree) -> Tree:
    """What others see: nothing that is still being written."""
    return {name: value for name, value in tree.items() if not any(map(_is_unfinished, Path(name).parts))}


def _is_unfinished(name: str) -> bool:
    """Whether nothing has this name once the next call has ended."""
    return is_scratch(Path(name)) or name.endswith(".unfinished")


def differences(found: Tree, wanted: Tree) -> list[str]:
    words = {(True, False): "is missing", (False, True): "is too many", (True, True): "differs"}
    return [
        f"{name} {words[name in wanted, name in found]}"
        for name in sorted({*found, *wanted})
        if found.get(name) != wanted.get(name)
    ]
