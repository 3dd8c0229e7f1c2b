"""Which model is it?"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import random_trajectory
from tiny_language import write_decoder

import loopscope as ls
from loopscope.leaks import check_same_model
from loopscope.model_identity import same_model, weights_of, with_configuration
from loopscope.models.checkpoint import stored_sha256, weights_sha256
from loopscope.recording.recording_folder import existing_artifact
from loopscope.trajectory import RECORDING, RECORDING_FILES, concatenate

TINY = Path(__file__).parent / "golden" / "ouro-tiny"


def edited(folder: Path, out: Path, **changes: Any) -> Path:
    shutil.copytree(folder, out)
    values = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(values | changes))
    return out


def test_what_a_file_of_before_does_not_say_is_not_compared() -> None:
    old, new, other = "a" * 64, with_configuration("a" * 64, "1"), with_configuration("a" * 64, "2")
    assert same_model(old, new)
    assert same_model(new, old)
    assert not same_model(new, other)
    assert not same_model(with_configuration("b" * 64, "1"), new)
    assert same_model(None, None)
    assert not same_model(None, new)
    assert with_configuration(new, "2") == other
    assert with_configuration(new, None) == old == weights_of(other)
    assert not same_model(5, new)  # as a file that was altered may have it
    assert not same_model("mine", "mine-2")  # texts of a user's own are whole


def test_the_configuration_is_part_of_a_model(tmp_path: Path) -> None:
    known = ls.load_model(TINY).weights_sha256
    assert known == weights_sha256(TINY)
    assert known.startswith(stored_sha256(TINY))
    other = edited(TINY, tmp_path / "theta", rope_theta=77.0)
    assert stored_sha256(other) == stored_sha256(TINY)
    assert weights_sha256(other) == ls.load_model(other).weights_sha256 != known
    # depth is compared by itself; so many names of a configuration say nothing of the network
    width = json.loads((TINY / "config.json").read_text())
    changes = {"total_ut_steps": 3, "torch_dtype": "bfloat16", "_name_or_path": "x", "attention_bias": False}
    changes["head_dim"] = width["hidden_size"] // width["num_attention_heads"]
    assert weights_sha256(edited(TINY, tmp_path / "said", **changes)) == weights_sha256(TINY)


def test_one_decoder_looped_three_ways_is_three_models(tmp_path: Path) -> None:
    write_decoder(tmp_path / "llama")
    ways: tuple[dict[str, Any], ...] = (
        {"prelude": 2, "core": 2},
        {"prelude": 0, "core": 4},
        {"prelude": 2, "core": 2, "damping": 0.5},
    )
    for number, way in enumerate(ways):
        ls.loop(tmp_path / "llama", tmp_path / str(number), loops=4, **way)
    assert len({stored_sha256(tmp_path / str(number)) for number in range(3)}) == 1
    assert len({ls.load_model(tmp_path / str(number)).weights_sha256 for number in range(3)}) == 3


def test_huginn_s_first_state_is_part_of_it() -> None:
    model = ls.load_model(TINY.parent / "huginn-tiny")
    known = model.weights_sha256
    model.initial_state = "random"
    drawn = model.weights_sha256
    model.seed = 1
    assert len({known, drawn, model.weights_sha256}) == 3


def test_recordings_of_another_configuration_are_of_another_model(tmp_path: Path) -> None:
    names = ("a" * 64, with_configuration("a" * 64, "1"), with_configuration("a" * 64, "2"))
    old, one, two = (random_trajectory(1, split="validation", provenance={"weights_sha256": name}) for name in names)
    check_same_model(old, one, "Both")
    with pytest.raises(ls.UserError, match="weights"):
        check_same_model(one, two, "Both")
    with pytest.raises(ls.UserError, match="weights"):
        concatenate([one, two])
    assert concatenate([one, old]).provenance["weights_sha256"] == names[0]
    assert concatenate([one, one]).provenance["weights_sha256"] == names[1]
    gate = ls.FittedGate(np.ones(2), np.zeros(()), provenance={"weights_sha256": names[1]})
    gate.check(names[0])
    with pytest.raises(ls.UserError, match="another model"):
        gate.check(names[2])
    one.save(tmp_path / "one")
    with pytest.raises(ls.UserError, match="of another model"):
        existing_artifact(
            tmp_path / "one", RECORDING, RECORDING_FILES, {"weights_sha256": names[2]}, ls.Trajectory.load
        )
