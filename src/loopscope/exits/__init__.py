"""When to exit? Signals, readouts, exit policies and their frontiers, all on recordings."""

from loopscope.exits.calibration import calibrate, conformal_risk_control
from loopscope.exits.fitted import FittedGate, attach
from loopscope.exits.readouts import READOUTS, ExitPolicy
from loopscope.exits.signals import SIGNALS, signal
from loopscope.exits.sweep import Frontier, OperatingPoint, sweep

__all__ = [
    "READOUTS",
    "SIGNALS",
    "ExitPolicy",
    "FittedGate",
    "Frontier",
    "OperatingPoint",
    "attach",
    "calibrate",
    "conformal_risk_control",
    "signal",
    "sweep",
]
