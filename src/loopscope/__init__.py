"""LoopScope: is the trajectory to blame, or the readout? Adaptive depth in looped Transformers.

The names below are the public interface. Each is imported when it is first used, so that `import loopscope` and
`loopscope --help` stay quick, and work on recordings never loads PyTorch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loopscope.engine import Answer as Answer
    from loopscope.engine import Prompt as Prompt
    from loopscope.engine import Request as Request
    from loopscope.engine import check_model as check_model
    from loopscope.engine import choices as choices
    from loopscope.engine import generate as generate
    from loopscope.engine import run as run
    from loopscope.engine import stream as stream
    from loopscope.errors import UserError as UserError
    from loopscope.exits import READOUTS as READOUTS
    from loopscope.exits import ExitPolicy as ExitPolicy
    from loopscope.exits import FittedGate as FittedGate
    from loopscope.exits import Frontier as Frontier
    from loopscope.exits import attach as attach
    from loopscope.exits import calibrate as calibrate
    from loopscope.exits import conformal_risk_control as conformal_risk_control
    from loopscope.exits import signal as signal
    from loopscope.exits import sweep as sweep
    from loopscope.models import load_model as load_model
    from loopscope.recording import record_model as record_model
    from loopscope.scoring import record_benchmark as record_benchmark
    from loopscope.trajectory import Trajectory as Trajectory

_HOMES = {
    "Answer": "loopscope.engine",
    "ExitPolicy": "loopscope.exits",
    "FittedGate": "loopscope.exits",
    "Frontier": "loopscope.exits",
    "Prompt": "loopscope.engine",
    "READOUTS": "loopscope.exits",
    "Request": "loopscope.engine",
    "Trajectory": "loopscope.trajectory",
    "UserError": "loopscope.errors",
    "attach": "loopscope.exits",
    "calibrate": "loopscope.exits",
    "check_model": "loopscope.engine",
    "choices": "loopscope.engine",
    "conformal_risk_control": "loopscope.exits",
    "generate": "loopscope.engine",
    "load_model": "loopscope.models",
    "record_benchmark": "loopscope.scoring",
    "record_model": "loopscope.recording",
    "run": "loopscope.engine",
    "signal": "loopscope.exits",
    "stream": "loopscope.engine",
    "sweep": "loopscope.exits",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'loopscope' has no attribute '{name}'")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
