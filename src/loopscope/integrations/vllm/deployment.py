"""What is a deployment told beside its checkpoint? How many loops it runs, or by which policy its tokens exit.

It stands under `loopscope` in vLLM's `hf_overrides`; without a depth there, the policy that was saved with the model is
served:

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
from loopscope.integrations.vllm.exits_log import LOG_BEGINNING
from loopscope.model_identity import with_configuration
from loopscope.models.checkpoint import weights_sha256
from loopscope.models.checkpoint_folder import GenerationExits, check_hashes, find_checkpoint, named_exits
from loopscope.models.looped_llama import LoopedLlamaConfig, Looping
from loopscope.models.ouro import OuroConfig
from loopscope.policy import ExitPolicy
from loopscope.scope import Scope

KEY = "loopscope"
FULL_DEPTH = "full"
"""By this name a request asks for all loops, so no policy has it."""
_WHERE = f"hf_overrides: {KEY}"
_CONNECTOR = "loopscope.integrations.vllm.request_connector"


class DeploymentSettings(Settings, frozen=True, kw_only=True):
    loops: Loops | None = None  # None: as many as the checkpoint says
    policy: str | None = None  # a file (None: the one that the checkpoint names); or by hand:
    readout: str | None = None
    threshold: float | None = None
    policies: dict[str, str] = msgspec.field(default_factory=dict)  # files of those that a request may ask for, by name
    without_guarantee: bool = False  # a rule that was calibrated for another cache is used without its guarantee
    exits_log: str | None = None  # a file to which every token's loops are written

    def __post_init__(self) -> None:
        if (self.readout is None) != (self.threshold is None) or (self.policy is not None and self.readout is not None):
            raise ValueError("a policy is given by its file, or by a readout and its threshold together, not both")
        if taken := [name for name in self.policies if name == FULL_DEPTH or not name.isidentifier()]:
            raise ValueError(f"'{taken[0]}' cannot be the name of a policy; take letters, and not '{FULL_DEPTH}'")

    @property
    def names_no_depth(self) -> bool:
        return self.loops is None and self.policy is None and self.readout is None


class Deployment(msgspec.Struct, frozen=True):
    """What is run: the model as it is configured, and how deep."""

    config: OuroConfig | LoopedLlamaConfig
    looping: Looping
    loops: int
    policy: ExitPolicy | None = None  # None: every token goes through all of these loops, unless its request asks
    policies: Mapping[str, ExitPolicy] = msgspec.field(default_factory=dict)  # that requests may ask for
    exits_log: str | None = None

    @property
    def adaptive(self) -> bool:
        """Whether tokens may take different numbers of loops."""
        return self.policy is not None or bool(self.policies)

    def __str__(self) -> str:
        """For the log at the start: how deep tokens go, and what is guaranteed of it."""
        if not self.adaptive:
            return f"every token takes {self.loops} loops"
        texts = [_described("the policy", self.policy) if self.policy else f"by default all {self.loops} loops"]
        texts += [_described(f"'{name}'", policy) for name, policy in self.policies.items()]
        return f"up to {self.loops} loops, cache 'propagate'; {'; '.join(texts)}"

    @property
    def head_attends(self) -> bool:
        return self.looping.prelude + self.looping.core < self.config.num_hidden_layers


def _described(name: str, policy: ExitPolicy) -> str:
    guarantee = "no guarantee" if policy.guarantee is None else f"guarantee: {policy.guarantee.sentence}"
    return f"{name} is {policy} ({guarantee})"


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
    deployed = Deployment(config, looping, settings.loops or looping.loops, exits_log=settings.exits_log)
    weights = _Weights(checkpoint, revision, config.sha256)
    policies = {
        name: _checked(ExitPolicy.load(Path(file)), settings, deployed, weights, precision, cache_precision)
        for name, file in settings.policies.items()
    }
    policy = _policy(settings, find_checkpoint(checkpoint, revision) if settings.names_no_depth else None)
    if policy is not None:
        policy = _checked(policy, settings, deployed, weights, precision, cache_precision)
    if policy is not None and policy.fixed_depth is not None and not policies:  # as if there were so many loops
        deployed, policy = msgspec.structs.replace(deployed, loops=policy.fixed_depth), None
    if policy is None and not policies and settings.exits_log is not None:
        raise UserError(
            f"{_WHERE}: at a fixed depth all tokens take as many loops, and there is nothing to log in exits_log."
        )
    return msgspec.structs.replace(deployed, policy=policy, policies=policies)


class _Weights:
    """The hash of a checkpoint's weights, which is computed once, and only if a policy asks for it."""

    def __init__(self, checkpoint: str, revision: str | None, configuration: str) -> None:
        self._checkpoint, self._revision, self._configuration = checkpoint, revision, configuration

    @cached_property
    def sha256(self) -> str:
        return with_configuration(
            weights_sha256(find_checkpoint(self._checkpoint, self._revision)), self._configuration
        )


def _policy(settings: DeploymentSettings, folder: Path | None) -> ExitPolicy | None:
    """The policy of the deployment, or the one that was saved with the model in this folder."""
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


def _checked(
    policy: ExitPolicy,
    settings: DeploymentSettings,
    deployed: Deployment,
    weights: _Weights,
    precision: str,
    cache_precision: str | None,
) -> ExitPolicy:
    """The policy as it is served, after it was held to its weights, depth, precision and cache."""
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
    state = ExitState(policy, deployed.loops)  # rejects what can only be replayed
    if "gate_logits" in state.sources() and deployed.looping.gate == "none":
        raise UserError(f"The model has no gate, so it cannot be run with the readout '{policy.readout}'.")
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
        """Under policies, switches off what would run other tokens than LoopScope, or other loops than are decided."""
        from loopscope.integrations.vllm.request_connector import DepthArguments

        check_hashes(Path(vllm_config.model_config.model))  # of a folder that training left
        if vllm_config.lora_config is not None:
            raise UserError(
                "Adapters (LoRA) are not served beside a looped model; merge them into its weights first "
                "(merge_and_unload of PEFT), and leave out --enable-lora."
            )
        deployment = deployment_of(vllm_config)
        DepthArguments.deployment = deployment
        if vllm_config.speculative_config is None:  # with which vLLM has no custom logits processors
            checks = f"{DepthArguments.__module__}:{DepthArguments.__name__}"
            others = vllm_config.model_config.logits_processors or []
            vllm_config.model_config.logits_processors = [*(name for name in others if name != checks), checks]
        if not deployment.adaptive:  # vLLM keeps compiled graphs by what its configuration says, not by a file's
            vllm_config.model_config.hf_config.loopscope = {"loops": deployment.loops}
            return
        _switch_off(vllm_config)
        _connect(vllm_config, deployment)
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


def _switch_off(vllm_config: Any) -> None:
    """What cannot run while tokens take different numbers of loops; the log says so."""
    from vllm.config import CUDAGraphMode
    from vllm.logger import init_logger

    for option, given in (
        ("speculative_config", vllm_config.speculative_config),
        ("kv_transfer_config", None if _connected(vllm_config) else vllm_config.kv_transfer_config),
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


def _connect(vllm_config: Any, deployment: Deployment) -> None:
    """Gives the engine the connector by which requests choose their depth, and learn their loops."""
    from vllm.config import KVTransferConfig

    if not _connected(vllm_config):
        vllm_config.kv_transfer_config = KVTransferConfig(
            kv_connector="LoopScopeConnector",
            kv_connector_module_path=_CONNECTOR,
            kv_role="kv_consumer",
            kv_connector_extra_config={"loops": deployment.loops, "default": str(deployment.policy or FULL_DEPTH)},
        )


def _connected(vllm_config: Any) -> bool:
    """Whether it has that connector; each process of vLLM checks the configuration again."""
    found = vllm_config.kv_transfer_config
    return found is not None and found.kv_connector_module_path == _CONNECTOR


def check_log(log: Path) -> None:
    """Rejects a file that cannot be written or is something else, before an engine starts, not at its first token."""
    try:
        with log.open("a+b") as file:
            file.seek(0)
            beginning = file.read(len(LOG_BEGINNING))
    except OSError as error:
        raise UserError(f"exits_log: {log} cannot be written ({error.strerror}); choose another file.") from None
    if not LOG_BEGINNING.startswith(beginning):  # a worker would cut its last line
        raise UserError(f"exits_log: {log} is there and is no log of exits; choose another file.")
