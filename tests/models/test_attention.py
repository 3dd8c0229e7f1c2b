"""Branches, prefixes and the KV cache: are the states those of plain rows, whatever else is in the batch?"""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from tiny_language import MODELS, VOCABULARY
from torch import Tensor

from loopscope.models import attention
from loopscope.models.attention import Rotary, causal_attention
from loopscope.models.kv_cache import AppendingRows, KVCache, SharedPrefix
from loopscope.models.looped_model import LoopedModel, LoopState
from loopscope.models.packing import Layout

CPU = torch.device("cpu")
Tokens = NDArray[np.int64]
Asked = tuple[Tokens, list[Tokens]]  # a context and its choices
Said = tuple[Tensor, Tensor]  # pooled states [T, P, D] and logits [T, P, V]


@pytest.fixture(params=["products", "fused kernels"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """As a CPU attends to short rows, and as every other device does."""
    if request.param == "fused kernels":
        monkeypatch.setattr(attention, "takes_fused_kernels", lambda device: True)
        monkeypatch.setattr(attention, "_short_attention", None)
    chosen: str = request.param
    return chosen


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> LoopedModel:
    return MODELS[request.param]()


def some(*lengths: int, seed: int = 0) -> list[Tokens]:
    rng = np.random.default_rng([seed, *lengths])
    return [rng.integers(0, VOCABULARY, length) for length in lengths]


def questions() -> list[Asked]:
    """Short and long ones (there are two kernels), of three, three, four and two choices."""
    shapes = ((40, (3, 5, 2)), (90, (1, 7, 4)), (38, (2, 2, 2, 6)), (1, (1, 1)))
    return [(some(context)[0], some(*lengths, seed=context)) for context, lengths in shapes]


def laid_out(asked: Sequence[Asked], cache: SharedPrefix | None = None) -> tuple[Tensor, Layout]:
    most = max(len(choices) for _, choices in asked)
    counts = [[len(choice) for choice in choices] for _, choices in asked]
    lengths = [len(context) + sum(each) for (context, _), each in zip(asked, counts, strict=True)]
    branches = np.array([each + [0] * (most - len(each)) for each in counts])
    tokens = np.concatenate([np.concatenate((context, *choices)) for context, choices in asked])
    return torch.from_numpy(tokens), Layout(np.array(lengths), CPU, branches, cache)


def said(model: LoopedModel, row: Tokens, start: int = 0) -> Said:
    """What the model says of a plain row, from this token on."""
    out = model.loops(torch.from_numpy(row)[None])
    return out.hidden[:, 0, start:], out.logits[:, 0, start:]


def plainly(model: LoopedModel, asked: Sequence[Asked], before: Sequence[Tokens] | None = None) -> Said:
    """The same of every choice in a row of its own, in the order of the layout."""
    parts: list[Said] = []
    for prefix, (context, choices) in zip(before or [np.empty(0, np.int64)] * len(asked), asked, strict=True):
        start = len(prefix) + len(context)
        parts.append(said(model, np.concatenate((prefix, context)), len(prefix)))
        parts += [said(model, np.concatenate((prefix, context, choice)), start) for choice in choices]
    hidden, logits = (torch.cat(values, dim=1) for values in zip(*parts, strict=True))
    return hidden, logits


def check(model: LoopedModel, state: LoopState, expected: Said, loop: int) -> None:
    pooled, logits = model.pooled(state), model.predict(model.head_input(state))
    assert torch.allclose(pooled, expected[0][loop - 1], atol=2e-5)
    assert torch.allclose(logits, expected[1][loop - 1], atol=5e-5)


@torch.inference_mode()
def test_every_choice_is_a_row_of_its_own(model: LoopedModel) -> None:
    state, expected = model.begin_packed(*laid_out(questions())), plainly(model, questions())
    for loop in range(1, model.num_loops + 1):
        state = model.step(state)
        check(model, state, expected, loop)


@torch.inference_mode()
def test_branched_rows_are_taken_and_joined(model: LoopedModel) -> None:
    """Rows with more choices join, at another loop, and rows are left out."""
    asked = questions()
    early = model.step(model.begin_packed(*laid_out(asked[:2]))).take(torch.tensor([1]))
    late = model.begin_packed(*laid_out(asked[2:]))
    joined = model.step(type(early).join([early, late]))
    assert joined.loop.tolist() == [2, 1, 1]
    for row, loop in ((0, 2), (1, 1), (2, 1)):
        alone = joined.take(torch.tensor([row]))
        check(model, alone, plainly(model, [asked[row + 1]]), loop)
    last = model.step(joined.take(torch.tensor([2, 0])))
    check(model, last.take(torch.tensor([0])), plainly(model, asked[3:]), 2)
    check(model, last.take(torch.tensor([1])), plainly(model, asked[1:2]), 3)


def remembering(model: LoopedModel, text: Tokens) -> KVCache:
    """The keys and values of a text in every loop."""
    kv_cache, nothing = KVCache(1, len(text)), np.zeros(1, dtype=np.int64)
    caches = [AppendingRows(kv_cache, nothing, nothing, np.array([at_loop])) for at_loop in range(model.num_loops + 1)]
    state = model.begin_packed(torch.from_numpy(text), Layout(np.array([len(text)]), cache=caches[0]))
    for cache in caches[1:]:
        state = model.step(state.with_cache(cache))
        model.head_input(state)
    return kv_cache


@torch.inference_mode()
@pytest.mark.parametrize("branching", [True, False])
def test_after_a_text_that_was_read_before(model: LoopedModel, branching: bool) -> None:
    """Two texts and none in one batch; rows of one text are not beside each other, rows of one length are."""
    one, two, three, four = questions()
    asked = [one, three, two, four] if branching else [(context, []) for context, _ in (one, three, two, four)]
    texts = some(17, 70)
    memories = [*(remembering(model, text) for text in texts), None]
    whose = [0, 1, 2, 0]
    before = [*texts, np.empty(0, dtype=np.int64)]
    of_rows = np.empty(4, dtype=object)
    of_rows[:] = [memories[which] for which in whose]
    counts = np.array([len(before[which]) for which in whose])
    caches = [SharedPrefix(of_rows, counts, np.full(4, at_loop)) for at_loop in range(model.num_loops + 1)]
    if branching:
        tokens, layout = laid_out(asked, caches[0])
    else:
        tokens = torch.from_numpy(np.concatenate([context for context, _ in asked]))
        layout = Layout(np.array([len(context) for context, _ in asked]), cache=caches[0])
    state = model.begin_packed(tokens, layout)
    expected = plainly(model, asked, [before[which] for which in whose])
    for loop in range(1, model.num_loops + 1):
        state = model.step(state.with_cache(caches[loop]))
        check(model, state, expected, loop)
    taken = state.take(torch.tensor([3, 1]))
    rows = [asked[3], asked[1]]
    check(model, taken, plainly(model, rows, [before[0], before[1]]), model.num_loops)


def test_interleaved_positions_turn_neighbours() -> None:
    """Against complex numbers, one for each pair."""
    x = torch.randn(2, 3, 5, 8, generator=torch.Generator().manual_seed(0))
    rotated = Rotary(8, 50.0, interleaved=True).rotate(x)
    angles = torch.arange(5)[:, None] * 50.0 ** -(torch.arange(0, 8, 2) / 8)
    expected = torch.view_as_complex(x.view(2, 3, 5, 4, 2)) * torch.polar(torch.ones_like(angles), angles)
    assert torch.allclose(rotated, torch.view_as_real(expected).flatten(-2), atol=1e-6)
    rotary, positions = Rotary(8, 50.0, interleaved=True), torch.tensor([4, 1])
    there = rotary.apply_rotary(x[:, 0, 2], rotary.angles(positions, x.dtype, 5))
    again = rotary.rotate(x[:, :, 2:3].expand(-1, -1, 5, -1))[:, 0]
    assert torch.allclose(there, again[torch.arange(2), positions], atol=1e-6)


@pytest.mark.parametrize("key_heads", [4, 2])
def test_short_attention_equals_the_fused_kernel(key_heads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(3, 4, 10, 8, generator=generator)
    key, value = (torch.randn(3, key_heads, 10, 8, generator=generator) for _ in range(2))
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    assert torch.allclose(causal_attention(query, key, value), expected, atol=1e-6)
