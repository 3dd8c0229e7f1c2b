"""How is a text run live with candidate policies? Token by token, with the cache in which text is to be written.

The documents are those of a recording, in the same windows: the first token of each is the prompt, and all others are
forced, whatever the model says before them. Windows of about one length run together, in groups that are always the
same; what is done is kept beside the live run until it is whole, so that nothing runs twice.

Shapes: C candidates, N decisions, W windows.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from loopscope.artifacts import sha256
from loopscope.config import digest, plain
from loopscope.documents import read_documents, tokenize_documents
from loopscope.engine.exit_decision import likeliest_classes
from loopscope.engine.generation import MOST_ROWS, Prompt, stream
from loopscope.errors import UserError
from loopscope.exits.exit_state import ExitState
from loopscope.exits.fitted import Fitted
from loopscope.exits.live_calibration import CANDIDATES, Candidates, candidate_p_values, propose_candidates
from loopscope.exits.live_runs import LIVE, LIVE_FILES, LiveContents, LiveRuns
from loopscope.exits.policy import ExitPolicy
from loopscope.exits.risk_target import RiskTarget
from loopscope.exits.scope import CacheMode, Scope
from loopscope.exits.threshold_walk import Proof
from loopscope.model_identity import same_model, weights_of
from loopscope.models.checkpoint import load_model
from loopscope.models.contract import LoopedModel
from loopscope.models.device import check_device
from loopscope.models.hub import find_checkpoint
from loopscope.progress import ProgressCallback, silent
from loopscope.recording.recording_folder import Arrays, existing_artifact, keep_part, kept_parts, resume_or_make
from loopscope.recording.text_recording import TextWindows, cut_documents
from loopscope.trajectory import Trajectory

_BATCHES_TOGETHER = 8
"""Batches of windows that run, and are kept, together."""

Integers = NDArray[np.int64]


def record_live(
    checkpoint: str | Path,
    texts: Sequence[Path],
    recording: Trajectory,
    out: Path,
    cache: CacheMode,
    what: RiskTarget | ExitPolicy,
    *,
    candidates: int = CANDIDATES,
    gates: Mapping[str, Fitted] | None = None,
    seed: int = 0,
    batch_size: int = 32,
    device: str | torch.device = "cpu",
    progress: ProgressCallback = silent,
) -> LiveRuns:
    """Runs the texts of a recording live; an identical live run is used again, one that was interrupted goes on.

    For a guarantee that is asked for: candidates that a fifth of the documents proposes, on the others, from the most
    cautious one up to the first that is not proven. Or one policy, on all documents.
    """
    batch_size = min(batch_size, MOST_ROWS)
    folder, device = find_checkpoint(checkpoint), check_device(device)
    windows = _windows(texts, recording, folder)
    planned = (
        _given(what, recording, cache)
        if isinstance(what, ExitPolicy)
        else propose_candidates(recording, what, cache, count=candidates, gates=gates, seed=seed)
    )
    contents = LiveContents(
        split=recording.split,
        cache=cache,
        num_loops=recording.num_loops,
        recording=recording.sha256,
        readouts=planned.readouts,
        planned=len(planned.thresholds),
        proposing=planned.proposing,
    )
    found = recording.provenance
    provenance = {name: found.get(name) for name in ("weights_sha256", "precision", "text_sha256", "context", "dtype")}
    provenance |= {
        "thresholds": planned.thresholds.tolist(),
        "rule": _identity(planned.rule),
        "risk_target": None if isinstance(what, ExitPolicy) else plain(what),
        "seed": seed,
        "batch_size": batch_size,
    }
    expected = {**plain(contents), **provenance}

    def make(unfinished: Path) -> None:
        model = load_model(folder, device, found.get("dtype"))
        _check_model(model, recording)
        run = _Run(model, windows, planned, cache, batch_size, unfinished, kept_parts(unfinished, expected), progress)
        loops, predictions = [], []
        for place in range(len(planned.thresholds)):
            one_run = run.candidate(place)
            loops.append(one_run[0])
            predictions.append(one_run[1])
            runs = LiveRuns(
                rule=planned.rule,
                thresholds=planned.thresholds[: place + 1],
                loops=np.stack(loops),
                predictions=np.stack(predictions),
                full_depth=np.ascontiguousarray(planned.tested.predicted[:, -1]),
                labels=planned.tested.required_labels,
                sequences=_sequences(planned.tested),
                contents=contents,
                provenance=provenance,
            )
            if isinstance(what, RiskTarget) and not _proven(runs, what, seed):
                break  # none behind it can be
        runs.save(out)

    return resume_or_make(out, lambda: existing_artifact(out, LIVE, LIVE_FILES, expected, LiveRuns.load), make)


def _proven(runs: LiveRuns, target: RiskTarget, seed: int) -> bool:
    """Whether the last candidate is."""
    assert target.delta is not None
    return bool(candidate_p_values(runs, target, Proof("betting", seed))[-1] <= target.delta)


def _windows(texts: Sequence[Path], recording: Trajectory, folder: Path) -> TextWindows:
    """Those of the recording, whose texts these must be."""
    found = recording.provenance
    if found.get("text_sha256") != [sha256(path) for path in texts]:
        raise UserError(
            "The recording is of another text than these files; give a recording that `loopscope record text` made, "
            "and the files that it was made of, in order."
        )
    documents = tokenize_documents(read_documents(texts), folder)
    windows = cut_documents(documents, found["context"], recording.num_examples)
    _, labels, sequences = windows.targets(np.arange(len(windows.lengths)))
    if not np.array_equal(labels, recording.required_labels) or not np.array_equal(sequences, _sequences(recording)):
        raise UserError("The tokens of this text are not those of the recording; record it again with this model.")
    return windows


def _check_model(model: LoopedModel, recording: Trajectory) -> None:
    recorded = recording.provenance.get("weights_sha256")
    for what, ours, theirs in (
        ("weights", weights_of(recorded or ""), weights_of(model.weights_sha256)),
        ("configurations", True, same_model(recorded, model.weights_sha256)),
        ("loops", recording.num_loops, model.num_loops),
        ("precision", recording.provenance.get("precision"), model.precision),
    ):
        if ours != theirs:
            raise UserError(f"The recording was made with another model: its {what} differ; record with this one.")


def _given(policy: ExitPolicy, recording: Trajectory, cache: CacheMode) -> Candidates:
    """One policy, for all documents."""
    found = recording.provenance
    here = Scope(unit="tokens", cache=cache, precision=found.get("precision"))
    policy.check(found.get("weights_sha256"), recording.num_loops, here)
    ExitState(policy, recording.num_loops)  # rejects what can only be replayed
    assert policy.threshold is not None
    return Candidates(policy, np.array([float(policy.threshold)]), [policy.readout], None, recording)


def _identity(rule: ExitPolicy) -> str:
    weights = rule.gate and {name: np.asarray(values).tolist() for name, values in rule.gate.tensors.items()}
    return digest([rule.readout, weights, rule.definition_sha256])


def _sequences(recording: Trajectory) -> Integers:
    assert recording.sequences is not None
    return recording.sequences


class _Run:
    """Documents that go through the model once for every candidate."""

    def __init__(
        self,
        model: LoopedModel,
        windows: TextWindows,
        planned: Candidates,
        cache: CacheMode,
        batch_size: int,
        folder: Path,
        kept: list[Arrays],
        progress: ProgressCallback,
    ) -> None:
        self._model, self._windows, self._planned, self._rows = model, windows, planned, batch_size
        self._cache, self._folder, self._progress = cache, folder, progress
        self._parts = {(int(part["place"][0]), int(part["group"][0])): part for part in kept}
        chosen = np.flatnonzero(np.isin(windows.documents, _sequences(planned.tested)))
        by_length = chosen[np.argsort(-windows.lengths[chosen], kind="stable")]
        size = _BATCHES_TOGETHER * batch_size
        self._groups = [by_length[start : start + size] for start in range(0, len(by_length), size)]
        predicted = windows.lengths[chosen] - 1
        starts = np.zeros(len(windows.lengths), dtype=np.int64)
        starts[chosen] = predicted.cumsum() - predicted  # where a window's decisions begin among those that are run
        self._starts = starts
        assert predicted.sum() == planned.tested.num_examples

    def candidate(self, place: int) -> tuple[Integers, Integers]:
        """[N] the loops that every token took, and what it predicted."""
        loops = np.zeros(self._planned.tested.num_examples, dtype=np.int64)
        predictions = np.zeros_like(loops)
        for number, group in enumerate(self._groups):
            if (place, number) not in self._parts:
                part = self._run(place, group)
                part |= {"place": np.array([place]), "group": np.array([number])}
                keep_part(part, self._folder)
                self._parts[place, number] = part
            part = self._parts[place, number]
            loops[part["rows"]], predictions[part["rows"]] = part["loops"], part["predictions"]
            done = place * len(self._groups) + number + 1
            note = f"candidate {place + 1} of {len(self._planned.thresholds)}"
            self._progress(done, len(self._groups) * len(self._planned.thresholds), note)
        return loops, predictions

    def _run(self, place: int, group: Integers) -> Arrays:
        windows, rule = self._windows, self._planned.rule
        policy = ExitPolicy(rule.readout, float(self._planned.thresholds[place]), rule.gate, scope=rule.scope)
        prompts = []
        for window in group.tolist():
            tokens = windows.tokens[windows.starts[window] : windows.starts[window] + windows.lengths[window]]
            prompts.append(Prompt(window, tokens[:1], tokens[1:]))
        rows, loops, predicted = [], [], []
        written = dict.fromkeys(group.tolist(), 0)
        for token in stream(self._model, prompts, policy, cache=self._cache, batch_size=self._rows, with_logits=True):
            assert token.logits is not None
            rows.append(int(self._starts[token.key]) + written[token.key])
            loops.append(token.loops)
            predicted.append(likeliest_classes(token.logits))
            written[token.key] += 1
        predictions = torch.stack(predicted).cpu().numpy()
        return {"rows": np.array(rows), "loops": np.array(loops), "predictions": predictions.astype(np.int64)}
