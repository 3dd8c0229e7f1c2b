"""`loopscope bench` from the command line: what is measured, and what is rejected."""

from pathlib import Path

import pytest
from tiny_language import draft_at

import loopscope as ls
from cli.conftest import Command, recording_of
from loopscope.engine.draft_spacing import Spacing


def continued(folder: Path) -> list[str]:
    """The options of a short benchmark of text."""
    (folder / "text.txt").write_text("<|endoftext|>".join(f"{word} " * 40 for word in ("sun", "moon", "sea", "sky")))
    return ["--text", str(folder / "text.txt"), "--prompts", "3", "--prompt-tokens", "8", "--rounds", "1"]


def test_bench_exits_of_a_run(recorded: Path, command: Command) -> None:
    (result,) = command.json("bench", "exits", recorded, "--rounds", 1, "--waiting")
    assert result["examples"] == 150
    assert [policy["readout"] for policy in result["policies"]] == ["top1", "margin", "kl", "hidden_change"]
    for policy in result["policies"]:
        assert policy["agreement"]["differing"] == 0
        assert policy["accuracy"] == policy["agreement"]["replayed_accuracy"]
        ideal = 3 / policy["average_loops"]
        assert policy["realised"]["median"] == pytest.approx(policy["speedup"]["median"] / ideal)
        assert policy["waiting_realised"]["median"] > 0
    assert result["machine"]["gigaflops"]["median"] > 0
    table = command("bench", "exits", recorded, "--rounds", 1, "--readout", "margin").out
    assert all(word in table for word in ("final loop", "margin", "realised", "0.29")), table


def test_bench_exits_at_random(command: Command) -> None:
    words = ["--settings", "demo", "--examples", 200, "--rounds", 1, "--batch-size", 16, "--loops", 2.5, "--waiting"]
    for change in ("model.width=16", "model.gate=linear", "objective.name=learned_gate"):
        words += ["--set", change]
    (result,) = command.json("bench", "exits", *words, "--readout", "margin", "--readout", "gate", "--readout", "gate")
    assert [policy["readout"] for policy in result["policies"]] == ["margin", "gate"]
    assert result["policies"][0]["average_loops"] == pytest.approx(2.5, abs=0.1)
    for policy in result["policies"]:
        assert policy["accuracy"] is None
        assert policy["waiting_realised"] is not None
        assert policy["agreement"]["differing"] == 0


def test_bench_exits_of_a_policy(mine: Path, policy: Path, command: Command) -> None:
    words = ("bench", "exits", mine, "--policy", policy, "--rounds", 1, "--batch-size", 64)
    ((timing,),) = (result["policies"] for result in command.json(*words))
    assert (timing["readout"], timing["max_drop"]) == ("margin", 0.1)
    assert timing["agreement"]["differing"] == 0
    loops = ls.ExitPolicy.load(policy).exit_loops(ls.Trajectory.load(recording_of(mine, "test")))
    assert timing["average_loops"] == pytest.approx(loops.mean())
    table = command(*words, "--readout", "kl").out
    assert "margin, loss ≤ 10 %" in table
    assert "\nkl " in table
    assert "--policy needs RUN" in command.refused("bench", "exits", "--policy", policy)


def test_generation_is_measured(checkpoint: str, tmp_path: Path, command: Command) -> None:
    options = [*continued(tmp_path), "--new-tokens", "6"]
    rules = ["--readout", "fixed", "--threshold", "4", "--readout", "fixed", "--threshold", "2", "--json"]
    measured = {
        (way["threshold"], way["cache"]): way
        for way in command.json("bench", "generation", checkpoint, *options, *rules)["ways"]
    }
    assert len(measured) == 6
    for cache in ("full", "propagate"):  # full depth is full depth
        assert measured[4, cache]["agreement"] == 1
        assert measured[4, cache]["kl"] < 1e-9
    assert measured[2, "full"]["average_loops"] == 2
    assert measured[2, "full"]["kl"] > 0
    for way in measured.values():
        assert way["writing_loops"] == pytest.approx(way["threshold"])
        assert way["drafts"] is None
    assert "--threshold" in command.refused("bench", "generation", checkpoint, *options[:2], "--readout", "gate")


def test_lossless_text_and_the_plain_way_are_measured(
    checkpoint: str, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their tokens are full depth's; rows of different lengths are padded in the plain way."""
    draft_at(Spacing(1), monkeypatch)
    words = [*continued(tmp_path), "--new-tokens", "9"]
    words += ["--readout", "fixed", "--threshold", "1", "--cache", "full", "--lossless", "--plain", "--batch-size", "2"]
    measured = command.json("bench", "generation", checkpoint, *words)
    early, lossless = measured["ways"]
    assert (early["cache"], lossless["cache"]) == ("full", "lossless")
    assert lossless["drafts"]["drafted"] > 0
    assert lossless["drafts"]["differing"] == measured["plain"]["differing"] == 0
    assert lossless["agreement"] == 1
    assert lossless["average_loops"] is lossless["realised"] is None  # all loops of an accepted draft were run
    assert early["average_loops"] == 1
    assert early["realised_after_prompts"]["median"] > 0
    assert lossless["realised_after_prompts"] is None
    assert lossless["writing_loops"] >= 4 > early["writing_loops"] == 1
    for spread in (*(measured["plain"][name] for name in ("speedup", "writing_speedup")), lossless["realised_of_run"]):
        assert spread["median"] > 0
    assert "0 tokens differ" in command("bench", "generation", checkpoint, *words).out.replace("\n", " ")
