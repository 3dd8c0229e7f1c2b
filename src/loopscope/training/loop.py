"""The training loop: settings -> a run folder that is a checkpoint.

A run folder holds `config.json` (all settings), `data.json` (split sizes and their overlap), `metrics.jsonl`, and
`state.safetensors` (weights, optimizer and step) while it runs, `model.safetensors` once it is finished. Every batch
is a function of (settings, step), so the state file is all that a killed run needs to end bit-identical to one that
ran through; nothing in the folder depends on the time or on the machine's name. Several workers may train one run:
each takes its share of every batch, and the first alone writes.

Shapes: B rows, M tokens, T loops, V vocabulary.
"""

import fcntl
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from loopscope.artifacts import atomic_file, is_scratch, remove_scratch, write_bytes, write_json
from loopscope.config import differences, plain
from loopscope.errors import UserError
from loopscope.models import CheckpointConfig, LoopedTransformer, read_checkpoint_config
from loopscope.models.checkpoint import CONFIG, WEIGHTS
from loopscope.progress import Advance, silent
from loopscope.tasks import Draws, Examples, drawn, overlap, training_fingerprints
from loopscope.training.optimizers import Optimizers
from loopscope.training.parallel import ALONE, Workers
from loopscope.training.settings import RunSettings

STATE = "state.safetensors"
METRICS = "metrics.jsonl"
DATA = "data.json"
_ORDER = 1 << 63
"""Streams from here on shuffle the epochs; the ones below draw data."""

Answers = Callable[[Examples, torch.device], tuple[Tensor, Tensor, Tensor | None]]
"""A model's `answer_losses` of a batch."""


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
        raise UserError(f"{self.folder / METRICS} has lost its last lines; train the run again in another folder.")


@dataclass(frozen=True)
class Outcome:
    """What a step measured, still on its device: a number is fetched only when it is wanted."""

    loss: Tensor
    loop_loss: Tensor
    loop_accuracy: Tensor
    gradient_norm: Tensor
    learning_rate: float

    def over(self, workers: Workers) -> "Outcome":
        """The same of the whole batch; gradients are averaged already."""
        loss, loop_loss, loop_accuracy = map(workers.mean, (self.loss, self.loop_loss, self.loop_accuracy))
        return replace(self, loss=loss, loop_loss=loop_loss, loop_accuracy=loop_accuracy)

    def numbers(self) -> dict[str, Any]:
        return {
            "loss": self.loss.item(),
            "loop_loss": self.loop_loss.tolist(),
            "loop_accuracy": self.loop_accuracy.tolist(),
            "learning_rate": self.learning_rate,
            "gradient_norm": self.gradient_norm.item(),
        }


def train(
    settings: RunSettings,
    folder: Path,
    device: torch.device,
    progress: Advance = silent,
    workers: Workers = ALONE,
) -> RunResult:
    """Trains the run in `folder`, from its beginning or from where it was interrupted."""
    workers.share(settings.training.batch_size)
    with ExitStack() as held:
        with workers.together():
            if workers.leads:
                _claim(folder, settings)
                if not (folder / WEIGHTS).is_file():
                    held.enter_context(_lock(folder))
                else:
                    (folder / STATE).unlink(missing_ok=True)
        if (folder / WEIGHTS).is_file():
            return RunResult(folder, settings.training.steps, _read_metrics(folder, settings.training.steps))
        held.enter_context(deterministic())
        return _train(settings, folder, device, progress, workers)


def _train(settings: RunSettings, folder: Path, device: torch.device, progress: Advance, workers: Workers) -> RunResult:
    every = settings.training
    with workers.together():
        if workers.leads:
            remove_scratch(folder)
            if not (folder / DATA).is_file():
                write_json(folder / DATA, describe_data(settings))
        model = initial_model(settings).to(device)
        optimizers = Optimizers(model, every)
        start = _restore(folder, model, optimizers)
        if workers.leads:
            write_bytes(folder / METRICS, b"".join(map(_line, _read_metrics(folder, start))))
        batch_of = batches(settings)
        size = min(every.validation_sample, settings.task.validation_examples)
        sample = drawn(settings.task, "validation").take(np.arange(size))
    answers = workers.replicated(AnswerLosses(model))
    mine = np.arange(workers.rank, every.batch_size, workers.count)  # a batch is sorted by length: even work for all
    if workers.count > 1:  # after its first pass DDP adds in another order: without one, a resumed run would differ
        _backward(answers, batch_of(start).take(mine), settings, device)
        answers.zero_grad(set_to_none=True)
    note = ""
    for step in range(start, every.steps):
        done, last = step + 1, step + 1 == every.steps
        outcome = train_step(answers, optimizers, batch_of(step).take(mine), step, settings, device)
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
                if logging and workers.leads:
                    _log(folder, {"step": done, **outcome.numbers()})
                if validating and workers.leads:
                    _log(folder, {"step": done, **validate(model, sample, device)})
                if saving and not last and workers.leads:
                    _save(folder, model, optimizers, done)
        progress(done, every.steps, note)
    with workers.together():
        if workers.leads:
            _write_tensors(folder / WEIGHTS, model.state_dict())
            (folder / STATE).unlink(missing_ok=True)
    return RunResult(folder, start, _read_metrics(folder, every.steps))


def steps_done(folder: Path) -> int:
    """How many steps of the run in `folder` need not be done again; all of a finished run."""
    if (folder / WEIGHTS).is_file():
        return int(read_checkpoint_config(folder).run["training"]["steps"])
    if not (folder / STATE).is_file():
        return 0
    with _open_state(folder) as file:
        return _saved_step(file)


def logged_steps(folder: Path) -> int:
    """How far the run in `folder` has come, as it said last; it may have to repeat some of it."""
    try:
        return int(json.loads((folder / METRICS).read_bytes().splitlines()[-1])["step"])
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return 0


def initial_model(settings: RunSettings) -> LoopedTransformer:
    """The model before its first step; the run's seed decides its weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.training.seed)
        return LoopedTransformer(settings.model, settings.task.vocab_size, settings.block_size)


def answer_losses(
    model: LoopedTransformer, batch: Examples, device: torch.device
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cross-entropy [T, B] at the answer marker, whether the answer is right [T, B], and the halt logits [T, B]."""
    tokens, lengths, labels = (
        torch.from_numpy(array).to(device, non_blocking=True) for array in (batch.tokens, batch.lengths, batch.labels)
    )
    out = model.loops(tokens, lengths, positions=lengths - 1)
    logits = out.logits.float()
    targets = labels.expand(len(logits), -1)
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
    return losses, logits.argmax(-1) == targets, out.gate_logits


class AnswerLosses(nn.Module):
    """`answer_losses` of a model, as a module: only a module's gradients can be averaged over workers."""

    def __init__(self, model: LoopedTransformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Examples, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
        return answer_losses(self.model, batch, device)


@torch.no_grad()
def validate(model: LoopedTransformer, examples: Examples, device: torch.device) -> dict[str, Any]:
    """Mean cross-entropy and accuracy of every loop."""
    loss: Tensor | float = 0.0
    right: Tensor | float = 0.0
    for rows in examples.same_length_batches(1024):
        losses, correct, _ = answer_losses(model, examples.take(rows), device)
        loss, right = loss + losses.double().sum(1), right + correct.double().sum(1)
    return {
        "validation_loss": (torch.as_tensor(loss) / len(examples)).tolist(),
        "validation_accuracy": (torch.as_tensor(right) / len(examples)).tolist(),
    }


def train_step(
    answers: Answers,
    optimizers: Optimizers,
    batch: Examples,
    step: int,
    settings: RunSettings,
    device: torch.device,
) -> Outcome:
    """One step of training on this batch."""
    loss, losses, correct = _backward(answers, batch, settings, device)
    rate, norm = optimizers.step(step)
    return Outcome(loss.detach(), losses.detach().mean(1), correct.float().mean(1), norm, rate)


def _backward(
    answers: Answers, batch: Examples, settings: RunSettings, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of this batch; its loss, and loss and correctness [T, B] of every answer."""
    with _autocast(settings, device):
        losses, correct, gate_logits = answers(batch, device)
        loss = settings.objective.loss(losses, gate_logits)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss, losses, correct


def batches(settings: RunSettings) -> Callable[[int], Examples]:
    """The batch of every step: drawn online, or the next rows of the shuffled epochs of the train split."""
    task, size, seed = settings.task, settings.training.batch_size, settings.training.seed
    if task.train_examples == 0:
        return lambda step: task.batch(seed, step, size).by_length()
    examples = drawn(task, "train")

    @lru_cache(maxsize=2)
    def order(epoch: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        return Draws(seed, _ORDER + epoch).permutation(len(examples))

    def batch(step: int) -> Examples:
        position = np.arange(step * size, (step + 1) * size)
        epochs = position // len(examples)
        rows = [order(int(epoch))[position[epochs == epoch] % len(examples)] for epoch in np.unique(epochs)]
        return examples.take(np.concatenate(rows)).by_length()

    return batch


def _claim(folder: Path, settings: RunSettings) -> None:
    """Makes `folder` the folder of this run, or finds that it is; another run's folder is refused."""
    config = CheckpointConfig(
        vocab_size=settings.task.vocab_size,
        block_size=settings.block_size,
        model=settings.model,
        run=plain(settings),
    )
    if (folder / CONFIG).is_file():
        changed = differences(read_checkpoint_config(folder).run, config.run)
        if changed:
            raise UserError(
                f"{folder} holds a run with other settings ({', '.join(changed[:3])}); choose another --out, "
                "or remove it."
            )
        return
    if folder.exists() and (not folder.is_dir() or any(not is_scratch(path) for path in folder.iterdir())):
        raise UserError(f"{folder} exists and is not a run; choose another --out.")
    write_json(folder / CONFIG, config)


def describe_data(settings: RunSettings) -> dict[str, Any]:
    """Split sizes, and how much of validation and test occurs in the training data."""
    task = settings.task
    sizes = {name: getattr(task, f"{name}_examples") for name in ("train", "validation", "test")}
    if task.train_examples == 0:
        return {"examples": sizes | {"train": "online"}}
    known = training_fingerprints(task)
    return {
        "examples": sizes,
        "share_seen_in_training": {name: overlap(drawn(task, name), known) for name in ("validation", "test")},
    }


def _save(folder: Path, model: LoopedTransformer, optimizers: Optimizers, step: int) -> None:
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    tensors |= {f"optimizer.{name}": value for name, value in optimizers.tensors().items()}
    _write_tensors(folder / STATE, tensors, {"step": str(step)})


def _restore(folder: Path, model: LoopedTransformer, optimizers: Optimizers) -> int:
    """Puts the run back to its last saved state; returns the number of steps done."""
    if not (folder / STATE).is_file():
        return 0
    with _open_state(folder) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - safe_open is no mapping
        model.load_state_dict(_part(tensors, "model."))
        optimizers.restore(_part(tensors, "optimizer."))
        return _saved_step(file)


@contextmanager
def _open_state(folder: Path) -> Iterator[Any]:
    try:
        with safe_open(folder / STATE, framework="pt") as file:
            yield file
    except (SafetensorError, RuntimeError, TypeError, KeyError, ValueError) as error:
        raise UserError(f"{folder / STATE} cannot be read ({error}); remove it, and the run begins again.") from None


def _saved_step(file: Any) -> int:
    return int(file.metadata()["step"])


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    held = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    try:
        with atomic_file(path) as scratch:
            save_file(held, scratch, metadata)
    except SafetensorError as error:
        raise UserError(f"{path} could not be written ({error}); make room, and the same command continues.") from None


def _log(folder: Path, entry: dict[str, Any]) -> None:
    with (folder / METRICS).open("ab", buffering=0) as file:
        file.write(_line(entry))


def _line(entry: dict[str, Any]) -> bytes:
    return json.dumps(entry).encode() + b"\n"


def _read_metrics(folder: Path, steps: int) -> list[dict[str, Any]]:
    """What the first `steps` steps logged; a killed run may have logged more, and its last line may be cut off."""
    if not (folder / METRICS).is_file():
        return []
    lines = (folder / METRICS).read_bytes().split(b"\n")[:-1]
    try:
        entries = [json.loads(line) for line in lines]
        return [entry for entry in entries if entry["step"] <= steps]
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{folder / METRICS} was altered; train the run again in another folder.") from None


def _autocast(settings: RunSettings, device: torch.device) -> AbstractContextManager[Any]:
    if device.type == "cuda" and settings.training.bf16:
        return torch.autocast("cuda", torch.bfloat16)
    return nullcontext()


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """One process at a time trains in a folder; the lock goes with the process, however it ends."""
    with (folder / CONFIG).open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"Another process is training in {folder}; wait for it, or choose another --out.") from None
        yield


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
