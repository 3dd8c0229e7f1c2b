"""The product of few tokens with a large matrix is PyTorch's, whichever way round it is computed."""

import copy
import pickle
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tiny_language import tiny_ouro, write_ouro
from torch import Tensor

import loopscope as ls
from loopscope.models import linear
from loopscope.models.linear import Linear, pack_weights


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> int:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("bias", [False, True])
def test_few_tokens_are_multiplied_as_many_are(threads: int, bias: bool) -> None:
    torch.manual_seed(0)
    layer = Linear(96, 200, bias=bias).eval()
    with torch.inference_mode():
        for count in (0, 1, 2, 3, 4, 7, 9, 16, 17, 64, 65):
            for rows in (torch.randn(count, 96), torch.randn(96, count).t()):  # also as a turned product leaves them
                out = layer(rows)
                assert out.is_contiguous()
                torch.testing.assert_close(out, F.linear(rows, layer.weight, layer.bias), rtol=1e-5, atol=1e-5)


@pytest.fixture
def turned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The columns of every product that is computed the other way round."""
    found: list[int] = []

    def counted(weight: Tensor, columns: Tensor) -> Tensor:
        found.append(columns.shape[1])
        return weight @ columns

    monkeypatch.setattr(torch, "mm", counted)
    return found


def test_only_few_tokens_on_a_cpu_go_the_other_way_round(turned: list[int], threads: int) -> None:
    layer = Linear(8, 8, bias=False).eval()
    with torch.inference_mode():
        for count in (1, 2, 3, 4, 8, 9, 17, 64, 65):
            layer(torch.randn(count, 8))
        assert turned == ([2, 2, 3] if threads == 1 else [2, 2, 3, 4, 8, 16, 24, 64])
        layer(torch.randn(1, 2, 8))
        layer.bfloat16()(torch.randn(2, 8, dtype=torch.bfloat16))
        assert len(turned) == (3 if threads == 1 else 8)
        layer.float().train()(torch.randn(2, 8))  # what training runs without gradients keeps its bits
    layer = Linear(8, 8, bias=False).eval()
    layer(torch.randn(2, 8)).sum().backward()  # gradients go PyTorch's way
    assert len(turned) == (3 if threads == 1 else 8)


@pytest.mark.parametrize(
    ("count", "shape", "tokens", "columns"),
    [
        (2, (1024, 64), (5, 6, 8, 9), [5, 16, 16, 16]),
        (2, (1024, 8192), (5, 6, 8, 9), [5, 6, 8, 16]),  # the matrix of a vocabulary is much taller than wide
        (1, (1024, 8), (1, 2), [2, 2]),
        (1, (2048, 8), (1, 2), [2]),  # one thread multiplies one token with a wide matrix as PyTorch does
    ],
)
def test_wide_matrices_are_filled_up_to_sixteen_columns(
    turned: list[int],
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    shape: tuple[int, int],
    tokens: tuple[int, ...],
    columns: list[int],
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: count)
    layer = Linear(*shape, bias=False).eval()
    with torch.inference_mode():
        for each in tokens:
            rows = torch.randn(each, shape[0])
            torch.testing.assert_close(layer(rows), F.linear(rows, layer.weight), rtol=1e-4, atol=1e-4)
    assert turned == columns


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_packed_weights_multiply_as_plain_ones_do(bias: bool, dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this processor has no bfloat16")
    torch.manual_seed(0)
    layer = Linear(96, 200, bias=bias).eval().to(dtype).requires_grad_(False)
    plain, near = layer.weight, 1e-5 if dtype == torch.float32 else 5e-2
    layer.pack()
    assert layer.is_packed
    for count in (0, 1, 2, 3, 4, 7, 9, 64, 300):
        for rows in (torch.randn(count, 96, dtype=dtype), torch.randn(96, count, dtype=dtype).t()):
            torch.testing.assert_close(layer(rows), F.linear(rows, plain, layer.bias), rtol=near, atol=near)
    rows = torch.randn(2, 5, 96, dtype=dtype)
    torch.testing.assert_close(layer(rows), F.linear(rows, plain, layer.bias), rtol=near, atol=near)
    layer.unpack()
    assert torch.equal(layer.weight, plain)


def test_a_packed_model_is_the_same_model() -> None:
    """Its tensors, hash, copies and pickles, and what it says up to rounding; the plain matrices are gone."""
    model = tiny_ouro(num_hidden_layers=2)
    stored = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    sha256, rows = model.weights_sha256, torch.arange(12).view(2, 6)
    with torch.inference_mode():
        said = model.loops(rows).logits
    assert pack_weights(model, measure=False) == 2 * 7 + 1
    assert all(layer.weight.is_mkldnn for layer in model.modules() if isinstance(layer, Linear))
    assert model.weights_sha256 == sha256
    assert model.is_identified
    for same in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert same.state_dict().keys() == stored.keys()
        assert all(torch.equal(tensor, stored[name]) for name, tensor in same.state_dict().items())
        with torch.inference_mode():
            torch.testing.assert_close(same.loops(rows).logits, said, rtol=1e-4, atol=1e-4)
    model.load_state_dict({name: 2 * tensor for name, tensor in stored.items()})
    assert model.weights_sha256 != sha256
    assert torch.equal(model.lm_head.weight, 2 * stored["lm_head.weight"])
    pack_weights(model, measure=False)
    assert model.double().lm_head.weight.dtype == torch.float64


def test_a_packed_model_is_not_trained() -> None:
    model = tiny_ouro()
    pack_weights(model, measure=False)
    with pytest.raises(ls.UserError, match="pack=False"):
        model.train()
    model.requires_grad_(True)
    with pytest.raises(ls.UserError, match="packed for inference"):
        model.loops(torch.arange(4)[None])


def test_a_matrix_that_is_also_the_embedding_stays_plain() -> None:
    tied = tiny_ouro(tie_word_embeddings=True)
    pack_weights(tied, measure=False)
    assert not tied.lm_head.is_packed
    assert tied.model.layers[0].mlp.up_proj.is_packed


def test_what_is_not_faster_stays_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a measurement on this machine, once for a shape; small matrices are not even measured."""
    measured = []

    def share(layer: Linear, plain: torch.nn.Parameter) -> float:
        assert layer.is_packed
        measured.append(tuple(plain.shape))
        return 0.5 if plain.shape[0] == 48 else 0.99

    monkeypatch.setattr(linear, "_time_share", share)
    monkeypatch.setattr(linear, "_faster", {})
    assert pack_weights(tiny_ouro(num_hidden_layers=2)) == 0
    assert not measured
    monkeypatch.setattr(linear, "MIN_PACKED", 1)
    model = tiny_ouro(num_hidden_layers=2)
    kept = model.lm_head.weight
    assert pack_weights(model) == 4  # gate_proj and up_proj of both layers
    assert sorted(measured) == [(32, 32), (32, 48), (48, 32), (50, 32)]
    assert model.lm_head.weight is kept


def test_both_ways_are_timed() -> None:
    layer = Linear(64, 64, bias=False).eval().requires_grad_(False)
    plain = layer.weight
    layer.pack()
    with torch.no_grad():
        assert linear._time_share(layer, plain) > 0
    assert layer.is_packed


def test_a_checkpoint_is_loaded_packed_or_plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "MIN_PACKED", 1)
    monkeypatch.setattr(linear, "_time_share", lambda *_: 0.5)
    monkeypatch.setattr(linear, "_faster", {})
    folder = write_ouro(tmp_path / "ouro")
    packed, plain = ls.load_model(folder), ls.load_model(folder, pack=False)
    assert packed.lm_head.is_packed
    assert not plain.lm_head.is_packed
    assert packed.weights_sha256 == plain.weights_sha256
    assert packed.is_identified
