"""The settings of a training run, and the presets that ship with LoopScope."""

from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from loopscope.config import (
    Count,
    NonNegative,
    Positive,
    Seed,
    Settings,
    build,
    plain,
    read_json,
    read_toml,
    with_overrides,
)
from loopscope.errors import UserError, brief
from loopscope.models.configuration import CONFIG, ModelType, TransformerSettings, read_checkpoint_config
from loopscope.objectives import GATED, Objective
from loopscope.reading import is_file, is_folder, no_folder, no_such_toml
from loopscope.tasks import Mano, Parity

T = TypeVar("T")


class Training(Settings, frozen=True, kw_only=True):
    """Defaults are the paper's."""

    steps: Count = 40_000
    batch_size: Count = 1024
    seed: Seed = 0  # initialisation and batch order; data seeds are the task's
    learning_rate: Positive = 5e-4
    min_learning_rate: NonNegative = 5e-5
    warmup_steps: Annotated[int, msgspec.Meta(ge=0, le=2**40)] = 2_000
    beta1: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.98
    weight_decay: NonNegative = 0.1
    clip_norm: Positive = 1.0
    muon_learning_rate: NonNegative = 0.0  # above 0: Muon for the block's matrices
    bf16: bool = True  # autocast on CUDA; a CPU always computes in float32
    log_every: Count = 100
    checkpoint_every: Count = 1_000
    validate_every: Count = 1_000
    validation_sample: Count = 2_000  # examples of the validation split that are looked at during training
    accumulate: Count | UnsetType = UNSET  # parts in which a batch goes through, one after the other (default: 1)
    checkpointing: bool | UnsetType = UNSET  # loops are run again for their gradients, in place of kept (default: no)

    def __post_init__(self) -> None:
        if self.min_learning_rate > self.learning_rate:
            raise ValueError("min_learning_rate is above learning_rate")
        if (self.accumulate or 1) > self.batch_size:
            raise ValueError("accumulate is more than batch_size: a part has a row at least")


class RunSettings(Settings, frozen=True, kw_only=True):
    task: Mano | Parity
    model: TransformerSettings = TransformerSettings()
    objective: Objective = Objective()
    training: Training = Training()

    def __post_init__(self) -> None:
        gated = self.objective.name in GATED
        if not self.objective.is_custom and gated != (self.model.gate != "none"):
            raise ValueError(
                f"{' and '.join(GATED)} need model.gate = 'linear' or 'mlp', and the other objectives model.gate "
                f"= 'none'; got objective.name = '{self.objective.name}' with model.gate = '{self.model.gate}'"
            )
        if self.block_size < self.task.positions:
            raise ValueError(
                f"model.block_size {self.block_size} is too small: the task's longest examples have "
                f"{self.task.positions} tokens"
            )

    @property
    def num_loops(self) -> int:
        return self.model.loops

    @property
    def block_size(self) -> int:
        return self.model.block_size or self.task.positions


def presets() -> list[str]:
    folder = files("loopscope") / "presets"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def read_settings(
    source: RunSettings | str,
    overrides: Sequence[str] = (),
    objective: Objective | None = None,
    of_study: Sequence[str] = (),
) -> RunSettings:
    """The settings of a preset or of a TOML file, with `a.b=c` overrides and this objective on top.

    Those that a study's file makes come before.
    """
    tables, where = (_tables(source), source) if isinstance(source, str) else (plain(source), "the settings")
    last = {} if objective is None else {"objective": plain(objective)}
    return build_overridden(RunSettings, overridden(tables, of_study), overrides, where, last)


def build_overridden(
    kind: type[T],
    tables: Mapping[str, Any],
    overrides: Sequence[str],
    source: str,
    last: Mapping[str, Any] | None = None,
) -> T:
    """The tables with the overrides, and then `last`, as a `kind`; an override that does not fit is named."""
    values = overridden(tables, overrides)
    try:
        return build(kind, {**values, **(last or {})}, source)
    except UserError as error:
        for number, override in enumerate(overrides):
            others = [*overrides[:number], *overrides[number + 1 :]]
            try:
                build(kind, {**overridden(tables, others), **(last or {})}, source)
            except UserError as without:
                if str(without) == str(error):
                    continue
            raise UserError(f"--set {brief(override, 80)}: {str(error).removeprefix(f'{source}: ')}") from None
        raise


def overridden(tables: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """The tables with the overrides; `objective = "NAME"` is short for a table with nothing but a name."""

    def expanded(values: Mapping[str, Any]) -> dict[str, Any]:
        objective = values.get("objective")
        return {**values, **({"objective": {"name": objective}} if isinstance(objective, str) else {})}

    values = expanded(tables)
    for override in overrides:
        values = expanded(with_overrides(values, [override]))
    return values


def read_run_settings(run: Path) -> RunSettings:
    """The settings of the run in a folder."""
    if not is_folder(run):
        raise no_folder(run, "the folder of a finished run")
    if not is_file(run / CONFIG):
        raise UserError(f"{run} is not a run: it has no {CONFIG}; give a folder that `loopscope train` made.")
    kind = read_json(ModelType, run / CONFIG, "run configuration").model_type
    if kind != "loopscope":
        raise UserError(f"{run} is a checkpoint of type '{kind}', not a LoopScope run: it has no task of its own.")
    config = read_checkpoint_config(run)
    settings = build(RunSettings, config.run, str(run / CONFIG))
    for what, ours, theirs in (
        ("model", config.model, settings.model),
        ("vocab_size", config.vocab_size, settings.task.vocab_size),
        ("block_size", config.block_size, settings.block_size),
    ):
        if ours != theirs:
            raise UserError(
                f"{run / CONFIG} contradicts itself: its {what} is not that of the run's task and model; put the file "
                "back as training wrote it."
            )
    return settings


def _tables(source: str) -> dict[str, Any]:
    if source in presets():
        return read_toml(Path(str(files("loopscope") / "presets" / f"{source}.toml")))
    if not is_file(Path(source)):
        raise no_such_toml(source, presets(), "preset")
    return read_toml(Path(source))
