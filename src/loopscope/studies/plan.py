"""From a study's file to its steps, and from its finished steps to results."""

from dataclasses import dataclass
from itertools import product
from pathlib import Path

import msgspec

from loopscope.config import build
from loopscope.errors import UserError
from loopscope.exits.readouts import readout_kind
from loopscope.exits.wanted import AUTO
from loopscope.models.checkpoint import CONFIG
from loopscope.recording import extrapolation_levels
from loopscope.report.results import assemble
from loopscope.report.schema import Results
from loopscope.studies.files import Part, Run, Study, read_study, runs_of
from loopscope.studies.steps import Analyse, Fit, Record, Train
from loopscope.training.posthoc import GateSettings, host_defaults


@dataclass(frozen=True)
class Model:
    """A run of the study, with the step that gives its result."""

    name: str
    analysis: Analyse

    @property
    def training(self) -> Train:
        return self.analysis.test.of


@dataclass(frozen=True)
class Plan:
    study: Study
    models: tuple[Model, ...]

    def results(self, store: Path) -> Results:
        """The results of the models that are analysed so far."""
        done = [model for model in self.models if model.analysis.done(store)]
        if not done:
            raise UserError("Nothing of this study is analysed yet; run it with: loopscope study run.")
        models = [msgspec.structs.replace(model.analysis.result(store), name=model.name) for model in done]
        return assemble(models, self.study.targets)

    def check_names(self, folder: Path) -> None:
        """Refuses to mix links with a run that is somebody's own."""
        for model in self.models:
            config = folder / model.name / CONFIG
            if config.exists() and not config.is_symlink():
                raise UserError(f"{config.parent} is a run of its own, not of a study; choose another --out.")

    def link(self, store: Path, folder: Path) -> None:
        """Gives every run its name: `folder/NAME` looks like the folder of a run, with its recordings and gates."""
        for model in self.models:
            training, analysis = model.training.folder(store), model.analysis
            if not model.training.done(store):
                continue
            for file in training.iterdir():
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


def make_plan(source: str, overrides: list[str], arithmetic: str = "") -> Plan:
    """The plan of a study, shipped or in a file; `a.b=c` overrides change every run of it."""
    study, beside = read_study(source)
    models = [model for part in study.parts for model in _models(part, study, beside, overrides, arithmetic)]
    known: dict[str, str] = {}
    names = [model.name for model in models]
    for model in models:
        if names.count(model.name) > 1:
            raise UserError(f"{source} lists the run '{model.name}' twice; list every run once.")
        same = known.setdefault(model.training.key, model.name)
        if same != model.name:
            raise UserError(f"In {source} the runs '{same}' and '{model.name}' are the same; list every run once.")
    return Plan(study, tuple(models))


def _models(part: Part, study: Study, beside: Path, overrides: list[str], arithmetic: str) -> list[Model]:
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
            promises=part.promises,
        )
        models.append(Model(run.name, analysis))
    return models


def _check(run: Run, part: Part) -> None:
    """Says before anything is trained what could only fail afterwards."""
    task = run.settings.task
    if task.train_examples == 0 and (part.unseen or run.of.fit):
        wanted = "unseen = true counts examples that training did not have" if part.unseen else "fit = true fits gates"
        raise UserError(f"{wanted}, so its task needs stored training examples (train_examples above 0).")
    for size, whole, what in (
        (part.gates.examples if run.of.fit else None, task.train_examples, "gates.examples"),
        (part.extrapolation_examples, task.test_examples, "extrapolation_examples"),
    ):
        if size is not None and size > whole:
            raise UserError(f"{what} asks for {size:,} examples, but '{run.name}' has {whole:,}.")
    if run.of.extrapolate:
        extrapolation_levels(run.settings)
    for promise in part.promises:
        if promise.readout != AUTO and readout_kind(promise.readout) == "oracle":
            raise UserError("The oracle needs the labels, so it cannot be promised; choose another readout.")


def _references(runs: list[Run], part: Part, trained: dict[str, Train]) -> dict[int, Train]:
    """The run that the others of the same seed are measured against."""
    wanted = part.reference
    if wanted is None:
        return {}
    beta = None if wanted.gate == "none" else wanted.beta
    sought = (wanted.gate, wanted.prior, beta)
    found = {run.seed: trained[run.name] for run in runs if (run.gate, run.prior, run.beta) == sought}
    for run in runs:
        if run.seed not in found:
            raise UserError(
                f"The reference of the part '{part.settings}' is not among its runs with seed {run.seed}, as that of "
                f"'{run.name}'."
            )
    return found


def _fits(run: Run, part: Part, of: Train) -> list[Fit]:
    on = Record(of=of, split="train", hidden=True, examples=part.gates.examples)
    host = {**host_defaults(run.settings.objective), "steps": part.gates.steps}
    settings = [
        {**host, "kind": kind, "objective": objective}
        | ({"pairing": part.gates.pairing} if objective == "utility" else {})
        for objective, kind in product(part.gates.objective, part.gates.kind)
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
