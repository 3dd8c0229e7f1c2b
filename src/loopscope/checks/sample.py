"""On what is a model checked, and what does it say there? Rows of different lengths, and one plain pass over them.

Shapes: B rows, T loops, P places that are read, V vocabulary, D width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from loopscope.engine import Prompt
from loopscope.engine.logit_stats import kl_divergence
from loopscope.errors import UserError
from loopscope.models import LoopedModel

Array = NDArray[Any]
TEXT = """\
The miller's daughter kept three clocks in the kitchen, and none of them agreed. The oldest had come with the house; it
lost a quarter of an hour between breakfast and supper, and was forgiven for it. The second was brass, a gift from an
uncle at sea, and it ran so fast that on some evenings it struck twelve while the bread was still rising. The third had
no hands at all, but it ticked louder than the others, and so it was the one that everybody believed.

One morning in March a traveller knocked and asked for the time, because he had a boat to catch at the lower bridge.
She looked at the first clock and said that it was nine, or a little later. She looked at the second and said that it
was nearly eleven. Then both of them listened to the third for a while. "That one says that we should hurry," said the
traveller, and he thanked her, and ran. From the window she saw him cross the meadow, jump the ditch, and reach the
bridge just as the boatman untied the rope. A clock that is wrong by a known amount is a good clock, she thought; and
one that makes you run is sometimes better than one that is right.
"""
_HELD = 1 << 26
"""Logits that are kept at a time."""
_ROWS, _PROMPT, _NEW = 4, 48, 12


@dataclass(frozen=True)
class PlainOutputs:
    """What a model says at some places."""

    logits: Array  # [T, P, V]
    hidden: Array  # [T, P, D]
    gate_logits: Array | None  # [T, P]


@dataclass(frozen=True)
class TokenSample:
    """Rows of tokens that every check takes."""

    rows: list[Array]  # of different lengths
    new: int  # tokens that may follow
    places: int  # that are read of a row, from its end

    @classmethod
    def of(cls, model: LoopedModel, text: Array | None, seed: int) -> "TokenSample":
        new = max(1, min(_NEW, model.block_size // 4))
        longest = min(_PROMPT, model.block_size - new)
        if longest < 2:
            raise UserError(f"A model that takes {model.block_size} tokens is too short to be checked.")
        rng = np.random.default_rng(seed)
        lengths = np.maximum(1, np.linspace(longest, 1, _ROWS).astype(np.int64))
        if text is None:
            rows = [rng.integers(0, model.vocab_size, length) for length in lengths]
        else:
            if len(text) < longest:
                raise UserError(f"The text has {len(text)} tokens; to be checked by it takes {longest} at least.")
            if text.min() < 0 or text.max() >= model.vocab_size:
                raise UserError("The text has tokens that the model does not know; is the tokenizer the model's own?")
            starts = np.linspace(0, len(text) - longest, _ROWS).astype(np.int64)
            rows = [text[start : start + length] for start, length in zip(starts, lengths, strict=True)]
        held = _HELD // (model.num_loops * model.vocab_size * _ROWS)
        return cls([np.asarray(row, dtype=np.int64) for row in rows], new, max(1, min(longest, held)))

    def read(self, model: LoopedModel) -> PlainOutputs:
        return read(model, self.rows, self.places)

    @property
    def prompts(self) -> list[Prompt]:
        return [Prompt(key, row) for key, row in enumerate(self.rows)]


@torch.inference_mode()
def read(model: LoopedModel, rows: Sequence[Array], places: int) -> PlainOutputs:
    """The last `places` of every row (fewer if it is shorter) at every loop, by one plain pass over all rows."""
    device = next(model.parameters()).device
    lengths = torch.tensor([len(row) for row in rows])
    tokens = torch.zeros(len(rows), int(lengths.max()), dtype=torch.long)
    for place, row in enumerate(rows):
        tokens[place, : len(row)] = torch.from_numpy(row)
    counts = lengths.clamp(max=places)
    ends = lengths.cumsum(0)
    chosen = torch.cat([torch.arange(int(end - count), int(end)) for end, count in zip(ends, counts, strict=True)])
    chosen = chosen.to(device)
    embedded = model.begin(tokens.to(device), lengths.to(device))
    logits, hidden, gate_logits = [], [], []
    for state in model.unroll(embedded):
        pooled, head_input = (each.index_select(0, chosen) for each in model.read(state))
        logits.append(model.predict(head_input).float().cpu().numpy())
        hidden.append(pooled.float().cpu().numpy())
        if (gate := model.halt(pooled)) is not None:
            gate_logits.append(gate.float().cpu().numpy())
    return PlainOutputs(np.stack(logits), np.stack(hidden), np.stack(gate_logits) if gate_logits else None)


def divergence(reference: Array, other: Array) -> Array:
    """[...] KL(reference || other) of logits [..., V]; infinite where one of them is no number."""
    flat = (torch.from_numpy(logits).flatten(0, -2) for logits in (reference, other))
    values = kl_divergence(*flat).numpy().reshape(reference.shape[:-1])
    return np.where(np.isfinite(values), values, np.inf)
