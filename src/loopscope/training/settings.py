"""The settings of a training run, and the presets that ship with LoopScope."""

from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

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
from loopscope.errors import UserError, did_you_mean
from loopscope.models.configuration import CONFIG, ModelType, TransformerSettings, read_checkpoint_config
from loopscope.objectives import GATED, Objective
from loopscope.reading import is_file, is_folder, near
from loopscope.tasks import Mano, Parity


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
    source: RunSettings | str, overrides: Sequence[str] = (), objective: Objective | None = None
) -> RunSettings:
    """The settings of a preset or of a TOML file, with `a.b=c` overrides and this objective on top."""
    tables, where = (_tables(source), source) if isinstance(source, str) else (plain(source), "the settings")
    values = overridden(tables, overrides)
    values |= {} if objective is None else {"objective": plain(objective)}
    return build(RunSettings, values, where)


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
        raise UserError(f"There is no folder {run}{near(run)}; give the folder of a finished run.")
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
        hint = did_you_mean(source, presets())
        raise UserError(f"'{source}'{hint} is neither a preset ({', '.join(presets())}) nor a TOML file.")
    return read_toml(Path(source))
