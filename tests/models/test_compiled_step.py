"""Is a loop one graph? Of every architecture, for packed rows of unequal lengths and rows that append to a KV cache."""

import copy
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch
from conftest import GOLDEN
from tiny_language import MODELS, tiny_ouro
from torch._dynamo.testing import CompileCounterWithBackend

import loopscope as ls
from loopscope.engine.generation import Prompt, generate
from loopscope.models.linear import pack_weights, quantise_weights
from loopscope.models.looped_model import LoopedModel

LENGTHS = (7, 3, 3, 5)


def packed_ouro() -> LoopedModel:
    model = tiny_ouro()
    assert pack_weights(model, measure=False)
    return model


def int8_ouro() -> LoopedModel:
    model = tiny_ouro()
    quantise_weights(model)
    return model


COMPILED: dict[str, Callable[[], LoopedModel]] = {
    **MODELS,
    "huginn": lambda: ls.load_model(GOLDEN / "huginn-tiny"),
    "packed": packed_ouro,
    "int8": int8_ouro,
}


@pytest.fixture(autouse=True)
def forgotten() -> None:
    """What PyTorch has compiled for another test, and how often."""
    torch.compiler.reset()


def said(model: LoopedModel) -> list[torch.Tensor]:
    """Logits of packed rows, and of text with its cache, whose rows exit at different loops."""
    draw = np.random.default_rng(0)
    rows = torch.from_numpy(draw.integers(0, model.vocab_size, (len(LENGTHS), max(LENGTHS))))
    with torch.inference_mode():
        logits = model.loops(rows, torch.tensor(LENGTHS)).logits
    prompts = [Prompt(key, row[:length].numpy()) for key, (row, length) in enumerate(zip(rows, LENGTHS, strict=True))]
    texts = generate(model, prompts, ls.ExitPolicy("margin", 0.1), max_new_tokens=4, batch_size=3)
    assert len({loops for text in texts for loops in text.loops}) > 1
    return [logits, *(torch.tensor([text.tokens, text.loops]) for text in texts)]


def check(model: LoopedModel, backend: str) -> CompileCounterWithBackend:
    expected, counter = said(model), CompileCounterWithBackend(backend)
    model.compile(backend=counter)
    for ours, theirs in zip(said(model), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    return counter


@pytest.mark.parametrize("name", COMPILED)
def test_a_step_is_one_graph(name: str) -> None:
    """For any number of rows and tokens; one row, and one token, have a graph of their own."""
    assert 1 <= check(COMPILED[name](), "aot_eager").frame_count <= 5


@pytest.mark.long
@pytest.mark.parametrize("name", COMPILED)
def test_a_step_compiled_by_inductor(name: str) -> None:
    check(COMPILED[name](), "inductor")


def test_a_copy_is_not_compiled() -> None:
    model = packed_ouro()
    model.compile(backend="eager")
    for same in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert "step" in vars(model)
        assert "step" not in vars(same)
        for ours, theirs in zip(said(same), said(model), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_what_cannot_be_compiled_is_explained() -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("the compiler has no such file")

    model = tiny_ouro()
    model.compile(backend=broken)
    with pytest.raises(ls.UserError, match="cannot be compiled here.*no such file.*without --compile"):
        said(model)
