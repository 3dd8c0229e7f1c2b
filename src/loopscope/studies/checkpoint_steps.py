"""The steps of checkpoints that are there already: score a benchmark, join its parts, time exits on it.

A score step makes an ordinary recording, so that fitting and analysing are the same as for training runs. Its address
covers the files of the checkpoint and of the data, or their ids on the Hub.
"""

from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from loopscope.analysis.timings import QuestionBench
from loopscope.artifacts import artifact_folder, read_manifest, write_manifest
from loopscope.bench.questions import time_benchmark
from loopscope.config import plain, read_json
from loopscope.exits import ExitPolicy
from loopscope.exits.readouts import POST_HOC
from loopscope.exits.sweep import choose
from loopscope.questions import Split
from loopscope.recording import record_benchmark, share_recorded
from loopscope.studies.external_sources import ExternalSource
from loopscope.studies.steps import SMALL, Analyse, Recording, Step
from loopscope.trajectory import Trajectory, concatenate
from loopscope.writing import write_json

_TIMING = "timing"


class Score(Recording, frozen=True, kw_only=True):
    split: Split
    checkpoint: ExternalSource
    benchmark: str
    data: ExternalSource | None
    limit: int | None
    dtype: str | None
    hidden: bool
    shard: tuple[int, int] | None = None  # (k, n): every n-th question, from the k-th on
    arithmetic: str = ""  # devices or threads other than one of a CPU
    shots: int | None = None  # in place of the benchmark's own

    @property
    def content(self) -> dict[str, object]:
        content = super().content
        return content if self.shots is not None else {key: value for key, value in content.items() if key != "shots"}

    @property
    def units(self) -> int:
        return max(1, 20 * SMALL // (self.shard[1] if self.shard else 1))

    def units_done(self, store: Path) -> int:
        return self.units if self.done(store) else int(self.units * share_recorded(self.folder(store)))

    def run(self, store: Path, device: torch.device) -> None:
        record_benchmark(
            self.checkpoint.source,
            self.benchmark,
            self.split,
            self.folder(store),
            data=folder_of(self.data),
            limit=self.limit,
            shots=self.shots,
            shard=self.shard,
            hidden=self.hidden,
            device=device,
            dtype=self.dtype,
        )


class Join(Recording, frozen=True, kw_only=True):
    parts: tuple[Score, ...]

    @property
    def needs(self) -> tuple[Step, ...]:
        return self.parts

    def run(self, store: Path, device: torch.device) -> None:
        """Puts the questions back into their order."""
        parts = [Trajectory.load(part.folder(store)) for part in self.parts]
        places = [np.arange(part.num_examples) * len(parts) + number for number, part in enumerate(parts)]
        concatenate(parts).take(np.argsort(np.concatenate(places))).save(self.folder(store))


class Time(Step, frozen=True, kw_only=True):
    """The final loop, the model's own gate and the best other readout, live, at the points that validation chose."""

    kind: ClassVar[str] = _TIMING
    analysis: Analyse
    checkpoint: ExternalSource
    benchmark: str
    data: ExternalSource | None
    limit: int | None
    dtype: str | None
    questions: int
    arithmetic: str = ""

    @property
    def needs(self) -> tuple[Step, ...]:
        return (self.analysis, self.analysis.validation, self.analysis.test)

    @property
    def units(self) -> int:
        return 20 * SMALL

    def run(self, store: Path, device: torch.device) -> None:
        validation, test = (
            Trajectory.load(step.folder(store)) for step in (self.analysis.validation, self.analysis.test)
        )
        result = self.analysis.result(store)
        readouts = [found.readout for names in (("gate",), POST_HOC) if (found := result.best(names)) is not None]
        policies = [ExitPolicy("fixed", test.num_loops), *(choose(readout, validation) for readout in readouts)]
        bench = time_benchmark(
            self.checkpoint.source,
            self.benchmark,
            policies,
            test,
            data=folder_of(self.data),
            limit=self.limit,
            questions=min(self.questions, test.num_examples),
            device=device,
            dtype=self.dtype,
        )
        with artifact_folder(self.folder(store), _TIMING) as scratch:
            write_json(scratch / "timing.json", bench)
            write_manifest(scratch, _TIMING, self.version, {}, {"made_of": plain(self.content)})

    def result(self, store: Path) -> QuestionBench:
        read_manifest(self.folder(store), _TIMING, self.version)
        return read_json(QuestionBench, self.folder(store) / "timing.json", _TIMING)


def folder_of(data: ExternalSource | None) -> Path | None:
    return None if data is None else Path(data.source)
