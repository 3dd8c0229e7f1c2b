"""What the tests of studies share: a tiny study, its plan, a store in which it is finished, and a step that waits."""

import time
from pathlib import Path

import pytest
import torch

from loopscope.cli import main
from loopscope.config import write_json
from loopscope.studies.plan import Plan, make_plan
from loopscope.studies.steps import Step
from loopscope.studies.study_file import expand_study

TINY = Path(__file__).parent / "tiny.toml"
GATE = 'readout = "gate:linear-ponder", max_drop = 0.3, confidence = 0.8'


class Waiting(Step, frozen=True, kw_only=True):
    """It takes half a second, and leaves a note of its beginning and its end."""

    kind = "waiting"
    number: int

    def run(self, store: Path, device: torch.device) -> None:
        began = time.monotonic()
        time.sleep(0.5)
        span = [began, time.monotonic()]
        self.write(store, lambda scratch: write_json(scratch / "span.json", span))


def planned(source: str | Path, *overrides: str, arithmetic: str = "", **changes: object) -> Plan:
    return make_plan(expand_study(str(source), overrides, changes), arithmetic)


def changed(folder: Path, old: str, new: str, text: str = TINY.read_text()) -> Path:
    """The tiny study with something else in its file."""
    assert old in text
    path = folder / "changed.toml"
    path.write_text(text.replace(old, new))
    return path


def one_run(folder: Path, runs: str = "", guarantees: str = "") -> Path:
    """The reference of the tiny study's first part, which gates are fitted to; with other runs, or guarantees."""
    text = TINY.read_text().replace("seed = [0, 1]", "seed = [0]").replace("extrapolate = true\n", "")
    text = text[: text.index('[[parts.runs]]\ngate = ["linear"]')] + runs
    path = folder / "one.toml"
    path.write_text(text.replace("gates = {", f"guarantees = [{guarantees}]\ngates = {{"))
    return path


def timed_runs(folder: Path) -> Path:
    """The same reference with two seeds; the exits of both are timed."""
    path = one_run(folder)
    text = path.read_text().replace("seed = [0]", "seed = [0, 1]").replace("training.steps=12", "training.steps=4")
    path.write_text(text.replace("gates = {", 'latency = [{ gate = "none", prior = 0.3 }]\ngates = {'))
    return path


_MADE: list[Path] = []


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tiny study, run from the command line by two workers; once for all files that ask for it."""
    if not _MADE:
        _MADE.append(tmp_path_factory.mktemp("study"))
        assert main(["study", "run", str(TINY), "--out", str(_MADE[0] / "tiny"), "--workers", "2"]) == 0
    return _MADE[0]
