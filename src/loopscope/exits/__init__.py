"""When to exit? Signals, readouts, exit policies and their frontiers, all on recordings."""

from loopscope.exits.calibration import calibrate, conformal_risk_control
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
