"""Is there an lm_eval task of this name? Its definitions say so, and they are read here without importing lm_eval.

lm_eval takes half a minute to read what it knows, and imports PyTorch before; a wrong name is answered without both.
"""

import os
import re
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from loopscope.errors import UserError, did_you_mean
from loopscope.questions import BENCHMARKS
from loopscope.questions.lm_eval_tasks import check_data
from loopscope.reading import is_file, require_file

_NAMED = re.compile(rb"^[ \t-]*(?:task|group|tag):[ \t]*[\"']?([\w.:/-]+)", re.MULTILINE)
_DEFINITION = (".yaml", ".yml")


def check_tasks(names: Sequence[str], data: Path | None = None) -> None:
    """Refuses a name that is neither lm_eval's nor the path of a definition; with `data`, all but the benchmarks."""
    found = find_spec("lm_eval")
    if found is None or found.origin is None:
        raise UserError("This needs lm_eval; install it with: pip install 'loopscope[lm]'.")
    ours = {task: benchmark for benchmark in BENCHMARKS.values() for task in (benchmark.name, *benchmark.tasks)}
    for name in names:
        if name in ours:
            check_data(ours[name], "test", data)
            continue
        if is_file(Path(name)):
            if data is None:
                continue
            raise UserError(
                f"{name} would be a task definition, which names its data itself; leave out the folder of data, or ask "
                f"for one of {', '.join(BENCHMARKS)}."
            )
        if name.endswith(_DEFINITION):
            require_file(Path(name), "task definition")
        if data is not None:
            raise UserError(
                f"A folder of data is read for {', '.join(BENCHMARKS)}; for '{name}' write a task definition that "
                "names its files, and give its path as the task."
            )
        _check_known(name, Path(found.origin).parent / "tasks")


def _check_known(name: str, home: Path) -> None:
    """By the names of files and folders, which is quick; then by what they say."""
    files = list(_definitions(home))
    if any(name in (file.stem, file.parent.name) for file in files):
        return
    known: set[str] = set()
    for file in files:
        text = file.read_bytes()
        if name.encode() in text:
            return  # wherever it stands: lm_eval knows better what it means
        known.update(each.decode() for each in _NAMED.findall(text))
    raise UserError(f"lm_eval has no task '{name}'{did_you_mean(name, known)}; `lm_eval ls tasks` lists them.")


def _definitions(home: Path) -> Iterator[Path]:
    for folder, _, files in os.walk(home):
        yield from (Path(folder, file) for file in files if file.endswith(_DEFINITION))
