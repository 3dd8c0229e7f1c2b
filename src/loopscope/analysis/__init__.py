"""What do recordings say? Forced exits, difficulty, bootstrap intervals and the diagnosis; never the network."""

from loopscope.analysis.diagnosis import Diagnosis, Gap, Subject, diagnose
from loopscope.analysis.difficulty import (
    ORDERED_SIGNALS,
    ByDifficulty,
    Ordering,
    difficulty_ordering,
    exit_distribution,
    forced_accuracy,
    forced_cross_entropy,
    signal_by_difficulty,
)
from loopscope.analysis.seeds import OverSeeds, over_seeds

__all__ = [
    "ORDERED_SIGNALS",
    "ByDifficulty",
    "Diagnosis",
    "Gap",
    "Ordering",
    "OverSeeds",
    "Subject",
    "diagnose",
    "difficulty_ordering",
    "exit_distribution",
    "forced_accuracy",
    "forced_cross_entropy",
    "over_seeds",
    "signal_by_difficulty",
]
