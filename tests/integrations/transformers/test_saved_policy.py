"""Does an exit policy travel with its model, and is one that a configuration names used or refused?"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_modeling import HUGINN, OURO, TEXT, load
from transformers import GenerationConfig

import loopscope as ls
from loopscope.models.checkpoint_folder import POLICY, named_exits
from loopscope.scope import Scope

PROMPTS = [ls.Prompt(0, TEXT[0].numpy())]
OPTIONS = {"max_new_tokens": 10, "eos_token_id": None, "do_sample": False}


def written(model: Any, **options: Any) -> list[int]:
    """The new tokens after TEXT."""
    return model.generate(TEXT, attention_mask=torch.ones_like(TEXT), **{**OPTIONS, **options})[0, 9:].tolist()


def expected(folder: Path, policy: ls.ExitPolicy | None, **options: Any) -> list[int]:
    return ls.generate(ls.load_model(folder), PROMPTS, policy, max_new_tokens=10, **options)[0].tokens


def recording(model: ls.LoopedModel, seed: int = 0) -> ls.Trajectory:
    """Of random texts whose next tokens are what full depth says, so that exits can be told from it."""
    tokens = torch.randint(1, 49, (400, 6), generator=torch.Generator().manual_seed(seed))
    with torch.inference_mode():
        found = model.loops(tokens, positions=torch.full((400,), 5))
    logits, hidden = (each.numpy().swapaxes(0, 1) for each in (found.logits, found.hidden))
    gates = None if found.gate_logits is None else found.gate_logits.numpy().T
    provenance = {"weights_sha256": model.weights_sha256, "precision": model.precision, "unit": "tokens"}
    labels = logits[:, -1].argmax(1)
    more = {"provenance": provenance, "sequences": np.arange(400), "gate_logits": gates, "hidden": hidden}
    return ls.Trajectory(logits=logits, labels=labels, **more)


@pytest.fixture(scope="module")
def calibrated() -> ls.ExitPolicy:
    policy = ls.calibrate(recording(ls.load_model(OURO)), 0.3, loss="disagreement", readout="margin")
    assert policy.guarantee is not None
    assert policy.guarantee.average_loops < 4
    return policy


@pytest.fixture(scope="module")
def saved(calibrated: ls.ExitPolicy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that no test changes."""
    folder, model = tmp_path_factory.mktemp("saved") / "model", load(OURO)
    model.exit_policy = calibrated
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("shards", [{}, {"max_shard_size": "20KB"}], ids=["one file", "shards"])
def test_a_policy_travels_with_its_model(calibrated: ls.ExitPolicy, shards: dict[str, str], tmp_path: Path) -> None:
    """Saved, loaded, and saved from there: the text is the same, and the guarantee with it."""
    model = load(OURO)
    model.exit_policy = calibrated
    model.save_pretrained(tmp_path / "one", **shards)
    again = load(tmp_path / "one")
    again.save_pretrained(tmp_path / "two")
    text = expected(OURO, calibrated)
    assert text != expected(OURO, None), "a policy that changes the text"
    for name in ("one", "two"):
        folder = tmp_path / name
        assert json.loads((folder / "generation_config.json").read_text())["policy"] == POLICY
        policy = ls.ExitPolicy.load(named_exits(folder).policy)
        assert policy.guarantee == calibrated.guarantee
        assert written(load(folder)) == expected(folder, policy) == text
        assert written(load(folder), policy=None) == expected(OURO, None)
        assert written(load(folder), generation_config=GenerationConfig.from_pretrained(folder)) == text


def test_a_policy_that_a_configuration_names_is_used_or_refused(calibrated: ls.ExitPolicy, tmp_path: Path) -> None:
    model, file = load(OURO), tmp_path / "policy.json"
    calibrated.save(file)
    text = expected(OURO, calibrated)
    for named in (file, str(file), calibrated):
        assert written(model, generation_config=GenerationConfig(policy=named)) == text
    model.generation_config.policy = str(file)
    assert written(model) == text
    model.save_pretrained(tmp_path / "saved")  # where the file lies is of this machine
    assert written(load(tmp_path / "saved")) == text
    assert model.generation_config.policy == str(file)
    for match, more in {
        "does/not/exist": {"policy": "/does/not/exist.json"},
        "calibrated on text with the cache 'full'": {"policy": calibrated, "cache": "latest"},
        "lossless is of an exit policy": {"policy": None, "lossless": True},
        "cache is of an exit policy": {"policy": None, "cache": "propagate"},
    }.items():
        with pytest.raises(ls.UserError, match=match):
            written(load(OURO), generation_config=GenerationConfig(**more))
    with pytest.raises(ls.UserError, match=r"beams is not done.*policy=None"):
        written(model, num_beams=2)
    drafted = GenerationConfig(policy=calibrated, lossless=True)
    assert written(model, generation_config=drafted) == expected(OURO, None)


@pytest.mark.parametrize("cache", ["full", "propagate", "latest"])
def test_the_default_cache_is_the_policy_s_own(cache: str, tmp_path: Path) -> None:
    policy = ls.ExitPolicy("margin", 0.5, scope=Scope(cache=cache))
    text = expected(OURO, policy, cache=cache)
    assert expected(OURO, policy) == text
    model = load(OURO)
    assert written(model, policy=policy) == text
    model.exit_policy = policy
    model.save_pretrained(tmp_path / "saved")
    assert written(load(tmp_path / "saved")) == text
    assert f"with the KV cache `{cache}`" in (tmp_path / "saved" / "README.md").read_text()


@pytest.mark.parametrize("card", [b"\xff\xfe of another encoding", None], ids=["no UTF-8", "a folder"])
def test_a_card_that_cannot_be_read_stays_and_the_model_is_saved(
    card: bytes | None, calibrated: ls.ExitPolicy, tmp_path: Path
) -> None:
    model, file = load(OURO), tmp_path / "README.md"
    model.exit_policy = calibrated
    if card is None:
        file.mkdir()
    else:
        file.write_bytes(card)
    with pytest.warns(UserWarning, match=r"The model card has no section on exits\. .*README\.md is"):
        model.save_pretrained(tmp_path)
    assert file.is_dir() if card is None else file.read_bytes() == card
    assert written(load(tmp_path)) == expected(OURO, calibrated)


def test_checkpoints_whose_policy_would_mislead_are_refused(saved: Path, tmp_path: Path) -> None:
    def spoiled(name: str, **changes: Any) -> Path:
        folder = Path(shutil.copytree(saved, tmp_path / name))
        config = json.loads((folder / "generation_config.json").read_text())
        (folder / "generation_config.json").write_text(json.dumps({**config, **changes}))
        return folder

    for folder, match in (
        (spoiled("outside", policy="../policy.json"), "outside of its folder"),
        (spoiled("absolute", policy="/policy.json"), "outside of its folder"),
        (spoiled("missing", policy="other.json"), "names the exit policy 'other.json', and there is no such file"),
        (spoiled("too long", policy="a" * 300), "names the exit policy 'aaa.*, and there is no such file"),
        (spoiled("kind", policy=3), "policy"),
    ):
        for read in (load, named_exits):
            with pytest.raises(ls.UserError, match=match):
                read(folder)
    altered = spoiled("altered")
    policy = json.loads((altered / POLICY).read_text())
    (altered / POLICY).write_text(json.dumps({**policy, "threshold": 0.1}))
    with pytest.raises(ls.UserError, match="altered since it was calibrated"):
        load(altered)
    config = load(OURO).generation_config  # one that transformers makes itself reads no such names
    assert config._from_model_config
    derived = spoiled("derived", _from_model_config=True)
    assert written(load(derived)) == written(load(saved)) != written(load(saved), policy=None)


def test_a_policy_is_for_its_weights_alone(calibrated: ls.ExitPolicy, saved: Path, tmp_path: Path) -> None:
    model = load(saved)
    with torch.no_grad():
        model.lm_head.weight[5] += 1
    with pytest.raises(ls.UserError, match="calibrated for another model"):
        written(model)
    with pytest.warns(UserWarning, match="not saved with the model. This policy was calibrated for another model"):
        model.save_pretrained(tmp_path / "tuned")
    assert "policy" not in json.loads((tmp_path / "tuned" / "generation_config.json").read_text())
    assert not (tmp_path / "tuned" / POLICY).exists()
    assert written(load(tmp_path / "tuned")) == expected(tmp_path / "tuned", None)
    with pytest.raises(ls.UserError, match="weights in float32"):
        load(OURO, dtype=torch.bfloat16).exit_policy = calibrated
    with pytest.raises(ls.UserError, match="calibrated for another model"):
        load(HUGINN).exit_policy = calibrated
    half = load(saved, dtype=torch.bfloat16)
    with pytest.raises(ls.UserError, match="run or record the model in that precision"):
        written(half)
    assert len(written(half, policy=None)) == 10
    model = load(saved)
    model.exit_policy = None
    model.save_pretrained(tmp_path / "without")
    assert load(tmp_path / "without").exit_policy is None
    assert not (tmp_path / "without" / "README.md").exists()


def test_a_fitted_gate_travels_too(tmp_path: Path) -> None:
    validation = recording(ls.load_model(OURO))
    gate = ls.fit_gate(recording(ls.load_model(OURO), seed=3))
    policy = ls.calibrate(ls.attach(validation, {"new": gate}), 0.3, loss="disagreement", readout="gate:new")
    policy = ls.ExitPolicy(policy.readout, policy.threshold, gate, policy.scope, policy.certificate)
    model = load(OURO)
    model.exit_policy = policy
    model.save_pretrained(tmp_path / "saved", max_shard_size="20KB")
    assert len(list((tmp_path / "saved" / "exit_policy").glob("*.safetensors"))) == 1
    assert written(load(tmp_path / "saved")) == expected(OURO, policy)
    next((tmp_path / "saved" / "exit_policy").glob("*.safetensors")).unlink()
    with pytest.raises(ls.UserError, match="the gate of"):
        written(load(tmp_path / "saved"))


def test_the_card_says_what_is_known(calibrated: ls.ExitPolicy, tmp_path: Path) -> None:
    """And leaves what others wrote."""
    tmp_path.joinpath("README.md").write_text("---\nlicense: mit\n---\n# Mine\n\nMy words.\n")
    model = load(OURO)
    model.exit_policy = calibrated
    validation, test = (recording(ls.load_model(OURO), seed) for seed in (1, 2))
    model.diagnosis = ls.diagnose(validation, test)
    for _ in range(2):
        model.save_pretrained(tmp_path)
    card = tmp_path.joinpath("README.md").read_text()
    assert card.count("## Adaptive depth") == 1
    assert card.startswith("---\nlicense: mit\n---\n# Mine\n\nMy words.\n")
    guarantee = calibrated.guarantee
    assert guarantee is not None
    low, high = guarantee.average_loops_interval
    for words in (
        f"**Guarantee.** {guarantee.sentence}",
        f"{guarantee.average_loops:.2f} of 4 [{low:.2f}, {high:.2f}]",
        f"{100 * guarantee.evidence[0].loss:.2f} % (allowed: 30 %)",
        f"{guarantee.tested.examples:,} of",
        model.diagnosis.sentence,
        "| gap | between | loops [95 % interval] | at |",
    ):
        assert words in card
    model.exit_policy = model.diagnosis = None
    model.save_pretrained(tmp_path)
    assert "Adaptive depth" not in tmp_path.joinpath("README.md").read_text()
    assert "My words." in tmp_path.joinpath("README.md").read_text()


def test_pushed_to_the_hub(calibrated: ls.ExitPolicy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is uploaded is taken down into a folder instead; transformers brings a card of its own."""
    from huggingface_hub import HfApi, ModelCard, RepoUrl
    from huggingface_hub.errors import EntryNotFoundError

    def upload(api: Any, repo_id: str, operations: Any, **_: Any) -> None:
        for each in operations:
            place = tmp_path / repo_id / each.path_in_repo
            place.parent.mkdir(parents=True, exist_ok=True)
            with each.as_file() as opened:
                place.write_bytes(opened.read())

    def no_card(*_: Any, **__: Any) -> Any:
        raise EntryNotFoundError("there is none")

    url = "https://huggingface.co/me/{}"
    monkeypatch.setattr(HfApi, "create_repo", lambda api, repo_id, **_: RepoUrl(url.format(repo_id.split("/")[-1])))
    monkeypatch.setattr(HfApi, "create_commit", upload)
    monkeypatch.setattr(ModelCard, "load", no_card)
    model = load(OURO)
    model.exit_policy = calibrated
    model.push_to_hub("me/pushed")
    model.save_pretrained(tmp_path / "here", push_to_hub=True, repo_id="me/saved")
    for name in ("pushed", "saved"):
        folder = tmp_path / "me" / name
        assert written(load(folder)) == expected(folder, ls.ExitPolicy.load(named_exits(folder).policy))
        assert calibrated.guarantee.sentence in (folder / "README.md").read_text()
    assert "automatically generated" in (tmp_path / "me" / "pushed" / "README.md").read_text()
