"""How does vLLM load looped models? By this plugin, which every process of vLLM runs at its start.

The package's entry points name it (group `vllm.general_plugins`). `vllm serve FOLDER` then serves Ouro and looped
Llamas; a deployment sets the number of loops, or an exit policy, in `hf_overrides` (`deployment.py`).
"""

import logging

_SERVED = "loopscope.integrations.vllm.served_model:ServedModel"
ARCHITECTURES = {"OuroForCausalLM": _SERVED, "LoopedLlamaForCausalLM": _SERVED}


def register() -> None:
    """Register the models in vLLM by name, so that nothing large is imported before a model is needed.

    vLLM runs this function for every model, and ends if it fails: so it only warns.
    """
    try:
        from vllm import ModelRegistry
        from vllm.model_executor.models.config import MODELS_CONFIG_MAP

        from loopscope.integrations.pretrained_configuration import register_configurations
        from loopscope.integrations.vllm.deployment import DeploymentChecks

        register_configurations()  # for reading the configurations of looped models
        for name, path in ARCHITECTURES.items():
            ModelRegistry.register_model(name, path)
            MODELS_CONFIG_MAP[name] = DeploymentChecks
    except Exception as error:
        logging.getLogger(__name__).warning(
            "LoopScope's plugin does not work here, so that looped models are unknown: %s: %s",
            type(error).__name__,
            error,
        )
