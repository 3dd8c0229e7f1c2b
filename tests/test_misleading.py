"""What would mislead without a word is rejected, or said: every such case that a review found, stage by stage.

A case is named after what would go wrong. Models that break the contract are in `examples/test_your_model.py`.
"""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import GATED, GOLDEN, forget_readout, random_trajectory, tiny_settings
from safetensors.numpy import load_file, save_file
from tiny_language import outspoken, write_ouro

import loopscope as ls
from loopscope.cli import main
from loopscope.scope import Scope

NAN, INF = float("nan"), float("inf")
OURS, THEIRS = {"weights_sha256": "a" * 64}, {"weights_sha256": "b" * 64}
Call = Callable[[Path], object]
Cases = dict[str, tuple[str, Call]]
"""What would mislead: words of the rejection, and the call, which gets a folder of its own."""


def every(cases: Cases) -> Any:
    return pytest.mark.parametrize(("words", "call"), cases.values(), ids=cases)


def rejected(words: str, call: Call, place: Path) -> None:
    with pytest.raises(ls.UserError, match=words) as found:
        call(place)
    assert "\n" not in str(found.value)


# ---- a recording made of arrays


def made(**changes: object) -> ls.Trajectory:
    return random_trajectory(**changes)


def one(value: float, place: int, shape: tuple[int, ...], rest: float = 0.0) -> np.ndarray:
    return np.where(np.arange(np.prod(shape)).reshape(shape) == place, value, rest)


def answered(predictions: object, **changes: Any) -> ls.Trajectory:
    return ls.Trajectory(predictions=predictions, **changes)  # type: ignore[arg-type]


def contradicted() -> ls.Trajectory:
    predictions = np.array(made().predicted)
    predictions[3, 2] = (predictions[3, 2] + 1) % 5
    return made(predictions=predictions)


FULL, LOOPS = (200, 4, 5), (200, 4)
FIELDS: dict[str, tuple[str, dict[str, object]]] = {
    "examples and loops swapped": ("two axes swapped", {"logits": np.zeros((4, 200, 5))}),
    "loops and classes swapped": ("swapped", {"logits": np.zeros((200, 4, 3)), "labels": np.arange(200) % 4}),
    "loops and classes swapped, without labels": ("swapped", {"logits": np.zeros((200, 5, 4)), "hidden": None}),
    "hidden states of other loops": ("hidden has the shape", {"hidden": np.zeros((200, 3, 6))}),
    "a signal of other loops": ("signal mine has the shape", {"signals": {"mine": np.zeros((200, 3))}}),
    "norms of other choices": ("norms has the shape", {"norms": np.ones((200, 3))}),
    "labels counted from 1": (r"labels\[4\] is 5.*count from 0", {"labels": np.arange(200) % 5 + 1}),
    "labels of padding": ("is -100.*leave out examples", {"labels": np.repeat([0, -100], 100)}),
    "labels of no class": ("not one of the classes", {"labels": np.full(200, 5)}),
    "labels with a fraction": ("whole numbers", {"labels": np.full(200, 0.5)}),
    "labels one-hot": (r"labels has the shape \[200, 5\]", {"labels": np.eye(200, 5, dtype=int)}),
    "labels that wrap around": (r"below 2\*\*63", {"labels": np.full(200, 2**64 - 1, np.uint64)}),
    "a label that is no choice": ("without those", {"logits": one(-INF, 4, (5,), 0) + np.zeros(FULL)}),
    "a choice missing at one loop": (r"one loop.*\[17, 1, 2\]", {"logits": one(-INF, 347, FULL)}),
    "one choice": ("fewer than two", {"logits": one(0, 0, (5,), -INF) + np.zeros(FULL), "labels": None}),
    "logits NaN": (r"NaN \(first: logits\[17, 1\]", {"logits": one(NAN, 347, FULL)}),
    "logits infinite": (r"\+inf", {"logits": one(INF, 347, FULL)}),
    "hidden states NaN": ("hidden holds a value", {"hidden": one(NAN, 70, (200, 4, 6))}),
    "a gate infinite": (r"gate_logits\[17, 2\]", {"gate_logits": one(INF, 70, LOOPS)}),
    "difficulty NaN": ("difficulty holds a value", {"difficulty": np.full(200, NAN)}),
    "a signal infinite": ("signal kl holds a value", {"signals": {"kl": one(INF, 70, LOOPS)}}),
    "a signal that stops": ("its first loops only", {"signals": {"kl": one(NAN, 2, LOOPS)}}),
    "an array with a mask": ("without a mask", {"gate_logits": np.ma.zeros(LOOPS)}),
    "predictions beyond the logits": ("beyond the 5", {"predictions": np.full(LOOPS, 5)}),
    "predictions with a fraction": ("whole numbers", {"logits": None, "predictions": np.full(LOOPS, 0.5)}),
    "predictions below 0": ("below 0", {"logits": None, "predictions": np.full(LOOPS, -1)}),
    "probabilities, not their logarithms": ("above 0", {"label_log_probs": np.full(LOOPS, 0.5)}),
    "norms of 0 characters": ("above 0", {"norms": np.zeros((200, 5))}),
    "seen as a count": ("seen must be true or false", {"seen": np.full(200, 2)}),
    "sequences with a fraction": ("sequences must be whole", {"sequences": np.full(200, 0.5)}),
    "texts of other examples": ("1 example texts for 200", {"examples": ["one"]}),
    "examples that are no texts": ("a list of texts", {"examples": list(range(200))}),
    "a provenance that no file can hold": ("saved as JSON", {"provenance": {"made": NAN, "by": object()}}),
    "one text for all examples": ("1 example texts for 200", {"examples": "x" * 200}),
    "a split misspelt": (r"no split 'tset' \(did you mean 'test'\?\)", {"split": "tset"}),
    "a part of a split": ("no split 'test-20'", {"split": "test-20"}),
}
ARRAYS: Cases = {
    **{what: (words, lambda _, each=each: made(**each)) for what, (words, each) in FIELDS.items()},  # type: ignore[misc]
    "predictions that the logits contradict": (r"contradict.*predictions\[3, 2\]", lambda _: contradicted()),
    "rows by a mask of 0 and 1": ("a mask of 200 booleans, as in rows == 1", lambda _: made().take(np.arange(200) % 2)),
    "rows by another's mask": ("a mask of 200 booleans", lambda _: made().take(np.ones(201, bool))),
    "rows from the end": ("indices from 0 to 199", lambda _: made().take(np.array([-1]))),
    "no rows": ("at least one example", lambda _: made().take(np.zeros(200, bool))),
    "unseen examples that nobody counted": ("which examples training had", lambda _: made().unseen()),
    "no unseen example": ("none is unseen", lambda _: made(seen=np.ones(200, bool)).unseen()),
}


SHARES = np.random.default_rng(0).dirichlet(np.ones(5), (200, 4))
WARNED: Cases = {
    "probabilities as logits": ("as probabilities do", lambda _: made(logits=SHARES)),
    "a gate's probabilities as its logits": ("halt logits", lambda _: made(gate_logits=np.cumsum(SHARES, 2)[..., 2])),
    "one loop's logits as all loops'": (
        "All loops have the same logits",
        lambda _: made(logits=np.repeat(np.random.default_rng(0).normal(size=(200, 1, 5)), 4, axis=1)),
    ),
}


@every(WARNED)
def test_arrays_that_may_be_right(words: str, call: Call, tmp_path: Path) -> None:
    """Noted when they are made, and again when they are read."""
    with pytest.warns(UserWarning, match=words):
        recording = call(tmp_path)
    recording.save(tmp_path / "recording")  # type: ignore[attr-defined]
    with pytest.warns(UserWarning, match=words):
        ls.Trajectory.load(tmp_path / "recording")


# ---- files


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-5])


@cache
def policy() -> ls.ExitPolicy:
    return ls.calibrate(made(seed=5, rows=400, split="validation", provenance=OURS), 0.5, 0.8, readout="margin")


@cache
def stopper() -> ls.Stopper:
    return ls.fit_stopper(made(seed=1, rows=300))


GATE = ls.FittedGate(np.ones(6), np.zeros(()), provenance=OURS | {"split": "train"})
TEXTS = ["x"] * 200
SAVED: dict[str, tuple[str, Callable[[], Any]]] = {
    "trajectory.safetensors": ("mine", made),
    "hidden.safetensors": ("mine", made),
    "examples.json": ("mine", lambda: made(examples=TEXTS)),
    "gate.safetensors": ("mine", lambda: GATE),
    "policy.gate-*.safetensors": ("policy.json", lambda: ls.ExitPolicy("gate:mine", 0.5, GATE)),
}


@pytest.mark.parametrize("alter", [flip, cut])
@pytest.mark.parametrize("file", SAVED)
def test_altered_files(file: str, alter: Callable[[Path], None], tmp_path: Path) -> None:
    place, make = SAVED[file]
    saved = make()
    saved.save(tmp_path / place)
    type(saved).load(tmp_path / place)
    (found,) = tmp_path.rglob(file)
    alter(found)
    rejected(found.name, type(saved).load, tmp_path / place)


def merged(data: Any, change: Any) -> Any:
    if not isinstance(change, dict):
        return change
    return data | {key: merged(data[key], value) for key, value in change.items()}


@pytest.mark.parametrize(
    "change",
    [
        {"threshold": 0.0},
        {"readout": "top1"},
        {"digest": ""},
        {"scope": {"model": None}},
        {"scope": {"unit": "tokens"}},
        {"certificate": {"guarantee": {"max_drop": 0.05}}},
        {"certificate": {"guarantee": {"confidence": 0.99}}},
        {"certificate": {"exits": {"counts": [1, 1, 1, 1]}}},
    ],
    ids=str,
)
def test_altered_policies(change: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "policy.json"
    policy().save(file)
    data = json.loads(file.read_bytes())
    file.write_text(json.dumps(merged(data, change)))
    rejected("altered", ls.ExitPolicy.load, file)


@pytest.mark.parametrize(
    ("name", "alter"), [("model.safetensors", flip), ("metrics.jsonl", cut), ("hashes.json", flip)]
)
def test_altered_runs(name: str, alter: Callable[[Path], None], gated_run: Path, tmp_path: Path) -> None:
    for file in gated_run.iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    ls.load_model(tmp_path)
    alter(tmp_path / name)
    rejected(name, ls.load_model, tmp_path)


# ---- two recordings together

VALIDATION, TEST = made(seed=1, split="validation"), made(seed=2, split="test")
ROUNDED = made(seed=1, logits=np.asarray(VALIDATION.logits, np.float32))
BARE = ls.Trajectory(predictions=VALIDATION.predicted, labels=VALIDATION.labels)
PART = {"split": "validation", "provenance": OURS}
ORDER = np.random.default_rng(0).permutation(200)
OTHERS = made(seed=3, classes=7), made(seed=4, classes=7)


def partly() -> ls.Trajectory:
    """A tenth of it is of the validation split."""
    ours, others = VALIDATION.take(ORDER[:20]), made(seed=9).take(np.arange(20, 200))
    joined = {name: np.concatenate([getattr(ours, name), getattr(others, name)]) for name in ("logits", "labels")}
    return ls.Trajectory(**joined)  # type: ignore[arg-type]


def swept(first: ls.Trajectory, second: ls.Trajectory) -> Call:
    return lambda _: ls.sweep("fixed", first, second)


TWICE = ("margin", "margin")
PAIRS: Cases = {
    "thresholds from test data": ("test split", swept(TEST, VALIDATION)),
    "thresholds from extrapolation": ("extrapolation split", swept(made(seed=3, split="extrapolation"), TEST)),
    "thresholds from the evaluation data": ("same data", swept(VALIDATION, VALIDATION)),
    "thresholds from a copy": ("same data", swept(VALIDATION, made(seed=1))),
    "thresholds from a rounded copy": ("same data", swept(VALIDATION, ROUNDED)),
    "thresholds from a bare copy": ("same data", swept(VALIDATION, BARE)),
    "two parts of one split": ("same data", swept(*(replace(each, **PART) for each in (VALIDATION, TEST)))),
    "splits that overlap in another order": ("as examples of the calib", swept(VALIDATION, VALIDATION.take(ORDER))),
    "splits that overlap in part": ("About 22 of the 200", lambda _: ls.sweep("fixed", VALIDATION, partly())),
    "another depth": ("differ in their loops", swept(VALIDATION, made(seed=3, loops=5))),
    "other classes": ("differ in their classes", swept(VALIDATION, OTHERS[0])),
    "another model": ("differ in their weights", swept(made(seed=1, provenance=OURS), made(seed=2, provenance=THEIRS))),
    "diagnosed on test data": ("test split", lambda _: ls.diagnose(TEST, VALIDATION)),
    "diagnosed on validation data": ("same data", lambda _: ls.diagnose(VALIDATION, VALIDATION)),
    "a reference of other classes": ("numbers of classes", lambda _: ls.diagnose(*pair(0.9), reference=OTHERS)),
    "compared on other examples": ("same examples", lambda _: ls.compare(VALIDATION, TEST, *TWICE, other=OTHERS)),
    "compared with itself": ("the same as itself", lambda _: ls.compare(VALIDATION, TEST, *TWICE)),
    "an accuracy in percent": ("between 0 and 1", lambda _: ls.sweep("fixed", VALIDATION, TEST).depth_at(95)),
    "a target in percent": ("target", lambda _: ls.Target(95)),
    "changes at one loop": ("one loop only", lambda _: ls.sweep("kl", *(made(seed=n, loops=1) for n in (1, 2)))),
}


def pair(right: float, rows: int = 600) -> tuple[ls.Trajectory, ls.Trajectory]:
    """Recordings whose last loop is right this often, or by chance."""

    def drawn(seed: int, split: str) -> ls.Trajectory:
        rng = np.random.default_rng(seed)
        labels = rng.integers(0, 4, rows)
        logits = rng.normal(size=(rows, 3, 4))
        logits[np.arange(rows), 1:, labels] += 9 * (rng.random((rows, 1)) < right)
        return ls.Trajectory(logits=logits, labels=labels, gate_logits=rng.normal(size=(rows, 3)), split=split)

    return drawn(1, "validation"), drawn(2, "test")


@pytest.mark.parametrize(
    ("words", "say"),
    [
        pytest.param("No verdict", lambda: ls.diagnose(*pair(0.0)), id="a model that guesses"),
        pytest.param("No verdict", lambda: ls.compare(*pair(0.0), "margin", "gate"), id="readouts that guess"),
        pytest.param(
            "the reference is not good enough to judge its trajectory by",
            lambda: ls.diagnose(*pair(0.9), reference=pair(0.0)),
            id="a reference that guesses",
        ),
        pytest.param("not above chance", lambda: ls.diagnose(*pair(0.9), target=0.25), id="a target of guesses"),
        pytest.param("Nothing can be told from 12", lambda: ls.diagnose(*pair(0.9, 12)), id="twelve examples"),
    ],
)
def test_no_verdict(words: str, say: Callable[[], object]) -> None:
    assert words in " ".join(str(say()).split())


# ---- signals and readouts of one's own


def registered(step: Any, name: str = "mine", reads: str = "logits", exits: str = "above") -> None:
    forget_readout(name)
    ls.register_readout(ls.Readout(name, exits, reads, step))  # type: ignore[arg-type]


def stepped(step: Any, reads: str = "gate_logits", classes: int = 5) -> Call:
    def call(_: Path) -> object:
        registered(step, reads=reads)
        return ls.signal("mine", made(seed=3, rows=9, classes=classes))

    return call


def defined_again(use: Callable[[ls.ExitPolicy, Path], object]) -> Call:
    """A policy of a readout whose lines change after it was calibrated."""

    def call(at: Path) -> object:
        registered(lambda logits: logits.max(axis=1))
        found = ls.calibrate(made(seed=1, rows=900, split="validation"), 0.5, 0.8, readout="mine")
        found.save(at / "policy.json")
        registered(lambda logits: 2 * logits.max(axis=1))
        return use(found, at)

    return call


def as_if_recorded(**provenance: object) -> ls.Trajectory:
    signals = {"mine": np.zeros((200, 4))}
    return answered(np.zeros((200, 4), int), labels=np.zeros(200, int), signals=signals, provenance=provenance)


def contradicting(name: str) -> object:
    return ls.signal(name, made(signals={name: 0.99 * ls.signal(name, made())}))


def recorded_before(_: Path) -> object:
    registered(lambda logits: logits.max(axis=1))
    return ls.signal("mine", as_if_recorded(signal_definitions={"mine": "c" * 64}))


ALONE, OLD = "something else of a row alone", "another definition"
SIGNALS: Cases = {
    "a mean over the rows": (ALONE, stepped(lambda now: now - now.mean())),
    "the best of the rows": (ALONE, stepped(lambda logits: logits.max(axis=1) - logits.max(), "logits")),
    "the best of wide rows": (ALONE, stepped(lambda now: now.max(axis=1) - now.max(), "logits", 40_000)),
    "a rank among the rows": (ALONE, stepped(lambda now: now.argsort().argsort())),
    "chance": (ALONE, stepped(lambda now: np.random.default_rng().random(len(now)))),
    "a state of all rows": (ALONE, stepped(lambda now, state: (now - (state or (now,))[0].mean(), (now,)))),
    "infinite values": ("not infinity", stepped(lambda now: np.where(now > 0, INF, 0))),
    "values that stop": ("at loop 2", stepped(lambda now, state: (now * (1 if state is None else NAN), (now,)))),
    "values of other rows": (r"values \[1\] for", stepped(lambda now: now[:1])),
    "complex values": ("must be numbers, got complex", stepped(lambda now: now + 0j)),
    "a state of other rows": ("tuple of arrays", stepped(lambda now, state: (now, (now[:3],)))),
    "a step that reads the labels": (
        "reads one of logits, hidden",
        lambda _: ls.Readout("mine", "below", "cross_entropy", lambda now: now),  # type: ignore[arg-type]
    ),
    "a step that is never run": ("reads one of logits", lambda _: ls.Readout("mine", "below", "logits")),
    "a foreign signal in the place of labels": (
        "has no labels",
        lambda _: ls.ExitPolicy("oracle").exit_loops(
            ls.Trajectory(predictions=np.zeros((9, 3), int), signals={"oracle": np.ones((9, 3))})
        ),
    ),
    "a name that is taken": ("another readout 'margin'", lambda _: ls.register_readout(ls.Readout("margin", "above"))),
    "a policy of the old lines": (OLD, defined_again(lambda old, _: old.exit_loops(TEST))),
    "a file of the old lines": (OLD, defined_again(lambda _, at: ls.ExitPolicy.load(at / "policy.json"))),
    "the old lines for any model": (OLD, defined_again(lambda old, _: old.for_any_model().exit_loops(TEST))),
    "a signal of the old lines": ("recorded with another definition", recorded_before),
    "a signal without a direction": ("say when", lambda _: ls.calibrate(as_if_recorded(), 0.5, readout="mine")),
    "a signal that contradicts the logits": ("'margin' is not what", lambda _: contradicting("margin")),
    "a signal that contradicts the gate": ("'gate' is not what", lambda _: contradicting("gate")),
    "a signal that contradicts the states": ("'hidden_change' is not what", lambda _: contradicting("hidden_change")),
}


def test_a_readout_that_fails_is_left_out_aloud(forgotten: None) -> None:
    registered(lambda logits: 1 / 0, "broken")
    with pytest.warns(UserWarning, match="'broken' failed: .* left out"):
        ls.diagnose(*pair(0.9, 60))


# ---- gates and stoppers


def fitted_to(recording: ls.Trajectory) -> Call:
    """Calibrated on what it was fitted to."""
    return lambda _: ls.calibrate(recording, 0.5, gates={"mine": ls.fit_stopper(recording)}, readout="stopper:mine")


TRAIN = made(seed=1, rows=300, split="train")
GATED_POLICY = ls.ExitPolicy("gate:a", 0.5, GATE)
FITTED: Cases = {
    "a gate fitted to test data": ("must not be fitted on the test split", lambda _: ls.fit_gate(TEST)),
    "a stopper fitted to test data": ("must not be fitted on the test split", lambda _: ls.fit_stopper(TEST)),
    "a gate calibrated on its split": ("fitted to the train", lambda _: ls.calibrate(TRAIN, gates={"mine": GATE})),
    "a stopper calibrated on its split": ("fitted to the train split", fitted_to(TRAIN)),
    "a stopper calibrated on its recording": ("fitted to this very recording", fitted_to(replace(TRAIN, split=None))),
    "a gate of another model": ("another model", lambda _: ls.attach(made(provenance=THEIRS), {"a": GATE})),
    "a policy with a gate of another model": (
        "another model",
        lambda _: GATED_POLICY.exit_loops(made(provenance=THEIRS)),
    ),
    "a gate of wider states": ("width 6", lambda _: ls.attach(made(hidden=np.zeros((200, 4, 7))), {"a": GATE})),
    "a stopper of another depth": ("fitted to 4 loops", lambda _: stopper().values(made(loops=5))),
    "a stopper called a gate": ("takes no stopper", lambda _: ls.ExitPolicy("gate:a", 0.5, stopper())),
    "a gate called a margin": ("takes no gate", lambda _: ls.ExitPolicy("margin", 0.5, GATE)),
    "a flag for a threshold": ("needs a threshold; got True", lambda _: ls.ExitPolicy("margin", True)),
    "a gate that is not there": ("does not have the signal", lambda _: ls.ExitPolicy("gate:a", 0.5).exit_loops(TEST)),
    "a gate that is not finite": ("finite", lambda _: ls.FittedGate(np.full(6, NAN), np.zeros(()))),
    "a stopper of fifty examples": ("100 examples or more", lambda _: ls.fit_stopper(made(seed=1, rows=50))),
    "a stopper of two texts": ("10 sequences", lambda _: ls.fit_stopper(replace(TRAIN, sequences=np.arange(300) % 2))),
}


# ---- calibration


def settling(rows: int = 400, seed: int = 0, **more: object) -> ls.Trajectory:
    """Right from a random loop on; the margin grows from about there."""
    rng = np.random.default_rng(seed)
    settled = np.minimum(rng.geometric(0.5, (rows, 1)), 4)
    signals = {"margin": np.arange(1, 5) - settled + rng.normal(0, 0.5, (rows, 4))}
    wrong = (np.arange(1, 5) < settled).astype(int)
    return answered(wrong, labels=np.zeros(rows, int), signals=signals, **more)


def calibrated(recording: ls.Trajectory, max_drop: float = 0.1, **options: Any) -> Call:
    return lambda _: ls.calibrate(recording, max_drop, **{"readout": "margin", **options})


FOREIGN = settling(seed=1, provenance=THEIRS)
RARE = np.where(np.arange(400) == 7, 9, 1)
CALIBRATION: Cases = {
    "on test data": ("test split", calibrated(settling(split="test"))),
    "thresholds from the tested data": ("the data that is tested", calibrated(settling(), grid=settling())),
    "thresholds from test data": ("test split", calibrated(settling(), grid=settling(seed=1, split="test"))),
    "thresholds of another model": ("their weights", calibrated(settling(provenance=OURS), grid=FOREIGN)),
    "too few examples": ("takes 299 tested examples, and there are 80; record 374", calibrated(settling(100), 0.01)),
    "too few examples, on average": ("99 tested", lambda _: ls.conformal_risk_control(settling(100))),
    "texts counted by their tokens": ("sequences, and there are", calibrated(settling(sequences=np.arange(400) // 20))),
    "a difficulty that is hardly tested": ("difficulty 9", calibrated(settling(difficulty=RARE), per_difficulty=True)),
    "difficulties that nobody counted": ("no difficulties", calibrated(settling(), per_difficulty=True)),
    "new inputs that nobody counted": ("which examples training had", calibrated(settling(), unseen=True)),
    "copies that nobody can tell": ("inputs as text", calibrated(settling(), distinct=True)),
    "right answers without labels": ("no labels", calibrated(replace(settling(), labels=None))),
    "an exit that takes the labels": ("oracle needs the labels", calibrated(settling(), readout="oracle")),
    "one loop": ("one loop only", calibrated(made(seed=1, loops=1))),
    "decisions about nobody knows what": ("no 'words' here", lambda _: settling(provenance={"unit": "words"})),
    "a drop in percent": ("max_drop: expected a number < 1", calibrated(settling(), 1.0)),
    "a seed below 0": ("seed: expected a whole number >= 0", calibrated(settling(), seed=-1)),
    "a confidence in percent": ("confidence: expected a number < 1", calibrated(settling(), confidence=95)),
    "a threshold that nobody meets": ("exit early", calibrated(made(seed=1, rows=900, loops=3), readout="settling")),
}


# ---- checkpoints of others


def checkpoint(config: dict[str, object] | None = None, tensors: Callable[[dict[str, Any]], object] = dict) -> Call:
    """A small Ouro whose configuration or tensors somebody changed."""

    def call(at: Path) -> object:
        write_ouro(at)
        values = json.loads((at / "config.json").read_text())
        (at / "config.json").write_text(json.dumps(values | (config or {})))
        weights = load_file(at / "model.safetensors")
        tensors(weights)
        save_file(weights, at / "model.safetensors")
        return ls.load_model(at)

    return call


HEAD = "lm_head.weight"
CHECKPOINTS: Cases = {
    "another activation": ("hidden_act", checkpoint({"hidden_act": "relu"})),
    "a head that is not the embedding": ("is not 'model.embed_tokens", checkpoint({"tie_word_embeddings": True})),
    "a model that is not looped": ("loopscope loop", checkpoint({"model_type": "llama"})),
    "positions of nobody knows what": ("rope_theta", checkpoint({"rope_theta": None})),
    "a tensor that is missing": (HEAD, checkpoint(tensors=lambda each: each.pop(HEAD))),
    "a tensor that nobody reads": ("'more'", checkpoint(tensors=lambda each: each.update(more=each[HEAD]))),
    "a tensor of another shape": (HEAD, checkpoint(tensors=lambda each: each.update({HEAD: each[HEAD][:-1]}))),
    "whole numbers as weights": (HEAD, checkpoint(tensors=lambda each: each.update({HEAD: each[HEAD].astype(int)}))),
    "weights that are not finite": ("not finite", checkpoint(tensors=lambda each: each[HEAD].fill(NAN))),
}


# ---- a policy, and who uses it

ROWS = np.random.default_rng(0).integers(3, 600, (6, 7))
CHOICES = [np.array([5, 6]), np.array([7]), np.array([8, 9, 10])]


@cache
def our_model() -> Any:
    return outspoken()


def of_kind(weights: str | None = None, sequences: object = None, **changes: Any) -> ls.Trajectory:
    """A recording of a kind that `changes` name; the numbers do not matter here."""
    provenance = {"weights_sha256": weights or our_model().weights_sha256, "precision": "float32", **changes}
    given = {"loops": 3, "classes": 4, "split": "validation", "provenance": provenance, "sequences": sequences}
    return made(seed=1, rows=400, **given)


QUESTIONS = {"benchmark": "mine", "metric": "acc", "state": "last context token"}
KINDS: dict[str, Callable[[], ls.Trajectory]] = {
    "answers": of_kind,
    "questions": lambda: of_kind(**QUESTIONS),
    "questions per character": lambda: of_kind(**QUESTIONS | {"metric": "acc_norm"}),
    "questions, mean state": lambda: of_kind(**QUESTIONS | {"state": "mean over the choices' tokens"}),
    "tokens": lambda: of_kind(sequences=np.arange(400)),
    "another model's answers": lambda: of_kind("b" * 64),
    "answers in bfloat16": lambda: of_kind(precision="bfloat16"),
}


@cache
def policy_of(kind: str) -> ls.ExitPolicy:
    return ls.calibrate(KINDS[kind](), 0.5, 0.8, readout="margin")


def run_rows(rule: ls.ExitPolicy, model: Any = None, rows: Any = ROWS, **options: Any) -> list[Any]:
    requests = [ls.Request(key, (row,)) for key, row in enumerate(rows)]
    return list(ls.run(model or our_model(), requests, rule, **options))


def asked(norms: tuple[float, ...] = (), mean: bool | None = None, **options: Any) -> Callable[..., list[Any]]:
    def run(rule: ls.ExitPolicy) -> list[Any]:
        whole = mean or (mean is None and rule.scope.state == "mean_over_choices")
        questions = [ls.choices(key, row, CHOICES, norms, whole=whole, **options) for key, row in enumerate(ROWS)]
        return list(ls.run(our_model(), questions, rule, mean=mean))

    return run


def written(rule: ls.ExitPolicy | None = None, tokens: Any = ROWS[0], forced: Any = None, **options: Any) -> list[Any]:
    return ls.generate(our_model(), [ls.Prompt(0, tokens, forced)], rule, **{"max_new_tokens": 3, **options})


CONSUMERS: dict[str, Callable[[ls.ExitPolicy], Any]] = {
    "rows": run_rows,
    "questions": asked(),
    "questions per character": asked((3.0, 1.0, 7.0), score="per_character"),
    "questions, last token": asked(mean=False),
    "text": lambda rule: written(rule, cache="full"),
    "text, propagate": lambda rule: written(rule, cache="propagate"),
    "replay of answers": lambda rule: rule.exit_loops(KINDS["answers"]()),
    "replay of questions": lambda rule: rule.exit_loops(KINDS["questions"]()),
    "replay of tokens": lambda rule: rule.exit_loops(KINDS["tokens"]()),
}
ANSWERS, ASKED, NEXT = "calibrated on answers", "calibrated on questions", "calibrated on next tokens"
SUM, CHARACTER, MEAN = "calibrated on log-likelihoods of whole", "calibrated on log-likelihoods per", "averaged over"
MODELS, PRECISION = "calibrated for another model", "record the model in that precision (--dtype bfloat16)"
TABLE: dict[str, list[str | None]] = {
    "answers": [None, ANSWERS, ANSWERS, ANSWERS, ANSWERS, ANSWERS, None, ANSWERS, ANSWERS],
    "questions": [ASKED, None, SUM, None, ASKED, ASKED, ASKED, None, ASKED],
    "questions per character": [ASKED, CHARACTER, None, CHARACTER, ASKED, ASKED, ASKED, CHARACTER, ASKED],
    "questions, mean state": [ASKED, None, SUM, MEAN, ASKED, ASKED, ASKED, MEAN, ASKED],
    "tokens": [NEXT, NEXT, NEXT, NEXT, None, "cache 'full'", NEXT, NEXT, None],
    "another model's answers": [MODELS, MODELS, MODELS, MODELS, ANSWERS, ANSWERS, MODELS, ANSWERS, ANSWERS],
    "answers in bfloat16": [PRECISION] * 4 + [ANSWERS, ANSWERS, PRECISION, ANSWERS, ANSWERS],
}
"""A row for a policy by what it was calibrated on, a column for each who uses it; None: it is honoured."""


@pytest.mark.parametrize("kind", TABLE)
def test_every_use_of_a_policy_is_right_or_rejected(kind: str) -> None:
    rule = policy_of(kind)
    for (consumer, use), words in zip(CONSUMERS.items(), TABLE[kind], strict=True):
        if words is None:
            assert len(use(rule)), consumer
        else:
            with pytest.raises(ls.UserError) as error:
                use(rule)
            assert words in str(error.value), consumer


MIXED = [
    ("questions", "questions per character"),
    ("questions", "questions, mean state"),
    ("answers", "answers in bfloat16"),
    ("answers", "questions"),
    ("answers", "tokens"),
]


@pytest.mark.parametrize(("first", "second"), MIXED)
def test_recordings_of_different_kinds_are_not_mixed(first: str, second: str) -> None:
    other = KINDS[second]().take(np.arange(200))
    with pytest.raises(ls.UserError, match="are of different kinds"):
        ls.sweep("margin", KINDS[first](), replace(other, split="test"))
    with pytest.raises(ls.UserError, match="are of different kinds"):
        ls.calibrate(KINDS[first](), 0.5, 0.8, grid=replace(other, split="train"))


def trained_further(_: Path) -> object:
    other = outspoken()
    rule = ls.ExitPolicy("margin", 0.5, scope=Scope(model=other.weights_sha256))
    other.lm_head.weight.mul_(1.5)
    return run_rows(rule, other)


def looped_otherwise(at: Path) -> object:
    """The same weights beside an edited config.json."""
    for file in (GOLDEN / "ouro-tiny").iterdir():
        (at / file.name).write_bytes(file.read_bytes())
    values = json.loads((at / "config.json").read_text())
    (at / "config.json").write_text(json.dumps(values | {"rope_theta": 77.0}))
    rule = ls.ExitPolicy("margin", 0.5, scope=Scope(model=ls.load_model(GOLDEN / "ouro-tiny").weights_sha256))
    return ls.generate(ls.load_model(at), [ls.Prompt(0, np.array([1]))], rule, max_new_tokens=1)


def only_recorded(_: Path) -> object:
    ls.register_readout(ls.Readout("kept", "above"))
    return run_rows(ls.ExitPolicy("kept", 1.0))


def not_finite(_: Path) -> object:
    other = outspoken()
    other.lm_head.weight[7] = NAN
    return run_rows(FIXED, other)


def without_gate(_: Path) -> object:
    other = outspoken()
    other.halt = lambda pooled: None
    return run_rows(ls.ExitPolicy("gate", 0.5), other)


def mixed(request: ls.Request) -> object:
    return list(ls.run(our_model(), [request, ls.choices(1, ROWS[1], CHOICES)], PLAIN))


def foreign_prompt() -> object:
    other = ls.ExitPolicy("margin", 0.5, scope=Scope(model="b" * 64))
    return ls.generate(our_model(), [ls.Prompt(0, ROWS[0]), ls.Prompt(1, ROWS[1], policy=other)])


def in_training(use: Callable[[Any], object]) -> Call:
    return lambda _: use(outspoken().train())


PLAIN = ls.ExitPolicy("margin", 0.5)
FIXED = ls.ExitPolicy("fixed", 1)
RUNNING: Cases = {
    "another depth, replayed": ("calibrated for 4 loops", lambda _: policy().exit_loops(made(loops=6))),
    "another depth, live": (
        "for 3 loops, and here full depth is 2",
        lambda _: run_rows(policy_of("answers"), num_loops=2),
    ),
    "a model trained further": (MODELS, trained_further),
    "the same weights looped otherwise": ("the same weights, computed with by another", looped_otherwise),
    "a depth beyond the recording": ("beyond", lambda _: ls.ExitPolicy("fixed", 5).exit_loops(TEST)),
    "a depth beyond the model": ("beyond the 3 loops here", lambda _: run_rows(ls.ExitPolicy("fixed", 5))),
    "half a loop": ("whole number", lambda _: ls.ExitPolicy("fixed", 1.5)),
    "a threshold that is no number": ("needs a threshold", lambda _: ls.ExitPolicy("margin", NAN)),
    "an exit that takes the labels, live": ("labels", lambda _: run_rows(ls.ExitPolicy("oracle"))),
    "a recorded signal, live": ("replayed but not run", only_recorded),
    "answers that are not finite": ("not finite", not_finite),
    "a gate that the model does not have": ("no gate", without_gate),
    "a gate that the policy does not carry": ("must carry that gate", lambda _: run_rows(ls.ExitPolicy("gate:a", 0.5))),
    "dropout, live": (r"model.eval\(\)", in_training(lambda it: run_rows(FIXED, it))),
    "dropout, in a text": (r"model.eval\(\)", in_training(lambda it: ls.generate(it, [ls.Prompt(0, ROWS[0])]))),
    "dropout, recorded": (r"model.eval\(\)", in_training(lambda it: ls.record_model(it, ROWS))),
    "tokens beyond the vocabulary": ("vocabulary", lambda _: run_rows(FIXED, rows=[np.array([600])])),
    "prompts beyond the vocabulary": ("vocabulary", lambda _: written(tokens=np.array([-1]))),
    "more tokens than positions": ("block size is 1024", lambda _: written(tokens=np.ones(1025, int))),
    "tokens with a fraction": ("whole number", lambda _: written(tokens=np.array([1.5]))),
    "lengths beyond the rows": ("lengths must be between", lambda _: ls.record_model(our_model(), ROWS, [8] * 6)),
    "labels with a fraction": ("labels must be whole", lambda _: ls.record_model(our_model(), ROWS, labels=[0.5] * 6)),
    "characters that nobody counted": ("need the norms", lambda _: asked(score="per_character")(PLAIN)),
    "sums divided by characters": ("'sum' has no norms", lambda _: asked((1.0, 2.0, 1.0), score="sum")(PLAIN)),
    "norms of nobody knows what": ("say it with score=", lambda _: asked((1.0, 2.0, 1.0))(policy_of("questions"))),
    "rows and questions in one batch": ("cannot run together", lambda _: mixed(ls.Request(0, (ROWS[0],)))),
    "a question with one choice, live": ("compares the choices", lambda _: mixed(ls.choices(0, ROWS[0], CHOICES[:1]))),
    "another model's policy for one prompt": (MODELS, lambda _: foreign_prompt()),
    "lossless with fewer keys": ("not 'propagate'", lambda _: written(PLAIN, cache="propagate", lossless=True)),
    "lossless of full depth": ("full depth drafts nothing", lambda _: written(lossless=True)),
    "lossless of given tokens": ("is no draft", lambda _: written(PLAIN, forced=np.array([2, 3]), lossless=True)),
}


# ---- a monitor


def watched(**changes: object) -> Call:
    return lambda _: ls.Monitor(policy()).replay(made(**{"seed": 6, "rows": 300, **changes}))


def monitor_of(change: dict[str, object] | None = None, **other: Any) -> Call:
    """Its file, altered or read with another policy."""

    def call(at: Path) -> object:
        ls.Monitor(policy()).save(at / "monitor.json")
        if change is not None:
            data = json.loads((at / "monitor.json").read_bytes())
            (at / "monitor.json").write_text(json.dumps(data | change))
        return ls.Monitor.load(at / "monitor.json", replace(policy(), **other))

    return call


def average() -> ls.ExitPolicy:
    return ls.conformal_risk_control(settling(), 0.1, readout="margin")


MONITOR: Cases = {
    "a policy without a guarantee": ("nothing to monitor", lambda _: ls.Monitor(PLAIN)),
    "a policy freed from its model": ("nothing to monitor", lambda _: ls.Monitor(policy().for_any_model())),
    "the data of the calibration": ("rests on this data", watched(seed=5, rows=400, **PART)),
    "another model": ("another model", watched(provenance=THEIRS)),
    "texts for single answers": ("single answers", watched(sequences=np.arange(300) // 10)),
    "losses without labels": ("no labels to audit", watched(labels=None)),
    "loops counted from 0": ("between 1 and 4", lambda _: ls.Monitor(policy()).update([0, 1])),
    "averages for single answers": ("whole loop", lambda _: ls.Monitor(policy()).update([1.5])),
    "losses in percent": ("between 0 and 1", lambda _: ls.Monitor(policy()).update([1], [50.0])),
    "losses of other exits": ("Got 1 losses for 2 exits", lambda _: ls.Monitor(policy()).update([1, 2], [0.0])),
    "losses with a mask": ("without a mask", lambda _: ls.Monitor(policy()).update([1], np.ma.array([0.0], mask=[1]))),
    "losses of a guarantee on average": ("on average over", lambda _: ls.Monitor(average()).update([1], [0.0])),
    "a file of another policy": ("another policy", monitor_of(threshold=0.1)),
    "a file that was altered": ("altered", monitor_of({"examples": 7})),
}


STAGES = {
    "arrays": ARRAYS,
    "pairs": PAIRS,
    "signals": SIGNALS,
    "fitted": FITTED,
    "calibration": CALIBRATION,
    "checkpoints": CHECKPOINTS,
    "running": RUNNING,
    "monitor": MONITOR,
}
CASES = {f"{stage}: {what}": case for stage, cases in STAGES.items() for what, case in cases.items()}


@every(CASES)
def test_rejected(words: str, call: Call, forgotten: None, tmp_path: Path) -> None:
    rejected(words, call, tmp_path)


# ---- training

LOSSES = "def last(loops): return loops.cross_entropy[-1]\n"
Train = Callable[..., object]


@pytest.fixture
def custom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Train]:
    """Trains under an objective of this text; `forget`: as a new process would."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # the file changes within one second

    def train(text: str, out: str, *overrides: str, forget: bool = True) -> object:
        (tmp_path / "misleading_losses.py").write_text(text)
        if forget:
            sys.modules.pop("misleading_losses", None)
        return ls.train(tiny_settings("objective=misleading_losses:last", *overrides), tmp_path / out)

    yield train
    sys.modules.pop("misleading_losses", None)


def test_custom_objectives(custom: Train) -> None:
    custom(LOSSES, "run")
    other = LOSSES.replace("[-1]", "[-1] * 2")
    with pytest.raises(ls.UserError, match="other settings .the source text of the objective"):
        custom(other, "run")
    with pytest.raises(ls.UserError, match="changed after Python had imported it"):
        custom(LOSSES, "new", forget=False)
    with pytest.raises(ls.UserError, match="is not the one that these settings name"):
        custom(LOSSES, "new", "objective.source_sha256=abc")
    with pytest.raises(ls.UserError, match=r"does not use loops\.gate_logits"):
        custom(LOSSES, "new", "model.gate=linear")


def test_training(gated_run: Path, tmp_path: Path) -> None:
    with pytest.raises(ls.UserError, match=r"training\.seed"):  # a run that goes on with other settings
        ls.train(tiny_settings(*GATED, "training.seed=7"), gated_run)
    with pytest.raises(ls.UserError, match="no longer finite"):
        ls.train(tiny_settings("training.learning_rate=1e18", "training.clip_norm=1e18"), tmp_path / "run")
    with pytest.raises(ls.UserError, match="need model.gate"):  # to be trained
        ls.train(tiny_settings("objective.name=learned_gate"), tmp_path / "other")


# ---- the command line


def crafted(early_is_right: bool, split: str, **changes: object) -> ls.Trajectory:
    """400 examples whose margins are random: full depth is right, the two loops before it always or never."""
    rng = np.random.default_rng(len(split))
    labels = rng.integers(0, 2, 400)
    early = labels if early_is_right else 1 - labels
    logits = np.zeros((400, 3, 2))
    answers = np.stack((early, early, labels), axis=1)[:, :, None]
    np.put_along_axis(logits, answers, rng.uniform(0.1, 1, (400, 3, 1)), axis=2)
    return ls.Trajectory(**{"logits": logits, "labels": labels, "provenance": OURS, **changes}, split=split)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def place(gated_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with recordings, policies and folders that belong to others."""
    at = tmp_path_factory.mktemp("misleading")
    for split in ("validation", "test"):
        crafted(True, split).save(at / "mine" / split)
        crafted(True, split, provenance=THEIRS).take(np.arange(300)).save(at / "other" / split)
        crafted(True, split, sequences=np.arange(400) // 4).save(at / "texts" / split)
        crafted(True, split, provenance={}).save(at / "nameless" / split)
        random_trajectory(len(split), 300, split=split).save(at / "alien" / split)
        pair(0.0)[split == "test"].save(at / "guesses" / split)
    crafted(True, "validation", examples=["x"] * 400, seen=np.arange(400) < 300).save(at / "copies")
    crafted(True, "validation", provenance={}).take(np.arange(399)).save(at / "bare")
    replace(ls.Trajectory.load(at / "bare"), split=None).save(at / "bare")
    crafted(False, "test").save(at / "worse")
    ls.calibrate(ls.Trajectory.load(at / "mine" / "validation"), 0.05, readout="margin").save(at / "policy.json")
    OTHERS_POLICY.save(at / "foreign.json")
    (at / "lines.txt").write_text("+ 1 2\n")
    (at / "alone").mkdir()
    (at / "alone" / "config.json").write_text("{}")
    (at / "papers").mkdir()
    (at / "papers" / "thesis.txt").write_text("mine")
    for name in ("taken/fixed-geometric", "another/somebody"):
        (at / name).mkdir(parents=True)
        (at / name / "config.json").symlink_to(gated_run / "config.json")
    GATE.save(at / "gate")
    write_ouro(at / "model")
    (at / "model" / "tokenizer.json").write_text("{}")
    text = {"text_sha256": ["c" * 64], "context": 8}
    crafted(True, "validation", sequences=np.arange(400) // 4, provenance=OURS | text).save(at / "told")
    return at


def said(capsys: pytest.CaptureFixture[str], place: Path, run: Path, words: str, out: Path) -> tuple[int, str]:
    """The exit code of a command, in whose words P, RUN and OUT are folders, and all that it prints."""
    names = {"RUN": str(run), "OUT": str(out / "out")}
    code = main([names.get(word, word.replace("P/", f"{place}/")) for word in words.split()])
    captured = capsys.readouterr()
    return code, " ".join(f"{captured.out} {captured.err}".split())


REJECTED_COMMANDS = {
    "calibrate P/mine/test --out OUT": "test split",
    "calibrate P/mine/validation --grid P/mine/test --out OUT": "test split",
    "calibrate P/mine/validation --grid P/mine/validation --out OUT": "the data that is tested",
    "calibrate P/texts/validation --cache propagate --out OUT": "says nothing of the cache 'propagate'",
    "calibrate P/mine/validation --max-drop 2 --out OUT": "not a number between 0 and 1, such as 0.01",
    "sweep P/mine/validation P/other/test": "differ in their weights",
    "sweep P/mine/test P/mine/validation": "test split",
    "check P/mine/validation --policy P/policy.json": "rests on this data",
    "monitor P/mine/validation --policy P/policy.json": "rests on this data",
    "check P/other/test --policy P/policy.json": "calibrated for another model",
    "check P/texts/test --policy P/policy.json": "single answers",
    "sweep P/mine P/other": "give one of them",
    "compare P/mine margin margin": "the same as itself",
    "compare P/mine margin margin --with P/other": "the same examples",
    "diagnose P/mine --reference P/alien": "different numbers of classes",
    "fit P/mine/test --out OUT": "must not be fitted on the test split",
    "insert P/gate RUN --out OUT": "another model",
    "answer RUN P/lines.txt --policy P/foreign.json": "calibrated for another model",
    "answer RUN P/lines.txt --readout gate --threshold 1.5": "never reaches",
    "generate nowhere x --lossless --loops 1 --cache latest": "the cache 'full', not 'latest'",
    "generate nowhere x --top-k 3": "--top-k needs --temperature",
    "study run demo --out P/taken": "has other settings",
    "study run demo --out P/another": "holds another study, with 'somebody'",
    "study run demo --out P/alone": "holds a run, a recording or a gate",
    "record task RUN --split test --out P/mine/test": "another recording",
    "record live P/model P/lines.txt --recording P/told --max-drop 0.5 --out OUT": "of another text",
    "train demo --set training.sede=1 --out OUT": "unknown key",
    "report P/mine --out P/papers": "is not only a report's",
    "report P/mine P/mine --out OUT": "the same name",
}


@pytest.mark.parametrize("words", REJECTED_COMMANDS)
def test_commands(words: str, place: Path, gated_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = said(capsys, place, gated_run, words, tmp_path)
    assert code == 2
    assert REJECTED_COMMANDS[words] in text
    assert not (tmp_path / "out").exists()


NOTED_COMMANDS = {
    "calibrate P/bare --max-drop 0.1 --out OUT": ("does not name its model", "does not say which split it is of"),
    "calibrate P/copies --max-drop 0.5 --confidence 0.5 --out OUT": ("add --distinct", "add --unseen"),
    "calibrate P/guesses/validation --max-drop 0.9 --confidence 0.5 --out OUT": ("full depth is right in",),
    "sweep P/nameless --readout margin": ("say which model",),
    "sweep P/guesses": ("No verdict",),
    "check P/worse --policy P/policy.json": ("Broken: 100.00 %",),
    "monitor P/worse --policy P/policy.json": ("audited answers lose 100.00 %",),
}


@pytest.mark.parametrize("words", NOTED_COMMANDS)
def test_notes(words: str, place: Path, gated_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = said(capsys, place, gated_run, words, tmp_path)
    assert code == ("worse" in words)
    assert all(each in text for each in NOTED_COMMANDS[words])


# ---- inside transformers and vLLM


@pytest.fixture(scope="module")
def hosted(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Loads a small Ouro by transformers."""
    pytest.importorskip("transformers")
    from transformers import AutoModelForCausalLM

    import loopscope.integrations.transformers  # noqa: F401

    folder = write_ouro(tmp_path_factory.mktemp("hosted") / "ouro", max_position_embeddings=64)
    return lambda **changes: AutoModelForCausalLM.from_pretrained(folder, **changes).eval()


def changed(model: Any, **values: object) -> Any:
    for name, value in values.items():
        setattr(model.config, name, value)
    return model


TOKENS = torch.arange(1, 13).view(2, 6)
PADDED = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
OTHERS_POLICY = ls.ExitPolicy("margin", 0.5, scope=Scope(model="b" * 64))
CALLED: dict[str, tuple[str, dict[str, Any]]] = {
    "several texts in one row": ("position_ids", {"position_ids": TOKENS % 3})
}
GENERATED: dict[str, tuple[str, dict[str, Any]]] = {
    "padding after a prompt": ("pad prompts on the left", {"attention_mask": PADDED}),
    "more tokens than positions": ("more than the 64", {"max_new_tokens": 59}),
    "penalties beside a policy": ("RepetitionPenalty", {"policy": PLAIN, "repetition_penalty": 1.2}),
    "a policy of another model": (MODELS, {"policy": OTHERS_POLICY}),
}
CONFIGURED: dict[str, tuple[str, dict[str, Any]]] = {
    "a threshold that nothing asks": ("must be 1", {"early_exit_threshold": 0.5}),
    "a depth that nothing asks": ("changed to 2 loops, and the model has 4", {"total_ut_steps": 2}),
}


@pytest.mark.parametrize("what", [*CALLED, *GENERATED, *CONFIGURED])
def test_transformers(what: str, hosted: Callable[..., Any]) -> None:
    words, given = (CALLED | GENERATED | CONFIGURED)[what]
    network = changed(hosted(), **given) if what in CONFIGURED else hosted()
    with pytest.raises(ls.UserError, match=words):
        if what in GENERATED:
            network.generate(TOKENS, **{"max_new_tokens": 2, **given})
        else:
            network(TOKENS, **({} if what in CONFIGURED else given))


DEPLOYED: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "edited weights": ("the same weights", {"loopscope": {"policy": "P"}, "rope_theta": 77.0}, []),
    "a quantised cache": ("holds them in fp8_e5m2", {"loopscope": {"policy": "P"}}, ["fp8_e5m2"]),
    "Ouro's threshold": ("early_exit_threshold has no effect", {"early_exit_threshold": 0.5}, []),
    "a depth that vLLM passes by": ("belongs under loopscope", {"loops": 1}, []),
}


@pytest.mark.parametrize(("words", "changes", "cache"), DEPLOYED.values(), ids=DEPLOYED)
def test_vllm(words: str, changes: dict[str, Any], cache: list[str], tmp_path: Path) -> None:
    from loopscope.integrations.vllm.deployment import read_deployment

    folder = GOLDEN / "ouro-tiny"
    weights = ls.load_model(folder).weights_sha256
    text = made(seed=5, rows=400, split="validation", sequences=np.arange(400), provenance={"weights_sha256": weights})
    rule = ls.calibrate(text, 0.5, 0.8, readout="margin")
    replace(rule, scope=Scope(unit="tokens", cache="propagate", model=weights)).save(tmp_path / "policy.json")
    if "loopscope" in changes:
        changes = changes | {"loopscope": {"policy": str(tmp_path / "policy.json")}}
    values = json.loads((folder / "config.json").read_text())
    with pytest.raises(ls.UserError, match=words):
        read_deployment({**values, **changes}, str(folder), None, "float32", *cache)
