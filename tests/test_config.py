"""Settings: is everything that does not fit named with its key?"""

from pathlib import Path

import pytest

from loopscope.config import differences, digest, with_overrides
from loopscope.errors import UserError
from loopscope.training.settings import RunSettings, presets, read_settings


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("task.modulos=5", ["task", "modulos"]),
        ("task.modulus=five", ["task.modulus", "a whole number, got text"]),
        ("task.name=sums", ["task", "sums"]),
        ("training.steps=1.5", ["training.steps", "a whole number"]),
        ("training.learning_rate=0.0", ["training.learning_rate"]),
        ("model.heads=3", ["width 64", "3 heads"]),
        ("model.gate=cubic", ["model.gate", "cubic"]),
        ("model.gate=linear", ["learned_gate"]),
        ("objective.geometric_lambda=nan", ["geometric_lambda"]),
        ("training.clip_norm=inf", ["training.clip_norm"]),
        ("task.train_examples=1000000000000", ["task.train_examples"]),
        ("training.seed=1\nfoo=2", ["training.seed", "a whole number, got text"]),
        ("modell.width=3", ["modell"]),
        ("steps", ["a.b=c"]),
        ("task.modulus.x=3", ["modulus"]),
        ("task.modulus=" + "[" * 60_000, ["task.modulus"]),
        (".".join(["a"] * 30_000) + "=1", ["tables"]),
        ("training.seed=" + "1" * 5000, ["training.seed"]),
        (f"training.warmup_steps={2**50}", ["training.warmup_steps"]),
        (f"model.loops={10**9}", ["model.loops", "1024"]),
        ("task.name=" + "x" * 10_000, ["task.name"]),
        ("task.name=\x1b[31mred", ["task.name", "\\x1b[31mred"]),
    ],
)
def test_what_does_not_fit_is_named(override: str, words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        read_settings("demo", [override])
    for word in words:
        assert word in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500


def test_files_are_strict_too(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[task]\nname = "parity"\nmax_bits = 12\n[training]\nstep = 3\n')
    with pytest.raises(UserError, match="training.*step"):
        read_settings(str(file), [])
    file.write_text("[task\n")
    with pytest.raises(UserError, match="not valid TOML"):
        read_settings(str(file), [])
    with pytest.raises(UserError, match="There is no preset 'nothing'; give a TOML file, or one of: demo"):
        read_settings("nothing", [])


def test_overrides_win_over_the_file_and_the_file_over_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[task]\nname = "parity"\n[training]\nsteps = 3\nseed = 4\n')
    settings = read_settings(str(file), ["training.seed=5", "model.width=32"])
    assert (settings.training.steps, settings.training.seed, settings.training.batch_size) == (3, 5, 1024)
    assert settings.block_size == 42


def test_the_paper_preset_is_appendix_b() -> None:
    settings = read_settings("paper", [])
    model, training = settings.model, settings.training
    assert (model.layers, model.heads, model.width, model.loops, model.block_size) == (4, 4, 512, 6, 32)
    assert model.bias
    assert (training.learning_rate, training.min_learning_rate, training.warmup_steps) == (5e-4, 5e-5, 2000)
    assert (training.beta1, training.beta2, training.weight_decay) == (0.9, 0.98, 0.1)
    assert (training.batch_size, training.clip_norm, training.steps, training.bf16) == (1024, 1.0, 40_000, True)
    assert training.muon_learning_rate == 0
    task = settings.task
    assert (task.train_examples, task.validation_examples, task.test_examples) == (50_000,) * 3
    assert not task.disjoint


def test_every_preset_is_valid() -> None:
    more = ["demo-hop-induction", "demo-parity", "demo-reachability", "demo-state-tracking"]
    assert presets() == ["demo", *more, "paper", "paper-parity"]
    assert all(isinstance(read_settings(name, []), RunSettings) for name in presets())


def test_overrides_leave_their_source_alone_and_differences_are_dotted() -> None:
    source = {"a": {"b": 1}}
    assert with_overrides(source, ["a.b=2", "a.c=text"]) == {"a": {"b": 2, "c": "text"}}
    assert source == {"a": {"b": 1}}
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1}) != digest({"a": 1, "b": 3})
    assert differences({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": 1, "c": 5}, "e": 3}) == ["a.c", "d", "e"]
