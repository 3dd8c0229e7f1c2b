"""How are a few tokens multiplied with a large matrix on a CPU? The other way round.

A linear layer of PyTorch computes x W^T. For one token that is a product with a vector, which the library's kernel runs
on one thread; for two to about a dozen it packs the whole matrix first, every time, which takes longer than to read it.
The product W x^T of at least two columns does neither. It is the same sum of the same products up to rounding.

Shapes: M tokens, K inputs, N outputs.
"""

import torch
from torch import Tensor, nn

_MOST = 64
"""Tokens up to which the other way round was measured and, around a dozen excepted, the faster one: docs/decisions.md
says where."""
_MOST_ON_ONE_THREAD = 3


class Linear(nn.Linear):
    """nn.Linear, also for few tokens; in training, and where it is compiled, just that."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., K] -> [..., N]"""
        if torch.compiler.is_compiling() or self.training or torch.is_grad_enabled() or not self._few(input):
            return super().forward(input)
        columns = (input.contiguous() if len(input) > 1 else torch.cat((input, input))).t()
        if self.bias is None:
            product = torch.mm(self.weight, columns)
        else:
            product = torch.addmm(self.bias[:, None], self.weight, columns)
        return product[:, : len(input)].t().contiguous()  # so that the next one can turn it round again

    def _few(self, input: Tensor) -> bool:
        """Whether these are few tokens [M, K] on a CPU in single precision; others have kernels of their own."""
        if input.dim() != 2 or input.device.type != "cpu" or not input.dtype == self.weight.dtype == torch.float32:
            return False
        return 0 < len(input) <= (_MOST if torch.get_num_threads() > 1 else _MOST_ON_ONE_THREAD)
