"""How do saved loops become saved time? Adaptive depth with a batch that is kept full."""

from loopscope.engine.adaptive import Answer, in_order, run
from loopscope.engine.agreement import Agreement, compare
from loopscope.engine.checks import Check, check_model
from loopscope.engine.generation import Generated, Prompt, Sampling, Token, Work, generate, stream
from loopscope.engine.requests import Request, choices, requests_of

__all__ = [
    "Agreement",
    "Answer",
    "Check",
    "Generated",
    "Prompt",
    "Request",
    "Sampling",
    "Token",
    "Work",
    "check_model",
    "choices",
    "compare",
    "generate",
    "in_order",
    "requests_of",
    "run",
    "stream",
]
