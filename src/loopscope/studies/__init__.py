"""How do many runs become one study? A file, its plan, steps addressed by what made them, on one machine or on many."""

from loopscope.studies.plan import Model, Plan, make_plan
from loopscope.studies.run import run_study
