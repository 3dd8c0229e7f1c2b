"""The plain way to write text, which ours is measured against: does it say the same?"""

import numpy as np
import pytest
from tiny_language import MODELS

import loopscope as ls
from loopscope.bench.text_timing import plain_text
from loopscope.engine.generation import Prompt, generate


@pytest.mark.parametrize("name", ["ouro", "grouped heads", "looped llama", "looped qwen"])
def test_it_says_what_full_depth_says(name: str) -> None:
    model, draw = MODELS[name](), np.random.default_rng(0)
    prompts = [Prompt(key, draw.integers(0, 50, length)) for key, length in enumerate((3, 9, 1, 9, 9))]
    whole = [text.tokens for text in generate(model, prompts, max_new_tokens=10)]
    for batch_size in (1, 2, 5):
        assert plain_text(model, prompts, 10, batch_size) == whole


def test_models_of_other_kinds_are_refused() -> None:
    with pytest.raises(ls.UserError, match="knows Ouro and looped Llamas, not WithCoda"):
        plain_text(MODELS["coda"](), [Prompt(0, np.array([1]))], 1, 1)
