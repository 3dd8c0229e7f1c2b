"""Looped Llamas in vLLM: the layers of `loopscope.models.looped_llama` made of vLLM's, under the same parameter names.

The places of the KV cache are numbered as the layers run: prelude, core of the first loop, of the second, .., coda.

Shapes: P tokens of a step, n that run, D width.
"""

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, ClassVar

from torch import Tensor, nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from loopscope.models.decoder_layers import rms_normalised
from loopscope.models.gates import linear_halt
from loopscope.models.looped_llama import LoopedLlamaConfig
from loopscope.vllm.deployment import Deployment
from loopscope.vllm.exit_cache import ExitCache
from loopscope.vllm.layers import LoopedAttention, ParallelSwiGLU
from loopscope.vllm.looped import LoopedDecoder, ServedModel


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
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


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
        normed: Tensor = self.norm(hidden)
        return normed

    def halt(self, pooled: Tensor) -> Tensor | None:
        return None if self.early_exit_gate is None else linear_halt(self.early_exit_gate, pooled)

    def read(self, hidden: Tensor, positions: Tensor) -> Tensor:
        for layer in islice(self.layers, self.config.looping.prelude + self.config.looping.core, None):
            hidden = layer(positions, hidden)
        normed: Tensor = self.norm(hidden)
        return normed


class ServedLoopedLlama(ServedModel):
    decoder: ClassVar = LoopedLlamaDecoder
