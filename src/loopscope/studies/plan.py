"""From a study's file to its steps, and from its finished steps to results."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import msgspec

from loopscope.analysis import as_targets
from loopscope.analysis.results import assemble_results
from loopscope.analysis.schema import ModelResult, Results
from loopscope.analysis.threshold_details import ThresholdDetails
from loopscope.analysis.timings import QuestionBench
from loopscope.config import build
from loopscope.errors import UserError
from loopscope.exits.readouts import readout_kind
from loopscope.exits.risk_target import AUTO, RiskTarget
from loopscope.objectives import Objective
from loopscope.questions import BENCHMARKS, Split
from loopscope.recording import extrapolation_levels
from loopscope.studies.checkpoint_steps import Join, Score, Time
from loopscope.studies.external_sources import ExternalSource, external_checkpoint, external_data
from loopscope.studies.place import check_links
from loopscope.studies.steps import Analyse, Fit, Record, Recording, Step, Train, all_steps
from loopscope.studies.study_file import (
    Checkpoints,
    Gates,
    Study,
    StudyPart,
    StudyRun,
    check_study,
    checkpoints_of,
    runs_of,
    usual_objective,
)
from loopscope.training.gate_fitting import GateSettings, host_defaults


@dataclass(frozen=True)
class Model:
    """A run of the study, or a checkpoint on a benchmark, with the step that gives its result."""

    name: str
    analysis: Analyse
    training: Train | None = None  # of a run
    checkpoint: ExternalSource | None = None
    timing: Time | None = None

    @property
    def goals(self) -> list[Step]:
        return [self.analysis, *filter(None, [self.timing])]

    @property
    def link_keys(self) -> set[str]:
        """What its name may lead to; a checkpoint's recording with hidden states is the same one with more in it."""
        if self.training is not None:
            return {self.training.key}
        recording = self.analysis.validation
        return {msgspec.structs.replace(recording, hidden=hidden).key for hidden in (True, False)}

    def result(self, store: Path) -> ModelResult:
        """Its result under its name; what is on disk knows neither names nor places."""
        made = msgspec.structs.replace(self.analysis.result(store), name=self.name)
        if self.checkpoint is None or made.benchmark is None:
            return made
        benchmark = msgspec.structs.replace(made.benchmark, model=self.checkpoint.name)
        return msgspec.structs.replace(made, group=self.name, benchmark=benchmark)

    def timed(self, store: Path) -> QuestionBench | None:
        if self.checkpoint is None or self.timing is None or not self.timing.done(store):
            return None
        return msgspec.structs.replace(self.timing.result(store), model=self.checkpoint.name)


@dataclass(frozen=True)
class Plan:
    study: Study
    models: tuple[Model, ...]

    def results(self, store: Path) -> Results:
        """The results of the models that are analysed so far."""
        done = [model for model in self.models if model.analysis.done(store)]
        if not done:
            raise UserError("Nothing of this study is analysed yet; run it first.")
        timed = [bench for model in done if (bench := model.timed(store)) is not None]
        return assemble_results([model.result(store) for model in done], as_targets(self.study.targets), timed)

    def details(self, results: Results, store: Path) -> Iterator[ThresholdDetails]:
        """What the page looks up of the models that have results, in their order."""
        known = {model.name: model for model in self.models}
        return (known[model.name].analysis.details(store) for model in results.models)

    @property
    def steps(self) -> list[Step]:
        """Every step, what is needed before what needs it."""
        return all_steps(step for model in self.models for step in model.goals)

    def check_links(self, folder: Path) -> None:
        """Refuses a folder whose names lead to other artifacts than those of this plan."""
        check_links(folder, {model.name: model.link_keys for model in self.models})

    def link(self, store: Path, folder: Path) -> None:
        """Gives every run its name: `folder/NAME` looks like the folder of a run, with its recordings and gates."""
        for model in self.models:
            analysis = model.analysis
            if model.training is not None:
                if not model.training.done(store):
                    continue
                for file in model.training.folder(store).iterdir():
                    _link(folder / model.name / file.name, file)
            recordings = [analysis.validation, analysis.test, *filter(None, [analysis.extrapolation])]
            for step in recordings:
                _link(folder / model.name / "recordings" / step.split, step.folder(store))
            for place in (folder / model.name).glob("policy*"):
                if place.is_symlink():  # of an earlier analysis, whose promise may not be made any more
                    place.unlink()
            for file in sorted(analysis.folder(store).glob("policy*")):
                _link(folder / model.name / file.name, file)
            for gate in analysis.gates:
                _link(folder / model.name / "gates" / gate.gate.name, gate.folder(store))


def make_plan(
    source: str, overrides: list[str], arithmetic: str = "", changes: Mapping[str, Any] | None = None
) -> Plan:
    """The plan of a study, shipped or in a file.

    `a.b=c` overrides change every run of it, `changes` (models, benchmarks, data, limit, dtype) its checkpoints.
    """
    study, beside = check_study(source, overrides, changes or {})
    models = [model for part in study.parts for model in _models(part, study, beside, overrides, arithmetic)]
    for entry in checkpoints_of(study, changes or {}):
        models += _scored(entry, study, arithmetic)
    known: dict[str, str] = {}
    names = [model.name for model in models]
    for model in models:
        if names.count(model.name) > 1:
            raise UserError(f"{source} lists the run '{model.name}' twice; list every run once.")
        made_by = model.training or model.analysis
        same = known.setdefault(made_by.key, model.name)
        if same != model.name:
            raise UserError(f"In {source} the runs '{same}' and '{model.name}' are the same; list every run once.")
    return Plan(study, tuple(models))


def _models(part: StudyPart, study: Study, beside: Path, overrides: list[str], arithmetic: str) -> list[Model]:
    runs = runs_of(part, beside, overrides)
    for run in runs:
        _check(run, part)
    trained = {run.name: Train(settings=run.settings, arithmetic=arithmetic) for run in runs}
    measures = _references(runs, part, trained)
    hidden = {trained[run.name].key for run in runs if run.of.fit}  # fitted gates read hidden states

    def recording(of: Train, split: str, examples: int | None = None) -> Record:
        return Record(of=of, split=split, hidden=of.key in hidden and split != "extrapolation", examples=examples)

    models = []
    for run in runs:
        of, measure = trained[run.name], measures.get(run.seed)
        analysis = Analyse(
            validation=recording(of, "validation"),
            test=recording(of, "test"),
            reference=None if measure is None else (recording(measure, "validation"), recording(measure, "test")),
            extrapolation=recording(of, "extrapolation", part.extrapolation_examples) if run.of.extrapolate else None,
            gates=tuple(_fits(run, part, of)) if run.of.fit else (),
            targets=study.targets,
            unseen=part.unseen,
            guarantees=part.guarantees,
        )
        models.append(Model(run.name, analysis, of))
    return models


def _scored(entry: Checkpoints, study: Study, arithmetic: str) -> list[Model]:
    """Every checkpoint on every benchmark."""
    _check_guarantees(entry.guarantees)
    models = []
    for source, benchmark in product(entry.models, entry.benchmarks):
        checkpoint = external_checkpoint(source)
        data = None if entry.data is None else external_data(entry.data, benchmark)
        what: dict[str, Any] = {"checkpoint": checkpoint, "benchmark": benchmark, "data": data, "dtype": entry.dtype}
        what |= {"arithmetic": arithmetic, "limit": entry.limit}
        gates = entry.gates if BENCHMARKS[benchmark].has_training else None
        whole = Score(
            **what, split="test", shots=entry.shots, hidden=gates is not None
        )  # fitted gates read hidden states
        analysis = Analyse(
            validation=_recorded(whole, "validation"),
            test=_recorded(whole, "test", entry.shards),
            reference=None,
            extrapolation=None,
            gates=() if gates is None else tuple(_refitted(gates, whole)),
            targets=study.targets,
            unseen=False,
            guarantees=entry.guarantees,
        )
        timing = Time(**what, analysis=analysis, questions=entry.timed) if benchmark in entry.latency else None
        models.append(Model(f"{checkpoint.name}-{benchmark}", analysis, None, checkpoint, timing))
    return models


def _recorded(score: Score, split: Split, shards: int = 1) -> Recording:
    """A split, in one go or in parts."""
    whole = msgspec.structs.replace(score, split=split)
    count = min(shards, whole.limit or shards)
    if count == 1:
        return whole
    parts = [msgspec.structs.replace(whole, shard=(number, count)) for number in range(count)]
    return Join(split=split, parts=tuple(parts))


def _refitted(gates: Gates, score: Score) -> list[Fit]:
    """Gates for a checkpoint that has one: on the train split, because validation chooses their thresholds."""
    sizes = [size for size in (gates.examples, score.limit) if size is not None]
    return _fitted(gates, msgspec.structs.replace(score, split="train", limit=min(sizes, default=None)), None)


def _check(run: StudyRun, part: StudyPart) -> None:
    """Says before anything is trained what could only fail afterwards."""
    task = run.settings.task
    fitted = part.gates.examples if run.of.fit else None
    if task.train_examples == 0 and (part.unseen or (run.of.fit and fitted is None)):
        reason = "unseen = true counts examples that training did not have" if part.unseen else "fit = true fits gates"
        instead = "" if part.unseen else ", or gates.examples, how many to draw"
        raise UserError(f"{reason}, so its task needs stored training examples (train_examples above 0){instead}.")
    for size, whole, what in (
        (fitted, task.train_examples, "gates.examples"),
        (part.extrapolation_examples, task.test_examples, "extrapolation_examples"),
    ):
        if size is not None and 0 < whole < size:
            raise UserError(f"{what} asks for {size:,} examples, but '{run.name}' has {whole:,}.")
    if run.of.extrapolate:
        extrapolation_levels(run.settings)
    _check_guarantees(part.guarantees)


def _check_guarantees(guarantees: Iterable[RiskTarget]) -> None:
    for guarantee in guarantees:
        if guarantee.readout != AUTO and readout_kind(guarantee.readout) == "oracle":
            raise UserError("The oracle needs the labels, so it cannot be promised; choose another readout.")


def _references(runs: list[StudyRun], part: StudyPart, trained: dict[str, Train]) -> dict[int, Train]:
    """The run that the others of the same seed are measured against."""
    reference = part.reference
    if reference is None:
        return {}
    beta = None if reference.gate == "none" else reference.beta
    sought = (usual_objective(reference.gate, reference.prior), reference.gate, reference.prior, beta)
    found = {run.seed: trained[run.name] for run in runs if (run.objective, run.gate, run.prior, run.beta) == sought}
    for run in runs:
        if run.seed not in found:
            raise UserError(
                f"The reference of the part '{part.settings}' is not among its runs with seed {run.seed}, as that of "
                f"'{run.name}'."
            )
    return found


def _fits(run: StudyRun, part: StudyPart, of: Train) -> list[Fit]:
    on = Record(of=of, split="train", hidden=True, examples=part.gates.examples)
    return _fitted(part.gates, on, run.settings.objective)


def _fitted(gates: Gates, on: Recording, objective: Objective | None) -> list[Fit]:
    host = {**host_defaults(objective), "steps": gates.steps}
    settings = [
        {**host, "kind": kind, "objective": objective} | ({"pairing": gates.pairing} if objective == "utility" else {})
        for objective, kind in product(gates.objective, gates.kind)
    ]
    return [Fit(on=on, gate=build(GateSettings, each, "the post-hoc gates")) for each in settings]


def _link(place: Path, target: Path) -> None:
    if not target.exists():
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    if place.is_symlink():
        place.unlink()
    if not place.exists():  # somebody's own recording stays
        place.symlink_to(target.resolve())
