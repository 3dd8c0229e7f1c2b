"""What is sealed must be refused when it is altered: recordings, gates, promised policies, runs, a study's store.

Accepted is right only where what was loaded equals the original.
"""

import json
import math
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

import loopscope as ls
from loopscope.certify.live_runs import LiveRuns
from loopscope.config import digest, plain
from loopscope.learned.attach import load_fitted
from loopscope.models.checkpoint import load_model, read_checkpoint_config
from loopscope.studies.plan import make_plan
from loopscope.studies.study_file import expand_study
from loopscope.training.run_folder import read_run_settings
from loopscope.training.task_run import train

from .mutations import STRINGS
from .runner import Case, MisledError
from .world import CPU, World


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def held(value: Any) -> Any:
    """What tells a loaded value from another: bytes of arrays, and everything else as it is."""
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.contiguous().view(torch.uint8).numpy().tobytes()
    if isinstance(value, dict):
        return {key: held(each) for key, each in value.items()}
    return value


def same(loaded: Any, original: Any, what: str) -> str:
    if loaded != original:
        raise MisledError(f"{what} was altered, and is accepted")
    return "same"


@lru_cache(maxsize=64)
def _original(load: Callable[[Path], Any], path: Path) -> Any:
    return load(path)


def load_recording(path: Path) -> Any:
    found = ls.Trajectory.load(path)
    arrays = {name: held(value) for name, value in vars(found).items() if isinstance(value, np.ndarray)}
    signals = {name: held(value) for name, value in found.signals.items()}
    return arrays, signals, found.split, plain(dict(found.provenance)), found.examples and list(found.examples)


def _spoilt(case: Case, sources: dict[str, Path], load: Callable[[Path], Any]) -> tuple[Path, Any]:
    """A copy of one of these folders with a file that is spoilt, and what the folder holds as it was."""
    name = case.rng.choice(list(sources))
    folder, original = case.copy(sources[name]), _original(load, sources[name])
    file = case.rng.choice(files_of(folder))
    case.spoil(file, [other / file.name for other in sources.values() if (other / file.name).is_file()])
    return folder, original


def recording(world: World, case: Case) -> str:
    folder, original = _spoilt(case, world.recordings, load_recording)
    if case.rng.random() < 0.1:
        words = (
            ("evaluate", folder, world.recordings["test"], "--readout", "margin"),
            ("calibrate", folder, "--max-drop", 0.6, "--confidence", 0.5, "--out", case.out),
            ("gate", "fit", folder, "--out", case.out, "--steps", 2),
        )
        case.command(*case.rng.choice(words))
    return same(load_recording(folder), original, "a recording")


def load_live_run(path: Path) -> Any:
    found = LiveRuns.load(path)
    arrays = {name: held(np.asarray(value)) for name, value in vars(found).items() if isinstance(value, np.ndarray)}
    return arrays, load_policy(path / "rule.json"), plain(found.contents), plain(dict(found.provenance))


def live_run(world: World, case: Case) -> str:
    runs = {name: world.live_runs[name] for name in ("propagate", "gate", "policy")}
    folder, original = _spoilt(case, runs, load_live_run)
    if case.rng.random() < 0.2:
        words = ("--loss", "disagreement", "--max-drop", 0.6, "--confidence", 0.5, "--out", case.out)
        case.command("calibrate", folder, *words)
    return same(load_live_run(folder), original, "a live run")


def load_gate(path: Path) -> Any:
    gate = load_fitted(path)
    return repr(gate), {name: held(value) for name, value in gate.tensors.items()}, plain(dict(gate.provenance))


def gate(world: World, case: Case) -> str:
    folder, original = _spoilt(case, world.gates, load_gate)
    return same(load_gate(folder), original, "a gate")


def load_policy(path: Path) -> Any:
    policy = ls.ExitPolicy.load(path)
    weights = policy.gate and {name: held(value) for name, value in policy.gate.tensors.items()}
    fitted = policy.gate and plain(dict(policy.gate.provenance))
    threshold = None if policy.threshold is None else float(policy.threshold)
    return policy.readout, threshold, plain(policy.scope), weights, fitted, plain(policy.certificate)


def policy(world: World, case: Case) -> str:
    name = case.rng.choice(list(world.policies))
    path = case.copy(world.policies[name])
    copied = [case.copy(weights) for weights in world.policies[name].parent.glob(f"{name}.gate-*.safetensors")]
    original = _original(load_policy, world.policies[name])
    case.spoil(copied[0] if copied and case.rng.random() < 0.4 else path)
    loaded = load_policy(path)
    if case.rng.random() < 0.05:
        case.command("evaluate", world.recordings["test"], "--policy", path, verdicts=(0, 1))
    if loaded == original:
        return "same"
    if loaded[-1] is not None:
        raise MisledError("a promised policy was altered, and is accepted")
    return _says(loaded, path)


def monitor(world: World, case: Case) -> str:
    """What a monitor has seen so far, kept in a file; one whose digest was made anew can go on, if it is accepted."""
    promised = ls.ExitPolicy.load(world.policies["margin"])
    path = case.copy(world.monitor)
    original = plain(ls.Monitor.load(world.monitor, promised).result)
    case.spoil(path)
    if case.rng.random() < 0.5:
        return same(plain(ls.Monitor.load(path, promised).result), original, "a monitor")
    with suppress(ValueError, OSError, OverflowError, RecursionError, TypeError, msgspec.MsgspecError):
        values = json.loads(path.read_bytes())
        path.write_text(json.dumps(values | {"digest": digest(values | {"digest": ""})}))
    case.before = {}
    resealed = ls.Monitor.load(path, promised)
    before = resealed.result
    after = resealed.update([1, 2], [0.0, 1.0])
    if not 0 <= before.audited <= before.examples == after.examples - 2:
        raise MisledError("a monitor counts what was not there")
    return "other"


def _says(loaded: Any, path: Path) -> str:
    """A policy without a promise is the user's to change: then it is what its file says."""
    values = json.loads(path.read_bytes())
    readout, threshold, scope, weights, *_ = loaded
    if values.get("certificate") is not None:
        raise MisledError("a policy lost its promise, and is accepted")
    said = values.get("threshold")
    if readout != values["readout"]:
        raise MisledError("a policy is not what its file says")
    if (threshold is None) != (said is None) or (said is not None and threshold != float(said)):
        raise MisledError("a policy has another threshold than its file")
    if threshold is not None and not math.isfinite(threshold):
        raise MisledError("a policy has a threshold that is no number")
    ours, theirs = (
        {key: each for key, each in of.items() if each is not None} for of in (scope, values.get("scope") or {})
    )
    if ours != theirs:
        raise MisledError("a policy has another scope than its file")
    if (weights is None) != (values.get("gate") is None):
        raise MisledError("a policy lost its gate")
    return "other"


def load_run(folder: Path) -> Any:
    model = load_model(folder)
    return held(dict(model.state_dict())), (model.num_loops, model.block_size, model.vocab_size)


def finished_run(world: World, case: Case) -> str:
    """The weights are sealed; the configuration must not contradict itself."""
    source = case.rng.choice((world.run, world.run, world.language_run))
    folder = case.copy(source, "run")
    mine = [path for path in files_of(folder) if "recordings" not in path.parts]
    weighty = [path for path in mine if path.name in ("config.json", "model.safetensors")]
    file = case.rng.choice(weighty if case.rng.random() < 0.7 else mine)
    other = world.other_run / file.name
    case.spoil(file, [other] if source is world.run and other.is_file() else ())
    original, loaded = _original(load_run, source), load_run(folder)
    with torch.inference_mode():
        load_model(folder).loops(torch.zeros((1, 3), dtype=torch.int64))
    if source is world.run:
        settings, config = read_run_settings(folder), read_checkpoint_config(folder)
        expected = (settings.model, settings.task.vocab_size, settings.block_size)
        if expected != (config.model, config.vocab_size, config.block_size):
            raise MisledError("a run's configuration contradicts itself, and is accepted")
        if case.rng.random() < 0.1:
            case.command("run", folder, world.documents["examples.txt"], "--threshold", 0.5)
    if loaded[0] != original[0]:
        raise MisledError("the weights of a run were altered, and are accepted")
    return "same" if loaded == original else "other"


def unfinished_run(world: World, case: Case) -> str:
    """A run that goes on must end as one that ran through."""
    source, settings = world.unfinished
    folder = case.copy(source, "run")
    file = folder / "state.safetensors" if case.rng.random() < 0.7 else case.rng.choice(files_of(folder))
    case.spoil(file, [], writes=True)
    train(settings, folder, CPU)
    if (folder / "model.safetensors").read_bytes() != world.finished_weights:
        raise MisledError("the state of a run was altered, and it ended with other weights")
    return "same"


def unfinished_recording(world: World, case: Case) -> str:
    """A recording that goes on must end as one that was never interrupted."""
    folder = case.copy(world.unfinished_recording, "recordings")
    case.spoil(case.rng.choice(files_of(folder / "new.unfinished")), writes=True)
    world.record(folder / "new")
    original = _original(load_recording, world.unfinished_recording / "finished")
    return same(load_recording(folder / "new"), original, "an unfinished recording")


@lru_cache(maxsize=1)
def _plan(study: Path) -> Any:
    return make_plan(expand_study(str(study)))


def _study_results(plan: Any, store: Path) -> tuple[str, str]:
    results = plan.results(store)
    return digest(results), digest(list(plan.details(results, store)))


@lru_cache(maxsize=1)
def _finished(study: Path, store: Path) -> tuple[str, str]:
    return _study_results(_plan(study), store)


def _titled(world: World, case: Case) -> Path:
    """The study with another title, which is shown in many places."""
    path = case.folder / "titled.toml"
    title = json.dumps(case.rng.choice(STRINGS).encode("utf-8", "ignore").decode())
    path.write_text(world.study.read_text().replace('"Tiny"', title, 1))
    case.notes.append(f"title = {title[:200]}")
    return path


def titled_study(world: World, case: Case) -> str:
    """All of a study whose steps are finished, with another title."""
    words = ("--store", case.copy(world.store, "store"), "--out", case.out, "--device", "cpu", "--workers", 1)
    case.command("study", "run", _titled(world, case), *words)
    return "other"


def study_store(world: World, case: Case) -> str:
    plan, original = _plan(world.study), _finished(world.study, world.store)
    store = case.inputs / "store"
    analyses = [model.analysis.folder(world.store) for model in plan.models]
    for each in analyses:
        case.copy(each, f"store/{each.name}")
    chosen = case.rng.choice(analyses)
    names = ("manifest.json", "model.json", "details.json")
    file = store / chosen.name / case.rng.choice(names)
    case.spoil(file, [each / file.name for each in analyses if each != chosen])
    if case.rng.random() < 0.1:
        where = ("--store", store, "--out", case.out, "--device", "cpu")
        case.command("study", "report", _titled(world, case), *where, "--product", "headline")
    missing = not file.is_file() and file.name == "manifest.json"  # then that model is not analysed yet
    found = _study_results(plan, store)
    return "other" if missing else same(found, original, "an artifact of a study")
