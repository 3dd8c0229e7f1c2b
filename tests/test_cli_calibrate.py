"""`loopscope calibrate` and its policy file: made, checked, run, reported, measured; and what is refused."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import random_trajectory
from scipy.stats import sem
from test_cli import run

import loopscope as ls
from loopscope.cli.calibrating import policies_by_model
from loopscope.models.checkpoint import weights_sha256

MILD = ("--max-drop", 0.3, "--confidence", 0.8)
ASKED = ("--max-drop", 0.1, "--confidence", 0.8, "--readout", "margin")


@pytest.fixture(scope="module")
def mine(gated_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with three recordings."""
    folder = tmp_path_factory.mktemp("calibrate") / "mine"
    shutil.copytree(gated_run, folder, ignore=shutil.ignore_patterns("recordings"))
    for split in ("train", "validation", "test"):
        assert run("record", folder, "--split", split) == 0
    return folder


@pytest.fixture(scope="module")
def policy(mine: Path) -> Path:
    """Thresholds from the train split, tested on all of validation: some examples exit early, some do not."""
    assert (
        run("calibrate", of(mine, "validation"), *ASKED, "--grid", of(mine, "train"), "--out", mine / "mine.json") == 0
    )
    return mine / "mine.json"


@pytest.fixture(scope="module")
def foreign(policy: Path) -> Path:
    """The same for another model."""
    replace(ls.ExitPolicy.load(policy), model="0" * 64).save(policy.with_name("foreign.json"))
    return policy.with_name("foreign.json")


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")


def of(run: Path, split: str) -> Path:
    return run / "recordings" / split


def told(policy: Path) -> dict[str, Any]:
    return json.loads(policy.read_bytes())


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The one sentence with which a command ends."""
    capsys.readouterr()
    assert run(*words) == 2, words
    out, err = capsys.readouterr()
    assert out == ""
    sentence = err.splitlines()[-1]
    assert sentence.startswith("loopscope: ")
    assert sentence.endswith(".")
    return sentence


def crafted(early_is_right: bool, split: str, **changes: object) -> ls.Trajectory:
    """400 examples whose margins are random: full depth is right, the two loops before it always or never."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 400)
    early = labels if early_is_right else 1 - labels
    logits = np.zeros((400, 3, 2))
    answers = np.stack((early, early, labels), axis=1)[:, :, None]
    np.put_along_axis(logits, answers, rng.uniform(0.1, 1, (400, 3, 1)), axis=2)
    fields = {"logits": logits, "labels": labels, "provenance": {"weights_sha256": "a" * 64}}
    return ls.Trajectory(**{**fields, **changes}, split=split)  # type: ignore[arg-type]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Two recordings of 20 sequences, 20 tokens each."""
    for split, right in (("validation", True), ("test", False)):
        crafted(right, split, sequences=np.arange(400) // 20).save(tmp_path / split)
    return tmp_path


def test_from_a_recording_to_a_promise_and_to_answers(
    mine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, examples = tmp_path / "policy.json", tmp_path / "examples.txt"
    assert run("calibrate", of(mine, "validation"), *ASKED, "--out", file) == 0
    out, err = capsys.readouterr()
    assert f"{file}: With probability 80 % over the calibration draw, exiting early costs at most 10 % accuracy" in out
    assert all(words in out for words in ("margin at ", "of 96 examples", "(at most 0.2)", "loops to expect"))
    assert "add --unseen" in err
    assert "add --distinct" in err
    recorded = ls.Trajectory.load(of(mine, "test"))
    loops = ls.ExitPolicy.load(file).exit_loops(recorded)
    assert len(set(loops)) > 1
    assert run("evaluate", of(mine, "test"), "--policy", file) == 0
    out = capsys.readouterr().out
    assert f"{loops.mean():.3f} [" in out
    assert "150 held-out examples are wrong where full depth is right" in out
    assert run("evaluate", of(mine, "test"), "--policy", file, "--json") == 0
    held = json.loads(capsys.readouterr().out)
    early, last = recorded.correct[np.arange(150), loops - 1], recorded.correct[:, -1]
    (risk,) = held["promise"]["risks"]
    assert held["average_loops"]["value"] == pytest.approx(loops.mean())
    assert held["drop"]["value"] == pytest.approx(last.mean() - early.mean())
    assert risk["loss"] == pytest.approx((last & ~early).mean())
    assert risk["low"] < risk["loss"] < risk["high"]
    assert held["promise"]["verdict"] == ("kept" if risk["loss"] <= 0.1 else "not refuted")
    assert recorded.examples is not None
    examples.write_text("\n".join(recorded.examples))
    assert run("run", mine, examples, "--policy", file) == 0
    out, err = capsys.readouterr()
    assert [json.loads(line)["loop"] for line in out.splitlines()] == loops.tolist()
    assert f"150 examples under margin at {told(file)['threshold']:.6g}" in err


def test_the_file_says_what_the_promise_rests_on(mine: Path, policy: Path) -> None:
    data, recording = told(policy), ls.Trajectory.load(of(mine, "validation"))
    promise = data["promise"]
    assert data["schema_version"] == 2
    assert data["model"] == weights_sha256(mine) == recording.provenance["weights_sha256"]
    assert (promise["loss"], promise["max_drop"], promise["confidence"], promise["loops"]) == ("gap", 0.1, 0.8, 3)
    levels, counts = np.unique(recording.difficulty, return_counts=True)
    mix = {f"{level:g}": int(count) for level, count in zip(levels, counts, strict=True)}
    assert promise["recording"] == promise["tested"]["sha256"] == recording.sha256
    assert (promise["tested"]["split"], promise["tested"]["examples"]) == ("validation", 120)
    assert promise["tested"]["difficulty"] == mix
    assert promise["grid"]["sha256"] == ls.Trajectory.load(of(mine, "train")).sha256
    assert (promise["grid"]["split"], promise["grid"]["examples"]) == ("train", 600)
    loops = ls.ExitPolicy.load(policy).exit_loops(recording)
    assert promise["average_loops"] == pytest.approx(loops.mean())
    half = 1.96 * sem(loops)
    assert promise["average_loops_interval"] == pytest.approx([loops.mean() - half, loops.mean() + half], abs=1e-4)
    (evidence,) = promise["evidence"]
    lost = recording.correct[:, -1] & ~recording.correct[np.arange(120), loops - 1]
    assert (evidence["units"], evidence["loss"]) == (120, pytest.approx(lost.mean()))
    assert evidence["p_value"] <= promise["level"] == 0.2


def test_without_a_grid_a_fifth_is_set_aside(mine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("calibrate", of(mine, "validation"), *MILD, "--json")
    assert run(*words, "--out", tmp_path / "a.json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == told(tmp_path / "a.json")
    promise = printed["promise"]
    assert (promise["tested"]["examples"], promise["grid"]["examples"]) == (96, 24)
    assert len({promise["recording"], promise["tested"]["sha256"], promise["grid"]["sha256"]}) == 3
    assert {"fixed", "gate", "margin", "kl"} <= set(promise["candidates"])
    assert "oracle" not in promise["candidates"]
    assert promise["level"] == pytest.approx(0.2 / len(promise["finalists"]))
    assert run(*words, "--out", tmp_path / "same.json") == 0
    assert (tmp_path / "same.json").read_bytes() == (tmp_path / "a.json").read_bytes()
    assert run(*words, "--out", tmp_path / "b.json", "--seed", 1) == 0
    assert told(tmp_path / "b.json")["promise"]["grid"]["sha256"] != promise["grid"]["sha256"]


def test_a_promise_on_average(mine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "policy.json"
    assert run("calibrate", of(mine, "validation"), "--max-drop", 0.3, "--in-expectation", "--out", file) == 0
    assert "On average over calibration draws, exiting early costs at most 30 %" in capsys.readouterr().out
    promise = told(file)["promise"]
    assert promise["confidence"] is promise["level"] is promise["evidence"][0]["p_value"] is None
    assert run("evaluate", of(mine, "test"), "--policy", file) == 0
    assert "Kept: " in capsys.readouterr().out
    with pytest.raises(SystemExit):
        run("calibrate", of(mine, "validation"), "--confidence", 0.9, "--in-expectation", "--out", tmp_path / "x.json")


def test_a_promise_for_every_difficulty(mine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "policy.json"
    assert run("calibrate", of(mine, "validation"), *MILD, "--per-difficulty", "--out", file) == 0
    out = capsys.readouterr().out
    assert "at every difficulty" in out
    assert "observed loss, difficulty 2" in out
    promise = told(file)["promise"]
    assert {str(each["difficulty"]): each["units"] for each in promise["evidence"]} == {
        f"{float(level)}": count for level, count in promise["tested"]["difficulty"].items()
    }
    assert all(each["p_value"] <= promise["level"] for each in promise["evidence"])
    assert run("evaluate", of(mine, "test"), "--policy", file) == 0
    out = capsys.readouterr().out
    assert "loss at difficulty 1" in out
    assert ", the worst, are wrong" in out


def test_a_promise_for_new_inputs(mine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, recording = tmp_path / "policy.json", ls.Trajectory.load(of(mine, "validation"))
    assert run("calibrate", of(mine, "validation"), *MILD, "--unseen", "--distinct", "--out", file) == 0
    out, err = capsys.readouterr()
    assert "for inputs that training did not have" in out
    assert err == ""
    promise = told(file)["promise"]
    assert recording.examples is not None
    new = {text for text, seen in zip(recording.examples, recording.seen, strict=True) if not seen}
    assert promise["tested"]["examples"] + promise["grid"]["examples"] == len(new) < 60
    assert promise["tested"]["seen"] == 0
    assert promise["recording"] == recording.sha256
    held_out = ls.Trajectory.load(of(mine, "test"))
    assert run("evaluate", of(mine, "test"), "--policy", file, "--json") in (0, 1)
    assert json.loads(capsys.readouterr().out)["examples"] == held_out.unseen().distinct().num_examples


def test_without_labels_answers_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bare, held_out, file = tmp_path / "bare", tmp_path / "held-out", tmp_path / "policy.json"
    crafted(True, "validation", labels=None).save(bare)
    crafted(True, "test", labels=None).save(held_out)
    words = ("calibrate", bare, "--max-drop", 0.05, "--out", file)
    assert "has no labels" in refused(capsys, *words, "--loss", "gap")
    assert not file.exists()
    assert run(*words, "--loss", "disagreement") == 0
    assert "exiting early changes at most 5 % of the answers." in capsys.readouterr().out
    assert told(file)["promise"]["full_depth_accuracy"] is None
    assert "rests on this data" in refused(capsys, "evaluate", held_out, "--policy", file)  # whatever its split's name
    crafted(False, "test", labels=None).save(held_out)
    assert run("evaluate", held_out, "--policy", file) == 1
    assert "Broken: 100.00 % of 400 held-out examples differ from full depth" in capsys.readouterr().out


def test_a_broken_promise_is_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    crafted(True, "validation").save(tmp_path / "validation")
    crafted(False, "test").save(tmp_path / "test")
    file = tmp_path / "policy.json"
    assert run("calibrate", tmp_path / "validation", "--max-drop", 0.05, "--readout", "margin", "--out", file) == 0
    capsys.readouterr()
    assert run("evaluate", tmp_path / "test", "--policy", file) == 1
    out = capsys.readouterr().out
    assert "Broken: 100.00 % of 400 held-out examples are wrong where full depth is right" in out
    assert "promised: at most 5 %." in out
    assert run("evaluate", tmp_path / "test", "--policy", file, "--json") == 1
    assert json.loads(capsys.readouterr().out)["promise"]["verdict"] == "broken"
    assert run("evaluate", tmp_path / "test", "--policy", file, "--any-model") == 0


def test_sequences_are_counted_not_their_tokens(texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("calibrate", texts / "validation", "--readout", "margin", "--out", texts / "policy.json")
    sentence = refused(capsys, *words, "--max-drop", 0.05)
    assert "takes 59 tested sequences, and there are 16; record 74 in all" in sentence
    assert run(*words, "--max-drop", 0.2) == 0
    out = capsys.readouterr().out
    assert "on average over sequences" in out
    assert "of 16 sequences, p = 0.028 (at most 0.05)" in out
    assert run("evaluate", texts / "test", "--policy", texts / "policy.json", "--json") == 1
    held = json.loads(capsys.readouterr().out)
    (risk,) = held["promise"]["risks"]
    assert (held["examples"], held["sequences"], risk["units"], risk["loss"]) == (400, 20, 20, pytest.approx(1))


def test_of_few_sequences_the_risk_is_uncertain(texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = texts / "policy.json"
    assert run("calibrate", texts / "validation", "--readout", "margin", "--max-drop", 0.2, "--out", file) == 0
    capsys.readouterr()
    assert run("evaluate", texts / "test", "--policy", file, "--json") == 1
    (risk,) = json.loads(capsys.readouterr().out)["promise"]["risks"]
    assert risk["low"] == pytest.approx(0.83, abs=0.01)  # all of 20 are lost: as Clopper-Pearson's


def test_a_promise_for_sequences_is_not_checked_on_loose_examples(
    texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = texts / "policy.json"
    assert run("calibrate", texts / "validation", "--readout", "margin", "--max-drop", 0.2, "--out", file) == 0
    crafted(False, "test").save(texts / "loose")
    capsys.readouterr()
    run("evaluate", texts / "loose", "--policy", file)
    assert "400 held-out sequences" not in capsys.readouterr().out  # there are none


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--max-drop", 0.01, "--confidence", 0.95), "takes 299 tested examples, and there are 96; record 374 in all"),
        (("--max-drop", 0.01, "--in-expectation"), "takes 99 tested examples, and there are 96; record 124 in all"),
        (("--max-drop", 0.06, "--per-difficulty"), "takes 49 tested examples of difficulty 2, and there are 47"),
        (("--max-drop", 0.01, "--confidence", 0.2, "--readout", "margin"), "so no number of them would prove it"),
        ((*MILD, "--readout", "oracle"), "oracle needs the labels"),
        ((*MILD, "--readout", "mood"), "no readout 'mood'"),
        ((*MILD, "--readout", "gate:mine"), "give the fitted gate with --gate"),
        ((*MILD, "--gate", "nowhere"), "There is no folder"),
        ((*MILD, "--grid", "nowhere"), "There is no folder"),
        (("--max-drop", 0), "between 0 and 1"),
        (("--max-drop", "nan"), "between 0 and 1"),
        (("--max-drop", 0.3, "--confidence", 1), "between 0 and 1"),
    ],
)
def test_what_cannot_be_promised_is_one_sentence_and_no_file(
    words: tuple[object, ...], sentence: str, mine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = refused(capsys, "calibrate", of(mine, "validation"), *words, "--out", tmp_path / "policy.json")
    assert sentence in found, found
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [("--seed", -1), ("--max-drop", 0.1, "--confidence", 0.9999999999999)])
def test_extreme_numbers_are_no_crash(
    words: tuple[object, ...], mine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = run("calibrate", of(mine, "validation"), "--max-drop", 0.3, *words, "--out", tmp_path / "policy.json")
    except SystemExit as stop:  # the parser's own refusal
        code = stop.code
    assert code == 2


def test_a_file_is_never_overwritten(mine: Path, policy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = policy.read_bytes()
    assert "is there already" in refused(capsys, "calibrate", of(mine, "validation"), *MILD, "--out", policy)
    assert policy.read_bytes() == before


def test_data_have_one_part_only(mine: Path, policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Held-out data do not calibrate, tested data do not propose, and neither says whether the promise is kept."""
    out = ("--out", tmp_path / "x.json")
    assert "test split" in refused(capsys, "calibrate", of(mine, "test"), *MILD, *out)
    assert "test split" in refused(capsys, "calibrate", of(mine, "validation"), *MILD, "--grid", of(mine, "test"), *out)
    same = refused(capsys, "calibrate", of(mine, "validation"), *MILD, "--grid", of(mine, "validation"), *out)
    assert "The thresholds come from the data that is tested" in same
    random_trajectory(loops=3, classes=8, provenance={"weights_sha256": "0" * 64}).save(tmp_path / "other")
    other = refused(capsys, "calibrate", of(mine, "validation"), *MILD, "--grid", tmp_path / "other", *out)
    assert "same model" in other
    assert not (tmp_path / "x.json").exists()
    for split in ("train", "validation"):
        assert "rests on this data" in refused(capsys, "evaluate", of(mine, split), "--policy", policy)


def test_evaluate_takes_two_recordings_or_one_with_a_policy(
    mine: Path, policy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = (of(mine, "validation"), of(mine, "test"))
    assert "Give two recordings" in refused(capsys, "evaluate", of(mine, "test"))
    assert "give one recording" in refused(capsys, "evaluate", *both, "--policy", policy)
    assert "no readouts" in refused(capsys, "evaluate", of(mine, "test"), "--policy", policy, "--readout", "margin")


def test_on_another_model_it_is_refused(
    mine: Path, foreign: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "examples.txt").write_text("+ 1 2\n")
    for words in (
        ("evaluate", of(mine, "test"), "--policy", foreign),
        ("run", mine, tmp_path / "examples.txt", "--policy", foreign),
        ("report", mine, "--policy", foreign, "--out", tmp_path / "report"),
        ("bench", "exits", mine, "--policy", foreign, "--rounds", 1),
    ):
        assert "calibrated for another model" in refused(capsys, *words)
    assert not (tmp_path / "report").exists()


def test_on_any_model_it_promises_nothing(
    mine: Path, foreign: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "examples.txt").write_text("+ 1 2\n")
    assert run("evaluate", of(mine, "test"), "--policy", foreign, "--any-model") == 0
    assert "The policy promises nothing here." in capsys.readouterr().out
    assert run("run", mine, tmp_path / "examples.txt", "--policy", foreign, "--any-model") == 0
    assert len(capsys.readouterr().out.splitlines()) == 1
    words = ("report", mine, "--policy", foreign, "--any-model", "--out", tmp_path / "report", "--json")
    assert run(*words) == 0
    (certified,) = json.loads(capsys.readouterr().out)["models"][0]["certified"]
    assert certified["promise"] is certified["held_out"]["promise"] is None
    assert "--any-model" in (tmp_path / "report" / "report.html").read_text()  # the command that made it


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"tresholds": 1}, "unknown key `tresholds`"),
        ({"schema_version": 3}, "schema_version"),
        ({"threshold": "low"}, "threshold"),
        ({"readout": "mood", "promise": None}, "no readout 'mood'"),
        ({"promise": {"max_drop": 0.1}}, "promise"),
        ({"threshold": 0.0}, "was altered"),
        ({"model": None}, "was altered"),
        ({"readout": "top1"}, "was altered"),
        ({"digest": ""}, "was altered"),
    ],
)
def test_an_altered_file_is_refused(
    changes: dict[str, object],
    sentence: str,
    mine: Path,
    policy: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "policy.json"
    file.write_text(json.dumps(told(policy)))  # written otherwise, it is the same
    assert ls.ExitPolicy.load(file) == ls.ExitPolicy.load(policy)
    file.write_text(json.dumps(told(policy) | changes))
    assert sentence in refused(capsys, "evaluate", of(mine, "test"), "--policy", file)


def test_an_altered_promise_is_refused(
    mine: Path, policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, data = tmp_path / "policy.json", told(policy)
    for changes, sentence in (
        ({"max_drop": 1.5}, "max_drop"),
        ({"mood": 1}, "unknown key `mood`"),
        ({"max_drop": 0.05}, "was altered"),
        ({"confidence": 0.99}, "was altered"),
        ({"per_difficulty": True}, "was altered"),
    ):
        file.write_text(json.dumps(data | {"promise": data["promise"] | changes}))
        assert sentence in refused(capsys, "evaluate", of(mine, "test"), "--policy", file)
    file.write_bytes(policy.read_bytes()[:-20])
    assert "not a readable policy" in refused(capsys, "evaluate", of(mine, "test"), "--policy", file)
    assert "There is no policy" in refused(capsys, "evaluate", of(mine, "test"), "--policy", tmp_path / "nowhere.json")


def test_a_report_shows_it(mine: Path, policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("report", mine, "--policy", policy, "--out", tmp_path) == 0
    assert "Certified policies" in capsys.readouterr().out
    (model,) = json.loads((tmp_path / "results.json").read_bytes())["models"]
    (certified,) = model["certified"]
    assert certified["promise"] == told(policy)["promise"]
    assert certified["threshold"] == told(policy)["threshold"]
    assert run("evaluate", of(mine, "test"), "--policy", policy, "--json") == 0
    assert certified["held_out"] == json.loads(capsys.readouterr().out)
    assert "gap ≤ 10%, 80 % sure" in (tmp_path / "tables.md").read_text()


def test_a_report_on_unseen_examples_breaks_no_promise_for_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen, easy = np.arange(400) % 10 > 0, crafted(True, "").logits
    logits = np.where(seen[:, None, None], easy, crafted(False, "").logits)  # one in ten is new, and lost
    for split, rows in (("validation", slice(None)), ("test", slice(None, None, -1))):
        crafted(True, split, logits=logits[rows], labels=easy[rows, -1].argmax(-1), seen=seen[rows]).save(
            tmp_path / split
        )
    file = tmp_path / "policy.json"
    words = ("--max-drop", 0.15, "--readout", "margin", "--out", file)
    assert run("calibrate", tmp_path / "validation", *words) == 0
    assert run("evaluate", tmp_path / "test", "--policy", file) == 0
    capsys.readouterr()
    words = ("--policy", file, "--unseen", "--product", "certified", "--out", tmp_path)
    assert run("report", tmp_path, *words) != 0 or "broken" not in capsys.readouterr().out


def test_of_several_models_each_has_its_own(tmp_path: Path) -> None:
    for name, model in (("first", "a"), ("second", "b"), ("everybody", None)):
        ls.ExitPolicy("margin", 1.0, model=model).save(tmp_path / name)
    paths = [tmp_path / name for name in ("second", "first", "everybody")]
    found = policies_by_model(paths, ["a", "b"])
    assert [[policy.model for policy in policies] for policies in found] == [["a", None], ["b", None]]
    assert [len(policies) for policies in policies_by_model(paths, ["a"], any_model=True)] == [3]
    with pytest.raises(ls.UserError, match="second was calibrated for another model"):
        policies_by_model(paths, ["a"])


def test_its_speed_is_measured(mine: Path, policy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("bench", "exits", mine, "--policy", policy, "--rounds", 1, "--batch-size", 64)
    assert run(*words, "--json") == 0
    ((timing,),) = (result["policies"] for result in json.loads(capsys.readouterr().out))
    assert (timing["readout"], timing["max_drop"]) == ("margin", 0.1)
    assert timing["agreement"]["differing"] == 0
    loops = ls.ExitPolicy.load(policy).exit_loops(ls.Trajectory.load(of(mine, "test")))
    assert timing["average_loops"] == pytest.approx(loops.mean())
    assert run(*words, "--readout", "kl") == 0
    table = capsys.readouterr().out
    assert "margin, loss ≤ 10 %" in table
    assert "│ kl " in table
    assert "needs the run" in refused(capsys, "bench", "exits", "--policy", policy)
