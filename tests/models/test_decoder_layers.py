"""The product of few tokens with a large matrix is PyTorch's, whichever way round it is computed."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from loopscope.models.decoder_layers import Linear


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
