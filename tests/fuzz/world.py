"""What is spoilt? One good artifact of every kind, made once for all inputs, each when it is first needed."""

import json
import shutil
import sys
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import replace
from functools import cached_property
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from conftest import GATED, GOLDEN, TINY, TINY_OURO, random_trajectory, tiny_settings, tiny_study, tiny_text
from tiny_language import write_decoder, write_ouro
from transformers import AutoModelForCausalLM

import loopscope as ls
import loopscope.integrations.transformers
from loopscope.certify.live_runs import LiveRuns
from loopscope.cli import main
from loopscope.cli.generate import TextJournal
from loopscope.config import plain
from loopscope.learned.attach import load_fitted
from loopscope.progress import ProgressCallback, silent
from loopscope.readouts.readout import Readout, has_threshold, register_readout
from loopscope.recording import question_recording
from loopscope.training.language_run import train_tokenizer
from loopscope.training.task_run import train

HARDLY = (
    *("task.train_examples=60", "task.validation_examples=12", "task.test_examples=15", "training.steps=1"),
    *("training.batch_size=4", "model.width=16", "training.validation_sample=6", "training.log_every=1"),
)
"""Settings that train in no time."""
FURTHER = "context = 8\n[training]\nsteps = 1\nbatch_size = 2\nvalidation_sample = 2\n"
SIZES: dict[str, Any] = {"vocab_size": 290, "hidden_size": 16, "max_position_embeddings": 64, "intermediate_size": 24}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 2}
STUDIED = (*TINY, *HARDLY, "task.validation_examples=40", "task.test_examples=40", "training.steps=2")
SHORT = ("task.train_examples=60", "training.steps=6")
PROMPTS = (
    '{"prompt": "1 and 2"}\n{"prompt": "3 make 4. ", "loops": 1}\n'
    '{"messages": [{"role": "user", "content": "5 and 6"}]}\n'
)
CPU = torch.device("cpu")


class _InterruptedError(Exception):
    """Ends a run in its middle."""


def _interrupted_at(step: int) -> ProgressCallback:
    def stop(done: int, *_: Any) -> None:
        if done == step:
            raise _InterruptedError

    return stop


def own_step(now: Any) -> Any:
    return np.abs(now).max(axis=1)


def setting(*values: str) -> str:
    return " ".join(f"--set {each}" for each in values)


OWN_MODEL = "my_model:LoopedGRU"
"""Of the examples, where Python finds it."""
sys.path.append(str(Path(__file__).parents[2] / "examples"))
_OWN = (*(change for change in TINY if not change.startswith("model.")), *SHORT, f"model={OWN_MODEL}", "model.loops=3")
_RUN = f"train demo --out OUT --force --device cpu {setting(*TINY, *GATED, *SHORT)}"
_LIVE = "record live {w.checkpoint} {w.documents[documents.txt]} --recording {w.live_recording} --out OUT --cache"
_LIVE_TARGET = "--max-drop 0.6 --confidence 0.5 --readout margin --loss disagreement --candidates 2"
_PRETRAIN = "pretrain {w.language_settings} --text {w.texts[0]} --validation {w.texts[1]} --out OUT --force"
TEXTS = (
    "generate {w.checkpoint} --prompts {w.documents[prompts.txt]} --max-new-tokens 2 --temperature 1 --device cpu "
    "--out OUT"
)
COMMANDS = {
    "run": "\n".join((_RUN, *(f"record task OUT --split {split} --hidden" for split in ("validation", "test")))),
    "other_run": f"{_RUN} --set training.seed=7",
    "custom_run": f"train demo --out OUT --force --device cpu {setting(*_OWN, 'model.options.width=8')}",
    "language_run": f"{_PRETRAIN} --set training.steps=2 --device cpu",
    "own_gate": "fit {w.run}/recordings/validation --steps 2 --out OUT",
    "looped": "loop {w.llama} --prelude 1 --core 1 --loops 3 --damping 0.5 --injection --gate linear --out OUT",
    "live_recording": "record text {w.checkpoint} {w.documents[documents.txt]} --out OUT",
    "live_candidates": f"{_LIVE} propagate {_LIVE_TARGET}",
    "live_policy": f"{_LIVE} latest --policy {{w.policies[by-hand]}}",
    "whole_texts": TEXTS,
    "store": "study run {w.study} --store OUT --out OUT-study --workers 1 --device cpu",
    "demo_store": f"demo --store OUT --out OUT-demo --workers 1 {setting(*HARDLY)}",
    "drawn": "report {w.run} --out OUT",  # what draws figures reserves more memory for ever than an input may take
}
"""Artifacts that verbs write, each by its commands."""


def _calibrated_on_texts(checkpoint: Path) -> ls.ExitPolicy:
    """A policy with a guarantee, of texts whose next tokens are what full depth says."""
    model = ls.load_model(checkpoint)
    tokens = torch.randint(1, 49, (300, 6), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        logits = model.loops(tokens, positions=torch.full((300,), 5)).logits.numpy().swapaxes(0, 1)
    provenance = {"weights_sha256": model.weights_sha256, "precision": model.precision, "unit": "tokens"}
    labels, texts = logits[:, -1].argmax(1), np.arange(300)
    recording = ls.Trajectory(logits=logits, labels=labels, sequences=texts, provenance=provenance)
    return ls.calibrate(recording, 0.5, 0.6, loss="disagreement", readout="margin")


class World:
    """A folder of good artifacts; each is made when it is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        torch.set_num_threads(1)

    def __getattr__(self, name: str) -> Path:
        """What a verb writes."""
        if name not in COMMANDS:
            raise AttributeError(name)
        self.__dict__[name] = out = self.folder / name
        for line in COMMANDS[name].splitlines():
            code, said = self.call(line, out)
            assert code == 0, said
        return out

    def call(self, line: str, out: Path) -> tuple[int, str]:
        """The exit code of a command, and what it says."""
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()) as said:
            return main(self.words(line, out)), said.getvalue()

    def words(self, line: str, out: Path) -> list[str]:
        """Of a command, in whose words artifacts stand in braces, and OUT is where it writes."""
        return [word.format(w=self).replace("OUT", str(out)) for word in line.split()]

    def make(self, names: str) -> None:
        for name in names.split():
            getattr(self, name)

    @cached_property
    def unfinished(self) -> tuple[Path, Any]:
        """A run that was interrupted at its fourth step of six, and its settings."""
        folder = self.folder / "unfinished"
        settings = tiny_settings(*GATED, *SHORT, "training.checkpoint_every=2")

        with suppress(_InterruptedError):
            train(settings, folder, CPU, _interrupted_at(5))
        assert not (folder / "model.safetensors").exists()
        return folder, settings

    @cached_property
    def finished_weights(self) -> bytes:
        """The weights with which `unfinished` must end."""
        folder = self.folder / "ran-through"
        train(self.unfinished[1], folder, CPU)
        return (folder / "model.safetensors").read_bytes()

    @cached_property
    def recordings(self) -> dict[str, Path]:
        """A recording of every form: with logits, with signals in their place, of sequences, of a benchmark."""
        made = {
            "plain": random_trajectory(rows=40, split="validation", provenance={"weights_sha256": "a" * 64}),
            "many": random_trajectory(4, rows=120, split="train"),
            "other": random_trajectory(1, rows=40, split="validation", provenance={"weights_sha256": "a" * 64}),
            "test": random_trajectory(2, rows=40, split="test", examples=[f"{row}" for row in range(40)]),
            "seen": random_trajectory(3, rows=40, split="validation", seen=np.arange(40) % 3 == 0),
        }
        whole = made["plain"]
        made["signals"] = ls.Trajectory(
            predictions=whole.predicted,
            label_log_probs=-whole.cross_entropy,
            labels=whole.labels,
            sequences=np.arange(40) // 4,
            signals={name: ls.signal(name, whole) for name in ("margin", "kl", "hidden_change")},
            split="validation",
        )
        return self._saved("recordings", made)

    @cached_property
    def gates(self) -> dict[str, Path]:
        rng = np.random.default_rng(0)
        vector, matrix = rng.normal(size=6), rng.normal(size=(3, 6))
        provenance = {"split": "train", "weights_sha256": "a" * 64, "settings": {"steps": 3}}
        made = {
            "linear": ls.FittedGate(vector, np.array(0.5), provenance=provenance),
            "other": ls.FittedGate(-vector, np.array(0.25), provenance=provenance),
            "mlp": ls.FittedGate(vector[:3], np.array(0.5), matrix, vector[3:], provenance),
        }
        learned = random_trajectory(6, rows=300, split="train", provenance={"weights_sha256": "a" * 64})
        stoppers = {kind: ls.fit_stopper(learned, kind=kind, trees=32) for kind in ("induction", "classifier")}
        return self._saved("gates", made | stoppers)

    @cached_property
    def live_runs(self) -> dict[str, Path]:
        """A text that was recorded, run live with candidates, and with a policy; and one that was run with a gate."""
        ran, gate = LiveRuns.load(self.live_candidates), load_fitted(self.gates["linear"])
        rule = ls.ExitPolicy("gate:linear", float(ran.thresholds[0]), gate)
        made = self._saved("live-runs", {"gate": replace(ran, rule=rule)})
        return made | {"recording": self.live_recording, "propagate": self.live_candidates, "policy": self.live_policy}

    @cached_property
    def policies(self) -> dict[str, Path]:
        """One of every readout, with a guarantee where it can have one."""
        folder = self.folder / "policies"
        folder.mkdir()
        register_readout(Readout("fuzzed", "above", "logits", own_step))
        big = random_trajectory(5, rows=300, split="validation", provenance={"weights_sha256": "a" * 64})
        gates = {name: load_fitted(path) for name, path in self.gates.items()}
        own = filter(has_threshold, ls.READOUTS)
        for name in (*own, "gate:linear", "gate:mlp", "stopper:induction", "stopper:classifier"):
            found = ls.calibrate(big, 0.5, 0.6, readout=name, gates=gates)
            found.save(folder / f"{name.replace(':', '-')}.json")
        ls.conformal_risk_control(big, 0.5, readout="margin").save(folder / "average.json")
        ls.ExitPolicy("margin", 0.5).save(folder / "by-hand.json")
        ls.ExitPolicy("fixed", 2).save(folder / "fixed.json")
        ls.ExitPolicy("oracle").save(folder / "oracle.json")
        ls.ExitPolicy("gate:linear", 0.5, gates["linear"]).save(folder / "gate-by-hand.json")
        return {path.name.removesuffix(".json"): path for path in sorted(folder.glob("*.json"))}

    @cached_property
    def monitor(self) -> Path:
        """A monitor that has seen some exits and losses."""
        watching = ls.Monitor(ls.ExitPolicy.load(self.policies["margin"]))
        watching.update([1, 2, 3, 1, 2], [0.0, 1.0, 0.0, 0.0, 1.0])
        watching.save(self.folder / "monitor.json")
        return self.folder / "monitor.json"

    @cached_property
    def texts(self) -> tuple[Path, Path]:
        folder = self.folder / "texts"
        folder.mkdir()
        return tiny_text(folder)

    @cached_property
    def documents(self) -> dict[str, Path]:
        (self.folder / "documents").mkdir()
        written = [f"{a} and {a + 1} make {2 * a + 1}. " for a in range(6)]
        texts = {
            "documents.txt": "<|endoftext|>".join(written),
            "documents.jsonl": "".join(json.dumps({"text": text}) + "\n" for text in written),
            "prompts.jsonl": PROMPTS,
            "prompts.txt": "1 and 2\n3 make\n",
            "examples.txt": "+ 1 * 0 1\n* 2 2\n- 0 1\n",
        }
        return {name: self._written(f"documents/{name}", text) for name, text in texts.items()}

    @cached_property
    def unfinished_texts(self) -> Path:
        """What is kept of it where it was interrupted after the first text."""
        out = self.folder / "texts.jsonl"

        def interrupted(journal: TextJournal, number: int, line: dict[str, Any]) -> None:
            add(journal, number, line)
            raise KeyboardInterrupt

        add = TextJournal.add
        with patch.object(TextJournal, "add", interrupted):
            assert self.call(TEXTS, out)[0] == 130
        return out.with_name(f"{out.name}.unfinished")

    @cached_property
    def checkpoint(self) -> Path:
        """A small Ouro as somebody else made it, in two shards, with a tokenizer and a chat template."""
        folder = self.folder / "checkpoint"
        folder.mkdir()
        documents = [f"{a} and {b} make {a + b}. " for a in range(10) for b in range(10)]
        train_tokenizer(documents, 290, 64, folder)
        write_ouro(folder, shard_bytes=20_000, **SIZES, total_ut_steps=3)
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0], "max_new_tokens": 5}))
        assert len(list(folder.glob("*.safetensors"))) > 1
        return folder

    @cached_property
    def saved_models(self) -> dict[str, Path]:
        """The checkpoint as transformers saves it with an exit policy: by hand, with a gate, and with a guarantee."""
        weights = ls.load_model(self.checkpoint).weights_sha256
        gate = ls.FittedGate(np.zeros(16), np.array(0.5), provenance={"weights_sha256": weights, "split": "train"})
        policies = {
            "by-hand": ls.ExitPolicy("margin", 0.5),
            "gate": ls.ExitPolicy("gate:own", 0.5, gate),
            "guaranteed": _calibrated_on_texts(self.checkpoint),
        }
        for name, policy in policies.items():
            model = AutoModelForCausalLM.from_pretrained(self.checkpoint)
            model.exit_policy = policy
            model.save_pretrained(self.folder / "saved-models" / name)
        for folder in (self.folder / "saved-models").iterdir():
            for file in self.checkpoint.glob("tokenizer*"):
                shutil.copyfile(file, folder / file.name)
        return {name: self.folder / "saved-models" / name for name in policies}

    @cached_property
    def llama(self) -> Path:
        """A small Llama that is not looped, with a tokenizer."""
        shutil.copytree(self.checkpoint, self.folder / "llama", ignore=shutil.ignore_patterns("model*"))
        write_decoder(self.folder / "llama", **SIZES, num_hidden_layers=3)
        return self.folder / "llama"

    @cached_property
    def golden(self) -> dict[str, Path]:
        """Checkpoints in the layouts of Ouro and Huginn."""
        names = ("ouro-tiny", "huginn-tiny")
        for name in names:
            shutil.copytree(GOLDEN / name, self.folder / name, ignore=shutil.ignore_patterns("expected*"))
        return {name: self.folder / name for name in names}

    @cached_property
    def settings(self) -> Path:
        """Every key of a run's settings, with its value."""
        tables = plain(tiny_settings(*GATED, *HARDLY))
        lines = {name: [f"{key} = {json.dumps(value)}" for key, value in tables[name].items()] for name in tables}
        return self._written("settings.toml", "\n".join("\n".join((f"[{name}]", *lines[name])) for name in lines))

    language_settings = cached_property(lambda self: self._written("language.toml", TINY_OURO))
    further_settings = cached_property(lambda self: self._written("further.toml", FURTHER))
    study = cached_property(lambda self: self._written("study.toml", tiny_study("headline", *STUDIED)))

    @cached_property
    def benchmarks(self) -> Path:
        """Some questions of a benchmark; the library that reads them takes seconds to be imported."""
        import lm_eval.tasks  # noqa: F401

        data = Path(__file__).parents[1] / "data" / "benchmarks"
        for file in (data / "openbookqa").iterdir():
            place = self.folder / "benchmarks" / "openbookqa" / file.name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:4]))
        return self.folder / "benchmarks"

    @cached_property
    def unfinished_recording(self) -> Path:
        """A recording of a benchmark that was interrupted at its second question of three; beside it a finished one."""
        folder = self.folder / "unfinished-recording"
        with (
            patch.object(question_recording, "_KEEP_EVERY_SECONDS", -1.0),
            suppress(_InterruptedError),
        ):  # what is done is kept at once
            for name, progress in (("finished", silent), ("new", _interrupted_at(3))):
                self.record(folder / name, progress)
        assert list((folder / "new.unfinished").glob("*.safetensors"))
        return folder

    def record(self, out: Path, progress: ProgressCallback = silent) -> ls.Trajectory:
        """The recording that `unfinished_recording` is of; batches of one question each."""
        what = {"data": self.benchmarks, "limit": 3, "batch_tokens": 1, "progress": progress}
        return ls.record_benchmark(self.checkpoint, "openbookqa", "test", out, **what)

    def _saved(self, folder: str, made: Mapping[str, Any]) -> dict[str, Path]:
        for name, each in made.items():
            each.save(self.folder / folder / name)
        return {name: self.folder / folder / name for name in made}

    def _written(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.write_text(text)
        return path
