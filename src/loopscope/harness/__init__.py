"""How does any lm_eval task run on a looped model? As an lm_eval model, at a fixed depth or under an exit policy."""

from loopscope.harness.evaluating import Evaluation, evaluate, load

__all__ = ["Evaluation", "evaluate", "load"]
