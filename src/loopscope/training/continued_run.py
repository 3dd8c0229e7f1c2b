"""How is a language model trained further? From a checkpoint, on windows of a text, all of its weights or adapters.

What a looped model that was made from an ordinary one needs: it has never seen its own second loop. What each loop says
is held against the text, or against what a teacher says of it (distillation: KL at every loop), which for a looped
Llama is the model that it was made from. The folder of the run is a checkpoint of the same kind as its start.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from loopscope.artifacts import sha256
from loopscope.config import plain, read_json
from loopscope.errors import UserError
from loopscope.models import LoopedModel, load_model
from loopscope.models.checkpoint import (
    BESIDE_WEIGHTS,
    CONFIG,
    end_tokens,
    gate_tensors,
    model_without_weights,
    stored_sha256,
)
from loopscope.models.tokenizer import FILE as TOKENIZER
from loopscope.objectives import GATED
from loopscope.training.adapters import add_adapters, merge_adapters
from loopscope.training.language_run import TextRun, TokenLosses
from loopscope.training.loop import TrainingRun
from loopscope.training.text_settings import ContinueSettings
from loopscope.writing import write_bytes


@dataclass(frozen=True)
class ContinuedRun(TextRun):
    settings: ContinueSettings
    start: Path
    teacher: Path | None = None

    def __post_init__(self) -> None:
        found, given = self._empty, self.settings
        if given.loops not in (None, found.num_loops):
            raise UserError(f"loops is {given.loops}, and {self.start} has {found.num_loops}; leave it out.")
        if given.context > found.block_size:
            raise UserError(f"context is {given.context}, and {self.start} takes {found.block_size} tokens.")
        object.__setattr__(self, "settings", msgspec.structs.replace(given, loops=found.num_loops))
        if given.objective.name in GATED and not self.has_gate:
            raise UserError(
                f"The objective '{given.objective.name}' trains a gate, and {self.start} has none; loop it with --gate "
                "linear, or choose another objective."
            )
        if (given.targets == "teacher") != (self.teacher is not None):
            raise UserError("targets = 'teacher' and a teacher (--teacher CHECKPOINT) go together; one is missing.")
        if self.teacher is not None:
            self._check_teacher(self.teacher)

    def _check_teacher(self, teacher: Path) -> None:
        """Refuses one that means something else by the same tokens."""
        vocabularies = self._empty.vocab_size, model_without_weights(teacher).vocab_size
        tokenizers = [each / TOKENIZER for each in (self.start, teacher) if (each / TOKENIZER).is_file()]
        if vocabularies[0] != vocabularies[1] or len({sha256(each) for each in tokenizers}) > 1:
            raise UserError(f"The teacher {teacher} has other tokens than {self.start}; take one with its tokenizer.")

    @property
    def files(self) -> tuple[str, ...]:  # type: ignore[override]
        return (*TrainingRun.files, *(name for name in BESIDE_WEIGHTS if (self.start / name).is_file()))

    @cached_property
    def config(self) -> dict[str, Any]:
        hashes = {"start_sha256": stored_sha256(self.start), "text_sha256": self.texts_sha256}
        if self.teacher is not None:
            hashes["teacher_sha256"] = stored_sha256(self.teacher)
        found = read_json(dict[str, Any], self.start / CONFIG, "model configuration")
        return {**found, "run": {**plain(self.settings), **hashes}}

    @property
    def has_gate(self) -> bool:
        return bool(gate_tensors(self.start))

    @property
    def end_token(self) -> int:
        found = end_tokens(self.start)
        if not found:
            raise UserError(f"{self.start} does not say with which token a text ends (eos_token_id in {CONFIG}).")
        return min(found)

    @property
    def windows_at_once(self) -> int:
        return max(1, self.settings.training.batch_size // (self.settings.training.accumulate or 1))

    @property
    def width(self) -> int:
        return max(each.shape[-1] for each in self._empty.block.parameters())

    @property
    def flops(self) -> float:
        """Multiply-adds x 2 of one training step, forward and backward, in block and head."""
        loops = self.settings.objective.expected_loops(self.settings.num_loops)
        heads = 1 if self.settings.objective.name == "random_depth" else loops  # what is read goes through the coda
        empty = self._empty
        block = sum(each.numel() for each in empty.block.parameters())
        head = sum(each.numel() for each in empty.parameters() if each.shape[0] == empty.vocab_size)
        tokens = self.settings.context * self.settings.training.batch_size
        again = 4 / 3 if self.settings.training.checkpointing else 1.0  # every loop is run once more
        return 6.0 * again * tokens * (block * (empty.embed_cost + loops + heads * empty.head_cost) + heads * head)

    @cached_property
    def _empty(self) -> Any:
        return model_without_weights(self.start)

    def prepare(self) -> None:
        for name in self.files[len(TrainingRun.files) :]:
            if not (self.folder / name).is_file():
                write_bytes(self.folder / name, (self.start / name).read_bytes())
        if max(int(self._train.max()), int(self._validation.max())) >= self._empty.vocab_size:
            known = f"{self._empty.vocab_size:,}"
            raise UserError(
                f"The tokenizer of {self.start} has tokens that its model has not ({known}); put the model's own there."
            )
        self.note_data()

    def initial_model(self) -> LoopedModel:
        model = load_model(self.start, dtype="float32").train().requires_grad_(True)
        if self.settings.adapters is not None:
            add_adapters(model, self.settings.adapters.rank, self.settings.adapters.alpha, self.settings.training.seed)
        return model

    def finished(self, model: Any) -> Any:
        return merge_adapters(model) if self.settings.adapters is not None else model

    def losses(self, model: nn.Module) -> nn.Module:
        assert isinstance(model, LoopedModel)
        return TokenLosses(model, self._teacher(next(model.parameters()).device))

    def _teacher(self, device: torch.device) -> Callable[[Tensor], Tensor] | None:
        if self.teacher is None:
            return None
        teacher, loops = load_model(self.teacher, device, dtype="float32"), self.settings.teacher_loops

        @torch.no_grad()
        def teacher_log_probs(tokens: Tensor) -> Tensor:
            _, read = teacher.deepest(teacher.begin(tokens), loops)
            return teacher.predict(read).float().log_softmax(-1)

        return teacher_log_probs
