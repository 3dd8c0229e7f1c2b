"""Which requests are in a step of vLLM, which of them at their prompt, and what do exited tokens leave in the cache?

A model receives the tokens of a step without their requests. vLLM's runner gives the requests to the builder of
attention metadata; this module records them there, as vLLM's own models do.

vLLM fixes before a step which tokens attend, and where their keys and values go. So in a deeper loop, attention runs
for the exited tokens, too, with the keys and values of their exit loop, which are written again. No other module runs
for them.

Shapes: N requests of a step, P their tokens, n that run, d that continue a text, H heads times their width.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backend import subclass_attention_backend
from vllm.v1.attention.selector import get_attn_backend

from loopscope.errors import UserError

_NAME = "loopscope_batch"


@dataclass(frozen=True, eq=False)
class StepBatch:
    """Hold the requests of a step: their tokens, lengths and cache blocks."""

    starts: NDArray[np.int64]  # [N] the first token of each request in this step
    ends: NDArray[np.int64]  # [N] the token after its last
    prefilling: NDArray[np.bool_]  # [N] whether these tokens are of its prompt
    lengths: NDArray[np.int64]  # [N] its tokens, with these
    first_blocks: NDArray[np.int64]  # [N] the first block of its cache, which no other running request has

    def tokens(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The tokens of these requests in the step."""
        parts = [np.arange(first, last) for first, last in zip(self.starts[rows], self.ends[rows], strict=True)]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def current_batch(layer_name: str) -> StepBatch | None:
    """The batch of the running step; None while vLLM warms up."""
    metadata = get_forward_context().attn_metadata
    if isinstance(metadata, list):
        raise UserError("An exit policy does not go together with micro-batches (dual batch overlap); switch them off.")
    return getattr(metadata[layer_name], _NAME, None) if isinstance(metadata, dict) else None


def recording_backend(head_width: int, vllm_config: VllmConfig) -> Any:
    """The attention backend that vLLM would choose, extended to record the requests of a step."""
    return _recording(get_attn_backend(head_width, torch.get_default_dtype(), vllm_config.cache_config.cache_dtype))


@lru_cache
def _recording(backend: Any) -> Any:
    """Extend an attention backend to record the requests of a step."""
    if backend.forward_includes_kv_cache_update:
        raise UserError(
            f"vLLM's attention backend {backend.get_name()} writes the cache inside its kernel, where what tokens that "
            "exited left cannot be put; choose another one (--attention-backend)."
        )

    class NotingBuilder(backend.get_builder_cls()):  # type: ignore[misc]
        def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
            metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
            parts = self.vllm_config.cache_config.block_size // self.kv_cache_spec.block_size
            setattr(metadata, _NAME, _batch_of_metadata(common_attn_metadata, parts))
            return metadata

    return subclass_attention_backend("LoopScope_", backend, NotingBuilder)


def _batch_of_metadata(common: Any, parts: int) -> StepBatch:
    """Make the batch from vLLM's metadata; the kernels split a block of the scheduler into `parts`."""
    bounds = common.query_start_loc_cpu.numpy().astype(np.int64)
    counts = np.diff(bounds)
    here = np.flatnonzero(counts)  # others are padding
    # A preempted request reads its text again as a prompt, in parts, which the runner reports differently. It does not
    # report which parts have one token, so such a part counts as one of a text.
    prefilling = common.is_prefilling.cpu().numpy()[here] | (counts[here] > 1)
    return StepBatch(
        bounds[here],
        bounds[here + 1],
        prefilling,
        common.seq_lens.cpu().numpy().astype(np.int64)[here],
        common.block_table_tensor[:, 0].cpu().numpy().astype(np.int64)[here] // parts,
    )


class ExitCache:
    """Keep what exited tokens of a step leave in the cache; at first all tokens run, and prompts never exit."""

    def __init__(self, count: int, decoding: Tensor) -> None:
        self._count, self._decoding = count, decoding  # [d] the tokens that continue a text
        self._running: Tensor | None = None  # [n] the tokens that run; None: all
        self._exited: Tensor | None = None  # [e] the exited tokens, as indices of the decoding ones
        self._kept: dict[str, tuple[Tensor, Tensor]] = {}  # [d, H] keys and values of the last loop, by layer

    def leave(self, running: Tensor, exited: Tensor) -> None:
        """Continue with these running tokens; the decoding tokens at these indices have exited."""
        self._running, self._exited = running, exited

    def taken(self, values: Tensor) -> Tensor:
        """[n, ...] the values [P, ...] of the running tokens."""
        return values if self._running is None else values.index_select(0, self._running)

    def put(self, values: Tensor, new: Tensor) -> Tensor:
        """Values [P, ...] with new values [n, ...] for the running tokens."""
        return new if self._running is None else values.index_copy(0, self._running, new)

    def completed(self, layer: str, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[P, H] each, from those of the running tokens; queries of exited tokens are zero."""
        if self._running is not None and self._exited is not None:
            query, key, value = (
                self.put(part.new_zeros(self._count, part.shape[1]), part) for part in (query, key, value)
            )
            places = self._decoding.index_select(0, self._exited)
            for part, kept in zip((key, value), self._kept[layer], strict=True):
                part.index_copy_(0, places, kept.index_select(0, self._exited))
        self._kept[layer] = (key.index_select(0, self._decoding), value.index_select(0, self._decoding))
        return query, key, value

    def last(self, layer: str) -> Iterator[Tensor]:
        """[P, H] keys, then values, that decoding tokens last left in a layer; zero for others."""
        for kept in self._kept[layer]:
            if len(kept) == self._count:
                yield kept
            else:
                yield kept.new_zeros(self._count, kept.shape[1]).index_copy_(0, self._decoding, kept)
