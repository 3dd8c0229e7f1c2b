"""What does training minimise? Per-loop cross-entropies, weighted over depth by a fixed prior or by a learned gate.

- final: the last loop only;
- fixed_prior: sum_t pi_t l_t, the same weights for every example;
- learned_gate: sum_t q_t(x) l_t + beta KL(q(x) || pi), where q is the gate's exit distribution;
- decoupled_gate: the fixed prior's loss shapes the trajectory, and the gate minimises the learned gate's loss on states
  and cross-entropies through which no gradient flows;
- gate_channels: between learned_gate and decoupled_gate. A learned gate shapes the trunk through two channels: q
  weights the trunk's losses, and the gate's own gradient reaches the states that it reads. Each channel has a share
  from 0 to 1;
- act: sum_t p_t(x) l_t + beta (N(x) + R(x)), Graves' adaptive computation time: halt probabilities are summed until the
  sum is within a hundredth of 1, at loop N, whose weight is the remainder R;
- random_depth: l_n, where every step draws the number of loops n from the prior, and only n loops run;
- module:function: the value of a custom function of the same losses. LoopScope imports the function and tries it on
  made-up numbers before it writes anything.

A prior pi is a named prior (uniform or geometric), a list of weights, or a custom function of (loops, step, steps).

Shapes: T loops, B rows. Everything about q is computed in log space and in float32 or wider.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from loopscope.config import digest
from loopscope.errors import UserError, brief, reason
from loopscope.readouts.signals import HALTED
from loopscope.tasks import Draws
from loopscope.training.settings import ACT, GATED, Objective, UserFunction, is_distribution
from loopscope.user_code import load_code

_MIN_LOG_PROBABILITY = -1e4
"""The lower limit of log-probabilities: its exp is 0, and 0 times the limit is 0, while 0 times -inf is NaN."""
_DEPTH_RESOLUTION = 1 << 31
_DEPTH_STREAMS = 3 << 62
"""The first random stream for drawing depths, above the streams of data and epochs."""


@dataclass(frozen=True)
class LoopLosses:
    """Hold the inputs of a custom objective: the losses of a batch at every loop.

    Parameters
    ----------
    cross_entropy
        [T, B] the losses of the right answers, or of the next tokens.
    gate_logits
        [T, B] the halt logits of the gate; None without a gate.
    step
        The training step, from 0.
    detached_gate_logits
        [T, B] the halt logits of the gate, with gradients that reach only the gate, not the trunk.
    steps
        The total number of steps of the run.

    Examples
    --------
    >>> def last_loop(loops: ls.LoopLosses):
    ...     return loops.cross_entropy[-1].mean()
    >>> last_loop(ls.LoopLosses(torch.ones(4, 2), None, step=0))
    tensor(1.)
    """

    cross_entropy: Tensor  # [T, B] losses of the right answers, or of the next tokens
    gate_logits: Tensor | None  # [T, B] the gate's halt logits; None without a gate
    step: int  # the step of training, from 0
    detached_gate_logits: Tensor | None = None  # the same numbers, with gradients that end at the gate
    steps: int = 1  # all steps of the run


@dataclass(frozen=True)
class Unrolling:
    """Limit how many loops a training step runs, and how many get a gradient; only the last loop has a loss."""

    loops: int
    truncated: int | None  # the number of last loops with gradients; None: all


LossFunction = Callable[[LoopLosses], Tensor]
"""The mean loss of a batch, as a function of its losses at every loop."""
GateTraining = Literal["none", "joint", "decoupled"]
"""Whether a gate is trained, and whether its gradient reaches the states that it reads."""


def depth_prior(objective: Objective, loops: int, step: int = 0, steps: int = 1) -> Tensor:
    """The prior pi [T] over depth in float64 at a step; for `final` the last loop has all the weight."""
    if objective.name == "final":
        return F.one_hot(torch.tensor(loops - 1), loops).double()
    if objective.prior == "uniform":
        return uniform_prior(loops)
    if objective.prior == "geometric":
        return geometric_prior(objective.geometric_lambda, loops)
    return _custom_prior(objective, loops, step, steps)


def _custom_prior(objective: Objective, loops: int, step: int, steps: int) -> Tensor:
    """The weights of a custom prior: the list in the settings, or the values of a custom function."""
    weights: Any = objective.prior
    try:
        if isinstance(objective.prior, str):
            weights = _prior_function(objective.prior, objective.prior_sha256 or "")(loops, step, steps)
        prior = torch.as_tensor(weights, dtype=torch.float64)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"The prior '{objective.prior}' failed: {reason(error)}.") from error
    is_positive = objective.name not in GATED or bool((prior > 0).all())
    if not (prior.shape == (loops,) and is_positive and is_distribution(prior.tolist())):
        least = "above 0, because of the KL to it," if objective.name in GATED else "not negative"
        shown = brief(str(prior.tolist()), 120)
        raise UserError(
            f"The prior '{brief(str(objective.prior), 60)}' gives {shown} at step {step}; it must give {loops} "
            f"weights, one for each loop, that are {least} and add up to 1."
        )
    return prior


@lru_cache(maxsize=8)
def _prior_function(name: str, _source_sha256: str) -> UserFunction:
    """Import the custom function of a prior, whose source has this hash."""
    function: UserFunction = load_code(name, "prior")
    return function


def uniform_prior(loops: int) -> Tensor:
    """The prior with the same weight for every loop, pi [T]."""
    return torch.full((loops,), 1.0 / loops, dtype=torch.float64)


def geometric_prior(lam: float, loops: int) -> Tensor:
    """The prior lam (1 - lam)^(t-1), truncated: the last loop takes the remaining weight."""
    survival = (1.0 - lam) ** torch.arange(loops, dtype=torch.float64)
    return torch.cat((lam * survival[:-1], survival[-1:]))


def draw_unrolling(objective: Objective, loops: int, seed: int, step: int, steps: int = 1) -> Unrolling | None:
    """Draw how many of the loops a training step runs, from seed and step: the same on every worker.

    None: all loops run, and every loop has a loss.
    """
    if objective.name != "random_depth":
        return None
    drawn = Draws(seed, _DEPTH_STREAMS + step).integers(np.array([_DEPTH_RESOLUTION]))[0] / _DEPTH_RESOLUTION
    prior = depth_prior(objective, loops, step, steps).numpy()
    reached = np.searchsorted(np.cumsum(prior), drawn, side="right")
    return Unrolling(min(int(reached) + 1, loops), objective.truncated or None)


def expected_loops(objective: Objective, loops: int) -> float:
    """The mean number of loops of a training step; all loops if a custom function draws them."""
    if objective.name != "random_depth" or objective.has_custom_prior:
        return loops
    return float(depth_prior(objective, loops).numpy() @ np.arange(1, loops + 1))


def objective_loss(
    objective: Objective,
    losses: Tensor,
    gate_logits: Tensor | None,
    detached_gate_logits: Tensor | None = None,
    step: int = 0,
    steps: int = 1,
) -> Tensor:
    """The mean built-in objective of a batch, from its cross-entropies [T, B] and halt logits [T, B].

    The detached halt logits are the same numbers, with gradients that end at the gate; a decoupled gate learns from
    them. With a random depth only the last loop counts. `step` of `steps` is for priors that change.
    """
    if objective.name == "random_depth":
        return losses[-1].mean()
    if objective.name == ACT:
        assert gate_logits is not None, "an objective with a gate needs a model with one"
        weights, cost = act_weights(gate_logits.float())
        return (expected_loss(losses, weights) + objective.beta * cost).mean()
    prior, channels = depth_prior(objective, len(losses), step, steps), objective.channels
    if channels is None:
        return expected_loss(losses, prior[:, None].to(losses)).mean()
    if channels == (1, 1):
        return _gate_loss(objective, losses, gate_logits, prior)
    assert gate_logits is not None, "an objective with a gate needs a model with one"
    exits = log_exit_distribution(gate_logits.detach().float()).exp()
    weights = (1 - channels.weight) * prior[:, None].to(losses) + channels.weight * exits
    loss = expected_loss(losses, weights).mean()
    for share, logits in ((channels.gradient, gate_logits), (1 - channels.gradient, detached_gate_logits)):
        if share > 0:
            loss = loss + share * _gate_loss(objective, losses.detach(), logits, prior)
    return loss


def _gate_loss(objective: Objective, losses: Tensor, gate_logits: Tensor | None, prior: Tensor) -> Tensor:
    """The learned gate's loss; on detached losses it trains only the gate, and its gradient ends where q's ends."""
    assert gate_logits is not None, "an objective with a gate needs a model with one"
    log_q = log_exit_distribution(gate_logits.float())
    penalty = depth_kl(log_q, prior.log()[:, None].to(log_q))
    return (expected_loss(losses, log_q.exp()) + objective.beta * penalty).mean()


def log_exit_distribution(gate_logits: Tensor) -> Tensor:
    """log q [T, B]: exit at t with probability sigmoid(g_t) if not before; the last loop takes the rest."""
    log_continue = F.logsigmoid(-gate_logits[:-1])
    reached = [torch.zeros_like(gate_logits[0])]  # a running sum: cumsum on CUDA is not deterministic
    for step in log_continue:
        reached.append(reached[-1] + step)
    exit_here = torch.cat((F.logsigmoid(gate_logits[:-1]), torch.zeros_like(gate_logits[:1])))
    return (torch.stack(reached) + exit_here).clamp(min=_MIN_LOG_PROBABILITY)


def exit_weights(objective: Objective, gate_logits: Tensor) -> Tensor:
    """[T, B] the exit probabilities at each loop of a gate that was trained with this objective."""
    return act_weights(gate_logits)[0] if objective.name == ACT else log_exit_distribution(gate_logits).exp()


def act_weights(gate_logits: Tensor) -> tuple[Tensor, Tensor]:
    """The weights p [T, B] of ACT, and its ponder cost N + R [B]; only R has a gradient."""
    left, running = torch.ones_like(gate_logits[0]), torch.ones_like(gate_logits[0], dtype=torch.bool)
    weights, cost = [], torch.zeros_like(left)
    for loop, halt in enumerate(torch.sigmoid(gate_logits), start=1):
        halts = (1 - left + halt >= HALTED) | (loop == len(gate_logits))
        weights.append(torch.where(running, torch.where(halts, left, halt), 0.0))
        cost = cost + torch.where(running, 1 + torch.where(halts, left, 0.0), 0.0)
        left, running = left - weights[-1], running & ~halts
    return torch.stack(weights), cost


def expected_loss(losses: Tensor, weights: Tensor) -> Tensor:
    """[B] the losses [T, B], averaged over depth with these weights."""
    return (weights * losses).sum(dim=0)


def depth_kl(log_q: Tensor, log_prior: Tensor) -> Tensor:
    """[B] KL(q || prior) over depth."""
    return (log_q.exp() * (log_q - log_prior)).sum(dim=0)


def load_objective(objective: Objective, seed: int, function: UserFunction | None = None) -> LossFunction:
    """The objective as a loss function; a custom function is imported, unless `function` is it."""
    if objective.is_custom:
        current = load_code(objective.name, "objective", function)
        return lambda loops: _custom_loss(objective, current, seed, loops)
    return lambda loops: objective_loss(
        objective, loops.cross_entropy, loops.gate_logits, loops.detached_gate_logits, loops.step, loops.steps
    )


def _custom_loss(objective: Objective, function: UserFunction, seed: int, loops: LoopLosses) -> Tensor:
    """Call a custom objective; its random numbers depend on seed and step, so a resumed run repeats them."""
    with seeded_random_numbers(seed, loops.step):
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
def seeded_random_numbers(*key: int | str) -> Iterator[None]:
    """Let PyTorch draw from a generator seeded by `key`; afterwards it continues with its own generator."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(digest(list(key))[:8], 16))
        yield


def try_objective(
    objective: LossFunction, loops: int, has_gate: bool, steps: int, device: torch.device
) -> GateTraining:
    """Try an objective on made-up losses, at the first and the last step; return how it would train a gate."""
    joint = decoupled = False
    for step in (0, steps - 1):
        rows = loops + 2  # unlike the number of loops, so that a loss [T] cannot pass for [B]
        made_up = torch.linspace(2.0, 0.5, loops * rows, device=device).view(loops, rows)
        losses = made_up.clone().requires_grad_()
        halts, detached = ((1 - made_up).requires_grad_() if has_gate else None for _ in range(2))
        loss = objective(LoopLosses(losses, halts, step, detached, steps))
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = [each.grad for each in (losses, halts, detached) if each is not None and each.grad is not None]
        if not all(torch.isfinite(value).all() for value in (loss, *gradients)):
            raise UserError("The objective or its gradient is not finite on cross-entropies from 0.5 to 2; mend it.")
        joint |= halts is not None and halts.grad is not None
        decoupled |= detached is not None and detached.grad is not None
    return "joint" if joint else "decoupled" if decoupled else "none"
