"""What does a training run depend on? Its settings, from a preset or a TOML file; they are read without PyTorch.

`objective = "module:function"` names a custom objective, `objective.prior` may name a custom prior, `model =
"module:Class"` a custom model and `task = "module:Class"` a custom task. A module is found where Python finds modules,
the current folder included, and the hash of its source enters the run's settings (`with_sources`, which does not import
the module): a different source makes a different run. Training imports the module, because the user's settings name it.
Later a task or a model is imported only if the user names it again (`task_of_run` in `training/run_folder.py`,
`register_model`): a checkpoint's file that names code never makes LoopScope run it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from math import fsum
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from loopscope.config import (
    Count,
    Epsilon,
    Layers,
    Loops,
    NonNegative,
    Option,
    Positions,
    Positive,
    RotaryBase,
    Seed,
    Settings,
    Width,
    build,
    plain,
    read_toml,
    require_values,
    with_overrides,
)
from loopscope.errors import UserError, brief, did_you_mean
from loopscope.files import is_file, no_such_toml
from loopscope.models.model_settings import ModelSettings
from loopscope.models.tokenizer import END
from loopscope.tasks import BuiltInTask, CustomTask, Task, load_task, with_task_source
from loopscope.user_code import is_user_name, source_sha256

GATE_CHANNELS, ACT = "gate_channels", "act"
GATED = ("learned_gate", "decoupled_gate", GATE_CHANNELS, ACT)
"""The objectives that train a gate."""
BUILT_IN = ("final", "fixed_prior", *GATED, "random_depth")
WITH_PRIOR = tuple(name for name in BUILT_IN if name != ACT)
PRIORS = ("uniform", "geometric")
"""The names of built-in priors."""
_CUSTOM = "module:function"
_SETTINGS_OF = {
    **dict.fromkeys(("prior", "geometric_lambda", "prior_sha256"), WITH_PRIOR),
    "beta": BUILT_IN,
    "truncated": ("random_depth",),
    **dict.fromkeys(("gate_weight", "gate_gradient"), (GATE_CHANNELS,)),
    **dict.fromkeys(("options", "source_sha256"), (_CUSTOM,)),
}
"""The objectives that have a setting, by the name of the setting."""
_NAMED_TABLES = ("objective", "model", "task")
"""Tables that may be given as a name alone."""

Probability = Annotated[float, msgspec.Meta(gt=0, lt=1)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
DepthPrior = str | tuple[Share, ...]
"""One of `PRIORS`, the weights of all loops, or module:function."""
UserFunction = Callable[..., Any]
"""A custom objective: from `LoopLosses`, and its options as keywords, to the loss of the batch, or [B] of every row."""

_LAMBDA = 0.3
_MAX_ROUNDING = 1e-5
"""How far the sum of a prior's weights may be from 1."""
SPECIAL_TOKENS = (END, "<|im_start|>", "<|im_end|>")
"""Tokens 0 to 2 of a new vocabulary: the end of a document, and the marks around a turn of a chat."""
NewVocabulary = Annotated[int, msgspec.Meta(ge=256 + len(SPECIAL_TOKENS), le=2**24)]


def is_distribution(weights: Sequence[float]) -> bool:
    """Whether the weights of a prior add up to 1, up to rounding."""
    return min(weights, default=-1.0) >= 0 and abs(fsum(weights) - 1) < _MAX_ROUNDING


class Channels(NamedTuple):
    """Hold how far a trained gate shapes the trunk, through each of its two channels."""

    weight: Share  # the gate's share of the trunk's loss weights; the rest is the prior's
    gradient: Share  # the share of the gate's own gradient that reaches the trunk


CORNERS = {Channels(1.0, 1.0): "learned_gate", Channels(0.0, 0.0): "decoupled_gate"}
"""Both channels open and both closed: these objectives have their own names."""


class Objective(Settings, frozen=True, kw_only=True):
    """Describe the loss that training minimises; `training/objectives.py` computes it.

    LoopScope replaces a `gate_channels` objective by `learned_gate` if both shares are 1, and by `decoupled_gate` if
    both are 0. Equal runs therefore have the same address in a store.

    Parameters
    ----------
    name
        "final", "fixed_prior", "learned_gate", "decoupled_gate", "gate_channels", "act", "random_depth", or a custom
        function as module:function.
    prior
        The prior over exits: "geometric", "uniform", a list with the weights of all loops, or module:function.
    geometric_lambda
        The lambda of a geometric prior.
    beta
        The weight of the KL between the gate's exit distribution and the prior; for `act`, the price of a loop.
    gate_weight
        The gate's share of the trunk's loss weights, only for `gate_channels` (default: 1).
    gate_gradient
        The share of the gate's own gradient that reaches the trunk, only for `gate_channels` (default: 1).
    truncated
        The number of last loops that get a gradient, only for `random_depth` (default: all).
    options
        Keyword arguments of a custom function.
    source_sha256
        The hash of the module with the custom function; LoopScope adds this hash when the run begins.
    prior_sha256
        The hash of a custom prior's module; LoopScope adds this hash when the run begins.
    """

    name: str = "fixed_prior"
    prior: DepthPrior = "geometric"
    geometric_lambda: Probability = _LAMBDA
    beta: NonNegative = 0.1
    gate_weight: Share | UnsetType = UNSET
    gate_gradient: Share | UnsetType = UNSET
    truncated: Count | UnsetType = UNSET
    options: dict[str, Option] | UnsetType = UNSET
    source_sha256: str | UnsetType = UNSET
    prior_sha256: str | UnsetType = UNSET

    def __post_init__(self) -> None:
        kind = _CUSTOM if self.is_custom else self.name
        if self.is_custom and not is_user_name(self.name):
            raise ValueError(
                f"there is no objective '{self.name}'{did_you_mean(self.name, BUILT_IN)}; choose one of "
                f"{', '.join(BUILT_IN)}, or name a custom function as 'module:function'"
            )
        for setting, default in zip(self.__struct_fields__, self.__struct_defaults__, strict=True):
            owners = _SETTINGS_OF.get(setting, (kind,))
            if kind in owners:
                continue
            if getattr(self, setting) not in (default, UNSET):
                raise ValueError(f"{setting} needs the objective {' or '.join(owners)}, and this is '{self.name}'")
            msgspec.structs.force_setattr(self, setting, UNSET)  # files leave it out
        if kind in WITH_PRIOR:
            require_values(*self._prior_rules())
        if self.name == GATE_CHANNELS and self.channels is not None:
            shares: Iterable[float | UnsetType] = self.channels
            if self.channels in CORNERS:
                msgspec.structs.force_setattr(self, "name", CORNERS[self.channels])
                shares = (UNSET, UNSET)
            for setting, share in zip(("gate_weight", "gate_gradient"), shares, strict=True):
                msgspec.structs.force_setattr(self, setting, share)

    def _prior_rules(self) -> Iterator[tuple[object, str]]:
        if isinstance(self.prior, str):
            choice = f"choose {' or '.join(PRIORS)}, list the weights of all loops, or name a function as '{_CUSTOM}'"
            near = did_you_mean(self.prior, PRIORS)
            yield self.prior in PRIORS or self.has_custom_prior, f"there is no prior '{self.prior}'{near}; {choice}"
        else:
            yield is_distribution(self.prior), f"the weights of prior add up to {sum(self.prior):g}; make it 1"
            kept = self.name not in GATED or all(self.prior)
            yield kept, f"'{self.name}' has a KL to its prior, so no weight of prior may be 0"
        named = self.prior in PRIORS or self.geometric_lambda == _LAMBDA
        yield named, "geometric_lambda needs the prior 'geometric'"
        yield self.has_custom_prior or self.prior_sha256 is UNSET, "prior_sha256 needs a custom prior"

    @property
    def has_custom_prior(self) -> bool:
        """Whether the prior is a custom function."""
        return isinstance(self.prior, str) and is_user_name(self.prior)

    @property
    def channels(self) -> Channels | None:
        """The channels of an objective that trains a gate; None for others."""
        if self.name == GATE_CHANNELS:
            return Channels(*(1.0 if share is UNSET else share for share in (self.gate_weight, self.gate_gradient)))
        return next((corner for corner, name in CORNERS.items() if name == self.name), None)

    @property
    def is_custom(self) -> bool:
        """Whether the objective is a custom function."""
        return self.name not in BUILT_IN


class Training(Settings, frozen=True, kw_only=True):
    """Set how a model is trained; the defaults are the settings of the paper.

    Parameters
    ----------
    steps
        The number of optimizer steps.
    batch_size
        The number of examples, or of windows of text, per step.
    seed
        The seed of the initialisation and the batch order; the table `[task]` has the seeds of the data.
    learning_rate
        The peak learning rate of AdamW, at the end of the warm-up.
    min_learning_rate
        The learning rate at the end of the cosine schedule.
    warmup_steps
        The number of steps of linear warm-up.
    beta1
        The first decay rate (beta1) of AdamW.
    beta2
        The second decay rate (beta2) of AdamW.
    weight_decay
        The weight decay of AdamW.
    clip_norm
        The norm above which the gradient is clipped.
    muon_learning_rate
        The learning rate with which Muon trains the block's matrices; at 0, AdamW trains them.
    bf16
        Whether a CUDA device computes in bfloat16; a CPU always computes in float32.
    log_every
        The number of steps between two lines of the log.
    checkpoint_every
        The number of steps between two saved states, from which an interrupted run continues.
    validate_every
        The number of steps between two validations.
    validation_sample
        The number of validation examples on which each validation runs.
    accumulate
        The number of parts into which a batch is divided; the parts run one after another (default: 1).
    checkpointing
        Whether the backward pass runs the loops again, which saves memory (default: no).
    """

    steps: Count = 40_000
    batch_size: Count = 1024
    seed: Seed = 0
    learning_rate: Positive = 5e-4
    min_learning_rate: NonNegative = 5e-5
    warmup_steps: Annotated[int, msgspec.Meta(ge=0, le=2**40)] = 2_000
    beta1: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.98
    weight_decay: NonNegative = 0.1
    clip_norm: Positive = 1.0
    muon_learning_rate: NonNegative = 0.0
    bf16: bool = True
    log_every: Count = 100
    checkpoint_every: Count = 1_000
    validate_every: Count = 1_000
    validation_sample: Count = 2_000
    accumulate: Count | UnsetType = UNSET
    checkpointing: bool | UnsetType = UNSET

    def __post_init__(self) -> None:
        require_values((self.min_learning_rate <= self.learning_rate, "min_learning_rate is above learning_rate"))


class RunSettings(Settings, frozen=True, kw_only=True):
    """Describe a run that trains a model on a task.

    Parameters
    ----------
    task
        The table `[task]`.
    model
        The table `[model]`.
    objective
        The table `[objective]`.
    training
        The table `[training]`.
    """

    task: BuiltInTask
    model: ModelSettings = ModelSettings()
    objective: Objective = Objective()
    training: Training = Training()

    def __post_init__(self) -> None:
        objective, gate = self.objective.name, self.model.gate
        is_matched = self.objective.is_custom or (objective in GATED) == (gate != "none")
        gated = f"{', '.join(GATED[:-1])} and {GATED[-1]}"
        rule = f"{gated} need model.gate = 'linear' or 'mlp', and all others model.gate = 'none'"
        require_values((is_matched, f"{rule}; got '{objective}' with '{gate}'"))
        self._check_block_size()

    def _check_block_size(self) -> None:
        positions = self.generator.positions
        short = f"model.block_size is {self.block_size}, and the task's longest examples have {positions} tokens"
        require_values((self.block_size >= positions, short))

    @property
    def generator(self) -> Task:
        """The task that draws and answers examples."""
        return self.task

    @property
    def task_name(self) -> str:
        """The task's name in the settings; for a custom task module:Class."""
        return str(plain(self.task)["name"])

    @property
    def num_loops(self) -> int:
        return self.model.loops

    @property
    def block_size(self) -> int:
        return self.model.block_size or self.generator.positions


class CustomTaskSettings(RunSettings, frozen=True, kw_only=True):
    """Describe a looped Transformer that is trained on a custom task."""

    task: CustomTask  # type: ignore[assignment]  # in place of the built-in ones

    def _check_block_size(self) -> None:
        """Check nothing: reading settings must not import the custom task."""

    @property
    def generator(self) -> Task:
        """Import the custom task: from settings that the user gave, or of a run that `task_of_run` accepted."""
        task = load_task(self.task)
        if (self.model.block_size or task.positions) < task.positions:
            raise UserError(
                f"model.block_size is {self.model.block_size}, and the longest examples of '{self.task.name}' have "
                f"{task.positions} tokens."
            )
        return task


class OuroShape(Settings, frozen=True, kw_only=True):
    """Describe the model of a new Ouro; the settings have the names of its `config.json`.

    Parameters
    ----------
    hidden_size
        The width of the state.
    intermediate_size
        The width inside the MLP.
    num_hidden_layers
        The number of layers in the block that is looped.
    num_attention_heads
        The number of attention heads.
    num_key_value_heads
        The number of heads of keys and values (default: the number of attention heads).
    total_ut_steps
        The number of loops at full depth.
    max_position_embeddings
        The maximum length of a text in tokens.
    rope_theta
        The base of rotary positions.
    rms_norm_eps
        The epsilon of RMSNorm.
    tie_word_embeddings
        Whether the head and the embedding share their weights.
    """

    hidden_size: Width = 256
    intermediate_size: Width = 704
    num_hidden_layers: Layers = 4
    num_attention_heads: Width = 4
    num_key_value_heads: Width | None = None
    total_ut_steps: Loops = 4
    max_position_embeddings: Positions = 4_096
    rope_theta: RotaryBase = 10_000.0
    rms_norm_eps: Epsilon = 1e-6
    tie_word_embeddings: bool = False


class PretrainSettings(Settings, frozen=True, kw_only=True):
    """Describe a new Ouro that is trained on a text.

    Parameters
    ----------
    model
        The table `[model]`.
    vocab_size
        The number of tokens of the new tokenizer.
    context
        The number of tokens per window of text.
    objective
        The table `[objective]`.
    training
        The table `[training]`.
    """

    model: OuroShape = OuroShape()
    vocab_size: NewVocabulary = 4_096
    context: Count = 256
    objective: Objective = Objective(name="learned_gate", prior="uniform", beta=0.05)
    training: Training = Training()

    @property
    def num_loops(self) -> int:
        return self.model.total_ut_steps


class Adapters(Settings, frozen=True, kw_only=True):
    """Train low-rank adapters instead of all weights.

    Parameters
    ----------
    rank
        The rank of each adapter.
    alpha
        The scale of each adapter; LoopScope divides this scale by the rank.
    """

    rank: Count = 16
    alpha: Count = 32


class ContinueSettings(Settings, frozen=True, kw_only=True):
    """Describe a language model that is trained further.

    Parameters
    ----------
    context
        The number of tokens per window of text.
    targets
        The targets of each loop: the next tokens of the "text", or the logits of a "teacher".
    teacher_loops
        The loop of the teacher whose logits are the targets. At loop 1, a looped Llama is the original Llama.
    objective
        The table `[objective]`.
    adapters
        The table `[adapters]` (default: all weights are trained).
    training
        The table `[training]`.
    loops
        The number of loops at full depth (default: as in the checkpoint).
    """

    context: Count = 256
    targets: Literal["text", "teacher"] = "text"
    teacher_loops: Count = 1
    objective: Objective = Objective()
    adapters: Adapters | None = None
    training: Training = Training()
    loops: Count | None = None

    @property
    def num_loops(self) -> int:
        assert self.loops is not None, "a run fills it in"
        return self.loops


def presets() -> list[str]:
    """The names of the presets that come with LoopScope."""
    folder = files("loopscope") / "presets"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def read_settings(
    source: RunSettings | str,
    overrides: Sequence[str] = (),
    objective: Objective | None = None,
    of_study: Sequence[str] = (),
) -> RunSettings:
    """Read the settings of a preset or a TOML file, with `a.b=c` overrides and this objective on top.

    Overrides of a study's file (`of_study`) come before `overrides`.
    """
    if isinstance(source, RunSettings):
        tables, where = plain(source), "the settings"
    elif source in presets():
        tables, where = read_toml(Path(str(files("loopscope") / "presets" / f"{source}.toml"))), source
    elif is_file(Path(source)):
        tables, where = read_toml(Path(source)), source
    else:
        raise no_such_toml(source, presets(), "preset")
    tables = apply_overrides(tables, [*of_study, *overrides])
    if objective is not None:
        tables["objective"] = plain(objective)
    return build_run_settings(tables, _source_name(where, overrides))


def build_run_settings(tables: Mapping[str, Any], source: str) -> RunSettings:
    """Build the settings of a run from their tables, with a built-in or a custom task."""
    task = tables.get("task")
    name = task.get("name") if isinstance(task, Mapping) else None
    kind = CustomTaskSettings if isinstance(name, str) and is_user_name(name) else RunSettings
    return build(kind, tables, source)


def read_pretrain_settings(source: Path, overrides: Sequence[str]) -> PretrainSettings:
    """Read the settings of a run that trains a new Ouro."""
    tables = apply_overrides(read_toml(source), overrides)
    return build(PretrainSettings, tables, _source_name(str(source), overrides))


def read_continue_settings(source: Path, overrides: Sequence[str]) -> ContinueSettings:
    """Read the settings of a run that trains a checkpoint further."""
    tables = apply_overrides(read_toml(source), overrides)
    return build(ContinueSettings, tables, _source_name(str(source), overrides))


def _source_name(source: str, overrides: Sequence[str]) -> str:
    """The source of settings, for errors."""
    return brief(" --set ".join((source, *overrides)), 120)


def apply_overrides(tables: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """The tables with the overrides; `objective = "NAME"` and `model = "NAME"` stand for tables with only a name."""
    values = dict(tables)
    for assignments in ([], *([override] for override in overrides)):
        values = with_overrides(values, assignments)
        for table in _NAMED_TABLES:
            if isinstance(values.get(table), str):
                values[table] = {"name": values[table]}
    return values


def custom_objective(function: UserFunction | str, options: Mapping[str, Option] | None = None) -> Objective:
    """An objective that names a custom function (or "module:function"), with these options."""
    name = function if isinstance(function, str) else f"{function.__module__}:{function.__qualname__}"
    values = {"name": name} | ({} if options is None else {"options": dict(options)})
    return build(Objective, values, "the objective")


def with_source(objective: Objective, function: UserFunction | None = None) -> Objective:
    """The objective with the hash of its function's source, which must equal the hash that it may already have.

    The hash of a custom prior's source is filled in the same way.
    """
    if objective.has_custom_prior:
        assert isinstance(objective.prior, str)
        found = source_sha256(objective.prior, "prior", objective.prior_sha256 or None)
        objective = msgspec.structs.replace(objective, prior_sha256=found)
    if objective.is_custom:
        found = source_sha256(objective.name, "objective", objective.source_sha256 or None, function)
        objective = msgspec.structs.replace(objective, source_sha256=found)
    return objective


def with_model_source(model: ModelSettings, given: type | None = None) -> ModelSettings:
    """The settings of a model with the hash of a custom model's source; `given` is its class if already imported."""
    if not model.is_custom:
        return model
    recorded = None if model.source_sha256 is UNSET else model.source_sha256
    return msgspec.structs.replace(model, source_sha256=source_sha256(str(model.name), "model", recorded, given))


def with_sources(settings: Any, function: UserFunction | None = None) -> Any:
    """The settings of a run with the hashes of all custom sources, which must equal the hashes that they already have.

    The source of a model that is already imported is checked when the model is registered.
    """
    settings = msgspec.structs.replace(settings, objective=with_source(settings.objective, function))
    if isinstance(settings, CustomTaskSettings):
        settings = msgspec.structs.replace(settings, task=with_task_source(settings.task))
    if isinstance(settings, RunSettings) and settings.model.source_sha256 is UNSET:
        settings = msgspec.structs.replace(settings, model=with_model_source(settings.model))
    return settings
