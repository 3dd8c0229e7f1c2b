"""What does a recording of a benchmark say beside what every recording says? Both metrics, and every subject."""

from loopscope.analysis.questions import METRICS, by_subject, metrics
from loopscope.questions import BENCHMARKS
from loopscope.report.schema import BenchmarkResult, SubjectResult
from loopscope.trajectory import Trajectory


def benchmark_result(name: str, test: Trajectory) -> BenchmarkResult | None:
    """Nothing where the examples are not a benchmark's questions; `name` is the model's where it is not recorded."""
    benchmark = test.provenance.get("benchmark")
    if not isinstance(benchmark, str):
        return None
    known = BENCHMARKS.get(benchmark)
    return BenchmarkResult(
        model=test.provenance.get("model", name),
        name=benchmark,
        title=known.title if known else benchmark,
        metric=test.provenance.get("metric", METRICS[0]),
        accuracy=metrics(test),
        subjects=[
            SubjectResult(subject, int(rows.sum()), test.correct[rows].mean(axis=0).tolist())
            for subject, rows in by_subject(test).items()
        ],
    )
