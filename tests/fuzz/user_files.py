"""What users write is theirs to change: what is read of a spoilt file must be what the file says, or be rejected.

Settings of a run, a study or a deployment, prompts, examples, documents, questions; from Python, arrays. Settings that
are accepted and small are trained; what is large must be rejected by the estimate, as the command line does it.
"""

import json
import tomllib
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import loopscope as ls
from loopscope.config import plain
from loopscope.errors import UserError
from loopscope.integrations.vllm.deployment import Deployment, read_deployment
from loopscope.integrations.vllm.exits_log import read_exits
from loopscope.integrations.vllm.request_depth import check_depth, policy_of, requested_depth
from loopscope.models.checkpoint import load_model
from loopscope.models.tokenizer import chat_prompt, load_tokenizer
from loopscope.recording.text_recording import record_text
from loopscope.studies.plan import make_plan
from loopscope.studies.study_file import expand_study
from loopscope.training.estimate import check_memory, estimate_time
from loopscope.training.settings import RunSettings, read_pretrain_settings, read_settings

from .mutations import STRINGS, Rng, spoil_json, toml_text
from .runner import Case, json_values
from .world import CPU, TEXTS, World

SMALL = 50_000
"""Layers x width x loops x rows x steps that are trained in no time."""
ODD_KEYS = (
    *("objective.options.x", "objective", "training", "task", "model", "x", "", ".", "a..b", "model.loops.x"),
    *("model.name", "model.options.x", "task.options.x"),
    *(" training.seed ", "\x1b[31m", "a." * 3_000 + "b"),
)
_LOG = """{"ran": 4, "texts": [0, 1], "loops": [2, 1], "prompts": {"0": [3, "0a1b"], "1": [1, "2c3d"]}}
{"ran": 2, "texts": [1, 0], "loops": [1, 2]}
{"ran": 3, "texts": [0], "loops": [3]}
"""


def check_holds(built: Mapping[Any, Any], said: Mapping[Any, Any]) -> None:
    """Every value of a file is in what was built from it."""
    for key, value in said.items():
        assert key in built, f"a key was ignored: {key}"
        if isinstance(value, Mapping) and isinstance(built[key], Mapping):
            check_holds(built[key], value)
        elif key in ("objective", "model", "task") and isinstance(value, str):
            check_holds(built[key], {"name": value})
        elif isinstance(value, list) and isinstance(built[key], list | tuple) and len(value) == len(built[key]):
            check_holds(dict(enumerate(built[key])), dict(enumerate(value)))
        else:
            same = (plain(value), float(value) if isinstance(value, int) else value)
            assert built[key] in same, f"{key} is not what the file says"


def read_toml(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))


def run_settings(world: World, case: Case) -> str:
    path = case.spoilt_copy(world.settings)
    settings = read_settings(str(path))
    check_holds(plain(settings), read_toml(path))
    _try(case, path, settings)
    return "other"


def _try(case: Case, path: Path, settings: RunSettings, *words: str) -> None:
    """What the command line asks before it trains; then what is small is trained."""
    check_memory(settings, CPU)
    estimate_time(settings, CPU).check()
    task, model, training = settings.generator, settings.model, settings.training
    size = float(model.layers) * model.width * model.loops * training.batch_size * training.steps
    few = task.train_examples + task.validation_examples + task.test_examples < 10_000 and task.positions < 1_000
    if size < SMALL and few and case.rng.random() < 0.3:
        case.command("train", path, "--out", case.out, "--device", "cpu", *words)


def assignment(world: World, case: Case) -> str:
    """`--set`, alone or twice."""
    words, known = [], [f"{table}.{key}" for table, keys in read_toml(world.settings).items() for key in keys]
    for _ in range(case.rng.choice((1, 1, 2))):
        key = case.rng.choice((*known, *ODD_KEYS))
        value = case.rng.choice((toml_text(case.rng), toml_text(case.rng), case.rng.choice(STRINGS)))
        words.append(case.rng.choice((f"{key}={value}", f"{key}={value}", f"{key} = {value}", value, key)))
    case.notes.append(f"--set {[word[:200] for word in words]!r}")
    settings = read_settings(str(world.settings), words)
    built = plain(settings)
    key, _, text = (part.strip() for part in words[-1].partition("="))
    for part in key.split("."):
        built = built[part]
    try:
        said = tomllib.loads(f"value = {text}")
        value = said["value"] if len(said) == 1 else text
    except tomllib.TOMLDecodeError:
        value = text
    if key in ("objective", "model", "task") and isinstance(value, str):
        value = {"name": value}
    check_holds({"value": built}, {"value": value})
    _try(case, world.settings, settings, *(each for word in words for each in ("--set", word)))
    return "other"


def pretrain_settings(world: World, case: Case) -> str:
    path = case.spoilt_copy(world.language_settings)
    check_holds(plain(read_pretrain_settings(path, [])), read_toml(path))
    return "other"


def study_file(world: World, case: Case) -> str:
    path = case.spoilt_copy(world.study)
    if case.rng.random() < 0.1:
        where = ("--store", case.out, "--out", case.folder / "out" / "study", "--device", "cpu")
        case.command("study", case.rng.choice(("plan", "status")), path, *where, "--json")
    plan = make_plan(expand_study(str(path)))
    check_holds(plain(plan.study), read_toml(path))
    assert len(plan.models) <= 10_000, "a study without bound is accepted"
    return "other"


def deployment(world: World, case: Case) -> str:
    """What a deployment of vLLM is told."""
    folder = world.golden["ouro-tiny"]
    policy = case.rng.choice([path for name, path in sorted(world.policies.items()) if name != "fixed"])
    good: tuple[dict[str, object], ...] = (
        {"loops": 2},
        {"readout": "gate", "threshold": 0.5, "exits_log": "exits.jsonl", "loops": 3},
        {"readout": "fixed", "threshold": 2},
        {"policy": str(policy), "without_guarantee": True},
        {"policies": {"fast": str(policy), "by_hand": str(world.policies["by-hand"])}, "without_guarantee": True},
    )
    data = spoil_json(case.rng, json.dumps(case.rng.choice(good)).encode())
    case.notes.append(data.decode(errors="replace")[:500])
    try:
        overrides = json.loads(data)
    except (ValueError, RecursionError):  # vLLM's own command line reads it
        return "other"
    config = json.loads((folder / "config.json").read_text())
    found = read_deployment({**config, "loopscope": overrides}, str(folder), None, "float32")
    overrides = overrides or {}  # of null, as of every value of a configuration
    _ask_for_depths(case, found)
    if overrides.get("readout") == "fixed":
        fixed = found.loops == overrides["threshold"] and found.policy is None
        assert fixed, "a fixed depth is not that of the overrides"
        return "other"
    assert found.loops == (overrides.get("loops") or config["total_ut_steps"]), "the loops are not the overrides'"
    assert list(found.policies) == list(overrides.get("policies", {})), "the policies are not the overrides'"
    if "readout" in overrides:
        threshold = None if found.policy is None else found.policy.threshold
        assert threshold == float(overrides["threshold"]), "the policy is not that of the overrides"
    return "other"


def _ask_for_depths(case: Case, found: Deployment) -> None:
    """What a request asks for is what its tokens get, or is refused before it begins."""
    good = {"loopscope_depth": case.rng.choice((1, found.loops, "full", "fast", "by_hand"))}
    asked = spoil_json(case.rng, json.dumps(good).encode()) if case.rng.random() < 0.8 else json.dumps(good).encode()
    try:
        arguments = json.loads(asked)
    except (ValueError, RecursionError):  # vLLM's server reads it
        return
    if not isinstance(arguments, dict):
        return
    case.notes.append(f"vllm_xargs: {asked.decode(errors='replace')[:200]}")
    with suppress(UserError):
        check_depth(arguments, found)
        depth = requested_depth(arguments)
        chosen = policy_of(depth, found)
        if isinstance(depth, int) or depth == "full":
            assert chosen.fixed_depth == (found.loops if depth == "full" else depth), "a request gets another depth"
        elif depth is not None:
            assert chosen == found.policies[depth], "a request gets another policy"


def exits_log(world: World, case: Case) -> str:
    """What a deployment of vLLM notes of its exits."""
    path = case.inputs / "exits.jsonl"
    path.write_text(_LOG)
    case.spoil(path)
    texts, steps = read_exits(path)
    lines = [json.loads(line) for line in path.read_bytes().decode("utf-8-sig").split("\n")[:-1] if line.strip()]
    assert [step.loops for step in steps] == [line["loops"] for line in lines], "the loops are not those of the file"
    counts: dict[int, int] = {}
    for line in lines:
        for text in line["texts"]:  # of a prompt in parts only what comes with and after the last one counts
            counts[text] = 1 if str(int(text)) in line.get("prompts", {}) else counts[text] + 1
    assert [len(text.loops) for text in texts] == list(counts.values()), "texts lost loops, or have some of others"
    return "other"


@cache
def _ready(checkpoint: Path) -> tuple[Any, Any]:
    """The model and the tokenizer of a good checkpoint, loaded once."""
    return load_model(checkpoint), load_tokenizer(checkpoint)


def prompts(world: World, case: Case) -> str:
    path = case.spoilt_copy(world.documents[case.rng.choice(("prompts.jsonl", "prompts.txt"))])
    words = ("--max-new-tokens", 2, "--json", "--device", "cpu")
    printed = case.command("generate", world.checkpoint, "--prompts", path, *words)
    lines = [line for line in path.read_bytes().decode("utf-8-sig").split("\n") if line.strip()]
    given = [json.loads(line) if path.suffix == ".jsonl" else {"prompt": line} for line in lines]
    answers = [json.loads(line) for line in printed.split("\n") if line]
    assert len(answers) == len(given), "there are more or fewer answers than prompts"
    model, tokenizer = _ready(world.checkpoint)
    entry, answer = case.rng.choice(list(zip(given, answers, strict=True)))
    said, chosen = entry.get("messages", entry.get("prompt")), answer["prompt"]
    if path.suffix != ".jsonl" and said != chosen:  # the end of a line may go
        said = said.rstrip("\r")
    assert said == chosen, "a prompt is not what the file says"
    tokens = tokenizer(chosen)["input_ids"] if isinstance(chosen, str) else chat_prompt(tokenizer, chosen)
    policy = None if entry.get("loops") is None else ls.ExitPolicy("fixed", entry["loops"])
    (alone,) = ls.generate(model, [ls.Prompt(0, np.array(tokens))], policy, max_new_tokens=2, stop=[0, 1, 2])
    assert alone.tokens == answer["tokens"], "a prompt gives another text than alone"
    return "other"


def unfinished_texts(world: World, case: Case) -> str:
    """What an interrupted command kept: it goes on to what it would have written, or is refused."""
    kept = case.spoilt_copy(world.unfinished_texts, writes=True)
    out = kept.with_name(kept.name.removesuffix(".unfinished"))
    case.command(*world.words(TEXTS, out))
    whole = world.whole_texts.read_bytes()
    assert out.read_bytes() == whole, "the texts are not those of a command that was not interrupted"
    return "same"


def examples(world: World, case: Case) -> str:
    path = case.spoilt_copy(world.documents["examples.txt"])
    printed = case.command("answer", world.run, path, "--threshold", 0.5, "--device", "cpu")
    with path.open(encoding="utf-8-sig") as lines:
        given = [line.strip() for line in lines if line.strip()]
    answered = [json.loads(line)["example"] for line in printed.split("\n") if line]
    assert answered == given, "the answered examples are not those of the file"
    return "other"


def documents(world: World, case: Case) -> str:
    name = case.rng.choice(("documents.txt", "documents.jsonl"))
    path = case.spoilt_copy(world.documents[name])
    if case.rng.random() < 0.1:
        case.command("record", "text", world.checkpoint, path, "--out", case.out, "--device", "cpu")
    recording = record_text(world.checkpoint, [path], "validation", case.out)
    text = path.read_bytes().decode()
    found = [each["text"] for each in json_values(text)] if name.endswith(".jsonl") else text.split("<|endoftext|>")
    _, tokenizer = _ready(world.checkpoint)
    tokens = [tokenizer.encode(text, add_special_tokens=False) for text in found if text.strip()]
    expected = [token for row in tokens for token in row[1:]]
    assert recording.required_labels.tolist() == expected, "the recorded tokens are not those of the text"
    return "other"


def benchmark(world: World, case: Case) -> str:
    """The questions of a benchmark as lm_eval reads them."""
    data = case.copy(world.benchmarks, "data")
    case.spoil(case.rng.choice(sorted((data / "openbookqa").iterdir())))
    recording = ls.record_benchmark(world.checkpoint, "openbookqa", "test", case.out, data=data, limit=2)
    assert recording.num_examples <= 2, "more questions than were asked for"
    return "other"


def arrays(world: World, case: Case) -> str:
    """A recording of arrays of which one or two have another type or shape, or a strange number.

    Which error a wrong type raises is not looked at, only whether something wrong is accepted.
    """
    whole = ls.Trajectory.load(world.recordings["plain"])
    rows, loops = whole.num_examples, whole.num_loops
    given = {name: np.array(getattr(whole, name)) for name in ("labels", "difficulty", "hidden", "gate_logits")}
    given |= {"seen": np.arange(rows) % 2 == 0, "sequences": np.arange(rows) // 4}
    if case.rng.random() < 0.5:
        given |= {"logits": np.array(whole.logits), "norms": np.ones((rows, whole.num_classes or 2), np.int64)}
    else:
        given |= {"predictions": np.array(whole.predicted), "label_log_probs": -whole.cross_entropy}
    for name in case.rng.sample(list(given), case.rng.choice((1, 1, 2))):
        given[name] = _other_array(case.rng, given[name])
        case.notes.append(f"{name}: {np.asarray(given[name], dtype=object).shape} {given[name]!r:.100}")
    try:
        made = ls.Trajectory(**given, signals={"own": np.zeros((rows, loops))}, split="validation")  # type: ignore[arg-type]
    except Exception:  # whatever Python, NumPy or LoopScope say
        return "refused"
    _check_trajectory(made, given)
    return "other"


def _other_array(rng: Rng, array: Any) -> Any:
    def with_one(value: float) -> Any:
        other = array.astype(np.float64)
        other.reshape(-1)[rng.randrange(other.size)] = value
        return other

    types = (np.float64, np.int64, np.int8, np.uint64, np.complex64, object, str, bool)
    strange: list[Callable[[], Any]] = [
        *(lambda kind=kind: array.astype(kind) for kind in types),  # type: ignore[misc]
        *(lambda value=value: with_one(value) for value in (np.nan, np.inf, -np.inf)),  # type: ignore[misc]
        *(lambda: array[:-1], lambda: array[:0], lambda: array.T, lambda: array[None], lambda: array.reshape(-1)),
        *(lambda: array + 0.5, lambda: array * 10**6, lambda: -1 - array.astype(int), lambda: array.tolist()),
        lambda: np.ma.masked_array(array, mask=True),
    ]
    return rng.choice(strange)()


def _check_trajectory(made: ls.Trajectory, given: dict[str, Any]) -> None:
    """What is said of it holds."""
    seen = np.asarray(given["seen"]).astype(bool)
    assert seen.all() or made.unseen().num_examples == int((~seen).sum()), "seen examples are counted as unseen"
    assert made.predicted.dtype.kind in "iu", "answers are no whole numbers"
    shape = (made.num_examples, made.num_loops)
    assert made.labels is None or made.correct.shape == shape, "answers are judged in another shape"
    assert made.norms is None or (np.asarray(made.norms) > 0).all(), "a choice has no characters"
    made.save(Path("saved"))
    assert ls.Trajectory.load(Path("saved")).sha256 == made.sha256, "a saved trajectory is loaded as another one"
