"""From Python, other arrays, names and numbers than are right: `UserError`, or what comes out is what went in.

A keyword that is missing or unknown, or an object of another class (a text in the place of a model), is Python's own
affair (`TypeError`, `AttributeError`), and not tried, but for a monitor, whose arguments are policies and recordings.
"""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from conftest import random_trajectory

import loopscope as ls
from loopscope.arguments import SPLITS
from loopscope.models import load_model

from .mutations import NUMBERS, STRINGS, Rng
from .runner import Case, MisledError
from .world import World

Call = tuple[Callable[..., Any], dict[str, Any]]


@cache
def _calls(world: World) -> dict[str, Call]:
    """Every public function with arguments that are right."""
    plain, test = (ls.Trajectory.load(world.recordings[name]) for name in ("plain", "test"))
    train = ls.Trajectory(**_arrays(plain), split="train")
    gate = ls.FittedGate.load(world.gates["linear"])
    model, language = load_model(world.run), load_model(world.checkpoint)
    promised, average = (ls.ExitPolicy.load(world.policies[name]) for name in ("margin", "average"))
    gated = ls.ExitPolicy.load(world.policies["gate-linear"])
    stopped = random_trajectory(7, rows=150, split="train")
    stopper = ls.Stopper.load(world.gates["induction"])
    policy, tokens = ls.ExitPolicy("margin", 0.5), np.array([[1, 2, 3], [2, 1, 0]])
    requests = [ls.Request(0, (tokens[0],)), ls.Request(1, (tokens[1],))]
    made: dict[str, Call] = {
        "Trajectory": (ls.Trajectory, {**_arrays(plain), **_more(plain)}),
        "Trajectory without logits": (ls.Trajectory, _without_logits(plain)),
        "ExitPolicy": (ls.ExitPolicy, {"readout": "margin", "threshold": 0.5, "gate": None, "model": "a" * 64}),
        "ExitPolicy.exit_loops": (_exit_loops, {"readout": "margin", "threshold": 0.5, "trajectory": plain}),
        "FittedGate": (_gate, {"weight": gate.weight, "bias": gate.bias, "pooled": plain.hidden}),
        "Monitor": (
            _watch,
            {"policy": promised, "alpha": 0.01, "seed": 0, "exit_loops": [1, 2, 1], "losses": [0.0, 1.0, 0.0]},
        ),
        "Monitor.replay": (_replay, {"policy": promised, "recording": test, "audit": 0.5}),
        "Monitor.replay on average": (_replay, {"policy": average, "recording": test, "audit": None}),
        "Trajectory.save": (_saved, {"made": test, "target": "new"}),
        "FittedGate.save": (_saved, {"made": gate, "target": "new"}),
        "ExitPolicy.save": (_saved, {"made": promised, "target": "policy.json"}),
        "ExitPolicy.save with a gate": (_saved, {"made": gated, "target": "policy.json"}),
        "Monitor.save": (_saved, {"made": ls.Monitor(promised), "target": "monitor.json"}),
        "Monitor.load": (ls.Monitor.load, {"path": str(world.monitor), "policy": promised}),
        "fit_stopper": (
            ls.fit_stopper,
            {"recording": stopped, "kind": "induction", "gain": "correct", "trees": 32, "leaf": 10, "seed": 0},
        ),
        "Stopper": (_stopper, {"stopper": stopper, **stopper.tensors, "recording": stopped}),
        "Stopper.save": (_saved, {"made": stopper, "target": "new"}),
        "loop": (
            _looped,
            {
                "source": str(world.llama),
                "target": "new",
                "prelude": 1,
                "core": 1,
                "loops": 2,
                "drop": [1],
                "damping": 1.0,
                "injection": False,
                "gate": "none",
            },
        ),
        "attach": (ls.attach, {"trajectory": plain, "gates": {"linear": gate}}),
        "calibrate": (
            ls.calibrate,
            {
                "recording": plain,
                "max_drop": 0.6,
                "confidence": 0.5,
                "gates": {},
                "seed": 0,
                "loss": "gap",
                "readout": "margin",
                "per_difficulty": False,
                "unseen": False,
                "distinct": False,
            },
        ),
        "conformal_risk_control": (
            ls.conformal_risk_control,
            {"recording": plain, "max_drop": 0.6, "readout": "margin", "seed": 0},
        ),
        "sweep": (ls.sweep, {"readout": "margin", "calibration": plain, "evaluation": test, "grid": "fine"}),
        "signal": (ls.signal, {"name": "margin", "trajectory": plain}),
        "diagnose": (ls.diagnose, {"validation": plain, "test": test, "reference": (plain, test), "target": 0.5}),
        "compare": (
            ls.compare,
            {"validation": plain, "test": test, "first": "margin", "second": "gate", "target": 0.5},
        ),
        "fit_gate": (
            ls.fit_gate,
            {"recording": train, "steps": 2, "kind": "linear", "objective": "ponder", "seed": 0, "batch_size": 8},
        ),
        "load_model": (ls.load_model, {"source": world.run, "device": "cpu", "dtype": "float32"}),
        "record_model": (
            ls.record_model,
            {
                "model": model,
                "tokens": tokens,
                "lengths": np.array([3, 2]),
                "labels": np.array([1, 0]),
                "difficulty": np.array([1, 2]),
                "split": "test",
            },
        ),
        "run": (
            lambda **given: list(islice(ls.run(**given), 5)),
            {
                "model": model,
                "policy": policy,
                "requests": requests,
                "batch_size": 2,
                "num_loops": None,
                "batch_tokens": None,
            },
        ),
        "generate": (
            ls.generate,
            {
                "model": language,
                "prompts": [ls.Prompt(0, tokens[0])],
                "policy": policy,
                "max_new_tokens": 2,
                "stop": (),
                "cache": "full",
                "lossless": False,
                "batch_size": 2,
            },
        ),
        "Prompt": (
            lambda **given: ls.generate(language, [ls.Prompt(0, **given)], max_new_tokens=2),
            {"tokens": tokens[0], "forced": None, "policy": policy, "number": 0},
        ),
        "Request": (
            lambda **given: list(ls.run(model, policy, [ls.Request(0, **given)])),
            {"rows": (tokens[0],), "scored": (), "norms": (), "shared": 0, "whole": False, "score": None},
        ),
        "choices": (
            lambda **given: ls.choices(0, **given),
            {
                "context": tokens[0],
                "continuations": [tokens[0], tokens[1]],
                "norms": (1.0, 2.0),
                "shared": 0,
                "score": None,
            },
        ),
        "Readout": (ls.Readout, {"name": "fuzzed_too", "exits": "above", "reads": "logits", "step": abs}),
        "report": (_report, {"models": {"a": (plain, test)}, "reference": "a", "targets": [0.5]}),
        "train": (
            _train,
            {
                "settings": str(world.settings),
                "target": "run",
                "overrides": ["training.steps=1"],
                "objective": None,
                "options": None,
            },
        ),
        "take": (lambda rows: plain.take(rows), {"rows": np.arange(3)}),
    }
    return made


def _arrays(trajectory: ls.Trajectory) -> dict[str, Any]:
    names = ("logits", "labels", "difficulty", "hidden", "gate_logits")
    return {name: np.array(getattr(trajectory, name)) for name in names}


def _more(trajectory: ls.Trajectory) -> dict[str, Any]:
    rows, classes = trajectory.num_examples, trajectory.num_classes or 2
    return {
        "seen": np.arange(rows) % 2 == 0,
        "sequences": np.arange(rows) // 4,
        "norms": np.ones((rows, classes), dtype=np.int64),
        "examples": [str(row) for row in range(rows)],
        "split": "validation",
        "signals": {"own": np.zeros((rows, trajectory.num_loops))},
        "provenance": {"weights_sha256": "a" * 64},
    }


def _without_logits(trajectory: ls.Trajectory) -> dict[str, Any]:
    return {
        "predictions": np.array(trajectory.predicted),
        "label_log_probs": -trajectory.cross_entropy,
        "labels": np.array(trajectory.labels),
        "seen": np.arange(trajectory.num_examples) % 2 == 0,
    }


def _exit_loops(readout: Any, threshold: Any, trajectory: ls.Trajectory) -> Any:
    return ls.ExitPolicy(readout, threshold).exit_loops(trajectory)


def _gate(weight: Any, bias: Any, pooled: Any) -> Any:
    return ls.FittedGate(weight, bias).halt_logits(pooled)


def _stopper(stopper: Any, recording: Any, **tensors: Any) -> Any:
    return replace(stopper, **tensors).values(recording)


def _watch(policy: Any, alpha: Any, seed: Any, exit_loops: Any, losses: Any) -> Any:
    return ls.Monitor(policy, alpha, seed).update(exit_loops, losses)


def _replay(policy: Any, recording: Any, audit: Any) -> Any:
    result = ls.Monitor(policy).replay(recording, audit)
    if policy.guarantee.confidence is None and (result.audited or audit):
        raise MisledError("losses are held against a promise on average")
    return result


def _looped(target: Any, loops: Any, **given: Any) -> None:
    ls.loop(out=target, loops=loops, **given)
    if load_model(target).num_loops != loops:
        raise MisledError("it loops otherwise than was asked")


def _saved(made: Any, target: Any) -> None:
    """What is loaded again is what was saved."""
    made.save(target)
    again = ls.Monitor.load(target, made.policy) if isinstance(made, ls.Monitor) else type(made).load(target)
    kept = [_kept(each) for each in (made, again)]
    if kept[0] != kept[1]:
        raise MisledError(f"{type(made).__name__} is another one when it is saved and loaded")


def _kept(made: Any) -> Any:
    if isinstance(made, ls.Trajectory):
        return made.sha256
    if isinstance(made, ls.FittedGate | ls.Stopper):
        return {name: np.asarray(value).tolist() for name, value in made.tensors.items()}, dict(made.provenance)
    if isinstance(made, ls.Monitor):
        return made.result
    return str(made), made.threshold, made.guarantee, made.gate and _kept(made.gate)


def _target(world: World, rng: Rng) -> Any:
    """Where something may be written, or not: names, and what stands there already. Nothing lies outside `here`."""
    places: dict[str, Callable[[Path], object]] = {
        "file": lambda path: path.write_text("mine"),
        "empty": lambda path: path.mkdir(),
        "full": lambda path: shutil.copytree(world.documents["prompts.txt"].parent, path),
        "gate": lambda path: shutil.copytree(world.gates["other"], path),
        "recording": lambda path: shutil.copytree(world.recordings["other"], path),
        "policy": lambda path: shutil.copyfile(world.policies["entropy"], path),
        "link": lambda path: path.symlink_to("elsewhere"),
        "linked": lambda path: (shutil.copytree(world.recordings["other"], "there"), path.symlink_to("there")),
        "loop": lambda path: path.symlink_to("loop"),
        "pipe": lambda path: os.mkfifo(path),
    }
    kind = rng.choice(list(places))
    names = (kind, f"{kind}/", f"./{kind}", f"no/such/{kind}", f"file/{kind}", Path(kind), Path(kind).resolve())
    odd = (None, 3, 0, True, 2.5, b"x", [], {}, ["x"], np.array(3), "", " ", ".", "..", "/", "/dev/null", "/dev/null/x")
    more = (
        "/proc/x",
        "/proc/self/x",
        "a\0b",
        "\ud800",
        "two\nlines",
        "\x1b[31mred",
        "~",
        "-",
        "é",
        "x" * 240,
        "x" * 300,
    )
    target = rng.choice((*names, *names, *odd, *more))
    if target in names:
        places[kind](Path(kind))
        if str(target).startswith("file/") and kind != "file":
            places["file"](Path("file"))
    return target


def _report(models: Any, reference: Any, targets: Any) -> Any:
    """RefusedError before anything is drawn, or not tried to its end: a page takes a second."""
    from loopscope.analysis.model_analysis import ModelRecordings, analyse_models

    pairs = models.items() if isinstance(models, dict) else ()
    return analyse_models([ModelRecordings(name, *pair) for name, pair in pairs], reference, targets)


def _train(settings: Any, target: Any, overrides: Any, objective: Any, options: Any) -> Any:
    return ls.train(settings, target, overrides=overrides, objective=objective, options=options)


def _other_array(rng: Rng, array: Any) -> Any:
    """An array in another type, in another shape, or with a strange number."""
    array = np.array(array)
    flat = array.reshape(-1)
    strange: list[Callable[[], Any]] = [
        lambda: array.astype(np.float64),
        lambda: array.astype(np.int64),
        lambda: array.astype(np.int8),
        lambda: array.astype(np.uint64),
        lambda: array.astype(np.complex64),
        lambda: array.astype(object),
        lambda: array.astype(str),
        lambda: array.astype(bool),
        lambda: array.tolist(),
        lambda: [array.tolist(), [1]],
        lambda: array[:-1],
        lambda: array[:0],
        lambda: array.T,
        lambda: array[None],
        lambda: flat,
        lambda: array + 0.5,
        lambda: -array - 1 if array.dtype != np.bool_ else array * 2,
        lambda: array * 10**6,
        lambda: _with(array, rng, np.nan),
        lambda: _with(array, rng, np.inf),
        lambda: _with(array, rng, -np.inf),
        lambda: array.reshape(*array.shape, 1),
        lambda: np.ma.masked_array(array, mask=True),
        lambda: array.astype("datetime64[s]"),
    ]
    try:
        return rng.choice(strange)()
    except (TypeError, ValueError, IndexError, OverflowError):  # not every array can become every other
        return None


def _with(array: Any, rng: Rng, value: float) -> Any:
    other = array.astype(np.float64)
    other.reshape(-1)[rng.randrange(other.size)] = value
    return other


def _hostile(world: World, rng: Rng, good: Any, objects: bool) -> Any:
    """Another array, name or number in the place of one, or nothing; so, too, of `objects`, or they stay what they are.

    A recording also becomes another one.
    """
    if isinstance(good, np.ndarray):
        return _other_array(rng, good) if rng.random() < 0.9 else rng.choice((None, 3, "x", [], {}))
    objects = objects and rng.random() < 0.5
    if isinstance(good, ls.Trajectory) and not objects:
        return ls.Trajectory.load(world.recordings[rng.choice(list(world.recordings))])
    held = good if isinstance(good, tuple | list) else [good]
    if not objects and not all(each is None or isinstance(each, str | int | float | np.ndarray) for each in held):
        return good
    pool: list[Callable[[], Any]] = [
        lambda: rng.choice((None, True, False, 0, 1, -1, 3, 2.5, float("nan"), float("inf"), 10**30, -(10**30), 1j)),
        lambda: rng.choice((np.float32(1), np.int64(2), np.array(3), np.array([0.5]), np.nan)),
        lambda: rng.choice(NUMBERS[:16]),
        lambda: rng.choice(STRINGS),
        lambda: rng.choice(("entropy", "gate", "oracle", "fixed", "auto", "gate:x", "test", "uniform", "mlp")),
        lambda: rng.choice((b"x", (), [], {}, [None], {"a": 1}, [[1], [1, 2]], ["a", 1], [1.5], [-1], Path("none"))),
    ]
    return rng.choice(pool)()


def python(world: World, case: Case) -> str:
    calls = _calls(world)
    name = case.rng.choice(list(calls))
    call, good = calls[name]
    given = dict(good)
    keys = [key for key in given if key != "made"]
    for key in case.rng.sample(keys, min(len(keys), case.rng.choice((1, 1, 2)))):
        objects = name.startswith("Monitor")
        odd = key == "target"
        given[key] = _target(world, case.rng) if odd else _hostile(world, case.rng, good[key], objects)
        case.notes.append(f"{name}({key}={_shown(given[key])})")
    result = call(**given)
    if isinstance(result, ls.Trajectory) and name.startswith("Trajectory"):
        _check_trajectory(result, given)
    if isinstance(result, ls.ExitPolicy):
        _check_policy(result)
    return "other"


def _shown(value: Any) -> str:
    text = f"{type(value).__name__} {value!r}" if not isinstance(value, ls.Trajectory) else "Trajectory"
    shape = f" {value.dtype} {value.shape}" if isinstance(value, np.ndarray) else ""
    return " ".join(text.split())[:160] + shape


def _check_policy(policy: ls.ExitPolicy) -> None:
    if not isinstance(policy.readout, str):
        raise MisledError("a policy has a readout that is no name")
    if policy.threshold is not None and (isinstance(policy.threshold, bool) or not np.isreal(policy.threshold)):
        raise MisledError("a policy has a threshold that is no number")
    if policy.model is not None and not isinstance(policy.model, str):
        raise MisledError("a policy is for a model that is no hash")
    str(policy), repr(policy)


def _check_trajectory(made: ls.Trajectory, given: dict[str, Any]) -> None:
    """What is said of it holds."""
    rows = made.num_examples
    if given.get("seen") is not None:
        seen = np.asarray(given["seen"]).astype(bool)
        if not seen.all() and made.unseen().num_examples != int((~seen).sum()):
            raise MisledError("seen examples are counted as unseen")
    if made.predicted.dtype.kind not in "iu":
        raise MisledError("answers are no whole numbers")
    if made.labels is not None and made.correct.shape != (rows, made.num_loops):
        raise MisledError("answers are judged in another shape")
    if made.examples is not None and not all(isinstance(text, str) for text in made.examples):
        raise MisledError("examples are no texts")
    if made.norms is not None and not (np.asarray(made.norms) > 0).all():
        raise MisledError("a choice has no characters")
    if not isinstance(made.provenance, dict) or not all(isinstance(name, str) for name in made.signals):
        raise MisledError("provenance or signals have no names")
    if made.split not in (None, *SPLITS):
        raise MisledError("nothing guards a split that there is none of")
    made.save(Path.cwd() / "saved")
    again = ls.Trajectory.load(Path.cwd() / "saved")
    if again.sha256 != made.sha256:
        raise MisledError("a trajectory is another one when it is saved and loaded")
