"""How do saved loops become saved time? Adaptive depth with a batch that is kept full."""

from loopscope.engine.adaptive import Answer, in_order, run
from loopscope.engine.agreement import Agreement, compare
from loopscope.engine.requests import Request, choices, requests_of

__all__ = ["Agreement", "Answer", "Request", "choices", "compare", "in_order", "requests_of", "run"]
