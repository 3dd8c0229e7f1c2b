"""How does a checkpoint become a recording? By the examples of its task, or by the tokens of a text."""

from loopscope.recording.tasks import (
    BATCH,
    Keep,
    examples_of,
    extrapolation_levels,
    forward,
    record,
    record_model,
    recorded_before,
)
from loopscope.recording.text import record_text

__all__ = [
    "BATCH",
    "Keep",
    "examples_of",
    "extrapolation_levels",
    "forward",
    "record",
    "record_model",
    "record_text",
    "recorded_before",
]
