"""The steps of a study: train, record, fit, analyse. Each makes one artifact, a folder addressed by what made it.

A step holds the steps that it needs, so its hash covers everything that its artifact depends on: settings, splits, the
runs below it. The same step is never done twice, a changed setting changes the address of all that depends on it, and
an artifact that is there is complete, because it appears whole (a run: once its weights are there).
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import msgspec
import torch

from loopscope.analysis.model_analysis import ModelRecordings, analyse_model, only_unseen
from loopscope.analysis.schema import ModelResult
from loopscope.analysis.threshold_details import ThresholdDetails
from loopscope.artifacts import MANIFEST, artifact_folder, read_manifest, write_manifest
from loopscope.config import Settings, digest, plain, read_json
from loopscope.errors import UserError
from loopscope.exits import ExitPolicy, FittedGate
from loopscope.exits.calibration import certify
from loopscope.exits.risk_target import RiskTarget
from loopscope.models.checkpoint import WEIGHTS
from loopscope.recording import Keep, record_task
from loopscope.studies.external_sources import ExternalSource
from loopscope.training import train
from loopscope.training.gate_fitting import GateSettings, fit_gate
from loopscope.training.loop import with_objective
from loopscope.training.run_folder import logged_steps
from loopscope.training.settings import RunSettings
from loopscope.training.task_run import TaskRun
from loopscope.trajectory import Trajectory
from loopscope.writing import write_json

SMALL = 50
"""Recording, fitting or analysing counts as much progress as this many steps of training."""
ANALYSIS = "analysis"


class Step(Settings, frozen=True, kw_only=True, dict=True):
    kind: ClassVar[str]
    version: ClassVar[int] = 1
    """Raised when the same settings would make another artifact."""

    @property
    def needs(self) -> "tuple[Step, ...]":
        """The steps that must be done before."""
        return ()

    @cached_property
    def key(self) -> str:
        return f"{self.kind}-{digest(self.content)[:16]}"

    @cached_property
    def content(self) -> dict[str, object]:
        """What the artifact depends on; the steps that are needed go in by their keys."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__}
        return {"kind": self.kind, "version": self.version} | {name: _keys(value) for name, value in fields.items()}

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


class Train(Step, frozen=True, kw_only=True):
    kind: ClassVar[str] = "run"
    settings: RunSettings
    arithmetic: str = ""  # what else decides how floats are added: other devices or threads than one of a CPU

    @cached_property
    def content(self) -> dict[str, object]:
        content = super().content
        return content if self.arithmetic else {name: value for name, value in content.items() if name != "arithmetic"}

    def done(self, store: Path) -> bool:
        return (self.folder(store) / WEIGHTS).is_file()

    @property
    def units(self) -> int:
        return self.settings.training.steps

    def units_done(self, store: Path) -> int:
        return self.units if self.done(store) else min(logged_steps(self.folder(store)), self.units - 1)

    def check(self, store: Path) -> None:
        """Says before anything is trained what is wrong with an objective of the user's own."""
        with_objective(TaskRun(self.settings, self.folder(store)), torch.device("cpu"))

    def run(self, store: Path, device: torch.device) -> None:
        train(self.settings, self.folder(store), device)


class Recording(Step, frozen=True, kw_only=True):
    """Whatever makes a recording."""

    kind: ClassVar[str] = "recording"
    version: ClassVar[int] = 2
    split: str


class Record(Recording, frozen=True, kw_only=True):
    of: Train
    hidden: bool = False
    examples: int | None = None

    @property
    def needs(self) -> tuple[Step, ...]:
        return (self.of,)

    def run(self, store: Path, device: torch.device) -> None:
        keep = Keep(hidden=self.hidden)
        record_task(self.of.folder(store), self.split, self.folder(store), keep, self.examples, device=device)


class Fit(Step, frozen=True, kw_only=True):
    kind: ClassVar[str] = "gate"
    on: Recording
    gate: GateSettings

    @property
    def needs(self) -> tuple[Step, ...]:
        return (self.on,)

    def run(self, store: Path, device: torch.device) -> None:
        fit_gate(Trajectory.load(self.on.folder(store)), self.gate).save(self.folder(store))


class Analyse(Step, frozen=True, kw_only=True):
    kind: ClassVar[str] = ANALYSIS
    version: ClassVar[int] = 12
    validation: Recording
    test: Recording
    reference: tuple[Recording, Recording] | None  # validation and test of the measure; its own where it is the measure
    extrapolation: Recording | None
    gates: tuple[Fit, ...]
    targets: tuple[float, ...]  # none: 1 point below full depth
    unseen: bool
    guarantees: tuple[RiskTarget, ...]

    @property
    def needs(self) -> tuple[Step, ...]:
        more = [step for step in (self.extrapolation, *self.gates) if step is not None]
        return (self.validation, self.test, *(self.reference or ()), *more)

    @property
    def is_reference(self) -> bool:
        return self.reference == (self.validation, self.test)

    def run(self, store: Path, device: torch.device) -> None:
        def counted(step: Recording, whole: Trajectory) -> Trajectory:
            return only_unseen(whole, self.unseen, step.folder(store))

        gates = {gate.gate.name: FittedGate.load(gate.folder(store)) for gate in self.gates}
        validation, test = (Trajectory.load(step.folder(store)) for step in (self.validation, self.test))
        policies, refused = self._certify(validation, gates)
        source = ModelRecordings(
            "",
            counted(self.validation, validation),
            counted(self.test, test),
            None if self.extrapolation is None else Trajectory.load(self.extrapolation.folder(store)),
            gates,
            self.unseen,
            test,
            policies,
            refused,
        )
        against = source if self.is_reference else None
        if self.reference is not None and not self.is_reference:
            theirs, tested = (counted(step, Trajectory.load(step.folder(store))) for step in self.reference)
            against = ModelRecordings("reference", theirs, tested)
        analysed = analyse_model(source, against, self.targets)
        with artifact_folder(self.folder(store), ANALYSIS) as scratch:
            write_json(scratch / "model.json", analysed.result)
            write_json(scratch / "details.json", analysed.details)
            for number, policy in enumerate(policies, start=1):
                policy.save(scratch / ("policy.json" if number == 1 else f"policy-{number}.json"))
            write_manifest(scratch, ANALYSIS, self.version, {}, {"made_of": plain(self.content)})

    def _certify(self, validation: Trajectory, gates: Mapping[str, FittedGate]) -> tuple[list[ExitPolicy], list[str]]:
        """The policies that keep the promises which are sought, and why some cannot be made."""
        policies, refused = [], []
        for risk_target in self.guarantees:
            target = msgspec.structs.replace(risk_target, unseen=risk_target.unseen or self.unseen)
            try:
                policies.append(certify(validation, target, gates=gates))
            except UserError as error:  # not proven, or a model without this readout
                refused.append(str(error))
        return policies, refused

    def result(self, store: Path) -> ModelResult:
        read_manifest(self.folder(store), ANALYSIS, self.version)
        return read_json(ModelResult, self.folder(store) / "model.json", "analysis")

    def details(self, store: Path) -> ThresholdDetails:
        return read_json(ThresholdDetails, self.folder(store) / "details.json", "analysis")


def all_steps(steps: Iterable[Step], unless: Callable[[Step], bool] = lambda _: False) -> list[Step]:
    """These steps and those below them, each once, what is needed before what needs it.

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


def to_be_done(steps: Iterable[Step], store: Path) -> list[Step]:
    """What is still missing for these steps."""
    return all_steps(steps, lambda step: step.done(store))


def _keys(value: object) -> object:
    if isinstance(value, Step):
        return value.key
    if isinstance(value, ExternalSource):
        return value.identity
    if isinstance(value, tuple):
        return [_keys(each) for each in value]
    return msgspec.to_builtins(value)
