"""Text that is run live: as the replay has it where nothing else is seen, as it was run where later tokens see more."""

import json
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import loopscope as ls
from loopscope.analysis.held_out import check_policy
from loopscope.certify.calibration import certify
from loopscope.certify.live_candidates import candidate_p_values
from loopscope.certify.live_runs import LiveRuns
from loopscope.certify.risk_target import RiskTarget
from loopscope.certify.threshold_walk import Proof
from loopscope.cli import main
from loopscope.engine.generation import stream
from loopscope.engine.replay_agreement import close_calls
from loopscope.recording import live_text_recording
from loopscope.recording.live_text_recording import record_live
from loopscope.recording.text_recording import record_text
from loopscope.training.language_run import LanguageRun
from loopscope.trajectory import Trajectory

CONTEXT = 20
LAX = RiskTarget(max_drop=0.5, confidence=0.8, loss="disagreement", readout="margin")


@dataclass(frozen=True)
class Recorded:
    model: Path
    texts: dict[str, list[Path]]
    recordings: dict[str, Trajectory]

    def live(self, out: Path, cache: Any, what: Any, split: str = "validation", **options: Any) -> LiveRuns:
        return record_live(self.model, self.texts[split], self.recordings[split], out, cache, what, **options)


@pytest.fixture(scope="module")
def recorded(tiny_ouro: LanguageRun, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """A text to calibrate on, and other documents."""
    folder = tmp_path_factory.mktemp("live")
    documents = tiny_ouro.validation[0].read_text().split("<|endoftext|>")
    texts, recordings = {}, {}
    for split, part in (("validation", documents[:72:2]), ("test", documents[1:72:2])):
        texts[split] = [folder / f"{split}.txt"]
        texts[split][0].write_text("<|endoftext|>".join(part))
        recordings[split] = record_text(tiny_ouro.folder, texts[split], split, folder / split, context=CONTEXT)
    return Recorded(tiny_ouro.folder, texts, recordings)


@pytest.fixture(scope="module")
def runs(recorded: Recorded, tmp_path_factory: pytest.TempPathFactory) -> dict[str, LiveRuns]:
    folder = tmp_path_factory.mktemp("runs")
    return {cache: recorded.live(folder / cache, cache, LAX, candidates=3) for cache in ("full", "propagate")}


def test_with_the_exact_cache_a_live_run_is_the_replay(recorded: Recorded, runs: dict[str, LiveRuns]) -> None:
    found, recording = runs["full"], recorded.recordings["validation"]
    tested = recording.take(np.isin(recording.sequences, found.sequences))
    assert 0 < len(np.unique(found.sequences)) < len(np.unique(recording.sequences))  # a fifth proposed
    for place in range(len(found.thresholds)):
        policy = ls.ExitPolicy("margin", float(found.thresholds[place]))
        loops = policy.exit_loops(tested)
        clear = ~close_calls(policy, tested, np.full(len(loops), tested.num_loops), 1e-3)
        assert np.array_equal(found.loops[place][clear], loops[clear])
        said = tested.predicted[np.arange(len(loops)), found.loops[place] - 1]
        assert (found.predictions[place] == said).mean() > 0.99  # but for ties
        assert found.loops[place].min() < tested.num_loops
    assert np.array_equal(found.labels, tested.labels)


def test_with_propagate_it_is_what_the_model_says_of_each_document_alone(
    recorded: Recorded, runs: dict[str, LiveRuns]
) -> None:
    found, model = runs["propagate"], ls.load_model(recorded.model)
    tokens = {}  # of documents that are no longer than a window
    recording = recorded.recordings["validation"]
    windows = live_text_recording._windows(recorded.texts["validation"], recording, recorded.model)
    for start, length, document in zip(windows.starts, windows.lengths, windows.documents, strict=True):
        if (windows.documents == document).sum() == 1:
            tokens[int(document)] = windows.tokens[start : start + length]
    place = len(found.thresholds) - 1
    policy, checked = ls.ExitPolicy("margin", float(found.thresholds[place])), 0
    for document in np.unique(found.sequences)[:12].tolist():
        if document not in tokens:
            continue
        prompt = ls.Prompt(0, tokens[document][:1], tokens[document][1:])
        alone = list(stream(model, [prompt], policy, cache="propagate", with_logits=True))
        rows = found.sequences == document
        assert [token.loops for token in alone] == found.loops[place][rows].tolist()
        assert [int(token.logits.argmax()) for token in alone] == found.predictions[place][rows].tolist()
        checked += 1
    assert checked >= 3
    full = runs["full"]
    both = min(len(full.thresholds), len(found.thresholds))
    assert np.array_equal(full.thresholds[:both], found.thresholds[:both])  # the replay proposes the same
    assert (full.predictions[:both] != found.predictions[:both]).any()  # and later tokens see other keys


def test_a_guarantee_is_for_the_cache_in_which_the_text_was_run(
    recorded: Recorded, runs: dict[str, LiveRuns], tmp_path: Path
) -> None:
    model, recording = ls.load_model(recorded.model), recorded.recordings["test"]
    replayed = certify(recorded.recordings["validation"], LAX)
    assert replayed.scope.cache == "full"
    assert replayed.guarantee.sentence.endswith(", for next tokens along given documents, with the cache 'full'.")
    for cache, other in (("propagate", "full"), ("full", "propagate")):
        policy = certify(runs[cache], LAX)
        assert policy.scope.cache == cache
        assert policy.guarantee.sentence.endswith(f", for next tokens along given documents, with the cache '{cache}'.")
        assert (policy.guarantee.bound, policy.guarantee.order_seed) == ("betting", 0)
        assert sum(policy.certificate.exits.counts) == policy.guarantee.evidence[0].units
        policy.save(tmp_path / f"{cache}.json")
        loaded = ls.ExitPolicy.load(tmp_path / f"{cache}.json")
        assert loaded == policy
        with pytest.raises(ls.UserError, match=f"calibrated on text with the cache '{cache}'"):
            list(ls.stream(model, [ls.Prompt(0, np.array([1, 2]))], loaded, cache=other, max_new_tokens=2))
        with pytest.raises(ls.UserError, match=f"calibrated on text with the cache '{cache}'"):
            recorded.live(tmp_path / f"no-{cache}", other, loaded, "test")
        check = recorded.live(tmp_path / f"check-{cache}", cache, loaded, "test")
        assert check.contents.proposing is None
        held = check_policy(loaded, check)
        assert held.guarantee.verdict in ("kept", "not refuted")
        assert held.sequences == len(np.unique(recording.sequences))
        assert held.average_loops.value == pytest.approx(check_loops(check), abs=1e-4)
        with pytest.raises(ls.UserError, match="rests on this data"):
            check_policy(loaded, runs[cache])
        with pytest.raises(ls.UserError, match="can check a guarantee"):
            certify(replace(check, contents=runs[cache].contents.__class__(**{**fields(check), "split": None})), LAX)
        monitored = ls.Monitor(loaded).replay(check)
        assert (monitored.examples, monitored.audited) == (held.sequences, held.sequences)
    full = certify(runs["full"], LAX)
    assert check_policy(full, recording).guarantee is not None  # which a replay tells, too
    with pytest.raises(ls.UserError, match="calibrated on text with the cache 'propagate'"):
        check_policy(certify(runs["propagate"], LAX), recording)


def test_the_command_line_says_for_which_cache_and_holds_to_it(
    recorded: Recorded, runs: dict[str, LiveRuns], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*words: object, code: int = 0) -> str:
        assert main([str(word) for word in words]) == code, capsys.readouterr().err
        printed = capsys.readouterr()
        return " ".join((printed.err if code == 2 else printed.out).split())

    live, recording, policy = tmp_path / "live", tmp_path / "validation", tmp_path / "policy.json"
    runs["propagate"].save(live)
    recorded.recordings["validation"].save(recording)
    recorded.recordings["test"].save(tmp_path / "test")
    asked = ("--loss", "disagreement", "--max-drop", 0.5, "--confidence", 0.8, "--out", policy)
    assert "text with the cache 'full', which says nothing of the cache 'propagate'" in said(
        *("calibrate", recording, *asked, "--cache", "propagate"), code=2
    )
    assert "leave out --grid" in said("calibrate", live, *asked, "--grid", recording, code=2)
    assert "is of candidates of 'margin'" in said("calibrate", live, *asked, "--readout", "entropy", code=2)
    assert "not made with --in-expectation" in said("calibrate", live, *asked[:4], "--in-expectation", code=2)
    told = said("calibrate", live, *asked, "--cache", "propagate")
    assert "for next tokens along given documents, with the cache 'propagate'. All means are over sequences." in told
    assert "decides about next tokens of a text, with the cache 'propagate'" in told
    assert "calibrated on text with the cache 'propagate'" in said(
        "check", tmp_path / "test", "--policy", policy, code=2
    )
    written = ("generate", recorded.model, "1 and", "--policy", policy, "--max-new-tokens", 2)
    assert "write with that cache" in said(*written, "--cache", "full", code=2)
    assert said(*written) == said(*written, "--cache", "propagate")
    words = ("record", "live", recorded.model, *recorded.texts["test"], "--recording", tmp_path / "test")
    assert "leave out --max-drop" in said(*words, "--policy", policy, "--max-drop", 0.1, "--out", live, code=2)
    table = said(*words, "--policy", policy, "--out", tmp_path / "check")
    assert "run with the cache 'propagate'" in table
    assert "candidates" not in table
    assert "; means over tokens (calibrate and check have those over documents)" in table
    told = said("check", tmp_path / "check", "--policy", policy)
    assert re.search(r": on average over 36 held-out sequences, [\d.]+ % of the answers differ from full depth", told)
    assert "held-out tokens of 36 sequences; all means are over sequences; [ ]: 95 % intervals" in told
    told = json.loads(said("check", tmp_path / "check", "--policy", policy, "--json"))
    assert told["sequences"] == 36
    said("monitor", tmp_path / "check", "--policy", policy)
    with pytest.raises(ls.UserError, match="is a live run, not a recording"):
        Trajectory.load(live)


def fields(runs: LiveRuns) -> dict[str, Any]:
    return {name: getattr(runs.contents, name) for name in runs.contents.__struct_fields__}


def check_loops(runs: LiveRuns) -> float:
    """On average over documents."""
    return float(np.mean([runs.loops[0][runs.sequences == each].mean() for each in np.unique(runs.sequences)]))


def test_the_first_candidate_that_is_not_proven_is_the_last_that_is_run(recorded: Recorded, tmp_path: Path) -> None:
    strict = RiskTarget(max_drop=0.2, confidence=0.9, loss="disagreement", readout="margin")
    found = recorded.live(tmp_path / "out", "propagate", strict, candidates=4)
    assert len(found.thresholds) <= found.contents.planned
    p = candidate_p_values(found, strict, Proof(bound="betting", seed=0))
    assert (p[:-1] <= 0.1).all()
    assert len(found.thresholds) == found.contents.planned or p[-1] > 0.1
    assert (np.diff(found.loops.mean(axis=1)) < 0).all()  # from cautious to bold


def test_an_interrupted_run_goes_on_and_an_identical_one_is_used_again(
    recorded: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_text_recording, "_BATCHES_TOGETHER", 1)
    options = {"candidates": 2, "batch_size": 16}
    recorded.live(tmp_path / "whole", "propagate", LAX, **options)

    def stop(done: int, total: int, _: str) -> None:
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        recorded.live(tmp_path / "out", "propagate", LAX, **options, progress=stop)
    assert len(list((tmp_path / "out.unfinished").glob("*.safetensors"))) == 4
    with pytest.raises(ls.UserError, match="holds another unfinished"):
        recorded.live(tmp_path / "out", "latest", LAX, **options)
    recorded.live(tmp_path / "out", "propagate", LAX, **options)
    assert not (tmp_path / "out.unfinished").exists()
    for name in ("runs.safetensors", "rule.json", "manifest.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    monkeypatch.setattr(live_text_recording, "load_model", None)  # nothing is run again
    recorded.live(tmp_path / "out", "propagate", LAX, **options)
    for changed, words in (
        (("latest", LAX), "of another cache"),
        (("propagate", msgspec.structs.replace(LAX, max_drop=0.55)), "of another risk target"),
    ):
        with pytest.raises(ls.UserError, match=rf"holds another live run \({words}\); choose another --out"):
            recorded.live(tmp_path / "out", *changed, **options)


def test_what_is_not_the_text_or_the_model_of_the_recording_is_refused(recorded: Recorded, tmp_path: Path) -> None:
    recording, out = recorded.recordings["validation"], tmp_path / "out"
    with pytest.raises(ls.UserError, match="test split"):
        recorded.live(out, "propagate", LAX, "test")
    other = shutil.copytree(recorded.model, tmp_path / "other", ignore=shutil.ignore_patterns("hashes.json"))
    changed = replace(recording, provenance={**recording.provenance, "weights_sha256": "a" * 64})
    with pytest.raises(ls.UserError, match="another model: its weights differ"):
        record_live(other, recorded.texts["validation"], changed, out, "propagate", LAX)
    stopper = ls.fit_stopper(recording, kind="classifier")
    with pytest.raises(ls.UserError, match="fitted to the validation split"):
        recorded.live(out, "propagate", LAX, gates={"own": stopper})
    bare = replace(recording, provenance={})
    with pytest.raises(ls.UserError, match="give a recording that `loopscope record text` made"):
        record_live(recorded.model, recorded.texts["validation"], bare, out, "propagate", LAX)
    for name in ("in_expectation", "per_difficulty", "unseen", "distinct"):
        with pytest.raises(ls.UserError, match=f"not made with --{name.replace('_', '-')}"):
            recorded.live(out, "propagate", RiskTarget(max_drop=0.5, **{name: True}))
    assert not out.exists()


def test_a_live_run_on_disk_is_read_as_it_was_made(runs: dict[str, LiveRuns], tmp_path: Path) -> None:
    made = runs["propagate"]
    made.save(tmp_path / "copy")
    again = LiveRuns.load(tmp_path / "copy")
    assert again.run_sha256 == made.run_sha256
    assert again.contents == made.contents
    assert certify(again, LAX) == certify(made, LAX)
    with pytest.raises(ls.UserError, match="of other policies"):
        again.find(replace(made.policy(0), threshold=123.0))
    for spoilt in ({"loops": made.loops[:, :-1]}, {"loops": made.loops + 9}, {"thresholds": made.thresholds + 1}):
        with pytest.raises(ls.UserError, match="live run"):
            replace(made, **spoilt)
