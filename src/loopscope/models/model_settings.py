"""Which model does a run train? The settings of the looped Transformer, or of a custom class, without PyTorch."""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from loopscope.config import Layers, Loops, Option, Positions, Settings, Width, digest, plain, require_values
from loopscope.errors import UserError
from loopscope.user_code import is_user_name

GateKind = Literal["none", "linear", "mlp"]


class TransformerSettings(Settings, frozen=True, kw_only=True):
    """Describe LoopScope's looped Transformer; defaults are the paper's.

    Parameters
    ----------
    layers
        The number of layers in the block that is looped.
    heads
        The number of attention heads.
    width
        The width of the state.
    loops
        The number of loops at full depth.
    block_size
        The maximum length of a row in tokens (default: the length that the task needs).
    bias
        Whether linear layers have a bias.
    gate
        The exit gate: "none", "linear" or "mlp".
    positions
        How attention represents positions: "rotary" rotates queries and keys, "learned" adds learned vectors.
    injection
        Whether every loop reads the embedding e again: h_t = block(h_{t-1} + e), with h_0 = 0 (default: no).
    norm
        The place of the norms: "pre", before attention and MLP (default), or "post", after the residual sums.
    loop_norm
        Whether the final norm is also applied to the state between loops, as in Ouro (default: no).
    """

    layers: Layers = 4
    heads: Width = 4
    width: Width = 512
    loops: Loops = 6
    block_size: Positions | None = None
    bias: bool = True
    gate: GateKind = "none"
    positions: Literal["rotary", "learned"] = "rotary"
    injection: bool | UnsetType = UNSET
    norm: Literal["pre", "post"] | UnsetType = UNSET
    loop_norm: bool | UnsetType = UNSET

    def __post_init__(self) -> None:
        even = self.positions == "learned" or self.width // self.heads % 2 == 0
        message = f"width {self.width} does not divide into {self.heads} heads of an even width"
        require_values((self.width % self.heads == 0 and even, message))
        for name, usual in _VARIANTS.items():
            if getattr(self, name) == usual:
                msgspec.structs.force_setattr(self, name, UNSET)  # no file mentions it

    @property
    def sha256(self) -> str | None:
        """The hash of settings that distinguish networks with the same weights; None without such settings."""
        chosen = {name: value for name in _VARIANTS if (value := getattr(self, name)) is not UNSET}
        return digest(chosen)[:16] if chosen else None


_VARIANTS = {"injection": False, "norm": "pre", "loop_norm": False}
"""Settings that add no weights, and their defaults."""
_OF_ANY_MODEL = ("loops", "block_size", "gate")


class ModelSettings(TransformerSettings, frozen=True, kw_only=True):
    """Describe the model that a run trains: LoopScope's looped Transformer, or a custom class.

    A custom class takes `vocab_size`, `block_size`, `loops` and its options as keyword arguments. For a model with a
    gate, the class also takes `gate`.

    Parameters
    ----------
    name
        The custom class, as module:Class (default: LoopScope's looped Transformer).
    options
        Keyword arguments of the custom class.
    source_sha256
        The hash of the module with the custom class; LoopScope adds this hash when the run begins.
    """

    name: str | UnsetType = UNSET
    options: dict[str, Option] | UnsetType = UNSET
    source_sha256: str | UnsetType = UNSET

    def __post_init__(self) -> None:
        if self.name is UNSET:
            own = all(value is UNSET for value in (self.options, self.source_sha256))
            require_values((own, "options are for a custom class; name it: name = 'module:Class'"))
            super().__post_init__()
            return
        wrong = f"there is no model '{self.name}'; name a custom class as 'module:Class'"
        require_values((is_user_name(self.name), wrong))
        usual = plain(TransformerSettings())
        for field in TransformerSettings.__struct_fields__:
            if field in _OF_ANY_MODEL:
                continue
            given = getattr(self, field)
            message = f"{field} is of the built-in model; leave it out, or give it to '{self.name}' as options.{field}"
            require_values((given is UNSET or given == usual.get(field), message))
            msgspec.structs.force_setattr(self, field, UNSET)

    @property
    def is_custom(self) -> bool:
        """Whether the model is a custom class."""
        return self.name is not UNSET


def not_registered(name: str) -> UserError:
    """The error for a custom model that the user has not named."""
    return UserError(
        f"This model is a class in code, '{name}', which is not imported because a file names it; add --with-model "
        f"{name} if you trust that module (in Python: loopscope.register_model('{name}'))."
    )
