"""Was a guarantee kept? A policy on examples that had no part in its calibration, beside full depth."""

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.stats import chi2_contingency

from loopscope.analysis.bootstrap import LEVEL, Estimate, estimate, resampled_means
from loopscope.certify.bounds import risk_interval
from loopscope.certify.live_runs import Recorded
from loopscope.certify.losses import difficulty_counts, risk_groups
from loopscope.certify.tested_data import Outcome, check_held_out, guaranteed_part, outcome_of
from loopscope.policy import ExitPolicy, Guarantee
from loopscope.tabular import Tabular

Verdict = Literal["kept", "not refuted", "broken"]
_OTHER_MIX = 0.001
"""The mixes of difficulties differ if chance alone would do it less often than this."""


@dataclass(frozen=True)
class Risk:
    """The loss against full depth on held-out examples, over all of them or at one difficulty."""

    difficulty: float | None
    units: int
    loss: float
    low: float  # of the interval for the risk: 95 % for all difficulties together
    high: float
    verdict: Verdict


@dataclass(frozen=True)
class GuaranteeCheck:
    """Whether held-out examples kept a guarantee: the risks, the verdict and its sentence."""

    verdict: Verdict
    sentence: str
    risks: list[Risk]
    warnings: list[str]

    @property
    def worst(self) -> Risk | None:
        """The largest loss among the groups that decide the verdict."""
        deciding = [risk for risk in self.risks if risk.verdict == self.verdict]
        return max(deciding, key=lambda risk: risk.loss, default=None)


@dataclass(frozen=True)
class HeldOut(Tabular):
    """Hold the results of a policy on examples that calibration did not use.

    `check_policy` returns a `HeldOut`.

    Parameters
    ----------
    examples, sequences
        The number of examples and of sequences; `sequences` is None for single answers.
    average_loops, accuracy, drop
        Estimates with 95 % intervals. The drop is the loss of accuracy against full depth. Without labels, accuracy and
        drop are None.
    full_depth_accuracy
        The accuracy at full depth; None without labels.
    guarantee
        Whether the guarantee was kept; None for a policy without a guarantee.

    Examples
    --------
    >>> policy = ls.calibrate(validation, max_drop=0.1)
    >>> held = ls.check_policy(policy, test)
    >>> held.guarantee.verdict
    'kept'
    >>> list(held.to_dict()["quantity"])
    ['average_loops', 'accuracy', 'drop']
    """

    examples: int
    sequences: int | None
    average_loops: Estimate
    accuracy: Estimate | None  # None without labels, as the next two
    full_depth_accuracy: float | None
    drop: Estimate | None  # of accuracy, against full depth
    guarantee: GuaranteeCheck | None  # None without a guarantee

    def to_dict(self) -> dict[str, list[Any]]:
        """List the estimates as columns: value and 95 % interval.

        Returns
        -------
        dict[str, list]
            A row for every quantity that could be measured.
        """
        estimates = {name: getattr(self, name) for name in ("average_loops", "accuracy", "drop")}
        known = {name: each for name, each in estimates.items() if each is not None}
        bounds = {name: [getattr(each, name) for each in known.values()] for name in ("value", "low", "high")}
        return {"quantity": list(known), **bounds}


def check_policy(policy: ExitPolicy, recording: Recorded) -> HeldOut:
    """Check a policy and its guarantee on held-out examples.

    Parameters
    ----------
    policy
        A policy, with or without calibration.
    recording
        Examples that calibration did not use: a recording or a live run.

    Returns
    -------
    HeldOut
        Loops, accuracy and drop, and the verdict on the guarantee: "kept", "not refuted" or "broken".

    Raises
    ------
    UserError
        If the guarantee rests on the given data, or if the policy is for a different model or a different kind of
        decisions.

    Examples
    --------
    >>> policy = ls.calibrate(validation, max_drop=0.1)
    >>> ls.check_policy(policy, test).guarantee.verdict
    'kept'
    """
    guarantee = policy.guarantee
    if guarantee is not None:
        check_held_out(policy, recording)
        recording = guaranteed_part(guarantee, recording)
    outcome = outcome_of(policy, recording)
    (all_units,) = risk_groups(recording, per_difficulty=False)
    columns: list[NDArray[Any]] = [outcome.loops]
    labelled = outcome.labels is not None
    if labelled:
        early, last = outcome.predicted == outcome.labels, outcome.full_depth == outcome.labels
        columns += [early, last, last.astype(np.int8) - early]
    per_unit = np.stack([all_units.means(values) for values in columns], axis=1).astype(np.float32)
    means = resampled_means(per_unit)
    measured = [estimate(means[:, place]) for place in range(len(columns))]
    return HeldOut(
        examples=recording.num_examples,
        sequences=None if recording.sequences is None else all_units.units,
        average_loops=measured[0],
        accuracy=measured[1] if labelled else None,
        full_depth_accuracy=measured[2].value if labelled else None,
        drop=measured[3] if labelled else None,
        guarantee=None if guarantee is None else _check_guarantee(guarantee, recording, outcome),
    )


def _check_guarantee(guarantee: Guarantee, trajectory: Recorded, outcome: Outcome) -> GuaranteeCheck:
    """Measure the risk that a guarantee limits on held-out examples, and give the verdict."""
    lost = outcome.lost(guarantee.loss)
    parts = risk_groups(trajectory, guarantee.per_difficulty)
    guaranteed = {each.difficulty for each in guarantee.evidence}
    parts = [part for part in parts if part.difficulty in guaranteed]
    level = 1 - (1 - LEVEL) / max(1, len(parts))
    risks = []
    for part in parts:
        total = float(part.means(lost).sum())
        low, high = risk_interval(total, part.units, part.binary, level)
        loss = total / part.units
        risks.append(Risk(part.difficulty, part.units, loss, low, high, _guarantee_verdict(guarantee, loss, low)))
    order: tuple[Verdict, ...] = ("broken", "not refuted", "kept")
    found = {risk.verdict for risk in risks} or {"not refuted"}
    verdict = next(each for each in order if each in found)
    check = GuaranteeCheck(verdict, "", risks, _held_out_warnings(guarantee, trajectory))
    return replace(check, sentence=_guarantee_sentence(guarantee, check))


def _guarantee_verdict(guarantee: Guarantee, loss: float, low: float) -> Verdict:
    """Whether the held-out loss keeps the guarantee, breaks it, or leaves it open."""
    if loss <= guarantee.max_drop:
        return "kept"
    return "broken" if low > guarantee.max_drop and guarantee.confidence is not None else "not refuted"


_LOST = {"gap": "are wrong where full depth is right", "disagreement": "differ from full depth"}


def _guarantee_sentence(guarantee: Guarantee, check: GuaranteeCheck) -> str:
    """The sentence that says whether held-out examples kept the guarantee."""
    worst = check.worst
    if worst is None:
        return "Not refuted: none of the difficulties of the guarantee is here."
    where = "" if worst.difficulty is None else f" of difficulty {worst.difficulty:g}, the worst,"
    share = f"{100 * worst.loss:.2f} %"
    if guarantee.tested.sequences is None:
        found = f"{share} of {worst.units:,} held-out examples{where}"
    else:
        found = f"on average over {worst.units:,} held-out sequences{where.removesuffix(',')}, {share} of the answers"
    why = ""
    if check.verdict == "not refuted":
        by_chance = worst.low <= guarantee.max_drop
        why = " That much can be chance." if by_chance else " One draw cannot break a guarantee on average."
    lost = f"{_LOST[guarantee.loss]} ({100 * worst.low:.2f} to {100 * worst.high:.2f})"
    guaranteed = f"guaranteed: at most {100 * guarantee.max_drop:g} %"
    return f"{check.verdict.capitalize()}: {found} {lost}; {guaranteed}.{why}"


def _held_out_warnings(guarantee: Guarantee, trajectory: Recorded) -> list[str]:
    """Warn if held-out examples differ from the calibration data, as in their mix of difficulties."""
    found = []
    ours, theirs = guarantee.tested.difficulty, difficulty_counts(trajectory)
    if ours and theirs and not guarantee.per_difficulty:
        levels = sorted({*ours, *theirs}, key=float)
        counts = [[data.get(level, 0) for level in levels] for data in (ours, theirs)]
        if len(levels) > 1 and chi2_contingency(counts).pvalue < _OTHER_MIX:
            found.append(
                "The mix of difficulties is not that of the calibration data, for which the guarantee was made; "
                "--per-difficulty makes one that does not depend on the mix."
            )
    if guarantee.per_difficulty and ours and theirs:
        for missing, what in (
            ({*theirs} - {*ours}, "that the guarantee does not cover are here and not counted"),
            ({*ours} - {*theirs}, "that the guarantee covers are not here"),
        ):
            if missing:
                found.append(f"Difficulties {what}: {', '.join(sorted(missing, key=float))}.")
    return found
