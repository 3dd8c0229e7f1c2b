"""What does training minimise? Per-loop cross-entropies, weighted over depth by a fixed prior or by a learned gate.

- final: the last loop only;
- fixed_prior: sum_t pi_t l_t, the same weights for every example;
- learned_gate: sum_t q_t(x) l_t + beta KL(q(x) || pi), where q is the gate's exit distribution.

Shapes: T loops, B rows. Everything about q is computed in log space and in float32 or wider.
"""

from typing import Annotated, Literal

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor

from loopscope.config import NonNegative, Settings

_FLOOR = -1e4
"""Log-probabilities below this are held there: exp of it is 0, and 0 times it is 0, where 0 times -inf is not."""


class Objective(Settings, frozen=True, kw_only=True):
    name: Literal["final", "fixed_prior", "learned_gate"] = "fixed_prior"
    prior: Literal["uniform", "geometric"] = "geometric"
    geometric_lambda: Annotated[float, msgspec.Meta(gt=0, lt=1)] = 0.3
    beta: NonNegative = 0.1

    def depth_prior(self, loops: int) -> Tensor:
        """pi [T] in float64; for `final` all weight lies on the last loop."""
        if self.name == "final":
            return F.one_hot(torch.tensor(loops - 1), loops).double()
        return uniform_prior(loops) if self.prior == "uniform" else geometric_prior(self.geometric_lambda, loops)

    def loss(self, losses: Tensor, gate_logits: Tensor | None) -> Tensor:
        """The mean objective of a batch from its cross-entropies [T, B] and halt logits [T, B]."""
        prior = self.depth_prior(len(losses))
        if self.name != "learned_gate":
            return expected_loss(losses, prior[:, None].to(losses)).mean()
        assert gate_logits is not None, "a learned-gate objective needs a model with a gate"
        log_q = log_exit_distribution(gate_logits.float())
        penalty = depth_kl(log_q, prior.log()[:, None].to(log_q))
        return (expected_loss(losses, log_q.exp()) + self.beta * penalty).mean()


def uniform_prior(loops: int) -> Tensor:
    return torch.full((loops,), 1.0 / loops, dtype=torch.float64)


def geometric_prior(lam: float, loops: int) -> Tensor:
    """lam (1 - lam)^(t-1), truncated: the last loop takes all that is left."""
    survival = (1.0 - lam) ** torch.arange(loops, dtype=torch.float64)
    return torch.cat((lam * survival[:-1], survival[-1:]))


def log_exit_distribution(gate_logits: Tensor) -> Tensor:
    """log q [T, B]: exit at t with probability sigmoid(g_t) if not before; the last loop takes all that is left."""
    log_continue = F.logsigmoid(-gate_logits[:-1])
    reached = [torch.zeros_like(gate_logits[0])]  # a running sum: cumsum on CUDA is not deterministic
    for step in log_continue:
        reached.append(reached[-1] + step)
    exit_here = torch.cat((F.logsigmoid(gate_logits[:-1]), torch.zeros_like(gate_logits[:1])))
    return (torch.stack(reached) + exit_here).clamp(min=_FLOOR)


def expected_loss(losses: Tensor, weights: Tensor) -> Tensor:
    """[B] the losses [T, B] averaged over depth."""
    return (weights * losses).sum(dim=0)


def depth_kl(log_q: Tensor, log_prior: Tensor) -> Tensor:
    """[B] KL(q || prior) over depth."""
    return (log_q.exp() * (log_q - log_prior)).sum(dim=0)
