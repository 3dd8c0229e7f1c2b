"""How is a text run live under candidate policies? Token by token, with the KV cache mode of generation.

The documents are those of a recording, cut into the same windows. The first token of each window is the prompt, and all
other tokens are forced, regardless of the model's predictions. Windows of about the same length run together, in the
same groups every time. Finished groups stay beside the live run until it is complete, so that no group runs twice.

Shapes: C candidates, N decisions, W windows.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from loopscope.artifacts import sha256
from loopscope.certify.live_candidates import CANDIDATES, LiveCandidates, candidate_p_values, propose_candidates
from loopscope.certify.live_runs import LIVE, LIVE_FILES, LiveContents, LiveRuns
from loopscope.certify.risk_target import RiskTarget
from loopscope.certify.threshold_walk import Proof
from loopscope.config import digest, plain
from loopscope.engine.generation import MOST_ROWS, Prompt, stream
from loopscope.engine.logit_signals import likeliest_classes
from loopscope.errors import UserError
from loopscope.exit_state import ExitState
from loopscope.learned.attach import Fitted
from loopscope.model_identity import same_model, weights_of
from loopscope.models.checkpoint import load_model
from loopscope.models.checkpoint_folder import find_checkpoint
from loopscope.models.device import check_device
from loopscope.models.looped_model import LoopedModel
from loopscope.models.tokenizer import read_documents, tokenize_documents
from loopscope.policy import ExitPolicy
from loopscope.progress import ProgressCallback, silent
from loopscope.recording.recording_folder import Arrays, existing_artifact, keep_part, kept_parts, resume_or_make
from loopscope.recording.text_recording import TextWindows, cut_documents
from loopscope.scope import CacheMode, Scope
from loopscope.trajectory import Trajectory

_BATCHES_TOGETHER = 8
"""Batches of windows that run together, and are kept as one part."""

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
    """Run the texts of a recording live; an identical live run is used again, and an interrupted one goes on.

    With a risk target, candidates that a fifth of the documents proposes run on the other documents, from the most
    cautious candidate up to the first that is not proven. With a policy, it runs on all documents.
    """
    batch_size = min(batch_size, MOST_ROWS)
    folder, device = find_checkpoint(checkpoint), check_device(device)
    windows = _windows(texts, recording, folder)
    planned = (
        _single_candidate(what, recording, cache)
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
    of_text = ("text_sha256", "tokenization_sha256", "context")
    provenance = {name: found.get(name) for name in ("weights_sha256", "precision", *of_text, "dtype")}
    provenance |= {
        "thresholds": planned.thresholds.tolist(),
        "rule": _rule_hash(planned.rule),
        "risk_target": None if isinstance(what, ExitPolicy) else plain(what),
        "seed": seed,
        "batch_size": batch_size,
    }
    expected = {**plain(contents), **provenance}

    def make(unfinished: Path) -> None:
        model = load_model(folder, device, found.get("dtype"))
        _check_recorded_model(model, recording)
        rule, tested = planned.rule, planned.tested
        groups, starts = _group_windows(windows, _documents(tested), _BATCHES_TOGETHER * batch_size)
        assert starts[-1] == tested.num_examples
        parts = {(int(part["place"][0]), int(part["group"][0])): part for part in kept_parts(unfinished, expected)}
        loops = np.zeros((len(planned.thresholds), tested.num_examples), dtype=np.int64)
        predictions = np.zeros_like(loops)
        for place, threshold in enumerate(planned.thresholds.tolist()):
            policy = ExitPolicy(rule.readout, threshold, rule.gate, scope=rule.scope)
            for number, group in enumerate(groups):
                if (place, number) not in parts:
                    part = _run_windows(model, policy, windows, group, starts, cache, batch_size)
                    part |= {"place": np.array([place]), "group": np.array([number])}
                    keep_part(part, unfinished)
                    parts[place, number] = part
                part = parts[place, number]
                loops[place, part["rows"]], predictions[place, part["rows"]] = part["loops"], part["predictions"]
                note = f"candidate {place + 1} of {len(loops)}"
                progress(place * len(groups) + number + 1, len(groups) * len(loops), note)
            runs = LiveRuns(
                rule=rule,
                thresholds=planned.thresholds[: place + 1],
                loops=loops[: place + 1],
                predictions=predictions[: place + 1],
                full_depth=np.ascontiguousarray(tested.predicted[:, -1]),
                labels=tested.required_labels,
                sequences=_documents(tested),
                contents=contents,
                provenance=provenance,
            )
            if isinstance(what, RiskTarget):
                assert what.delta is not None
                if candidate_p_values(runs, what, Proof(bound="betting", seed=seed))[-1] > what.delta:
                    break  # no later candidate can be proven
        runs.save(out)

    return resume_or_make(out, lambda: existing_artifact(out, LIVE, LIVE_FILES, expected, LiveRuns.load), make)


def _windows(texts: Sequence[Path], recording: Trajectory, folder: Path) -> TextWindows:
    """The windows of the texts, which must be those of the recording."""
    found = recording.provenance
    if found.get("text_sha256") != [sha256(path) for path in texts]:
        raise UserError(
            "The recording is of another text than these files; give a recording that `loopscope record text` made, "
            "and the files that it was made of, in order."
        )
    documents = tokenize_documents(read_documents(texts), folder)
    windows = cut_documents(documents, found["context"], recording.num_examples)
    _, labels, sequences = windows.targets(np.arange(len(windows.lengths)))
    if not np.array_equal(labels, recording.required_labels) or not np.array_equal(sequences, _documents(recording)):
        raise UserError("The tokens of this text are not those of the recording; record it again with this model.")
    return windows


def _check_recorded_model(model: LoopedModel, recording: Trajectory) -> None:
    """Reject a recording that another model made than the one that runs live."""
    recorded = recording.provenance.get("weights_sha256")
    for what, ours, theirs in (
        ("weights", weights_of(recorded or ""), weights_of(model.weights_sha256)),
        ("configurations", True, same_model(recorded, model.weights_sha256)),
        ("loops", recording.num_loops, model.num_loops),
        ("precision", recording.provenance.get("precision"), model.precision),
    ):
        if ours != theirs:
            raise UserError(f"The recording was made with another model: its {what} differ; record with this one.")


def _single_candidate(policy: ExitPolicy, recording: Trajectory, cache: CacheMode) -> LiveCandidates:
    """The given policy as the only candidate, for all documents."""
    found = recording.provenance
    here = Scope(unit="tokens", cache=cache, precision=found.get("precision"))
    policy.check(found.get("weights_sha256"), recording.num_loops, here)
    ExitState(policy, recording.num_loops)  # rejects a policy that can only be replayed
    assert policy.threshold is not None
    return LiveCandidates(policy, np.array([float(policy.threshold)]), [policy.readout], None, recording)


def _rule_hash(rule: ExitPolicy) -> str:
    """The hash by which a live run knows its rule, without the threshold: readout, weights of the gate, definition."""
    weights = rule.gate and {name: np.asarray(values).tolist() for name, values in rule.gate.tensors.items()}
    return digest([rule.readout, weights, rule.scope.definition])


def _documents(recording: Trajectory) -> Integers:
    """[N] the document of each decision of a text recording."""
    assert recording.sequences is not None
    return recording.sequences


def _group_windows(windows: TextWindows, documents: Integers, size: int) -> tuple[list[Integers], Integers]:
    """The windows of the given documents in groups that run together, and [W + 1] the first decision of each window."""
    chosen = np.isin(windows.documents, documents)
    numbers = np.flatnonzero(chosen)
    by_length = numbers[np.argsort(-windows.lengths[numbers], kind="stable")]
    starts = np.append(0, np.where(chosen, windows.lengths - 1, 0).cumsum())
    return [by_length[first : first + size] for first in range(0, len(by_length), size)], starts


def _run_windows(
    model: LoopedModel,
    policy: ExitPolicy,
    windows: TextWindows,
    group: Integers,
    starts: Integers,
    cache: CacheMode,
    batch_size: int,
) -> Arrays:
    """The exit loop and the prediction of every token of a group of windows."""
    prompts = []
    for window in group.tolist():
        tokens = windows.tokens[windows.starts[window] : windows.starts[window] + windows.lengths[window]]
        prompts.append(Prompt(window, tokens[:1], tokens[1:]))
    rows, loops, predicted = [], [], []
    written = dict.fromkeys(group.tolist(), 0)
    for token in stream(model, prompts, policy, cache=cache, batch_size=batch_size, with_logits=True):
        assert token.logits is not None
        rows.append(int(starts[token.key]) + written[token.key])
        loops.append(token.loops)
        predicted.append(likeliest_classes(token.logits))
        written[token.key] += 1
    predictions = torch.stack(predicted).cpu().numpy()
    return {"rows": np.array(rows), "loops": np.array(loops), "predictions": predictions.astype(np.int64)}
