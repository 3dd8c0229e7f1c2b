"""Halting gates: how does a model turn its pooled state into a halt logit?"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from loopscope.models.configuration import GateKind


class Gate(nn.Module):
    """A linear projection, or a two-layer network as wide as the model, to one halt logit."""

    def __init__(self, kind: Literal["linear", "mlp"], width: int) -> None:
        super().__init__()
        self.net: nn.Module = nn.Linear(width, 1)
        if kind == "mlp":
            self.net = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1))

    @staticmethod
    def tensors(kind: GateKind, prefix: str = "") -> dict[str, str]:
        """The names of its tensors by part: `weight` and `bias`, with `_1` those of the hidden layer."""
        if kind == "mlp":
            parts = {"weight_1": "net.0.weight", "bias_1": "net.0.bias", "weight": "net.2.weight", "bias": "net.2.bias"}
        else:
            parts = {} if kind == "none" else {"weight": "net.weight", "bias": "net.bias"}
        return {part: prefix + name for part, name in parts.items()}

    def forward(self, pooled: Tensor) -> Tensor:
        """In float32 at least: in bf16 the exit distribution would round to 1 too early."""
        wide = torch.promote_types(pooled.dtype, torch.float32)
        parameters = {name: value.to(wide) for name, value in self.net.named_parameters()}
        with torch.autocast(pooled.device.type, enabled=False):
            logit: Tensor = functional_call(self.net, parameters, pooled.to(wide)).squeeze(-1)
        return logit


def linear_halt(gate: nn.Linear, pooled: Tensor) -> Tensor:
    """Halt logits [...] of a language model's gate; in float32 whatever the precision, for the same reason.

    One with an adapter around it is more than its weights, and computes in the precision of these.
    """
    if hasattr(gate, "base_layer"):
        adapted: Tensor = gate(pooled.to(gate.weight.dtype))
        return adapted.float().squeeze(-1)
    with torch.autocast(pooled.device.type, enabled=False):
        return F.linear(pooled.float(), gate.weight.float(), gate.bias.float()).squeeze(-1)
