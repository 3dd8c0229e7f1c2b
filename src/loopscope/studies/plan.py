"""From an expanded study to its steps, from its finished steps to results, and to names in the study's folder."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Any

import msgspec

from loopscope.analysis.results import assemble_results
from loopscope.analysis.schema import Latency, ModelResult, Results
from loopscope.analysis.targets import as_targets
from loopscope.analysis.threshold_details import ThresholdDetails
from loopscope.analysis.transfer import TransferResult
from loopscope.artifacts import MANIFEST
from loopscope.certify.risk_target import RiskTarget
from loopscope.config import build, differences, plain
from loopscope.errors import UserError, did_you_mean, reject
from loopscope.files import is_folder
from loopscope.models.checkpoint_folder import CONFIG
from loopscope.questions import BENCHMARKS, Split
from loopscope.recording.task_recording import extrapolation_levels
from loopscope.recording_paths import RECORDINGS
from loopscope.studies.steps import (
    POLICY,
    Analyse,
    Certify,
    Fit,
    Join,
    Record,
    Recording,
    Score,
    Step,
    TimeBenchmark,
    TimeTask,
    Timing,
    Train,
    Transfer,
    all_steps,
)
from loopscope.studies.study_file import (
    ExpandedStudy,
    ExternalSource,
    Gates,
    Reference,
    Study,
    StudyCheckpoint,
    StudyPart,
    StudyRun,
    usual_objective,
)
from loopscope.training.gate_fitting import GateSettings, host_defaults
from loopscope.training.run_folder import named_settings, trained_with
from loopscope.training.settings import Objective


@dataclass(frozen=True)
class Model:
    """A model of a study: a run, or a checkpoint on a benchmark, with the step that analyses it."""

    name: str
    analysis: Analyse
    training: Train | None = None  # of a run
    checkpoint: ExternalSource | None = None
    timing: Timing | None = None
    transfer: Transfer | None = None  # of its rules to others

    @property
    def goals(self) -> list[Step]:
        return [self.analysis, *filter(None, [self.transfer, self.timing])]

    @property
    def link_keys(self) -> set[str]:
        """What its name may lead to; a checkpoint's recording with hidden states is the same one with more in it."""
        if self.training is not None:
            return {self.training.key}
        recording = self.analysis.validation
        return {msgspec.structs.replace(recording, hidden=hidden).key for hidden in (True, False)}

    def result(self, store: Path) -> ModelResult:
        """The model's result under its name; the store knows neither names nor places."""
        made = msgspec.structs.replace(self.analysis.result(store), name=self.name)
        if self.checkpoint is None or made.benchmark is None:
            return made
        benchmark = msgspec.structs.replace(made.benchmark, model=self.checkpoint.name)
        return msgspec.structs.replace(made, group=self.name, benchmark=benchmark)

    def timed(self, store: Path) -> Latency | None:
        if self.timing is None or not self.timing.done(store):
            return None
        name = self.name if self.checkpoint is None else self.checkpoint.name
        return msgspec.structs.replace(self.timing.result(store), model=name)

    def link(self, store: Path, folder: Path) -> None:
        """Makes `folder` look like the folder of a run, with its recordings, gates and policies."""
        analysis = self.analysis
        if self.training is not None:
            if not self.training.done(store):
                return
            for file in self.training.folder(store).iterdir():
                _link_to_store(folder / file.name, file)
        for recording in (analysis.validation, analysis.test, analysis.extrapolation):
            if recording is not None:
                _link_to_store(folder / RECORDINGS / recording.split, recording.folder(store))
        for gate in analysis.gates:
            _link_to_store(folder / "gates" / gate.gate.name, gate.folder(store))
        for place in folder.glob("policy*"):
            if place.is_symlink():  # of an earlier analysis, whose guarantee may not hold any more
                place.unlink()
        certified = [step.folder(store) for step in analysis.policies if (step.folder(store) / POLICY).is_file()]
        for number, made in enumerate(certified, start=1):
            _link_to_store(folder / (POLICY if number == 1 else f"policy-{number}.json"), made / POLICY)
            for weights in made.glob("policy.gate-*"):  # a policy names its gate by its hash
                _link_to_store(folder / weights.name, weights)


def _link_to_store(place: Path, target: Path) -> None:
    """Link a name in the study's folder to an artifact of the store."""
    if not target.exists():
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    if place.is_symlink():
        place.unlink()
    if not place.exists():  # somebody's own recording stays
        place.symlink_to(target.resolve())


@dataclass(frozen=True)
class Plan:
    """The plan of a study: its models and their steps, by address in a store."""

    study: Study
    models: tuple[Model, ...]

    def results(self, store: Path) -> Results:
        """The results of the models that are analysed so far."""
        done = [model for model in self.models if model.analysis.done(store)]
        timed = [bench for model in done if (bench := model.timed(store)) is not None]
        found = [each for model in done for each in self._transferred(model, done, store)]
        made = [model.result(store) for model in done]
        return assemble_results(made, as_targets(self.study.targets), timed, found)

    def _transferred(self, model: Model, done: Sequence[Model], store: Path) -> list[TransferResult]:
        """The results of transfer to the models that are analysed so far."""
        if model.transfer is None or not model.transfer.done(store):
            return []
        names = {other.analysis.key: other.name for other in self.models}
        shown = {other.name for other in done}
        return [each for each in model.transfer.result(store, names) if each.stops in shown]

    def details(self, results: Results, store: Path) -> Iterator[ThresholdDetails]:
        """The page's details of the analysed models, in their order."""
        known = {model.name: model for model in self.models}
        return (known[model.name].analysis.details(store) for model in results.models)

    @property
    def steps(self) -> list[Step]:
        """Every step, in an order in which they can be done."""
        return all_steps(step for model in self.models for step in model.goals)

    def link(self, store: Path, folder: Path) -> None:
        """Gives every model its name in the folder of the study."""
        for model in self.models:
            model.link(store, folder / model.name)

    def check_folder(self, folder: Path) -> None:
        """Rejects a folder of somebody's own, and one whose names lead to other artifacts than those of this plan.

        A study that grows keeps its folder. One whose runs of the same names are others takes another, and so does one
        that has none of the runs there.
        """
        reject(f"{folder} {why}; choose another --out." for why in self._obstacles(folder))

    def _obstacles(self, folder: Path) -> Iterator[str]:
        """Why the study cannot go to this folder."""
        if any((folder / name).is_file() for name in (MANIFEST, CONFIG)):
            yield "holds a run, a recording or a gate, and a study's folder is its own"
        models = {model.name: model for model in self.models}
        places = [place for place in sorted(folder.iterdir()) if place.is_dir()] if is_folder(folder) else []
        linked = {place.name: key for place in places if (key := _linked_key(place)) is not None}
        for place in places:
            model = models.get(place.name)
            if model and (place / CONFIG).is_file() and not (place / CONFIG).is_symlink():
                yield f"holds '{place.name}', which is a run of its own, not of a study"
            if model and place.name in linked and linked[place.name] not in model.link_keys:
                yield f"holds a study whose {_changed_settings(place, model)}"
        if linked and not linked.keys() & models.keys():
            yield f"holds another study, with '{min(linked)}'"


def _linked_key(place: Path) -> str | None:
    """The store key that a name in the study's folder links to."""
    for link in (place / CONFIG, place / RECORDINGS / "validation"):
        if link.is_symlink() and link.exists():
            target = link.readlink()
            return target.parent.name if link.name == CONFIG else target.name
    return None


def _changed_settings(place: Path, model: Model) -> str:
    """What has changed about a model since its name was linked."""
    settings = {} if model.training is None else plain(model.training.settings)
    if settings and (found := differences(trained_with(place) or {}, settings)):
        return f"run '{model.name}' has other settings ({named_settings(found)})"
    return (
        f"'{model.name}' was made otherwise: of other data, in another precision, on another device, with other "
        "threads or by an earlier version"
    )


def make_plan(expanded: ExpandedStudy, arithmetic: str = "") -> Plan:
    """Make the plan of a study; `arithmetic` names devices or threads that change how floats add up."""
    study, models = expanded.study, list[Model]()
    for part, runs in zip(study.parts, expanded.runs, strict=True):
        models += _trained_models(part, runs, study, arithmetic)
    models += [_scored_model(found, study, arithmetic) for found in expanded.checkpoints]
    names, by_key = set(), dict[str, str]()
    for model in models:
        same = by_key.setdefault((model.training or model.analysis).key, model.name)
        if model.name in names:
            raise UserError(f"{expanded.source} lists the run '{model.name}' twice; list every run once.")
        if same != model.name:
            raise UserError(f"In {expanded.source} '{same}' and '{model.name}' are the same; list every run once.")
        names.add(model.name)
    listed = _models_matching(study.transfer, models, expanded.source)
    onto = tuple(model.analysis for model in listed)
    for model in listed:
        models[models.index(model)] = replace(model, transfer=Transfer(of=model.analysis, onto=onto))
    return Plan(study, tuple(models))


def _models_matching(patterns: Sequence[str], models: Sequence[Model], source: str) -> list[Model]:
    """The models of a study whose names match the patterns."""
    found: dict[str, Model] = {}
    for pattern in patterns:
        fitting = {model.name: model for model in models if fnmatchcase(model.name, pattern)}
        if not fitting:
            hint = did_you_mean(pattern, [model.name for model in models])
            raise UserError(f"{source} transfers '{pattern}'{hint}, which is none of its runs.")
        found |= fitting
    if len(found) == 1:
        raise UserError(f"{source} transfers the rules of one run to itself alone; list two runs or more.")
    return list(found.values())


def _trained_models(part: StudyPart, runs: list[StudyRun], study: Study, arithmetic: str) -> list[Model]:
    """The models of a part of a study that are trained, with all their steps."""
    for run in runs:
        reject(_run_problems(run, part))
        if run.of.extrapolate:
            extrapolation_levels(run.settings)
    trained = {run.name: Train(settings=run.settings, arithmetic=arithmetic) for run in runs}
    measures, timed = _reference_runs(runs, part, trained), _timed_run_names(runs, part)
    hidden = {trained[run.name].key for run in runs if run.of.fit}  # fitted gates read hidden states

    def recording(of: Train, split: str, examples: int | None = None) -> Record:
        return Record(of=of, split=split, hidden=of.key in hidden and split != "extrapolation", examples=examples)

    models = []
    for run in runs:
        of, measure = trained[run.name], measures.get(run.seed)
        on = Record(of=of, split="train", hidden=True, examples=part.gates.examples)
        gates = _fit_steps(part.gates, on, run.settings.objective) if run.of.fit else ()
        validation = recording(of, "validation")
        analysis = Analyse(
            validation=validation,
            test=recording(of, "test"),
            reference=None if measure is None else (recording(measure, "validation"), recording(measure, "test")),
            extrapolation=recording(of, "extrapolation", part.extrapolation_examples) if run.of.extrapolate else None,
            gates=gates,
            targets=study.targets,
            unseen=part.unseen,
            policies=_certify_steps(validation, gates, part.guarantees, part.unseen),
        )
        timing = TimeTask(of=of, validation=validation, test=analysis.test) if run.name in timed else None
        models.append(Model(run.name, analysis, of, timing=timing))
    return models


def _scored_model(found: StudyCheckpoint, study: Study, arithmetic: str) -> Model:
    """A checkpoint on a benchmark; its gates are fitted on the train split, because validation chooses thresholds."""
    entry, benchmark = found.of, found.benchmark
    what: dict[str, Any] = {"checkpoint": found.checkpoint, "benchmark": benchmark, "data": found.data}
    what |= {"dtype": entry.dtype, "arithmetic": arithmetic, "limit": entry.limit}
    fitted = entry.gates if BENCHMARKS[benchmark].has_training else None
    whole = Score(**what, split="test", shots=entry.shots, hidden=fitted is not None)
    gates: tuple[Fit, ...] = ()
    if fitted is not None:
        limit = min((size for size in (fitted.examples, entry.limit) if size is not None), default=None)
        gates = _fit_steps(fitted, msgspec.structs.replace(whole, split="train", limit=limit), None)
    validation = _recording_step(whole, "validation")
    analysis = Analyse(
        validation=validation,
        test=_recording_step(whole, "test", entry.shards),
        reference=None,
        extrapolation=None,
        gates=gates,
        targets=study.targets,
        unseen=False,
        policies=_certify_steps(validation, gates, entry.guarantees, unseen=False),
    )
    timing = TimeBenchmark(**what, analysis=analysis, questions=entry.timed) if benchmark in entry.latency else None
    return Model(f"{found.checkpoint.name}-{benchmark}", analysis, None, found.checkpoint, timing)


def _recording_step(score: Score, split: Split, shards: int = 1) -> Recording:
    """The step that records a split of a benchmark, whole or in parts."""
    whole = msgspec.structs.replace(score, split=split)
    count = min(shards, whole.limit or shards)
    if count == 1:
        return whole
    parts = [msgspec.structs.replace(whole, shard=(number, count)) for number in range(count)]
    return Join(split=split, parts=tuple(parts))


def _fit_steps(gates: Gates, on: Recording, host: Objective | None) -> tuple[Fit, ...]:
    """The steps that fit gates to a recording."""
    fits = []
    for objective, kind in product(gates.objective, gates.kind):
        values = {**host_defaults(host), "steps": gates.steps, "kind": kind, "objective": objective}
        values |= {"pairing": gates.pairing} if objective == "utility" else {}
        fits.append(Fit(on=on, gate=build(GateSettings, values, "the post-hoc gates")))
    return tuple(fits)


def _certify_steps(
    validation: Recording, gates: tuple[Fit, ...], targets: tuple[RiskTarget, ...], unseen: bool
) -> tuple[Certify, ...]:
    """The steps that certify policies on a validation recording."""
    sought = [msgspec.structs.replace(target, unseen=target.unseen or unseen) for target in targets]
    return tuple(Certify(validation=validation, gates=gates, target=target) for target in sought)


def _run_problems(run: StudyRun, part: StudyPart) -> Iterator[str]:
    """What is wrong with a run of a study and would fail only after training."""
    task, needed = run.settings.task, "so its task needs stored training examples (train_examples above 0)"
    fitted = part.gates.examples if run.of.fit else None
    if task.train_examples == 0 and part.unseen:
        yield f"unseen = true counts examples that training did not have, {needed}."
    if task.train_examples == 0 and run.of.fit and fitted is None:
        yield f"fit = true fits gates, {needed}, or gates.examples, how many to draw."
    for size, whole, what in (
        (fitted, task.train_examples, "gates.examples"),
        (part.extrapolation_examples, task.test_examples, "extrapolation_examples"),
    ):
        if size is not None and 0 < whole < size:
            yield f"{what} asks for {size:,} examples, but '{run.name}' has {whole:,}."


def _reference_runs(runs: list[StudyRun], part: StudyPart, trained: dict[str, Train]) -> dict[int, Train]:
    """The reference run of every seed, for the gaps of the other runs."""
    reference = part.reference
    if reference is None:
        return {}
    found = dict[int, Train]()
    for run in _runs_trained_as(runs, reference):
        found.setdefault(run.seed, trained[run.name])  # another architecture may come after it
    for run in runs:
        if run.seed not in found:
            raise UserError(f"The reference of '{part.settings}' is not among its runs with seed {run.seed}; list it.")
    return found


def _timed_run_names(runs: list[StudyRun], part: StudyPart) -> set[str]:
    """The names of the runs whose exits a study times."""
    found = [_runs_trained_as(runs, training) for training in part.latency]
    if [] in found:
        training = part.latency[found.index([])]
        named = f"gate = '{training.gate}', prior = {training.prior}"
        raise UserError(f"latency of '{part.settings}' has {named}, and no run of the part is trained so; list one.")
    return {run.name for some in found for run in some}


def _runs_trained_as(runs: list[StudyRun], training: Reference) -> list[StudyRun]:
    """The runs of a study, of every seed, with the gate, prior and beta of a reference."""
    beta = None if training.gate == "none" else training.beta
    sought = (usual_objective(training.gate, training.prior), training.gate, training.prior, beta)
    return [
        run for run in runs if (run.settings.objective.name, run.settings.model.gate, run.prior, run.beta) == sought
    ]
