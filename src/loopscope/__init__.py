"""LoopScope: is the trajectory to blame, or the readout? Adaptive depth in looped Transformers.

The names below are the public interface. Each is imported when it is first used, so that `import loopscope` and
`loopscope --help` stay quick, and work on recordings never loads PyTorch.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from loopscope.errors import UserError as UserError, missing_extra

if TYPE_CHECKING:
    from loopscope.analysis.comparison import Comparison as Comparison, compare as compare
    from loopscope.analysis.diagnosis import Diagnosis as Diagnosis, diagnose as diagnose
    from loopscope.analysis.targets import Target as Target
    from loopscope.certify.calibration import calibrate as calibrate, conformal_risk_control as conformal_risk_control
    from loopscope.certify.monitor import Monitor as Monitor
    from loopscope.checks.model_contract import check_model as check_model
    from loopscope.engine.generation import Prompt as Prompt, generate as generate, stream as stream
    from loopscope.engine.requests import Request as Request, choices as choices
    from loopscope.engine.scheduler import Answer as Answer, run as run
    from loopscope.frontier import Frontier as Frontier, OperatingPoint as OperatingPoint, sweep as sweep
    from loopscope.learned.attach import attach as attach
    from loopscope.learned.fitted_gate import FittedGate as FittedGate
    from loopscope.learned.stopper import Stopper as Stopper
    from loopscope.learned.stopper_fitting import fit_stopper as fit_stopper
    from loopscope.models.checkpoint import load_model as load_model
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
    from loopscope.training.gate_fitting import fit_gate as fit_gate
    from loopscope.training.objectives import LoopLosses as LoopLosses
    from loopscope.training.task_run import train as train
    from loopscope.trajectory import Trajectory as Trajectory

__version__: str
_MODULES = {
    "analysis.comparison": "Comparison compare",
    "analysis.diagnosis": "Diagnosis diagnose",
    "analysis.targets": "Target",
    "certify.calibration": "calibrate conformal_risk_control",
    "certify.monitor": "Monitor",
    "checks.model_contract": "check_model",
    "engine.generation": "Prompt generate stream",
    "engine.requests": "Request choices",
    "engine.scheduler": "Answer run",
    "frontier": "Frontier OperatingPoint sweep",
    "learned.attach": "attach",
    "learned.fitted_gate": "FittedGate",
    "learned.stopper": "Stopper",
    "learned.stopper_fitting": "fit_stopper",
    "models.checkpoint": "load_model",
    "models.looped_model": "LoopedModel SimpleLoopedModel",
    "models.looping": "loop",
    "policy": "ExitPolicy",
    "readouts.readout": "READOUTS Readout readout register_readout",
    "readouts.replay": "signal",
    "recording.question_recording": "record_benchmark",
    "recording.task_recording": "record_model",
    "report.write": "report",
    "training.gate_fitting": "fit_gate",
    "training.objectives": "LoopLosses",
    "training.task_run": "train",
    "trajectory": "Trajectory",
}
_HOMES = {name: f"loopscope.{module}" for module, names in _MODULES.items() for name in names.split()}
__all__ = sorted(("UserError", *_HOMES))


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version("loopscope")
    if name not in _HOMES:
        raise AttributeError(f"module 'loopscope' has no attribute '{name}'")
    try:
        value = getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        raise missing_extra(error, f"loopscope.{name}") from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), "__version__", *_HOMES]
