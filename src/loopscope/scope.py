"""For which model and decisions does a threshold hold? The scope of a calibrated policy.

A recording has its scope in its provenance. A recording made from arrays is of answers, or of tokens if it has
sequences, unless its provenance names another `unit`. A field that is unknown (`None`, as in a policy made by hand)
matches every value; fields that both sides know must agree.
"""

from collections.abc import Mapping
from typing import Any, Literal

from loopscope.config import Settings
from loopscope.errors import UserError
from loopscope.trajectory import Trajectory

Unit = Literal["answers", "questions", "tokens"]
Score = Literal["sum", "per_character", "per_byte"]
StateRead = Literal["last_token", "mean_over_choices"]
CacheMode = Literal["full", "propagate", "latest"]

SCORE_OF_METRIC: dict[str, Score] = {"acc": "sum", "acc_norm": "per_character", "acc_bytes": "per_byte"}
STATE_WORDS: dict[StateRead, str] = {
    "last_token": "last context token",
    "mean_over_choices": "mean over the choices' tokens",
}
"""The words for the state in the provenance of recordings of questions."""

_KINDS = ("unit", "score", "state", "cache", "precision")
_WORDS: dict[str, str] = {
    "answers": "answers of a task",
    "questions": "questions with choices",
    "tokens": "next tokens of a text",
    "sum": "log-likelihoods of whole choices",
    "per_character": "log-likelihoods per character",
    "per_byte": "log-likelihoods per byte",
    "last_token": "state and gate of the last context token",
    "mean_over_choices": "state and gate averaged over the choices' tokens",
}


class Scope(Settings, frozen=True, kw_only=True):
    """The scope of a threshold: unit, score, state, cache and precision of the decisions it was chosen on."""

    unit: Unit | None = None  # the unit of one decision
    score: Score | None = None  # of questions: the score that is compared
    state: StateRead | None = None  # of questions: where state and gate are read
    cache: CacheMode | None = None  # of tokens: the cache entries that exited tokens leave for later ones
    precision: str | None = None  # of the weights
    model: str | None = None  # the hash of its weights and configuration
    definition: str | None = None  # the hash of a user's readout, as it was when the threshold was chosen

    def difference(self, other: "Scope") -> tuple[str, str, str] | None:
        """The first field in which two scopes differ, if both know it, with both values in words."""
        for name in _KINDS:
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours is not None and theirs is not None and ours != theirs:
                return name, _scope_words(name, ours), _scope_words(name, theirs)
        return None

    def check(self, here: "Scope") -> None:
        """Reject decisions of another kind than this scope's."""
        if (found := self.difference(here)) is not None:
            name, ours, theirs = found
            remedy = "calibrate one on a recording of these"
            if name == "cache":
                remedy = (
                    f"write with that cache (--cache {getattr(self, name)}; to check it: loopscope record live), or "
                    "give its readout and threshold by hand, without a guarantee"
                )
            elif name == "precision":
                remedy = (
                    f"run or record the model in that precision (--dtype {self.precision}), or calibrate one in this"
                )
            raise UserError(
                f"This policy was calibrated on {ours}, and here it would decide about {theirs}, where its threshold "
                f"means something else; {remedy}."
            )

    def __str__(self) -> str:
        words = [_scope_words(name, value) for name in _KINDS if (value := getattr(self, name)) is not None]
        if self.unit == "tokens":
            words = [each.replace("text with the cache", "with the cache") for each in words]  # of a text, it said
        return ", ".join(words) or "anything: it does not say"


ANYTHING = Scope()


def _scope_words(name: str, value: str) -> str:
    """One field of a scope in words."""
    if name == "cache":
        return f"text with the cache '{value}'"
    return f"weights in {value}" if name == "precision" else _WORDS[value]


def unit_of(provenance: Mapping[str, Any], of_sequences: bool) -> Unit:
    """The unit of a recording's decisions: questions, tokens or answers."""
    return provenance.get("unit") or (
        "questions" if "benchmark" in provenance else "tokens" if of_sequences else "answers"
    )


def example_count_text(which: str, examples: int, sequences: int | None, unit: Unit | None) -> str:
    """How many examples there are, in words: `2,000 test examples`, `2,000 test tokens of 100 sequences`."""
    if sequences is None:
        return f"{examples:,} {which} examples"
    return f"{examples:,} {which} {unit or 'decisions'} of {sequences:,} sequences"


def scope_of(trajectory: Trajectory) -> Scope:
    """The scope of a recording's decisions, from its provenance."""
    found = trajectory.provenance
    unit = unit_of(found, trajectory.sequences is not None)
    state = next((name for name, words in STATE_WORDS.items() if found.get("state") == words), None)
    return Scope(
        unit=unit,
        score=SCORE_OF_METRIC.get(found.get("metric", "")) if unit == "questions" else None,
        state=state if unit == "questions" else None,
        cache="full" if unit == "tokens" else None,
        precision=found.get("precision"),
        model=found.get("weights_sha256"),
    )
