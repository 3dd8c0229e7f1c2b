"""When to exit? Signals, readouts, exit policies and their frontiers, all on recordings."""

from typing import TYPE_CHECKING

from loopscope.exits.fitted import attach
from loopscope.exits.fitted_gate import FittedGate
from loopscope.exits.monitor import Alarm, Monitor, MonitorResult
from loopscope.exits.policy import ExitPolicy
from loopscope.exits.readouts import READOUTS, Readout, readout, register_readout
from loopscope.exits.recorded_signals import signal
from loopscope.exits.signals import SIGNALS
from loopscope.exits.stopper import Stopper
from loopscope.exits.stopper_fitting import fit_stopper
from loopscope.exits.sweep import Frontier, OperatingPoint, sweep
from loopscope.on_demand import offered

if TYPE_CHECKING:
    from loopscope.exits.calibration import calibrate, conformal_risk_control
else:  # with scipy.stats, which takes a second, and which the name of a readout can do without
    __getattr__ = offered(__name__, {"calibration": "calibrate conformal_risk_control"})
