"""Recipes: does the text for the small Ouro leave out what will be scored? Does a profile see writing alone?"""

import importlib.util
import json
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest
import torch
from conftest import tiny_language_run
from tiny_language import tiny_ouro

import loopscope as ls
from loopscope.engine.decoder import Decoder
from loopscope.engine.generation import Token, stream
from loopscope.models.decoder_layers import Linear
from loopscope.training.training_loop import train_run


def loaded(name: str) -> ModuleType:
    path = Path(__file__).parents[1] / "recipes" / name
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def recipe() -> ModuleType:
    pytest.importorskip("pyarrow")
    return loaded("small_ouro/make_text.py")


def test_prompts_are_not_in_a_profile_of_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ten rows, with tokens of different depths, which is more rows than a stream takes by itself."""
    recipe, model = loaded("real_size/generation.py"), tiny_ouro()
    prompts, policy = recipe.texts(model, 10, 5, 4), recipe.margin_for(model, 2.0)
    taken: list[int] = []
    written: list[int] = []
    prefill = Decoder.prefill
    monkeypatch.setattr(
        Decoder, "prefill", lambda self, row, *given, **more: (taken.append(row), prefill(self, row, *given, **more))
    )
    monkeypatch.setattr(recipe, "stream", lambda *given, **more: noted(stream(*given, **more)))

    def noted(tokens: Iterator[Token]) -> Iterator[Token]:
        for token in tokens:
            written.append(token.key)
            yield token

    @contextmanager
    def observed() -> Iterator[None]:
        assert set(written) == set(range(10))
        assert len(written) > 10  # a shallow row has several before a deep one has its first
        yield
        assert sorted(taken) == list(range(10))  # all at once

    count, seconds = recipe.written(model, prompts, policy, observed())
    assert 0 < count <= 30
    assert seconds > 0
    options = Namespace(loops=2.0, context=[6], batch_size=2, new=3)
    (found,) = recipe.profiled(model, options)
    assert found["milliseconds_a_token"] > 0
    assert 0.8 < sum(found["shares"].values()) < 1.2


def test_both_linear_layers_are_timed_and_ours_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, ours, used = loaded("real_size/generation.py"), Linear.forward, []
    step = type(model := tiny_ouro()).step
    monkeypatch.setattr(type(model), "step", lambda self, state: (used.append(Linear.forward), step(self, state))[1])
    found = recipe.by_tokens(model, Namespace(rounds=2))
    assert [each["tokens"] for each in found] == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32]
    assert all(len(each) == 7 and min(each.values()) > 0 for each in found)
    assert used.count(ours) == 2 * len(used) // 3 == 6 * len(found)
    assert Linear.forward is ours


def test_what_is_scored_is_left_out(recipe: ModuleType, tmp_path: Path) -> None:
    rows = {
        "arc/test.jsonl": {"question": "Why is the sky so blue?"},
        "openbookqa/test.jsonl": {"question_stem": "Frogs eat"},
        "hellaswag/validation.jsonl": {
            "ctx": "x",
            "source_id": "v1",
            "endings": ["a", "he cuts the long red rope"],
            "label": "1",
        },
        "mmlu/anatomy/test.jsonl": {"question": "?", "subject": "anatomy"},
    }
    for name, row in rows.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(json.dumps(row) + "\n")
    excluded, document = recipe.Excluded(tmp_path), recipe.Document
    left_out = [
        recipe.asked("why is the SKY so blue", "because"),
        document("", "A man asks: why is the sky so blue? Nobody knows."),
        document("frogs eat", "Frogs eat flies."),
        document("", "Then he cuts the long, red rope."),
        document("a question", "a text", "v1"),
        document("a question", "a text", "anatomy"),
    ]
    kept = [
        recipe.asked("Why is the sky so green?", "it is not"),
        document("what do they eat", "All frogs eat flies."),
        document("a question", "a text", "v2"),
    ]
    assert [each in excluded for each in left_out] == [True] * len(left_out)
    assert [each in excluded for each in kept] == [False] * len(kept)


def test_questions_are_asked_as_lm_eval_asks_them(recipe: ModuleType) -> None:
    assert recipe.asked("Why?", "So.", "It is.").text == "It is.\nQuestion: Why?\nAnswer: So."
    assert recipe.chosen("Which?", ["this", "that"], 1) == "Which?\nA. this\nB. that\nAnswer: B"


@pytest.mark.long
def test_fine_tuning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """From its texts to an exit policy, and once more: it goes on where it was."""
    run = tiny_language_run(tmp_path, "model.max_position_embeddings=128")
    train_run(run, torch.device("cpu"))
    monkeypatch.setattr(sys, "argv", ["make_sums", "--out", str(tmp_path / "sums")])
    loaded("fine_tuning/make_sums.py").main()
    words = [str(run.folder), "--texts", str(tmp_path / "sums"), "--out", str(tmp_path / "tuned"), "--max-drop", "0.2"]
    printed = []
    for _ in range(2):
        monkeypatch.setattr(sys, "argv", ["fine_tune", *words, "--steps", "40"])
        capsys.readouterr()
        loaded("fine_tuning/fine_tune.py").main()
        printed.append([line for line in capsys.readouterr().out.splitlines() if not line.startswith("{")])
    assert printed[0] == printed[1]
    assert printed[0][0].startswith("before: next tokens of the test text")
    policy = ls.ExitPolicy.load(tmp_path / "tuned" / "policy.json")
    assert policy.model == ls.load_model(tmp_path / "tuned" / "model").weights_sha256
