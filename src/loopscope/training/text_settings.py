"""The settings of a language model's training, from the start or further; keys are checked without PyTorch."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from loopscope.config import (
    Count,
    Epsilon,
    Layers,
    Loops,
    Positions,
    RotaryBase,
    Settings,
    Vocabulary,
    Width,
    plain,
    read_toml,
)
from loopscope.objectives import Objective
from loopscope.training.settings import Training, build_overridden
from loopscope.training.tokenizer import SMALLEST

if TYPE_CHECKING:
    from loopscope.models import OuroConfig


class OuroShape(Settings, frozen=True, kw_only=True):
    """The architecture, under the names of Ouro's `config.json`."""

    hidden_size: Width = 256
    intermediate_size: Width = 704
    num_hidden_layers: Layers = 4
    num_attention_heads: Width = 4
    num_key_value_heads: Width | None = None  # default: as many as heads
    total_ut_steps: Loops = 4
    max_position_embeddings: Positions = 4_096
    rope_theta: RotaryBase = 10_000.0
    rms_norm_eps: Epsilon = 1e-6
    tie_word_embeddings: bool = False


class PretrainSettings(Settings, frozen=True, kw_only=True):
    model: OuroShape = OuroShape()
    vocab_size: Vocabulary = 4_096  # of the tokenizer that is trained
    context: Count = 256  # tokens of a window
    objective: Objective = Objective(name="learned_gate", prior="uniform", beta=0.05)
    training: Training = Training()

    def __post_init__(self) -> None:
        if self.context > self.model.max_position_embeddings:
            raise ValueError("context is longer than model.max_position_embeddings")
        if self.vocab_size < SMALLEST:
            raise ValueError(f"vocab_size must be at least {SMALLEST}: all bytes, and the special tokens")
        self.ouro  # noqa: B018 - refuses a shape that Ouro does not have

    @property
    def ouro(self) -> "OuroConfig":
        from loopscope.models.ouro import OuroConfig

        shape, layers = self.model, self.model.num_hidden_layers
        return OuroConfig(
            **{**plain(shape), "num_key_value_heads": shape.num_key_value_heads or shape.num_attention_heads},
            vocab_size=self.vocab_size,
            hidden_act="silu",
            head_dim=shape.hidden_size // shape.num_attention_heads,
            attention_bias=False,
            mlp_bias=False,
            use_sliding_window=False,
            layer_types=["full_attention"] * layers,
        )

    @property
    def num_loops(self) -> int:
        return self.model.total_ut_steps

    @property
    def flops(self) -> float:
        """Multiply-adds x 2 of one training step, forward and backward; a token looks at half of its window."""
        shape, ouro = self.model, self.ouro
        keys = ouro.num_key_value_heads * ouro.head_width
        layer = 2 * shape.hidden_size * (shape.hidden_size + keys) + 3 * shape.hidden_size * shape.intermediate_size
        layer += shape.hidden_size * self.context
        token = shape.num_hidden_layers * layer + shape.hidden_size * self.vocab_size
        return 6.0 * self.objective.expected_loops(self.num_loops) * token * self.context * self.training.batch_size


def read_pretrain_settings(source: Path, overrides: Sequence[str]) -> PretrainSettings:
    return build_overridden(PretrainSettings, read_toml(source), overrides, str(source))


class Adapters(Settings, frozen=True, kw_only=True):
    """Low-rank adapters in place of all weights."""

    rank: Count = 16
    alpha: Count = 32


class ContinueSettings(Settings, frozen=True, kw_only=True):
    context: Count = 256  # tokens of a window
    targets: Literal["text", "teacher"] = "text"  # what each loop is held against
    teacher_loops: Count = 1  # at which the teacher is read: a looped Llama's loop 1 is what it was made from
    objective: Objective = Objective()
    adapters: Adapters | None = None  # None: all weights are trained
    training: Training = Training()
    loops: Count | None = None  # those of the model, which the start says

    @property
    def num_loops(self) -> int:
        assert self.loops is not None, "a run fills it in"
        return self.loops


def read_continue_settings(source: Path, overrides: Sequence[str]) -> ContinueSettings:
    return build_overridden(ContinueSettings, read_toml(source), overrides, str(source))
