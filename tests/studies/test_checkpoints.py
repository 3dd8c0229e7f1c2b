"""Studies of checkpoints on benchmarks: planned by what makes what, and run from recordings to the paper's tables."""

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import GOLDEN, answers
from tiny_study import changed, planned

import loopscope as ls
from loopscope.analysis.schema import Latency, Machine, PolicyLatency, Spread
from loopscope.cli import main
from loopscope.models.checkpoint import read_config, save_model
from loopscope.models.ouro import Ouro
from loopscope.questions import BENCHMARKS
from loopscope.studies.executors import do_step
from loopscope.studies.plan import Plan
from loopscope.studies.steps import Analyse, Fit, Join, Score, Step, TimeBenchmark

OURO = "ouro"
SMALL = """
title = "Small"
targets = [0.5]
products = ["ouro"]

[[checkpoints]]
models = ["elsewhere/Ouro-1.4B"]
benchmarks = ["mmlu", "arc_easy"]
limit = 60
shards = 2
gates = { kind = ["linear"], objective = ["utility"], examples = 40, steps = 5 }
guarantees = [{ max_drop = 0.3, confidence = 0.8 }]
latency = ["arc_easy"]
timed = 20
"""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A study, a checkpoint in a folder, and data."""
    (tmp_path / "small.toml").write_text(SMALL)
    shutil.copytree(GOLDEN / "ouro-tiny", tmp_path / "mine")
    for benchmark in ("mmlu/anatomy", "arc_easy"):
        (tmp_path / "data" / benchmark).mkdir(parents=True)
        (tmp_path / "data" / benchmark / "test.jsonl").write_text("{}")
    return tmp_path / "small.toml"


def plan_of(small: Path, **changes: object) -> Plan:
    places = {"models": [str(small.parent / "mine")], "data": str(small.parent / "data")}
    return planned(small, **{**places, **changes})


def keys(plan: Plan, kind: type[Step]) -> set[str]:
    return {step.key for step in plan.steps if isinstance(step, kind)}


def test_the_plan_of_the_ouro_study() -> None:
    plan = planned(OURO)
    count = Counter(type(step).__name__ for step in plan.steps)
    # four models on six benchmarks: validation and four parts of test; on five (MMLU has no training questions) the
    # train split and four gates; every model has a guarantee, four are timed
    assert count == {"Score": 24 * 5 + 20, "Join": 24, "Fit": 20 * 4, "Certify": 24, "Analyse": 24, "TimeBenchmark": 16}
    assert [model.name for model in plan.models][:2] == ["Ouro-1.4B-mmlu", "Ouro-1.4B-arc_easy"]
    fitted = [step.on for step in plan.steps if isinstance(step, Fit)]
    assert {(on.split, on.limit, on.hidden) for on in fitted if isinstance(on, Score)} == {("train", 2000, True)}
    tests = [model.analysis.test for model in plan.models]
    assert all(isinstance(step, Join) and [p.shard for p in step.parts] == [(k, 4) for k in range(4)] for step in tests)


def test_addresses_change_with_what_makes_a_recording_and_with_nothing_else(small: Path) -> None:
    plan = plan_of(small)
    moved = small.parent / "moved"
    (small.parent / "mine").rename(moved)
    assert keys(plan_of(small, models=[str(moved)]), Step) == keys(plan, Step)  # wherever it lies
    shutil.copytree(moved, small.parent / "mine")
    tokenizer = small.parent / "mine" / "tokenizer.json"
    tokenizer.write_text("{}")
    assert not keys(plan_of(small), Score) & keys(plan, Score)
    tokenizer.unlink()
    for changes in ({"dtype": "bfloat16"}, {"models": ["ByteDance/Ouro-1.4B"]}, {"data": None}):
        assert not keys(plan_of(small, **changes), Score) & keys(plan, Score)
    assert not keys(plan_of(small, limit=50), Analyse) & keys(plan, Analyse)
    assert len(keys(plan_of(small, limit=50), Score) & keys(plan, Score)) == 1  # 40 of a train split are as before
    assert not keys(planned(small, arithmetic="cuda, 1 threads"), Score) & keys(planned(small), Score)
    pinned = plan_of(small, models=["ByteDance/Ouro-1.4B@0123abc"])
    assert not keys(pinned, Score) & keys(plan_of(small, models=["ByteDance/Ouro-1.4B"]), Score)
    assert pinned.models[0].name == "Ouro-1.4B-mmlu"
    (small.parent / "data" / "arc_easy" / "test.jsonl").write_text("{ }")
    assert len(keys(plan_of(small), Score) & keys(plan, Score)) == 3  # those of MMLU
    one = plan_of(small, benchmarks=["mmlu"])
    assert [model.name for model in one.models] == ["mine-mmlu"]
    assert not keys(one, TimeBenchmark)


def timed(
    checkpoint: Any, benchmark: str, policies: list[ls.ExitPolicy], recorded: ls.Trajectory, **more: Any
) -> Latency:
    """Stands in for the clock: what a machine without overhead would take."""
    once = [Spread(value, value, value) for value in (100.0, 1.0)]
    ways = []
    for policy in policies:
        loops = float(policy.exit_loops(recorded).mean())
        speed = Spread(4 / loops, 4 / loops, 4 / loops)
        ways.append(PolicyLatency(policy.readout, policy.threshold, 0.5, loops, once[0], speed, 0))
    return Latency("", benchmark, more["questions"], 4, Machine(1, 1, 8, once[1], [1.0]), ways)


def test_from_recordings_to_the_paper_s_tables(
    small: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = small.parent
    plan, store, out = plan_of(small), folder / "store", folder / "out"
    words = [str(small), "--out", str(out), "--model", str(folder / "mine"), "--data", str(folder / "data")]
    for step in plan.steps:
        if isinstance(step, Score):
            rows = step.limit or 0
            subjects = 3 if step.benchmark == "mmlu" else 1
            told = answers(step.benchmark, step.split, rows=rows, subjects=subjects)
            number, parts = step.shard or (0, 1)
            told.take(np.arange(number, rows, parts)).save(step.folder(store))
    monkeypatch.setattr("loopscope.studies.steps.time_benchmark", timed)
    assert main(["study", "status", *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["models"]["mine-arc_easy"] == "1 of 3 recordings and gates are made"
    assert main(["study", "run", *words, "--benchmark", "mmlu"]) == 0  # in processes of their own
    assert [model.analysis.done(store) for model in plan.models] == [True, False]
    for step in plan.steps:
        do_step(step, store, "cpu")
    capsys.readouterr()
    assert main(["study", "run", *words]) == 0  # nothing is left to be made
    out_text = capsys.readouterr().out
    assert "The model's own gate and the best post-hoc readout" in out_text
    assert "Time a question" in out_text
    results = json.loads((out / "report" / "results.json").read_bytes())
    assert [model["name"] for model in results["models"]] == ["mine-mmlu", "mine-arc_easy"]
    assert [group["names"] for group in results["groups"]] == [["mine-mmlu"], ["mine-arc_easy"]]
    easy = results["models"][1]
    assert easy["benchmark"]["model"] == "mine"
    assert easy["forced_accuracy"] == pytest.approx(answers("arc_easy", "test", rows=60).correct.mean(axis=0))
    assert easy["frontiers"][-1]["readout"] == "gate:linear-utility"
    assert [subject["name"] for subject in results["models"][0]["benchmark"]["subjects"]] == ["s0", "s1", "s2"]
    assert len(easy["certified"]) + len(easy["refused"]) == 1
    (latency,) = results["latency"]
    assert (latency["model"], latency["benchmark"], latency["questions"]) == ("mine", "arc_easy", 20)
    best = easy["paired"][0]["second"]
    assert [way["readout"] for way in latency["policies"]] == ["fixed", "gate", best]
    for split in ("validation", "test"):
        assert ls.Trajectory.load(out / "mine-mmlu" / "recordings" / split).num_examples == 60
    assert "--model" in (out / "report" / "report.html").read_text()
    assert main(["study", "plan", *words]) == 0
    assert "mine-arc_easy" in capsys.readouterr().out
    assert main(["study", "run", *words, "--limit", "30"]) == 2  # of other questions: another folder
    assert "whose 'mine-arc_easy' was made otherwise: of other data" in capsys.readouterr().err


@pytest.fixture(scope="module")
def tiny_ouro(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An Ouro with random weights and a tokenizer, in the Hub's layout."""
    from benchmark_slices import byte_pairs

    folder = tmp_path_factory.mktemp("hub") / "tiny-ouro"
    folder.mkdir()
    config = json.loads((GOLDEN / "ouro-tiny" / "config.json").read_text())
    larger = {"vocab_size": 600, "max_position_embeddings": 4096}
    (folder / "config.json").write_text(json.dumps({**config, **larger}))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        save_model(Ouro(read_config(folder)).state_dict(), folder)
    byte_pairs().save_pretrained(folder)
    return folder


def test_parts_are_scored_joined_and_timed_live(small: Path, tiny_ouro: Path) -> None:
    pytest.importorskip("lm_eval")
    from benchmark_slices import DATA

    changes = {"models": [str(tiny_ouro)], "data": str(DATA), "benchmarks": ["arc_easy"], "limit": 7}
    store = small.parent / "store"
    store.mkdir()
    plan = planned(small, **changes)
    for step in plan.steps:
        do_step(step, store, "cpu")
    (model,) = plan.models
    joined = ls.Trajectory.load(model.analysis.test.folder(store))
    small.write_text(small.read_text().replace("shards = 2", "shards = 1"))
    (whole,) = planned(small, **changes).models
    assert isinstance(whole.analysis.test, Score)
    do_step(whole.analysis.test, store, "cpu")
    scored = ls.Trajectory.load(whole.analysis.test.folder(store))
    assert joined.examples == scored.examples
    assert np.allclose(joined.logits, scored.logits, atol=1e-5)
    assert np.allclose(joined.hidden, scored.hidden, atol=1e-4)
    assert joined.num_classes == 5  # as many as a question of the benchmark has at most, whatever is in a part
    bench = model.timed(store)
    assert bench is not None
    assert (bench.model, bench.benchmark, bench.questions, bench.num_loops) == ("tiny-ouro", "arc_easy", 7, 4)
    assert [way.readout for way in bench.policies[:2]] == ["fixed", "gate"]
    assert len(bench.policies) == 3
    assert all(way.differing == 0 for way in bench.policies)  # live running is what the recording says
    assert bench.policies[0].speedup.median == 1
    assert bench.policies[0].average_loops == 4


@pytest.mark.long
def test_the_ouro_study_runs_on_a_small_ouro_with_real_slices(tiny_ouro: Path, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    from benchmark_slices import DATA

    words = ["--model", str(tiny_ouro), "--data", str(DATA), "--limit", "24", "--dtype", "float32"]
    assert main(["study", "run", OURO, *words, "--out", str(tmp_path / "ouro")]) == 0
    report = tmp_path / "ouro" / "report"
    results = json.loads((report / "results.json").read_bytes())
    assert [model["benchmark"]["title"] for model in results["models"]] == [each.title for each in BENCHMARKS.values()]
    assert len(results["latency"]) == 4
    tables = (report / "tables.md").read_text()
    assert all(f"`{name}`" in tables for name in ("ouro_summary", "ouro_latency", "ouro_refitted", "mmlu_subjects"))
    assert (report / "benchmark_frontiers.png").is_file()


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('benchmarks = ["mmlu", "arc_easy"]', 'benchmarks = ["mlmu"]', "'mlmu' .did you mean 'mmlu'"),
        ('latency = ["arc_easy"]', 'latency = ["hellaswag"]', "'hellaswag', which is not among the benchmarks"),
        ("shards = 2", "shard = 2", "unknown key `shard`"),
        ("shards = 2", f"shards = {2**40}", "shards: expected a whole number <= 1000"),
        ('models = ["elsewhere/Ouro-1.4B"]', 'models = ["nowhere"]', "There is no folder nowhere"),
        ('models = ["elsewhere/Ouro-1.4B"]', 'models = ["a/b", "a/b@c"]', "lists the run 'b-mmlu' twice"),
        ("limit = 60", 'data = "no-such"', "There are no files of mmlu in no-such"),
        ("max_drop = 0.3", 'readout = "oracle"', "cannot be guaranteed"),
    ],
)
def test_a_bad_file_is_explained(small: Path, old: str, new: str, told: str) -> None:
    with pytest.raises(ls.UserError, match=told):
        planned(changed(small.parent, old, new, SMALL))


def test_what_is_asked_wrongly_is_explained(
    small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*words: str) -> str:
        assert main(["study", "plan", *words]) == 2
        return capsys.readouterr().err

    mine = small.parent / "mine"
    (small.parent / "runs").mkdir()
    monkeypatch.chdir(small.parent)
    for missing in (str(small.parent / "nobody"), "runs/small-ouro"):  # the second is not sought on the Hub
        assert f"There is no folder {missing}" in said(str(small), "--model", missing)
    (mine / "config.json").unlink()
    assert "is not a checkpoint" in said(str(small), "--model", str(mine))
    assert "there is no benchmark 'gsm8k'" in said(str(small), "--benchmark", "gsm8k")
    assert "changes training runs, and" in said(str(small), "--set", "training.steps=3")
    assert "--model is of checkpoints, and this study has none" in said("demo", "--model", "a/b")
    small.write_text('title = "Nothing"')
    assert "a study needs" in said(str(small))
