"""How do many runs become one study? A file, its plan, steps addressed by what made them, on one machine or on many."""

from typing import TYPE_CHECKING

from loopscope.on_demand import offered

if TYPE_CHECKING:
    from loopscope.studies.plan import Model, Plan, make_plan
    from loopscope.studies.run import run_study
else:
    __getattr__ = offered(__name__, {"plan": "Model Plan make_plan", "run": "run_study"})
