"""The training loop: a run -> its folder, which is a checkpoint.

A run folder holds `config.json` (all settings), `data.json` (split sizes and their overlap), `metrics.jsonl`, and
`state.safetensors` (weights, optimizer and step) while it runs, `model.safetensors` once it is finished. Every batch
is a function of (settings, step), so the state file is all that a killed run needs to end bit-identical to one that
ran through; nothing in the folder depends on the time or on the machine's name. The state holds its own hash and those
of the other files, a finished folder has them in `hashes.json`: what was altered is refused. Several workers may train
one run: each takes its share of every batch, and the first alone writes. What is trained on what is the run's affair:
on the answers of a task (`task_run`) or on the tokens of a text (`language_run`).

Shapes: B rows (or tokens), T loops.
"""

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, Self, TypeVar, cast

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from loopscope.artifacts import (
    atomic_file,
    is_scratch,
    only_writer,
    remove_scratch,
    room_for,
    sha256,
    write_bytes,
    write_json,
)
from loopscope.config import differences, digest, read_json
from loopscope.errors import UserError
from loopscope.models import LoopedModel, LoopedTransformer, Ouro, read_checkpoint_config
from loopscope.models.checkpoint import CONFIG, WEIGHTS, ModelType, first_not_finite, write_tensors
from loopscope.models.contract import tensors_sha256
from loopscope.models.run_hashes import check_hashes, write_hashes
from loopscope.objectives import LoopLosses, Objective, Unrolling
from loopscope.progress import ProgressCallback, silent
from loopscope.tasks import Draws
from loopscope.training.custom_objectives import (
    GateTraining,
    LossFunction,
    UserFunction,
    load_objective,
    try_objective,
    with_source,
)
from loopscope.training.optimizers import Optimizers
from loopscope.training.parallel import SINGLE_WORKER, Workers
from loopscope.training.settings import Training

STATE_FILE = "state.safetensors"
METRICS_FILE = "metrics.jsonl"
DATA_FILE = "data.json"
_ORDER = 1 << 63
"""Streams from here on shuffle the epochs; the ones below draw data."""


class BatchLosses(NamedTuple):
    """What a model says of a batch at every loop."""

    cross_entropy: Tensor  # [T, B]
    correct: Tensor  # [T, B] whether the likeliest answer is right
    gate_logits: Tensor | None  # [T, B]
    detached_gate_logits: Tensor | None  # [T, B], from states through which no gradient flows


Losses = Callable[[Any, torch.device, Unrolling | None], BatchLosses]
"""At all loops of the model; with an `Unrolling` at the last of its loops, T = 1, and without halt logits."""


class TrainableSettings(Protocol):
    """The settings that all runs have."""

    @property
    def objective(self) -> Objective: ...

    @property
    def training(self) -> Training: ...

    @property
    def num_loops(self) -> int: ...


class Batch(Protocol):
    def take(self, rows: NDArray[np.int64], /) -> Self:
        """These rows alone: a worker's share."""


class TrainingRun(ABC):
    """What is trained, and on what: a frozen dataclass."""

    settings: Any  # `TrainableSettings`, and more
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
    def initial_model(self) -> LoopedTransformer | Ouro:
        """The model before its first step; the run's seed decides its weights."""

    @abstractmethod
    def losses(self, model: Any) -> nn.Module:
        """The `Losses` of a model, as a module: only a module's gradients can be averaged over workers."""

    @abstractmethod
    def batches(self) -> Callable[[int], Batch]:
        """The batch of every step."""

    @abstractmethod
    def validate(self, model: Any, device: torch.device) -> dict[str, Any]:
        """Mean cross-entropy and accuracy of every loop on a sample of the validation data."""


_Run = TypeVar("_Run", bound=TrainingRun)
_GATE_TRAINING: dict[str, GateTraining] = {"learned_gate": "joint", "decoupled_gate": "decoupled"}


@dataclass(frozen=True)
class RunResult:
    folder: Path
    resumed_from: int
    metrics: list[dict[str, Any]]

    @property
    def final(self) -> dict[str, Any]:
        """The last validation of the run."""
        for entry in reversed(self.metrics):
            if "validation_accuracy" in entry:
                return entry
        raise UserError(f"{self.folder / METRICS_FILE} has lost its last lines; train the run again in another folder.")


@dataclass(frozen=True)
class StepOutcome:
    """What a step measured, still on its device: a number is fetched only when it is wanted."""

    loss: Tensor
    loop_loss: Tensor
    loop_accuracy: Tensor
    gradient_norm: Tensor
    learning_rate: float
    loops: int | None = None  # that were run, where the objective draws them: then only the last has numbers

    def over(self, workers: Workers) -> "StepOutcome":
        """The same of the whole batch; gradients are averaged already."""
        loss, loop_loss, loop_accuracy = map(workers.mean, (self.loss, self.loop_loss, self.loop_accuracy))
        return replace(self, loss=loss, loop_loss=loop_loss, loop_accuracy=loop_accuracy)

    def numbers(self) -> dict[str, Any]:
        drawn = {} if self.loops is None else {"loops": self.loops}
        return {
            **drawn,
            "loss": self.loss.item(),
            "loop_loss": self.loop_loss.tolist(),
            "loop_accuracy": self.loop_accuracy.tolist(),
            "learning_rate": self.learning_rate,
            "gradient_norm": self.gradient_norm.item(),
        }


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
                held.enter_context(_claimed(run))
                if (folder / WEIGHTS).is_file():
                    (folder / STATE_FILE).unlink(missing_ok=True)
        if (folder / WEIGHTS).is_file():
            check_hashes(folder)
            return RunResult(folder, steps, _read_metrics(folder, steps))
        held.enter_context(deterministic())
        return _train(run, objective, gate_training, device, progress, workers)


def with_objective(run: _Run, device: torch.device) -> tuple[_Run, LossFunction, GateTraining]:
    """The run with the hash of its objective's source in its settings, the objective, and how it trains a gate.

    A function of the user's was tried.
    """
    settings = run.settings
    pinned = with_source(settings.objective, run.function)
    objective = load_objective(pinned, settings.training.seed, run.function)
    if not pinned.is_custom:
        return run, objective, _GATE_TRAINING.get(pinned.name, "none")
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
) -> RunResult:
    folder, settings = run.folder, run.settings
    every = settings.training
    with workers.together():
        if workers.is_main:
            remove_scratch(folder)
            if not (folder / STATE_FILE).is_file():  # nothing would tell that what an earlier try noted was altered
                (folder / DATA_FILE).unlink(missing_ok=True)
            run.prepare()
    with workers.together():
        model = run.initial_model().to(device)
        if gate_training == "none" and model.gate is not None:
            model.gate.requires_grad_(False)  # or DDP waits for its gradients
        optimizers = Optimizers(model, every, gate_apart=gate_training == "decoupled")
        written = {name: sha256(folder / name) for name in run.files}
        start = _restore(folder, model, optimizers, written)
        if workers.is_main:
            write_bytes(folder / METRICS_FILE, b"".join(map(_line, _read_metrics(folder, start))))
        batch_of = run.batches()
    losses = workers.replicated(run.losses(model), some_unused=bool(settings.objective.truncated))
    mine = np.arange(workers.rank, every.batch_size, workers.count)  # a batch is sorted by length: even work for all
    if workers.count > 1:  # after its first pass DDP adds in another order: without one, a resumed run would differ
        unrolling = settings.objective.unrolling(settings.num_loops, every.seed, start)
        _backward(losses, objective, batch_of(start).take(mine), start, unrolling, settings, device)
        losses.zero_grad(set_to_none=True)
    note = ""
    for step in range(start, every.steps):
        done, last = step + 1, step + 1 == every.steps
        outcome = train_step(losses, objective, optimizers, batch_of(step).take(mine), step, settings, device)
        logging, validating, saving = (
            done % often == 0 or last for often in (every.log_every, every.validate_every, every.checkpoint_every)
        )
        if logging or saving:
            outcome = outcome.over(workers)
            if not torch.isfinite(outcome.loss):
                raise UserError(f"The loss is no longer finite at step {done}; lower training.learning_rate.")
        if logging:
            note = f"loss {outcome.loss.item():.3f}"
        if logging or validating or saving:
            with workers.together():
                if logging and workers.is_main:
                    _log(folder, {"step": done, **outcome.numbers()})
                if validating and workers.is_main:
                    _log(folder, {"step": done, **run.validate(model, device)})
                if saving and not last and workers.is_main:
                    _save(folder, model, optimizers, done, written)
        progress(done, every.steps, note)
    with workers.together():
        if workers.is_main:
            _finish(folder, model, written)
            (folder / STATE_FILE).unlink(missing_ok=True)
    return RunResult(folder, start, _read_metrics(folder, every.steps))


def steps_done(folder: Path) -> int:
    """How many steps of the run in `folder` need not be done again; all of a finished run."""
    if (folder / WEIGHTS).is_file():
        run = trained_with(folder)
        return 0 if run is None else int(run["training"]["steps"])
    if not (folder / STATE_FILE).is_file():
        return 0
    with _open_state(folder) as file:
        return _saved_step(file)


def logged_steps(folder: Path) -> int:
    """How far the run in `folder` has come, as it said last; it may have to repeat some of it."""
    try:
        return int(json.loads((folder / METRICS_FILE).read_bytes().splitlines()[-1])["step"])
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return 0


def train_step(
    answers: Losses,
    objective: LossFunction,
    optimizers: Optimizers,
    batch: Any,
    step: int,
    settings: TrainableSettings,
    device: torch.device,
) -> StepOutcome:
    """One step of training on this batch."""
    unrolling = settings.objective.unrolling(settings.num_loops, settings.training.seed, step)
    loss, losses, correct = _backward(answers, objective, batch, step, unrolling, settings, device)
    rate, norm = optimizers.step(step)
    loops = None if unrolling is None else unrolling.loops
    return StepOutcome(loss.detach(), losses.detach().mean(1), correct.float().mean(1), norm, rate, loops)


def _backward(
    answers: Losses,
    objective: LossFunction,
    batch: Any,
    step: int,
    unrolling: Unrolling | None,
    settings: TrainableSettings,
    device: torch.device,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of this batch; its loss, and loss and correctness [T, B] of every answer."""
    with _autocast(settings, device):
        losses, correct, gate_logits, detached = answers(batch, device, unrolling)
        loss = objective(LoopLosses(losses, gate_logits, step, detached))
    loss.backward()  # type: ignore[no-untyped-call]
    return loss, losses, correct


def epoch_rows(count: int, settings: Training) -> Callable[[int], NDArray[np.int64]]:
    """The rows of every step's batch: the next ones of the shuffled epochs of `count` rows."""
    size = settings.batch_size

    @lru_cache(maxsize=2)
    def order(epoch: int) -> NDArray[np.int64]:
        return Draws(settings.seed, _ORDER + epoch).permutation(count)

    def rows(step: int) -> NDArray[np.int64]:
        position = np.arange(step * size, (step + 1) * size)
        epochs = position // count
        return np.concatenate([order(int(epoch))[position[epochs == epoch] % count] for epoch in np.unique(epochs)])

    return rows


@contextmanager
def _claimed(run: TrainingRun) -> Iterator[None]:
    """Makes the run's folder its own, or finds that it is; another run's folder is refused, and one at work."""
    if run.folder.exists() and not run.folder.is_dir():
        raise UserError(f"{run.folder} is a file; give a folder.")
    with only_writer(run.folder):
        _claim(run)
        yield


def _claim(run: TrainingRun) -> None:
    folder = run.folder
    if (folder / CONFIG).is_file():
        before = trained_with(folder)
        if before is None:
            raise UserError(f"{folder} holds a checkpoint that was not trained here; choose another --out.")
        changed = differences(before, run.config["run"])
        if changed == ["objective.source_sha256"]:
            raise UserError(
                f"{folder} holds a run whose objective '{run.settings.objective.name}' had another source text; choose "
                "another --out, or put the old text back."
            )
        if changed:
            raise UserError(
                f"{folder} holds a run with other settings ({', '.join(changed[:3])}); choose another --out, "
                "or remove it."
            )
        found = read_json(dict[str, Any], folder / CONFIG, "run configuration")
        altered = [key for key, value in run.config.items() if found.get(key, value) != value]
        if altered:
            raise UserError(
                f"{folder / CONFIG} was altered: its {', '.join(altered[:3])} contradicts the settings of its run; "
                "train the run again in another folder."
            )
        return
    if folder.exists() and any(not is_scratch(path) for path in folder.iterdir()):
        raise UserError(f"{folder} exists and is not a run; choose another --out.")
    write_json(folder / CONFIG, run.config)


def trained_with(folder: Path) -> dict[str, Any] | None:
    """The settings of the run that trained the checkpoint in `folder`; None if it was not trained here."""
    if read_json(ModelType, folder / CONFIG, "run configuration").model_type == "loopscope":
        return read_checkpoint_config(folder).run
    return read_json(_Trained, folder / CONFIG, "run configuration").run


class _Trained(msgspec.Struct, frozen=True):
    run: dict[str, Any] | None = None


def _save(folder: Path, model: LoopedModel, optimizers: Optimizers, step: int, written: dict[str, str]) -> None:
    tensors = {f"model.{name}": value for name, value in _weights(model).items()}
    tensors |= {f"optimizer.{name}": value for name, value in optimizers.tensors().items()}
    tensors = _fetched(tensors)
    files = json.dumps(written | {METRICS_FILE: _metrics_sha256(folder, step)})
    metadata = {"step": str(step), "files": files}
    _write_tensors(folder / STATE_FILE, tensors, metadata | {"sha256": _state_sha256(tensors, metadata)})


def _state_sha256(tensors: dict[str, Tensor], metadata: dict[str, str]) -> str:
    """Of everything that a state says, whatever the order in its file."""
    return digest([metadata, tensors_sha256(dict(sorted(tensors.items())))])


def _finish(folder: Path, model: LoopedModel, written: dict[str, str]) -> None:
    """Writes the weights; the hashes of all files come first, so that a folder with weights has those of its files."""
    written = written | {METRICS_FILE: sha256(folder / METRICS_FILE)}
    _write_tensors(
        folder / WEIGHTS,
        _weights(model),
        ready=lambda scratch: write_hashes(folder, written | {WEIGHTS: sha256(scratch)}),
    )


def _weights(model: LoopedModel) -> dict[str, Tensor]:
    """Every tensor once."""
    return {name: value for name, value in model.state_dict().items() if name not in model.tied}


def _restore(folder: Path, model: LoopedModel, optimizers: Optimizers, written: dict[str, str]) -> int:
    """Puts the run back to its last saved state; returns the number of steps done."""
    if not (folder / STATE_FILE).is_file():
        return 0
    with _open_state(folder) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - safe_open is no mapping
        step = _saved_step(file)
        _check_state(folder, tensors, file.metadata(), step, written)
        weights = _part(tensors, "model.")
        model.load_state_dict(weights | {name: weights[other] for name, other in model.tied.items()})
        optimizers.restore(_part(tensors, "optimizer."))
        return step


def _check_state(
    folder: Path, tensors: dict[str, Tensor], metadata: dict[str, str], step: int, written: dict[str, str]
) -> None:
    """Refuses a state, or files beside it, that are not as they were when it was saved; earlier ones have no hashes."""
    if "sha256" not in metadata:
        return
    expected = metadata.pop("sha256")
    if _state_sha256(tensors, metadata) != expected:
        raise UserError(f"{folder / STATE_FILE} was altered since it was saved; remove it, and the run begins again.")
    now = written | {METRICS_FILE: _metrics_sha256(folder, step)}
    for name, before in json.loads(metadata["files"]).items():
        if now.get(name, before) != before:
            raise UserError(
                f"{folder / name} was altered since the run saved its state; train the run again in another folder."
            )


@contextmanager
def _open_state(folder: Path) -> Iterator[Any]:
    try:
        with safe_open(folder / STATE_FILE, framework="pt") as file:
            yield file
    except UserError:
        raise
    except (SafetensorError, RuntimeError, TypeError, KeyError, ValueError) as error:
        raise UserError(
            f"{folder / STATE_FILE} cannot be read ({error}); remove it, and the run begins again."
        ) from None


def _saved_step(file: Any) -> int:
    return int(file.metadata()["step"])


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _fetched(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().cpu().contiguous() for name, value in tensors.items()}


def _write_tensors(
    path: Path,
    tensors: dict[str, Tensor],
    metadata: dict[str, str] | None = None,
    ready: Callable[[Path], None] | None = None,
) -> None:
    """Writes a file, whole or not at all; `ready` is called when all of it is written, before it is in its place."""
    held = _fetched(tensors)
    if first_not_finite({name: value for name, value in held.items() if not name.startswith("optimizer.")}) is not None:
        raise UserError("The weights are no longer finite; lower training.learning_rate, and train in another folder.")
    with atomic_file(path) as scratch:
        write_tensors(held, scratch, metadata)
        if ready is not None:
            ready(scratch)


def _log(folder: Path, entry: dict[str, Any]) -> None:
    with room_for(folder / METRICS_FILE), (folder / METRICS_FILE).open("ab") as file:
        file.write(_line(entry))


def _line(entry: dict[str, Any]) -> bytes:
    return json.dumps(entry).encode() + b"\n"


def _metrics_sha256(folder: Path, steps: int) -> str:
    """Of what the first `steps` steps logged, which is on disk by now: a state must not know more than there is."""
    if (folder / METRICS_FILE).is_file():
        with (folder / METRICS_FILE).open("rb") as file:
            os.fsync(file)
    return hashlib.sha256(b"".join(map(_line, _read_metrics(folder, steps)))).hexdigest()


def _read_metrics(folder: Path, steps: int) -> list[dict[str, Any]]:
    """What the first `steps` steps logged; a killed run may have logged more, and its last line may be cut off."""
    if not (folder / METRICS_FILE).is_file():
        return []
    lines = (folder / METRICS_FILE).read_bytes().split(b"\n")[:-1]
    try:
        entries = [json.loads(line) for line in lines]
        return [entry for entry in entries if entry["step"] <= steps]
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{folder / METRICS_FILE} was altered; train the run again in another folder.") from None


def _autocast(settings: TrainableSettings, device: torch.device) -> AbstractContextManager[Any]:
    if device.type == "cuda" and settings.training.bf16:
        return torch.autocast("cuda", torch.bfloat16)
    return nullcontext()


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
