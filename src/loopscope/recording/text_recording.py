"""How does a text become a recording? Every token is a decision: the model predicts the next token at every loop.

A document is cut into windows that overlap by one token, so that each of its tokens but the first is predicted once,
from at most `context` - 1 tokens before it. Windows of about the same length run together, packed. A vocabulary has
tens of thousands of classes, so only the signals of the logits are kept, computed on the model's device. The sequence
of a decision is its document: documents are independent of each other, windows of one document are not.

Shapes: N decisions, T loops, W windows, P tokens of all windows of a batch, K decisions of a batch, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from loopscope.artifacts import sha256
from loopscope.engine.logit_signals import LOGIT_SIGNALS, check_finite, logit_signals
from loopscope.errors import UserError
from loopscope.models.checkpoint import load_model
from loopscope.models.checkpoint_folder import find_checkpoint
from loopscope.models.device import check_device, upload
from loopscope.models.looped_model import LoopedModel, Loops
from loopscope.models.packing import Layout, count_up
from loopscope.models.tokenizer import check_context, read_documents, tokenization_sha256, tokenize_documents
from loopscope.progress import ProgressCallback, silent
from loopscope.readouts.readout import readouts_reading
from loopscope.readouts.replay import replayed
from loopscope.recording.recording_folder import (
    Arrays,
    Keep,
    array_layout,
    by_row,
    check_repeatable,
    existing_recording,
    write_recording,
    write_states,
)
from loopscope.training.run_folder import trained_with
from loopscope.trajectory import SIGNAL_PREFIX, Trajectory, check_split_name

CONTEXT = 512
"""Tokens of a window, if the model takes that many."""
TEXT_BATCH_TOKENS = 4096
"""Tokens of a batch of windows."""
_MAX_LOGITS = 1 << 24
"""Logits that are in memory together."""

Integers = NDArray[np.int64]


def record_text(
    checkpoint: str | Path,
    texts: Sequence[Path],
    split: str,
    out: Path,
    *,
    context: int | None = None,
    limit: int | None = None,
    hidden: bool = False,
    device: str | torch.device = "cpu",
    dtype: str | None = None,
    tokens: int = TEXT_BATCH_TOKENS,
    progress: ProgressCallback = silent,
    model: LoopedModel | None = None,
) -> Trajectory:
    """Record the next tokens of a text, or the first `limit` of them; an identical recording is used again.

    `model` is the checkpoint's model if it is already in memory, for example with quantised weights; then its own
    `device` and `dtype` apply.
    """
    check_split_name(split)
    documents, device = read_documents(texts), check_device(device)
    folder = find_checkpoint(checkpoint)
    if model is None:
        model = load_model(folder, device, dtype)
    else:
        device = next(model.parameters()).device
        model.require_evaluation()
    context = min(model.block_size, CONTEXT) if context is None else context
    check_context(context, model.block_size)
    tokenized = tokenize_documents(documents, folder)
    windows = cut_documents(tokenized, context, limit)
    if int(windows.tokens.max()) >= model.vocab_size:
        raise UserError(f"The tokenizer of {folder} has more tokens than the model's {model.vocab_size}.")
    provenance = {
        "weights_sha256": model.weights_sha256,
        "precision": model.precision,
        "run": trained_with(folder),
        "text_sha256": [sha256(path) for path in texts],
        "tokenization_sha256": tokenization_sha256(tokenized),
        "context": context,
        "examples": windows.decisions,
        "documents": len(np.unique(windows.documents)),
        "dtype": dtype,
        "keeps_logits": False,
        "keeps_hidden": hidden,
    }
    keep = Keep(logits=False, hidden=hidden)
    if (found := existing_recording(out, split, provenance, keep)) is not None:
        return found

    def fill(arrays: Arrays) -> None:
        check_repeatable(model)
        done = 0
        for batch in windows.batches(tokens):
            rows, labels, sequences = windows.targets(batch)
            arrays["labels"][rows], arrays["sequences"][rows] = labels, sequences
            for part, outputs in window_predictions(model, *windows.packed(batch), device):
                _write_logit_signals(arrays, rows[part], outputs.logits, labels[part])
                write_states(arrays, rows[part], outputs, keep)
            done += len(rows)
            progress(done, windows.decisions, "")

    layout = array_layout(model, (windows.decisions, model.num_loops), keep, ("labels", "sequences"))
    return write_recording(out, split, layout, provenance | keep.provenance, fill)


@dataclass(frozen=True)
class TextWindows:
    """Hold pieces of documents; the model predicts the next token after all but the last token of each."""

    tokens: Integers  # of all documents, one after the other
    starts: Integers  # [W] the index of each window's first token
    lengths: Integers  # [W]
    documents: Integers  # [W] the document of each window

    @property
    def decisions(self) -> int:
        return int(self.lengths.sum()) - len(self.lengths)

    def batches(self, tokens: int) -> Iterator[Integers]:
        """The indices of windows that run together: of about one length, at most `tokens` tokens (or one window)."""
        order = np.argsort(self.lengths, kind="stable")
        first = 0
        while first < len(order):
            lengths = self.lengths[order[first:]]
            count = max(1, int(np.searchsorted(lengths * np.arange(1, len(lengths) + 1), tokens, side="right")))
            yield order[first : first + count]
            first += count

    def packed(self, batch: Integers) -> tuple[Integers, Integers]:
        """The tokens [P] and the lengths of the windows of a batch."""
        lengths = self.lengths[batch]
        return self.tokens[count_up(self.starts[batch], lengths)], lengths

    def targets(self, batch: Integers) -> tuple[Integers, Integers, Integers]:
        """[K] for each decision of a batch: its index in the recording, the next token, and the document."""
        predicted = self.lengths - 1
        rows = count_up((predicted.cumsum() - predicted)[batch], predicted[batch])
        following = self.tokens[count_up(self.starts[batch] + 1, predicted[batch])]
        return rows, following, np.repeat(self.documents[batch], predicted[batch])


def cut_documents(documents: Sequence[Integers], context: int, limit: int | None) -> TextWindows:
    """Cut documents into windows of at most `context` tokens, with at most `limit` decisions in all."""
    whole = np.array([len(document) for document in documents])
    predicted = np.maximum(whole - 1, 0)
    if limit is not None:
        predicted = np.clip(limit - (predicted.cumsum() - predicted), 0, predicted)
    if not predicted.any():
        raise UserError("No document of the text has two tokens, so that there is nothing to predict.")
    counts = -(-predicted // (context - 1))
    number = count_up(np.zeros_like(counts), counts)  # of a window within its document
    left = np.repeat(predicted, counts) - number * (context - 1)
    return TextWindows(
        np.concatenate(documents),
        np.repeat(whole.cumsum() - whole, counts) + number * (context - 1),
        np.minimum(left, context - 1) + 1,
        np.repeat(np.arange(len(documents)), counts),
    )


@torch.inference_mode()
def window_predictions(
    model: LoopedModel, tokens: Integers, lengths: Integers, device: str | torch.device
) -> Iterator[tuple[slice, Loops]]:
    """The model's outputs at every loop, at all tokens but the last of every window, in slices of the decisions."""
    device = torch.device(device)
    layout = Layout(lengths, device)
    embedded = model.begin_packed(upload(tokens, device), layout)
    predicting = upload(count_up(layout.host_starts, lengths - 1), device)
    outputs = [[each.index_select(0, predicting) for each in model.read(state)] for state in model.unroll(embedded)]
    hidden, head_input = (torch.stack(each) for each in zip(*outputs, strict=True))
    halt = model.halt(hidden)
    few = max(1, _MAX_LOGITS // (model.num_loops * model.vocab_size))
    for start in range(0, hidden.shape[1], few):
        part = slice(start, start + few)
        gate_logits = None if halt is None else halt[:, part]
        yield part, Loops(model.predict(head_input[:, part]), hidden[:, part], gate_logits)


def _write_logit_signals(arrays: Arrays, rows: Integers, logits: torch.Tensor, labels: Integers) -> None:
    """Write the signals of logits [T, n, V] into a recording's arrays; the logits stay on the model's device."""
    for name, values in logit_signals(logits, torch.from_numpy(labels).to(logits.device)).items():
        if name == "label_log_probs":
            check_finite(values, "logits")
        arrays[SIGNAL_PREFIX + name if name in LOGIT_SIGNALS else name][rows] = values
    for readout in readouts_reading("logits"):
        if readout.name not in LOGIT_SIGNALS:  # a custom readout
            arrays[SIGNAL_PREFIX + readout.name][rows] = replayed(readout, by_row(logits))
