"""What does training minimise? Per-loop cross-entropies, weighted over depth by a fixed prior or by a learned gate.

- final: the last loop only;
- fixed_prior: sum_t pi_t l_t, the same weights for every example;
- learned_gate: sum_t q_t(x) l_t + beta KL(q(x) || pi), where q is the gate's exit distribution;
- decoupled_gate: the fixed prior's loss shapes the trajectory, and the gate learns the learned gate's from states and
  cross-entropies through which no gradient flows;
- random_depth: l_n, where the number of loops n is drawn from the prior at every step, and only n loops are run;
- module:function: whatever a function of the user's makes of the same losses. Settings only name it: training alone
  imports it (`training/custom_objectives.py`), so that a checkpoint's file never makes anybody run code.

Shapes: T loops, B rows. Everything about q is computed in log space and in float32 or wider. PyTorch is imported where
it computes, so that settings can be read, and refused, without it.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from loopscope.config import Count, NonNegative, Settings
from loopscope.errors import did_you_mean
from loopscope.tasks import Draws

if TYPE_CHECKING:
    from torch import Tensor

_FLOOR = -1e4
"""Log-probabilities below this are held there: exp of it is 0, and 0 times it is 0, where 0 times -inf is not."""


GATED = ("learned_gate", "decoupled_gate")
"""The objectives that train a gate."""
BUILT_IN = ("final", "fixed_prior", *GATED, "random_depth")
_FINE = 1 << 31
_DEPTHS = 3 << 62
"""The first of the streams that depths are drawn from, above those of data and epochs."""
_FUNCTION = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
_DEFAULTS = {"prior": "geometric", "geometric_lambda": 0.3, "beta": 0.1}
"""Settings that only the built-in objectives have."""

Option = bool | int | float | str


@dataclass(frozen=True)
class LoopLosses:
    """What an objective is computed from: a batch at every loop. It is read by name, so there is room for more."""

    cross_entropy: Tensor  # [T, B], of the right answers, or of the next tokens
    gate_logits: Tensor | None  # [T, B], the gate's halt logits; None without a gate
    step: int  # of training, from 0
    detached_gate_logits: Tensor | None = None  # the same numbers, but their gradient ends at the gate


@dataclass(frozen=True)
class Unrolling:
    """How far a step of training unrolls a model, if not as far as it goes. Only the last of its loops is answered."""

    loops: int
    truncated: int | None  # gradients flow through the last so many loops only; None: through all


class Objective(Settings, frozen=True, kw_only=True):
    name: str = "fixed_prior"  # built in, or module:function
    prior: Literal["uniform", "geometric"] = "geometric"
    geometric_lambda: Annotated[float, msgspec.Meta(gt=0, lt=1)] = 0.3
    beta: NonNegative = 0.1
    truncated: Count | UnsetType = UNSET  # loops that get a gradient under random_depth (default: all)
    options: dict[str, Option] | UnsetType = UNSET  # keyword arguments of the function
    source_sha256: str | UnsetType = UNSET  # of the function's module, as it was when the run began

    def __post_init__(self) -> None:
        if self.truncated is not UNSET and self.name != "random_depth":
            raise ValueError(f"truncated is of the objective 'random_depth', and this is '{self.name}'")
        if self.name in BUILT_IN:
            if self.options is not UNSET or self.source_sha256 is not UNSET:
                raise ValueError(f"options are of a function of one's own, and the objective '{self.name}' is built in")
            return
        if not _FUNCTION.fullmatch(self.name):
            raise ValueError(
                f"there is no objective '{self.name}'{did_you_mean(self.name, BUILT_IN)}; choose one of "
                f"{', '.join(BUILT_IN)}, or name a function of your own as 'module:function'"
            )
        for key, default in _DEFAULTS.items():
            if getattr(self, key) not in (default, UNSET):
                raise ValueError(
                    f"{key} is of the built-in objectives; write objective = '{self.name}', and give the function what "
                    "it needs as objective.options"
                )
            msgspec.structs.force_setattr(self, key, UNSET)  # written nowhere: it would say what is not so
        for key, value in (self.options or {}).items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"options.{key} is not finite")

    @property
    def is_custom(self) -> bool:
        """Whether it is a function of the user's."""
        return self.name not in BUILT_IN

    def depth_prior(self, loops: int) -> Tensor:
        """pi [T] in float64; for `final` all weight lies on the last loop."""
        if self.name == "final":
            import torch
            import torch.nn.functional as F

            return F.one_hot(torch.tensor(loops - 1), loops).double()
        return uniform_prior(loops) if self.prior == "uniform" else geometric_prior(self.geometric_lambda, loops)

    def unrolling(self, loops: int, seed: int, step: int) -> Unrolling | None:
        """How far a step of training unrolls a model of so many loops: drawn from seed and step, the same everywhere.

        None: all loops, and all of them are answered.
        """
        if self.name != "random_depth":
            return None
        drawn = Draws(seed, _DEPTHS + step).integers(np.array([_FINE]))[0] / _FINE
        reached = np.searchsorted(np.cumsum(self.depth_prior(loops).numpy()), drawn, side="right")
        return Unrolling(min(int(reached) + 1, loops), self.truncated or None)

    def expected_loops(self, loops: int) -> float:
        """How many loops a step of training runs on average."""
        if self.name != "random_depth":
            return loops
        return float(self.depth_prior(loops).numpy() @ np.arange(1, loops + 1))

    def loss(self, losses: Tensor, gate_logits: Tensor | None) -> Tensor:
        """The mean objective of a batch from its cross-entropies [T, B] and halt logits [T, B].

        The halt logits of a decoupled gate are the detached ones; of a random depth only the last loop counts.
        """
        assert not self.is_custom, "a function of the user's is imported by training"
        if self.name == "random_depth":
            return losses[-1].mean()
        prior = self.depth_prior(len(losses))
        if self.name == "learned_gate":
            return self._gate_loss(losses, gate_logits, prior)
        fixed = expected_loss(losses, prior[:, None].to(losses)).mean()
        return fixed + self._gate_loss(losses.detach(), gate_logits, prior) if self.name == "decoupled_gate" else fixed

    def _gate_loss(self, losses: Tensor, gate_logits: Tensor | None, prior: Tensor) -> Tensor:
        assert gate_logits is not None, "an objective with a gate needs a model with one"
        log_q = log_exit_distribution(gate_logits.float())
        penalty = depth_kl(log_q, prior.log()[:, None].to(log_q))
        return (expected_loss(losses, log_q.exp()) + self.beta * penalty).mean()


def uniform_prior(loops: int) -> Tensor:
    import torch

    return torch.full((loops,), 1.0 / loops, dtype=torch.float64)


def geometric_prior(lam: float, loops: int) -> Tensor:
    """lam (1 - lam)^(t-1), truncated: the last loop takes all that is left."""
    import torch

    survival = (1.0 - lam) ** torch.arange(loops, dtype=torch.float64)
    return torch.cat((lam * survival[:-1], survival[-1:]))


def log_exit_distribution(gate_logits: Tensor) -> Tensor:
    """log q [T, B]: exit at t with probability sigmoid(g_t) if not before; the last loop takes all that is left."""
    import torch
    import torch.nn.functional as F

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
