"""What did a text become under candidate policies? Exits and answers of live runs with one cache, beside full depth.

With the cache `full` later tokens see what they would see at full depth, so that a recording made there says all of
every policy. With `propagate` and `latest` they see other keys, and a replay says nothing of them: each candidate was
run, on documents that are given token by token. A live run is a folder: `runs.safetensors`, and `rule.json`, a policy
whose readout (and gate) all candidates share.

Shapes: C candidates, N decisions.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from loopscope.artifacts import artifact_folder, load_artifact, read_whole, save_tensors, write_manifest
from loopscope.config import Settings, digest, plain
from loopscope.errors import UserError, reject
from loopscope.policy import DataSummary, ExitPolicy
from loopscope.scope import CacheMode, Scope
from loopscope.trajectory import Trajectory, check_split_name

LIVE = "live run"
LIVE_SCHEMA = 1
RUNS, RULE = LIVE_FILES = ("runs.safetensors", "rule.json")
Array = NDArray[Any]

_BY_CANDIDATE = ("loops", "predictions")
_BY_DECISION = ("full_depth", "labels", "sequences")


class LiveContents(Settings, frozen=True, kw_only=True):
    """The contents of a live run in its manifest."""

    split: str | None
    cache: CacheMode
    num_loops: int  # T of the model: full depth
    recording: str  # the hash of the recording that was run
    readouts: list[str]  # among which the proposing documents chose
    planned: int  # candidates; the first that is not proven is the last that is run
    proposing: DataSummary | None  # documents that gave the candidates, and were not run; None: they were given


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class LiveRuns:
    """A live run: the exits and answers of documents under every candidate policy, the most cautious first."""

    rule: ExitPolicy  # the first candidate
    thresholds: NDArray[np.float64]  # [C]
    loops: Array  # [C, N] that each token took
    predictions: Array  # [C, N] the answers of each candidate
    full_depth: Array  # [N] the answers at full depth
    labels: Array  # [N] the token that came
    sequences: Array  # [N] the document
    contents: LiveContents
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.contents.split is not None:
            check_split_name(self.contents.split)
        reject(self._problems())

    def _problems(self) -> Iterator[str]:
        """What is wrong with the file of a live run."""
        shape = np.shape(self.loops)
        expected = dict.fromkeys(_BY_CANDIDATE, shape) | dict.fromkeys(_BY_DECISION, shape[1:])
        for name, size in (expected | {"thresholds": shape[:1]}).items():
            values = np.asarray(getattr(self, name))
            kind = "f" if name == "thresholds" else "i"
            if values.shape != size or values.dtype.kind != kind or len(shape) != 2 or 0 in shape:
                yield f"{name} of a live run has the shape {list(values.shape)}, expected {list(size)}."
        if self.loops.min() < 1 or self.loops.max() > self.contents.num_loops:
            yield f"The loops of a live run lie between 1 and {self.contents.num_loops}."
        if self.rule.threshold != self.thresholds[0] or not np.isfinite(self.thresholds).all():
            yield "The thresholds of a live run are numbers, and the first is that of its rule."

    def __repr__(self) -> str:
        candidates, decisions = self.loops.shape
        return f"LiveRuns({candidates} of '{self.rule.readout}', cache={self.contents.cache!r}, {decisions} decisions)"

    @property
    def num_examples(self) -> int:
        return int(self.loops.shape[1])

    @property
    def difficulty(self) -> None:
        """Documents have none."""
        return None

    @property
    def split(self) -> str | None:
        return self.contents.split

    @property
    def sha256(self) -> str:
        """The hash of the recording that was run live."""
        return self.contents.recording

    @cached_property
    def run_sha256(self) -> str:
        """The hash of the live run: its policies and their outcomes."""
        sha = hashlib.sha256()
        for name in (*_BY_CANDIDATE, *_BY_DECISION):
            sha.update(np.ascontiguousarray(getattr(self, name)).data)
        return sha.hexdigest()

    @property
    def scope(self) -> Scope:
        origin = self.provenance
        return Scope(
            unit="tokens",
            cache=self.contents.cache,
            precision=origin.get("precision"),
            model=origin.get("weights_sha256"),
            definition=self.rule.scope.definition,
        )

    def policy(self, place: int) -> ExitPolicy:
        """A candidate, as it was run."""
        return replace(self.rule, threshold=float(self.thresholds[place]), certificate=None)

    def find(self, policy: ExitPolicy) -> int:
        """The place of a policy among the candidates; reject a policy that was not run."""
        policy.check(self.provenance.get("weights_sha256"), self.contents.num_loops, self.scope)
        ours, theirs = ((each.readout, each.gate and digest(_gate_arrays(each))) for each in (self.rule, policy))
        found = np.flatnonzero(self.thresholds == policy.threshold) if ours == theirs else np.empty(0)
        if not len(found):
            raise UserError(
                f"The live run is of other policies ({self.rule.readout}), not of {policy}; run that one with "
                "`loopscope record live --policy`."
            )
        return int(found[0])

    def save(self, folder: str | Path) -> None:
        """Writes the live run, whole or not at all; an earlier one in `folder` is replaced."""
        with artifact_folder(Path(folder), LIVE, LIVE_FILES) as scratch:
            names = ("thresholds", *_BY_CANDIDATE, *_BY_DECISION)
            save_tensors(scratch / RUNS, {name: np.asarray(getattr(self, name)) for name in names})
            self.rule.save(scratch / RULE)
            write_manifest(scratch, LIVE, LIVE_SCHEMA, plain(self.contents), self.provenance, LIVE_FILES)

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """The live run in `folder`, after every file was checked against its hash."""
        path = Path(folder)
        return read_whole(path, lambda: cls._read(path))

    @classmethod
    def _read(cls, path: Path) -> Self:
        found = load_artifact(path, LIVE, LIVE_SCHEMA, LiveContents, RUNS, [RULE])
        if set(found.arrays) != {"thresholds", *_BY_CANDIDATE, *_BY_DECISION}:
            raise UserError(f"{path / RUNS} does not hold what a live run has; make it again.")
        rule = ExitPolicy.load(path / RULE)
        return cls(rule=rule, contents=found.contents, provenance=found.provenance, **found.arrays)


Recorded: TypeAlias = Trajectory | LiveRuns
"""A policy can be checked on a recording, by a replay, or on a live run."""


def _gate_arrays(policy: ExitPolicy) -> dict[str, Any]:
    """The arrays of a policy's gate as lists, to compare policies."""
    assert policy.gate is not None
    return {name: np.asarray(values).tolist() for name, values in policy.gate.tensors.items()}
