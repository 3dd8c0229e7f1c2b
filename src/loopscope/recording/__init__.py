"""How does a checkpoint become a recording? By the examples of its task, the tokens of a text, or a benchmark."""

from loopscope.recording.benchmarks import record_benchmark, share_recorded
from loopscope.recording.choice_scoring import LoopScores, question_batches, question_requests, score_all_loops
from loopscope.recording.live_text import record_live
from loopscope.recording.tasks import (
    BATCH,
    Keep,
    existing_recording,
    extrapolation_levels,
    forward,
    record_model,
    record_task,
    split_examples,
)
from loopscope.recording.text import record_text
