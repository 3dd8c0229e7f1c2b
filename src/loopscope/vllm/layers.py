"""What are the layers of looped decoders made of in vLLM? Of its own parallel layers, with a KV cache for every loop.

The weights of a layer are shared by all loops, so there is one `LoopedAttention`; in it stands one of vLLM's attention
objects for every loop, under a number of its own (`layers.NUMBER`), by which vLLM gives it blocks of its own.

Shapes: P tokens of a step, D width.
"""

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention.attention import unified_kv_cache_update
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.rotary_embedding import get_rope

from loopscope.models.decoder_layers import DecoderConfig
from loopscope.vllm.batch import noting_backend
from loopscope.vllm.exit_cache import ExitCache

_NARROWEST = 32
"""vLLM's kernels know no narrower heads; those of very small models are filled up with zeros, which changes nothing."""


class LoopedAttention(nn.Module):
    """With biases and with norms of queries and keys where a model has them."""

    def __init__(
        self,
        config: DecoderConfig,
        vllm_config: VllmConfig,
        prefix: str,
        numbers: Sequence[int],
        *,
        noting: bool,
        qkv_bias: bool = False,
        output_bias: bool = False,
        query_key_norm: bool = False,
    ) -> None:
        """`numbers` are those of its places in the KV cache, loop by loop; `prefix` is the name of its layer.

        With `noting` it takes down which requests are in a step.
        """
        super().__init__()
        self.name = prefix
        workers, quantization = get_tensor_model_parallel_world_size(), vllm_config.quant_config
        self.head_width, self.cached_width = config.head_width, max(config.head_width, _NARROWEST)
        self.heads = config.num_attention_heads // workers
        self.key_value_heads = max(1, config.key_value_heads // workers)
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            config.head_width,
            config.num_attention_heads,
            config.key_value_heads,
            bias=qkv_bias,
            quant_config=quantization,
            prefix=f"{prefix}.self_attn.qkv_proj",
        )
        self.o_proj = RowParallelLinear(
            config.num_attention_heads * config.head_width,
            config.hidden_size,
            bias=output_bias,
            quant_config=quantization,
            prefix=f"{prefix}.self_attn.o_proj",
        )
        if query_key_norm:
            self.q_norm, self.k_norm = (RMSNorm(config.head_width, eps=config.rms_norm_eps) for _ in range(2))
        self.query_key_norm = query_key_norm
        self.rotary_emb = get_rope(config.head_width, config.max_position_embeddings, rope_parameters=_rope(config))
        beside = prefix.rpartition(".")[0]
        self.attn = nn.ModuleList(
            Attention(
                self.heads,
                self.cached_width,
                config.head_width**-0.5,
                num_kv_heads=self.key_value_heads,
                cache_config=vllm_config.cache_config,
                quant_config=quantization,
                prefix=f"{beside}.{number}.self_attn.attn",
                attn_backend=noting_backend(self.cached_width, vllm_config) if noting else None,
            )
            for number in numbers
        )

    def forward(self, positions: Tensor, hidden: Tensor, loop: int = 0, cache: ExitCache | None = None) -> Tensor:
        """`loop` counts from 0; with a `cache`, `hidden` is of the tokens that still run."""
        projected, _ = self.qkv_proj(hidden)
        sizes = [heads * self.head_width for heads in (self.heads, self.key_value_heads, self.key_value_heads)]
        query, key, value = projected.split(sizes, dim=-1)
        if self.query_key_norm:
            query, key = self._normed(self.q_norm, query), self._normed(self.k_norm, key)
        query, key = self.rotary_emb(positions, query, key)
        query, key, value = (self._widened(part) for part in (query, key, value))
        if cache is None:
            out = self.attn[loop](query, key, value)
        else:
            out = cache.taken(self.attn[loop](*cache.completed(self.name, query, key, value)))
        out, _ = self.o_proj(self._narrowed(out))
        return out

    def propagate(self, loops: range, cache: ExitCache) -> None:
        """What all tokens left at their exit loops stands in these deeper ones, which nobody runs."""
        if loops:
            shape = (-1, self.key_value_heads, self.cached_width)
            key, value = (part.view(shape) for part in cache.last(self.name))
            for loop in loops:
                unified_kv_cache_update(key, value, self.attn[loop].layer_name)

    def _normed(self, norm: nn.Module, part: Tensor) -> Tensor:
        normed: Tensor = norm(part.reshape(-1, self.head_width))
        return normed.view(part.shape)

    def _widened(self, part: Tensor) -> Tensor:
        if self.cached_width == self.head_width:
            return part
        heads = part.reshape(len(part), -1, self.head_width)
        return F.pad(heads, (0, self.cached_width - self.head_width)).flatten(1)

    def _narrowed(self, out: Tensor) -> Tensor:
        if self.cached_width == self.head_width:
            return out
        return out.view(len(out), -1, self.cached_width)[..., : self.head_width].flatten(1)


class ParallelSwiGLU(nn.Module):
    def __init__(self, config: DecoderConfig, vllm_config: VllmConfig, prefix: str, bias: bool = False) -> None:
        super().__init__()
        width, inner, quantization = config.hidden_size, config.intermediate_size, vllm_config.quant_config
        self.gate_up_proj = MergedColumnParallelLinear(
            width, [inner] * 2, bias=bias, quant_config=quantization, prefix=f"{prefix}.mlp.gate_up_proj"
        )
        self.down_proj = RowParallelLinear(
            inner, width, bias=bias, quant_config=quantization, prefix=f"{prefix}.mlp.down_proj"
        )
        self.activation = SiluAndMul()

    def forward(self, hidden: Tensor) -> Tensor:
        both, _ = self.gate_up_proj(hidden)
        out, _ = self.down_proj(self.activation(both))
        return out


def _rope(config: DecoderConfig) -> dict[str, Any]:
    """Rotary positions in vLLM's words."""
    rotary = config.rotary
    if rotary.scaling is None:
        return {"rope_type": "default", "rope_theta": rotary.theta}
    factor, low, high, old_context = rotary.scaling
    return {
        "rope_type": "llama3",
        "rope_theta": rotary.theta,
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": old_context,
    }
