"""Models of the user's own: do they train, resume and load like ours, and is nothing imported that nobody asked for?"""

import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from conftest import TINY, tiny_settings
from killed_run import train_words
from safetensors.torch import load_file
from test_run_folder import contents, interrupt

import loopscope as ls
from loopscope.cli import main
from loopscope.engine.requests import task_requests
from loopscope.models.custom_model import MODELS, looped_parameters, register_model, tied_tensors
from loopscope.recording.task_recording import record_task
from loopscope.studies.study_file import expand_study
from loopscope.training.gate_fitting import write_gate
from loopscope.training.run_folder import check_run_place, read_run_settings
from loopscope.training.task_run import TaskRun, initial_model, train

ROOT = Path(__file__).parents[2]
SIMPLE = (
    (ROOT / "examples" / "my_model.py").read_text()
    + '''

from dataclasses import replace

import torch


class Noisy(LoopedGRU):
    """Draws in training; its head is its embedding, and the table of positions is in no file."""

    def __init__(self, **sizes):
        super().__init__(**sizes)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.full((1,), 0.5), persistent=False)

    def block(self, hidden, mask):
        return F.dropout(super().block(hidden, mask), 0.2, self.training) * self.scale * 2


class Wrong(LoopedGRU):
    def __init__(self, how="", **sizes):
        super().__init__(**sizes)
        self.how = how
        if how == "fails":
            raise KeyError("how")
        if how == "depth":
            self.num_loops = 7
        if how == "classes":
            self.head = nn.Linear(64, 2)
        if how == "counts":
            self.register_buffer("count", torch.zeros(1, dtype=torch.long))
        if how == "unasked":
            self.gate = nn.Linear(64, 1)
        if how == "shared":
            self.extra = nn.Linear(64, 64)
        if how == "other trunk" and self.gate is not None:
            self.extra = nn.Linear(64, 64)

    def halt(self, pooled):
        if self.how == "no gate":
            return None
        if self.how == "all ones":
            return pooled.sum(-1)
        if self.how == "shape":
            return self.gate(pooled)
        return super().halt(self.extra(pooled) if self.how == "shared" else pooled)


class Padded(LoopedGRU):
    def block(self, hidden, mask):
        return super().block(hidden, torch.ones_like(mask))


class LastLoops(LoopedGRU):
    """Learns a vector for every loop."""

    any_depth = False

    def __init__(self, loops, **sizes):
        super().__init__(loops=loops, **sizes)
        self.by_loop = nn.Embedding(loops, 64)

    def step(self, state):
        added = self.by_loop(state.loop).repeat_interleave(state.lengths, dim=0)
        return super().step(replace(state, hidden=state.hidden + added))


class NoModel:
    def __init__(self, **sizes):
        pass
'''
)
FULL = (ROOT / "examples" / "causal.py").read_text()
GATED = ["objective.name=learned_gate", "model.gate=linear"]
DECOUPLED = ["objective.name=decoupled_gate", "model.gate=mlp"]
Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Writes a module and forgets the earlier one; its name is of this test alone."""
    name = f"models_{hashlib.sha256(str(tmp_path).encode()).hexdigest()[:8]}"
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # files change here within one second

    def written(text: str = SIMPLE) -> str:
        (tmp_path / f"{name}.py").write_text(text)
        sys.modules.pop(name, None)
        return name

    with patch.dict(MODELS):
        yield written
    sys.modules.pop(name, None)


def own(name: str, *changes: str) -> list[str]:
    """The changes of a tiny run of this class."""
    return [*TINY, f"model={name}", "model.loops=3", "model.block_size=11", *changes]


@pytest.mark.parametrize(
    "changes", [[], GATED, DECOUPLED, ["objective.name=random_depth"]], ids=["fixed", "joint", "decoupled", "random"]
)
def test_interrupted_and_resumed_it_ends_bit_identical(write: Write, tmp_path: Path, changes: list[str]) -> None:
    """Although it draws random numbers in training, and its loops run again for their gradients."""
    kind = "Noisy" if not changes or changes == ["objective.name=random_depth"] else "LoopedGRU"
    overrides = own(f"{write()}:{kind}", *changes, "training.checkpointing=true", "training.accumulate=2")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    interrupt(TaskRun(tiny_settings(*overrides), cut), 9)
    assert main(train_words(cut, overrides)) == main(train_words(whole, overrides)) == 0
    assert contents(cut) == contents(whole)
    kept = train(tiny_settings(*overrides[:-2]), tmp_path / "kept").folder / "model.safetensors"
    weights, others = load_file(kept), load_file(whole / "model.safetensors")
    close = all(torch.allclose(value, others[name], atol=1e-4) for name, value in weights.items())
    assert close or kind == "Noisy"  # in parts of a batch it draws other numbers


def test_with_its_loops_run_again_it_draws_the_same_numbers(write: Write, tmp_path: Path) -> None:
    settings = tiny_settings(*own(f"{write()}:Noisy"))
    runs = [train(settings, tmp_path / "kept")]
    runs.append(train(settings, tmp_path / "again", overrides=["training.checkpointing=true"]))
    first, second = (load_file(run.folder / "model.safetensors") for run in runs)
    assert all(torch.allclose(value, second[name], atol=1e-5) for name, value in first.items())
    assert runs[0].final != train(settings, tmp_path / "other", overrides=["training.seed=1"]).final


def test_another_text_is_another_run(write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides, folder = own(f"{write()}:LoopedGRU"), tmp_path / "run"
    assert main(train_words(folder, overrides)) == 0
    config = json.loads((folder / "config.json").read_bytes())
    source = hashlib.sha256((tmp_path / f"{write()}.py").read_bytes()).hexdigest()
    assert config["model"] == config["run"]["model"]
    assert config["model"]["source_sha256"] == source
    assert "width" not in config["model"]
    write(SIMPLE.replace("not what is padded", "not padding"))
    MODELS.clear()
    capsys.readouterr()
    assert main(train_words(folder, overrides)) == 2
    assert "other settings (the source text of the model); choose another --out" in capsys.readouterr().err
    assert main(record_words(folder, overrides[-3].partition("=")[2], tmp_path / "recording")) == 2
    assert "is not the one that these settings name; put it back" in capsys.readouterr().err


def record_words(run: Path, name: str, out: Path, *more: str) -> list[str]:
    return ["record", "task", str(run), "--split", "test", "--out", str(out), "--with-model", name, *more]


def test_nothing_is_imported_because_a_checkpoint_names_it(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"from pathlib import Path\nPath({str(tmp_path / 'imported')!r}).touch()\n" + SIMPLE
    name, run = f"{write(text)}:LoopedGRU", tmp_path / "run"
    train(tiny_settings(*own(name, *GATED)), run)
    (tmp_path / "imported").unlink()
    sys.modules.pop(name.partition(":")[0])
    MODELS.clear()
    refused = f"add --with-model {name} if you trust that module (in Python: loopscope.register_model('{name}'))."
    for words in (
        ["record", "task", str(run), "--split", "test"],
        ["answer", str(run), __file__, "--threshold", "1"],
        ["selfcheck", str(run)],
        ["record", "task", str(run), "--split", "test", "--with-model", "json:JSONDecoder"],
    ):
        assert main(words) == 2
        assert refused in capsys.readouterr().err
    for load in (lambda: ls.load_model(run), lambda: record_task(run, "test", tmp_path / "recording")):
        with pytest.raises(ls.UserError, match=re.escape(refused)):
            load()
    assert read_run_settings(run).model.name == name
    check_run_place(run, tiny_settings(*own(name, *GATED)))
    assert not (tmp_path / "imported").exists()
    assert not (run / "recordings").exists()
    assert main(record_words(run, name, tmp_path / "recording")) == 0
    assert (tmp_path / "imported").exists()
    with pytest.raises(ls.UserError, match="has no gate of LoopScope's, so a fitted linear gate cannot take its place"):
        write_gate(ls.FittedGate(torch.ones(64).numpy(), torch.zeros(()).numpy()), run, tmp_path / "other")


def test_what_is_loaded_is_what_was_trained(write: Write, tmp_path: Path) -> None:
    """Ties and constants that no file holds included; replayed exits are the live ones."""
    run = train(tiny_settings(*own(f"{write()}:Noisy", *GATED)), tmp_path / "run").folder
    model = ls.load_model(run)
    assert model.tied == {"head.weight": "embedding.weight"}
    assert "head.weight" not in load_file(run / "model.safetensors")
    assert model.head.weight.data_ptr() == model.embedding.weight.data_ptr()
    assert float(model.scale) == 0.5
    test = record_task(run, "test", tmp_path / "test")
    requests = list(task_requests(tiny_settings().task.split("test")))
    for readout in ("gate", "margin"):
        policy = ls.ExitPolicy(readout, float(np.median(ls.signal(readout, test)[:, 0])))
        loops = {answer.key: answer.loop for answer in ls.run(model, requests, policy, batch_size=16)}
        assert [loops[key] for key in range(len(requests))] == policy.exit_loops(test).tolist()
        assert len(set(loops.values())) > 1


def test_a_model_of_the_full_contract_is_trained_and_writes(write: Write, tmp_path: Path) -> None:
    run = train(tiny_settings(*own(f"{write(FULL)}:CausalModel", "model.options.width=16")), tmp_path / "run").folder
    model = ls.load_model(run)
    assert model.head.in_features == 16
    ls.check_model(model)
    assert len(ls.generate(model, [ls.Prompt(0, [1, 2, 3])], max_new_tokens=4)[0].tokens) == 4


def test_the_block_s_parameters_are_those_that_a_step_reads(write: Write) -> None:
    register_model(name := f"{write()}:LoopedGRU")
    model = initial_model(tiny_settings(*own(name, *GATED)))
    names = {id(value): label for label, value in model.named_parameters()}
    assert {names[id(value)].partition(".")[0] for value in looped_parameters(model)} == {"attention", "norm", "cell"}


def test_options_are_keyword_arguments_and_only_a_registered_class_is_made(write: Write) -> None:
    name = f"{write()}:LoopedGRU"
    settings = tiny_settings(*own(name, "model.options.width=8"))
    with pytest.raises(ls.UserError, match="a class in code, .*, which is not imported because a file names it"):
        initial_model(settings)
    assert ls.register_model(name) == name
    assert initial_model(settings).embedding.weight.shape == (8, 8)
    assert tied_tensors(initial_model(settings)) == {}


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("Nowhere", [], "cannot be imported: AttributeError: module 'models_"),
        ("NoModel", [], "is no looped model; derive it from loopscope.SimpleLoopedModel or LoopedModel"),
        ("LoopedGRU", ["model.options.depth=3"], "cannot be made: TypeError: LoopedGRU.__init__() got an unexpected"),
        ("Padded", [], "depends on the rows beside it or on their lengths; mask what is padded"),
        ("fails", [], "cannot be made: KeyError: 'how' (models_"),
        ("depth", [], "was made with loops=3, and its num_loops is 7; set self.num_loops = loops"),
        ("classes", [], "fails on examples of the task: IndexError: Target "),
        ("counts", [], "'count' of Wrong holds torch.int64, and a checkpoint holds floating-point numbers"),
        ("unasked", [], "Wrong has a gate without being asked for one; return None from halt unless gate= is given"),
        ("no gate", GATED, "This objective trains a gate, and halt of Wrong returns None; give the model one"),
        ("all ones", GATED, "halt of Wrong has nothing to learn; give it layers, in self.gate"),
        ("shape", GATED, "must make halt logits [...] of states [..., width], but made [3, 3, 1]"),
        ("shared", GATED, "halt of Wrong computes with 'extra.weight'; keep all that is the gate's in self.gate"),
        ("other trunk", DECOUPLED, "has 'extra.weight' in another way than without one, so that such a gate"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_written(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, changes: list[str], words: str
) -> None:
    module = write()
    known = kind in ("Nowhere", "NoModel", "LoopedGRU", "Padded")
    how = [] if known else [f"model.options.how={kind}"]
    overrides = own(f"{module}:{kind if known else 'Wrong'}", *changes, *how)
    assert main(train_words(tmp_path / "run", overrides)) == 2
    sentence = capsys.readouterr().err.splitlines()[-1]
    assert words in sentence
    assert sentence.endswith(".")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["model=mine"], "there is no model 'mine'; name a custom class as 'module:Class'"),
        (["model.name=m:Net"], "layers is of the built-in model; leave it out, or give it to 'm:Net'"),
        (["model.options.width=3"], "options are for a custom class; name it: name = 'module:Class'"),
        (["model=m:Net", "model.norm=post"], "norm is of the built-in model"),
        (["model=m:Net", "model.options.width=[1]"], "model.options[...]: expected"),
        (["model=m:Net", "objective.name=learned_gate"], "need model.gate = 'linear' or 'mlp'"),
    ],
)
def test_settings_of_a_model_that_cannot_be_are_explained(changes: list[str], words: str) -> None:
    with pytest.raises(ls.UserError, match=re.escape(words)):
        tiny_settings(*changes)


def test_a_study_names_its_runs_by_their_model(write: Write, tmp_path: Path) -> None:
    name = f"{write()}:LoopedGRU"
    (tmp_path / "study.toml").write_text(f"""title = "Own"
[[parts]]
settings = "demo"
set = ["model={name}", "model.options.width=8"]
[[parts.runs]]
prior = [0.3]
gate = ["none", "linear"]
[[parts]]
settings = "demo"
set = ["model.injection=true", "model.norm=post", "model.loop_norm=true"]
[[parts.runs]]
prior = [0.3]
""")
    (first, second), (third,) = expand_study(str(tmp_path / "study.toml")).runs
    own_name = name.replace(":", "_")
    assert [run.name for run in (first, second, third)] == [
        f"mano-{own_name}-width_8-geometric0.3-fixed-s0",
        f"mano-{own_name}-width_8-geometric0.3-linear-b0.1-s0",
        "mano-injection-post-norm-loop_norm-geometric0.3-fixed-s0",
    ]
    assert first.settings.model.source_sha256
    assert name not in MODELS  # a plan imports nothing


def test_more_loops_than_a_model_has_learned_are_refused(write: Write, tmp_path: Path) -> None:
    run = train(tiny_settings(*own(f"{write()}:LastLoops")), tmp_path / "run").folder
    fewer = record_task(run, "test", tmp_path / "fewer", loops=2)
    assert fewer.num_loops == 2
    model = ls.load_model(run)
    for words in ("learned something for each loop", "IndexError: index out of range"):
        with pytest.raises(ls.UserError, match=f"was trained with 3 loops and cannot run 4.*{words}"):
            model.set_depth(4)
        assert model.num_loops == 3
        type(model).any_depth = True  # which is not so
    with pytest.raises(ls.UserError, match="fails beyond its last loop, so it must set any_depth = False"):
        ls.check_model(model)
