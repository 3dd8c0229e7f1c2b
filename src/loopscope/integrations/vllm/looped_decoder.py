"""Which layers has a looped decoder in vLLM? vLLM's parallel layers for Ouro and looped Llamas, under the parameter
names of `loopscope.models`, with a KV cache for every loop.

All loops share the weights of a layer, so there is one `LoopedAttention` for each layer. It holds one of vLLM's
attention objects for every loop, each under its own number (`layers.NUMBER`), by which vLLM gives it its own cache
blocks. The numbers follow the order in which layers run: prelude, core of the first loop, of the second, .., coda. An
Ouro has only a core.

At a fixed depth vLLM compiles the whole decoder, with its loops unrolled. Under an exit policy the number of loops is
not known in advance, so vLLM compiles the `SharedBlock`, which is called once per loop. A `Turn` holds the current
loop, and only attention reads it: in an operator that the compiler does not look into.

Shapes: P tokens of a step, n that run, D width.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention.attention import unified_kv_cache_update
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.utils.torch_utils import direct_register_custom_op

from loopscope.integrations.vllm.deployment import Deployment
from loopscope.integrations.vllm.step_batch import ExitCache, recording_backend
from loopscope.models.decoder_layers import DecoderConfig, linear_halt, rms_normalised
from loopscope.models.ouro import OuroConfig

_NARROWEST_HEAD = 32
"""The narrowest head of vLLM's kernels; narrower heads are padded with zeros, which does not change the result."""


@dataclass
class Turn:
    """Hold the current loop, and the cache entries that the tokens of the step leave."""

    loop: int = 0
    cache: ExitCache | None = None  # None: all tokens run all loops


class LoopedAttention(nn.Module):
    """Attend in vLLM with a KV cache for every loop, with the biases and norms of the model."""

    def __init__(
        self, deployment: Deployment, vllm_config: VllmConfig, name: str, places: Sequence[int], turn: Turn | None
    ) -> None:
        """Make the attention of the layer `name`; `places` are its numbers in the KV cache, loop by loop.

        With a policy it records which requests are in a step. With a `turn` it attends in the turn's loop.
        """
        super().__init__()
        config, source = deployment.config, deployment.looping.source
        biased = bool(config.attention_bias) and source in ("llama", "qwen3")
        self.name, self.turn, quantization = f"{name}.looped", turn, vllm_config.quant_config
        if turn is not None:
            vllm_config.compilation_config.static_forward_context[self.name] = self  # for the operator's lookup
        self.head_width, self.cached_width = config.head_width, max(config.head_width, _NARROWEST_HEAD)
        workers = get_tensor_model_parallel_world_size()
        self.heads = config.num_attention_heads // workers
        self.key_value_heads = max(1, config.key_value_heads // workers)
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            config.head_width,
            config.num_attention_heads,
            config.key_value_heads,
            bias=biased or source == "qwen2",
            quant_config=quantization,
            prefix=f"{name}.self_attn.qkv_proj",
        )
        self.o_proj = RowParallelLinear(
            config.num_attention_heads * config.head_width,
            config.hidden_size,
            bias=biased,
            quant_config=quantization,
            prefix=f"{name}.self_attn.o_proj",
        )
        self.query_key_norm = source == "qwen3"
        if self.query_key_norm:
            self.q_norm, self.k_norm = (RMSNorm(config.head_width, eps=config.rms_norm_eps) for _ in range(2))
        self.rotary_emb = get_rope(config.head_width, config.max_position_embeddings, rope_parameters=_rope(config))
        beside = name.rpartition(".")[0]
        backend = recording_backend(self.cached_width, vllm_config) if deployment.adaptive else None
        self.attn = nn.ModuleList(
            Attention(
                self.heads,
                self.cached_width,
                config.head_width**-0.5,
                num_kv_heads=self.key_value_heads,
                cache_config=vllm_config.cache_config,
                quant_config=quantization,
                prefix=f"{beside}.{number}.self_attn.attn",
                attn_backend=backend,
            )
            for number in places
        )
        if turn is not None:
            attention: Any
            for attention in self.attn:
                attention.use_direct_call = True  # inside our operator, two more of vLLM's would only take time

    def forward(self, positions: Tensor, hidden: Tensor, loop: int = 0) -> Tensor:
        """Attend in a loop, counted from 0; with a turn, in its loop, and `hidden` has only the running tokens."""
        projected, _ = self.qkv_proj(hidden)
        sizes = [heads * self.head_width for heads in (self.heads, self.key_value_heads, self.key_value_heads)]
        query, key, value = projected.split(sizes, dim=-1)
        if self.query_key_norm:
            query, key = self._normed(self.q_norm, query), self._normed(self.k_norm, key)
        query, key = self.rotary_emb(positions, query, key)
        query, key, value = (self._widened(part) for part in (query, key, value))
        if self.turn is None:
            out = self.attn[loop](query, key, value)
        else:
            out = torch.ops.vllm.loopscope_attend(query, key, value, self.name)
        out, _ = self.o_proj(self._narrowed(out))
        return out

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[n, H] the attention of the running tokens in the turn's loop."""
        assert self.turn is not None
        attention, cache = self.attn[self.turn.loop], self.turn.cache
        if cache is None:
            return attention(query, key, value)
        return cache.taken(attention(*cache.completed(self.name, query, key, value)))

    def propagate(self, loops: range, cache: ExitCache) -> None:
        """Write the keys and values of all tokens' exit loops into the deeper loops, which no token runs."""
        if loops:
            shape = (-1, self.key_value_heads, self.cached_width)
            key, value = (part.view(shape) for part in cache.last(self.name))
            for attention in islice(self.attn, loops.start, loops.stop):
                unified_kv_cache_update(key, value, attention.layer_name)

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


def _attend_by_name(query: Tensor, key: Tensor, value: Tensor, name: str) -> Tensor:
    """Run a layer's attention as one operator, which the compiler does not look into."""
    layer: LoopedAttention = get_forward_context().no_compile_layers[name]
    return layer.attend(query, key, value)


def _attended_shape(query: Tensor, key: Tensor, value: Tensor, name: str) -> Tensor:
    """The shape of the operator's output, for the compiler."""
    return torch.empty_like(query)


direct_register_custom_op(op_name="loopscope_attend", op_func=_attend_by_name, fake_impl=_attended_shape)


class ParallelSwiGLU(nn.Module):
    """The gated MLP of the Llama family, from vLLM's parallel layers."""

    def __init__(self, config: DecoderConfig, vllm_config: VllmConfig, prefix: str, bias: bool) -> None:
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
    """The rotary positions of a decoder as vLLM's parameters."""
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


class ParallelLayer(nn.Module):
    """A decoder layer from vLLM's parallel layers; for Ouro with norms after attention and MLP, too."""

    def __init__(
        self, deployment: Deployment, vllm_config: VllmConfig, name: str, places: Sequence[int], turn: Turn | None
    ) -> None:
        super().__init__()
        config = deployment.config
        self.self_attn = LoopedAttention(deployment, vllm_config, name, places, turn)
        bias = bool(config.mlp_bias) and deployment.looping.source == "llama"
        self.mlp = ParallelSwiGLU(config, vllm_config, name, bias)
        norm = partial(RMSNorm, config.hidden_size, eps=config.rms_norm_eps)
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()
        after = norm if isinstance(config, OuroConfig) else nn.Identity
        self.input_layernorm_2, self.post_attention_layernorm_2 = after(), after()

    def forward(self, positions: Tensor, hidden: Tensor, loop: int = 0) -> Tensor:
        attended = self.self_attn(positions, self.input_layernorm(hidden), loop)
        hidden = hidden + self.input_layernorm_2(attended)
        return hidden + self.post_attention_layernorm_2(self.mlp(self.post_attention_layernorm(hidden)))


@support_torch_compile(dynamic_arg_dims={"hidden": 0, "positions": -1})
class SharedBlock(nn.Module):
    """Run the layers that every loop runs, and Ouro's final norm after them; vLLM compiles it."""

    def __init__(self, *, vllm_config: VllmConfig, layers: Iterable[nn.Module], norm: nn.Module) -> None:
        super().__init__()
        self.layers, self.norm = nn.ModuleList(layers), norm

    def forward(self, hidden: Tensor, positions: Tensor, loop: int = 0) -> Tensor:
        """[n, D] the states after a loop (from 0); left out with a turn, so that one compilation serves all loops."""
        for layer in self.layers:
            hidden = layer(positions, hidden, loop)
        return self.norm(hidden)


@support_torch_compile(dynamic_arg_dims={"input_ids": 0, "positions": -1})
class ParallelDecoder(nn.Module):
    """Run embedding and loops up to the head's input, as in `loopscope.models`, on the tokens of a step.

    Its `forward` runs all loops. vLLM compiles it if it is called as a module.
    """

    def __init__(self, *, vllm_config: VllmConfig, deployment: Deployment, prefix: str = "") -> None:
        super().__init__()
        config, looping = deployment.config, deployment.looping
        self.num_loops, self.damping, self.eps = deployment.loops, looping.damping, config.rms_norm_eps
        self.prelude, self.core_size, width = looping.prelude, looping.core, config.hidden_size
        self.is_ouro = isinstance(config, OuroConfig)
        self.turn = Turn() if deployment.adaptive else None
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, width, prefix=f"{prefix}.embed_tokens")
        self.layers = nn.ModuleList(
            ParallelLayer(
                deployment,
                vllm_config,
                f"{prefix}.layers.{number}",
                self._places(number),
                self.turn if self._is_looped(number) else None,
            )
            for number in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(width, eps=self.eps)
        self.injection = nn.Linear(width, width, bias=False) if looping.injection else None
        self.early_exit_gate = nn.Linear(width, 1) if looping.gate == "linear" else None
        after_loop = self.norm if self.is_ouro else nn.Identity()
        self.block = SharedBlock(vllm_config=vllm_config, layers=self.core, norm=after_loop)

    def _places(self, number: int) -> Sequence[int]:
        """The numbers of a layer in the KV cache: one for every time that it runs."""
        if self._is_looped(number):
            return range(number, self.prelude + self.num_loops * self.core_size, self.core_size)
        return [number if number < self.prelude else number + (self.num_loops - 1) * self.core_size]

    def _is_looped(self, number: int) -> bool:
        return self.prelude <= number < self.prelude + self.core_size

    @property
    def core(self) -> Iterable[Any]:
        """The layers that every loop runs."""
        return islice(self.layers, self.prelude, self.prelude + self.core_size)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """[P, D] the head's input after all loops."""
        hidden = embedded = self.begin(input_ids, positions)
        for loop in range(self.num_loops):
            hidden = self.loop(hidden, embedded, positions, loop)
        return self.read(hidden, positions)

    def begin(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """[P, D] the states before the first loop."""
        hidden: Tensor = self.embed_tokens(input_ids)
        for layer in islice(self.layers, self.prelude):
            hidden = layer(positions, hidden)
        return hidden

    def loop(
        self, hidden: Tensor, embedded: Tensor, positions: Tensor, loop: int, cache: ExitCache | None = None
    ) -> Tensor:
        """[n, D] the running tokens' states after a loop (from 0); `embedded` are those before the first loop."""
        updated = hidden if self.injection is None else hidden + self.injection(embedded)
        if self.turn is None:
            updated = self.block(updated, positions, loop)
        else:
            self.turn.loop, self.turn.cache = loop, cache
            updated = self.block(updated, positions)
        return updated if self.damping == 1 else hidden + self.damping * (updated - hidden)

    def pooled(self, hidden: Tensor) -> Tensor:
        """[n, D] the pooled states, which the gate reads."""
        if self.is_ouro:
            return hidden
        has_coda = len(self.layers) > self.prelude + self.core_size
        return rms_normalised(hidden, self.eps) if has_coda else self.norm(hidden)

    def halt(self, pooled: Tensor) -> Tensor | None:
        """[n] halt logits, or None without a gate."""
        return None if self.early_exit_gate is None else linear_halt(self.early_exit_gate, pooled)

    def read(self, hidden: Tensor, positions: Tensor) -> Tensor:
        """[P, D] the head's input."""
        for layer in islice(self.layers, self.prelude + self.core_size, None):
            hidden = layer(positions, hidden)
        return hidden if self.is_ouro else self.norm(hidden)
