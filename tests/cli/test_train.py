"""`loopscope train` and `loopscope pretrain`: runs of a task, and from a text through both of Ouro's stages."""

from pathlib import Path

from conftest import GATED, TINY_OURO, tiny_text

from cli.conftest import Command, run, settings


def test_train_shows_loss_and_accuracy_of_every_loop(tmp_path: Path, command: Command) -> None:
    out, err = command("train", "demo", "--out", tmp_path / "run", *settings(*GATED))
    assert all(word in out for word in ("loop", "loss", "accuracy"))
    assert "12/12" in err
    result = command.json("train", "demo", "--out", tmp_path / "run", *settings(*GATED))
    assert result["resumed_from"] == 12
    assert len(result["validation_accuracy"]) == len(result["validation_loss"]) == 3


def test_a_text_that_is_too_short_leaves_the_folder_to_a_longer_one(tmp_path: Path, command: Command) -> None:
    train, validation = tiny_text(tmp_path)
    (tmp_path / "tiny.toml").write_text(TINY_OURO)
    (tmp_path / "short.txt").write_text("A cat.")
    words = ("pretrain", tmp_path / "tiny.toml", "--validation", validation, "--out", tmp_path / "run")
    words += ("--set", "training.steps=1", "--text")
    assert "less than one window of" in command.refused(*words, tmp_path / "short.txt")
    assert not (tmp_path / "run").exists()
    assert run(*words, train) == 0
    assert "holds a run with other settings (--text)" in command.refused(*words, validation)


def test_from_a_text_to_stage_ii(tmp_path: Path, command: Command) -> None:
    train, validation = tiny_text(tmp_path)
    (tmp_path / "tiny.toml").write_text(TINY_OURO)
    folder, recordings, gate, refitted = (tmp_path / name for name in ("run", "recordings", "gate", "stage2"))
    pretrain = ("pretrain", tmp_path / "tiny.toml", "--text", train, "--validation", validation, "--out", folder)
    assert len(command.json(*pretrain, "--set", "training.steps=4")["validation_loss"]) == 3
    record = ("record", "text", folder, train, "--split", "train", "--limit", 300, "--hidden")
    summary = command.json(*record, "--out", recordings)
    assert (summary["tokens"], summary["loops"], summary["agreement"][-1]) == (300, 3, 1.0)
    assert run("fit", recordings, "--objective", "utility", "--steps", 5, "--out", gate) == 0
    assert run("insert", gate, folder, "--out", refitted) == 0
    assert "100 next tokens" in command("record", "text", refitted, validation, "--limit", 100).out
    assert (refitted / "recordings" / "validation" / "manifest.json").is_file()
