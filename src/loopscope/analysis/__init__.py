"""What do recordings say? Forced exits, difficulty, bootstrap intervals and the diagnosis; never the network."""

from loopscope.analysis.bootstrap import ENOUGH, Estimate, Interval, interval, resampled_curves, resampled_means
from loopscope.analysis.comparison import Comparison, compare_readouts as compare
from loopscope.analysis.diagnosis import Diagnosis, diagnose, diagnose_subject
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
from loopscope.analysis.gaps import Gap, Subject, depth_gap
from loopscope.analysis.held_out import GuaranteeCheck, HeldOut, hold_out
from loopscope.analysis.paired import Paired, Side, exits_of, paired
from loopscope.analysis.seeds import OverSeeds, over_seeds
from loopscope.analysis.targets import WITHIN_A_POINT, Target, TargetLevel, as_target, as_targets, target_level
