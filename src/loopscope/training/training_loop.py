"""How is a model trained? In a loop of steps: from a run to its folder, which is a checkpoint.

Every batch is a function of (settings, step), so the state file in the folder is all that a killed run needs to end
bit-identical to an uninterrupted run. The state holds weights, optimizers and step, with its own hash and the hashes of
the files beside it: an altered state cannot be resumed. Several workers may train one run: each takes its share of
every batch, and only the first writes. The run defines model and data: the answers of a task (`task_run`) or the tokens
of a text (`language_run`).

AdamW updates the weights on a warmup-cosine schedule; optionally, Muon updates the block's matrices. Muon computes
in the precision of its device: PyTorch's own uses bf16, 10 to 60 times slower on a CPU without such units. The update
of a matrix is its Nesterov momentum, orthogonalised by five Newton-Schulz steps. Defaults and learning-rate scaling are
those of `torch.optim.Muon`.

Shapes: B rows (or tokens), T loops.
"""

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from loopscope.artifacts import sha256
from loopscope.config import digest, write_json
from loopscope.errors import UserError
from loopscope.files import atomic_file
from loopscope.models.checkpoint import first_not_finite, write_tensors
from loopscope.models.checkpoint_folder import CONFIG, WEIGHTS, check_hashes, write_hashes
from loopscope.models.custom_model import looped_parameters
from loopscope.models.looped_model import LoopedModel, tensors_sha256
from loopscope.progress import ProgressCallback, silent
from loopscope.tasks import Draws
from loopscope.training.objectives import (
    GateTraining,
    LoopLosses,
    LossFunction,
    depth_prior,
    draw_unrolling,
    load_objective,
    seeded_random_numbers,
    try_objective,
)
from loopscope.training.parallel import SINGLE_WORKER, Workers
from loopscope.training.run_folder import (
    DATA_FILE,
    METRICS_FILE,
    STATE_FILE,
    append_metrics,
    claim_run_folder,
    cut_metrics,
    metrics_sha256,
    read_metrics,
    trained_with,
)
from loopscope.training.settings import WITH_PRIOR, Training, UserFunction, with_sources

_EPOCH_STREAMS = 1 << 63
"""The first random stream that shuffles epochs; lower streams draw data."""
_NEWTON_SCHULZ = (3.4445, -4.775, 2.0315)
_NEWTON_SCHULZ_STEPS = 5


class BatchLosses(NamedTuple):
    """Hold the losses of a batch at every loop; with an `Unrolling` only at its last loop, without halt logits."""

    cross_entropy: Tensor  # [T, B]
    correct: Tensor  # [T, B] whether the likeliest answer is right
    gate_logits: Tensor | None  # [T, B]
    detached_gate_logits: Tensor | None  # [T, B] from states through which no gradient flows


class TrainingRun(ABC):
    """Define a model and its data for the training loop; subclasses are frozen dataclasses.

    Its settings have an `objective`, `training` and `num_loops`. Its model is a `LoopedModel` with a `gate` (or None),
    which `halt` applies. A model that is not custom has a `block`, which every loop applies. Its batches have a length,
    and `take` takes rows.
    """

    settings: Any
    folder: Path
    function: UserFunction | None = None  # a custom objective, if it is given and not imported
    gate_by_choice: ClassVar[bool] = False  # whether the settings decide if the model has a gate
    files: ClassVar[tuple[str, ...]] = (CONFIG, DATA_FILE)  # files that exist before the first step, and do not change

    @property
    @abstractmethod
    def config(self) -> dict[str, Any]:
        """The checkpoint's `config.json`; its entry `run` holds all settings that affect the result."""

    @property
    @abstractmethod
    def has_gate(self) -> bool: ...

    @property
    def is_custom(self) -> bool:
        """Whether the model is custom: it may draw random numbers and leave parameters unused."""
        return False

    def with_model(self) -> Self:
        """The run itself, or the run with the hash of a custom model's source, after importing and trying the model."""
        return self

    @abstractmethod
    def prepare(self) -> dict[str, Any]:
        """Write the other files of the folder before the first step; return the contents of `data.json`."""

    @abstractmethod
    def initial_model(self) -> Any:
        """The model before its first step; the run's seed decides its weights."""

    @abstractmethod
    def losses(self, model: Any) -> nn.Module:
        """(batch, device, unrolling) -> `BatchLosses`, as a module, so that workers can average its gradients."""

    @abstractmethod
    def batches(self) -> Callable[[int], Any]:
        """The batch of every step."""

    def finished(self, model: Any) -> Any:
        """The trained model in the form that its checkpoint saves."""
        return model

    @abstractmethod
    def validate(self, model: Any, device: torch.device) -> dict[str, Any]:
        """The mean cross-entropy and accuracy of every loop on a sample of the validation data."""


@dataclass(frozen=True)
class RunResult:
    """Hold the result of a training run."""

    folder: Path
    resumed_from: int
    metrics: list[dict[str, Any]]

    @property
    def final(self) -> dict[str, Any]:
        """Return the last validation of the run."""
        return self.metrics[-1]


def train_run(
    run: TrainingRun, device: torch.device, progress: ProgressCallback = silent, workers: Workers = SINGLE_WORKER
) -> RunResult:
    """Train the run in its folder, from its beginning or from its last saved state."""
    folder, steps = run.folder, run.settings.training.steps
    workers.share(run.settings.training.batch_size)
    with workers.together():
        run, objective, gate_training = with_objective(run, device)
    with ExitStack() as held:
        with workers.together():
            if workers.is_main:
                held.enter_context(claim_run_folder(folder, run.config, run.files))
                if (folder / WEIGHTS).is_file():
                    (folder / STATE_FILE).unlink(missing_ok=True)
        start = steps
        if (folder / WEIGHTS).is_file():
            check_hashes(folder)
        else:
            held.enter_context(deterministic())
            start = _take_steps(run, objective, gate_training, device, progress, workers)
        return RunResult(folder, start, read_metrics(folder, steps, finished=True))


def with_objective(run: Any, device: torch.device) -> tuple[Any, LossFunction, GateTraining]:
    """The run with the hashes of custom sources in its settings, its objective, and how the objective trains a gate."""
    run = run.with_model()
    settings = with_sources(run.settings, run.function)
    pinned = settings.objective
    objective = load_objective(pinned, settings.training.seed, run.function)
    steps = settings.training.steps
    gate_training = try_objective(objective, settings.num_loops, run.has_gate, steps, device)
    for step in (0, steps - 1) if pinned.name in WITH_PRIOR else ():  # losses at a drawn depth do not use the prior
        depth_prior(pinned, settings.num_loops, step, steps)
    if run.has_gate and run.gate_by_choice and gate_training == "none":
        name = settings.objective.name
        raise UserError(f"The objective '{name}' does not use loops.gate_logits; set model.gate = 'none'.")
    return replace(run, settings=settings), objective, gate_training


def _take_steps(
    run: TrainingRun,
    objective: LossFunction,
    gate_training: GateTraining,
    device: torch.device,
    progress: ProgressCallback,
    workers: Workers,
) -> int:
    """Take all remaining steps; return the number of steps that were done before."""
    folder, settings = run.folder, run.settings
    every = settings.training
    with workers.together():
        if workers.is_main and not all((folder / name).is_file() for name in (STATE_FILE, *run.files)):
            write_json(folder / DATA_FILE, run.prepare())  # again without a state, as no hash protects it
    with workers.together():
        model = run.initial_model().to(device)
        model.gradient_checkpointing = bool(every.checkpointing)
        if gate_training == "none" and run.has_gate:
            model.gate.requires_grad_(False)  # else DDP waits for its gradients
        optimizers = Optimizers(model, every, gate_apart=gate_training == "decoupled")
        written = {name: sha256(folder / name) for name in run.files}
        start = restore(folder, model, optimizers, written)
        if workers.is_main:
            cut_metrics(folder, start)
        batch_of = run.batches()
    losses = workers.replicated(run.losses(model), some_unused=bool(settings.objective.truncated) or run.is_custom)
    mine = np.arange(workers.rank, every.batch_size, workers.count)  # a batch is sorted by length: equal work for all
    if workers.count > 1:  # DDP adds in a different order after its first pass: without it, a resumed run would differ
        _backward(losses, objective, batch_of(start).take(mine), start, settings)
        losses.zero_grad(set_to_none=True)
    note = ""
    for step in range(start, every.steps):
        done, last = step + 1, step + 1 == every.steps
        with seeded_random_numbers("model", every.seed, step) if run.is_custom else nullcontext():
            outcome = train_step(losses, objective, optimizers, batch_of(step).take(mine), step, settings)
        often = (every.log_every, every.validate_every, every.checkpoint_every)
        logging, validating, saving = (done % steps == 0 or last for steps in often)
        if logging or saving:
            for name in ("loss", "loop_loss", "loop_accuracy"):  # gradients are already averaged
                outcome[name] = workers.mean(outcome[name])
            if not torch.isfinite(outcome["loss"]):
                raise UserError(f"The loss is no longer finite at step {done}; lower training.learning_rate.")
        if logging:
            outcome = {name: value.tolist() if isinstance(value, Tensor) else value for name, value in outcome.items()}
            note = f"loss {outcome['loss']:.3f}"
        if logging or validating or saving:
            with workers.together():
                if logging and workers.is_main:
                    append_metrics(folder, {"step": done, **outcome})
                if validating and workers.is_main:
                    append_metrics(folder, {"step": done, **run.validate(model, device)})
                if saving and not last and workers.is_main:
                    save_state(folder, model, optimizers, done, written)
        progress(done, every.steps, note)
    with workers.together():
        if workers.is_main:
            finish(folder, run.finished(model), written)
    return start


def train_step(
    losses: nn.Module, objective: LossFunction, optimizers: "Optimizers", batch: Any, step: int, settings: Any
) -> dict[str, Any]:
    """Take one training step on a batch; its measurements stay on the device until they are logged."""
    measured = _backward(losses, objective, batch, step, settings)
    rate, norm = optimizers.step(step)
    return {**measured, "learning_rate": rate, "gradient_norm": norm}


def _backward(losses: nn.Module, objective: LossFunction, batch: Any, step: int, settings: Any) -> dict[str, Any]:
    """Add the gradients of a batch; return its loss, and the loss and accuracy [T] of every loop."""
    training, device = settings.training, next(losses.parameters()).device
    unrolling = draw_unrolling(settings.objective, settings.num_loops, training.seed, step, training.steps)
    bf16 = device.type == "cuda" and training.bf16
    parts = []
    for rows in np.array_split(np.arange(len(batch)), min(training.accumulate or 1, len(batch))):
        with torch.autocast("cuda", torch.bfloat16) if bf16 else nullcontext():
            part = batch if len(rows) == len(batch) else batch.take(rows)
            cross_entropy, correct, gate_logits, detached = losses(part, device, unrolling)
            loss = objective(LoopLosses(cross_entropy, gate_logits, step, detached, training.steps))
        share = len(rows) / len(batch)
        (loss if share == 1 else loss * share).backward()  # type: ignore[no-untyped-call]
        parts.append((loss.detach() * share, cross_entropy.detach(), correct))
    all_loss, all_losses, all_correct = zip(*parts, strict=True)
    return {
        **({} if unrolling is None else {"loops": unrolling.loops}),  # loops that ran, if the objective draws them
        "loss": torch.stack(all_loss).sum(),
        "loop_loss": torch.cat(all_losses, dim=1).mean(1),
        "loop_accuracy": torch.cat(all_correct, dim=1).float().mean(1),
    }


def epoch_rows(count: int, settings: Training) -> Callable[[int], NDArray[np.int64]]:
    """The rows of every step's batch: the next rows of the shuffled epochs of `count` rows."""
    size = settings.batch_size

    @lru_cache(maxsize=2)
    def order(epoch: int) -> NDArray[np.int64]:
        return Draws(settings.seed, _EPOCH_STREAMS + epoch).permutation(count)

    def rows(step: int) -> NDArray[np.int64]:
        position = np.arange(step * size, (step + 1) * size)
        epochs = position // count
        return np.concatenate([order(int(epoch))[position[epochs == epoch] % count] for epoch in np.unique(epochs)])

    return rows


@contextmanager
def deterministic() -> Iterator[None]:
    """Make PyTorch deterministic: the same bits every time, on the same device with the same number of threads."""
    memory: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False  # a fifth of a small model's step, for memory never read
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        memory.fill_uninitialized_memory = before[1]


class Optimizers:
    """Hold the optimizers of a run as one: they share the learning-rate schedule."""

    def __init__(self, model: Any, settings: Training, gate_apart: bool = False) -> None:
        """With `gate_apart`, the gradients of the model's gate are clipped separately from all others."""
        self._settings = settings
        parameters = list(model.parameters())
        gate = set(model.gate.parameters()) if gate_apart and model.gate is not None else set()
        self._clipped = [[p for p in parameters if p not in gate], [p for p in parameters if p in gate]]
        matrices = [p for p in looped_parameters(model) if p.ndim == 2] if settings.muon_learning_rate else []
        rest = [p for p in parameters if p not in set(matrices)]
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
        """Clip the gradients and apply them; return AdamW's learning rate and the norm before clipping.

        The norm covers all parameters, without a gate that is clipped separately.
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
        """The state of all optimizers, as tensors of a state file."""
        return {
            f"optimizer.{index}.{parameter}.{key}": value.detach().cpu().contiguous()
            for index, (optimizer, _) in enumerate(self._all)
            for parameter, entries in optimizer.state_dict()["state"].items()
            for key, value in entries.items()
        }

    def restore(self, tensors: dict[str, Tensor]) -> None:
        states: list[dict[int, dict[str, Tensor]]] = [{} for _ in self._all]
        for name, value in tensors.items():
            _, index, parameter, key = name.split(".")
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
    """Update matrices by their momentum, orthogonalised in the precision of its device."""

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
                update = orthogonalise(matrix.grad.lerp(average, momentum))
                matrix.mul_(1 - rate * group["weight_decay"])
                matrix.add_(update, alpha=-rate * math.sqrt(max(1, matrix.shape[0] / matrix.shape[1])))


def orthogonalise(matrix: Tensor) -> Tensor:
    """Nearly U V' of the matrix U S V': all singular values come close to 1."""
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


def steps_done(folder: Path) -> int:
    """The number of finished steps of the run in `folder`, from its last state; all steps of a finished run."""
    if (folder / WEIGHTS).is_file():
        run = trained_with(folder)
        return 0 if run is None else int(run["training"]["steps"])
    return int(_read_state(folder, with_tensors=False)[0]["step"]) if (folder / STATE_FILE).is_file() else 0


def save_state(folder: Path, model: LoopedModel, optimizers: Optimizers, step: int, written: dict[str, str]) -> None:
    """Save the run after `step` steps; `written` has the hashes of the files written before the first step."""
    tensors = {f"model.{name}": value for name, value in _finite_weights(model).items()}
    tensors |= optimizers.tensors()
    files = json.dumps(written | {METRICS_FILE: metrics_sha256(folder, step)})
    metadata = {"step": str(step), "files": files}
    with atomic_file(folder / STATE_FILE) as scratch:
        write_tensors(tensors, scratch, metadata | {"sha256": _state_sha256(tensors, metadata)})


def restore(folder: Path, model: LoopedModel, optimizers: Optimizers, written: dict[str, str]) -> int:
    """Restore the run's last saved state; return the number of finished steps."""
    if not (folder / STATE_FILE).is_file():
        return 0
    metadata, tensors = _read_state(folder, with_tensors=True)
    step = int(metadata["step"])
    is_altered = metadata.pop("sha256", None) != _state_sha256(tensors, metadata)
    now = written | {METRICS_FILE: metrics_sha256(folder, step)}
    before = {} if is_altered else json.loads(metadata["files"])
    altered = [name for name in before if now.get(name, before[name]) != before[name]]
    if is_altered or altered:
        name = STATE_FILE if is_altered else altered[0]
        raise UserError(f"{folder / name} was altered since the run saved its state; train in another folder.")
    tied = {f"model.{name}": tensors[f"model.{other}"] for name, other in model.tied.items()}
    weights = {name: value for name, value in (tensors | tied).items() if name.startswith("model.")}
    model.load_state_dict({name.removeprefix("model."): value for name, value in weights.items()})
    optimizers.restore({name: value for name, value in tensors.items() if name not in weights})
    return step


def finish(folder: Path, model: LoopedModel, written: dict[str, str]) -> None:
    """Write the trained weights; the file of hashes comes first, so that a folder with weights has all hashes."""
    weights = _finite_weights(model)
    with atomic_file(folder / WEIGHTS) as scratch:
        write_tensors(weights, scratch)
        write_hashes(folder, written | {METRICS_FILE: sha256(folder / METRICS_FILE), WEIGHTS: sha256(scratch)})
    (folder / STATE_FILE).unlink(missing_ok=True)


def _read_state(folder: Path, with_tensors: bool) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Read the metadata of a state, which holds its step, and its tensors."""
    try:
        with safe_open(folder / STATE_FILE, framework="pt") as file:
            metadata, names = dict(file.metadata()), file.keys() if with_tensors else ()
            int(metadata["step"])
            return metadata, {name: file.get_tensor(name) for name in names}
    except (SafetensorError, RuntimeError, TypeError, KeyError, ValueError) as error:
        raise UserError(f"{folder / STATE_FILE} cannot be read ({error}); remove it to begin again.") from None


def _state_sha256(tensors: dict[str, Tensor], metadata: dict[str, str]) -> str:
    """The hash of all tensors and metadata of a state, independent of their order in the file."""
    return digest([metadata, tensors_sha256(sorted(tensors.items()))])


def _finite_weights(model: LoopedModel) -> dict[str, Tensor]:
    """Every weight tensor once, as a file holds it, after checking that it is finite."""
    state = model.state_dict()
    weights = {name: value.detach().cpu().contiguous() for name, value in state.items() if name not in model.tied}
    if first_not_finite(weights):
        raise UserError("The weights are no longer finite; lower training.learning_rate, and train in another folder.")
    return weights
