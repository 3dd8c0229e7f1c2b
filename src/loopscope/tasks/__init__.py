"""Where do examples come from? Tasks that generate examples of known difficulty from seeds."""

from loopscope.tasks.base import SPLITS, Examples, Task, fingerprints, overlap, seen
from loopscope.tasks.draws import Draws
from loopscope.tasks.mano import Mano
from loopscope.tasks.parity import Parity

TASKS: dict[str, type[Task]] = {"mano": Mano, "parity": Parity}

__all__ = [
    "SPLITS",
    "TASKS",
    "Draws",
    "Examples",
    "Mano",
    "Parity",
    "Task",
    "fingerprints",
    "overlap",
    "seen",
]
