"""Which verbs write, on what, and what is compared? One `Scene` each, on models that take a second to train.

A new verb that writes joins `SCENES`; `test_kills.py` fails until it does. Everything that a verb leaves below its
working directory is compared byte for byte with what it left undisturbed. Only a PDF bears a time: of that, whether it
is whole.
"""

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from benchmark_slices import DATA, byte_pairs
from conftest import GATED, TINY, TINY_OURO, random_trajectory, tiny_text
from tiny_language import write_decoder, write_ouro

import loopscope as ls
from loopscope.cli import main
from loopscope.errors import UserError
from loopscope.exits.live_runs import LiveRuns
from loopscope.models import load_model
from loopscope.recording import benchmarks

from .processes import Work, run

benchmarks._EVERY = 0.0  # what is done is kept after every batch: a slice of a benchmark takes less than ten seconds

FURTHER = """\
context = 16
[training]
steps = 20
batch_size = 4
validation_sample = 4
"""


class Inputs:
    """What the verbs read, each made when it is first needed, in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _made(self, name: str, make: Callable[[Path], object]) -> Path:
        path = self._folder / name
        if not path.exists():
            self._folder.mkdir(parents=True, exist_ok=True)
            ended = run(lambda: _done(make(path)), self._folder, self._folder / f"{name}.log")
            assert ended.code == 0, f"{name} cannot be made: {ended}\n{ended.stderr}"
        return path

    @property
    def run(self) -> Path:
        """A finished run with a gate, recorded."""

        def make(folder: Path) -> None:
            _loopscope("train", "demo", "--out", folder, "--force", *_settings(*GATED))
            for split, more in (("train", ["--hidden"]), ("validation", ["--hidden"]), ("test", ["--hidden"])):
                _loopscope("record", "task", folder, "--split", split, *more)

        return self._made("run", make)

    @property
    def gate(self) -> Path:
        """A gate that was fitted to it."""
        recording = self.run / "recordings" / "train"
        return self._made("gate", lambda out: _loopscope("gate", "fit", recording, "--steps", 20, "--out", out))

    @property
    def examples(self) -> Path:
        return self._made("examples.txt", lambda out: out.write_text("+ 1 2\n* 2 + 0 1\n1\n- 2 2\n" * 50))

    @property
    def checkpoint(self) -> Path:
        """A small Ouro with a tokenizer."""
        return self._made("ouro", lambda out: write_ouro(out, byte_pairs()))

    @property
    def decoder(self) -> Path:
        """A small Llama with a tokenizer, not looped."""
        return self._made("llama", lambda out: write_decoder(out, tokenizer=byte_pairs()))

    @property
    def texts(self) -> Path:
        """`train.txt`, `validation.txt`, and the settings of a small Ouro and of its further training."""

        def make(folder: Path) -> None:
            folder.mkdir()
            tiny_text(folder)
            (folder / "ouro.toml").write_text(TINY_OURO)
            (folder / "further.toml").write_text(FURTHER)

        return self._made("texts", make)

    @property
    def recorded(self) -> Path:
        """Some of the texts at full depth."""
        words = ("record", "text", self.checkpoint, self.texts / "validation.txt", "--limit", 600, *_ONE)
        return self._made("recorded", lambda out: _loopscope(*words, "--out", out))

    @property
    def language(self) -> Path:
        """A small Ouro that was trained on them."""
        words = ("--text", self.texts / "train.txt", "--validation", self.texts / "validation.txt", "--force", *_ONE)
        return self._made(
            "language", lambda out: _loopscope("pretrain", self.texts / "ouro.toml", *words, "--out", out)
        )

    @property
    def prompts(self) -> Path:
        words = ("The sun", "A student wants to", "Water", "What is", "Birds", "An apple")
        lines = "\n".join(f"{first} {second}" for first in words for second in words[:3])
        return self._made("prompts.txt", lambda out: out.write_text(lines))

    @property
    def study(self) -> Path:
        return self._made("tiny.toml", lambda out: out.write_text(_STUDY))

    @property
    def store(self) -> Path:
        """What the study makes."""
        words = ("study", "run", self.study, "--workers", 1, "--out", self._folder / "studied")
        return self._made("store", lambda out: _loopscope(*words, "--store", out))


Command = Callable[[Inputs, str], list[object]]
"""The words of a command whose target is the second argument, relative to the working directory."""


@dataclass(frozen=True)
class Scene:
    """A verb that writes, on its inputs."""

    name: str
    command: Command | None = None
    target: str = "out"
    act: Callable[[Inputs, str], Work] | None = None
    """In place of a command: what is called from Python."""
    before: Callable[[Inputs, str], Work] | None = None
    """Makes what the target holds before."""
    read: Callable[[Path], object] | None = None
    """Reads the target as whoever needs it next, or raises a `UserError`."""
    growing: dict[str, str] = field(default_factory=dict)
    """Files that an unfinished run may hold: any state of theirs, or the `beginning` of what they become."""
    outliving: str = ""
    """Files of which those of one older artifact may stay, for its readers, until the next call: two at most."""
    refuses: bool = False
    """Whether a target that is finished is refused, not used again."""
    by_hand: bool = False
    """Whether what a killed one left is of use, and is to be removed by hand."""
    neighbours: bool = False
    """Whether a target whose name begins alike is tried beside it."""
    share: float = 1.0
    """Of the kills that the others get: some take long."""
    requires: str = "loopscope"

    def work(self, inputs: Inputs, target: str | None = None) -> Work:
        target = target or self.target
        if self.act is not None:
            return self.act(inputs, target)
        assert self.command is not None
        words = [str(word) for word in self.command(inputs, target)]
        return lambda: main(words)

    @property
    def available(self) -> bool:
        return find_spec(self.requires) is not None


def _loopscope(*words: object) -> None:
    assert main([str(word) for word in words]) == 0, words


def _done(_: object) -> int:
    return 0


def _settings(*overrides: str) -> list[str]:
    every = (*TINY, "training.checkpoint_every=2", "training.log_every=1", *overrides)
    return [word for override in every for word in ("--set", override)]


_ONE = ("--device", "cpu", "--threads", 1)


def _saving(make: Callable[[int], Any], *seeds: int) -> Callable[[Inputs, str], Work]:
    """What is made of each seed, saved from Python; what that raises is said as the command line would."""

    def act(_: Inputs, target: str) -> Work:
        def work() -> int:
            try:
                for seed in seeds:
                    make(seed).save(target)
            except (OSError, UserError) as error:
                print(f"loopscope: {str(error).rstrip('.')}.", file=sys.stderr)
                return 2
            return 0

        return work

    return act


def _trajectory(seed: int) -> ls.Trajectory:
    return random_trajectory(seed, rows=300)


def _gate(seed: int) -> ls.FittedGate:
    return ls.FittedGate(np.full(6, 1.0 + seed), np.array(0.5), provenance={"weights_sha256": "a" * 64})


def _gated(seed: int) -> ls.ExitPolicy:
    return ls.ExitPolicy("gate:own", 0.5, _gate(seed))


def _promised() -> ls.ExitPolicy:
    return ls.calibrate(random_trajectory(5, rows=300, split="validation"), 0.5, 0.6, readout="margin")


def _monitor(seed: int) -> ls.Monitor:
    watching = ls.Monitor(_promised(), seed=seed)
    watching.update([1, 2, 1])
    return watching


def _over_another(name: str, make: Callable[[int], Any], read: Callable[[Path], object], **rest: Any) -> "Scene":
    return Scene(name, act=_saving(make, 1), before=_saving(make, 0), read=read, **rest)


def _read_at_any_time(path: Path) -> None:
    """A policy that is replaced by a rename: there always is one, and it has its gate."""
    try:
        ls.ExitPolicy.load(path)
    except UserError as error:
        raise AssertionError("there is no whole policy") from error


def _unfinished(files: str = "*") -> dict[str, str]:
    """What a run holds until it is finished."""
    return {f"{files}metrics.jsonl": "beginning", f"{files}state.safetensors": "any"}


def _read_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _cut_off(inputs: Inputs, target: str) -> Work:
    """The same recording, damaged since."""
    recording = _recording(inputs, "test")

    def work() -> int:
        shutil.copytree(recording, target)
        (Path(target) / "examples.json").write_text("[")
        return 0

    return work


_STUDY = """
title = "Tiny"
targets = [0.2]
products = ["frontiers"]

[[parts]]
settings = "demo"
set = [SETTINGS]
reference = { gate = "none", prior = 0.3 }
gates = { examples = 200, steps = 20, kind = ["linear"], objective = ["ponder"] }
guarantees = [{ readout = "margin", max_drop = 0.3, confidence = 0.8 }]

[[parts.runs]]
prior = [0.3]
fit = true

[[parts.runs]]
gate = ["linear"]
prior = [0.3]
""".replace("SETTINGS", ", ".join(f'"{each}"' for each in TINY))


def _study(workers: int) -> Command:
    return lambda inputs, out: ["study", "run", inputs.study, "--out", out, "--store", "store", "--workers", workers]


def _recording(inputs: Inputs, split: str) -> Path:
    return inputs.run / "recordings" / split


def _promise(inputs: Inputs, out: str) -> list[object]:
    words = ("--max-drop", 0.1, "--confidence", 0.8, "--grid", _recording(inputs, "train"), "--out", out)
    return ["calibrate", _recording(inputs, "validation"), *words]


SCENES = (
    Scene(
        "train",
        lambda inputs, out: ["train", "demo", "--out", out, "--force", *_ONE, *_settings()],
        read=load_model,
        growing=_unfinished(),
        neighbours=True,
    ),
    Scene(
        "pretrain further",
        lambda inputs, out: [
            *("pretrain", inputs.texts / "further.toml", "--start", inputs.language, "--out", out, "--force", *_ONE),
            *("--text", inputs.texts / "train.txt", "--validation", inputs.texts / "validation.txt"),
            *("--set", "training.checkpoint_every=2"),
        ],
        read=load_model,
        growing=_unfinished(),
        neighbours=True,
    ),
    Scene(
        "pretrain",
        lambda inputs, out: [
            *("pretrain", inputs.texts / "ouro.toml", "--text", inputs.texts / "train.txt"),
            *("--validation", inputs.texts / "validation.txt", "--out", out, "--force", *_ONE),
            *("--set", "training.checkpoint_every=2"),
        ],
        read=load_model,
        growing=_unfinished(),
        neighbours=True,
    ),
    Scene(
        "loop",
        lambda inputs, out: [
            *("loop", inputs.decoder, "--prelude", 1, "--core", 1, "--loops", 3, "--gate", "linear", "--out", out)
        ],
        read=load_model,
        refuses=True,
        neighbours=True,
    ),
    Scene(
        "record task",
        lambda inputs, out: ["record", "task", inputs.run, "--split", "test", "--hidden", "--out", out, *_ONE],
        read=ls.Trajectory.load,
        neighbours=True,
    ),
    Scene(
        "record task over one that was cut off",
        lambda inputs, out: ["record", "task", inputs.run, "--split", "test", "--hidden", "--out", out, *_ONE],
        before=_cut_off,
        read=ls.Trajectory.load,
    ),
    Scene(
        "record text",
        lambda inputs, out: [
            *("record", "text", inputs.checkpoint, inputs.texts / "validation.txt", "--limit", 1500),
            *("--hidden", "--out", out, *_ONE),
        ],
        read=ls.Trajectory.load,
        neighbours=True,
    ),
    Scene(
        "record live",
        lambda inputs, out: [
            *("record", "live", inputs.checkpoint, inputs.texts / "validation.txt", "--recording", inputs.recorded),
            *("--max-drop", 0.6, "--confidence", 0.5, "--readout", "margin", "--candidates", 2),
            *("--batch-size", 2, "--out", out, *_ONE),
        ],
        read=LiveRuns.load,
        neighbours=True,
    ),
    Scene(
        "record benchmark",
        lambda inputs, out: [
            *("record", "benchmark", inputs.checkpoint, "openbookqa", "--data", DATA, "--limit", 16, "--hidden"),
            *("--batch-tokens", 512, "--out", out, *_ONE),
        ],
        read=ls.Trajectory.load,
        neighbours=True,
        requires="lm_eval",
    ),
    _over_another("Trajectory.save over another", _trajectory, ls.Trajectory.load, neighbours=True),
    _over_another("FittedGate.save over another", _gate, ls.FittedGate.load, neighbours=True),
    Scene(
        "ExitPolicy.save over others",
        act=_saving(_gated, 1, 2),
        target="policy.json",
        before=_saving(_gated, 0),
        read=_read_at_any_time,
        growing={"policy.json": "any", "policy.gate-*.safetensors": "any"},
        outliving="policy.gate-*.safetensors",
    ),
    _over_another(
        "Monitor.save over another", _monitor, lambda path: ls.Monitor.load(path, _promised()), target="monitor.json"
    ),
    Scene(
        "calibrate",
        lambda inputs, out: [*_promise(inputs, out), "--readout", "margin"],
        "policy.json",
        read=ls.ExitPolicy.load,
        refuses=True,
    ),
    Scene(
        "calibrate a gate",
        lambda inputs, out: [*_promise(inputs, out), "--readout", "gate:gate", "--gate", inputs.gate],
        "policy.json",
        read=ls.ExitPolicy.load,
        refuses=True,
    ),
    Scene(
        "gate fit, a stopper",
        lambda inputs, out: ["gate", "fit", _recording(inputs, "train"), "--kind", "induction", "--out", out],
        read=ls.Stopper.load,
        refuses=True,
        neighbours=True,
    ),
    Scene(
        "gate fit",
        lambda inputs, out: ["gate", "fit", _recording(inputs, "train"), "--steps", 20, "--out", out],
        read=ls.FittedGate.load,
        refuses=True,
        neighbours=True,
    ),
    Scene(
        "gate write",
        lambda inputs, out: ["gate", "write", inputs.gate, inputs.run, "--out", out],
        read=load_model,
        refuses=True,
        neighbours=True,
    ),
    Scene("report", lambda inputs, out: ["report", inputs.run, "--out", out], share=0.6),
    Scene(
        "report --product",
        lambda inputs, out: ["report", inputs.run, "--product", "frontiers", "--out", out],
        share=0.4,
    ),
    Scene(
        "run",
        lambda inputs, out: ["run", inputs.run, inputs.examples, "--out", out, *_ONE],
        "answers.jsonl",
        read=_read_lines,
        refuses=True,
    ),
    Scene(
        "generate",
        lambda inputs, out: [
            *("generate", inputs.checkpoint, "--prompts", inputs.prompts, "--max-new-tokens", 8, "--batch-size", 2),
            *("--temperature", 0.8, "--loops", 1, "--lossless", "--out", out, *_ONE),
        ],
        "texts.jsonl",
        read=_read_lines,
        refuses=True,
    ),
    Scene(
        "bench guarantees",
        lambda inputs, out: ["bench", "guarantees", "--calibrations", 2, "--examples", 50, "--figure", f"{out}.png"],
        share=0.4,
    ),
    Scene("study run on one worker", _study(1), growing=_unfinished(), share=0.2),
    Scene("study run on two workers", _study(2), growing=_unfinished(), share=0.4),
    Scene(
        "study report",
        lambda inputs, out: ["study", "report", inputs.study, "--out", out, "--store", inputs.store],
        share=0.3,
    ),
    Scene(
        "demo",
        lambda inputs, out: ["demo", "--out", out, "--workers", 2, *_settings()],
        growing=_unfinished(),
        share=0.1,
    ),
)
