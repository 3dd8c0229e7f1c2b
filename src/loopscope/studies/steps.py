"""The steps of a study: train, record or score, fit, certify, analyse, transfer, time.

Each makes one artifact, a folder addressed by what made it. A step holds the steps that it needs, so its hash covers
everything that its artifact depends on: settings, splits, the runs below it. The same step is never done twice, a
changed setting changes the address of all that depends on it, and an artifact that is there is complete, because it
appears whole (a run: once its weights are there).
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import msgspec
import numpy as np
import torch

from loopscope.analysis.gaps import Subject
from loopscope.analysis.model_analysis import ModelRecordings, analyse_model, load_recordings
from loopscope.analysis.schema import Latency, ModelResult
from loopscope.analysis.targets import as_targets
from loopscope.analysis.threshold_details import ThresholdDetails
from loopscope.analysis.transfer import TransferResult, fitted_rules, replayed_rules
from loopscope.artifacts import MANIFEST, artifact_folder, read_manifest, write_manifest
from loopscope.bench.exit_timing import time_benchmark, time_task
from loopscope.certify.calibration import certify
from loopscope.certify.risk_target import RiskTarget
from loopscope.checks.model_contract import check_model
from loopscope.config import Settings, digest, plain, read_json, write_json
from loopscope.errors import UserError
from loopscope.frontier import choose
from loopscope.learned.fitted_gate import FittedGate
from loopscope.models.checkpoint import WEIGHTS
from loopscope.models.custom_model import register_model
from loopscope.policy import ExitPolicy
from loopscope.questions import Split
from loopscope.readouts.readout import POST_HOC
from loopscope.recording.question_recording import record_benchmark, share_recorded
from loopscope.recording.recording_folder import Keep
from loopscope.recording.task_recording import record_task
from loopscope.studies.study_file import ExternalSource
from loopscope.training.gate_fitting import GateSettings, fit_gate
from loopscope.training.run_folder import logged_steps
from loopscope.training.settings import RunSettings
from loopscope.training.task_run import TaskRun, initial_model, train
from loopscope.training.training_loop import with_objective
from loopscope.trajectory import Trajectory, concatenate

SMALL = 50
"""Recording, fitting or analysing counts as much progress as this many steps of training."""
POLICY = "policy.json"


class Step(Settings, frozen=True, kw_only=True, dict=True):
    """One step of a study: it makes one artifact, whose address is the hash of its inputs."""

    kind: ClassVar[str]
    version: ClassVar[int] = 1
    """Raised when the same settings would make another artifact, or a store would show the old one for ever.

    `tests/studies/test_step_versions.py` fails where what a step makes of the same recordings has changed.
    """
    optional: ClassVar[tuple[str, ...]] = ()
    """Fields that are no part of the address where they are empty."""
    uses_device: ClassVar[bool] = False
    alone: ClassVar[bool] = False
    """Whether nothing else of the study may run beside it."""

    @property
    def needs(self) -> "tuple[Step, ...]":
        """The steps that must be done before this one: its inputs."""
        return tuple(_steps_in(tuple(getattr(self, name) for name in self.__struct_fields__)))

    @cached_property
    def key(self) -> str:
        return f"{self.kind}-{digest(self.content)[:16]}"

    @property
    def content(self) -> dict[str, object]:
        """The inputs of the artifact, with needed steps as their keys."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__}
        left_out = {name for name in self.optional if fields[name] in ("", None)}
        described = {name: _inputs_with_keys(value) for name, value in fields.items() if name not in left_out}
        return {"kind": self.kind, "version": self.version, **described}

    def folder(self, store: Path) -> Path:
        return store / self.key

    def done(self, store: Path) -> bool:
        return (self.folder(store) / MANIFEST).is_file()

    @property
    def units(self) -> int:
        """How much work it is, in steps of training."""
        return SMALL

    def units_done(self, store: Path) -> int:
        return self.units if self.done(store) else 0

    @abstractmethod
    def run(self, store: Path, device: torch.device) -> None:
        """Makes the artifact."""

    def write(self, store: Path, fill: Callable[[Path], None]) -> None:
        """Write the artifact, which `fill` puts into a folder, with its inputs."""
        with artifact_folder(self.folder(store), self.kind) as scratch:
            fill(scratch)
            write_manifest(scratch, self.kind, self.version, {}, {"made_of": plain(self.content)})

    def checked_folder(self, store: Path) -> Path:
        """The folder of an artifact that `write` made, after its files were checked."""
        read_manifest(self.folder(store), self.kind, self.version)
        return self.folder(store)


class Train(Step, frozen=True, kw_only=True):
    """Train a run of a study."""

    kind: ClassVar[str] = "run"
    optional: ClassVar[tuple[str, ...]] = ("arithmetic",)
    uses_device: ClassVar[bool] = True
    settings: RunSettings
    arithmetic: str = ""  # what else decides how floats are added: other devices or threads than one of a CPU

    def done(self, store: Path) -> bool:
        return (self.folder(store) / WEIGHTS).is_file()

    @property
    def units(self) -> int:
        return self.settings.training.steps

    def units_done(self, store: Path) -> int:
        return self.units if self.done(store) else min(logged_steps(self.folder(store)), self.units - 1)

    def check(self, store: Path) -> None:
        """Reject a custom objective or model with an error, before any training."""
        with_objective(TaskRun(self.settings, self.folder(store)), torch.device("cpu"))
        if self.settings.model.is_custom:
            check_model(initial_model(self.settings).eval())

    def run(self, store: Path, device: torch.device) -> None:
        train(self.settings, self.folder(store), device)

    def import_model(self) -> None:
        """Lets its model be loaded, which the study's file names."""
        if self.settings.model.is_custom:
            register_model(str(self.settings.model.name))


class Recording(Step, frozen=True, kw_only=True):
    """A step that makes a recording."""

    kind: ClassVar[str] = "recording"
    version: ClassVar[int] = 2
    uses_device: ClassVar[bool] = True
    split: str

    def load(self, store: Path) -> Trajectory:
        return Trajectory.load(self.folder(store))


class Record(Recording, frozen=True, kw_only=True):
    """Record a split of the task that a run was trained on."""

    of: Train
    hidden: bool = False
    examples: int | None = None

    def run(self, store: Path, device: torch.device) -> None:
        keep = Keep(hidden=self.hidden)
        self.of.import_model()
        run, folder, custom = self.of.folder(store), self.folder(store), self.of.settings.task_name
        record_task(run, self.split, folder, keep, self.examples, device=device, custom_tasks=[custom])


class Score(Recording, frozen=True, kw_only=True):
    """Record a split of a benchmark with an existing checkpoint, or every n-th question of it."""

    optional: ClassVar[tuple[str, ...]] = ("shots",)
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
            data=None if self.data is None else Path(self.data.source),
            limit=self.limit,
            shots=self.shots,
            shard=self.shard,
            hidden=self.hidden,
            device=device,
            dtype=self.dtype,
        )


class Join(Recording, frozen=True, kw_only=True):
    """Join recordings of parts of a benchmark, in the order of its questions."""

    uses_device: ClassVar[bool] = False
    parts: tuple[Score, ...]

    def run(self, store: Path, device: torch.device) -> None:
        parts = [part.load(store) for part in self.parts]
        places = [np.arange(part.num_examples) * len(parts) + number for number, part in enumerate(parts)]
        concatenate(parts).take(np.argsort(np.concatenate(places))).save(self.folder(store))


class Fit(Step, frozen=True, kw_only=True):
    """Fit a gate to a recording."""

    kind: ClassVar[str] = "gate"
    on: Recording
    gate: GateSettings

    def run(self, store: Path, device: torch.device) -> None:
        fit_gate(self.on.load(store), self.gate).save(self.folder(store))


class Certify(Step, frozen=True, kw_only=True):
    """Certify a policy on a recording, or keep the reason why no threshold is proven."""

    kind: ClassVar[str] = "policy"
    version: ClassVar[int] = 2
    validation: Recording
    gates: tuple[Fit, ...]
    target: RiskTarget

    def run(self, store: Path, device: torch.device) -> None:
        validation, gates = self.validation.load(store), load_fits(self.gates, store)
        try:
            policy = certify(validation, self.target, gates=gates)
        except UserError as error:  # not proven, or a model without this readout
            refusal = str(error)
            self.write(store, lambda scratch: write_json(scratch / "refusal.json", refusal))
        else:
            self.write(store, lambda scratch: policy.save(scratch / POLICY))

    def result(self, store: Path) -> ExitPolicy | str:
        """The policy, or why there is none."""
        folder = self.checked_folder(store)
        if (folder / POLICY).is_file():
            return ExitPolicy.load(folder / POLICY)
        return read_json(str, folder / "refusal.json", "refusal")


class Analyse(Step, frozen=True, kw_only=True):
    """Analyse one model, partly against the reference."""

    kind: ClassVar[str] = "analysis"
    version: ClassVar[int] = 14
    validation: Recording
    test: Recording
    reference: tuple[Recording, Recording] | None  # validation and test of the measure; its own where it is the measure
    extrapolation: Recording | None
    gates: tuple[Fit, ...]
    targets: tuple[float, ...]  # none: 1 point below full depth
    unseen: bool
    policies: tuple[Certify, ...]

    @property
    def is_reference(self) -> bool:
        return self.reference == (self.validation, self.test)

    def subject(self, store: Path) -> Subject:
        """Its recordings as they are counted."""
        found = load_recordings("", self.validation.folder(store), self.test.folder(store), self.unseen)
        return found.measure

    def run(self, store: Path, device: torch.device) -> None:
        def recordings(name: str, validation: Recording, test: Recording) -> ModelRecordings:
            return load_recordings(name, validation.folder(store), test.folder(store), self.unseen)

        certified = [step.result(store) for step in self.policies]
        source = replace(
            recordings("", self.validation, self.test),
            extrapolation=None if self.extrapolation is None else self.extrapolation.load(store),
            gates=load_fits(self.gates, store),
            policies=[policy for policy in certified if isinstance(policy, ExitPolicy)],
            refused=[refusal for refusal in certified if isinstance(refusal, str)],
        )
        against = source if self.is_reference else None
        if self.reference is not None and not self.is_reference:
            against = recordings("reference", *self.reference)
        result, details = analyse_model(source, against, self.targets)

        def fill(scratch: Path) -> None:
            write_json(scratch / "model.json", result)
            write_json(scratch / "details.json", details)

        self.write(store, fill)

    def result(self, store: Path) -> ModelResult:
        return read_json(ModelResult, self.checked_folder(store) / "model.json", "analysis")

    def details(self, store: Path) -> ThresholdDetails:
        return read_json(ThresholdDetails, self.folder(store) / "details.json", "analysis")


class Transfer(Step, frozen=True, kw_only=True):
    """Replay the rules of one model on the test data of all models."""

    kind: ClassVar[str] = "transfer"
    of: Analyse
    onto: tuple[Analyse, ...]

    @property
    def needs(self) -> tuple[Step, ...]:
        """Recordings and gates; transfer does not need the analyses."""
        read = [step for each in self.onto for step in (each.validation, each.test)]
        return (self.of.validation, *self.of.gates, *read)

    @property
    def units(self) -> int:
        return SMALL * len(self.onto)

    def run(self, store: Path, device: torch.device) -> None:
        target = as_targets(self.of.targets)[0]
        subjects = {each.key: each.subject(store) for each in self.onto}
        validation = subjects[self.of.key].validation
        rules = fitted_rules(validation, load_fits(self.of.gates, store), target)
        found: list[TransferResult] = []
        for stopped in subjects.items():
            found += replayed_rules(rules, (self.of.key, validation), stopped, target)
        self.write(store, lambda scratch: write_json(scratch / "transfer.json", found))

    def result(self, store: Path, names: Mapping[str, str]) -> list[TransferResult]:
        """The results of transfer under the names of the models, found by the keys of their analyses."""
        found = read_json(list[TransferResult], self.checked_folder(store) / "transfer.json", "transfer")
        return [replace(each, fitted_on=names[each.fitted_on], stops=names[each.stops]) for each in found]


class Timing(Step, frozen=True, kw_only=True):
    """Time exits that run live, at the thresholds that validation chose."""

    kind: ClassVar[str] = "timing"
    uses_device: ClassVar[bool] = True
    alone: ClassVar[bool] = True

    @property
    def units(self) -> int:
        return 20 * SMALL

    def save(self, store: Path, latency: Latency) -> None:
        self.write(store, lambda scratch: write_json(scratch / "timing.json", latency))

    def result(self, store: Path) -> Latency:
        return read_json(Latency, self.checked_folder(store) / "timing.json", "timing")


class TimeTask(Timing, frozen=True, kw_only=True):
    """Time a run on its task: the final loop, and its own gate or (without one) readouts."""

    of: Train
    validation: Recording
    test: Recording

    def run(self, store: Path, device: torch.device) -> None:
        recordings = (self.validation.load(store), self.test.load(store))
        self.of.import_model()
        self.save(store, time_task(self.of.folder(store), *recordings, device, [self.of.settings.task_name]))


class TimeBenchmark(Timing, frozen=True, kw_only=True):
    """Time a checkpoint on a benchmark: the final loop, its own gate and the best other readout."""

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

    def run(self, store: Path, device: torch.device) -> None:
        validation, test = self.analysis.validation.load(store), self.analysis.test.load(store)
        result = self.analysis.result(store)
        readouts = [found.readout for names in (("gate",), POST_HOC) if (found := result.best(names)) is not None]
        latency = time_benchmark(
            self.checkpoint.source,
            self.benchmark,
            [ExitPolicy("fixed", test.num_loops), *(choose(readout, validation) for readout in readouts)],
            test,
            data=None if self.data is None else Path(self.data.source),
            limit=self.limit,
            questions=min(self.questions, test.num_examples),
            device=device,
            dtype=self.dtype,
        )
        self.save(store, latency)


def load_fits(gates: Iterable[Fit], store: Path) -> dict[str, FittedGate]:
    """Load the fitted gates of a study from its store, by name."""
    return {step.gate.name: FittedGate.load(step.folder(store)) for step in gates}


def all_steps(steps: Iterable[Step], unless: Callable[[Step], bool] = lambda _: False) -> list[Step]:
    """These steps and all steps that they need, each once, in an order in which they can be done.

    `unless` leaves out a step, and with it what only that step needs.
    """
    found: dict[str, Step] = {}

    def visit(needed: Iterable[Step]) -> None:
        for step in needed:
            if step.key not in found and not unless(step):
                visit(step.needs)
                found[step.key] = step

    visit(steps)
    return list(found.values())


def missing_steps(steps: Iterable[Step], store: Path) -> list[Step]:
    """The steps whose artifacts are missing in the store."""
    return all_steps(steps, lambda step: step.done(store))


def _steps_in(value: object) -> Iterator[Step]:
    """The steps among the inputs of a step, in any nesting."""
    if isinstance(value, Step):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from _steps_in(part)


def _inputs_with_keys(value: object) -> object:
    """The inputs of a step with the keys of other steps in their place."""
    if isinstance(value, Step):
        return value.key
    if isinstance(value, ExternalSource):
        return value.identity
    if isinstance(value, tuple):
        return [_inputs_with_keys(part) for part in value]
    return msgspec.to_builtins(value)
