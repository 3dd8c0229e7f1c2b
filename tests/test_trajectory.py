"""Trajectories: saved and loaded they are the same, and what cannot be one is refused with a sentence."""

import json
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from mmap import mmap
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import random_trajectory
from safetensors.numpy import load_file

import loopscope as ls
from loopscope.artifacts import MANIFEST, write_manifest
from loopscope.threshold_grids import fine_grid
from loopscope.trajectory import EXAMPLES, RECORDING, RECORDING_SCHEMA, concatenate


def test_saved_and_loaded_is_the_same(tmp_path: Path) -> None:
    texts, norms = [f"+ {i} 1" for i in range(200)], np.arange(200 * 5).reshape(200, 5) + 1
    more: dict[str, object] = {"seen": np.arange(200) % 2 == 0, "norms": norms, "sequences": np.arange(200) // 4}
    before = random_trajectory(split="test", examples=texts, provenance={"from": "here"}, **more)
    before.save(tmp_path / "recording")
    after = ls.Trajectory.load(tmp_path / "recording")
    for name in ("logits", "labels", "difficulty", "hidden", "gate_logits", "seen", "norms", "sequences"):
        assert np.array_equal(getattr(before, name), getattr(after, name)), name
        assert getattr(before, name).dtype == getattr(after, name).dtype
    assert (after.split, after.examples, after.provenance["from"]) == ("test", texts, "here")
    assert after.take(np.array([7, 3])).norms.tolist() == norms[[7, 3]].tolist()
    assert after.take(np.arange(8)).sequences.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert before.same_data(after)
    assert is_mapped(after.hidden)
    assert is_mapped(after.logits)
    assert "200 examples, 4 loops, split='test'" in repr(after)
    assert set(load_file(tmp_path / "recording" / "hidden.safetensors")) == {"hidden"}


def is_mapped(array: np.ndarray | None) -> bool:
    """Whether the numbers lie in a file, not in memory of their own."""
    owner: object = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    return isinstance(owner, mmap)


def test_signals_and_predictions_in_place_of_logits(tmp_path: Path) -> None:
    full = random_trajectory()
    names = ("entropy", "top1", "margin", "kl", "logit_change")
    bare = ls.Trajectory(
        labels=full.labels,
        predictions=full.predicted,
        label_log_probs=-full.cross_entropy,
        signals={name: ls.signal(name, full) for name in names},
    )
    bare.save(tmp_path / "bare")
    bare = ls.Trajectory.load(tmp_path / "bare")
    assert np.array_equal(bare.correct, full.correct)
    assert np.array_equal(bare.cross_entropy, full.cross_entropy)
    other = random_trajectory(seed=1)
    for name in (*names, "fixed", "oracle"):
        assert np.array_equal(ls.sweep(name, bare, other).accuracy, ls.sweep(name, full, other).accuracy)
    taken = bare.take(np.arange(0, 200, 3))
    assert np.array_equal(ls.signal("kl", taken), ls.signal("kl", full)[::3], equal_nan=True)
    with pytest.raises(ls.UserError, match="no hidden states"):
        ls.signal("hidden_change", bare)


def test_derived_quantities_by_hand_of_arrays_that_are_read_only() -> None:
    logits = np.log([[[0.1, 0.6, 0.3], [0.5, 0.25, 0.25]]])
    trajectory = ls.Trajectory(logits=logits, labels=[0])
    assert trajectory.predicted.tolist() == [[1, 0]]
    assert trajectory.correct.tolist() == [[False, True]]
    assert trajectory.cross_entropy == pytest.approx(-np.log([[0.1, 0.5]]))
    assert (trajectory.num_examples, trajectory.num_loops) == (1, 2)
    with pytest.raises(ValueError, match="read-only"):
        trajectory.logits[0] = 1
    logits[0] = 1  # the source stays free


def test_a_recording_on_disk_of_an_unknown_split_is_refused_in_a_sentence(tmp_path: Path) -> None:
    made = random_trajectory(split="test")
    object.__setattr__(made, "split", "tset")  # as an earlier version allowed
    made.save(tmp_path / "recording")
    with pytest.raises(ls.UserError, match=r"/recording: There is no split 'tset' \(did you mean 'test'\?\)"):
        ls.Trajectory.load(tmp_path / "recording")


@pytest.mark.parametrize(
    "data", [b'["\xff"]', b'["a"', b"[" * 100_000 + b"]" * 100_000, b'{"a": 1}', b"[1]"], ids=lambda data: data[:6]
)
def test_texts_of_another_shape_are_refused_in_a_sentence(data: bytes, tmp_path: Path) -> None:
    """With hashes that are right: who wrote them meant it so."""
    folder = tmp_path / "recording"
    random_trajectory(rows=3, examples=["a", "b", "c"]).save(folder)
    manifest = json.loads((folder / MANIFEST).read_bytes())
    (folder / EXAMPLES).write_bytes(data)
    kept = manifest["contents"], manifest["provenance"], list(manifest["files"])
    write_manifest(folder, RECORDING, RECORDING_SCHEMA, *kept)
    with pytest.raises(ls.UserError, match=r"recording/examples\.json[^\n]{10,200}$"):
        ls.Trajectory.load(folder)


def test_what_only_looks_odd_is_not_warned_of() -> None:
    """Warnings are errors here. Positive numbers are no shares, and a gate may be undecided."""
    draws = np.random.default_rng(0)
    ls.Trajectory(logits=draws.random((200, 4, 5)), labels=[0] * 200)
    logits = np.repeat(draws.normal(size=(200, 1, 5)), 4, axis=1)
    logits[7, 3] += 1
    ls.Trajectory(logits=logits, labels=[0] * 200)
    gate = draws.normal(size=(200, 4))
    for honest in (gate, np.abs(gate), np.full((200, 4), 0.5), 0.1 * gate.clip(0, 1)):
        random_trajectory(gate_logits=honest)
    random_trajectory(rows=20, gate_logits=np.linspace(0, 1, 80).reshape(20, 4))  # too few to tell
    ls.Trajectory(logits=logits.astype(np.float16), predictions=logits.argmax(axis=-1))  # rounded


def test_what_can_be_converted_exactly_is() -> None:
    seen = np.arange(200) % 3 == 0
    expected = random_trajectory(seen=seen)
    for given in (seen.astype(int), seen.astype(float), seen.tolist()):
        assert np.array_equal(random_trajectory(seen=given).unseen().logits, expected.unseen().logits)
        assert random_trajectory(seen=given).sha256 == expected.sha256
    assert random_trajectory(difficulty=seen).difficulty.dtype == np.int64
    assert random_trajectory(labels=np.zeros(200, np.uint8)).labels.dtype == np.int64
    assert expected.take(seen).num_examples == expected.take(np.flatnonzero(seen)).num_examples == seen.sum()


def test_tensors_of_a_model_are_taken_as_they_come() -> None:
    logits, gate = torch.randn(20, 4, 5).bfloat16(), torch.randn(20, 4, dtype=torch.float64, requires_grad=True)
    made = ls.Trajectory(logits=logits.requires_grad_(), gate_logits=gate)
    assert (made.logits.dtype, made.gate_logits.dtype) == (np.float32, np.float64)
    np.testing.assert_array_equal(made.logits, logits.detach().float().numpy())
    np.testing.assert_array_equal(made.gate_logits, gate.detach().numpy())


def test_labels_may_be_missing(tmp_path: Path) -> None:
    trajectory = random_trajectory(labels=None)
    for name in ("correct", "cross_entropy"):
        with pytest.raises(ls.UserError, match="has no labels"):
            getattr(trajectory, name)
    trajectory.save(tmp_path / "unlabelled")
    again = ls.Trajectory.load(tmp_path / "unlabelled")
    assert again.labels is None
    assert again.same_data(trajectory)
    assert not again.same_data(random_trajectory())


def test_the_hash_is_that_of_the_content(tmp_path: Path) -> None:
    trajectory = random_trajectory(seed=1)
    trajectory.save(tmp_path / "a")
    assert ls.Trajectory.load(tmp_path / "a").sha256 == trajectory.sha256 == random_trajectory(seed=1).sha256
    assert trajectory.take(np.arange(200)).sha256 == trajectory.sha256
    others = [random_trajectory(seed=2), trajectory.take(np.arange(199)), random_trajectory(seed=1, labels=None)]
    assert trajectory.sha256 not in {other.sha256 for other in others}


def test_parts_that_are_joined_are_the_whole() -> None:
    norms = np.random.default_rng(0).integers(1, 20, (200, 5))
    texts = [str(number) for number in range(200)]
    signals = {"kl": np.ones((200, 4))}
    provenance = {"weights_sha256": "a", "examples": 200, "shard": 0}
    whole = random_trajectory(norms=norms, examples=texts, signals=signals, split="test", provenance=provenance)
    parts = [whole.take(np.arange(0, 60)), whole.take(np.arange(60, 200))]
    parts[1] = replace(parts[1], provenance={**provenance, "shard": 1})
    joined = concatenate(parts)
    assert joined.sha256 == whole.sha256
    assert np.array_equal(joined.hidden, whole.hidden)
    assert (joined.examples, joined.split) == (texts, "test")
    assert joined.provenance == {"weights_sha256": "a", "examples": 200}
    for changes, sha in (
        ({"provenance": {"weights_sha256": "b"}}, "weights"),
        ({"split": "validation"}, "split"),
        ({"hidden": None}, "arrays"),
        ({"signals": {}}, "signals"),
    ):
        with pytest.raises(ls.UserError, match=f"differ in their {sha}"):
            concatenate([parts[0], replace(parts[1], **changes)])


def test_the_same_split_of_another_benchmark_is_other_data() -> None:
    def of(seed: int, split: str = "test", **provenance: str) -> ls.Trajectory:
        return random_trajectory(seed=seed, split=split, provenance={"weights_sha256": "0" * 64, **provenance})

    ours = of(0, benchmark="mmlu")
    assert ours.same_data(of(1, benchmark="mmlu"))  # part of the same split, perhaps: never to be told apart
    assert not ours.same_data(of(1, benchmark="arc_easy"))
    assert not ours.same_data(of(1, "validation", benchmark="mmlu"))
    assert not ours.same_data(of(1))
    assert not ours.same_data(of(1, benchmark="mmlu", weights_sha256="1" * 64))
    assert ours.same_data(of(0, "validation", benchmark="arc_easy"))  # the numbers say so
    assert of(0, text_sha256="a").same_data(of(1, text_sha256="a"))
    assert not of(0, text_sha256="a").same_data(of(1, text_sha256="b"))


def test_who_reads_while_it_is_replaced_gets_one_or_the_other(tmp_path: Path) -> None:
    """Never the logits of one with the labels of another."""
    ours = [
        ls.Trajectory(
            logits=np.full((40, 3, 4), value) + np.arange(4.0), labels=np.full(40, value), examples=[str(value)] * 40
        )
        for value in (0, 1)
    ]
    ours[0].save(tmp_path / "recording")
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(lambda: [ours[number % 2].save(tmp_path / "recording") for number in range(20)])
        while not writing.done():
            found = ls.Trajectory.load(tmp_path / "recording")
            value = int(found.labels[0])
            assert (found.logits[:, :, 0] == value).all()
            assert found.examples[0] == str(value)
        assert len(writing.result()) == 20


def test_attached_signals_leave_what_was_computed() -> None:
    recording = random_trajectory(examples=[f"{row}" for row in range(200)])
    margin, grid, keys = ls.signal("margin", recording), fine_grid("margin", recording), recording.row_keys
    one, two = np.zeros((200, 4)), np.tile([0.0, 0.1, 0.2, 1.0], (200, 1))
    attached = recording.with_signals({"gate:a": one}, {"fitted_on": {}})
    assert ls.signal("margin", attached) is margin
    assert attached.row_keys is keys
    assert np.array_equal(fine_grid("margin", attached), grid)
    assert (attached.provenance, recording.provenance) == ({"fitted_on": {}}, {})
    assert fine_grid("gate:a", attached).max() == np.inf > fine_grid("gate:a", attached)[:-1].max()
    again = attached.with_signals({"gate:a": two}, {})
    assert np.array_equal(ls.signal("gate:a", again), two)
    assert not np.array_equal(fine_grid("gate:a", again), fine_grid("gate:a", attached))
    assert "gate:a" not in recording.signals


def test_cross_entropies_take_little_memory() -> None:
    """Not several copies of all logits, in double precision."""
    recording = random_trajectory(rows=50_000, loops=2, classes=40, hidden=None)
    assert recording.logits is not None
    tracemalloc.start()
    entropies = recording.cross_entropy
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < entropies.nbytes + 5 * 8 * (1 << 20)
    assert most < recording.logits.size * 8
    first = recording.take(np.arange(100)).cross_entropy
    assert np.array_equal(entropies[:100], first)
