"""Guarantees of text that was run live: the walk ends at the first candidate that is not proven."""

import numpy as np
import pytest

import loopscope as ls
from loopscope.certify.calibration import certify
from loopscope.certify.live_runs import LiveContents, LiveRuns
from loopscope.certify.not_proven import NotProven
from loopscope.certify.risk_target import RiskTarget
from loopscope.policy import DataSummary

DOCUMENTS, LENGTH = 400, 25
TARGET = RiskTarget(max_drop=0.05, loss="disagreement")


def made(rates: list[float], loops: list[float], documents: int = DOCUMENTS, split: str = "validation") -> LiveRuns:
    """Candidates that answer unlike full depth at these rates, and take about so many of 4 loops."""
    rng = np.random.default_rng(0)
    size = documents * LENGTH
    full = rng.integers(0, 9, size)
    labels = np.where(rng.random(size) < 0.5, full, 9)  # half of what full depth says is right
    other = rng.random((len(rates), size)) < np.array(rates)[:, None]
    taken = 1 + rng.binomial(3, (np.array(loops)[:, None] - 1) / 3, (len(rates), size))
    proposing = DataSummary(sha256="b" * 64, split=split, examples=9, sequences=9, seen=None, difficulty=None)
    thresholds = np.linspace(3, 1, len(rates))
    return LiveRuns(
        rule=ls.ExitPolicy("margin", 3.0),
        thresholds=thresholds,
        loops=taken,
        predictions=np.where(other, 10, full),
        full_depth=full,
        labels=labels,
        sequences=np.repeat(np.arange(documents), LENGTH),
        contents=LiveContents(
            split=split,
            cache="propagate",
            num_loops=4,
            recording="a" * 64,
            readouts=["margin", "entropy"],
            planned=len(rates) + 2,
            proposing=proposing,
        ),
    )


def test_what_comes_behind_a_failure_does_not_count() -> None:
    policy = certify(made([0.005, 0.03, 0.06, 0.01], [3.5, 2.5, 2.0, 1.5]), TARGET)
    guarantee = policy.guarantee
    assert policy.threshold == pytest.approx(3 - 2 / 3)
    assert (guarantee.thresholds, guarantee.grid_size, guarantee.finalists) == (2, 6, ["margin"])
    assert guarantee.evidence[0].loss == pytest.approx(0.03, abs=0.003)
    assert guarantee.average_loops == pytest.approx(2.5, abs=0.05)
    assert guarantee.average_loops_at_limit == pytest.approx(1.5, abs=0.05)
    assert (guarantee.tested.sequences, guarantee.tested.examples) == (DOCUMENTS, DOCUMENTS * LENGTH)
    assert policy.scope.cache == "propagate"


def test_of_those_that_are_proven_the_one_with_the_fewest_loops_is_taken() -> None:
    policy = certify(made([0.005, 0.01, 0.02], [2.0, 3.0, 2.5]), TARGET)
    assert policy.threshold == 3.0


def test_the_loss_is_the_one_that_is_asked_for() -> None:
    runs = made([0.02, 0.06], [3.0, 2.0])
    assert certify(runs, TARGET).threshold == 3.0
    gap = certify(runs, RiskTarget(max_drop=0.05, loss="gap"))  # half of the answers had nothing to lose
    assert gap.threshold == 1.0
    assert gap.guarantee.evidence[0].loss == pytest.approx(0.03, abs=0.004)
    assert gap.guarantee.full_depth_accuracy == pytest.approx(0.5, abs=0.02)


def test_bets_prove_what_hoeffding_bentkus_does_not() -> None:
    runs = made([0.01, 0.035], [3.0, 2.0])
    assert certify(runs, TARGET).guarantee.thresholds == 2
    mean_only = certify(runs, TARGET, bound="hoeffding_bentkus").guarantee
    assert (mean_only.thresholds, mean_only.bound, mean_only.order_seed) == (1, "hoeffding_bentkus", None)


def test_too_little_is_refused() -> None:
    with pytest.raises(NotProven, match="takes 59 tested sequences, and there are 50; record 74 in all") as few:
        certify(made([0.0], [3.0], documents=50), TARGET)
    assert few.value.needed == 74
    answers = r"of the answers, on average over the \d+ tested sequences, so no number of them would prove it; "
    with pytest.raises(
        NotProven, match=f"{answers}.* on other sequences: a second test .* every attempt adds its own 5 %"
    ):
        certify(made([0.08, 0.0], [3.0, 2.0]), TARGET)
    few_bets, few_mean = [], []
    for bound, needed in (("betting", few_bets), ("hoeffding_bentkus", few_mean)):
        with pytest.raises(NotProven, match="the most cautious candidate .margin at 3, .* takes about") as refused:
            certify(made([0.045], [3.0], documents=100), TARGET, bound=bound)
        needed.append(refused.value.needed)
    assert 100 < few_bets[0] < few_mean[0]
    with pytest.raises(ls.UserError, match="test split"):
        certify(made([0.0], [3.0], split="test"), TARGET)
