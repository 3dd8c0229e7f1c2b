"""What are looped decoders made of in vLLM? The layers of Ouro and looped Llamas from vLLM's parallel ones, under the
parameter names of `loopscope.models`, with a KV cache for every loop.

The weights of a layer are shared by all loops, so there is one `LoopedAttention`; in it stands one of vLLM's attention
objects for every loop, under a number of its own (`layers.NUMBER`), by which vLLM gives it blocks of its own. The
numbers are in the order in which layers run: prelude, core of the first loop, of the second, .., coda.

Shapes: P tokens of a step, n that run, D width.
"""

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention.attention import unified_kv_cache_update
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from loopscope.integrations.vllm.deployment import Deployment
from loopscope.integrations.vllm.served_model import LoopedDecoder, ServedModel
from loopscope.integrations.vllm.step_batch import ExitCache, noting_backend
from loopscope.models.decoder_layers import DecoderConfig, rms_normalised
from loopscope.models.gates import linear_halt
from loopscope.models.looped_llama import LoopedLlamaConfig
from loopscope.models.ouro import OuroConfig

_NARROWEST_HEAD = 32
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
        self.head_width, self.cached_width = config.head_width, max(config.head_width, _NARROWEST_HEAD)
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


class ParallelOuroLayer(nn.Module):
    def __init__(self, config: OuroConfig, vllm_config: VllmConfig, prefix: str, attention: LoopedAttention) -> None:
        super().__init__()
        self.self_attn = attention
        self.mlp = ParallelSwiGLU(config, vllm_config, prefix)
        width, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(width, eps=eps)
        self.input_layernorm_2 = RMSNorm(width, eps=eps)
        self.post_attention_layernorm = RMSNorm(width, eps=eps)
        self.post_attention_layernorm_2 = RMSNorm(width, eps=eps)

    def forward(self, positions: Tensor, hidden: Tensor, loop: int, cache: ExitCache | None) -> Tensor:
        attended = self.self_attn(positions, self.input_layernorm(hidden), loop, cache)
        hidden = hidden + self.input_layernorm_2(attended)
        return hidden + self.post_attention_layernorm_2(self.mlp(self.post_attention_layernorm(hidden)))


@support_torch_compile(dynamic_arg_dims={"input_ids": 0, "positions": -1})
class OuroDecoder(LoopedDecoder):
    def __init__(self, *, vllm_config: VllmConfig, deployment: Deployment, prefix: str = "") -> None:
        super().__init__()
        config = deployment.config
        assert isinstance(config, OuroConfig)
        self.num_loops, layers = deployment.loops, config.num_hidden_layers
        noting = deployment.policy is not None
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, prefix=f"{prefix}.embed_tokens"
        )
        self.layers = nn.ModuleList()
        for number in range(layers):
            name = f"{prefix}.layers.{number}"
            places = range(number, self.num_loops * layers, layers)
            attention = LoopedAttention(config, vllm_config, name, places, noting=noting)
            self.layers.append(ParallelOuroLayer(config, vllm_config, name, attention))
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.early_exit_gate = nn.Linear(config.hidden_size, 1)

    @property
    def core(self) -> Iterable[Any]:
        return self.layers

    def begin(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        return self.embed_tokens(input_ids)

    def loop(
        self, hidden: Tensor, embedded: Tensor, positions: Tensor, loop: int, cache: ExitCache | None = None
    ) -> Tensor:
        for layer in self.layers:
            hidden = layer(positions, hidden, loop, cache)
        return self.norm(hidden)

    def pooled(self, hidden: Tensor) -> Tensor:
        return hidden

    def halt(self, pooled: Tensor) -> Tensor:
        return linear_halt(self.early_exit_gate, pooled)

    def read(self, hidden: Tensor, positions: Tensor) -> Tensor:
        return hidden


class ServedOuro(ServedModel):
    decoder: ClassVar = OuroDecoder


class ParallelLlamaLayer(nn.Module):
    def __init__(
        self, config: LoopedLlamaConfig, vllm_config: VllmConfig, prefix: str, attention: LoopedAttention
    ) -> None:
        super().__init__()
        self.self_attn = attention
        bias = bool(config.mlp_bias) and config.looping.source == "llama"
        self.mlp = ParallelSwiGLU(config, vllm_config, prefix, bias)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, positions: Tensor, hidden: Tensor, loop: int = 0, cache: ExitCache | None = None) -> Tensor:
        hidden = hidden + self.self_attn(positions, self.input_layernorm(hidden), loop, cache)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


@support_torch_compile(dynamic_arg_dims={"input_ids": 0, "positions": -1})
class LoopedLlamaDecoder(LoopedDecoder):
    def __init__(self, *, vllm_config: VllmConfig, deployment: Deployment, prefix: str = "") -> None:
        super().__init__()
        config = deployment.config
        assert isinstance(config, LoopedLlamaConfig)
        self.config, self.num_loops, width = config, deployment.loops, config.hidden_size
        looping, source = config.looping, config.looping.source
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, width, prefix=f"{prefix}.embed_tokens")
        biased = bool(config.attention_bias) and source in ("llama", "qwen3")
        self.layers = nn.ModuleList()
        for number in range(config.num_hidden_layers):
            name = f"{prefix}.layers.{number}"
            attention = LoopedAttention(
                config,
                vllm_config,
                name,
                self._places(number),
                noting=deployment.policy is not None,
                qkv_bias=biased or source == "qwen2",
                output_bias=biased,
                query_key_norm=source == "qwen3",
            )
            self.layers.append(ParallelLlamaLayer(config, vllm_config, name, attention))
        self.norm = RMSNorm(width, eps=config.rms_norm_eps)
        self.injection = nn.Linear(width, width, bias=False) if looping.injection else None
        self.early_exit_gate = nn.Linear(width, 1) if looping.gate == "linear" else None

    def _places(self, number: int) -> Sequence[int]:
        """Where a layer keeps keys and values: one place for every time that it runs."""
        prelude, core = self.config.looping.prelude, self.config.looping.core
        if number < prelude:
            return [number]
        if number < prelude + core:
            return range(number, prelude + self.num_loops * core, core)
        return [number + (self.num_loops - 1) * core]

    @property
    def core(self) -> Iterable[Any]:
        looping = self.config.looping
        return islice(self.layers, looping.prelude, looping.prelude + looping.core)

    def begin(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        hidden: Tensor = self.embed_tokens(input_ids)
        for layer in islice(self.layers, self.config.looping.prelude):
            hidden = layer(positions, hidden)
        return hidden

    def loop(
        self, hidden: Tensor, embedded: Tensor, positions: Tensor, loop: int, cache: ExitCache | None = None
    ) -> Tensor:
        updated = hidden if self.injection is None else hidden + self.injection(embedded)
        for layer in self.core:
            updated = layer(positions, updated, loop, cache)
        damping = self.config.looping.damping
        return updated if damping == 1 else hidden + damping * (updated - hidden)

    def pooled(self, hidden: Tensor) -> Tensor:
        if self.config.coda:
            return rms_normalised(hidden, self.config.rms_norm_eps)
        return self.norm(hidden)

    def halt(self, pooled: Tensor) -> Tensor | None:
        return None if self.early_exit_gate is None else linear_halt(self.early_exit_gate, pooled)

    def read(self, hidden: Tensor, positions: Tensor) -> Tensor:
        for layer in islice(self.layers, self.config.looping.prelude + self.config.looping.core, None):
            hidden = layer(positions, hidden)
        return self.norm(hidden)


class ServedLoopedLlama(ServedModel):
    decoder: ClassVar = LoopedLlamaDecoder
