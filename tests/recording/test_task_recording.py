"""Recording: is a recording what the model says, whatever is kept of it?"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import GOLDEN, tiny_settings

import loopscope as ls
from loopscope.certify.calibration import certify
from loopscope.certify.risk_target import RiskTarget
from loopscope.engine.replay_agreement import compare_with_replay
from loopscope.engine.requests import task_requests
from loopscope.models.looped_model import LoopState
from loopscope.readouts.signals import SIGNALS
from loopscope.recording.recording_folder import Keep
from loopscope.recording.task_recording import record_task
from loopscope.tasks import seen, training_fingerprints
from loopscope.training.task_run import train


def test_a_recording_is_what_the_model_says(gated_run: Path, tmp_path: Path) -> None:
    recording = record_task(gated_run, "validation", tmp_path / "recording", Keep(hidden=True))
    examples = tiny_settings().task.split("validation")
    lengths = torch.from_numpy(examples.lengths)
    with torch.no_grad():
        out = ls.load_model(gated_run).loops(torch.from_numpy(examples.tokens), lengths, positions=lengths - 1)
    assert recording.logits == pytest.approx(out.logits.transpose(0, 1).numpy(), abs=1e-5)
    assert recording.hidden == pytest.approx(out.hidden.transpose(0, 1).numpy(), abs=1e-5)
    assert recording.gate_logits == pytest.approx(out.gate_logits.T.numpy(), abs=1e-5)
    assert np.array_equal(recording.labels, examples.labels)
    assert np.array_equal(recording.difficulty, examples.difficulty)
    assert recording.examples == tiny_settings().task.text(examples)
    assert recording.split == "validation"
    assert recording.seen[examples.difficulty == 1].all()
    assert np.array_equal(recording.seen, seen(examples, training_fingerprints(tiny_settings().task)))
    assert not recording.seen.all()
    assert recording.provenance["run"]["training"]["steps"] == 12
    assert len(recording.provenance["weights_sha256"]) == 64


def test_signals_survive_what_is_not_kept(gated_run: Path, tmp_path: Path) -> None:
    full = record_task(gated_run, "test", tmp_path / "full", Keep(hidden=True))
    lean = record_task(gated_run, "test", tmp_path / "lean")
    bare = record_task(gated_run, "test", tmp_path / "bare", Keep(logits=False))
    assert lean.hidden is None
    assert bare.logits is None
    for other in (lean, bare):
        for name in SIGNALS:
            assert np.array_equal(ls.signal(name, full), ls.signal(name, other), equal_nan=True), name
        assert np.array_equal(full.correct, other.correct)
        assert full.cross_entropy == pytest.approx(other.cross_entropy)


def test_the_same_recording_is_used_again_and_another_one_refused(gated_run: Path, tmp_path: Path) -> None:
    record_task(gated_run, "test", tmp_path / "recording")
    before = (tmp_path / "recording" / "manifest.json").stat().st_mtime_ns
    record_task(gated_run, "test", tmp_path / "recording")
    assert (tmp_path / "recording" / "manifest.json").stat().st_mtime_ns == before
    for change in ({"split": "validation"}, {"size": 10}, {"keep": Keep(hidden=True)}):
        arguments = {"split": "test", "keep": Keep(), "size": None} | change
        with pytest.raises(ls.UserError, match="another recording"):
            record_task(gated_run, arguments["split"], tmp_path / "recording", arguments["keep"], arguments["size"])


def test_a_broken_recording_is_made_again(gated_run: Path, tmp_path: Path) -> None:
    before = np.array(record_task(gated_run, "test", tmp_path / "recording").logits)
    file = tmp_path / "recording" / "trajectory.safetensors"
    file.write_bytes(file.read_bytes()[:-9])
    assert np.array_equal(record_task(gated_run, "test", tmp_path / "recording").logits, before)


def test_extrapolation_takes_what_fits_the_block(gated_run: Path, tmp_path: Path) -> None:
    harder = record_task(gated_run, "extrapolation", tmp_path / "harder", size=40)
    assert set(harder.difficulty) == {3, 4}  # block size 11: 2n + 3 tokens
    assert harder.split == "extrapolation"
    with pytest.raises(ls.UserError, match="block size is 11"):
        record_task(gated_run, "extrapolation", tmp_path / "too-hard", levels=range(3, 6))


def test_a_model_without_room_cannot_extrapolate(tmp_path: Path) -> None:
    train(tiny_settings("model.block_size=7"), tmp_path / "run", torch.device("cpu"))
    with pytest.raises(ls.UserError, match="larger model.block_size"):
        record_task(tmp_path / "run", "extrapolation", tmp_path / "harder")


def test_what_cannot_be_recorded_is_explained(gated_run: Path, tmp_path: Path) -> None:
    with pytest.raises(ls.UserError, match="no split 'dev'"):
        record_task(gated_run, "dev", tmp_path / "x")
    with pytest.raises(ls.UserError, match="no task of its own"):
        record_task(GOLDEN / "ouro-tiny", "test", tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_a_model_that_draws_in_evaluation_mode_is_rejected(gated_run: Path, tmp_path: Path) -> None:
    model = ls.load_model(gated_run)
    plain, rows = model.step, [[1, 2, 3], [2, 1, 3]]

    def noisy(state: LoopState) -> LoopState:
        after = plain(state)
        return replace(after, hidden=after.hidden + 1e-3 * torch.randn_like(after.hidden))

    ls.record_model(model, rows)
    model.step = noisy  # type: ignore[method-assign]
    with pytest.raises(ls.UserError, match="answers the same rows otherwise the second time"):
        ls.record_model(model, rows)
    with pytest.raises(ls.UserError, match="says something else when it is asked a second time"):
        ls.check_model(model)


@pytest.mark.parametrize("keep", [Keep(hidden=True), Keep(logits=False)])
def test_a_model_in_memory_is_recorded_like_its_checkpoint(keep: Keep, gated_run: Path, tmp_path: Path) -> None:
    examples, model = tiny_settings().task.split("test"), ls.load_model(gated_run)
    expected = record_task(gated_run, "test", tmp_path / "recording", keep)
    given = {"difficulty": examples.difficulty, "split": "test", "keep": keep}
    recorded = ls.record_model(model, examples.tokens, examples.lengths, examples.labels, **given)
    for name in ("logits", "labels", "difficulty", "hidden", "gate_logits", "predictions", "label_log_probs"):
        ours, theirs = getattr(recorded, name), getattr(expected, name)
        assert (ours is None) == (theirs is None)
        assert ours is None or np.array_equal(ours, theirs)
    assert set(recorded.signals) == set(expected.signals)
    for name, values in recorded.signals.items():
        assert np.array_equal(values, expected.signals[name], equal_nan=True)
    assert recorded.split == "test"
    assert recorded.provenance["weights_sha256"] == expected.provenance["weights_sha256"]


def test_a_model_in_memory_needs_no_labels_and_wrong_rows_are_explained(gated_run: Path) -> None:
    model = ls.load_model(gated_run)
    unlabelled = ls.record_model(model, [[0, 1, 2], [2, 1, 0]], [3, 2])
    assert unlabelled.labels is None
    assert unlabelled.difficulty is None
    alone = model.loops(torch.tensor([[2, 1]])).logits[:, 0, -1].detach().numpy()
    assert unlabelled.logits is not None
    assert np.allclose(unlabelled.logits[1], alone, atol=1e-6)
    for words, given in {
        "one number an example": ([[0, 1]], [2], [1, 1]),
        "must have the shape": ([0, 1],),
        "block size is 11": ([[0] * 12],),
    }.items():
        with pytest.raises(ls.UserError, match=words):
            ls.record_model(model, *given)
    with pytest.raises(ls.UserError, match="keep its logits"):
        ls.record_model(model, [[0, 1]], keep=Keep(logits=False))


def test_a_model_is_recorded_deeper_and_less_deep_than_it_was_trained(gated_run: Path, tmp_path: Path) -> None:
    """The loops that all have are the same. All that is left exits at the new last loop, live and in the replay."""
    usual = record_task(gated_run, "validation", tmp_path / "usual", Keep(hidden=True))
    assert record_task(gated_run, "validation", tmp_path / "usual", Keep(hidden=True), loops=3).provenance == (
        usual.provenance
    )
    requests, model = list(task_requests(tiny_settings().task.split("validation"))), ls.load_model(gated_run)
    for depth in (2, 5):
        recording = record_task(gated_run, "validation", tmp_path / str(depth), Keep(hidden=True), loops=depth)
        found = recording.provenance
        assert (recording.num_loops, found["loops"], found["trained_loops"]) == (depth, depth, 3)
        shared = min(depth, 3)
        for name in ("logits", "hidden", "gate_logits"):
            ours, theirs = getattr(recording, name), getattr(usual, name)
            assert np.allclose(ours[:, :shared], theirs[:, :shared], atol=1e-6), name
        halting = 1 / (1 + np.exp(-recording.gate_logits.astype(np.float64)))
        left = np.cumprod(1 - halting[:, :-1], axis=1)  # the logit of the old last loop counts from here on
        assert np.allclose(ls.signal("gate", recording)[:, :-1], 1 - left)
        assert (ls.signal("gate", recording)[:, -1] == 1).all()
        policy = certify(recording, RiskTarget(max_drop=0.9, confidence=0.5, readout="gate"))
        assert policy.guarantee is not None
        assert policy.guarantee.loops == depth
        with pytest.raises(ls.UserError, match=f"calibrated for {depth} loops, and here full depth is 3"):
            list(ls.run(model, requests, policy))
        gate = ls.ExitPolicy("gate", float(np.median(ls.signal("gate", recording)[:, depth - 2])))
        agreement = compare_with_replay(ls.run(model, requests, gate, num_loops=depth), gate, recording)
        assert agreement.differing == 0
        assert 1 <= agreement.average_loops <= depth
    assert agreement.average_loops > 3
    with pytest.raises(ls.UserError, match="another recording .of another number of loops"):
        record_task(gated_run, "validation", tmp_path / "2", Keep(hidden=True), loops=5)
