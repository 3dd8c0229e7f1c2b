"""Can a gate that is fitted to a finished trajectory stop better than the gate that was trained with it?

The trajectory is frozen: a gate is fitted on a recording's pooled states and cross-entropies, so it can only act as a
readout. There are two objectives: `ponder`, that of a learned gate (expected cross-entropy plus beta KL to the prior),
and `utility`, which predicts at every loop whether the next loop lowers the cross-entropy.

Shapes: T loops, B rows of a batch, D width.
"""

import shutil
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

from loopscope.artifacts import artifact_folder
from loopscope.config import Count, NonNegative, Positive, Seed, Settings, build, plain, require_values
from loopscope.errors import UserError
from loopscope.files import BESIDE
from loopscope.leaks import check_gate_data, fitting_data
from loopscope.learned.fitted_gate import FittedGate
from loopscope.models.checkpoint import gate_tensors, weights_sha256, write_tensors
from loopscope.models.checkpoint_folder import GENERATION, HASHES, POLICY, beside_weights, weight_files
from loopscope.models.transformer import Gate
from loopscope.progress import ProgressCallback, silent
from loopscope.tasks import Draws
from loopscope.training.objectives import objective_loss
from loopscope.training.settings import GATED, PRIORS, WITH_PRIOR, DepthPrior, Objective, Probability
from loopscope.trajectory import Trajectory

_MIN_IMPROVEMENT, _SHARPNESS = 0.005, 50.0
"""The next loop pays if it lowers the cross-entropy by about 0.005 nats or more."""


class GateSettings(Settings, frozen=True, kw_only=True):
    """Set how a gate is fitted to the trajectory of a model whose weights stay fixed.

    Parameters
    ----------
    kind
        "linear", or "mlp" with one hidden layer.
    objective
        "ponder", as in joint training, or "utility", which predicts whether another loop lowers the loss.
    prior
        The prior over exits, only for `ponder`: a name, or a list with the weights of all loops.
    geometric_lambda
        The lambda of a geometric prior.
    beta
        The weight of the KL term in the loss, only for `ponder`.
    pairing
        The step that the gate at loop t judges, only for `utility`: the "next" step, or loop t itself ("ouro", as Ouro
        does).
    steps
        The number of optimizer steps.
    batch_size
        The number of examples per step.
    learning_rate
        The learning rate of the optimizer.
    seed
        The random seed.
    """

    kind: Literal["linear", "mlp"] = "linear"
    objective: Literal["ponder", "utility"] = "ponder"
    prior: DepthPrior = "uniform"
    geometric_lambda: Probability = 0.3
    beta: NonNegative = 0.1
    pairing: Literal["next", "ouro"] = "next"
    steps: Count = 2_000
    batch_size: Count = 1_024
    learning_rate: Positive = 1e-2
    seed: Seed = 0

    def __post_init__(self) -> None:
        is_used = self.pairing == "next" or self.objective == "utility"
        own = isinstance(self.prior, str) and self.prior not in PRIORS
        require_values(
            (is_used, "pairing is of the objective 'utility'"),
            (not own, f"a fitted gate has one of the priors {' and '.join(PRIORS)}, or a list of weights"),
        )
        _ = self.ponder

    @property
    def ponder(self) -> Objective:
        """The objective `learned_gate` with this prior and beta."""
        return Objective(name="learned_gate", prior=self.prior, geometric_lambda=self.geometric_lambda, beta=self.beta)

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.objective}" + ("-ouro" if self.pairing == "ouro" else "")


def gate_settings(recording: Trajectory, changes: dict[str, Any]) -> GateSettings:
    """The settings with prior and beta of the model that made the recording, if it has a gate (else beta 0.1)."""
    run = recording.provenance.get("run")
    objective = run.get("objective") if isinstance(run, dict) else None
    host = build(Objective, objective, "the recording") if isinstance(objective, dict) else None
    return build(GateSettings, {**host_defaults(host), **changes}, "the gate")


def host_defaults(objective: Objective | None) -> dict[str, Any]:
    """The settings that a fitted gate takes from the training objective of its model."""
    if objective is None or objective.name not in WITH_PRIOR or objective.name == "final":
        return {}
    prior = {"prior": objective.prior, "geometric_lambda": objective.geometric_lambda}
    taken: dict[str, Any] = {} if objective.has_custom_prior else prior
    return taken | ({"beta": objective.beta} if objective.name in GATED else {})


def fit_gate(
    recording: Trajectory, settings: GateSettings | None = None, progress: ProgressCallback = silent, **changes: Any
) -> FittedGate:
    """Fit a gate to the pooled states of a frozen trajectory.

    Parameters
    ----------
    recording
        A recording that keeps hidden states and that no evaluation uses, such as the train split.
    settings
        `GateSettings` (default: a linear gate with the objective `ponder` and with the prior and beta of the model).
    progress
        A function that LoopScope calls with the number of finished steps, the number of all steps, and a note.
    **changes
        Changes of the settings, such as `kind="mlp"` or `objective="utility"`; also `steps=` and `seed=`.

    Returns
    -------
    FittedGate
        The fitted gate. `attach` adds the gate to a recording as the readout `gate:NAME`.

    Raises
    ------
    UserError
        If the recording has no hidden states, or is for evaluation.

    Examples
    --------
    >>> ls.fit_gate(recording("train", 2), steps=20).kind
    'linear'
    """
    check_gate_data(recording)
    if settings is None:
        settings = gate_settings(recording, changes)
    elif changes:
        settings = build(GateSettings, {**plain(settings), **changes}, "the gate")
    hidden, count = recording.hidden, recording.num_examples
    assert hidden is not None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        gate = Gate(settings.kind, hidden.shape[2])
    losses = torch.from_numpy(recording.cross_entropy.astype(np.float32))
    optimizer = torch.optim.AdamW(gate.parameters(), lr=settings.learning_rate, weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, settings.steps)
    for step in range(settings.steps):
        rows = Draws(settings.seed, step).integers(np.full(min(settings.batch_size, count), count))
        logits = gate(torch.from_numpy(np.asarray(hidden[rows], dtype=np.float32)))
        loss = gate_loss(settings, losses[torch.from_numpy(rows)].T, logits.T)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        progress(step + 1, settings.steps, "")
    state = gate.state_dict()
    tensors = {name: state[source].numpy() for name, source in Gate.tensors(settings.kind).items()}
    tensors["weight"], tensors["bias"] = tensors["weight"][0], tensors["bias"][0]
    return FittedGate.of_tensors(tensors, {"gate": plain(settings), **fitting_data(recording)})


def gate_loss(settings: GateSettings, losses: Tensor, logits: Tensor) -> Tensor:
    """The loss of a gate that is fitted, from cross-entropies [T, B] and halt logits [T, B]."""
    if settings.objective == "ponder":
        return objective_loss(settings.ponder, losses, logits)
    continue_target = torch.sigmoid(_SHARPNESS * ((losses[:-1] - losses[1:]).clamp(min=0) - _MIN_IMPROVEMENT))
    paired_logits = logits[:-1] if settings.pairing == "next" else logits[1:]
    # The sigmoid of a halt logit is the probability of stopping.
    return F.binary_cross_entropy_with_logits(-paired_logits, continue_target)


def write_gate(gate: FittedGate, checkpoint: Path, out: Path) -> None:
    """Copy a checkpoint, with the fitted gate in place of its own gate; both gates must have the same form."""
    names = gate_tensors(checkpoint)
    if set(names) != set(gate.tensors):
        own = "no gate of LoopScope's" if not names else f"{'a linear' if len(names) == 2 else 'an MLP'} gate"
        raise UserError(f"{checkpoint} has {own}, so a fitted {gate.kind} gate cannot take its place.")
    gate.check(weights_sha256(checkpoint))
    with artifact_folder(out, "checkpoint") as scratch:
        others = ("recordings", "gates", "policy*", POLICY.split("/")[0], HASHES, *(f"{prefix}*" for prefix in BESIDE))
        shutil.copytree(checkpoint, scratch, ignore=shutil.ignore_patterns(*others), dirs_exist_ok=True)
        if (scratch / GENERATION).is_file():
            (scratch / GENERATION).write_bytes(beside_weights(checkpoint, GENERATION))
        for file in weight_files(scratch):
            with safe_open(file, framework="pt") as opened:
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
                metadata = opened.metadata()
            theirs = {part: name for part, name in names.items() if name in tensors}
            for part, name in theirs.items():
                value = torch.from_numpy(np.array(gate.tensors[part]))
                tensors[name] = value.reshape(tensors[name].shape).to(tensors[name].dtype)
            if theirs:
                write_tensors(tensors, file, metadata)
