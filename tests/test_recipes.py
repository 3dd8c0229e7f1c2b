"""Recipes: does the text for the small Ouro leave out what will be scored?"""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("pyarrow")


@pytest.fixture(scope="module")
def recipe() -> ModuleType:
    path = Path(__file__).parents[1] / "recipes" / "small_ouro" / "make_text.py"
    spec = importlib.util.spec_from_file_location("make_text", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
