"""Which requests are in a step of vLLM, and which of them are still at their prompt? What its runner says of it.

A model sees the tokens of a step and nothing of the requests that they belong to. The runner says more to whoever
prepares attention; this takes it down there, as vLLM's own models do that need it.

Shapes: N requests of a step, P their tokens.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backend import subclass_attention_backend
from vllm.v1.attention.selector import get_attn_backend

from loopscope.errors import UserError

_NAME = "loopscope_batch"


@dataclass(frozen=True, eq=False)
class StepBatch:
    starts: NDArray[np.int64]  # [N] the first token of each request in this step
    ends: NDArray[np.int64]  # [N] and the one after its last
    prefilling: NDArray[np.bool_]  # [N] whether these are of its prompt
    lengths: NDArray[np.int64]  # [N] its tokens, these included
    first_blocks: NDArray[np.int64]  # [N] where its cache begins: nobody else's does, as long as it runs

    def tokens(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The tokens of these requests."""
        parts = [np.arange(first, last) for first, last in zip(self.starts[rows], self.ends[rows], strict=True)]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def current_batch(layer_name: str) -> StepBatch | None:
    """That of the step that runs; none while vLLM warms up."""
    metadata = get_forward_context().attn_metadata
    if isinstance(metadata, list):
        raise UserError("An exit policy does not go together with micro-batches (dual batch overlap); switch them off.")
    return getattr(metadata[layer_name], _NAME, None) if isinstance(metadata, dict) else None


def noting_backend(head_width: int, vllm_config: VllmConfig) -> Any:
    """The attention backend that vLLM would choose, taking down which requests are in a step."""
    return _noting(get_attn_backend(head_width, torch.get_default_dtype(), vllm_config.cache_config.cache_dtype))


@lru_cache
def _noting(backend: Any) -> Any:
    if backend.forward_includes_kv_cache_update:
        raise UserError(
            f"vLLM's attention backend {backend.get_name()} writes the cache inside its kernel, where what tokens that "
            "exited left cannot be put; choose another one (--attention-backend)."
        )

    class NotingBuilder(backend.get_builder_cls()):  # type: ignore[misc]
        def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
            metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
            setattr(metadata, _NAME, _batch(common_attn_metadata))
            return metadata

    return subclass_attention_backend("LoopScope_", backend, NotingBuilder)


def _batch(common: Any) -> StepBatch:
    if common.is_prefilling is None:
        raise UserError(
            "This version of vLLM does not say which requests are at their prompt, as an exit policy must know; "
            "install one that LoopScope was tried with: pip install 'loopscope[vllm]'."
        )
    bounds = common.query_start_loc_cpu.numpy().astype(np.int64)
    counts = np.diff(bounds)
    here = np.flatnonzero(counts)  # others are padding
    # A request that was preempted reads its own text again as a prompt, in parts, of which the runner says otherwise;
    # what it does not say is which of them are of one token, so that such a part is taken for one of a text.
    prefilling = common.is_prefilling.cpu().numpy()[here] | (counts[here] > 1)
    return StepBatch(
        bounds[here],
        bounds[here + 1],
        prefilling,
        common.seq_lens.cpu().numpy().astype(np.int64)[here],
        common.block_table_tensor[:, 0].cpu().numpy().astype(np.int64)[here],
    )
