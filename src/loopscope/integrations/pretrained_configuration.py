"""What are the configurations of looped checkpoints in transformers? Their `config.json`, key by key.

The keys are those of the Hub. The networks (`loopscope.models`) define on which keys they depend, and which values they
reject; these classes only hold the keys. They are separate from the models and the Trainer because every process of
vLLM needs only the configurations.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from transformers import AutoConfig, PreTrainedConfig


class LoopedPretrainedConfig(PreTrainedConfig):  # type: ignore[misc]
    """Be the base of the configurations; every key of the file is an attribute.

    A file may leave out its architecture, which vLLM needs.
    """

    architecture: ClassVar[str]
    auto_map: ClassVar[Mapping[str, str]] = MappingProxyType({})  # TRL asks for it: no code of a checkpoint is run

    keys_to_ignore_at_inference = ["past_key_values", "last_hidden_state"]  # noqa: RUF012 - transformers adds to it

    def __post_init__(self, **kwargs: Any) -> None:
        kwargs.pop("auto_map", None)  # of the code beside the Hub's weights, which is not used and not saved
        scaling = kwargs.pop("rope_scaling", None)
        if scaling is not None:  # transformers 5 calls it rope_parameters
            theta = {"rope_theta": kwargs.pop("rope_theta")} if "rope_theta" in kwargs else {}
            kwargs["rope_parameters"] = {**scaling, **theta, **(kwargs.get("rope_parameters") or {})}
        super().__post_init__(**kwargs)
        self.architectures: list[str] = getattr(self, "architectures", None) or [self.architecture]


class OuroPretrainedConfig(LoopedPretrainedConfig):
    """The configuration of Ouro in transformers."""

    model_type, architecture = "ouro", "OuroForCausalLM"


class HuginnPretrainedConfig(LoopedPretrainedConfig):
    """The configuration of Huginn in transformers."""

    model_type, architecture = "huginn_raven", "RavenForCausalLM"
    attribute_map = {  # noqa: RUF012 - transformers' own way
        "hidden_size": "n_embd",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers",
        "max_position_embeddings": "block_size",
    }


class LoopedLlamaPretrainedConfig(LoopedPretrainedConfig):
    """The configuration of a looped Llama in transformers."""

    model_type, architecture = "looped_llama", "LoopedLlamaForCausalLM"


def register_configurations() -> None:
    """Let transformers read the configurations of looped checkpoints."""
    for kind in (OuroPretrainedConfig, HuginnPretrainedConfig, LoopedLlamaPretrainedConfig):
        AutoConfig.register(kind.model_type, kind)
