"""Fine-tuning with transformers' Trainer: are the objectives ours, and does what it leaves behind load again?"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import GOLDEN
from datasets import Dataset
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tiny_language import write_ouro
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

import loopscope as ls
from loopscope.config import build
from loopscope.integrations.transformers import LoopTrainer, lora_config
from loopscope.training.language_run import LanguageRun, TokenLosses, TokenWindows
from loopscope.training.objectives import LoopLosses, draw_unrolling, load_objective
from loopscope.training.settings import GATED, Objective


def text(seed: int, rows: int = 64, length: int = 17) -> list[dict[str, Any]]:
    """Rows that count up in steps of 1, 2 or 3: the first two tokens say what follows."""
    rng = np.random.default_rng(seed)
    starts, steps = rng.integers(0, 50, (rows, 1)), rng.integers(1, 4, (rows, 1))
    tokens = (starts + steps * np.arange(length)) % 50
    return [{"input_ids": row, "labels": row} for row in tokens.tolist()]


@pytest.fixture(scope="module")
def ouro(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ouro(tmp_path_factory.mktemp("ouro") / "start", total_ut_steps=3)


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


SETTINGS = {
    "max_steps": 30,
    "per_device_train_batch_size": 8,
    "learning_rate": 5e-3,
    "logging_steps": 10,
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
    "dataloader_pin_memory": False,
    "disable_tqdm": True,
}


def trainer(model: Any, folder: Path, objective: Any = "fixed_prior", **changes: Any) -> LoopTrainer:
    """`changes` are of the training arguments, where these know their names."""
    known = {field.name for field in fields(TrainingArguments)}
    options = {name: changes.pop(name) for name in [*changes] if name not in known}
    data = {"train_dataset": text(0), "eval_dataset": text(1, 16)}
    arguments = TrainingArguments(str(folder), **SETTINGS | changes)
    return LoopTrainer(model, arguments, objective=objective, **{**data, **options})


def trained(model: Any, folder: Path, objective: Any = "fixed_prior", **changes: Any) -> LoopTrainer:
    run = trainer(model, folder, objective, **changes)
    run.train()
    return run


def logged(run: Any, name: str) -> list[float]:
    return [entry[name] for entry in run.state.log_history if name in entry]


def test_an_adapter_lowers_the_loss_of_every_loop_and_becomes_a_checkpoint(ouro: Path, tmp_path: Path) -> None:
    base = load(ouro)
    before = {name: each.clone() for name, each in base.state_dict().items()}
    model = get_peft_model(base, lora_config(base, rank=8, lora_dropout=0.05))
    run = trainer(model, tmp_path, "decoupled_gate", max_steps=40)
    first = run.evaluate()
    run.train()
    last = run.evaluate()
    for loop in (1, 2, 3):
        assert last[f"eval_loss_loop_{loop}"] < 0.9 * first[f"eval_loss_loop_{loop}"]
        assert last[f"eval_accuracy_loop_{loop}"] > first[f"eval_accuracy_loop_{loop}"]
    assert sum(last[f"eval_gate_exits_loop_{loop}"] for loop in (1, 2, 3)) == pytest.approx(1)
    run.save_model(str(tmp_path / "adapter"))
    changed = {name for name in load_file(tmp_path / "adapter" / "adapter_model.safetensors") if "lora_" not in name}
    assert changed == {f"base_model.model.model.early_exit_gate.{part}" for part in ("weight", "bias")}
    frozen = {name.replace(".base_layer", ""): each for name, each in model.get_base_model().state_dict().items()}
    assert torch.equal(frozen["model.layers.0.mlp.up_proj.weight"], before["model.layers.0.mlp.up_proj.weight"])

    again = PeftModel.from_pretrained(load(ouro), tmp_path / "adapter")
    by_transformers = load(tmp_path / "adapter")  # which finds the model that the adapter is for
    tokens = torch.tensor([row["input_ids"] for row in text(2, 4)])
    model.eval()
    with torch.no_grad():
        expected = model(tokens, output_loop_logits=True)
        loaded = again(tokens, output_loop_logits=True)
        logits = by_transformers(tokens).logits
    torch.testing.assert_close(logits, expected.logits, atol=1e-4, rtol=1e-4)
    again.merge_and_unload().save_pretrained(tmp_path / "merged")
    with torch.no_grad():
        merged = ls.load_model(tmp_path / "merged").loops(tokens)
    for found in (torch.stack(loaded.loop_logits), merged.logits):
        torch.testing.assert_close(found, torch.stack(expected.loop_logits), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(merged.gate_logits, torch.stack(expected.gate_logits), atol=1e-4, rtol=1e-4)
    assert set(load_file(tmp_path / "merged" / "model.safetensors")) == set(before)
    assert not torch.equal(ls.load_model(tmp_path / "merged").gate.weight, before["model.early_exit_gate.weight"])


@pytest.mark.parametrize("adapter", [False, True], ids=["all weights", "an adapter"])
def test_a_decoupled_gate_changes_nothing_else(ouro: Path, tmp_path: Path, adapter: bool) -> None:
    """Bit for bit what the fixed prior trains, also where gradients are clipped."""
    found = []
    for name in ("fixed_prior", "decoupled_gate"):
        torch.manual_seed(0)
        base = load(ouro)
        model = get_peft_model(base, lora_config(base, rank=4)) if adapter else base
        run = trained(model, tmp_path, name, max_steps=3, logging_steps=1, max_grad_norm=0.05)
        found.append(({key: each.clone() for key, each in model.state_dict().items()}, logged(run, "grad_norm")))
    (plain, norms), (decoupled, same) = found
    different = {key for key, value in plain.items() if not torch.equal(value, decoupled[key])}
    assert different
    assert all("early_exit_gate" in key for key in different)
    assert norms == same
    assert min(norms) > 0.05  # so that they were clipped


def weighted(loops: LoopLosses, power: float = 2.0) -> Tensor:
    return (loops.cross_entropy**power).mean(0)


@pytest.mark.parametrize(
    ("name", "taught"),
    [
        *((name, False) for name in ("final", "fixed_prior", "learned_gate", "decoupled_gate", "random_depth", "own")),
        *((name, True) for name in ("decoupled_gate", "random_depth")),
        *((name, False) for name in ("gate_channels", "act")),
    ],
)
def test_what_is_minimised_is_what_our_own_training_minimises(
    name: str, taught: bool, ouro: Path, tmp_path: Path
) -> None:
    model, teacher = load(ouro).train(), load(write_ouro(tmp_path / "teacher", total_ut_steps=3, sure=3.0))
    more = {"act": {}, "gate_channels": {"prior": "uniform", "gate_weight": 0.5, "gate_gradient": 0.0}}
    built_in = {"name": name, "beta": 0.2, **more.get(name, {"prior": "uniform"})}
    objective: Any = weighted if name == "own" else build(Objective, built_in, "the test")
    options = {"teacher": teacher, "teacher_loops": 2} if taught else {}
    run = trainer(model, tmp_path / "run", objective, **options)
    tokens = torch.tensor([row["input_ids"] for row in text(3, 4)])
    depths = set()
    for step in range(4):
        run.state.global_step = step
        loss = run.compute_loss(model, {"input_ids": tokens, "labels": tokens})
        unrolling = draw_unrolling(run.objective, 3, run.args.seed, step)
        depths.add(unrolling and unrolling.loops)

        def log_probs(given: Tensor) -> Tensor:
            _, read = teacher.looped.deepest(teacher.looped.begin(given), 2)
            return teacher.looped.predict(read).log_softmax(-1)

        losses = TokenLosses(model.looped, log_probs if taught else None)
        found = losses(TokenWindows(tokens.numpy()), torch.device("cpu"), unrolling)
        minimised = load_objective(run.objective, run.args.seed, weighted if name == "own" else None)
        expected = minimised(LoopLosses(found.cross_entropy, found.gate_logits, step, found.detached_gate_logits))
        torch.testing.assert_close(loss, expected)
    assert (len(depths) > 1) == (name == "random_depth")
    model.zero_grad()
    run.compute_loss(model, {"input_ids": tokens, "labels": tokens}).backward()
    trained = model.looped.gate.weight.grad
    assert (trained is not None and bool(trained.any())) == (name in GATED)


def test_a_batch_in_parts_is_the_same_batch(ouro: Path, tmp_path: Path) -> None:
    """Though its parts have different numbers of tokens that count."""
    rows = text(0)
    for number, row in enumerate(rows):
        row["labels"] = [-100] * (number % 12) + row["labels"][number % 12 :]
    weights = []
    for parts in (1, 2):
        options = {"per_device_train_batch_size": 8 // parts, "gradient_accumulation_steps": parts}
        options |= {"max_steps": 3, "logging_steps": 1, "train_dataset": rows}
        run = trained(load(ouro), tmp_path, "decoupled_gate", **options)
        losses = {name: torch.tensor(logged(run, name)) for name in ("loss", "loss_loop_2")}
        weights.append({**run.model.state_dict(), **losses})
    for name, value in weights[0].items():
        torch.testing.assert_close(value, weights[1][name], atol=2e-5, rtol=1e-3)


def test_a_part_in_which_no_label_counts_adds_nothing(ouro: Path, tmp_path: Path) -> None:
    """Rows that are all prompt, say; a step of nothing else is refused."""
    full, empty = text(0, 4), [{"input_ids": row["input_ids"], "labels": [-100] * 17} for row in text(5, 4)]
    found = []
    for parts, rows in ((1, full), (2, [*full, *empty])):
        options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": parts, "max_steps": 2}
        options |= {"train_sampling_strategy": "sequential", "train_dataset": rows}
        found.append(trained(load(ouro), tmp_path, "decoupled_gate", **options).model.state_dict())
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name])
    with pytest.raises(ls.UserError, match="No label of a whole step"):
        trained(load(ouro), tmp_path, "decoupled_gate", train_dataset=empty)


def test_metrics_go_by_loop(ouro: Path, tmp_path: Path) -> None:
    changes = {"max_steps": 12, "logging_steps": 3, "eval_strategy": "steps", "eval_steps": 6}
    history = trained(load(ouro), tmp_path, "random_depth", **changes).state.log_history
    training, evaluated = ([logs for logs in history if name in logs] for name in ("loss", "eval_loss"))
    assert (len(training), len(evaluated)) == (4, 2)
    drawn = [sum(f"loss_loop_{loop}" in logs for loop in (1, 2, 3)) for logs in training]
    assert all(1 <= count <= 3 for count in drawn)
    for logs in evaluated:
        assert all(f"eval_loss_loop_{loop}" in logs for loop in (1, 2, 3))
        assert logs["eval_loss"] == pytest.approx(logs["eval_loss_loop_3"], rel=1e-4)


def uneven(rows: int) -> list[dict[str, Any]]:
    """Rows of different lengths, of one of which no label counts."""
    made = [{name: row[name][: 5 + 3 * (number % 5)] for name in row} for number, row in enumerate(text(2, rows))]
    return [*made, {"input_ids": made[0]["input_ids"], "labels": [-100] * len(made[0]["labels"])}]


def padded(rows: list[dict[str, Any]], side: str, unmasked: bool = False) -> dict[str, Tensor]:
    """A batch as collators make it, or with labels on its padding."""
    longest = max(len(row["input_ids"]) for row in rows)
    names = {"input_ids": 0, "attention_mask": 0, "labels": 7 if unmasked else -100}
    batch: dict[str, list[list[int]]] = {name: [] for name in names}
    for row in rows:
        given = row | {"attention_mask": [1] * len(row["input_ids"])}
        for name, filling in names.items():
            more = [filling] * (longest - len(given[name]))
            batch[name].append(more + given[name] if side == "left" else given[name] + more)
    return {name: torch.tensor(value) for name, value in batch.items()}


@pytest.mark.parametrize("own", [True, False], ids=["LoopTrainer", "Trainer"])
def test_padding_changes_no_loss(ouro: Path, tmp_path: Path, own: bool) -> None:
    """transformers counts labels, also those before which there is nothing to say them from."""
    found = []
    for side in (("right",), ("left",), ("left", True)):
        options = {"max_steps": 1, "logging_steps": 1}
        given = {"train_dataset": uneven(7), "data_collator": lambda rows, side=side: padded(rows, *side)}
        made = trainer(load(ouro), tmp_path, "final", **options, **given) if own else None
        run = made or Trainer(load(ouro), TrainingArguments(str(tmp_path), **SETTINGS | options), **given)
        run.train()
        found.append([run.state.log_history[0][name] for name in ("loss", "grad_norm")])
    np.testing.assert_allclose(found, [found[0]] * 3, rtol=1e-4)


def test_an_evaluation_is_a_mean_over_tokens(ouro: Path, tmp_path: Path) -> None:
    """Whatever the batches; one in which nothing counts adds nothing."""
    found = []
    for size in (1, 3):
        given = {"eval_dataset": uneven(7), "data_collator": lambda rows: padded(rows, "right")}
        run = trainer(load(ouro), tmp_path, per_device_eval_batch_size=size, **given)
        found.append(run.evaluate()["eval_loss"])
    np.testing.assert_allclose(found, found[0], rtol=1e-5)
    with pytest.raises(ZeroDivisionError):
        run.evaluate(uneven(7)[-1:])


def test_what_is_saved_says_how_it_was_trained(tiny_ouro: LanguageRun, tmp_path: Path) -> None:
    """It is not the model of the run that it began with any more, whole or with a merged adapter."""
    trained(load(tiny_ouro.folder), tmp_path, "random_depth", max_steps=1).save_model(str(tmp_path / "tuned"))
    base = load(tiny_ouro.folder)
    base.save_pretrained(tmp_path / "same")
    model = get_peft_model(base, lora_config(base, rank=2))
    trained(model, tmp_path, max_steps=1)
    model.save_pretrained(tmp_path / "adapter")
    adapted = PeftModel.from_pretrained(load(tiny_ouro.folder), tmp_path / "adapter")
    adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
    folders = (tiny_ouro.folder, *(tmp_path / name for name in ("same", "tuned", "merged")))
    start, same, tuned, merged = (json.loads((each / "config.json").read_text()) for each in folders)
    assert same["run"] == start["run"]
    assert "run" not in tuned.keys() | merged.keys()
    assert tuned["fine_tuning"]["start"] == merged["fine_tuning"]["start"] == start["run"]
    assert tuned["fine_tuning"]["objective"]["name"] == "random_depth"
    assert ls.load_model(tmp_path / "tuned").num_loops == 3


def test_an_adapter_of_a_spoiled_checkpoint_is_refused(ouro: Path, tmp_path: Path) -> None:
    """transformers tells of the adapter's tensors alone, and takes for the rest whatever memory holds."""
    folder = Path(shutil.copytree(ouro, tmp_path / "base"))
    base = load(folder)
    get_peft_model(base, lora_config(base, rank=2)).save_pretrained(tmp_path / "adapter")
    assert load(tmp_path / "adapter").num_loops == 3
    whole, adapter = (load_file(file) for file in (file_of(folder), file_of(tmp_path / "adapter")))
    save_file({n: v for n, v in whole.items() if n != "model.norm.weight"}, file_of(folder), {"format": "pt"})
    with pytest.raises(ls.UserError, match="base has no tensor 'model.norm.weight'"):
        load(tmp_path / "adapter")
    save_file(whole, file_of(folder), {"format": "pt"})
    save_file(dict(list(adapter.items())[1:]), file_of(tmp_path / "adapter"), {"format": "pt"})
    with pytest.raises(ls.UserError, match="adapter has no tensor"):
        load(tmp_path / "adapter")


def file_of(folder: Path) -> Path:
    return next(folder.glob("*.safetensors"))


def test_a_resumed_run_ends_where_the_other_ends(ouro: Path, tmp_path: Path) -> None:
    changes = {"max_steps": 7, "save_strategy": "steps", "save_steps": 4, "logging_steps": 2}
    for name in ("through", "resumed"):
        trained(load(ouro), tmp_path / name, "random_depth", **changes)
    run = trainer(load(ouro), tmp_path / "resumed", "random_depth", **changes)
    run.train(resume_from_checkpoint=str(tmp_path / "resumed" / "checkpoint-4"))
    expected, found = (load_file(file_of(tmp_path / name / "checkpoint-7")) for name in ("through", "resumed"))
    assert all(torch.equal(each, found[name]) for name, each in expected.items())
    assert run.state.global_step == 7
    # in the middle of an epoch transformers would take one step more
    again = trainer(load(ouro), tmp_path / "resumed", "random_depth", **changes)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 7
    assert all(torch.equal(each, expected[name]) for name, each in again.model.state_dict().items() if name in expected)


BEGINNING = """
import json, sys
from pathlib import Path
sys.path[:0] = {path!r}
import torch
torch.set_num_threads(1)
from peft import get_peft_model
from test_trainer import load, lora_config, trainer
base, out = load(Path({start!r})), Path({out!r})
"""
KILLED = """
torch.manual_seed(0)
model = get_peft_model(base, lora_config(base, rank=4))
run = trainer(model, out, "decoupled_gate", max_steps=60, save_strategy="steps", save_steps=10)
run.train(resume_from_checkpoint={resume!r})
run.save_model(out / "final")
"""
SEVERAL = """
settings = dict(max_steps=6, logging_steps=2, per_device_train_batch_size={rows}, ddp_backend={backend!r})
run = trainer(base, out, "decoupled_gate", **settings)
run.train()
metrics = run.evaluate()
if run.is_world_process_zero():
    run.save_model(out)
    (out / "metrics.json").write_text(json.dumps([run.state.log_history, metrics]))
"""


def script(body: str, start: Path, out: Path, **values: Any) -> str:
    path = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
    return (BEGINNING + body).format(path=path, start=str(start), out=str(out), **values)


@pytest.mark.long
def test_a_killed_run_is_resumed(ouro: Path, tmp_path: Path) -> None:
    def start(out: Path, resume: bool) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-c", script(KILLED, ouro, out, resume=resume)]
        return subprocess.Popen(words, stdout=subprocess.DEVNULL)

    assert start(tmp_path / "through", False).wait() == 0
    killed = start(tmp_path / "killed", False)
    while not (tmp_path / "killed" / "checkpoint-20" / "trainer_state.json").is_file():
        assert killed.poll() is None, "it ended before it was killed"
        time.sleep(0.02)
    os.kill(killed.pid, signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    assert not (tmp_path / "killed" / "final").exists()
    assert start(tmp_path / "killed", True).wait() == 0
    expected, found = (load_file(file_of(tmp_path / name / "final")) for name in ("through", "killed"))
    assert all(torch.equal(each, found[name]) for name, each in expected.items())


@pytest.mark.long
def test_two_processes_train_what_one_trains(ouro: Path, tmp_path: Path) -> None:
    found = {}
    for processes, backend in ((1, None), (2, "gloo")):
        out, file = tmp_path / f"{processes}", tmp_path / f"{processes}.py"
        file.write_text(script(SEVERAL, ouro, out, rows=8 // processes, backend=backend))
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"] if processes > 1 else []
        subprocess.run([sys.executable, *launcher, str(file)], check=True, stdout=subprocess.DEVNULL)
        history, metrics = json.loads((out / "metrics.json").read_text())
        names = ["loss", *(f"loss_loop_{loop}" for loop in (1, 2, 3))]
        found[processes] = load_file(file_of(out)) | {
            "losses": torch.tensor([[entry[name] for name in names] for entry in history if "loss" in entry]),
            "evaluated": torch.tensor([metrics[f"eval_{name}"] for name in names[1:]]),
        }
    for name, value in found[1].items():
        torch.testing.assert_close(value, found[2][name], atol=5e-5, rtol=1e-3)


def test_what_cannot_be_trained(ouro: Path, tmp_path: Path) -> None:
    base = load(ouro)
    sizes = {"vocab_size": 50, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    other = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))
    for match, model, objective, changes in (
        ("this model has none", load(GOLDEN / "huginn-tiny"), "learned_gate", {}),
        ("there is no objective 'best'", load(ouro), "best", {}),
        ("without a teacher", load(ouro), "final", {"teacher_loops": 1}),
        ("that is a looped model", load(ouro), "final", {"teacher": other, "teacher_loops": 2}),
        ("weights of the model itself", same := load(ouro), "final", {"teacher": same}),
        ("label_smoothing_factor", load(ouro), "final", {"label_smoothing_factor": 0.1}),
        ("keeps no logits for compute_metrics", load(ouro), "final", {"compute_metrics": print}),
        ("compute_loss_func", load(ouro), "final", {"compute_loss_func": print}),
        ("held still", get_peft_model(base, lora_config(base, modules_to_save=None)), "decoupled_gate", {}),
    ):
        with pytest.raises(ls.UserError, match=match):
            trainer(model, tmp_path, objective, **changes)


@pytest.mark.long
def test_every_kind_is_trained(tmp_path: Path) -> None:
    """Huginn has no gate, and its head is its embedding."""
    for objective in ("fixed_prior", Objective(name="random_depth", truncated=1)):
        run = trained(load(GOLDEN / "huginn-tiny"), tmp_path, objective, max_steps=4, gradient_checkpointing=True)
        assert run.state.global_step == 4


def sft(ouro: Path, folder: Path, **changes: Any) -> Any:
    """TRL's trainer on rows of different lengths, and these rows."""
    import trl  # its import warns, which is an error outside a test

    rows = [row["input_ids"] for row in uneven(6)]
    words = {str(token): token for token in range(AutoConfig.from_pretrained(ouro).vocab_size)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="0"))
    data = Dataset.from_list([{"input_ids": row} for row in rows])
    options = {"model_init_kwargs": {"dtype": "float32"}, "bf16": False, "max_steps": 8, "max_length": 32}
    run = trl.SFTTrainer(
        str(ouro),
        args=trl.SFTConfig(str(folder), **SETTINGS | options | changes),
        train_dataset=data,
        eval_dataset=data,
        processing_class=PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="1", pad_token="0"),
    )
    return run, rows


@pytest.mark.filterwarnings("ignore")  # TRL's own
def test_trl_trains_the_last_loop(ouro: Path, tmp_path: Path) -> None:
    """As it trains any other model: it brings its own head, and its loss is that of the last loop."""
    run, rows = sft(ouro, tmp_path)
    model = load(ouro)
    with torch.no_grad():
        losses = [model(torch.tensor([row]), labels=torch.tensor([row])).loss.item() * (len(row) - 1) for row in rows]
    before = run.evaluate()["eval_loss"]
    assert before == pytest.approx(sum(losses) / sum(len(row) - 1 for row in rows), abs=1e-4)
    run.train()
    assert run.evaluate()["eval_loss"] < before


@pytest.mark.filterwarnings("ignore")  # TRL's own
@pytest.mark.parametrize("packed", [{"packing": True}, {"padding_free": True, "max_length": None}])
def test_trl_s_packed_texts_are_trained_as_rows(ouro: Path, tmp_path: Path, packed: dict[str, Any]) -> None:
    """One batch of all texts, so that both see the same: losses and weights afterwards are equal."""
    found = []
    for changes in ({}, packed):
        run, _ = sft(ouro, tmp_path, max_steps=2, logging_steps=1, learning_rate=1e-2, **changes)
        before = run.evaluate()["eval_loss"]
        run.train()
        found.append(({**run.model.state_dict()}, [before, run.evaluate()["eval_loss"], *logged(run, "loss")]))
    (weights, losses), (others, same) = found
    np.testing.assert_allclose(same, losses, rtol=1e-4)
    assert losses[1] < losses[0]
    for name, value in weights.items():
        torch.testing.assert_close(others[name], value, atol=1e-4, rtol=1e-3)


@pytest.mark.filterwarnings("ignore")  # TRL's own
def test_trl_s_packing_across_texts_is_refused(ouro: Path, tmp_path: Path) -> None:
    for changes in ({"packing": True}, {"eval_packing": True}):
        with pytest.raises(ls.UserError, match="packing_strategy='wrapped' lets tokens attend to other texts"):
            sft(ouro, tmp_path, packing_strategy="wrapped", max_length=24, **changes)


@pytest.mark.parametrize("objective", ["decoupled_gate", "final"])
def test_packed_texts_are_trained_as_rows(ouro: Path, tmp_path: Path, objective: str) -> None:
    """By LoopTrainer, whether the collator marks the beginnings among the labels or not; transformers counts labels."""
    found = []
    for collator in (
        lambda rows: padded(rows, "right"),
        DataCollatorWithFlattening(return_flash_attn_kwargs=True),
        DataCollatorWithFlattening(separator_id=7),
    ):
        options = {"max_steps": 2, "logging_steps": 1, "train_dataset": uneven(7), "data_collator": collator}
        run = trained(load(ouro), tmp_path, objective, **options)
        found.append({**run.model.state_dict(), "loss": torch.tensor(logged(run, "loss"))})
    for name, value in found[0].items():
        for other in found[1:]:
            torch.testing.assert_close(other[name], value, atol=1e-4, rtol=1e-3)
