"""How is a language model trained? On windows of a text, at every token: a new Ouro, or a checkpoint further.

The objectives are those of runs on a task, over tokens instead of answers. With a learned gate and a uniform prior, the
objective is Ouro's stage I: sum_t q_t L_t + beta KL(q || uniform).

- `LanguageRun`: a new Ouro. The run's folder is a checkpoint in the layout of the Hub: beside the files of every run it
  holds a tokenizer, trained on the text, and its `config.json` is Ouro's with the settings of the run added.
- `ContinuedRun`: a checkpoint is trained further, with all of its weights or low-rank adapters (PEFT's LoRA, merged at
  the end). A looped model that was made from an ordinary checkpoint needs this run: the checkpoint never ran a second
  loop. Each loop learns the text, or the predictions of a teacher (distillation: KL at every loop), which for a looped
  Llama is the model that it was made from. The run's folder is a checkpoint of the same kind as its start.

Shapes: B windows, C tokens of context, T loops, V vocabulary.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from loopscope.artifacts import sha256
from loopscope.config import build, plain, read_json, write_json
from loopscope.errors import UserError, reject
from loopscope.files import write_bytes
from loopscope.models.checkpoint import gate_tensors, load_model, model_without_weights, stored_sha256
from loopscope.models.checkpoint_folder import BESIDE_WEIGHTS, CONFIG, beside_weights, end_tokens
from loopscope.models.device import accumulator, upload
from loopscope.models.looped_model import LoopedModel, LoopState
from loopscope.models.ouro import Ouro, OuroConfig
from loopscope.models.tokenizer import FILE as TOKENIZER, read_documents, tokenize_documents
from loopscope.training.objectives import Unrolling, expected_loops
from loopscope.training.settings import GATED, SPECIAL_TOKENS, ContinueSettings, PretrainSettings
from loopscope.training.training_loop import BatchLosses, TrainingRun, epoch_rows

TOKENIZER_CONFIG = "tokenizer_config.json"
_EMBEDDING_SPREAD = 0.3
"""The standard deviation of new embeddings: at PyTorch's default of 1, AdamW takes long to change them."""
_END = 0
"""The token between documents in a new vocabulary."""
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

Teacher = Callable[[Tensor], Tensor]
"""A teacher: tokens [B, C] -> the log-probabilities [B C, V] that a model learns to predict."""


@dataclass(frozen=True)
class TokenWindows:
    """Hold windows of a text: the tokens that the model reads, and the next tokens."""

    tokens: NDArray[np.int64]  # [B, C + 1]: inputs, and one position later the targets

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, rows: NDArray[np.int64]) -> Self:
        return type(self)(self.tokens[rows])


@dataclass(frozen=True)
class TextRun(TrainingRun):
    """Train on windows of a text, whose length is the setting `context`."""

    settings: Any
    train: tuple[Path, ...]
    validation: tuple[Path, ...]
    folder: Path
    windows_at_once: ClassVar[int] = 16  # in a batch of validation
    end_token: ClassVar[int] = _END  # precedes every document

    @property
    @abstractmethod
    def empty_model(self) -> Any:
        """The model without its weights."""

    def __post_init__(self) -> None:
        reject(self.problems())

    def problems(self) -> Iterator[str]:
        """Yield the errors of the run's settings."""
        context, longest = self.settings.context, self.empty_model.block_size
        if context > longest:
            yield f"context is {context}, and the model takes {longest} tokens."

    @property
    def texts(self) -> dict[str, tuple[Path, ...]]:
        return {"train": self.train, "validation": self.validation}

    @property
    def texts_sha256(self) -> dict[str, list[str]]:
        return {name: [sha256(path) for path in paths] for name, paths in self.texts.items()}

    @property
    def width(self) -> int:
        return max(each.shape[-1] for each in self.empty_model.block.parameters())

    @property
    def flops(self) -> float:
        """The operations of one training step, forward and backward, in block and head (2 for a multiply-add)."""
        empty, training = self.empty_model, self.settings.training
        loops = expected_loops(self.settings.objective, empty.num_loops)
        heads = 1 if self.settings.objective.name == "random_depth" else loops  # for each loss, the coda runs
        block = sum(each.numel() for each in empty.block.parameters())
        head = sum(each.numel() for each in empty.parameters() if each.shape[0] == empty.vocab_size)
        again = 4 / 3 if training.checkpointing else 1.0  # checkpointing runs every loop a second time
        token = block * (empty.embed_cost + loops + heads * empty.head_cost) + heads * head
        return 6.0 * again * token * self.settings.context * training.batch_size

    def describe_texts(self) -> dict[str, Any]:
        """The lengths of the texts, after checking that they are long enough and that the model has their tokens."""
        known, context = self.empty_model.vocab_size, self.settings.context
        for name, tokens in self._tokens.items():
            if len(tokens) <= context:
                least = f"one window of {context} and its next token"
                raise UserError(f"The {name} text has {len(tokens)} tokens, less than {least}; give more text.")
            if int(tokens.max()) >= known:
                raise UserError(f"The tokenizer has tokens that its model has not ({known:,}); use the model's own.")
        return {"tokens": {name: len(tokens) for name, tokens in self._tokens.items()}}

    def losses(self, model: LoopedModel) -> nn.Module:
        return TokenLosses(model)

    def batches(self) -> Callable[[int], TokenWindows]:
        windows = cut_windows(self._tokens["train"], self.settings.context)
        rows = epoch_rows(len(windows), self.settings.training)
        return lambda step: windows.take(rows(step))

    @torch.no_grad()
    def validate(self, model: LoopedModel, device: torch.device) -> dict[str, Any]:
        """The mean cross-entropy and accuracy of every loop over the first windows of the validation text."""
        windows = cut_windows(self._tokens["validation"], self.settings.context)
        size, at_once = min(self.settings.training.validation_sample, len(windows)), self.windows_at_once
        losses, sums = TokenLosses(model), []
        for start in range(0, size, at_once):
            batch = windows.take(np.arange(start, min(start + at_once, size)))
            loss, correct, *_ = losses(batch, device)
            sums.append(torch.stack([each.to(accumulator(device)).sum(1) for each in (loss, correct)]))
        loss, accuracy = torch.stack(sums).sum(0) / (size * self.settings.context)
        return {"validation_loss": loss.tolist(), "validation_accuracy": accuracy.tolist()}

    @cached_property
    def _tokens(self) -> dict[str, NDArray[np.int64]]:
        return {name: token_stream(paths, self.folder, self.end_token) for name, paths in self.texts.items()}


@dataclass(frozen=True)
class LanguageRun(TextRun):
    """Train a new Ouro, with its own tokenizer, on a text."""

    settings: PretrainSettings
    files: ClassVar[tuple[str, ...]] = (*TrainingRun.files, TOKENIZER, TOKENIZER_CONFIG)
    has_gate: ClassVar[bool] = True

    @cached_property
    def ouro(self) -> OuroConfig:
        shape = self.settings.model
        values = {
            **plain(shape),
            "num_key_value_heads": shape.num_key_value_heads or shape.num_attention_heads,
            "vocab_size": self.settings.vocab_size,
            "hidden_act": "silu",
            "head_dim": shape.hidden_size // shape.num_attention_heads,
            "attention_bias": False,
            "mlp_bias": False,
            "use_sliding_window": False,
            "layer_types": ["full_attention"] * shape.num_hidden_layers,
        }
        return build(OuroConfig, values, "model")

    @cached_property
    def empty_model(self) -> Ouro:
        with torch.device("meta"):
            return Ouro(self.ouro)

    @cached_property
    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["OuroForCausalLM"],
            "model_type": "ouro",
            **{key: value for key, value in plain(self.ouro).items() if value is not None},
            "early_exit_threshold": 1.0,
            "bos_token_id": _END,
            "eos_token_id": _END,
            "dtype": "float32",
            "run": {**plain(self.settings), "text_sha256": self.texts_sha256},
        }

    def prepare(self) -> dict[str, Any]:
        if not (self.folder / TOKENIZER).is_file():
            documents, longest = read_documents(self.train), self.settings.model.max_position_embeddings
            train_tokenizer(documents, self.settings.vocab_size, longest, self.folder)
        return self.describe_texts()

    def initial_model(self) -> Ouro:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.settings.training.seed)
            model = Ouro(self.ouro)
            nn.init.normal_(model.model.embed_tokens.weight, std=_EMBEDDING_SPREAD)
        for name, weight in model.named_parameters():
            if name.endswith("layernorm_2.weight"):  # all layers of a loop together add as much as the state has
                nn.init.constant_(weight, (2 * self.settings.model.num_hidden_layers) ** -0.5)
        return model


@dataclass(frozen=True)
class ContinuedRun(TextRun):
    """Train a checkpoint further on a text: all of its weights, or adapters."""

    settings: ContinueSettings
    start: Path
    teacher: Path | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        settings = msgspec.structs.replace(self.settings, loops=self.empty_model.num_loops)
        object.__setattr__(self, "settings", settings)

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        given, start, teacher, empty = self.settings, self.start, self.teacher, self.empty_model
        if given.loops not in (None, empty.num_loops):
            yield f"loops is {given.loops}, and {start} has {empty.num_loops}; leave it out."
        if given.objective.name in GATED and not self.has_gate:
            yield f"'{given.objective.name}' trains a gate, and {start} has none; loop it with --gate linear."
        if not end_tokens(start):
            yield f"{start} does not say with which token a text ends (eos_token_id in {CONFIG})."
        if (teacher is None) == (given.targets == "teacher"):
            yield "targets = 'teacher' and a teacher (--teacher CHECKPOINT) go together; one is missing."
        if teacher is not None:
            tokenizers = [folder / TOKENIZER for folder in (start, teacher) if (folder / TOKENIZER).is_file()]
            is_same_size = empty.vocab_size == model_without_weights(teacher).vocab_size
            if not is_same_size or len({sha256(file) for file in tokenizers}) > 1:
                yield f"The teacher {teacher} has other tokens than {start}; take one with its tokenizer."

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
    def end_token(self) -> int:  # type: ignore[override]
        return min(end_tokens(self.start))

    @property
    def windows_at_once(self) -> int:  # type: ignore[override]
        return max(1, self.settings.training.batch_size // (self.settings.training.accumulate or 1))

    @cached_property
    def empty_model(self) -> Any:
        return model_without_weights(self.start)

    def prepare(self) -> dict[str, Any]:
        for name in self.files[len(TrainingRun.files) :]:
            if not (self.folder / name).is_file():
                write_bytes(self.folder / name, beside_weights(self.start, name))
        return self.describe_texts()

    def initial_model(self) -> LoopedModel:
        model = load_model(self.start, dtype="float32", pack=False).train().requires_grad_(True)
        if self.settings.adapters is not None:
            add_trained_adapters(
                model, self.settings.adapters.rank, self.settings.adapters.alpha, self.settings.training.seed
            )
        return model

    def finished(self, model: Any) -> Any:
        return merge_trained_adapters(model) if self.settings.adapters is not None else model

    def losses(self, model: LoopedModel) -> nn.Module:
        if self.teacher is None:
            return TokenLosses(model)
        device, loops = next(model.parameters()).device, self.settings.teacher_loops
        teacher = load_model(self.teacher, device, dtype="float32", pack=False)

        @torch.no_grad()
        def teacher_log_probs(tokens: Tensor) -> Tensor:
            _, read = teacher.deepest(teacher.begin(tokens), loops)
            return teacher.predict(read).float().log_softmax(-1)

        return TokenLosses(model, teacher_log_probs)


def token_stream(paths: Sequence[Path], checkpoint: Path, end_token: int = _END) -> NDArray[np.int64]:
    """Tokenize all documents of a text into one array, each after an end token."""
    documents = tokenize_documents(read_documents(paths), checkpoint)
    return np.concatenate([part for tokens in documents for part in ([end_token], tokens)])


def cut_windows(tokens: NDArray[np.int64], context: int) -> TokenWindows:
    """Cut tokens into windows of context + 1; all tokens but the first are targets once; the rest is dropped."""
    count = (len(tokens) - 1) // context
    return TokenWindows(np.lib.stride_tricks.sliding_window_view(tokens, context + 1)[: count * context : context])


class TokenLosses(nn.Module):
    """The losses of every next token of a text [T, B C], at every loop or at the last loop that runs.

    With a teacher, a loss is KL(teacher || model) over the next token, and the text is only the input.
    """

    def __init__(self, model: LoopedModel, teacher: Teacher | None = None) -> None:
        super().__init__()
        self.model = model
        self._teacher = teacher

    def forward(self, batch: TokenWindows, device: torch.device, unrolling: Unrolling | None = None) -> BatchLosses:
        tokens = torch.from_numpy(batch.tokens)  # the model uploads them
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
        """The losses of tokens from their embedding: of all tokens, or of the `chosen` [N], with their targets."""

        def of_chosen(values: Tensor) -> Tensor:
            return values if chosen is None else values.index_select(0, chosen)

        if unrolling is not None:
            _, read = self.model.deepest(embedded, unrolling.loops, truncated=unrolling.truncated)
            loss, right = self._answers(of_chosen(read), targets, taught)
            return BatchLosses(loss[None], right[None], None, None)
        answers, halts, detached = list[Any](), list[Any](), list[Any]()
        for state in self.model.unroll(embedded):
            pooled, read = (of_chosen(each) for each in self.model.read(state))
            answers.append(self._answers(read, targets, taught))
            halts.append(self.model.halt(pooled))
            detached.append(self.model.halt(pooled.detach()))
        losses, correct = map(torch.stack, zip(*answers, strict=True))
        if halts[0] is None:
            return BatchLosses(losses, correct, None, None)
        return BatchLosses(losses, correct, torch.stack(halts), torch.stack(detached))

    def _answers(self, read: Tensor, targets: Tensor, taught: Tensor | None) -> tuple[Tensor, Tensor]:
        if not (self.model.gradient_checkpointing and torch.is_grad_enabled()):
            return self._answer(read, targets, taught)
        return checkpoint(self._answer, read, targets, taught, use_reentrant=False)

    def _answer(self, read: Tensor, targets: Tensor, taught: Tensor | None) -> tuple[Tensor, Tensor]:
        logits = self.model.predict(read).float()
        if taught is None:
            loss = F.cross_entropy(logits, targets, reduction="none")
        else:
            loss = F.kl_div(logits.log_softmax(-1), taught, reduction="none", log_target=True).sum(-1)
        return loss, logits.argmax(-1) == targets


def train_tokenizer(documents: Iterable[str], vocab_size: int, longest: int, folder: Path) -> None:
    """Train a byte-level BPE tokenizer on documents, as Ouro's: single digits, and words with the space before them."""
    bpe = Tokenizer(models.BPE())
    pieces = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    bpe.pre_tokenizer = pre_tokenizers.Sequence(pieces)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(documents, trainer)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), SPECIAL_TOKENS[_END]),
        "additional_special_tokens": SPECIAL_TOKENS[1:],
        "chat_template": _CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": longest,
    }
    write_json(folder / TOKENIZER_CONFIG, settings)
    write_bytes(folder / TOKENIZER, bpe.to_str(pretty=True).encode())


def add_trained_adapters(model: Any, rank: int, alpha: int, seed: int) -> None:
    """Prepare a fine-tuning run: freeze all weights but the gate's, and give every linear layer a low-rank adapter.

    The adapters start at zero, so the model's outputs stay the same.
    """
    from peft import LoraConfig, inject_adapter_in_model

    gate, chosen = getattr(model, "gate", None), adaptable_layers(model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=alpha, target_modules=chosen), model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    if gate is not None:
        gate.requires_grad_(True)


def adaptable_layers(model: LoopedModel) -> list[str]:
    """The linear layers that an adapter of a fine-tuning run may change: all but the head and the gate."""
    gate = getattr(model, "gate", None)
    within = set() if gate is None else {id(each) for each in gate.modules()}
    named = {name for name, each in model.named_modules() if isinstance(each, nn.Linear) and id(each) not in within}
    return sorted(name for name in named if "lm_head" not in name)


def merge_trained_adapters(model: Any) -> Any:
    """Finish a fine-tuning run: add the adapters to the model's weights, and remove them."""
    for name, module in list(model.named_modules()):
        if hasattr(module, "get_base_layer"):
            module.merge()
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, module.get_base_layer())
    return model
