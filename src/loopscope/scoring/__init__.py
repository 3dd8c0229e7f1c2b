"""How does a language model answer multiple-choice questions at every loop? All loops in one pass, into a recording."""

from loopscope.scoring.onepass import Scores, batches, requests_for, score
from loopscope.scoring.record import record_benchmark, share_done

__all__ = ["Scores", "batches", "record_benchmark", "requests_for", "score", "share_done"]
