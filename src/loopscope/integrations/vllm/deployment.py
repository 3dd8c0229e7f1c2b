"""What is a deployment told beside its checkpoint? How many loops it runs, or by which policy its tokens exit.

It stands under `loopscope` in vLLM's `hf_overrides`:

    vllm serve FOLDER --hf-overrides '{"loopscope": {"policy": "policy.json", "exits_log": "exits.jsonl"}}'

Everything is checked before an engine starts.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from loopscope.config import Loops, Settings, build
from loopscope.errors import UserError
from loopscope.exit_state import ExitState
from loopscope.model_identity import with_configuration
from loopscope.models.checkpoint import weights_sha256
from loopscope.models.checkpoint_folder import check_hashes, find_checkpoint
from loopscope.models.looped_llama import LoopedLlamaConfig, Looping
from loopscope.models.ouro import OuroConfig
from loopscope.policy import ExitPolicy
from loopscope.scope import Scope

KEY = "loopscope"
_WHERE = f"hf_overrides: {KEY}"


class DeploymentSettings(Settings, frozen=True, kw_only=True):
    loops: Loops | None = None  # None: as many as the checkpoint says
    policy: str | None = None  # a file; or by hand:
    readout: str | None = None
    threshold: float | None = None
    without_guarantee: bool = False  # a rule that was calibrated for another cache is used without its guarantee
    exits_log: str | None = None  # a file to which every token's loops are written

    def __post_init__(self) -> None:
        if (self.readout is None) != (self.threshold is None) or (self.policy is not None and self.readout is not None):
            raise ValueError("a policy is given by its file, or by a readout and its threshold together, not both")


class Deployment(msgspec.Struct, frozen=True):
    """What is run: the model as it is configured, and how deep."""

    config: OuroConfig | LoopedLlamaConfig
    looping: Looping
    loops: int
    policy: ExitPolicy | None = None  # None: every token goes through all of these loops
    exits_log: str | None = None

    @property
    def head_attends(self) -> bool:
        return self.looping.prelude + self.looping.core < self.config.num_hidden_layers


def read_deployment(
    configuration: dict[str, Any],
    checkpoint: str,
    revision: str | None,
    precision: str,
    cache_precision: str | None = None,
) -> Deployment:
    """What a configuration with its overrides asks for, of the model in a folder or on the Hub; or a refusal.

    A policy is held to the weights, depth, precision and cache that it was made for, as everywhere. `cache_precision`
    is that of keys and values in the cache, where it is another than they are computed in.
    """
    values = {name: value for name, value in configuration.items() if value is not None}
    if misplaced := sorted({*DeploymentSettings.__struct_fields__, "num_loops"} & {*values}):
        name = misplaced[0]
        raise UserError(f'hf_overrides: \'{name}\' belongs under {KEY}, as in {{"{KEY}": {{"{name}": ...}}}}.')
    settings = build(DeploymentSettings, values.pop(KEY, {}), _WHERE)
    config: OuroConfig | LoopedLlamaConfig
    if values.get("model_type") == "looped_llama":
        config = build(LoopedLlamaConfig, values, "The model's configuration")
        looping = config.looping
    else:
        config = build(OuroConfig, values, "The model's configuration")
        layers, depth = config.num_hidden_layers, config.total_ut_steps
        looping = Looping(source="llama", prelude=0, core=layers, loops=depth, gate="linear")
    loops = settings.loops or looping.loops
    policy = _policy(settings)
    if settings.exits_log is not None and (policy is None or policy.fixed_depth is not None):
        raise UserError(
            f"{_WHERE}: at a fixed depth all tokens take as many loops, and there is nothing to log in exits_log."
        )
    if policy is None:
        return Deployment(config, looping, loops)
    if policy.guarantee is not None and cache_precision is not None:
        raise UserError(
            f"The policy's guarantee is for a cache that holds keys and values as they are computed, and this one "
            f"holds them in {cache_precision}; leave out --kv-cache-dtype, or use the rule without its guarantee "
            '("without_guarantee": true).'
        )
    tied = policy.model is not None or policy.gate is not None
    weights = with_configuration(weights_sha256(find_checkpoint(checkpoint, revision)), config.sha256) if tied else None
    fixed = policy.fixed_depth is not None
    policy.check(weights, loops, Scope(unit="tokens", cache=None if fixed else "propagate", precision=precision))
    state = ExitState(policy, loops)  # rejects what can only be replayed
    if fixed:  # all exit together, so that no later token lacks anything, whatever the rule of the cache
        return Deployment(config, looping, int(policy.threshold or 0))
    if "gate_logits" in state.sources() and looping.gate == "none":
        raise UserError(f"The model has no gate, so it cannot be run with the readout '{policy.readout}'.")
    return Deployment(config, looping, loops, policy, settings.exits_log)


def _policy(settings: DeploymentSettings) -> ExitPolicy | None:
    if settings.policy is None:
        return None if settings.readout is None else ExitPolicy(settings.readout, settings.threshold)
    policy = ExitPolicy.load(Path(settings.policy))
    if settings.without_guarantee:
        scope = msgspec.structs.replace(policy.scope, cache=None)
        return replace(policy, certificate=None, scope=scope)
    if policy.fixed_depth is None and policy.scope.cache not in (None, "propagate"):
        raise UserError(
            f"This policy was calibrated on text with the cache '{policy.scope.cache}', and vLLM writes with the cache "
            "'propagate', for which it guarantees nothing; to use its rule all the same, add "
            '"without_guarantee": true.'
        )
    return policy


def deployment_of(vllm_config: Any) -> Deployment:
    model = vllm_config.model_config
    computed_in, cached_in = str(model.dtype).removeprefix("torch."), vllm_config.cache_config.cache_dtype
    other = None if cached_in in ("auto", computed_in) else cached_in
    precision = model.quantization or computed_in
    return read_deployment(model.hf_config.to_dict(), model.model, model.revision, precision, other)


class DeploymentChecks:
    """What vLLM asks of a model's configuration before it starts an engine."""

    @staticmethod
    def verify_and_update_model_config(model_config: Any) -> None:
        """No window of attention: what a Qwen's configuration says of one that is not used, vLLM would take for one."""
        model_config.hf_text_config.sliding_window = None

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        """With a policy, switches off what would run other tokens than LoopScope, or other loops than are decided."""
        check_hashes(Path(vllm_config.model_config.model))  # of a folder that training left
        if vllm_config.lora_config is not None:
            raise UserError(
                "Adapters (LoRA) are not served beside a looped model; merge them into its weights first "
                "(merge_and_unload of PEFT), and leave out --enable-lora."
            )
        deployment = deployment_of(vllm_config)
        if deployment.policy is None:  # vLLM keeps compiled graphs by what its configuration says, not by a file's
            vllm_config.model_config.hf_config.loopscope = {"loops": deployment.loops}
            return
        vllm_config.model_config.enforce_eager = True  # no recorded graph can decide while the model runs
        vllm_config.cache_config.enable_prefix_caching = False  # a text leaves other keys than its tokens as a prompt
        for option in ("speculative_config", "kv_transfer_config"):
            if getattr(vllm_config, option) is not None:
                raise UserError(
                    f"An exit policy does not go together with {option}: what a text that exited early left in the "
                    "cache is not what its tokens leave as a prompt, so that no other request or engine may have it; "
                    "leave it out."
                )
        scheduler, longest = vllm_config.scheduler_config, vllm_config.model_config.max_model_len
        if deployment.head_attends:
            scheduler.enable_chunked_prefill = False
            if scheduler.max_num_batched_tokens < longest:
                raise UserError(
                    "The layers after the loops read a whole prompt where its last token exits, so that with an exit "
                    f"policy it must fit into one step: set --max-num-batched-tokens to at least {longest}."
                )
        if deployment.exits_log is not None:
            if vllm_config.parallel_config.data_parallel_size > 1:
                raise UserError("Several engines (data parallelism) cannot write one exits_log; leave it out.")
            check_log(Path(deployment.exits_log))


def check_log(log: Path) -> None:
    """Rejects a file that cannot be written before an engine starts, not at its first token."""
    try:
        log.open("a").close()
    except OSError as error:
        raise UserError(f"exits_log: {log} cannot be written ({error.strerror}); choose another file.") from None
