"""Does the self-check pass a model that is sound, and does it see one that is not?"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import GOLDEN
from tiny_language import outspoken, tiny_ouro, write_outspoken

import loopscope as ls
from loopscope.checks.machine_checks import MACHINE_CHECKS, selfcheck
from loopscope.checks.model_contract import CHECK_KINDS, Check, CheckKind
from loopscope.cli import main
from loopscope.models.checkpoint import save_model
from loopscope.models.looped_model import LoopState
from loopscope.models.ouro import Ouro, OuroConfig
from loopscope.models.packing import Layout

TORCH = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def checked(model: Ouro, *kinds: CheckKind, **options: Any) -> dict[str, Any]:
    """The checks of a model in memory, by their names."""
    found = selfcheck("made up", lambda dtype: model.to(TORCH[dtype]), kinds=kinds or CHECK_KINDS, rounds=1, **options)
    return {f"{check.kind}: {check.what}": check for check in found.checks}


def only(*kinds: str) -> list[str]:
    return [word for kind in kinds for word in ("--only", kind)]


def test_a_sound_model_passes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    words = ["selfcheck", str(GOLDEN / "ouro-tiny"), "--rounds", "1"]
    assert main([*words, *only("precision", "batch", "cache", "replay"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tokens"] == "random tokens"
    kinds = [check["kind"] for check in found["checks"]]
    assert [kinds.count(kind) for kind in CHECK_KINDS] == [0, 10, 2, 3, 6, 0]
    told = [check["what"] for check in found["checks"] if check["passed"] is None]
    said = [*(f"loop {loop}" for loop in range(1, 5)), "halt logits"]
    assert told == [*(f"{name}, {what}" for name in ("bfloat16", "float16") for what in said), "cache 'latest'"]
    assert main([*words, *only("speed")]) in (0, 1)  # as the machine pleases
    table = capsys.readouterr().out
    assert "writing, 4 of 4 loops" in table
    assert "realised" in table
    assert main([*words, *only("contract", "cache")]) == 0
    table = capsys.readouterr().out
    assert max(map(len, table.splitlines())) <= 80
    assert [line.split() for line in table.splitlines()].count(["check", "what", "measured", "limit", "verdict"]) == 1
    assert table.endswith(" checks passed; 1 more have no limit and are shown only.\n")


def test_a_head_that_attends_and_a_run_of_a_task_pass(gated_run: Path) -> None:
    assert main(["selfcheck", str(GOLDEN / "huginn-tiny"), *only("cache")]) == 0
    assert main(["selfcheck", str(gated_run), *only(*CHECK_KINDS[:-1])]) == 0


def test_low_precision_passes_and_a_text_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["selfcheck", str(write_outspoken(tmp_path / "tiny"))]
    for dtype, kinds in (("bfloat16", ("batch", "cache")), ("float16", ("batch", "cache", "replay"))):
        assert main([*words, *only(*kinds), "--dtype", dtype, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["dtype"], found["tokens"]) == (dtype, "a sample that LoopScope has")
    (tmp_path / "mine.txt").write_text("The sun is in the sea, and the sea is not. " * 20)
    assert main([*words, *only("batch"), "--text", str(tmp_path / "mine.txt")]) == 0
    assert f"checked on {tmp_path / 'mine.txt'}" in " ".join(capsys.readouterr().out.split())


class Leaking(Ouro):
    """Rows of a batch see each other, and so does a text its own future."""

    def step(self, state: LoopState) -> LoopState:
        state = super().step(state)
        return LoopState(state.hidden + 0.3 * state.hidden.mean(0), state.layout, state.loop)


class Forgetting(Ouro):
    """A token that comes after remembered ones has another place."""

    def embed(self, tokens: torch.Tensor, layout: Layout) -> LoopState:
        state = super().embed(tokens, layout)
        return state if layout.cache is None else LoopState(state.hidden * 1.1, layout, state.loop)


def of(kind: type[Ouro]) -> Ouro:
    sound = outspoken()
    model = kind(OuroConfig(**{name: getattr(sound.config, name) for name in sound.config.__struct_fields__}))
    model.load_state_dict(sound.state_dict())
    return model.eval().requires_grad_(False)


def test_rows_that_see_each_other_are_seen() -> None:
    leaking = checked(of(Leaking), "batch", "replay")
    assert leaking["batch: predictions at every loop"].passed is False
    assert leaking["batch: halt logits"].passed is False
    assert any(check.passed is False for name, check in leaking.items() if name.startswith("replay: engine"))


def test_a_wrong_cache_is_seen() -> None:
    found = checked(of(Forgetting), "batch", "cache", "replay")
    assert found["batch: predictions at every loop"].passed
    assert found["cache: cache 'full'"].passed is False
    assert any(check.passed is False for name, check in found.items() if name.startswith("replay: generation"))
    assert all(check.passed for name, check in found.items() if name.startswith("replay: engine"))


def test_numbers_that_float16_cannot_hold_are_seen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_outspoken(tmp_path / "large")
    tensors = outspoken().state_dict()
    tensors["lm_head.weight"] = tensors["lm_head.weight"] * 1e4
    save_model(tensors, folder)
    words = ["selfcheck", str(folder), *only("precision")]
    assert main(words) == 0  # nobody asked for float16
    table = capsys.readouterr().out
    assert "no number" in table
    assert table.endswith("Nothing of this has a limit: it is shown, not judged.\n")
    assert main([*words, "--dtype", "float16"]) == 1
    said = capsys.readouterr()
    assert "FAIL" in said.out
    assert f"\n{len(said.err.split('not as it should be')) - 1} of " in said.out
    assert " checks failed" in said.out
    assert "float16, loop 1 is not as it should be" in said.err


def test_texts_that_it_cannot_be_checked_by(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "short.txt").write_text("A short one.")
    for model, message in ((write_outspoken(tmp_path / "tiny"), "tokens; to be checked"), (GOLDEN / "ouro-tiny", "")):
        assert main(["selfcheck", str(model), "--only", "batch", "--text", str(tmp_path / "short.txt")]) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(ls.UserError, match="does not know"):
        checked(outspoken(), "batch", text=np.full(200, 600))


def test_progress_counts_up_and_the_threads_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, told = torch.get_num_threads(), list[object]()
    monkeypatch.setattr("loopscope.checks.machine_checks._faster_threads", lambda *given: threads + 1)

    def seen(*given: object) -> list[Check]:
        told.append(torch.get_num_threads())
        return []

    monkeypatch.setitem(MACHINE_CHECKS, "batch", seen)
    kinds: list[CheckKind] = ["precision", "batch", "cache"]
    checked(tiny_ouro(), *kinds, progress=lambda done, total, note: told.append((done, total)))
    assert told == [(1, 5), threads + 1, (2, 5), (3, 5), (4, 5), (5, 5)]
    assert torch.get_num_threads() == threads
