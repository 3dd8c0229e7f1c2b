"""Training a checkpoint further: what a plain step does, in parts, with less kept, with adapters, with a teacher."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

import loopscope as ls
from loopscope.cli import main
from loopscope.config import build
from loopscope.models.checkpoint import stored_sha256
from loopscope.training.continued_run import ContinuedRun, ContinueSettings
from loopscope.training.language_run import LanguageRun
from loopscope.training.loop import train_run
from loopscope.training.run_folder import STATE_FILE

CPU = torch.device("cpu")
FEW = {"steps": 6, "batch_size": 6, "warmup_steps": 1, "learning_rate": 3e-3, "log_every": 1, "checkpoint_every": 3}
GOLDEN = Path(__file__).parents[1] / "golden"
FEW |= {"validate_every": 3, "validation_sample": 8}


def further(tiny: LanguageRun, folder: Path, teacher: Path | None = None, **changes: object) -> ContinuedRun:
    training = {**FEW, **changes.pop("training", {})}  # type: ignore[dict-item]
    settings = build(ContinueSettings, {"context": 16, "training": training, **changes}, "the test")
    return ContinuedRun(settings, tiny.train, tiny.validation, folder, tiny.folder, teacher)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(ls.load_model(folder).state_dict())


def close(ours: Path, theirs: Path, tolerance: float) -> bool:
    others = weights(theirs)
    return all(torch.allclose(value, others[name], atol=tolerance) for name, value in weights(ours).items())


@pytest.fixture(scope="module")
def plain(tiny_ouro: LanguageRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = further(tiny_ouro, tmp_path_factory.mktemp("further") / "run")
    train_run(run, CPU)
    return run.folder


def test_it_begins_where_its_start_ended_and_learns(tiny_ouro: LanguageRun, plain: Path) -> None:
    losses = [json.loads(line) for line in (plain / "metrics.jsonl").read_text().splitlines()]
    before = train_run(tiny_ouro, CPU).final["validation_loss"]
    after = [entry for entry in losses if "validation_loss" in entry][-1]["validation_loss"]
    assert sum(after) < sum(before)
    config, start = (json.loads((folder / "config.json").read_text()) for folder in (plain, tiny_ouro.folder))
    assert config["run"]["start_sha256"] == stored_sha256(tiny_ouro.folder)
    assert {key: value for key, value in config.items() if key != "run"} == {
        k: v for k, v in start.items() if k != "run"
    }
    assert (plain / "tokenizer.json").read_bytes() == (tiny_ouro.folder / "tokenizer.json").read_bytes()
    assert not close(plain, tiny_ouro.folder, 1e-4)


@pytest.mark.parametrize("changes", [{"accumulate": 3}, {"accumulate": 4}, {"checkpointing": True}], ids=str)
def test_parts_of_a_batch_and_loops_that_run_twice_give_the_same_weights(
    changes: dict[str, object], tiny_ouro: LanguageRun, plain: Path, tmp_path: Path
) -> None:
    train_run(further(tiny_ouro, tmp_path / "run", training=changes), CPU)
    assert close(tmp_path / "run", plain, 1e-5)


def test_interrupted_it_ends_bit_identical(tiny_ouro: LanguageRun, plain: Path, tmp_path: Path) -> None:
    run = further(tiny_ouro, tmp_path / "run")

    def stop(done: int, total: int, note: str) -> None:
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_run(run, CPU, stop)
    assert (run.folder / STATE_FILE).is_file()
    assert train_run(further(tiny_ouro, tmp_path / "run"), CPU).resumed_from == 3
    assert (run.folder / "model.safetensors").read_bytes() == (plain / "model.safetensors").read_bytes()


def test_a_teacher_is_followed(tiny_ouro: LanguageRun, plain: Path, tmp_path: Path) -> None:
    """From the start towards the further-trained model: KL(teacher || model) at every loop, and nothing but that."""
    run = further(tiny_ouro, tmp_path / "run", plain, targets="teacher", teacher_loops=3, training={"steps": 12})
    model, teacher = ls.load_model(tiny_ouro.folder), ls.load_model(plain)
    batch = run.batches  # needs the tokenizer, which `prepare` puts there
    train_run(run, CPU)
    windows = batch()(0)
    losses = run.losses(model)(windows, CPU)
    tokens = torch.from_numpy(windows.tokens[:, :-1])
    with torch.no_grad():
        said, taught = model.loops(tokens).logits, teacher.loops(tokens).logits[2].log_softmax(-1)
        expected = F.kl_div(said.log_softmax(-1), taught.expand_as(said), reduction="none", log_target=True).sum(-1)
    assert torch.allclose(losses.cross_entropy, expected.flatten(1), atol=1e-4)
    entries = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert [entry["loss"] for entry in entries if "loss" in entry][-1] < 0.7 * expected.mean().item()


def test_adapters_train_alone_and_merge(tiny_ouro: LanguageRun, tmp_path: Path) -> None:
    run = further(tiny_ouro, tmp_path / "run", adapters={"rank": 2, "alpha": 4}, training={"steps": 4})
    model = run.initial_model()
    tokens = torch.randint(300, (2, 12))
    with torch.no_grad():
        assert torch.equal(model.eval().loops(tokens).logits, ls.load_model(tiny_ouro.folder).loops(tokens).logits)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained
    assert all("lora_" in name or "early_exit_gate" in name for name in trained)
    train_run(run, CPU)
    before, after = weights(tiny_ouro.folder), weights(run.folder)
    assert list(before) == list(after)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert all(name.endswith("proj.weight") for name in changed)
    difference = after["model.layers.0.mlp.up_proj.weight"] - before["model.layers.0.mlp.up_proj.weight"]
    assert torch.linalg.matrix_rank(difference, rtol=1e-3) <= 2


def test_the_decoupled_gate_learns_while_the_rest_goes_its_way(tiny_ouro: LanguageRun, tmp_path: Path) -> None:
    fixed, gated = tmp_path / "fixed", tmp_path / "gated"
    train_run(further(tiny_ouro, fixed, objective={"name": "fixed_prior"}), CPU)
    train_run(further(tiny_ouro, gated, objective={"name": "decoupled_gate"}), CPU)
    ours, theirs = weights(fixed), weights(gated)
    same = {name for name, value in ours.items() if torch.equal(value, theirs[name])}
    assert {name for name in ours if name not in same} == {"model.early_exit_gate.weight", "model.early_exit_gate.bias"}


def test_a_random_depth_costs_its_own_loops(tiny_ouro: LanguageRun, tmp_path: Path) -> None:
    result = train_run(further(tiny_ouro, tmp_path / "run", objective={"name": "random_depth"}), CPU)
    assert {entry["loops"] for entry in result.metrics if "loops" in entry} <= {1, 2, 3}


def test_a_huginn_learns_too(tiny_ouro: LanguageRun, tmp_path: Path) -> None:
    start = shutil.copytree(GOLDEN / "huginn-tiny", tmp_path / "start")
    shutil.copy(tiny_ouro.folder / "tokenizer.json", start)
    config = json.loads((start / "config.json").read_text())
    (start / "config.json").write_text(json.dumps(config | {"eos_token_id": 0}))
    settings = build(ContinueSettings, {"context": 16, "training": FEW}, "the test")
    run = ContinuedRun(settings, tiny_ouro.train, tiny_ouro.validation, tmp_path / "run", start)
    assert run.flops > 0
    with pytest.raises(ls.UserError, match=r"tokens that its model has not \(128\)"):
        train_run(run, CPU)
    tensors = load_file(start / "model.safetensors")
    name = "transformer.wte.weight"
    save_file(tensors | {name: tensors[name].repeat(3, 1)[:300].contiguous()}, start / "model.safetensors")
    (start / "config.json").write_text(json.dumps(config | {"eos_token_id": 0, "vocab_size": 300}))
    run = ContinuedRun(settings, tiny_ouro.train, tiny_ouro.validation, tmp_path / "wider", start)
    train_run(run, CPU)
    assert not close(run.folder, start, 1e-4)


def test_what_is_refused(tiny_ouro: LanguageRun, gated_run: Path, tmp_path: Path) -> None:
    with pytest.raises(ls.UserError, match="go together; one is missing"):
        further(tiny_ouro, tmp_path / "a", targets="teacher")
    other = shutil.copytree(tiny_ouro.folder, tmp_path / "other")
    (other / "tokenizer.json").write_bytes((other / "tokenizer.json").read_bytes() + b"\n")
    with pytest.raises(ls.UserError, match="has other tokens than"):
        further(tiny_ouro, tmp_path / "a", other, targets="teacher")
    with pytest.raises(ls.UserError, match="loops is 7, and .* has 3; leave it out"):
        further(tiny_ouro, tmp_path / "a", loops=7)
    with pytest.raises(ls.UserError, match="context is 99999, and .* takes"):
        further(tiny_ouro, tmp_path / "a", context=99_999)
    with pytest.raises(ls.UserError, match="accumulate is more than batch_size"):
        further(tiny_ouro, tmp_path / "a", training={"accumulate": 7})


def test_from_the_command_line(tiny_ouro: LanguageRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "heal.toml").write_text("context = 16\n[training]\nsteps = 2\nbatch_size = 2\nvalidation_sample = 2\n")
    words = ["pretrain", str(tmp_path / "heal.toml"), "--text", str(tiny_ouro.train[0])]
    words += ["--validation", str(tiny_ouro.validation[0]), "--out", str(tmp_path / "healed")]
    assert main([*words, "--teacher", str(tiny_ouro.folder)]) == 2
    assert "give it with --start" in capsys.readouterr().err
    assert main([*words, "--start", str(tiny_ouro.folder)]) == 0
    assert "validation sample" in capsys.readouterr().out
    assert ls.load_model(tmp_path / "healed").num_loops == 3
    assert main([*words, "--start", str(tmp_path / "nothing")]) == 2
