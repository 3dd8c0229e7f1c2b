"""How does vLLM come to know looped models? By this plugin, which every one of its processes runs at its start.

It is named in the entry points of the package (group `vllm.general_plugins`). `vllm serve FOLDER` then serves Ouro and
looped Llamas; a deployment says in `hf_overrides` how many loops they run, or which exit policy (`deployment.py`).
"""


def register() -> None:
    """Tells vLLM of the models by their names, so that nothing heavy is imported before one is wanted."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    import loopscope.transformers  # by whose configurations vLLM reads those of looped models
    from loopscope.vllm.deployment import DeploymentChecks

    for name, path in ARCHITECTURES.items():
        ModelRegistry.register_model(name, path)
        MODELS_CONFIG_MAP[name] = DeploymentChecks


ARCHITECTURES = {
    "OuroForCausalLM": "loopscope.vllm.ouro:ServedOuro",
    "LoopedLlamaForCausalLM": "loopscope.vllm.looped_llama:ServedLoopedLlama",
}
