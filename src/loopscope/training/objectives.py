"""What does training minimise? Per-loop cross-entropies, weighted over depth by a fixed prior or by a learned gate.

- final: the last loop only;
- fixed_prior: sum_t pi_t l_t, the same weights for every example;
- learned_gate: sum_t q_t(x) l_t + beta KL(q(x) || pi), where q is the gate's exit distribution;
- decoupled_gate: the fixed prior's loss shapes the trajectory, and the gate learns the learned gate's from states and
  cross-entropies through which no gradient flows;
- random_depth: l_n, where the number of loops n is drawn from the prior at every step, and only n loops are run;
- module:function: what a function of the user's makes of the same losses. It is imported here, and tried on made-up
  numbers before anything is written.

Shapes: T loops, B rows. Everything about q is computed in log space and in float32 or wider.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from loopscope.config import digest
from loopscope.errors import UserError, reason
from loopscope.tasks import Draws
from loopscope.training.settings import Objective, UserFunction
from loopscope.user_code import load_code

_MIN_LOG_PROBABILITY = -1e4
"""Log-probabilities below this are held there: exp of it is 0, and 0 times it is 0, where 0 times -inf is not."""
_DEPTH_RESOLUTION = 1 << 31
_DEPTH_STREAMS = 3 << 62
"""The first of the streams that depths are drawn from, above those of data and epochs."""


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


LossFunction = Callable[[LoopLosses], Tensor]
"""The mean loss of a batch."""
GateTraining = Literal["none", "joint", "decoupled"]
"""Whether a gate is trained, and whether what it learns reaches the states that it reads."""


def depth_prior(objective: Objective, loops: int) -> Tensor:
    """pi [T] in float64; for `final` all weight lies on the last loop."""
    if objective.name == "final":
        return F.one_hot(torch.tensor(loops - 1), loops).double()
    return uniform_prior(loops) if objective.prior == "uniform" else geometric_prior(objective.geometric_lambda, loops)


def uniform_prior(loops: int) -> Tensor:
    return torch.full((loops,), 1.0 / loops, dtype=torch.float64)


def geometric_prior(lam: float, loops: int) -> Tensor:
    """lam (1 - lam)^(t-1), truncated: the last loop takes all that is left."""
    survival = (1.0 - lam) ** torch.arange(loops, dtype=torch.float64)
    return torch.cat((lam * survival[:-1], survival[-1:]))


def draw_unrolling(objective: Objective, loops: int, seed: int, step: int) -> Unrolling | None:
    """How far a step of training unrolls a model of so many loops: drawn from seed and step, the same everywhere.

    None: all loops, and all of them are answered.
    """
    if objective.name != "random_depth":
        return None
    drawn = Draws(seed, _DEPTH_STREAMS + step).integers(np.array([_DEPTH_RESOLUTION]))[0] / _DEPTH_RESOLUTION
    reached = np.searchsorted(np.cumsum(depth_prior(objective, loops).numpy()), drawn, side="right")
    return Unrolling(min(int(reached) + 1, loops), objective.truncated or None)


def expected_loops(objective: Objective, loops: int) -> float:
    """How many loops a step of training runs on average."""
    if objective.name != "random_depth":
        return loops
    return float(depth_prior(objective, loops).numpy() @ np.arange(1, loops + 1))


def objective_loss(objective: Objective, losses: Tensor, gate_logits: Tensor | None) -> Tensor:
    """The mean built-in objective of a batch from its cross-entropies [T, B] and halt logits [T, B].

    The halt logits of a decoupled gate are the detached ones; of a random depth only the last loop counts.
    """
    if objective.name == "random_depth":
        return losses[-1].mean()
    prior = depth_prior(objective, len(losses))
    if objective.name == "learned_gate":
        return _gate_loss(objective, losses, gate_logits, prior)
    fixed = expected_loss(losses, prior[:, None].to(losses)).mean()
    if objective.name == "decoupled_gate":
        return fixed + _gate_loss(objective, losses.detach(), gate_logits, prior)
    return fixed


def _gate_loss(objective: Objective, losses: Tensor, gate_logits: Tensor | None, prior: Tensor) -> Tensor:
    assert gate_logits is not None, "an objective with a gate needs a model with one"
    log_q = log_exit_distribution(gate_logits.float())
    penalty = depth_kl(log_q, prior.log()[:, None].to(log_q))
    return (expected_loss(losses, log_q.exp()) + objective.beta * penalty).mean()


def log_exit_distribution(gate_logits: Tensor) -> Tensor:
    """log q [T, B]: exit at t with probability sigmoid(g_t) if not before; the last loop takes all that is left."""
    log_continue = F.logsigmoid(-gate_logits[:-1])
    reached = [torch.zeros_like(gate_logits[0])]  # a running sum: cumsum on CUDA is not deterministic
    for step in log_continue:
        reached.append(reached[-1] + step)
    exit_here = torch.cat((F.logsigmoid(gate_logits[:-1]), torch.zeros_like(gate_logits[:1])))
    return (torch.stack(reached) + exit_here).clamp(min=_MIN_LOG_PROBABILITY)


def expected_loss(losses: Tensor, weights: Tensor) -> Tensor:
    """[B] the losses [T, B] averaged over depth."""
    return (weights * losses).sum(dim=0)


def depth_kl(log_q: Tensor, log_prior: Tensor) -> Tensor:
    """[B] KL(q || prior) over depth."""
    return (log_q.exp() * (log_q - log_prior)).sum(dim=0)


def load_objective(objective: Objective, seed: int, function: UserFunction | None = None) -> LossFunction:
    """What training minimises; a function of the user's is imported, unless it is given."""
    if objective.is_custom:
        current = load_code(objective.name, "objective", function)
        return lambda loops: _custom_loss(objective, current, seed, loops)
    decoupled = objective.name == "decoupled_gate"
    return lambda loops: objective_loss(
        objective, loops.cross_entropy, loops.detached_gate_logits if decoupled else loops.gate_logits
    )


def _custom_loss(objective: Objective, function: UserFunction, seed: int, loops: LoopLosses) -> Tensor:
    """Its random numbers follow from the run's seed and the step, so a resumed run draws the same ones."""
    with random_numbers(seed, loops.step):
        try:
            loss = function(loops, **(objective.options or {}))
        except (Exception, SystemExit) as error:
            raise UserError(f"The objective '{objective.name}' failed: {reason(error)}.") from error
    is_tensor, shapes = isinstance(loss, Tensor), ((), loops.cross_entropy.shape[1:])
    if not (is_tensor and loss.is_floating_point() and loss.shape in shapes and loss.requires_grad):
        found = f"a tensor of shape {list(loss.shape)} and {loss.dtype}" if is_tensor else type(loss).__name__
        raise UserError(
            f"The objective '{objective.name}' returned {found}; it must return the loss of the batch, a tensor with "
            "one number, or that of every row [B], with a gradient: computed from loops.cross_entropy or "
            "loops.gate_logits, without detach() or item()."
        )
    return loss.mean()


@contextmanager
def random_numbers(*key: int | str) -> Iterator[None]:
    """PyTorch draws from `key` alone in here, and draws on as before after it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(digest(list(key))[:8], 16))
        yield


def try_objective(
    objective: LossFunction, loops: int, has_gate: bool, steps: int, device: torch.device
) -> GateTraining:
    """Tries it on made-up numbers, at the first step and the last; says how it would train a gate."""
    joint = decoupled = False
    for step in (0, steps - 1):
        rows = loops + 2  # not as many as loops: a loss [T] is no loss [B]
        made_up = torch.linspace(2.0, 0.5, loops * rows, device=device).view(loops, rows)
        losses = made_up.clone().requires_grad_()
        halts, detached = ((1 - made_up).requires_grad_() if has_gate else None for _ in range(2))
        loss = objective(LoopLosses(losses, halts, step, detached))
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = [each.grad for each in (losses, halts, detached) if each is not None and each.grad is not None]
        if not all(torch.isfinite(value).all() for value in (loss, *gradients)):
            raise UserError("The objective or its gradient is not finite on cross-entropies from 0.5 to 2; mend it.")
        joint |= halts is not None and halts.grad is not None
        decoupled |= detached is not None and detached.grad is not None
    return "joint" if joint else "decoupled" if decoupled else "none"
