"""Which rules pick an exit? A readout maps a trajectory to an exit loop, by a threshold on one of its signals."""

from typing import Literal

from loopscope.errors import UserError
from loopscope.exits.signals import FITTED

ReadoutKind = Literal["above", "below", "depth", "oracle"]

READOUTS: dict[str, ReadoutKind] = {
    "fixed": "depth",
    "gate": "above",
    "entropy": "below",
    "top1": "above",
    "margin": "above",
    "kl": "below",
    "logit_change": "below",
    "hidden_change": "below",
    "hidden_cosine": "below",
    "oracle": "oracle",
}
"""Every readout, and when it exits: at the first loop whose signal is above or below its threshold (or meets it), at a
fixed depth, or (the oracle) at the first correct loop. One that never comes exits at loop T."""
POST_HOC = tuple(name for name in READOUTS if name not in ("fixed", "gate", "oracle"))
"""Those that any trajectory has, without a gate and without labels."""


def readout_kind(readout: str) -> ReadoutKind:
    if readout.startswith(FITTED):
        return READOUTS["gate"]
    if readout not in READOUTS:
        raise UserError(f"There is no readout '{readout}'; choose one of {', '.join(READOUTS)}, {FITTED}NAME.")
    return READOUTS[readout]
