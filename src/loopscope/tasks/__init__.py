"""Where do examples come from? Tasks draw examples of known difficulty from seeds, split by split."""

from loopscope.tasks.custom_task import CustomTask, examples_sha256, load_task, with_task_source
from loopscope.tasks.examples import Draws, Examples, Integers, fingerprints, overlap, seen
from loopscope.tasks.mano import Mano
from loopscope.tasks.pointer_jumping import HopInduction, Reachability
from loopscope.tasks.state_tracking import Parity, StateTracking
from loopscope.tasks.task import Splits, Task, drawn, training_fingerprints

BuiltInTask = Mano | Parity | StateTracking | HopInduction | Reachability
