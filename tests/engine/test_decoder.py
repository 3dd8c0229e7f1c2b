"""What does a token cost after a long text? What attention reads, and no copies of the cache; prompts run in parts."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from tiny_language import MODELS, draft_at, tiny_ouro
from torch.utils._python_dispatch import TorchDispatchMode

import loopscope as ls
from loopscope.engine import decoder
from loopscope.engine.decoder import Decoder
from loopscope.engine.draft_spacing import Spacing
from loopscope.engine.generation import Prompt, generate
from loopscope.models import attention, kv_cache
from loopscope.models.kv_cache import KVCache
from loopscope.models.looped_model import LoopedModel, LoopState

FULL = ls.ExitPolicy("margin", 1e9)  # asked at every loop


class Written(TorchDispatchMode):
    """Numbers that operations write, by their names; views write none."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs = {each.untyped_storage().data_ptr() for each in args if isinstance(each, torch.Tensor)}
        if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() not in inputs:
            self.numbers[str(func)] += out.numel()
        return out


def model() -> LoopedModel:
    return tiny_ouro(num_hidden_layers=2, max_position_embeddings=8192, num_key_value_heads=2)


def written_by_a_token(context: int, rows: int) -> int:
    """By all loops of one token of every row after so many, those of masks left out: a mask has no width."""
    texts = Decoder(model(), rows, "full")
    for row in range(rows):
        texts.prefill(row, np.arange(context + 8 * row) % 50, FULL)
    for _ in range(4):
        texts.step()
    for some in ([0, 2], [1, 3]) if rows == 4 else ([0],):  # at loops of their own, without their neighbours
        texts.append(some, [1] * len(some))
        texts.step()
    with Written() as written:
        for _ in range(4):
            exits = texts.step()
            for row in exits.rows.tolist():
                texts.append([row], [1])
    masks = ("le", "gt", "masked_fill", "zeros", "arange")
    return sum(count for name, count in written.numbers.items() if name.split(".")[1] not in masks)


@pytest.mark.parametrize("rows", [1, 4])
def test_what_a_token_writes_does_not_grow_with_its_context(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "MAX_GATHERED_ON_CPU", 0)
    short, long = (written_by_a_token(context, rows) for context in (100, 600))
    assert short == long
    monkeypatch.setattr(attention, "MAX_GATHERED_ON_CPU", 1 << 30)
    copied = written_by_a_token(600, rows)
    assert copied == long if rows == 1 else copied > 5 * long  # the measure sees copies


@pytest.mark.parametrize("name", ["ouro", "coda", "looped llama"])
def test_rows_are_the_same_copied_and_where_they_are(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(0)
    prompts = [Prompt(key, draw.integers(0, 50, length)) for key, length in enumerate((3, 40, 9, 80, 11))]
    texts = []
    for few in (0, 1 << 30):
        monkeypatch.setattr(attention, "MAX_GATHERED_ON_CPU", few)
        found = generate(MODELS[name](), prompts, ls.ExitPolicy("top1", 0.075), max_new_tokens=8, batch_size=4)
        texts.append([(each.tokens, each.loops) for each in found])
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("name", "cache"), [("ouro", "latest"), ("coda", "full"), ("coda", "latest"), ("looped llama", "propagate")]
)
def test_long_prompts_run_in_parts(name: str, cache: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of so many tokens at most, in the loops and in a head that attends; the text is the same."""
    model, draw, most = MODELS[name](), np.random.default_rng(0), []
    prompts = [Prompt(key, draw.integers(0, 50, length)) for key, length in enumerate((3, 70, 33, 16))]
    step, head = model.step, model.head_input

    def counted(call: Any) -> Any:
        def counting(state: LoopState, *given: Any) -> Any:
            most.append(len(state.hidden))
            return call(state, *given)

        return counting

    monkeypatch.setattr(model, "step", counted(step))
    monkeypatch.setattr(model, "head_input", counted(head))
    texts = []
    for chunk in (1024, 16):
        monkeypatch.setattr(decoder, "_CHUNK", chunk)
        texts.append([])
        for policy in (ls.ExitPolicy("top1", 0.075), None, ls.ExitPolicy("fixed", 2)):
            most.clear()
            found = generate(model, prompts, policy, max_new_tokens=6, cache=cache, batch_size=3)
            assert max(most) <= max(chunk, 3)
            texts[-1] += [(each.tokens, each.loops) for each in found]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("lossless", [False, True])
def test_a_text_is_not_copied_as_it_grows(lossless: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for all of it is made when it begins; what is copied is the prompt's, when deeper loops are first run."""
    copied: list[int] = []
    grown = KVCache._grown

    def counted(self: KVCache, stored: torch.Tensor, *given: int) -> torch.Tensor:
        copied.append(stored.numel())
        return grown(self, stored, *given)

    monkeypatch.setattr(KVCache, "_grown", counted)
    draft_at(Spacing(1), monkeypatch)
    prompts = [Prompt(key, np.arange(5 + key)) for key in range(2)]
    counts = []
    for new in (20, 400):
        copied.clear()
        texts = generate(model(), prompts, ls.ExitPolicy("fixed", 3), max_new_tokens=new, lossless=lossless)
        assert [len(text.tokens) for text in texts] == [new] * 2
        counts.append(len(copied))
    assert counts[0] == counts[1]


def test_room_beyond_what_is_reserved_is_made_when_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = []
    for reserved in (0, 4096):
        monkeypatch.setattr(kv_cache, "MAX_RESERVED", reserved)
        texts.append(generate(model(), [Prompt(0, np.arange(30))], ls.ExitPolicy("top1", 0.075), max_new_tokens=150))
    assert texts[0][0].tokens == texts[1][0].tokens
