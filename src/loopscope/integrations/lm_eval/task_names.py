"""Is there an lm_eval task of this name? This module searches lm_eval's definitions without importing lm_eval.

lm_eval takes half a minute to read its tasks, and imports PyTorch first; a wrong name is rejected without both.
"""

import os
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from loopscope.errors import UserError, did_you_mean
from loopscope.files import is_file, require_file
from loopscope.questions import BENCHMARKS, Benchmark, check_data

_NAMED = re.compile(rb"^[ \t-]*(?:task|group|tag):[ \t]*[\"']?([\w.:/-]+)", re.MULTILINE)
_DEFINITION = (".yaml", ".yml")


def check_tasks(names: Sequence[str], data: Path | None = None) -> None:
    """Reject a name that is no lm_eval task and no path of a definition; with `data`, all but the benchmarks."""
    ours, lm_eval = benchmark_tasks(), find_spec("lm_eval")
    if lm_eval is None or lm_eval.origin is None:
        raise ModuleNotFoundError(name="lm_eval")
    for name in names:
        if name in ours:
            check_data(ours[name], "test", data)
        elif data is not None:
            raise UserError(
                f"A folder of data is read for {', '.join(BENCHMARKS)}; for '{name}' leave out the folder of data, and "
                "give the path of a task definition that names its files."
            )
        elif name.endswith(_DEFINITION):
            require_file(Path(name), "task definition")
        elif not is_file(Path(name)):
            _check_known(name, Path(lm_eval.origin).parent / "tasks")


def benchmark_tasks() -> dict[str, Benchmark]:
    """The benchmarks by the names of their lm_eval tasks."""
    return {task: benchmark for benchmark in BENCHMARKS.values() for task in (benchmark.name, *benchmark.tasks)}


def _check_known(name: str, home: Path) -> None:
    """Reject an unknown task: search the names of files and folders, which is quick, then the definitions."""
    files = [Path(folder, file) for folder, _, files in os.walk(home) for file in files if file.endswith(_DEFINITION)]
    if any(name in (file.stem, file.parent.name) for file in files):
        return
    known: set[str] = set()
    for file in files:
        text = file.read_bytes()
        if name.encode() in text:
            return  # in any definition; lm_eval itself checks its meaning
        known.update(each.decode() for each in _NAMED.findall(text))
    raise UserError(f"lm_eval has no task '{name}'{did_you_mean(name, known)}; `lm_eval ls tasks` lists them.")
