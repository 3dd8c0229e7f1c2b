"""What could a rule on all recorded signals reach? Stoppers, learned from validation data, beside the single readouts.

On validation data their signals are cross-fitted, so that thresholds and the choice of a readout can come from there,
as for every other readout; on test data they are those of the stoppers themselves.
"""

from dataclasses import replace

from loopscope.exits.fitted import Fitted, attach
from loopscope.exits.signals import STOPPER
from loopscope.exits.splits import check_calibration
from loopscope.exits.stopper import KINDS
from loopscope.exits.stopper_fitting import fit_out_of_bag, stopper_signals, why_not_learned
from loopscope.trajectory import Trajectory


def with_stoppers(validation: Trajectory, test: Trajectory) -> tuple[Trajectory, Trajectory]:
    """Both recordings with the signals of one learned stopper of each kind; as they are, where none can be learned."""
    check_calibration(validation, test)
    names = stopper_signals(validation, test)
    if validation.labels is None or test.labels is None or not names or why_not_learned(validation):
        return validation, test
    learned, stoppers = dict(validation.signals), dict[str, Fitted]()
    for kind in KINDS:
        stoppers[kind], learned[STOPPER + kind] = fit_out_of_bag(validation, signals=names, kind=kind)
    return replace(validation, signals=learned), attach(test, stoppers)
