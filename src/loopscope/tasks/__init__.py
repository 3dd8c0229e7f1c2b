"""Where do examples come from? Tasks that generate examples of known difficulty from seeds."""

from loopscope.tasks.base import Examples, Task, drawn, fingerprints, overlap, seen, training_fingerprints
from loopscope.tasks.draws import Draws
from loopscope.tasks.mano import Mano
from loopscope.tasks.parity import Parity

__all__ = [
    "Draws",
    "Examples",
    "Mano",
    "Parity",
    "Task",
    "drawn",
    "fingerprints",
    "overlap",
    "seen",
    "training_fingerprints",
]
