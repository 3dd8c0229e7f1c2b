"""How are weights updated? AdamW (with Muon for the block's matrices on request) on a warmup-cosine schedule.

Muon computes in the precision of its device: PyTorch's own uses bf16, 10 to 60 times slower on a CPU without such
units. The update of a matrix is its Nesterov momentum, orthogonalised by five Newton-Schulz steps. Defaults and
learning-rate scaling are those of `torch.optim.Muon`.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from loopscope.training.settings import Training

_NEWTON_SCHULZ = (3.4445, -4.775, 2.0315)
_NEWTON_SCHULZ_STEPS = 5


class Optimizers:
    """The optimizers of a run as one: they share the shape of the learning-rate schedule."""

    def __init__(self, model: Any, settings: Training, gate_apart: bool = False) -> None:
        """With `gate_apart` the gradients of the model's gate are clipped alone, and change no other step."""
        self._settings = settings
        parameters = list(model.parameters())
        gate = set(model.gate.parameters()) if gate_apart and model.gate is not None else set()
        self._clipped = [[p for p in parameters if p not in gate], [p for p in parameters if p in gate]]
        matrices = [p for p in model.block.parameters() if p.ndim == 2] if settings.muon_learning_rate else []
        chosen = {id(parameter) for parameter in matrices}
        rest = [parameter for parameter in parameters if id(parameter) not in chosen]
        adamw = AdamW(
            [
                {"params": [p for p in rest if p.ndim >= 2], "weight_decay": settings.weight_decay},
                {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},  # biases and norms
            ],
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            fused=True,
        )
        self._all: list[tuple[Optimizer, float]] = [(adamw, settings.learning_rate)]
        if matrices:
            rate = settings.muon_learning_rate
            self._all.append((Muon(matrices, lr=rate, weight_decay=settings.weight_decay), rate))

    def step(self, step: int) -> tuple[float, Tensor]:
        """Clips the gradients and applies them; returns AdamW's learning rate and the norm before clipping.

        The norm is that of all parameters but a gate's that is clipped by itself.
        """
        norm, _ = (nn.utils.clip_grad_norm_(parameters, self._settings.clip_norm) for parameters in self._clipped)
        factor = schedule(step, self._settings)
        for optimizer, rate in self._all:
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return self._settings.learning_rate * factor, norm

    def tensors(self) -> dict[str, Tensor]:
        """The state of all optimizers, as a file holds it."""
        return {
            f"{index}.{parameter}.{key}": value.detach().cpu().contiguous()
            for index, (optimizer, _) in enumerate(self._all)
            for parameter, entries in optimizer.state_dict()["state"].items()
            for key, value in entries.items()
        }

    def restore(self, tensors: dict[str, Tensor]) -> None:
        states: list[dict[int, dict[str, Tensor]]] = [{} for _ in self._all]
        for name, value in tensors.items():
            index, parameter, key = name.split(".")
            states[int(index)].setdefault(int(parameter), {})[key] = value
        for state, (optimizer, _) in zip(states, self._all, strict=True):
            groups = optimizer.state_dict()["param_groups"]
            optimizer.load_state_dict({"state": state, "param_groups": groups})


def schedule(step: int, settings: Training) -> float:
    """The learning rate of a step (from 0) as a fraction of the peak: linear warmup, then a cosine to the minimum."""
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    floor = settings.min_learning_rate / settings.learning_rate
    done = (step - settings.warmup_steps) / max(settings.steps - settings.warmup_steps, 1)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done))


class Muon(Optimizer):
    def __init__(self, matrices: Iterable[Tensor], lr: float, weight_decay: float, momentum: float = 0.95) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            rate, momentum = group["lr"], group["momentum"]
            for matrix in group["params"]:
                state = self.state[matrix]
                if not state:
                    state["momentum"] = torch.zeros_like(matrix)
                average = state["momentum"].lerp_(matrix.grad, 1 - momentum)
                update = orthogonalised(matrix.grad.lerp(average, momentum))
                matrix.mul_(1 - rate * group["weight_decay"])
                matrix.add_(update, alpha=-rate * math.sqrt(max(1, matrix.shape[0] / matrix.shape[1])))


def orthogonalised(matrix: Tensor) -> Tensor:
    """Nearly U V' of the matrix U S V': all singular values are brought close to 1."""
    tall = matrix.shape[0] > matrix.shape[1]
    wide = matrix.T if tall else matrix
    if wide.is_cuda:
        wide = wide.bfloat16()
    wide = wide / wide.norm().clamp(min=1e-7)
    a, b, c = _NEWTON_SCHULZ
    for _ in range(_NEWTON_SCHULZ_STEPS):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return (wide.T if tall else wide).to(matrix.dtype)
