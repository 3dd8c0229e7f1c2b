"""How does transformers, by which vLLM reads configurations, read those of looped models? Key by key, as they are.

What of them a network depends on, and which values are refused, stands beside the network (`loopscope.models`).
"""

from typing import Any

from transformers import AutoConfig, PreTrainedConfig


class OuroServingConfig(PreTrainedConfig):  # type: ignore[misc]
    model_type = "ouro"

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self.architectures = ["OuroForCausalLM"]


class LoopedLlamaServingConfig(PreTrainedConfig):  # type: ignore[misc]
    model_type = "looped_llama"

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self.architectures = ["LoopedLlamaForCausalLM"]


def register_configurations() -> None:
    for kind in (OuroServingConfig, LoopedLlamaServingConfig):
        AutoConfig.register(kind.model_type, kind, exist_ok=True)
