"""How is a language model trained? An Ouro in the layout of its checkpoints, on windows of a text, at every token.

The objective of a task's runs, over tokens in place of answers: with a learned gate and a uniform prior it is Ouro's
stage I, sum_t q_t L_t + beta KL(q || uniform). The run's folder is a checkpoint: beside the files of every run it holds
a tokenizer, trained on the text, and its `config.json` is Ouro's with the settings of the run added.

Shapes: B windows, C tokens of context, T loops, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from loopscope.artifacts import sha256
from loopscope.config import plain
from loopscope.documents import read_documents, tokenize_documents
from loopscope.errors import UserError
from loopscope.models import LoopedModel, LoopState, Ouro
from loopscope.models.device import accumulator, upload
from loopscope.models.tokenizer import FILE as TOKENIZER
from loopscope.objectives import Unrolling
from loopscope.training.loop import BatchLosses, TrainingRun, epoch_rows
from loopscope.training.run_folder import DATA_FILE
from loopscope.training.text_settings import PretrainSettings
from loopscope.training.tokenizer import TOKENIZER_CONFIG, train_tokenizer
from loopscope.writing import write_json

_VALIDATED = 16
"""Windows that are validated at a time."""
_EMBEDDING = 0.3
"""The spread of the first embeddings: at 1, PyTorch's, AdamW takes long to move them."""
_END = 0
"""The token between documents."""


@dataclass(frozen=True)
class TokenWindows:
    tokens: NDArray[np.int64]  # [B, C + 1]: what is read, and one place later what is to be said

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, rows: NDArray[np.int64]) -> Self:
        return type(self)(self.tokens[rows])


Teacher = Callable[[Tensor], Tensor]
"""Tokens [B, C] -> the log-probabilities [B C, V] that are to be said."""


@dataclass(frozen=True)
class TextRun(TrainingRun):
    """A run on windows of a text; its settings say how long they are (`context`)."""

    settings: Any
    train: tuple[Path, ...]
    validation: tuple[Path, ...]
    folder: Path

    @property
    def texts_sha256(self) -> dict[str, list[str]]:
        return {name: [sha256(path) for path in getattr(self, name)] for name in ("train", "validation")}

    def note_data(self) -> None:
        """Writes `data.json`, if the texts are long enough."""
        if (self.folder / DATA_FILE).is_file():
            return
        streams = {"train": self._train, "validation": self._validation}
        for name, found in streams.items():
            if len(found) <= self.settings.context:
                raise UserError(
                    f"The {name} text has {len(found)} tokens, less than one window of {self.settings.context} and "
                    "the token after it; give more text, or a shorter context."
                )
        write_json(
            self.folder / DATA_FILE, {"tokens": {name: len(token_stream) for name, token_stream in streams.items()}}
        )

    @property
    def end_token(self) -> int:
        """The token between documents."""
        return _END

    def losses(self, model: nn.Module) -> nn.Module:
        assert isinstance(model, LoopedModel)
        return TokenLosses(model)

    def batches(self) -> Callable[[int], TokenWindows]:
        windows = cut_windows(self._train, self.settings.context)
        rows = epoch_rows(len(windows), self.settings.training)
        return lambda step: windows.take(rows(step))

    @torch.no_grad()
    def validate(self, model: nn.Module, device: torch.device) -> dict[str, Any]:
        """Mean cross-entropy and accuracy of every loop over the first windows of the validation text."""
        assert isinstance(model, LoopedModel)
        windows = cut_windows(self._validation, self.settings.context)
        size = min(self.settings.training.validation_sample, len(windows))
        losses = TokenLosses(model)
        sums = []
        at_once = self.windows_at_once
        for start in range(0, size, at_once):
            batch = windows.take(np.arange(start, min(start + at_once, size)))
            loss, correct, *_ = losses(batch, device)
            sums.append(torch.stack([each.to(accumulator(device)).sum(1) for each in (loss, correct)]))
        loss, accuracy = torch.stack(sums).sum(0) / (size * self.settings.context)
        return {"validation_loss": loss.tolist(), "validation_accuracy": accuracy.tolist()}

    @property
    def windows_at_once(self) -> int:
        """That are validated together."""
        return _VALIDATED

    @cached_property
    def _train(self) -> NDArray[np.int64]:
        return token_stream(self.train, self.folder, self.end_token)

    @cached_property
    def _validation(self) -> NDArray[np.int64]:
        return token_stream(self.validation, self.folder, self.end_token)


@dataclass(frozen=True)
class LanguageRun(TextRun):
    settings: PretrainSettings
    files: ClassVar[tuple[str, ...]] = (*TrainingRun.files, TOKENIZER, TOKENIZER_CONFIG)

    @cached_property
    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["OuroForCausalLM"],
            "model_type": "ouro",
            **{key: value for key, value in plain(self.settings.ouro).items() if value is not None},
            "early_exit_threshold": 1.0,
            "bos_token_id": _END,
            "eos_token_id": _END,
            "dtype": "float32",
            "run": {**plain(self.settings), "text_sha256": self.texts_sha256},
        }

    @property
    def has_gate(self) -> bool:
        return True

    def prepare(self) -> None:
        if not (self.folder / TOKENIZER).is_file():
            documents, longest = read_documents(self.train), self.settings.model.max_position_embeddings
            train_tokenizer(documents, self.settings.vocab_size, longest, self.folder)
        self.note_data()

    def initial_model(self) -> Ouro:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.settings.training.seed)
            model = Ouro(self.settings.ouro)
            nn.init.normal_(model.model.embed_tokens.weight, std=_EMBEDDING)
        for name, weight in model.named_parameters():
            if name.endswith(
                "layernorm_2.weight"
            ):  # what a layer adds: all of a loop's layers as much as the state has
                nn.init.constant_(weight, (2 * self.settings.model.num_hidden_layers) ** -0.5)
        return model


def token_stream(paths: Sequence[Path], checkpoint: Path, end_token: int = _END) -> NDArray[np.int64]:
    """All documents of a text, one after the other, each with the end token before it."""
    end = np.array([end_token])
    return np.concatenate(
        [part for tokens in tokenize_documents(read_documents(paths), checkpoint) for part in (end, tokens)]
    )


def cut_windows(tokens: NDArray[np.int64], context: int) -> TokenWindows:
    """The windows of a stream; every token but the first is to be said once, up to the last whole window."""
    count = (len(tokens) - 1) // context
    return TokenWindows(np.lib.stride_tricks.sliding_window_view(tokens, context + 1)[: count * context : context])


def _stacked(values: list[Tensor | None]) -> Tensor | None:
    there = [each for each in values if each is not None]
    return torch.stack(there) if there else None


class TokenLosses(nn.Module):
    """Of every next token [T, B C], at every loop or at the last that is run.

    With a teacher, a loss is KL(teacher || model) over the next token, and the text only says what is read.
    """

    def __init__(self, model: LoopedModel, teacher: Teacher | None = None) -> None:
        super().__init__()
        self.model = model
        self._teacher = teacher

    def forward(self, batch: TokenWindows, device: torch.device, unrolling: Unrolling | None = None) -> BatchLosses:
        tokens = torch.from_numpy(batch.tokens)  # the model takes them there
        targets = upload(tokens[:, 1:].flatten(), device)
        taught = None if self._teacher is None else self._teacher(tokens[:, :-1])
        return self.of_state(self.model.begin(tokens[:, :-1]), targets, taught, unrolling)

    def of_state(
        self,
        embedded: LoopState,
        targets: Tensor,
        taught: Tensor | None = None,
        unrolling: Unrolling | None = None,
        chosen: Tensor | None = None,
    ) -> BatchLosses:
        """The same of tokens before their first loop: of all of them, or of the `chosen` ones [N], targets likewise."""

        def of_chosen(values: Tensor) -> Tensor:
            return values if chosen is None else values.index_select(0, chosen)

        if unrolling is not None:
            _, read = self.model.deepest(embedded, unrolling.loops, truncated=unrolling.truncated)
            loss, right = self._answers(of_chosen(read), targets, taught)
            return BatchLosses(loss[None], right[None], None, None)
        losses, correct, halts, detached = [], [], [], []
        for state in self.model.unroll(embedded):
            pooled, read = (of_chosen(each) for each in self.model.read(state))
            loss, right = self._answers(read, targets, taught)
            losses.append(loss)
            correct.append(right)
            halts.append(self.model.halt(pooled))
            detached.append(self.model.halt(pooled.detach()))
        return BatchLosses(torch.stack(losses), torch.stack(correct), _stacked(halts), _stacked(detached))

    def _answers(self, read: Tensor, targets: Tensor, taught: Tensor | None) -> tuple[Tensor, Tensor]:
        if not (self.model.gradient_checkpointing and torch.is_grad_enabled()):
            return self._answer(read, targets, taught)
        found: tuple[Tensor, Tensor] = checkpoint(self._answer, read, targets, taught, use_reentrant=False)
        return found

    def _answer(self, read: Tensor, targets: Tensor, taught: Tensor | None) -> tuple[Tensor, Tensor]:
        logits = self.model.predict(read).float()
        if taught is None:
            loss = F.cross_entropy(logits, targets, reduction="none")
        else:
            loss = F.kl_div(logits.log_softmax(-1), taught, reduction="none", log_target=True).sum(-1)
        return loss, logits.argmax(-1) == targets
