"""How is a model trained? The loop of steps: a run -> its folder, which is a checkpoint.

Every batch is a function of (settings, step), so the state file in the folder (`run_state`) is all that a killed run
needs to end bit-identical to one that ran through. Several workers may train one run: each takes its share of every
batch, and the first alone writes. The run says what is trained on what: on the answers of a task (`task_run`) or on the
tokens of a text (`language_run`).

Shapes: B rows (or tokens), T loops.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from loopscope.artifacts import sha256
from loopscope.errors import UserError
from loopscope.models.checkpoint_folder import CONFIG, WEIGHTS, check_hashes
from loopscope.progress import ProgressCallback, silent
from loopscope.tasks import Draws
from loopscope.training.objectives import (
    GateTraining,
    LoopLosses,
    LossFunction,
    Unrolling,
    draw_unrolling,
    load_objective,
    try_objective,
)
from loopscope.training.optimizers import Optimizers
from loopscope.training.parallel import SINGLE_WORKER, Workers
from loopscope.training.run_folder import DATA_FILE, STATE_FILE, append_metrics, claimed, cut_metrics, read_metrics
from loopscope.training.run_state import finish, restore, save_state
from loopscope.training.settings import Training, UserFunction, with_source

_EPOCH_STREAMS = 1 << 63
"""Streams from here on shuffle the epochs; the ones below draw data."""


class BatchLosses(NamedTuple):
    """What a model says of a batch at every loop."""

    cross_entropy: Tensor  # [T, B]
    correct: Tensor  # [T, B] whether the likeliest answer is right
    gate_logits: Tensor | None  # [T, B]
    detached_gate_logits: Tensor | None  # [T, B], from states through which no gradient flows


Losses = Callable[[Any, torch.device, Unrolling | None], BatchLosses]
"""At all loops of the model; with an `Unrolling` at the last of its loops, T = 1, and without halt logits."""


class TrainingRun(ABC):
    """What is trained, and on what: a frozen dataclass.

    Its settings have an `objective`, `training` and `num_loops`. Its model is a `LoopedModel` with a `block`, which
    every loop applies, and a `gate` (or None), which `halt` applies. Its batches have a length, and `take` takes rows.
    """

    settings: Any
    folder: Path
    function: UserFunction | None = None  # the objective's, where it is given and not imported
    gate_by_choice: ClassVar[bool] = False  # whether the settings decide if the model has a gate
    files: ClassVar[tuple[str, ...]] = (CONFIG, DATA_FILE)  # that are there before the first step, and stay as they are

    @property
    @abstractmethod
    def config(self) -> dict[str, Any]:
        """The checkpoint's `config.json`; under `run` it names all that the run's outcome depends on."""

    @property
    @abstractmethod
    def has_gate(self) -> bool: ...

    @abstractmethod
    def prepare(self) -> None:
        """Writes what the folder holds before the first step: `data.json` at least. The first worker alone does it."""

    @abstractmethod
    def initial_model(self) -> Any:
        """The model before its first step; the run's seed decides its weights."""

    @abstractmethod
    def losses(self, model: Any) -> nn.Module:
        """The `Losses` of a model, as a module: only a module's gradients can be averaged over workers."""

    @abstractmethod
    def batches(self) -> Callable[[int], Any]:
        """The batch of every step."""

    def finished(self, model: Any) -> Any:
        """The model as its checkpoint has it."""
        return model

    @abstractmethod
    def validate(self, model: Any, device: torch.device) -> dict[str, Any]:
        """Mean cross-entropy and accuracy of every loop on a sample of the validation data."""


_Run = TypeVar("_Run", bound=TrainingRun)


@dataclass(frozen=True)
class RunResult:
    folder: Path
    resumed_from: int
    metrics: list[dict[str, Any]]

    @property
    def final(self) -> dict[str, Any]:
        """The last validation of the run."""
        return self.metrics[-1]


def train_run(
    run: TrainingRun, device: torch.device, progress: ProgressCallback = silent, workers: Workers = SINGLE_WORKER
) -> RunResult:
    """Trains the run in its folder, from its beginning or from where it was interrupted."""
    folder, steps = run.folder, run.settings.training.steps
    workers.share(run.settings.training.batch_size)
    with workers.together():
        run, objective, gate_training = with_objective(run, device)
    with ExitStack() as held:
        with workers.together():
            if workers.is_main:
                held.enter_context(claimed(folder, run.config, run.files))
                if (folder / WEIGHTS).is_file():
                    (folder / STATE_FILE).unlink(missing_ok=True)
        start = steps
        if (folder / WEIGHTS).is_file():
            check_hashes(folder)
        else:
            held.enter_context(deterministic())
            start = _train(run, objective, gate_training, device, progress, workers)
        return RunResult(folder, start, read_metrics(folder, steps, finished=True))


def with_objective(run: _Run, device: torch.device) -> tuple[_Run, LossFunction, GateTraining]:
    """The run with the hash of its objective's source in its settings, the objective, and how it trains a gate."""
    settings = run.settings
    pinned = with_source(settings.objective, run.function)
    objective = load_objective(pinned, settings.training.seed, run.function)
    gate_training = try_objective(objective, settings.num_loops, run.has_gate, settings.training.steps, device)
    if run.has_gate and run.gate_by_choice and gate_training == "none":
        raise UserError(
            f"The objective '{pinned.name}' does not use loops.gate_logits, so the gate would stay as it began; set "
            "model.gate = 'none'."
        )
    pinned_run = replace(cast(Any, run), settings=msgspec.structs.replace(settings, objective=pinned))
    return pinned_run, objective, gate_training


def _train(
    run: TrainingRun,
    objective: LossFunction,
    gate_training: GateTraining,
    device: torch.device,
    progress: ProgressCallback,
    workers: Workers,
) -> int:
    """Takes all steps that are left; returns the number of those that were done before."""
    folder, settings = run.folder, run.settings
    every = settings.training
    with workers.together():
        if workers.is_main:
            if not (folder / STATE_FILE).is_file():  # nothing would tell that what an earlier try noted was altered
                (folder / DATA_FILE).unlink(missing_ok=True)
            run.prepare()
    with workers.together():
        model = run.initial_model().to(device)
        model.gradient_checkpointing = bool(every.checkpointing)
        if gate_training == "none" and model.gate is not None:
            model.gate.requires_grad_(False)  # or DDP waits for its gradients
        optimizers = Optimizers(model, every, gate_apart=gate_training == "decoupled")
        written = {name: sha256(folder / name) for name in run.files}
        start = restore(folder, model, optimizers, written)
        if workers.is_main:
            cut_metrics(folder, start)
        batch_of = run.batches()
    losses = workers.replicated(run.losses(model), some_unused=bool(settings.objective.truncated))
    mine = np.arange(workers.rank, every.batch_size, workers.count)  # a batch is sorted by length: even work for all
    if workers.count > 1:  # after its first pass DDP adds in another order: without one, a resumed run would differ
        _backward(losses, objective, batch_of(start).take(mine), start, settings, device)
        losses.zero_grad(set_to_none=True)
    note = ""
    for step in range(start, every.steps):
        done, last = step + 1, step + 1 == every.steps
        outcome = train_step(losses, objective, optimizers, batch_of(step).take(mine), step, settings, device)
        logging, validating, saving = (
            done % often == 0 or last for often in (every.log_every, every.validate_every, every.checkpoint_every)
        )
        if logging or saving:
            for name in ("loss", "loop_loss", "loop_accuracy"):  # gradients are averaged already
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
    answers: Losses,
    objective: LossFunction,
    optimizers: Optimizers,
    batch: Any,
    step: int,
    settings: Any,
    device: torch.device,
) -> dict[str, Any]:
    """One step of training on this batch; what it measured is still on its device, to be fetched only when wanted."""
    loss, losses, correct, loops = _backward(answers, objective, batch, step, settings, device)
    rate, norm = optimizers.step(step)
    return {
        **({} if loops is None else {"loops": loops}),  # that were run, where the objective draws them
        "loss": loss,
        "loop_loss": losses.mean(1),
        "loop_accuracy": correct.float().mean(1),
        "learning_rate": rate,
        "gradient_norm": norm,
    }


def _backward(
    answers: Losses, objective: LossFunction, batch: Any, step: int, settings: Any, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, int | None]:
    """The gradients of this batch; its loss, loss and correctness [T, B] of every answer, and the loops if drawn."""
    training = settings.training
    unrolling = draw_unrolling(settings.objective, settings.num_loops, training.seed, step)
    bf16 = device.type == "cuda" and training.bf16
    parts = []
    for rows in np.array_split(np.arange(len(batch)), min(training.accumulate or 1, len(batch))):
        with torch.autocast("cuda", torch.bfloat16) if bf16 else nullcontext():
            part = batch if len(rows) == len(batch) else batch.take(rows)
            losses, correct, gate_logits, detached = answers(part, device, unrolling)
            loss = objective(LoopLosses(losses, gate_logits, step, detached))
        share = len(rows) / len(batch)
        (loss if share == 1 else loss * share).backward()  # type: ignore[no-untyped-call]
        parts.append((loss.detach() * share, losses.detach(), correct))
    all_loss, all_losses, all_correct = zip(*parts, strict=True)
    loops = None if unrolling is None else unrolling.loops
    return torch.stack(all_loss).sum(), torch.cat(all_losses, dim=1), torch.cat(all_correct, dim=1), loops


def epoch_rows(count: int, settings: Training) -> Callable[[int], NDArray[np.int64]]:
    """The rows of every step's batch: the next ones of the shuffled epochs of `count` rows."""
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
    """The same bits every time, on the same device and with the same number of threads."""
    memory: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False  # it costs a fifth of a small model's step, and nothing here reads it
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        memory.fill_uninitialized_memory = before[1]
