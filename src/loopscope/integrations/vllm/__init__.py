"""How does vLLM come to know looped models? By this plugin, which every one of its processes runs at its start.

It is named in the entry points of the package (group `vllm.general_plugins`). `vllm serve FOLDER` then serves Ouro and
looped Llamas; a deployment says in `hf_overrides` how many loops they run, or which exit policy (`deployment.py`).
"""

import logging

_SERVED = "loopscope.integrations.vllm.served_model:ServedModel"
ARCHITECTURES = {"OuroForCausalLM": _SERVED, "LoopedLlamaForCausalLM": _SERVED}


def register() -> None:
    """Tells vLLM of the models by their names, so that nothing heavy is imported before one is wanted.

    vLLM runs this whatever it serves, and ends where it fails: so it only warns.
    """
    try:
        from vllm import ModelRegistry
        from vllm.model_executor.models.config import MODELS_CONFIG_MAP

        from loopscope.integrations.pretrained_configuration import register_configurations
        from loopscope.integrations.vllm.deployment import DeploymentChecks

        register_configurations()  # by which vLLM reads those of looped models
        for name, path in ARCHITECTURES.items():
            ModelRegistry.register_model(name, path)
            MODELS_CONFIG_MAP[name] = DeploymentChecks
    except Exception as error:
        logging.getLogger(__name__).warning(
            "LoopScope's plugin does not work here, so that looped models are unknown: %s: %s",
            type(error).__name__,
            error,
        )
