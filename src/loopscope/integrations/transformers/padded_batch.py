"""How does a padded batch with an attention mask become packed rows, and back? And how are its tokens cached?

A row is the tokens that its mask shows, with padding on the left, on the right or between. Positions count these
tokens. Where positions restart at 0, a new text begins: it does not attend to earlier texts in the row.

Shapes: B rows, M columns of tokens, P tokens that the mask shows.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import Cache

from loopscope.errors import UserError
from loopscope.models.device import upload
from loopscope.models.kv_cache import AppendingRows, Integers, KVCache
from loopscope.models.packing import Layout


class LoopedCache(Cache):  # type: ignore[misc]
    """Be the `past_key_values` of a looped model: keys and values of every layer and loop.

    Tokens run the same loops in every call, and a head that attends reads them at the same loops.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self._kv_cache: KVCache | None = None
        self._columns = 0  # tokens and padding so far
        self.lengths: Integers = np.zeros(0, dtype=np.int64)  # [B] tokens so far
        self._loops = 0  # loops that all tokens have run
        self._read: frozenset[int] = frozenset()  # loops at which a head that attends has read all tokens

    def begin(self, rows: int, loops: int, read: Collection[int]) -> None:
        """Prepare for tokens of `rows` rows that run `loops` loops; an attending head reads them at `read`."""
        if self._kv_cache is None:
            self._kv_cache, self.lengths = KVCache(rows, 64, most_loops=loops), np.zeros(rows, dtype=np.int64)
            self._loops, self._read = loops, frozenset(read)
        if rows != self._kv_cache.rows or loops > self._loops or not self._read.issuperset(read):
            raise UserError(
                f"The cache was begun with {self._kv_cache.rows} rows and {self._loops} loops, or without reading "
                "every loop that is asked for now; begin another."
            )
        self._loops, self._read = loops, frozenset(read)

    def appending(self, rows: Integers, counts: Integers, loop: int) -> AppendingRows:
        """The new tokens of rows at a loop; 0 is before the first loop."""
        assert self._kv_cache is not None
        cached = self.lengths[rows]
        self._kv_cache.grow(int((cached + counts).max()))
        return AppendingRows(self._kv_cache, rows, cached, np.full(len(rows), loop))

    def extend(self, rows: Integers, counts: Integers, columns: int) -> None:
        """Count new tokens after they have run all their loops."""
        self.lengths[rows] += counts
        self._columns += columns

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._columns

    def batch_select_indices(self, indices: Tensor) -> None:
        assert self._kv_cache is not None
        self._kv_cache.take(indices)
        self.lengths = self.lengths[indices.cpu().numpy()]

    reorder_cache = batch_select_indices

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.batch_select_indices(torch.arange(len(self.lengths)).repeat_interleave(repeats))

    def reset(self) -> None:
        self._kv_cache, self._columns = None, 0

    def crop(self, tokens_to_remove: int) -> None:
        raise UserError("What is in the cache of a looped model is not taken back; generate without an assistant.")

    @property
    def is_croppable(self) -> bool:
        return False


@dataclass(frozen=True, eq=False)
class PaddedBatch:
    """Hold the tokens of a padded batch, packed by text."""

    columns: int  # M
    size: int  # B
    cells: Tensor  # [P] the cell of every token among the B M cells, row by row
    rows: Integers  # the batch row of each text: a row may hold several texts, or none
    counts: Integers  # tokens of each text
    tokens: Tensor  # [P]
    positions: Tensor | None  # [P] the given positions

    @classmethod
    def of(
        cls,
        tokens: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None = None,
        cache: LoopedCache | None = None,
    ) -> Self:
        """Pack a padded batch; `attention_mask` covers the cached tokens, too."""
        size, columns = tokens.shape
        shown = np.ones((size, columns), dtype=bool)
        if attention_mask is not None:
            shown = _without_padding(attention_mask, size, columns, cache)
        counts = shown.sum(1)
        rows = np.flatnonzero(counts)
        cells = upload(np.flatnonzero(shown), tokens.device)
        counts, positions = counts[rows], None
        if position_ids is not None:
            positions = position_ids.expand(size, -1).reshape(-1).to(cells.device).index_select(0, cells)
            if cache is None:
                rows, counts = _split_texts(rows, counts, positions)
        return cls(columns, size, cells, rows, counts, tokens.flatten().index_select(0, cells), positions)

    def layout(self, cache: AppendingRows | None = None) -> Layout:
        """The packed layout; rejects positions that do not count the tokens of their text."""
        layout = Layout(self.counts, self.cells.device, cache=cache)
        if self.positions is not None and not torch.equal(self.positions, layout.positions):
            raise UserError(
                "position_ids must count the tokens that the attention mask shows, from 0 in every text, and beside a "
                "cache a row holds one text; leave position_ids out, and give every text a row of its own."
            )
        return layout

    @property
    def starts(self) -> Integers:
        """The first tokens of the texts among the P tokens, and P at the end."""
        return np.concatenate(([0], self.counts.cumsum()))

    def require_one_text_a_row(self) -> None:
        """Reject packed texts when each row is continued."""
        if len(self.rows) > len(set(self.rows.tolist())):
            raise UserError("position_ids begin again within a row; to generate, give every text a row of its own.")

    def pack(self, values: Tensor) -> Tensor:
        """[B, M, ...] -> [P, ...]"""
        flat = values.flatten(0, 1)
        return flat if self._is_full else flat.index_select(0, self.cells)

    def unpack(self, packed: Tensor) -> Tensor:
        """[P, ...] -> [B, M, ...], with zeros in padding."""
        if not self._is_full:
            cells = packed.new_zeros((self.size * self.columns, *packed.shape[1:]))
            packed = cells.index_copy(0, self.cells, packed)
        return packed.view(self.size, self.columns, *packed.shape[1:])

    @property
    def _is_full(self) -> bool:
        return len(self.cells) == self.size * self.columns

    @staticmethod
    def counted(labels: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None = None) -> Tensor:
        """[B, M] the labels, with -100 where `targets` leaves a label out."""
        if attention_mask is None:
            attention_mask = torch.ones_like(labels)
        shown = attention_mask.to(labels.device).bool()
        first = shown.int().argmax(1, keepdim=True)
        counted = labels.masked_fill(~shown, -100).scatter(1, first, -100)
        return counted if position_ids is None else counted.masked_fill(position_ids.to(labels.device) == 0, -100)

    def targets(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens [N] that predict a label, as indices among the P tokens, and the labels [N].

        A label counts if its own token and the token before it are in one text and no padding, and if it is not -100.
        """
        if labels.shape != (self.size, self.columns):
            raise UserError(
                f"labels must have the shape of input_ids, {[self.size, self.columns]}, got {list(labels.shape)}."
            )
        starts = upload(self.starts[:-1], labels.device)
        following = self.pack(labels).index_fill(0, starts, -100).roll(-1)
        chosen = (following != -100).nonzero()[:, 0]
        return chosen, following.index_select(0, chosen)


def _split_texts(rows: Integers, counts: Integers, positions: Tensor) -> tuple[Integers, Integers]:
    """The row and the number of tokens of each text: a text begins with each row, and at every position 0."""
    begins = np.flatnonzero(positions.cpu().numpy() == 0)
    starts = np.union1d(counts.cumsum() - counts, begins)
    return rows.repeat(counts)[starts], np.diff(starts, append=len(positions))


def _without_padding(attention_mask: Tensor, size: int, columns: int, cache: LoopedCache | None) -> NDArray[np.bool_]:
    """[B, M] whether a new token is no padding."""
    cached = 0 if cache is None else cache.get_seq_length()
    mask: NDArray[Any] = attention_mask.detach().float().cpu().numpy()
    if mask.shape != (size, cached + columns) or not np.isin(mask, (0, 1)).all():
        raise UserError(
            "attention_mask must hold 1 for tokens and 0 for padding, one number for every token, what is cached "
            f"included: the shape {[size, cached + columns]}, got {list(mask.shape)}."
        )
    shown: NDArray[np.bool_] = mask.astype(bool)
    if cache is not None and cached and not np.array_equal(shown[:, :cached].sum(1), cache.lengths):
        raise UserError("attention_mask hides tokens that are cached, or shows padding there; begin another cache.")
    return shown[:, cached:]
