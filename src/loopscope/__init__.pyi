"""The public interface: every name of `loopscope` and the module that defines it. `__init__.py` reads this file."""

from loopscope.analysis.comparison import Comparison as Comparison, compare as compare
from loopscope.analysis.diagnosis import Diagnosis as Diagnosis, diagnose as diagnose
from loopscope.analysis.held_out import HeldOut as HeldOut, check_policy as check_policy
from loopscope.analysis.targets import Target as Target
from loopscope.analysis.transfer import TransferResult as TransferResult, transfer as transfer
from loopscope.certify.calibration import calibrate as calibrate, conformal_risk_control as conformal_risk_control
from loopscope.certify.monitor import Monitor as Monitor
from loopscope.checks.model_contract import check_model as check_model
from loopscope.engine.generation import Prompt as Prompt, generate as generate, stream as stream
from loopscope.engine.requests import Request as Request, choices as choices
from loopscope.engine.scheduler import Answer as Answer, run as run
from loopscope.errors import UserError as UserError
from loopscope.example_recordings import load_example as load_example
from loopscope.frontier import (
    Frontier as Frontier,
    FrontierPlot as FrontierPlot,
    OperatingPoint as OperatingPoint,
    sweep as sweep,
)
from loopscope.learned.attach import attach as attach
from loopscope.learned.fitted_gate import FittedGate as FittedGate
from loopscope.learned.stopper import Stopper as Stopper
from loopscope.learned.stopper_fitting import fit_stopper as fit_stopper
from loopscope.models.checkpoint import load_model as load_model
from loopscope.models.custom_model import register_model as register_model
from loopscope.models.looped_model import LoopedModel as LoopedModel, SimpleLoopedModel as SimpleLoopedModel
from loopscope.models.looping import loop as loop
from loopscope.policy import ExitPolicy as ExitPolicy
from loopscope.readouts.readout import (
    READOUTS as READOUTS,
    Readout as Readout,
    readout as readout,
    register_readout as register_readout,
)
from loopscope.readouts.replay import signal as signal
from loopscope.recording.question_recording import record_benchmark as record_benchmark
from loopscope.recording.task_recording import record_model as record_model
from loopscope.report.write import report as report
from loopscope.tasks.examples import Draws as Draws
from loopscope.tasks.task import Task as Task
from loopscope.training.gate_fitting import fit_gate as fit_gate
from loopscope.training.objectives import LoopLosses as LoopLosses
from loopscope.training.task_run import train as train
from loopscope.trajectory import Trajectory as Trajectory

__version__: str
__all__: list[str]
