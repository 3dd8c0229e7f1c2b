"""What does a deployment configure beside its checkpoint? The number of loops, or the policies by which tokens exit.

The settings are under `loopscope` in vLLM's `hf_overrides`; without a depth there, vLLM serves the policy that was
saved with the model:

    vllm serve FOLDER --hf-overrides '{"loopscope": {"policy": "policy.json", "policies": {"fast": "fast.json"}}}'

Everything is checked before an engine starts.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from loopscope.config import Loops, Settings, build
from loopscope.errors import UserError
from loopscope.exit_state import ExitState
from loopscope.integrations.vllm.exits_log import check_exits_log
from loopscope.model_identity import with_configuration
from loopscope.models.checkpoint import weights_sha256
from loopscope.models.checkpoint_folder import GenerationExits, check_hashes, find_checkpoint, named_exits
from loopscope.models.looped_llama import LoopedLlamaConfig, Looping
from loopscope.models.ouro import OuroConfig
from loopscope.policy import ExitPolicy
from loopscope.scope import Scope

KEY = "loopscope"
FULL_DEPTH = "full"
"""The name by which a request asks for all loops; no policy may have it."""
_WHERE = f"hf_overrides: {KEY}"
_CONNECTOR = "loopscope.integrations.vllm.request_connector"


class DeploymentSettings(Settings, frozen=True, kw_only=True):
    """Hold the settings under `loopscope` in vLLM's `hf_overrides`."""

    loops: Loops | None = None  # None: the checkpoint's number
    policy: str | None = None  # a file (None: the checkpoint's own policy); or a rule by hand:
    readout: str | None = None
    threshold: float | None = None
    policies: dict[str, str] = msgspec.field(default_factory=dict)  # by name, the policy files that requests may choose
    without_guarantee: bool = False  # use a policy calibrated for another cache, without its guarantee
    exits_log: str | None = None  # a file for every token's loops

    def __post_init__(self) -> None:
        if (self.readout is None) != (self.threshold is None) or (self.policy is not None and self.readout is not None):
            raise ValueError("a policy is given by its file, or by a readout and its threshold together, not both")
        if taken := [name for name in self.policies if name == FULL_DEPTH or not name.isidentifier()]:
            raise ValueError(f"'{taken[0]}' cannot be the name of a policy; take letters, and not '{FULL_DEPTH}'")

    @property
    def names_no_depth(self) -> bool:
        return self.loops is None and self.policy is None and self.readout is None


class Deployment(msgspec.Struct, frozen=True):
    """Hold the served model's configuration, depth and policies."""

    config: OuroConfig | LoopedLlamaConfig
    looping: Looping
    loops: int
    policy: ExitPolicy | None = None  # None: every token runs all loops, unless its request chooses a depth
    policies: Mapping[str, ExitPolicy] = msgspec.field(default_factory=dict)  # that requests may choose
    exits_log: str | None = None

    @property
    def adaptive(self) -> bool:
        """Whether tokens may take different numbers of loops."""
        return self.policy is not None or bool(self.policies)

    def __str__(self) -> str:
        """For the log at the start: the depth of tokens, and its guarantee."""
        if not self.adaptive:
            return f"every token takes {self.loops} loops"
        texts = [_describe_policy("the policy", self.policy) if self.policy else f"by default all {self.loops} loops"]
        texts += [_describe_policy(f"'{name}'", policy) for name, policy in self.policies.items()]
        return f"up to {self.loops} loops, cache 'propagate'; {'; '.join(texts)}"

    @property
    def head_attends(self) -> bool:
        return self.looping.prelude + self.looping.core < self.config.num_hidden_layers


def _describe_policy(name: str, policy: ExitPolicy) -> str:
    """A policy and its guarantee, for the log at the start."""
    guarantee = "no guarantee" if policy.guarantee is None else f"guarantee: {policy.guarantee.sentence}"
    return f"{name} is {policy} ({guarantee})"


def read_deployment(
    configuration: dict[str, Any],
    checkpoint: str,
    revision: str | None,
    precision: str,
    cache_precision: str | None = None,
) -> Deployment:
    """Read the deployment of a model, in a folder or on the Hub, from its configuration with overrides.

    A policy must fit the weights, depth, precision and cache for which it was made. `cache_precision` is the precision
    of cached keys and values, if it differs from the computing precision.
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
    deployed = Deployment(config, looping, settings.loops or looping.loops, exits_log=settings.exits_log)
    weights = _WeightsHash(checkpoint, revision, config.sha256)
    policies = {
        name: _checked_policy(ExitPolicy.load(Path(file)), settings, deployed, weights, precision, cache_precision)
        for name, file in settings.policies.items()
    }
    policy = _deployed_policy(settings, find_checkpoint(checkpoint, revision) if settings.names_no_depth else None)
    if policy is not None:
        policy = _checked_policy(policy, settings, deployed, weights, precision, cache_precision)
    if policy is not None and policy.fixed_depth is not None and not policies:  # the same as so many loops
        deployed, policy = msgspec.structs.replace(deployed, loops=policy.fixed_depth), None
    if policy is None and not policies and settings.exits_log is not None:
        raise UserError(
            f"{_WHERE}: at a fixed depth all tokens take as many loops, and there is nothing to log in exits_log."
        )
    return msgspec.structs.replace(deployed, policy=policy, policies=policies)


class _WeightsHash:
    """Hold the hash of a checkpoint's weights, computed once, and only if a policy needs it."""

    def __init__(self, checkpoint: str, revision: str | None, configuration: str) -> None:
        self._checkpoint, self._revision, self._configuration = checkpoint, revision, configuration

    @cached_property
    def sha256(self) -> str:
        return with_configuration(
            weights_sha256(find_checkpoint(self._checkpoint, self._revision)), self._configuration
        )


def _deployed_policy(settings: DeploymentSettings, folder: Path | None) -> ExitPolicy | None:
    """The policy of the deployment, or the policy saved with the model in this folder."""
    if settings.readout is not None:
        return ExitPolicy(settings.readout, settings.threshold)
    if settings.policy is not None:
        return ExitPolicy.load(Path(settings.policy))
    exits = GenerationExits() if folder is None else named_exits(folder)
    if exits.policy is None:
        return None
    policy = ExitPolicy.load(Path(exits.policy))
    if exits.cache is None or policy.scope.cache not in (None, "propagate"):
        return policy
    return replace(policy, scope=msgspec.structs.replace(policy.scope, cache=exits.cache))


def _checked_policy(
    policy: ExitPolicy,
    settings: DeploymentSettings,
    deployed: Deployment,
    weights: _WeightsHash,
    precision: str,
    cache_precision: str | None,
) -> ExitPolicy:
    """The policy to serve, after checking it against weights, depth, precision and cache."""
    fixed = policy.fixed_depth is not None
    if settings.without_guarantee:
        policy = replace(policy, certificate=None, scope=msgspec.structs.replace(policy.scope, cache=None))
    elif not fixed and policy.scope.cache not in (None, "propagate"):
        raise UserError(
            f"This policy was calibrated on text with the cache '{policy.scope.cache}', and vLLM writes with the cache "
            "'propagate', for which it guarantees nothing; to use its rule all the same, add "
            '"without_guarantee": true, or serve a number of loops ("loops": N).'
        )
    if policy.guarantee is not None and cache_precision is not None:
        raise UserError(
            f"The policy's guarantee is for a cache that holds keys and values as they are computed, and this one "
            f"holds them in {cache_precision}; leave out --kv-cache-dtype, or use the rule without its guarantee "
            '("without_guarantee": true).'
        )
    tied = policy.model is not None or policy.gate is not None
    here = Scope(unit="tokens", cache=None if fixed else "propagate", precision=precision)
    policy.check(weights.sha256 if tied else None, deployed.loops, here)
    state = ExitState(policy, deployed.loops)  # rejects a policy that can only be replayed
    if "gate_logits" in state.sources() and deployed.looping.gate == "none":
        raise UserError(f"The model has no gate, so it cannot be run with the readout '{policy.readout}'.")
    return policy


def deployment_of(vllm_config: Any) -> Deployment:
    """The deployment of a running vLLM, from its configuration."""
    model = vllm_config.model_config
    computed_in, cached_in = str(model.dtype).removeprefix("torch."), vllm_config.cache_config.cache_dtype
    other = None if cached_in in ("auto", computed_in) else cached_in
    precision = model.quantization or computed_in
    return read_deployment(model.hf_config.to_dict(), model.model, model.revision, precision, other)


class DeploymentChecks:
    """Check and adjust vLLM's configuration of a looped model before an engine starts."""

    @staticmethod
    def verify_and_update_model_config(model_config: Any) -> None:
        """Remove attention windows: vLLM would apply a window that a Qwen's configuration names but does not use."""
        model_config.hf_text_config.sliding_window = None

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        """Under policies, switch off features that would run other tokens or loops than LoopScope decides."""
        from loopscope.integrations.vllm.request_connector import DepthArguments

        check_hashes(Path(vllm_config.model_config.model))  # of a folder that a LoopScope run wrote
        if vllm_config.lora_config is not None:
            raise UserError(
                "Adapters (LoRA) are not served beside a looped model; merge them into its weights first "
                "(merge_and_unload of PEFT), and leave out --enable-lora."
            )
        deployment = deployment_of(vllm_config)
        DepthArguments.deployment = deployment
        if vllm_config.speculative_config is None:  # with it, vLLM supports no custom logits processors
            checks = f"{DepthArguments.__module__}:{DepthArguments.__name__}"
            others = vllm_config.model_config.logits_processors or []
            vllm_config.model_config.logits_processors = [*(name for name in others if name != checks), checks]
        if not deployment.adaptive:  # vLLM reuses graphs by its configuration, without policy files
            vllm_config.model_config.hf_config.loopscope = {"loops": deployment.loops}
            return
        _switch_off_features(vllm_config)
        _add_connector(vllm_config, deployment)
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
            check_exits_log(Path(deployment.exits_log))


def _switch_off_features(vllm_config: Any) -> None:
    """Switch off features of vLLM that need the same number of loops for all tokens; the log names them."""
    from vllm.config import CUDAGraphMode
    from vllm.logger import init_logger

    for option, given in (
        ("speculative_config", vllm_config.speculative_config),
        ("kv_transfer_config", None if _has_connector(vllm_config) else vllm_config.kv_transfer_config),
    ):
        if given is not None:
            raise UserError(
                f"An exit policy does not go together with {option}: what a text that exited early left in the "
                "cache is not what its tokens leave as a prompt, so that no other request or engine may have it; "
                "leave it out."
            )
    off = []
    if vllm_config.cache_config.enable_prefix_caching:
        off.append("prefix caching (a text that exited early leaves other keys than its tokens do as a prompt)")
    if vllm_config.compilation_config.cudagraph_mode not in (None, CUDAGraphMode.NONE):
        off.append("CUDA graphs (no recorded graph can decide while the model runs)")
    vllm_config.cache_config.enable_prefix_caching = False
    vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
    if off:
        init_logger("vllm.loopscope").info("LoopScope switches off for exit policies: %s.", "; ".join(off))


def _add_connector(vllm_config: Any, deployment: Deployment) -> None:
    """Add the connector that carries depths of requests to the workers, and loops of tokens back."""
    from vllm.config import KVTransferConfig

    if not _has_connector(vllm_config):
        vllm_config.kv_transfer_config = KVTransferConfig(
            kv_connector="LoopScopeConnector",
            kv_connector_module_path=_CONNECTOR,
            kv_role="kv_consumer",
            kv_connector_extra_config={"loops": deployment.loops, "default": str(deployment.policy or FULL_DEPTH)},
        )


def _has_connector(vllm_config: Any) -> bool:
    """Whether vLLM's configuration has this connector; each process of vLLM checks the configuration again."""
    found = vllm_config.kv_transfer_config
    return found is not None and found.kv_connector_module_path == _CONNECTOR
