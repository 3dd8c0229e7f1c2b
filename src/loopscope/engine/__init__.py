"""How do saved loops become saved time? Adaptive depth with a batch that is kept full."""

from loopscope.engine.agreement import Agreement, compare
from loopscope.engine.generation import Completion, GenerationStats, Prompt, Token, generate, stream
from loopscope.engine.requests import Request, choices, task_requests
from loopscope.engine.sampling import Sampling
from loopscope.engine.scheduler import Answer, in_order, run
