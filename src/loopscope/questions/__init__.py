"""Where do multiple-choice questions come from? lm_eval's own task definitions, from the Hub or a folder."""

from loopscope.questions.benchmarks import BENCHMARKS, Benchmark, Metric, Split, benchmark_named
from loopscope.questions.encoding import EncodedQuestion, encode_questions
from loopscope.questions.lm_eval_tasks import Question, load_questions
from loopscope.questions.metrics import correct, metric_scores, norms_of
