"""What is sealed must be refused when it is altered: recordings, gates, guaranteed policies, runs, a study's store.

Accepted is right only where what was loaded equals the original.
"""

import json
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

import loopscope as ls
from loopscope.artifacts import MANIFEST, write_manifest
from loopscope.certify.live_runs import LiveRuns
from loopscope.config import digest, plain
from loopscope.learned.attach import load_fitted
from loopscope.models.checkpoint import load_model, read_checkpoint_config
from loopscope.models.custom_model import MODELS, register_model
from loopscope.studies.plan import make_plan
from loopscope.studies.study_file import expand_study
from loopscope.training.run_folder import read_run_settings
from loopscope.training.task_run import train
from loopscope.trajectory import EXAMPLES, RECORDING, RECORDING_SCHEMA

from .mutations import STRINGS
from .runner import Case
from .world import CPU, OWN_MODEL, World


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def held(value: Any) -> Any:
    """What tells a loaded value from another: bytes of arrays, and everything else as it is."""
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.contiguous().view(torch.uint8).numpy().tobytes()
    if is_dataclass(value):
        return {each.name: held(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {key: held(each) for key, each in value.items()}
    return [held(each) for each in value] if isinstance(value, list | tuple) else value


def same(loaded: Any, original: Any, what: str) -> str:
    assert loaded == original, f"{what} was altered, and is accepted"
    return "same"


@lru_cache(maxsize=64)
def _original(load: Callable[[Path], Any], path: Path) -> Any:
    return held(load(path))


def _sealed(
    case: Case, sources: dict[str, Path], load: Callable[[Path], Any], what: str, *commands: str, often: float = 0.1
) -> str:
    """A copy of one of these folders with a file that is spoilt: it is refused by `load`, and by commands."""
    source = sources[case.rng.choice(list(sources))]
    folder = case.copy(source)
    file = case.rng.choice(files_of(folder))
    case.spoil(file, [other / file.name for other in sources.values() if (other / file.name).is_file()])
    if commands and case.rng.random() < often:
        case.command(*case.rng.choice(commands).replace("FOLDER", str(folder)).replace("OUT", str(case.out)).split())
    return same(held(load(folder)), _original(load, source), what)


def recording(world: World, case: Case) -> str:
    commands = (
        f"sweep FOLDER {world.recordings['test']} --readout margin",
        "calibrate FOLDER --max-drop 0.6 --confidence 0.5 --out OUT",
        "fit FOLDER --steps 2 --out OUT",
    )
    return _sealed(case, world.recordings, ls.Trajectory.load, "a recording", *commands)


def _sealed_again(case: Case, folder: Path, provenance: dict[str, Any] | None = None) -> str:
    """What commands say of recordings of which one was altered and got its hashes again: it is read, or refused."""
    manifest = json.loads((folder / "test" / MANIFEST).read_bytes())
    sources = manifest["provenance"] if provenance is None else provenance
    contents, files = manifest["contents"], list(manifest["files"])
    if (folder / "test" / EXAMPLES).is_file():
        write_manifest(folder / "test", RECORDING, RECORDING_SCHEMA, contents, sources, files)
    case.before = {}
    command = case.rng.choice(("sweep FOLDER --readout margin", "sweep FOLDER", "compare FOLDER margin entropy"))
    if case.rng.random() < 0.2:
        command = "report FOLDER --product headline --product exits --out OUT"
    case.command(*command.replace("FOLDER", str(folder)).replace("OUT", str(case.out)).split(), "--json")
    return "other"


def provenance(world: World, case: Case) -> str:
    """Above all that of the run, which a report reads."""
    folder = case.copy(world.run / "recordings")
    found = json.loads((folder / "test" / MANIFEST).read_bytes())["provenance"]
    part = case.folder / "part.json"
    key = case.rng.choice((None, "run", "run", *found))
    part.write_text(json.dumps(found if key is None else found[key]))
    case.spoil(part, writes=True)
    try:
        spoilt = json.loads(part.read_bytes(), parse_int=float)
        digest(spoilt)
    except (ValueError, OSError, RecursionError):  # no manifest can say that
        spoilt = ["spoilt"]
    changed = spoilt if key is None else found | {key: spoilt}
    return _sealed_again(case, folder, changed if isinstance(changed, dict) else {"run": changed})


def example_texts(world: World, case: Case) -> str:
    folder = case.copy(world.run / "recordings")
    case.spoil(folder / "test" / EXAMPLES, writes=True)
    return _sealed_again(case, folder)


def live_run(world: World, case: Case) -> str:
    runs = {name: world.live_runs[name] for name in ("propagate", "gate", "policy")}
    command = "calibrate FOLDER --loss disagreement --max-drop 0.6 --confidence 0.5 --out OUT"
    return _sealed(case, runs, LiveRuns.load, "a live run", command, often=0.2)


def gate(world: World, case: Case) -> str:
    return _sealed(case, world.gates, load_fitted, "a gate")


def policy(world: World, case: Case) -> str:
    name = case.rng.choice(list(world.policies))
    path = case.copy(world.policies[name])
    copied = [case.copy(weights) for weights in world.policies[name].parent.glob(f"{name}.gate-*.safetensors")]
    case.spoil(copied[0] if copied and case.rng.random() < 0.4 else path)
    loaded = held(ls.ExitPolicy.load(path))
    if case.rng.random() < 0.05:
        case.command("check", world.recordings["test"], "--policy", path, verdicts=(0, 1))
    if loaded == _original(ls.ExitPolicy.load, world.policies[name]):
        return "same"
    assert loaded["certificate"] is None, "a guaranteed policy was altered, and is accepted"
    values = json.loads(path.read_bytes())  # without a guarantee it is the user's to change: it is what its file says
    threshold = values.get("threshold")
    said = {"readout": values["readout"], "threshold": None if threshold is None else float(threshold)}
    said["scope"] = {key: value for key, value in (values.get("scope") or {}).items() if value is not None}
    scope = {key: value for key, value in plain(loaded["scope"]).items() if value is not None}
    read = {"readout": loaded["readout"], "threshold": loaded["threshold"], "scope": scope}
    assert said == read, "a policy is not what its file says"
    assert math.isfinite(loaded["threshold"] or 0), "a policy has a threshold that is no number"
    lost = values.get("certificate") is not None or (loaded["gate"] is None) != (values.get("gate") is None)
    assert not lost, "a policy lost its guarantee or its gate, and is accepted"
    return "other"


def monitor(world: World, case: Case) -> str:
    """What a monitor has seen so far, kept in a file; one whose digest was made again can go on, if it is accepted."""
    guaranteed = ls.ExitPolicy.load(world.policies["margin"])
    path = case.copy(world.monitor)
    case.spoil(path)
    if case.rng.random() < 0.5:
        original = ls.Monitor.load(world.monitor, guaranteed).result
        return same(ls.Monitor.load(path, guaranteed).result, original, "a monitor")
    with suppress(ValueError, OSError, OverflowError, RecursionError, TypeError, msgspec.MsgspecError):
        values = json.loads(path.read_bytes())
        path.write_text(json.dumps(values | {"digest": digest(values | {"digest": ""})}))
    case.before = {}
    resealed = ls.Monitor.load(path, guaranteed)
    before = resealed.result
    after = resealed.update([1, 2], [0.0, 1.0])
    assert 0 <= before.audited <= before.examples == after.examples - 2, "a monitor counts what was not there"
    return "other"


def _run_contents(folder: Path) -> Any:
    model = load_model(folder)
    return dict(model.state_dict()), (model.num_loops, model.block_size, model.vocab_size)


def finished_run(world: World, case: Case) -> str:
    """The weights are sealed; the configuration must not contradict itself."""
    source = case.rng.choice((world.run, world.run, world.language_run, world.custom_run))
    register_model(OWN_MODEL)
    folder = case.copy(source, "run")
    mine = [path for path in files_of(folder) if "recordings" not in path.parts]
    weighty = [path for path in mine if path.name in ("config.json", "model.safetensors")]
    file = case.rng.choice(weighty if case.rng.random() < 0.7 else mine)
    other = world.other_run / file.name
    case.spoil(file, [other] if source is world.run and other.is_file() else ())
    original, loaded = _original(_run_contents, source), held(_run_contents(folder))
    with torch.inference_mode():
        load_model(folder).loops(torch.zeros((1, 3), dtype=torch.int64))
    if source is world.run:
        settings, config = read_run_settings(folder), read_checkpoint_config(folder)
        expected = (settings.model, settings.task.vocab_size, settings.block_size)
        found = (config.model, config.vocab_size, config.block_size)
        assert found == expected, "a run's configuration contradicts itself, and is accepted"
        if case.rng.random() < 0.1:
            case.command("answer", folder, world.documents["examples.txt"], "--threshold", 0.5)
    assert set(MODELS) == {OWN_MODEL}, "code was imported because a checkpoint names it"
    same(loaded[0], original[0], "a run")
    return "same" if loaded == original else "other"


def unfinished_run(world: World, case: Case) -> str:
    """A run that goes on must end as one that ran through."""
    source, settings = world.unfinished
    folder = case.copy(source, "run")
    file = folder / "state.safetensors" if case.rng.random() < 0.7 else case.rng.choice(files_of(folder))
    case.spoil(file, [], writes=True)
    train(settings, folder, CPU)
    return same((folder / "model.safetensors").read_bytes(), world.finished_weights, "the state of a run")


def unfinished_recording(world: World, case: Case) -> str:
    """A recording that goes on must end as one that was never interrupted."""
    folder = case.copy(world.unfinished_recording, "recordings")
    case.spoil(case.rng.choice(files_of(folder / "new.unfinished")), writes=True)
    world.record(folder / "new")
    original = _original(ls.Trajectory.load, world.unfinished_recording / "finished")
    return same(held(ls.Trajectory.load(folder / "new")), original, "an unfinished recording")


@lru_cache(maxsize=1)
def _plan(study: Path) -> Any:
    return make_plan(expand_study(str(study)))


def _study_results(plan: Any, store: Path) -> list[str]:
    results = plan.results(store)
    return [digest(results), digest(list(plan.details(results, store)))]


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
    plan, store = _plan(world.study), case.inputs / "store"
    shown = [step for model in plan.models for step in (model.analysis, model.transfer) if step is not None]
    folders = {step.folder(world.store): step.kind for step in shown}
    for each in folders:
        case.copy(each, f"store/{each.name}")
    chosen = case.rng.choice(list(folders))
    file = store / chosen.name / case.rng.choice(sorted(each.name for each in chosen.iterdir()))
    others = [each for each, kind in folders.items() if kind == folders[chosen] and each != chosen]
    case.spoil(file, [each / file.name for each in others])
    if case.rng.random() < 0.1:
        where = ("--store", store, "--out", case.out, "--device", "cpu")
        case.command("study", "report", _titled(world, case), *where, "--product", "headline")
    missing = (
        not file.is_file() and file.name == "manifest.json"
    )  # then it is not analysed, or its rules are not transferred, yet
    found = _study_results(plan, store)
    return "other" if missing else same(found, _study_results(plan, world.store), "an artifact of a study")
