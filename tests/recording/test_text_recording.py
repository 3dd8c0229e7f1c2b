"""Recordings of texts: does every token stand beside what the model said of it, whatever ran with it?"""

import itertools
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_language import change_tokenizer

import loopscope as ls
from loopscope.models.tokenizer import read_documents, tokenize_documents
from loopscope.readouts.signals import SIGNALS
from loopscope.recording import text_recording
from loopscope.recording.text_recording import cut_documents, record_text
from loopscope.training.gate_fitting import GateSettings, fit_gate, gate_settings, write_gate
from loopscope.training.language_run import LanguageRun, train_tokenizer
from loopscope.trajectory import Trajectory

CONTEXT = 20


@pytest.fixture(scope="module")
def recording(tiny_ouro: LanguageRun, tmp_path_factory: pytest.TempPathFactory) -> Trajectory:
    out = tmp_path_factory.mktemp("recordings") / "validation"
    return record_text(tiny_ouro.folder, tiny_ouro.validation, "validation", out, context=CONTEXT, hidden=True)


def test_a_recording_is_what_the_model_says_of_every_next_token(recording: Trajectory, tiny_ouro: LanguageRun) -> None:
    model = ls.load_model(tiny_ouro.folder)
    documents = tokenize_documents(read_documents(tiny_ouro.validation), tiny_ouro.folder)
    row = 0
    for number, tokens in enumerate(documents[:40]):
        for start in range(0, len(tokens) - 1, CONTEXT - 1):
            window = torch.from_numpy(tokens[start : start + CONTEXT])
            out = model.loops(window[None])
            rows = slice(row, row + len(window) - 1)
            logits = out.logits[:, 0, :-1].transpose(0, 1).double()
            assert np.array_equal(recording.labels[rows], window[1:])
            assert (recording.sequences[rows] == number).all()
            said = logits.log_softmax(-1)[torch.arange(len(window) - 1), :, window[1:]]
            assert recording.label_log_probs[rows] == pytest.approx(said.numpy(), abs=1e-4)
            assert recording.gate_logits[rows] == pytest.approx(out.gate_logits[:, 0, :-1].T.numpy(), abs=1e-4)
            assert recording.hidden[rows] == pytest.approx(out.hidden[:, 0, :-1].transpose(0, 1).numpy(), abs=1e-4)
            for name in ("entropy", "top1", "margin", "kl", "logit_change"):
                expected = SIGNALS[name][1](logits.numpy())
                assert recording.signals[name][rows] == pytest.approx(expected, abs=1e-3, nan_ok=True), name
            clear = SIGNALS["margin"][1](logits.numpy()) > 1e-3
            assert np.array_equal(recording.predictions[rows][clear], logits.argmax(-1).numpy()[clear])
            row += len(window) - 1
    assert recording.num_examples == sum(len(tokens) - 1 for tokens in documents)
    assert max(map(len, documents[:40])) >= 2 * CONTEXT  # some are cut
    assert recording.logits is None
    assert recording.split == "validation"


def test_what_runs_together_does_not_matter(
    recording: Trajectory, tiny_ouro: LanguageRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_recording, "_MAX_LOGITS", 7 * 3 * 300)
    options = {"context": CONTEXT, "hidden": True, "limit": 300, "tokens": 1}
    alone = record_text(tiny_ouro.folder, tiny_ouro.validation, "validation", tmp_path / "alone", **options)
    together = recording.take(np.arange(300))
    for name in ("label_log_probs", "gate_logits", "hidden"):
        assert getattr(alone, name) == pytest.approx(getattr(together, name), abs=1e-4), name
    for name, values in together.signals.items():
        assert alone.signals[name] == pytest.approx(values, abs=1e-3, nan_ok=True), name
    assert (alone.predictions == together.predictions).mean() > 0.99
    assert np.array_equal(alone.labels, together.labels)


def test_windows_predict_every_token_but_the_first_once() -> None:
    documents = [np.arange(n) + 100 * number for number, n in enumerate((1, 7, 2, 15))]
    windows = cut_documents(documents, 5, None)
    assert windows.lengths.tolist() == [5, 3, 2, 5, 5, 5, 3]
    assert windows.documents.tolist() == [1, 1, 2, 3, 3, 3, 3]
    rows, labels, owners = windows.targets(np.arange(7))
    assert rows.tolist() == list(range(windows.decisions))
    assert labels.tolist() == [token for document in documents for token in document[1:]]
    assert (labels // 100 == owners).all()
    batches = list(windows.batches(10))
    assert sorted(np.concatenate(batches).tolist()) == list(range(7))
    assert all(windows.lengths[batch].max() * len(batch) <= 10 for batch in batches)
    tokens, lengths = windows.packed(np.array([3, 1]))
    assert (tokens.tolist(), lengths.tolist()) == ([300, 301, 302, 303, 304, 104, 105, 106], [5, 3])
    limited = cut_documents(documents, 5, 9)
    assert limited.decisions == 9
    assert limited.targets(np.arange(len(limited.lengths)))[1].tolist() == labels[:9].tolist()


def test_the_same_recording_is_used_again_and_another_one_refused(
    recording: Trajectory, tiny_ouro: LanguageRun, tmp_path: Path
) -> None:
    out = tmp_path / "recording"
    first = record_text(tiny_ouro.folder, tiny_ouro.validation, "test", out, limit=50)
    assert first.num_examples == 50
    before = (out / "manifest.json").stat().st_mtime_ns
    record_text(tiny_ouro.folder, tiny_ouro.validation, "test", out, limit=50)
    assert (out / "manifest.json").stat().st_mtime_ns == before
    for texts, split, limit in (
        (tiny_ouro.train, "test", 50),
        (tiny_ouro.validation, "train", 50),
        (tiny_ouro.validation, "test", 40),
    ):
        with pytest.raises(ls.UserError, match="another recording"):
            record_text(tiny_ouro.folder, texts, split, out, limit=limit)
    changed = shutil.copytree(tiny_ouro.folder, tmp_path / "changed")
    (changed / "hashes.json").unlink()  # of a checkpoint of somebody else's, which has none
    change_tokenizer(changed / "tokenizer.json")
    with pytest.raises(ls.UserError, match=r"holds another recording \(of another tokenization"):
        record_text(changed, tiny_ouro.validation, "test", out, limit=50)


def test_a_gate_fitted_to_a_text_becomes_the_checkpoint_s_own(tiny_ouro: LanguageRun, tmp_path: Path) -> None:
    """Ouro's stage II."""
    recording = record_text(tiny_ouro.folder, tiny_ouro.train, "train", tmp_path / "train", hidden=True, limit=400)
    assert gate_settings(recording, {}).beta == tiny_ouro.settings.objective.beta
    for pairing in ("next", "ouro"):
        gate = fit_gate(recording, GateSettings(objective="utility", pairing=pairing, steps=20))
        write_gate(gate, tiny_ouro.folder, tmp_path / pairing)
        again = record_text(tmp_path / pairing, tiny_ouro.train, "train", tmp_path / f"by-{pairing}", limit=400)
        assert np.array_equal(again.predictions, recording.predictions)
        assert again.gate_logits == pytest.approx(gate.halt_logits(recording.hidden), abs=1e-4)


def test_texts_are_read_as_documents(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\nstill one<|endoftext|>two<|endoftext|>\n")
    (tmp_path / "b.jsonl").write_text('{"text": "three"}\n{"text": "", "id": 4}\n')
    assert read_documents([tmp_path / "a.txt", tmp_path / "b.jsonl"]) == ["one\n\nstill one", "two", "three"]
    (tmp_path / "empty.txt").write_text(" <|endoftext|> ")
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"txt": "b"}\n')
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    for name, told in (
        ("empty.txt", "no text"),
        ("bad.jsonl", "Line 2 of .*bad.jsonl does not say what its `text` is; a line must be"),
        ("latin.txt", "UTF-8"),
        ("c.txt", "no file"),
    ):
        with pytest.raises(ls.UserError, match=told):
            read_documents([tmp_path / name])


def test_what_cannot_be_recorded_is_explained(tiny_ouro: LanguageRun, tmp_path: Path) -> None:
    texts = tiny_ouro.validation
    for context in (1, 65):
        with pytest.raises(ls.UserError, match="choose 2 to 64"):
            record_text(tiny_ouro.folder, texts, "test", tmp_path / "x", context=context)
    (tmp_path / "short.txt").write_text("7")
    with pytest.raises(ls.UserError, match="nothing to predict"):
        record_text(tiny_ouro.folder, [tmp_path / "short.txt"], "test", tmp_path / "x")
    shutil.copytree(tiny_ouro.folder, tmp_path / "foreign")
    words = ["".join(letters) for letters in itertools.permutations("abcdef", 5)]
    train_tokenizer([" ".join(words)], 400, 64, tmp_path / "foreign")
    (tmp_path / "foreign" / "hashes.json").unlink()
    (tmp_path / "words.txt").write_text(" ".join(words))
    with pytest.raises(ls.UserError, match="more tokens than the model's 300"):
        record_text(tmp_path / "foreign", [tmp_path / "words.txt"], "test", tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_a_readout_of_one_s_own_is_recorded_with_the_others(
    forgotten: None, tiny_ouro: LanguageRun, tmp_path: Path
) -> None:
    """Logits are gone afterwards, so its signal must be computed while they pass by."""
    record_text(tiny_ouro.folder, tiny_ouro.validation, "validation", tmp_path / "before", limit=300)
    ls.register_readout(ls.Readout("span", "above", "logits", lambda logits: np.ptp(logits.astype(float), axis=1)))
    ls.register_readout(ls.Readout("length", "below", "hidden", lambda hidden: np.linalg.norm(hidden, axis=1)))
    with pytest.raises(ls.UserError, match="without the signal span, length"):
        record_text(tiny_ouro.folder, tiny_ouro.validation, "validation", tmp_path / "before", limit=300)
    found = record_text(tiny_ouro.folder, tiny_ouro.validation, "validation", tmp_path / "after", limit=300)
    names = {"span", "length", "settling", "hidden_acceleration"}
    assert names <= set(found.signals)
    tokens = tokenize_documents(read_documents(tiny_ouro.validation), tiny_ouro.folder)[0]
    out = ls.load_model(tiny_ouro.folder).loops(torch.from_numpy(tokens)[None])
    logits, hidden = (each[:, 0, :-1].transpose(0, 1).detach().numpy() for each in (out.logits, out.hidden))
    plain = Trajectory(logits=logits, hidden=hidden)
    for name in names:
        ours = ls.signal(name, found)[: len(tokens) - 1]
        assert ours == pytest.approx(ls.signal(name, plain), rel=1e-2, abs=1e-2, nan_ok=True), name
    assert np.array_equal(ls.signal("patience", found)[: len(tokens) - 1], ls.signal("patience", plain))
    del ls.READOUTS["span"]
    ls.register_readout(ls.Readout("span", "above", "logits", lambda logits: logits.max(axis=1)))
    with pytest.raises(ls.UserError, match="'span' was recorded with another definition"):
        record_text(tiny_ouro.folder, tiny_ouro.validation, "validation", tmp_path / "after", limit=300)
