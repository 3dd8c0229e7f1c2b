"""How is a model trained? Settings and presets, an estimate, the loop, and what goes round in it."""

from loopscope.training.answers import describe_data, initial_model, train
from loopscope.training.estimate import Estimate, check_memory, estimate
from loopscope.training.loop import RunResult
from loopscope.training.settings import RunSettings, Training, presets, read_settings

__all__ = [
    "Estimate",
    "RunResult",
    "RunSettings",
    "Training",
    "check_memory",
    "describe_data",
    "estimate",
    "initial_model",
    "presets",
    "read_settings",
    "train",
]
