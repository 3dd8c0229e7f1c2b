"""How is a looped Transformer trained on a task? By the answers that it gives at every loop.

Shapes: B rows, T loops.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from loopscope.config import plain
from loopscope.models.checkpoint_folder import CheckpointConfig
from loopscope.models.device import accumulator, check_device, upload
from loopscope.models.transformer import LoopedTransformer
from loopscope.progress import ProgressCallback, silent
from loopscope.tasks import Examples, drawn, examples_sha256, overlap, training_fingerprints
from loopscope.training.objectives import Unrolling
from loopscope.training.parallel import SINGLE_WORKER, Workers
from loopscope.training.run_folder import CUSTOM_EXAMPLES, check_examples
from loopscope.training.settings import (
    CustomTaskSettings,
    Option,
    RunSettings,
    UserFunction,
    custom_objective,
    read_settings,
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
    """Trains the run in `folder`, from its beginning or from where it was interrupted.

    `settings` are those of a preset or a TOML file (with `a.b=c` overrides), or made already. `objective` is a function
    of the user's or "module:function", in place of what they say, and `options` are its keyword arguments.
    """
    is_custom = objective is not None or options is not None
    chosen = custom_objective(objective or "", options) if is_custom else None
    read = read_settings(settings, [overrides] if isinstance(overrides, str) else overrides, chosen)
    run = TaskRun(read, Path(folder), objective if callable(objective) else None)
    return train_run(run, check_device(device) if isinstance(device, str) else device, progress, workers)


@dataclass(frozen=True)
class TaskRun(TrainingRun):
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

    def prepare(self) -> dict[str, Any]:
        """Split sizes, and how much of validation and test occurs in the training data."""
        task = self.settings.generator
        sizes = {name: getattr(task, f"{name}_examples") for name in ("train", "validation", "test")}
        custom = {CUSTOM_EXAMPLES: examples_sha256(task)} if isinstance(self.settings, CustomTaskSettings) else {}
        if task.train_examples == 0:
            return {"examples": sizes | {"train": "online"}, **custom}
        known = training_fingerprints(task)
        shares = {name: overlap(drawn(task, name), known) for name in ("validation", "test")}
        return {"examples": sizes, "share_seen_in_training": shares, **custom}

    def initial_model(self) -> LoopedTransformer:
        return initial_model(self.settings)

    def losses(self, model: LoopedTransformer) -> nn.Module:
        return AnswerLosses(model)

    def batches(self) -> Callable[[int], Examples]:
        check_examples(self.folder, self.settings)
        return training_batches(self.settings)

    @torch.no_grad()
    def validate(self, model: LoopedTransformer, device: torch.device) -> dict[str, Any]:
        """Mean cross-entropy and accuracy of every loop."""
        task, losses = self.settings.generator, AnswerLosses(model)
        size = min(self.settings.training.validation_sample, task.validation_examples)
        examples = drawn(task, "validation").take(np.arange(size))
        sums = torch.zeros((2, model.num_loops), dtype=accumulator(device), device=device)
        for rows in examples.same_length_batches(1024):
            loss, correct, *_ = losses(examples.take(rows), device)
            sums = sums + torch.stack([each.to(sums.dtype).sum(1) for each in (loss, correct)])
        loss, accuracy = (sums / len(examples)).tolist()
        return {"validation_loss": loss, "validation_accuracy": accuracy}


def initial_model(settings: RunSettings) -> LoopedTransformer:
    """The model before its first step; the run's seed decides its weights.

    All of it but a decoupled gate is what the fixed prior's run of the same seed starts from, and so stays the same.
    """
    sizes = settings.generator.vocab_size, settings.block_size
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.training.seed)
        if settings.objective.name != "decoupled_gate":
            return LoopedTransformer(settings.model, *sizes)
        trunk = LoopedTransformer(msgspec.structs.replace(settings.model, gate="none"), *sizes)
        model = LoopedTransformer(settings.model, *sizes)
        model.load_state_dict(trunk.state_dict(), strict=False)
        return model


class AnswerLosses(nn.Module):
    """Of the answers at the marker, at every loop or at the last that is run."""

    def __init__(self, model: LoopedTransformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Examples, device: torch.device, unrolling: Unrolling | None = None) -> BatchLosses:
        model = self.model
        tokens, lengths = torch.from_numpy(batch.tokens), torch.from_numpy(batch.lengths)  # the model takes them there
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
    """The batch of every step: drawn online, or the next rows of the shuffled epochs of the train split."""
    task, size, seed = settings.generator, settings.training.batch_size, settings.training.seed
    if task.train_examples == 0:
        return lambda step: task.batch(seed, step, size).by_length()
    examples, rows = drawn(task, "train"), epoch_rows(task.train_examples, settings.training)
    return lambda step: examples.take(rows(step)).by_length()
