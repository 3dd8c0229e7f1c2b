"""How are a few tokens multiplied with a large matrix on a CPU? The other way round.

A linear layer of PyTorch computes x W^T. For one token that is a product with a vector, which the library's kernel runs
on one thread; for two to about a dozen it packs the whole matrix first, every time, which takes longer than to read it.
The product W x^T of at least two columns does neither. It is the same sum of the same products up to rounding. Some
numbers of columns take up to twice as long as the next multiple of eight, so tokens are filled up to that.

Shapes: M tokens, K inputs, N outputs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_MOST = 64
"""Tokens up to which the other way round was measured and, but for small matrices, faster: docs/decisions.md says
where."""
_MOST_ON_ONE_THREAD = 3
_WIDE = 1024
"""Inputs from which on sixteen columns take less time than six to eight, of a matrix that is not much taller; from
twice as many on, one thread is faster at a product with a vector."""


class Linear(nn.Linear):
    """nn.Linear, also for few tokens; in training, and where it is compiled, just that."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., K] -> [..., N]"""
        if torch.compiler.is_compiling() or self.training or torch.is_grad_enabled() or not self._few(input):
            return super().forward(input)
        columns = self._filled_up(input).t()
        if self.bias is None:
            product = torch.mm(self.weight, columns)
        else:
            product = torch.addmm(self.bias[:, None], self.weight, columns)
        return product[:, : len(input)].t().contiguous()  # so that the next one can turn it round again

    def _filled_up(self, input: Tensor) -> Tensor:
        """[.., K] with rows of anything after these, as many as make the product faster."""
        tokens = len(input)
        if tokens == 1:
            return torch.cat((input, input))
        if tokens > 8:
            missing = -tokens % 8
        else:
            wide = self.in_features >= _WIDE and self.out_features <= 4 * self.in_features
            missing = 16 - tokens if tokens > 5 and wide else 0
        return F.pad(input, (0, 0, 0, missing)) if missing else input.contiguous()

    def _few(self, input: Tensor) -> bool:
        """Whether these are few tokens [M, K] on a CPU in single precision; others have kernels of their own."""
        if input.dim() != 2 or input.device.type != "cpu" or not input.dtype == self.weight.dtype == torch.float32:
            return False
        if torch.get_num_threads() == 1:
            return (1 if self.in_features < 2 * _WIDE else 2) <= len(input) <= _MOST_ON_ONE_THREAD
        return 0 < len(input) <= _MOST
