"""Halting gates: how does a model turn its pooled state into a halt logit?"""

from typing import Literal

from torch import Tensor, nn

GateKind = Literal["none", "linear", "mlp"]


class Gate(nn.Module):
    """A linear projection, or a two-layer network as wide as the model, to one halt logit."""

    def __init__(self, kind: Literal["linear", "mlp"], width: int) -> None:
        super().__init__()
        self.net: nn.Module = nn.Linear(width, 1)
        if kind == "mlp":
            self.net = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1))

    def forward(self, pooled: Tensor) -> Tensor:
        logit: Tensor = self.net(pooled).squeeze(-1)
        return logit
