"""`loopscope bench` from the command line: what is measured, and what is rejected."""

import json
import sys
from pathlib import Path

import pytest

import loopscope as ls
from cli.conftest import recording_of, refusal, run


def test_bench_exits_of_a_run(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bench", "exits", recorded, "--rounds", 1, "--waiting", "--json") == 0
    (result,) = json.loads(capsys.readouterr().out)
    assert result["examples"] == 150
    assert [policy["readout"] for policy in result["policies"]] == ["top1", "margin", "kl", "hidden_change"]
    for policy in result["policies"]:
        assert policy["agreement"]["differing"] == 0
        assert policy["accuracy"] == policy["agreement"]["replayed_accuracy"]
        ideal = 3 / policy["average_loops"]
        assert policy["realised"]["median"] == pytest.approx(policy["speedup"]["median"] / ideal)
        assert policy["waiting_realised"]["median"] > 0
    assert result["machine"]["gigaflops"]["median"] > 0
    assert run("bench", "exits", recorded, "--rounds", 1, "--readout", "margin") == 0
    table = capsys.readouterr().out
    assert all(word in table for word in ("final loop", "margin", "realised", "0.29")), table


def test_bench_exits_at_random(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--settings", "demo", "--examples", 200, "--rounds", 1, "--batch-size", 16, "--loops", 2.5, "--waiting"]
    for change in ("model.width=16", "model.gate=linear", "objective.name=learned_gate"):
        words += ["--set", change]
    assert run("bench", "exits", *words, "--readout", "margin", "--readout", "gate", "--readout", "gate", "--json") == 0
    (result,) = json.loads(capsys.readouterr().out)
    assert [policy["readout"] for policy in result["policies"]] == ["margin", "gate"]
    assert result["policies"][0]["average_loops"] == pytest.approx(2.5, abs=0.1)
    for policy in result["policies"]:
        assert policy["accuracy"] is None
        assert policy["waiting_realised"] is not None
        assert policy["agreement"]["differing"] == 0


def test_bench_exits_of_a_policy(mine: Path, policy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("bench", "exits", mine, "--policy", policy, "--rounds", 1, "--batch-size", 64)
    assert run(*words, "--json") == 0
    ((timing,),) = (result["policies"] for result in json.loads(capsys.readouterr().out))
    assert (timing["readout"], timing["max_drop"]) == ("margin", 0.1)
    assert timing["agreement"]["differing"] == 0
    loops = ls.ExitPolicy.load(policy).exit_loops(ls.Trajectory.load(recording_of(mine, "test")))
    assert timing["average_loops"] == pytest.approx(loops.mean())
    assert run(*words, "--readout", "kl") == 0
    table = capsys.readouterr().out
    assert "margin, loss ≤ 10 %" in table
    assert "\nkl " in table
    assert "--policy needs RUN" in refusal(capsys, "bench", "exits", "--policy", policy)


def test_policies_by_a_readout_of_one_s_own_are_measured(
    forgotten: None,
    mine: Path,
    checkpoint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The refusal names an option; every verb that takes a policy or the name of a readout has it."""
    (tmp_path / "benched_here.py").write_text(
        "import loopscope as ls\n\n\n"
        "@ls.readout('height', exits='above', reads='logits')\ndef height(logits):\n    return logits.max(axis=1)\n"
    )
    (tmp_path / "text.txt").write_text("<|endoftext|>".join(f"{word} " * 40 for word in ("sun", "moon", "sea")))
    monkeypatch.syspath_prepend(tmp_path)
    ls.register_readout(ls.Readout("height", exits="above"))
    ls.ExitPolicy("height", 0.5).save(tmp_path / "height.json")
    words = ["--text", tmp_path / "text.txt", "--prompts", 2, "--prompt-tokens", 8, "--new-tokens", 3]
    for verb in (
        ["bench", "exits", mine, "--policy", tmp_path / "height.json", "--rounds", 1],
        ["bench", "generation", checkpoint, "--policy", tmp_path / "height.json", *words, "--rounds", 1],
        ["compare", mine, "height", "margin"],
    ):
        ls.READOUTS.pop("height")  # type: ignore[attr-defined]
        monkeypatch.delitem(sys.modules, "benched_here", raising=False)
        assert "height" in refusal(capsys, *verb)
        assert run(*verb, "--with-readout", "benched_here:height") == 0
        assert "height" in capsys.readouterr().out
    del sys.modules["benched_here"]


def test_generation_is_measured(checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("<|endoftext|>".join(f"{word} " * 40 for word in ("sun", "moon", "sea", "sky")), encoding="utf-8")
    options = ["--text", str(text), "--prompts", "3", "--prompt-tokens", "8", "--new-tokens", "6", "--rounds", "1"]
    rules = ["--readout", "fixed", "--threshold", "4", "--readout", "fixed", "--threshold", "2", "--json"]
    assert run("bench", "generation", checkpoint, *options, *rules) == 0
    measured = {(way["threshold"], way["cache"]): way for way in json.loads(capsys.readouterr().out)["ways"]}
    assert len(measured) == 6
    for cache in ("full", "propagate"):  # full depth is full depth
        assert measured[4, cache]["agreement"] == 1
        assert measured[4, cache]["kl"] < 1e-9
    assert measured[2, "full"]["average_loops"] == 2
    assert measured[2, "full"]["kl"] > 0
    for way in measured.values():
        assert way["writing_loops"] == pytest.approx(way["threshold"])
        assert way["drafts"] is None
    assert run("bench", "generation", checkpoint, *options[:2], "--readout", "gate") == 2
    assert "--threshold" in capsys.readouterr().err


def test_lossless_text_and_the_plain_way_are_measured(
    checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their tokens are full depth's; rows of different lengths are padded in the plain way."""
    text = tmp_path / "text.txt"
    text.write_text("<|endoftext|>".join(f"{word} " * 40 for word in ("sun", "moon", "sea", "sky")), encoding="utf-8")
    words = ["--text", str(text), "--prompts", "3", "--prompt-tokens", "8", "--new-tokens", "9", "--rounds", "1"]
    words += ["--readout", "fixed", "--threshold", "1", "--cache", "full", "--lossless", "--plain", "--batch-size", "2"]
    assert run("bench", "generation", checkpoint, *words, "--json") == 0
    measured = json.loads(capsys.readouterr().out)
    early, lossless = measured["ways"]
    assert (early["cache"], lossless["cache"]) == ("full", "lossless")
    assert lossless["drafts"]["drafted"] > 0
    assert lossless["drafts"]["differing"] == measured["plain"]["differing"] == 0
    assert lossless["agreement"] == 1
    assert lossless["average_loops"] is lossless["realised"] is None  # all loops of an accepted draft were run
    assert early["average_loops"] == 1
    assert lossless["writing_loops"] >= 4 > early["writing_loops"] == 1
    for spread in (*(measured["plain"][name] for name in ("speedup", "writing_speedup")), lossless["realised_of_run"]):
        assert spread["median"] > 0
    assert run("bench", "generation", checkpoint, *words) == 0
    assert "0 tokens differ" in capsys.readouterr().out.replace("\n", " ")
