"""How are a few tokens multiplied with a large matrix on a CPU? The other way round.

A linear layer of PyTorch computes x W^T. For one token that is a product with a vector, which the library's kernel runs
on one thread; for two to about a dozen it packs the whole matrix first, every time, which takes longer than to read it.
The product W x^T of at least two columns does neither. It is the same sum of the same products up to rounding.

Shapes: M tokens, K inputs, N outputs.
"""

import torch
from torch import Tensor, nn

_MOST = 64
"""Tokens up to which the other way round is the faster one (of those that were measured: docs/performance.md)."""
_MOST_ON_ONE_THREAD = 3


class Linear(nn.Linear):
    """nn.Linear, also for few tokens."""

    def forward(self, rows: Tensor) -> Tensor:
        """[..., K] -> [..., N]"""
        if torch.is_grad_enabled() or not _few(rows) or rows.dtype != self.weight.dtype:
            return super().forward(rows)
        columns = (rows.contiguous() if len(rows) > 1 else torch.cat((rows, rows))).t()
        if self.bias is None:
            product = torch.mm(self.weight, columns)
        else:
            product = torch.addmm(self.bias[:, None], self.weight, columns)
        return product[:, : len(rows)].t().contiguous()  # so that the next one can turn it round again


def _few(rows: Tensor) -> bool:
    """Whether these are few tokens [M, K] on a CPU in single precision; others have kernels of their own."""
    if rows.dim() != 2 or rows.dtype != torch.float32 or rows.device.type != "cpu":
        return False
    return 0 < len(rows) <= (_MOST if torch.get_num_threads() > 1 else _MOST_ON_ONE_THREAD)
