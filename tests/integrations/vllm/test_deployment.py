"""Is a deployment what its overrides say, or refused? And is a log of exits read as it was written?"""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import GOLDEN, random_trajectory
from tiny_language import looped_llama_config
from vllm_engines import write_looped_llama

import loopscope as ls
from loopscope.errors import UserError
from loopscope.integrations.vllm.deployment import Deployment, read_deployment
from loopscope.integrations.vllm.exits_log import ExitsLog, TextExits, check_exits_log, prompt_digest, read_exits
from loopscope.integrations.vllm.request_depth import DEPTH_KEY, check_depth, policy_of, requested_depth
from loopscope.models.checkpoint import weights_sha256
from loopscope.scope import Scope

FOLDER = GOLDEN / "ouro-tiny"
VALUES = json.loads((FOLDER / "config.json").read_text())


def deployed(loopscope: Any, cache_precision: str | None = None, **changes: Any) -> Deployment:
    values = {**VALUES, **changes, "loopscope": loopscope}
    return read_deployment(values, str(FOLDER), None, "float32", cache_precision)


def test_loops_are_the_checkpoints_or_fewer() -> None:
    assert (deployed({}).loops, deployed({"loops": 2}).loops, deployed({}, total_ut_steps=3).loops) == (4, 2, 3)
    fixed = deployed({"readout": "fixed", "threshold": 3})
    assert (fixed.loops, fixed.policy) == (3, None)


@pytest.fixture
def told(tmp_path: Path) -> dict[str, Any]:
    return {"policy": str(tmp_path / "policy.json")}


def test_a_policy_that_was_saved_with_the_model(tmp_path: Path) -> None:
    """It is served unless a depth is named, or rejected; never ignored."""
    folder = Path(shutil.copytree(FOLDER, tmp_path / "model"))
    (folder / "exit_policy").mkdir()

    def served(loopscope: dict[str, Any], policy_cache: str | None, **named: Any) -> Deployment:
        policy = ls.ExitPolicy("gate", 0.5, scope=Scope(unit="tokens", cache=policy_cache))
        policy.save(folder / "exit_policy" / "policy.json")
        exits = {"policy": "exit_policy/policy.json", **named}
        (folder / "generation_config.json").write_text(json.dumps(exits))
        return read_deployment({**VALUES, "loopscope": loopscope}, str(folder), None, "float32")

    assert served({}, "propagate").policy == ls.ExitPolicy.load(folder / "exit_policy" / "policy.json")
    assert served({"loops": 4}, "full").policy is None
    assert served({"readout": "gate", "threshold": 0.7}, "full").policy == ls.ExitPolicy("gate", 0.7)
    assert served({"without_guarantee": True}, "full").policy == ls.ExitPolicy("gate", 0.5, scope=Scope(unit="tokens"))
    for cache, named, words in (
        ("full", {}, "with the cache 'full'"),
        ("full", {"cache": "propagate"}, "with the cache 'full'"),
        (None, {"cache": "latest"}, "with the cache 'latest'"),
        ("propagate", {"lossless": True}, "asks for lossless texts"),
        ("propagate", {"policy": "nowhere.json"}, "there is no such file"),
    ):
        with pytest.raises(UserError, match=words):
            served({}, cache, **named)


def test_a_policy_is_held_to_its_model_and_cache(told: dict[str, Any]) -> None:
    path, weights = Path(told["policy"]), weights_sha256(FOLDER)
    ls.ExitPolicy("fixed", 3, scope=Scope(cache="full")).save(path)
    assert deployed(told).loops == 3  # all exit together, so that the cache is the same in every mode
    ls.ExitPolicy("gate", 0.5, scope=Scope(model=weights, unit="tokens", cache="full")).save(path)
    with pytest.raises(UserError, match="guarantees nothing"):
        deployed(told)
    policy = deployed({**told, "without_guarantee": True}).policy
    assert policy is not None
    assert (policy.readout, policy.threshold, policy.model) == ("gate", 0.5, weights)
    ls.ExitPolicy("gate", 0.5, scope=Scope(model=weights, precision="bfloat16")).save(path)
    with pytest.raises(UserError, match="weights in bfloat16"):
        deployed(told)
    ls.ExitPolicy("gate", 0.5, scope=Scope(model=weights, unit="tokens", cache="propagate")).save(path)
    assert deployed(told).policy == ls.ExitPolicy.load(path)


def test_policies_that_requests_may_ask_for(tmp_path: Path) -> None:
    """Each is held to its model, as the deployment's own is; a deployment without one of its own runs all loops."""
    fast, other = str(tmp_path / "fast.json"), str(tmp_path / "other.json")
    ls.ExitPolicy("margin", 0.3).save(fast)
    ls.ExitPolicy("gate", 0.5, scope=Scope(model="ab" * 32)).save(other)
    told = {"policies": {"fast": fast}, "exits_log": "exits.jsonl"}
    offered = deployed(told)
    assert (offered.policy, offered.policies, offered.adaptive) == (None, {"fast": ls.ExitPolicy("margin", 0.3)}, True)
    assert str(offered) == (
        "up to 4 loops, cache 'propagate'; by default all 4 loops; 'fast' is margin at 0.3 (no guarantee)"
    )
    shallow = deployed({**told, "readout": "fixed", "threshold": 2})  # requests may still go deeper
    assert (shallow.loops, shallow.policy) == (4, ls.ExitPolicy("fixed", 2))
    with pytest.raises(UserError, match="calibrated for another model"):
        deployed({"policies": {"other": other}})


def test_what_a_request_may_ask_for(tmp_path: Path) -> None:
    ls.ExitPolicy("margin", 0.3).save(tmp_path / "fast.json")
    offered = deployed({"readout": "gate", "threshold": 0.5, "policies": {"fast": str(tmp_path / "fast.json")}})
    for depth, policy in (
        (None, ls.ExitPolicy("gate", 0.5)),
        ("full", ls.ExitPolicy("fixed", 4)),
        (3, ls.ExitPolicy("fixed", 3)),
        ("fast", ls.ExitPolicy("margin", 0.3)),
    ):
        arguments = {"something": 1} if depth is None else {DEPTH_KEY: depth}
        check_depth(arguments, offered)
        assert policy_of(requested_depth(arguments), offered) == policy
    for arguments, words in (
        ({DEPTH_KEY: 0}, "from 1 to 4, or 'full', 'fast'; got 0"),
        ({DEPTH_KEY: 5}, "got 5"),
        ({DEPTH_KEY: 2.0}, r"got 2\.0"),
        ({DEPTH_KEY: "2"}, "got '2'"),
        ({DEPTH_KEY: True}, "got True"),
        ({DEPTH_KEY: "slow"}, "got 'slow'"),
        ({DEPTH_KEY: ["fast"]}, "got"),
        ({"loopscope_depht": 2}, "Unknown argument 'loopscope_depht'"),
        ({"policy": "fast"}, "Unknown argument 'policy'"),
    ):
        with pytest.raises(UserError, match=words):
            check_depth(arguments, offered)
    with pytest.raises(UserError, match="answers every request with 2 loops"):
        check_depth({DEPTH_KEY: 1}, deployed({"loops": 2}))


def test_the_log_at_the_start_names_policy_guarantee_and_cache(told: dict[str, Any]) -> None:
    policy = certified()
    policy.save(Path(told["policy"]))
    assert policy.guarantee is not None
    words = f"up to 4 loops, cache 'propagate'; the policy is {policy} (guarantee: {policy.guarantee.sentence})"
    assert str(deployed(told)) == words
    assert str(deployed({"loops": 2})) == "every token takes 2 loops"


def certified(model: str | None = None) -> ls.ExitPolicy:
    """For the cache that vLLM has."""
    policy = ls.calibrate(random_trajectory(5, rows=300, loops=4, split="validation"), 0.5, 0.6, readout="margin")
    assert policy.guarantee is not None
    return replace(policy, scope=Scope(unit="tokens", cache="propagate", precision="float32", model=model))


def test_a_guarantee_is_not_for_a_cache_of_another_precision(told: dict[str, Any]) -> None:
    """A rule without a guarantee is served, whatever the cache."""
    policy = certified(weights_sha256(FOLDER))
    policy.save(Path(told["policy"]))
    assert deployed(told).policy == policy
    assert deployed({**told, "without_guarantee": True}, "fp8_e5m2").policy is not None
    replace(policy, certificate=None).save(Path(told["policy"]))
    assert deployed(told, "fp8_e5m2").policy is not None


def engine_config(folder: Path, told: dict[str, Any], **options: Any) -> Any:
    """What vLLM makes of a checkpoint and of what it is told, before an engine starts."""
    pytest.importorskip("vllm.config", reason="needs an environment with vLLM: make test-vllm")
    from vllm.engine.arg_utils import EngineArgs

    overrides, sizes = {"loopscope": told}, {"max_model_len": 128, "dtype": "float32", "skip_tokenizer_init": True}
    return EngineArgs(str(folder), hf_overrides=overrides, **sizes, **options).create_engine_config()


def test_what_vllm_makes_of_a_deployment(told: dict[str, Any], tmp_path: Path) -> None:
    """No window that a Qwen does not use, no adapters, and a cache of another precision is told of by vLLM's name."""
    window = {"use_sliding_window": False, "sliding_window": 8}
    found = engine_config(write_looped_llama(tmp_path / "qwen", looping={"source": "qwen2"}, **window), {"loops": 2})
    assert (found.cache_config.sliding_window, found.model_config.get_sliding_window()) == (None, None)
    certified().save(Path(told["policy"]))
    for words, given, options in (
        ("merge them into its weights", {}, {"enable_lora": True}),
        ("holds them in fp8", told, {"kv_cache_dtype": "fp8_e5m2"}),
    ):
        with pytest.raises(Exception, match=words):
            engine_config(FOLDER, given, **options)


PLUGIN = """
import sys
sys.modules |= dict.fromkeys(("accelerate", "peft"))  # which vLLM does not bring
from loopscope.integrations.pretrained_configuration import register_configurations
import loopscope.integrations.vllm.deployment
from transformers import AutoConfig
register_configurations()
assert AutoConfig.from_pretrained({folder!r}).total_ut_steps == 4
heavy = ("loopscope.integrations.transformers", "transformers.trainer")
print(*(name for name in sys.modules if name.startswith(heavy)))
sys.modules["loopscope.integrations.vllm.deployment"] = None
loopscope.integrations.vllm.register()
"""


def test_the_plugin_imports_little_and_never_ends_a_server() -> None:
    """Every process of vLLM runs it, whatever is served; where it does not work, it warns once."""
    script = PLUGIN.format(folder=str(FOLDER))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not done.stdout.strip()
    assert done.stderr.count("LoopScope's plugin does not work here") == 1


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"loop": 2}, "loop"),
        ({"policies": {"full": "policy.json"}}, "'full' cannot be the name"),
        ({"policies": {"2": "policy.json"}}, "'2' cannot be the name"),
        ({"policies": {"fast": "nowhere.json"}}, "nowhere.json"),
        ({"readout": "gate"}, "together"),
        ({"readout": "gate", "threshold": 0.5, "policy": "policy.json"}, "not both"),
        ({"readout": "oracle", "threshold": 1}, "oracle"),
        ({"readout": "fixed", "threshold": 5}, "beyond the 4 loops"),
        ({"exits_log": "exits.jsonl"}, "nothing to log"),
        ({"readout": "fixed", "threshold": 2, "exits_log": "exits.jsonl"}, "nothing to log"),
        ({"policy": "nowhere.json"}, "nowhere.json"),
        ("gate", "loopscope"),
    ],
)
def test_what_makes_no_sense_is_refused(told: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        deployed(told)


@pytest.mark.parametrize(("log", "words"), [("nowhere/exits.jsonl", "No such file"), (".", "Is a directory")])
def test_a_log_that_cannot_be_written_is_refused(log: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        check_exits_log(tmp_path / log)


def test_a_file_of_the_user_is_no_log(tmp_path: Path) -> None:
    """A worker cuts what the one before it did not finish, so another file would lose its last line."""
    log = tmp_path / "exits.jsonl"
    for begun in (b"", b'{"ran', b'{"ran": 2, "texts": [0], "loops": [1]}\n{"ra'):
        log.write_bytes(begun)
        check_exits_log(log)
        assert log.read_bytes() == begun
    for other in (b'{"prompt": "1 and 2"}', b"notes"):
        log.write_bytes(other)
        with pytest.raises(UserError, match=r"exits\.jsonl is there and is no log of exits; choose another"):
            check_exits_log(log)
        assert log.read_bytes() == other


def test_a_gate_that_is_not_there_is_refused() -> None:
    values = looped_llama_config(looping={"gate": "none"})
    with pytest.raises(UserError, match="no gate"):
        read_deployment({**values, "loopscope": {"readout": "gate", "threshold": 0.5}}, "", None, "float32")


class Step:
    """What vLLM says of a step, for a log of it."""

    def __init__(self, *requests: tuple[int, int, int, bool]) -> None:
        blocks, new, lengths, prefilling = (np.array(part) for part in zip(*requests, strict=True))
        self.ends = new.cumsum()
        self.starts, self.lengths, self.first_blocks, self.prefilling = self.ends - new, lengths, blocks, prefilling


def test_a_log_has_every_text_with_its_loops(tmp_path: Path) -> None:
    """A prompt in two parts; a place in the cache that a second text takes after the first."""
    log, path = ExitsLog(tmp_path / "exits.jsonl"), tmp_path / "exits.jsonl"
    log.note(Step((7, 2, 2, True), (9, 1, 1, True)), np.array([5, 6, 8]), np.array([1, 2]), 4)
    log.note(Step((7, 1, 3, True), (9, 1, 2, False)), np.array([4, 3]), np.array([3, 1]), 4)
    log.note(Step((9, 1, 3, False), (7, 1, 4, False)), np.array([2, 2]), np.array([2, 2]), 2)
    log.note(Step((9, 2, 2, True)), np.array([1, 1]), np.array([4]), 4)
    texts, steps = read_exits(path)
    assert texts == [
        TextExits(3, prompt_digest([5, 6, 4]), [3, 2]),
        TextExits(1, prompt_digest([8]), [2, 1, 2]),
        TextExits(2, prompt_digest([1, 1]), [4]),
    ]
    assert [step.ran for step in steps] == [4, 4, 2, 4]


def test_a_text_that_is_read_again_with_a_part_of_one_token(tmp_path: Path) -> None:
    """Which looks like a token of a text, until the next part comes: the prompt is all of them."""
    log, path = ExitsLog(tmp_path / "exits.jsonl"), tmp_path / "exits.jsonl"
    log.note(Step((7, 3, 3, True)), np.array([5, 6, 7]), np.array([4]), 4)
    log.note(Step((7, 1, 4, False)), np.array([8]), np.array([1]), 1)
    log.note(Step((7, 2, 6, True)), np.array([9, 3]), np.array([2]), 4)
    log.note(Step((7, 1, 7, False)), np.array([1]), np.array([3]), 3)
    assert read_exits(path)[0] == [TextExits(6, prompt_digest([5, 6, 7, 8, 9, 3]), [2, 3])]
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines, lines[2]]))
    with pytest.raises(UserError, match="line 5"):
        read_exits(path)


def test_a_log_goes_on_after_a_kill(tmp_path: Path) -> None:
    """A line that was not finished is left out; texts of the next deployment are others."""
    path = tmp_path / "exits.jsonl"
    ExitsLog(path).note(Step((7, 2, 2, True)), np.array([5, 6]), np.array([1]), 4)
    with path.open("a") as file:
        file.write('{"ran": 2, "texts": [0], "lo')
    assert [text.loops for text in read_exits(path)[0]] == [[1]]
    ExitsLog(path).note(Step((7, 2, 2, True)), np.array([5, 6]), np.array([3]), 4)
    assert [text.loops for text in read_exits(path)[0]] == [[1], [3]]


@pytest.mark.parametrize(
    "line", ["{}", "[]", '{"ran": 1, "texts": [0], "loops": [1]}', '{"ran": 1, "texts": [0], "loops": []}']
)
def test_what_is_no_log_is_refused(line: str, tmp_path: Path) -> None:
    (tmp_path / "exits.jsonl").write_text(line + "\n")
    with pytest.raises(UserError, match="line 1"):
        read_exits(tmp_path / "exits.jsonl")
