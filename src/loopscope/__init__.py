"""LoopScope: is the trajectory to blame, or the readout? Adaptive depth in looped Transformers.

The names below are the public interface. Each is imported when it is first used, so that `import loopscope` and
`loopscope --help` stay quick, and work on recordings never loads PyTorch.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loopscope.analysis import (
        Comparison as Comparison,
        Diagnosis as Diagnosis,
        Target as Target,
        compare as compare,
        diagnose as diagnose,
    )
    from loopscope.checks import check_model as check_model
    from loopscope.engine import (
        Answer as Answer,
        Prompt as Prompt,
        Request as Request,
        choices as choices,
        generate as generate,
        run as run,
        stream as stream,
    )
    from loopscope.errors import UserError as UserError
    from loopscope.exits import (
        READOUTS as READOUTS,
        ExitPolicy as ExitPolicy,
        FittedGate as FittedGate,
        Frontier as Frontier,
        Monitor as Monitor,
        OperatingPoint as OperatingPoint,
        Readout as Readout,
        Stopper as Stopper,
        attach as attach,
        calibrate as calibrate,
        conformal_risk_control as conformal_risk_control,
        fit_stopper as fit_stopper,
        readout as readout,
        register_readout as register_readout,
        signal as signal,
        sweep as sweep,
    )
    from loopscope.models import (
        LoopedModel as LoopedModel,
        SimpleLoopedModel as SimpleLoopedModel,
        load_model as load_model,
        loop as loop,
    )
    from loopscope.objectives import LoopLosses as LoopLosses
    from loopscope.recording import record_benchmark as record_benchmark, record_model as record_model
    from loopscope.report.write import report as report
    from loopscope.training import fit_gate as fit_gate, train as train
    from loopscope.trajectory import Trajectory as Trajectory

__version__: str
_ROOMS = {
    "loopscope.analysis": "Comparison Diagnosis Target compare diagnose",
    "loopscope.checks": "check_model",
    "loopscope.engine": "Answer Prompt Request choices generate run stream",
    "loopscope.errors": "UserError",
    "loopscope.exits": "ExitPolicy FittedGate Frontier Monitor OperatingPoint READOUTS Readout Stopper attach "
    "calibrate conformal_risk_control fit_stopper readout register_readout signal sweep",
    "loopscope.models": "LoopedModel SimpleLoopedModel load_model loop",
    "loopscope.objectives": "LoopLosses",
    "loopscope.recording": "record_benchmark record_model",
    "loopscope.training": "fit_gate train",
    "loopscope.trajectory": "Trajectory",
}
_HOMES = {name: room for room, names in _ROOMS.items() for name in names.split()}
_CALLED = {"report": "loopscope.report"}
"""A room that is called like the function that it is for: importing it anywhere puts it here, so it can be called."""

__all__ = sorted((*_HOMES, *_CALLED))


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version("loopscope")
    if name in _CALLED:
        return import_module(_CALLED[name])
    if name not in _HOMES:
        raise AttributeError(f"module 'loopscope' has no attribute '{name}'")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), "__version__", *_HOMES, *_CALLED]
