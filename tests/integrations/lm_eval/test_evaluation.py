"""Does a whole evaluation by lm_eval, from local files, say what LoopScope's own scoring says?"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from benchmark_slices import DATA, byte_pairs
from conftest import random_trajectory
from tiny_language import write_outspoken

import loopscope as ls
from loopscope.cli import main
from loopscope.config import to_json
from loopscope.integrations.lm_eval.evaluation import evaluate
from loopscope.integrations.lm_eval.lm_eval_model import LoopScopeLM
from loopscope.questions import BENCHMARKS
from loopscope.recording.question_recording import record_benchmark
from loopscope.scope import Scope, scope_of


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_outspoken(tmp_path_factory.mktemp("models") / "tiny")


def test_an_evaluation_is_what_a_recording_says(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recording = record_benchmark(checkpoint, "arc_easy", "test", tmp_path / "arc", data=DATA, limit=16)
    assert recording.norms is not None
    normalised = recording.correct.mean(axis=0)
    plain = ((recording.logits * recording.norms[:, None]).argmax(-1) == recording.labels[:, None]).mean(axis=0)
    words = ["harness", str(checkpoint), "--tasks", "arc_easy", "--data", str(DATA), "--shots", "8", "--limit", "16"]
    assert main([*words, "--loops", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["results"]["arc_easy"]["acc_norm,none"] == pytest.approx(normalised[1])
    assert found["results"]["arc_easy"]["acc,none"] == pytest.approx(plain[1])
    assert found["loops"]["arc_easy"] == {"decisions": 16, "average_loops": 2.0}

    values = np.sort(ls.signal("hidden_change", recording)[:, 1])
    policy = ls.ExitPolicy("hidden_change", float((values[7] + values[8]) / 2))  # half of them exit at loop 2
    policy.save(tmp_path / "policy.json")
    assert main([*words, "--policy", str(tmp_path / "policy.json")]) == 0
    table = capsys.readouterr().out
    loops = policy.exit_loops(recording)
    assert 2 < loops.mean() < 3
    assert all(f"{value:.3f}" in table for value in (loops.mean(), recording.correct[np.arange(16), loops - 1].mean()))


def test_subjects_are_a_group(checkpoint: Path) -> None:
    lm = LoopScopeLM(checkpoint)
    found = evaluate(lm, ["mmlu"], data=DATA, limit=4, shots=5)
    subjects = ["mmlu_anatomy", "mmlu_global_facts", "mmlu_high_school_mathematics"]
    assert {*found.results} == {"mmlu", *subjects}
    assert found.results["mmlu"]["acc,none"] == pytest.approx(
        np.mean([found.results[subject]["acc,none"] for subject in subjects])
    )
    assert [found.loops[subject].average_loops for subject in subjects] == [3.0] * 3
    assert found.samples["mmlu_anatomy"]["effective"] == 4
    assert found.model["model_sha"] == lm.model.weights_sha256
    again = evaluate(lm, ["mmlu_anatomy"], data=DATA, limit=2, shots=5)
    assert {name: used.decisions for name, used in again.loops.items()} == {"mmlu_anatomy": 2}


def test_a_task_that_generates_by_its_definition(checkpoint: Path, tmp_path: Path) -> None:
    """Any lm_eval task: here one that a file defines."""
    rows = [{"asked": "The sea is", "answer": "wide"}, {"asked": "A stone is", "answer": "hard"}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    definition = {
        "task": "made_up",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}, "cache_dir": str(tmp_path / "cache")},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{asked}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 5},
        "metric_list": [{"metric": "exact_match"}],
    }
    (tmp_path / "made_up.yaml").write_text(json.dumps(definition))
    lm = LoopScopeLM(checkpoint, policy=ls.ExitPolicy("gate", 0.6))
    found = evaluate(lm, [str(tmp_path / "made_up.yaml")], chat=True)
    assert found.results["made_up"]["exact_match,none"] == 0
    assert 2 <= found.loops["made_up"].decisions <= 10
    assert 1 <= found.loops["made_up"].average_loops <= 3
    assert json.loads(to_json(found))["results"]["made_up"]["exact_match,none"] == 0


def test_lm_eval_knows_the_model_by_its_name(checkpoint: Path) -> None:
    from lm_eval.api.registry import get_model

    lm = get_model("loopscope").create_from_arg_string(f"pretrained={checkpoint},loops=2", {"batch_size": 4})
    assert str(lm.policy) == "fixed at 2"
    assert lm.batch_size == 4


def test_a_policy_that_was_saved_with_the_model(checkpoint: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    (folder / "exit_policy").mkdir()
    policy = ls.ExitPolicy("gate", 0.5, scope=Scope(unit="tokens", cache="propagate"))
    policy.save(folder / "exit_policy" / "policy.json")
    named = {"policy": "exit_policy/policy.json"}
    (folder / "generation_config.json").write_text(json.dumps(named))
    lm = LoopScopeLM(folder)
    assert (lm.policy, lm.get_model_info()["cache"]) == (policy, "propagate")
    assert str(LoopScopeLM(folder, loops=2).policy) == "fixed at 2"
    assert main(["harness", str(folder), "--tasks", "arc_easy", "--data", str(DATA), "--limit", "2"]) == 2
    (folder / "generation_config.json").write_text(json.dumps({**named, "lossless": True}))
    with pytest.raises(ls.UserError, match="asks for lossless texts"):
        LoopScopeLM(folder)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tasks", "gsm8k", "--data", str(DATA)], "A folder of data is read for"),
        (["--tasks", "mmlu_virology", "--data", str(DATA)], "There is no mmlu_virology"),
        (["--tasks", "mmlu", "--data", str(DATA), "--shots", "6"], "has 5 examples to give"),
    ],
)
def test_refusals(checkpoint: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["harness", str(checkpoint), *words]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("loopscope: ")
    assert message in error


@pytest.mark.parametrize("definition", ["task: [", '{"task": "x", "doc_to_text": "y"}'])
def test_a_definition_that_is_wrong_is_named(
    checkpoint: Path, tmp_path: Path, definition: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(definition)
    assert main(["harness", str(checkpoint), "--tasks", str(path)]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"The task definition could not be read from {path}" in error
    assert "network" not in error


OF_BENCHMARK = {"benchmark": "arc_easy", "metric": "acc"}


@pytest.mark.parametrize(
    ("provenance", "sentence"),
    [
        ({"unit": "tokens"}, "calibrated on next tokens of a text, and here it would decide about questions"),
        ({**OF_BENCHMARK, "precision": "bfloat16"}, "calibrated on weights in bfloat16"),
        (OF_BENCHMARK, ""),
        ({**OF_BENCHMARK, "metric": "acc_norm", "state": "mean over the choices' tokens"}, ""),
    ],
)
def test_a_policy_is_held_to_what_it_was_calibrated_on(
    provenance: dict[str, str], sentence: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recording = random_trajectory(loops=3, rows=2000, split="validation", labels=None, provenance=provenance)
    ls.calibrate(recording, 0.9, 0.5, loss="disagreement", readout="margin").save(tmp_path / "policy.json")
    words = ["--data", str(DATA), "--shots", "0", "--limit", "2", "--tasks", "arc_easy"]
    code = main(["harness", str(checkpoint), "--policy", str(tmp_path / "policy.json"), *words])
    assert code == (2 if sentence else 0)
    assert sentence in capsys.readouterr().err


def test_a_policy_on_scores_per_character_decides_as_its_replay(checkpoint: Path, tmp_path: Path) -> None:
    """The policy comes from a recording scored by acc_norm; lm_eval gets plain log-likelihoods all the same."""
    benchmark, shots = "openbookqa", BENCHMARKS["openbookqa"].shots
    recorded = ls.record_benchmark(checkpoint, benchmark, "test", tmp_path / "test", data=DATA, limit=20, mean=True)
    values = ls.signal("margin", recorded)[:, :-1]
    policy = ls.ExitPolicy("margin", float(np.median(values) + 1e-7), scope=scope_of(recorded))
    assert policy.scope.score == "per_character"
    exits = policy.exit_loops(recorded)
    assert 1 < exits.mean() < recorded.num_loops
    for rule, loops in ((policy, exits), (None, np.full(20, recorded.num_loops))):
        lm = LoopScopeLM(checkpoint, tokenizer=byte_pairs(), policy=rule)
        found = evaluate(lm, [benchmark], data=DATA, limit=20, shots=shots)
        assert found.loops[benchmark].average_loops == pytest.approx(loops.mean())
        assert found.model["average_loops"] == {benchmark: found.loops[benchmark].average_loops}
        right = recorded.correct[np.arange(20), loops - 1]
        assert found.results[benchmark]["acc_norm,none"] == pytest.approx(right.mean())


def test_no_other_library_speaks(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # where git would complain
    assert main(["harness", str(checkpoint), "--tasks", "arc_easy", "--data", str(DATA), "--limit", "2"]) == 0
    err = capfd.readouterr().err
    assert err.startswith("Device: ")  # ours goes on
    assert all(line.startswith(("Device: ", "arc_easy: ")) for line in err.splitlines()), err
