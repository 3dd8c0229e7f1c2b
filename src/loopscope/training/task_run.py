"""How is a model trained on a task? On the losses of its answers at every loop.

Shapes: B rows, T loops.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from loopscope.config import Option, plain
from loopscope.errors import UserError, reason, reject
from loopscope.models.checkpoint_folder import CheckpointConfig
from loopscope.models.custom_model import MODELS, custom_model, register_model
from loopscope.models.device import accumulator, check_device, upload
from loopscope.models.looped_model import LoopedModel
from loopscope.models.model_settings import ModelSettings
from loopscope.models.transformer import LoopedTransformer
from loopscope.progress import ProgressCallback, silent
from loopscope.tasks import Examples, drawn, examples_sha256, overlap, training_fingerprints
from loopscope.training.objectives import Unrolling
from loopscope.training.parallel import SINGLE_WORKER, Workers
from loopscope.training.run_folder import CUSTOM_EXAMPLES, check_examples
from loopscope.training.settings import (
    Channels,
    CustomTaskSettings,
    RunSettings,
    UserFunction,
    custom_objective,
    read_settings,
    with_model_source,
)
from loopscope.training.training_loop import BatchLosses, RunResult, TrainingRun, epoch_rows, train_run


def train(
    settings: RunSettings | str,
    folder: Path | str,
    device: torch.device | str = "cpu",
    progress: ProgressCallback = silent,
    workers: Workers = SINGLE_WORKER,
    *,
    overrides: Sequence[str] = (),
    objective: UserFunction | str | None = None,
    options: Mapping[str, Option] | None = None,
) -> RunResult:
    """Train a looped model on a task, or continue an interrupted run.

    Parameters
    ----------
    settings
        A preset, a TOML file, or `RunSettings`.
    folder
        The folder of the run.
    device
        The device on which the model trains (default: "cpu").
    progress
        A function that LoopScope calls with the number of finished steps, the number of all steps, and a note.
    workers
        The processes that train together (default: only this process).
    overrides
        Changes of settings, such as `["training.steps=300"]`.
    objective
        A custom function that takes a `LoopLosses` object, or its name "module:function" (default: the objective of the
        settings).
    options
        Keyword arguments of a custom objective.

    Returns
    -------
    RunResult
        The folder, the step from which the run continued, and the final validation.

    Raises
    ------
    UserError
        If the settings are wrong, or if the folder holds another run.

    Examples
    --------
    >>> small = ["training.steps=2", "training.batch_size=8", "model.width=16", "task.train_examples=100"]
    >>> ls.train("demo", folder / "run", overrides=small).resumed_from
    0
    >>> ls.load_model(folder / "run").num_loops
    4
    """
    is_custom = objective is not None or options is not None
    chosen = custom_objective(objective or "", options) if is_custom else None
    read = read_settings(settings, [overrides] if isinstance(overrides, str) else overrides, chosen)
    run = TaskRun(read, Path(folder), objective if callable(objective) else None)
    return train_run(run, check_device(device) if isinstance(device, str) else device, progress, workers)


@dataclass(frozen=True)
class TaskRun(TrainingRun):
    """Train a model on a task's examples."""

    settings: RunSettings
    folder: Path
    function: UserFunction | None = None
    gate_by_choice: ClassVar[bool] = True

    @property
    def config(self) -> dict[str, Any]:
        settings, task = self.settings, self.settings.generator
        config = CheckpointConfig(
            vocab_size=task.vocab_size, block_size=settings.block_size, model=settings.model, run=plain(settings)
        )
        return plain(config)

    @property
    def has_gate(self) -> bool:
        return self.settings.model.gate != "none"

    @property
    def is_custom(self) -> bool:
        return self.settings.model.is_custom

    def with_model(self) -> Self:
        """The run itself, or the run with the hash of a custom model's source, after importing and trying the model."""
        if not self.is_custom:
            return self
        name = register_model(str(self.settings.model.name))  # the user's settings name it
        model = with_model_source(self.settings.model, MODELS[name])
        settings = msgspec.structs.replace(self.settings, model=model)
        try_custom_model(settings)
        return replace(self, settings=settings)

    def prepare(self) -> dict[str, Any]:
        """The split sizes, and the shares of validation and test that occur in the training data."""
        task = self.settings.generator
        sizes = {name: getattr(task, f"{name}_examples") for name in ("train", "validation", "test")}
        custom = {CUSTOM_EXAMPLES: examples_sha256(task)} if isinstance(self.settings, CustomTaskSettings) else {}
        if task.train_examples == 0:
            return {"examples": sizes | {"train": "online"}, **custom}
        known = training_fingerprints(task)
        shares = {name: overlap(drawn(task, name), known) for name in ("validation", "test")}
        return {"examples": sizes, "share_seen_in_training": shares, **custom}

    def initial_model(self) -> LoopedModel:
        return initial_model(self.settings)

    def losses(self, model: LoopedModel) -> nn.Module:
        return AnswerLosses(model)

    def batches(self) -> Callable[[int], Examples]:
        check_examples(self.folder, self.settings)
        return training_batches(self.settings)

    @torch.no_grad()
    def validate(self, model: LoopedModel, device: torch.device) -> dict[str, Any]:
        """The mean cross-entropy and accuracy of every loop, in evaluation mode."""
        task, losses = self.settings.generator, AnswerLosses(model)
        size = min(self.settings.training.validation_sample, task.validation_examples)
        examples = drawn(task, "validation").take(np.arange(size))
        sums, is_training = torch.zeros((2, model.num_loops), dtype=accumulator(device), device=device), model.training
        model.eval()
        for rows in examples.same_length_batches(1024):
            loss, correct, *_ = losses(examples.take(rows), device)
            sums = sums + torch.stack([each.to(sums.dtype).sum(1) for each in (loss, correct)])
        model.train(is_training)
        loss, accuracy = (sums / len(examples)).tolist()
        return {"validation_loss": loss, "validation_accuracy": accuracy}


def initial_model(settings: RunSettings) -> LoopedModel:
    """The model of a run on a task before its first step; the run's seed decides its weights.

    A decoupled gate leaves all other weights as in the fixed prior's run with the same seed. Every other run with a
    gate starts from different weights.
    """

    def make(model: ModelSettings) -> LoopedModel:
        kind = custom_model if model.is_custom else LoopedTransformer
        return kind(model, settings.generator.vocab_size, settings.block_size)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.training.seed)
        if settings.objective.channels in (None, Channels(1, 1)):
            return make(settings.model)
        trunk = make(msgspec.structs.replace(settings.model, gate="none"))
        model = make(settings.model)
        differing = model.load_state_dict(trunk.state_dict(), strict=False)
        own = [name for name in differing.missing_keys if not name.startswith("gate.")]
        reject(
            f"With a gate, '{settings.model.name}' has '{name}' in another way than without one, so that such a gate "
            "would change the trunk; keep all that is the gate's in self.gate."
            for name in (*own, *differing.unexpected_keys)
        )
        return model


def try_custom_model(settings: RunSettings) -> None:
    """Reject a custom model that cannot be trained on the task; it is tried on a few examples of the task."""
    name, task, gated = settings.model.name, settings.generator, settings.model.gate != "none"
    model, examples = initial_model(settings), drawn(task, "validation")
    rows = [int(examples.lengths.argmin()), int(examples.lengths.argmax()), int(examples.labels.argmax())]
    try:
        with torch.random.fork_rng(devices=[]):
            losses = AnswerLosses(model)(examples.take(rows), torch.device("cpu"))
            losses.cross_entropy.sum().backward()
    except (Exception, SystemExit) as error:
        raise UserError(f"The model '{name}' fails on examples of the task: {reason(error)}.") from error
    reject(_training_obstacles(model, gated, losses))


def _training_obstacles(model: LoopedModel, gated: bool, losses: BatchLosses) -> Iterator[str]:
    """Yield the reasons why training cannot use a custom model, from the losses of a few examples."""
    name, halts = type(model).__name__, losses.gate_logits
    for tensor, value in model.state_dict().items():
        if not value.is_floating_point():
            yield (
                f"'{tensor}' of {name} holds {value.dtype}, and a checkpoint holds floating-point numbers; register it "
                "with persistent=False."
            )
    if halts is None and gated:
        yield (
            f"This objective trains a gate, and halt of {name} returns None; give the model one "
            "(docs/how-to/your-model.md)."
        )
    if halts is not None and not gated:
        yield f"{name} has a gate without being asked for one; return None from halt unless gate= is given."
    if halts is None or losses.detached_gate_logits is None:
        return
    wrong = f"halt of {name} must make halt logits [...] of states [..., width], but made {list(halts.shape)}."
    if halts.shape != losses.cross_entropy.shape:
        yield wrong
    if not losses.detached_gate_logits.requires_grad:
        yield f"halt of {name} has nothing to learn; give it layers, in self.gate."
    module = getattr(model, "gate", None)
    known = {id(value) for value in module.parameters()} if isinstance(module, nn.Module) else set()
    parameters = {label: value for label, value in model.named_parameters() if value.requires_grad}
    gradients = torch.autograd.grad(losses.detached_gate_logits.sum(), list(parameters.values()), allow_unused=True)
    for (label, value), gradient in zip(parameters.items(), gradients, strict=True):
        if gradient is not None and id(value) not in known:
            yield f"halt of {name} computes with '{label}'; keep all that is the gate's in self.gate, and nothing else."


class AnswerLosses(nn.Module):
    """The losses of the answers to a task's examples, at every loop or at the last loop that runs."""

    def __init__(self, model: LoopedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Examples, device: torch.device, unrolling: Unrolling | None = None) -> BatchLosses:
        model = self.model
        tokens, lengths = torch.from_numpy(batch.tokens), torch.from_numpy(batch.lengths)  # the model uploads them
        positions, labels = (upload(array, device) for array in (batch.lengths - 1, batch.labels))
        if unrolling is None:
            out = model.loops(tokens, lengths, positions=positions)
            logits, halts, detached = out.logits.float(), out.gate_logits, model.halt(out.hidden.detach())
        else:
            state, halts, detached = model.begin(tokens, lengths, share=True), None, None
            _, read = model.deepest(state, unrolling.loops, positions, unrolling.truncated)
            logits = model.predict(read).float()[None]
        targets = labels.expand(len(logits), -1)
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
        return BatchLosses(losses, logits.argmax(-1) == targets, halts, detached)


def training_batches(settings: RunSettings) -> Callable[[int], Examples]:
    """The task examples of every step's batch: drawn online, or the next rows of the train split's shuffled epochs."""
    task, size, seed = settings.generator, settings.training.batch_size, settings.training.seed
    if task.train_examples == 0:
        return lambda step: task.batch(seed, step, size).by_length()
    examples, rows = drawn(task, "train"), epoch_rows(task.train_examples, settings.training)
    return lambda step: examples.take(rows(step)).by_length()
