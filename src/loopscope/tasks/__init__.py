"""Where do examples come from? Tasks that generate examples of known difficulty from seeds."""

from loopscope.tasks.draws import Draws
from loopscope.tasks.mano import Mano
from loopscope.tasks.parity import Parity
from loopscope.tasks.task import Examples, Task, drawn, fingerprints, overlap, seen, training_fingerprints
