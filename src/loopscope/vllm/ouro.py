"""Ouro in vLLM: the layers of `loopscope.models.ouro` made of vLLM's, under the same parameter names.

Shapes: P tokens of a step, D width.
"""

from collections.abc import Iterable
from typing import Any, ClassVar

from torch import Tensor, nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from loopscope.models.gates import linear_halt
from loopscope.models.ouro import OuroConfig
from loopscope.vllm.deployment import Deployment
from loopscope.vllm.exit_cache import ExitCache
from loopscope.vllm.layers import LoopedAttention, ParallelSwiGLU
from loopscope.vllm.looped import LoopedDecoder, ServedModel


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
        out: Tensor = hidden + self.post_attention_layernorm_2(self.mlp(self.post_attention_layernorm(hidden)))
        return out


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
        embedded: Tensor = self.embed_tokens(input_ids)
        return embedded

    def loop(
        self, hidden: Tensor, embedded: Tensor, positions: Tensor, loop: int, cache: ExitCache | None = None
    ) -> Tensor:
        for layer in self.layers:
            hidden = layer(positions, hidden, loop, cache)
        normed: Tensor = self.norm(hidden)
        return normed

    def pooled(self, hidden: Tensor) -> Tensor:
        return hidden

    def halt(self, pooled: Tensor) -> Tensor:
        return linear_halt(self.early_exit_gate, pooled)

    def read(self, hidden: Tensor, positions: Tensor) -> Tensor:
        return hidden


class ServedOuro(ServedModel):
    decoder: ClassVar = OuroDecoder
