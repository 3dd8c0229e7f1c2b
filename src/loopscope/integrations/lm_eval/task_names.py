"""Is there an lm_eval task of this name? Its definitions say so, and they are read here without importing lm_eval.

lm_eval takes half a minute to read what it knows, and imports PyTorch before; a wrong name is answered without both.
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
    """Rejects a name that is neither lm_eval's nor the path of a definition; with `data`, all but the benchmarks."""
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
    """The benchmarks by the names of lm_eval's tasks."""
    return {task: benchmark for benchmark in BENCHMARKS.values() for task in (benchmark.name, *benchmark.tasks)}


def _check_known(name: str, home: Path) -> None:
    """By the names of files and folders, which is quick; then by what they say."""
    files = [Path(folder, file) for folder, _, files in os.walk(home) for file in files if file.endswith(_DEFINITION)]
    if any(name in (file.stem, file.parent.name) for file in files):
        return
    known: set[str] = set()
    for file in files:
        text = file.read_bytes()
        if name.encode() in text:
            return  # wherever it stands: lm_eval knows better what it means
        known.update(each.decode() for each in _NAMED.findall(text))
    raise UserError(f"lm_eval has no task '{name}'{did_you_mean(name, known)}; `lm_eval ls tasks` lists them.")
