"""The verbs of language models, from a text to a checkpoint whose gate went through both of Ouro's stages."""

import json
from pathlib import Path

import pytest
from conftest import TINY_OURO, tiny_text

from loopscope.cli import main


def test_from_a_text_to_stage_ii(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = [str(path) for path in tiny_text(tmp_path)]
    (tmp_path / "tiny.toml").write_text(TINY_OURO)
    run, recordings, gate, refitted = (str(tmp_path / name) for name in ("run", "recordings", "gate", "stage2"))
    pretrain = ["pretrain", str(tmp_path / "tiny.toml"), "--text", texts[0], "--validation", texts[1], "--out", run]
    assert main([*pretrain, "--set", "training.steps=4", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["validation_loss"]) == 3
    record = ["record", run, "--text", texts[0], "--split", "train", "--limit", "300", "--hidden"]
    assert main([*record, "--out", recordings, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["tokens"], told["loops"], told["agreement"][-1]) == (300, 3, 1.0)
    assert main(["gate", "fit", recordings, "--objective", "utility", "--steps", "5", "--out", gate]) == 0
    assert main(["gate", "write", gate, run, "--out", refitted]) == 0
    assert main(["record", refitted, "--text", texts[1], "--limit", "100"]) == 0
    assert "100 next tokens" in capsys.readouterr().out
    assert (tmp_path / "stage2" / "recordings" / "validation" / "manifest.json").is_file()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--text", "t.txt", "--examples", "5"], "take --limit"),
        (["--text", "t.txt", "--data", "d"], "--data is not for"),
        (["--text", "t.txt", "--mean-state"], "--mean-state is not for"),
        (["--text", "t.txt", "--no-logits"], "--no-logits is not for"),
        (["--text", "t.txt"], "with --out"),
        (["--split", "test", "--limit", "5"], "take --examples"),
        (["--split", "test", "--data", "d"], "--data is not for"),
        (["--split", "test", "--context", "5"], "--context is not for"),
        (["--split", "test", "--mean-state"], "--mean-state is not for"),
        (["--split", "test", "--dtype", "float16"], "--dtype is not for"),
        (["--split", "test", "--batch-tokens", "9"], "--batch-tokens is not for"),
        ([], "--split validation"),
    ],
)
def test_options_that_do_not_go_together(options: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["record", "nowhere", *options]) == 2
    assert told in capsys.readouterr().err
