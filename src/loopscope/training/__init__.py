"""How is a model trained? Settings and presets, an estimate, the loop, and what goes round in it."""

from typing import TYPE_CHECKING

from loopscope.on_demand import offered

if TYPE_CHECKING:
    from loopscope.training.estimate import TimeEstimate, check_memory, estimate_time
    from loopscope.training.gate_fitting import fit_gate
    from loopscope.training.loop import RunResult
    from loopscope.training.settings import RunSettings, Training, presets, read_settings
    from loopscope.training.task_run import describe_data, initial_model, train
else:
    __getattr__ = offered(
        __name__,
        {
            "estimate": "TimeEstimate check_memory estimate_time",
            "gate_fitting": "fit_gate",
            "loop": "RunResult",
            "settings": "RunSettings Training presets read_settings",
            "task_run": "describe_data initial_model train",
        },
    )
