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
from conftest import GATED, TINY, TINY_OURO, random_trajectory, tiny_study, tiny_text
from safetensors import SafetensorError
from tiny_language import write_decoder, write_ouro

import loopscope as ls
from loopscope.certify.live_runs import LiveRuns
from loopscope.cli import main
from loopscope.errors import UserError
from loopscope.models.checkpoint import load_model
from loopscope.models.checkpoint_folder import named_exits
from loopscope.models.custom_model import register_model
from loopscope.recording import question_recording

from .processes import Work, run

question_recording._KEEP_EVERY_SECONDS = 0.0  # after every batch: a slice of a benchmark takes less than ten seconds
FURTHER = "context = 16\n[training]\nsteps = 20\nbatch_size = 4\nvalidation_sample = 4\n"


class Inputs:
    """What the verbs read, each made when it is first needed, in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __getitem__(self, name: str) -> Path:
        path = self._folder / name
        if not path.exists():
            self._folder.mkdir(parents=True, exist_ok=True)
            commands = [self.words(line, str(path)) for line in _WORDS.get(name, "").splitlines()]
            make = (lambda: max(map(main, commands))) if commands else (lambda: _done(_MADE[name](path)))
            ended = run(make, self._folder, self._folder / f"{name}.log")
            assert ended.code == 0, f"{name} cannot be made: {ended}\n{ended.stderr}"
        return path

    def words(self, line: str, out: str) -> list[str]:
        """The words of a command; [NAME] is an input, [NAME/PLACE] lies in it, OUT is the target."""
        found = []
        for word in line.format(one=_ONE, settings=_SETTINGS, gated=_GATED, own=_OWN).split():
            if word.startswith("["):
                name, _, place = word.strip("[]").partition("/")
                found.append(str(self[name] / place))
            else:
                found.append(word.replace("OUT", out))
        return found


def _done(_: object) -> int:
    return 0


def _write_texts(folder: Path) -> None:
    folder.mkdir()
    tiny_text(folder)
    (folder / "ouro.toml").write_text(TINY_OURO)
    (folder / "further.toml").write_text(FURTHER)


_ONE = "--device cpu --threads 1"
_SETTINGS = " ".join(f"--set {each}" for each in (*TINY, "training.checkpoint_every=2", "training.log_every=1"))
_GATED = " ".join(f"--set {each}" for each in GATED)
_OWN_MODEL = "my_model:LoopedGRU"
sys.path.append(str(Path(__file__).parents[2] / "examples"))
_OWN_CHANGES = (*(each for each in TINY if not each.startswith("model.")), f"model={_OWN_MODEL}", "model.loops=3")
_OWN = " ".join(f"--set {each}" for each in (*_OWN_CHANGES, "training.checkpoint_every=2", "training.log_every=1"))
_TEXTS = "--text [texts/train.txt] --validation [texts/validation.txt]"
_PROMPTS = ("The sun", "A student wants to", "Water", "What is", "Birds", "An apple")
_MADE: dict[str, Callable[[Path], object]] = {
    "examples.txt": lambda out: out.write_text("+ 1 2\n* 2 + 0 1\n1\n- 2 2\n" * 50),
    "ouro": lambda out: write_ouro(out, byte_pairs()),
    "llama": lambda out: write_decoder(out, tokenizer=byte_pairs()),
    "texts": _write_texts,
    "prompts.txt": lambda out: out.write_text("\n".join(f"{a} {b}" for a in _PROMPTS for b in _PROMPTS[:3])),
    "tiny.toml": lambda out: out.write_text(tiny_study("frontiers", *TINY)),
}
_WORDS = {
    "run": "train demo --out OUT --force {settings} {gated}"
    + "".join(f"\nrecord task OUT --split {split} --hidden" for split in ("train", "validation", "test")),
    "other": "train demo --out OUT --force {settings} --set training.seed=7"
    + "".join(f"\nrecord task OUT --split {split}" for split in ("validation", "test")),
    "gate": "fit [run/recordings/train] --steps 20 --out OUT",
    "recorded": "record text [ouro] [texts/validation.txt] --limit 600 {one} --out OUT",
    "language": f"pretrain [texts/ouro.toml] {_TEXTS} --force {{one}} --out OUT",
    "store": "study run [tiny.toml] --workers 1 --out studied --store OUT",
}


@dataclass(frozen=True)
class Scene:
    """A verb that writes, on its inputs."""

    name: str
    command: str = ""
    """Its words, as `Inputs.words` reads them; the target is relative to the working directory."""
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
    neighbours: bool = False
    """Whether a target whose name begins alike is tried beside it."""
    share: float = 1.0
    """Of the kills that the others get: some take long."""
    requires: str = "loopscope"

    def work(self, inputs: Inputs, target: str = "") -> Work:
        if self.act is not None:
            return self.act(inputs, target or self.target)
        words = inputs.words(self.command, target or self.target)
        return lambda: main(words)

    @property
    def available(self) -> bool:
        return find_spec(self.requires) is not None


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


def _gate(seed: int) -> ls.FittedGate:
    return ls.FittedGate(np.full(6, 1.0 + seed), np.array(0.5), provenance={"weights_sha256": "a" * 64})


def _policy(seed: int) -> ls.ExitPolicy:
    return ls.ExitPolicy("gate:own", 0.5, _gate(seed))


def _guaranteed() -> ls.ExitPolicy:
    return ls.calibrate(random_trajectory(5, rows=300, split="validation"), 0.5, 0.6, readout="margin")


def _monitor(seed: int) -> ls.Monitor:
    watching = ls.Monitor(_guaranteed(), seed=seed)
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


def _read_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _load(folder: Path) -> object:
    register_model(_OWN_MODEL)
    return load_model(folder)


def _cut_off(inputs: Inputs, target: str) -> Work:
    """The same recording, damaged since."""
    recording = inputs["run"] / "recordings" / "test"
    return lambda: _done((Path(shutil.copytree(recording, target)) / "examples.json").write_text("["))


def _saving_a_model(*thresholds: float) -> Callable[[Inputs, str], Work]:
    """A model with an exit policy, saved by transformers."""

    def act(inputs: Inputs, target: str) -> Work:
        source = inputs["ouro"]

        def work() -> int:
            from transformers import AutoModelForCausalLM

            import loopscope.integrations.transformers  # noqa: F401

            for threshold in thresholds:
                model = AutoModelForCausalLM.from_pretrained(source)
                model.exit_policy = ls.ExitPolicy("margin", threshold)
                try:
                    model.save_pretrained(target)
                except (OSError, UserError, SafetensorError) as error:
                    print(f"loopscope: {str(error).rstrip('.')}.", file=sys.stderr)
                    return 2
            return 0

        return work

    return act


def _read_saved_model(folder: Path) -> None:
    load_model(folder)
    policy = named_exits(folder).policy
    if policy is not None:
        ls.ExitPolicy.load(policy)


_OF_TRANSFORMERS = dict.fromkeys(
    ("out/config.json", "out/generation_config.json", "out/model.safetensors", "out/.tmp*"), "any"
)
"""What transformers writes in place, and safetensors beside it, where a signal leaves it behind."""
_UNFINISHED = {"*metrics.jsonl": "beginning", "*state.safetensors": "any"}
"""What a run holds until it is finished."""
_FITTED = "fit [run/recordings/train] --out OUT"
_GUARANTEED = (
    "calibrate [run/recordings/validation] --max-drop 0.1 --confidence 0.8 --grid [run/recordings/train] --out OUT"
)
_RECORDED = "record task [run] --split test --hidden --out OUT {one}"
_READ, _ASKED = "[ouro] [texts/validation.txt]", f"[ouro] openbookqa --data {DATA} --limit 16"
_CANDIDATES = "--max-drop 0.6 --confidence 0.5 --readout margin --candidates 2"
_PRETRAINED = f"{_TEXTS} --out OUT --force {{one}} --set training.checkpoint_every=2"
_STUDIED = "study run [tiny.toml] --out OUT --store store --workers"
SCENES = (
    *(
        Scene(name, words, read=_load, growing=_UNFINISHED, neighbours=True)
        for name, words in {
            "train": "train demo --out OUT --force {one} {settings}",
            "train, a model of one's own": "train demo --out OUT --force {one} {own}",
            "pretrain further": f"pretrain [texts/further.toml] --start [language] {_PRETRAINED}",
            "pretrain": f"pretrain [texts/ouro.toml] {_PRETRAINED}",
        }.items()
    ),
    *(
        Scene(name, words, read=read, refuses=True, neighbours=True)
        for name, words, read in (
            ("loop", "loop [llama] --prelude 1 --core 1 --loops 3 --gate linear --out OUT", load_model),
            ("fit, a stopper", f"{_FITTED} --kind induction", ls.Stopper.load),
            ("fit", f"{_FITTED} --steps 20", ls.FittedGate.load),
            ("insert", "insert [gate] [run] --out OUT", load_model),
        )
    ),
    Scene("record task over one that was cut off", _RECORDED, before=_cut_off, read=ls.Trajectory.load),
    *(
        Scene(name, f"{name} {words} --out OUT {{one}}", read=read, neighbours=True, requires=package)
        for name, words, read, package in (
            ("record task", "[run] --split test --hidden", ls.Trajectory.load, "loopscope"),
            ("record text", f"{_READ} --limit 1500 --hidden", ls.Trajectory.load, "loopscope"),
            ("record live", f"{_READ} --recording [recorded] {_CANDIDATES} --batch-size 2", LiveRuns.load, "loopscope"),
            ("record benchmark", f"{_ASKED} --hidden --batch-tokens 512", ls.Trajectory.load, "lm_eval"),
        )
    ),
    _over_another("Trajectory.save over another", random_trajectory, ls.Trajectory.load, neighbours=True),
    _over_another("FittedGate.save over another", _gate, ls.FittedGate.load, neighbours=True),
    Scene(
        "ExitPolicy.save over others",
        act=_saving(_policy, 1, 2),
        target="policy.json",
        before=_saving(_policy, 0),
        read=_read_at_any_time,
        growing={"policy.json": "any", "policy.gate-*.safetensors": "any"},
        outliving="policy.gate-*.safetensors",
    ),
    _over_another(
        "Monitor.save over another", _monitor, lambda path: ls.Monitor.load(path, _guaranteed()), target="monitor.json"
    ),
    *(
        Scene(name, f"{_GUARANTEED} --readout {readout}", "policy.json", read=ls.ExitPolicy.load, refuses=True)
        for name, readout in {"calibrate": "margin", "calibrate a gate": "gate:gate --fitted [gate]"}.items()
    ),
    Scene(
        "save_pretrained with a policy over another",
        act=_saving_a_model(0.25),
        before=_saving_a_model(0.5),
        read=_read_saved_model,
        growing={**_OF_TRANSFORMERS, "out/README.md": "any"},
    ),
    Scene("report", "report [run] --out OUT", share=0.6),
    Scene("report --transfer", "report [run] [other] --transfer --product headline --out OUT", share=0.4),
    Scene("report --product", "report [run] --product frontiers --out OUT", share=0.4),
    Scene("answer", "answer [run] [examples.txt] --out OUT {one}", "answers.jsonl", read=_read_lines, refuses=True),
    Scene(
        "generate",
        "generate [ouro] --prompts [prompts.txt] --max-new-tokens 8 --batch-size 2 --temperature 0.8 --loops 1 "
        "--lossless --out OUT {one}",
        "texts.jsonl",
        read=_read_lines,
        refuses=True,
    ),
    Scene("study run on one worker", f"{_STUDIED} 1", growing=_UNFINISHED, share=0.2),
    Scene("study run on two workers", f"{_STUDIED} 2", growing=_UNFINISHED, share=0.4),
    Scene("study report", "study report [tiny.toml] --out OUT --store [store]", share=0.3),
    Scene("demo", "demo --out OUT --workers 2 {settings}", growing=_UNFINISHED, share=0.1),
)
