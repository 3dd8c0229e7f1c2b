"""What a deployment of vLLM is told, and what it notes of its exits: taken as it stands, or refused."""

import json

from loopscope.integrations.vllm.deployment import read_deployment
from loopscope.integrations.vllm.exits_log import read_exits

from .mutations import spoil_json
from .runner import Case, WrongError
from .world import World

_LOG = """{"ran": 4, "texts": [0, 1], "loops": [2, 1], "prompts": {"0": [3, "0a1b"], "1": [1, "2c3d"]}}
{"ran": 2, "texts": [1, 0], "loops": [1, 2]}
{"ran": 3, "texts": [0], "loops": [3]}
"""


def deployment(world: World, case: Case) -> str:
    folder = world.golden["ouro-tiny"]
    policy = case.rng.choice([path for name, path in sorted(world.policies.items()) if name != "fixed"])
    good: tuple[dict[str, object], ...] = (
        {"loops": 2},
        {"readout": "gate", "threshold": 0.5, "exits_log": "exits.jsonl", "loops": 3},
        {"readout": "fixed", "threshold": 2},
        {"policy": str(policy), "without_promise": True},
    )
    data = spoil_json(case.rng, json.dumps(case.rng.choice(good)).encode())
    case.notes.append(data.decode(errors="replace")[:500])
    try:
        overrides = json.loads(data)
    except (ValueError, RecursionError):  # vLLM's own command line reads it
        return "other"
    config = json.loads((folder / "config.json").read_text())
    found = read_deployment({**config, "loopscope": overrides}, str(folder), None, "float32")
    if overrides.get("readout") == "fixed":
        if found.loops != overrides["threshold"] or found.policy is not None:
            raise WrongError("a fixed depth is not that of the overrides")
    elif found.loops != (overrides.get("loops") or config["total_ut_steps"]):
        raise WrongError("the loops are not those of the overrides")
    elif "readout" in overrides and (found.policy is None or found.policy.threshold != float(overrides["threshold"])):
        raise WrongError("the policy is not that of the overrides")
    return "other"


def exits_log(world: World, case: Case) -> str:
    path = case.inputs / "exits.jsonl"
    path.write_text(_LOG)
    case.spoil(path)
    texts, steps = read_exits(path)
    lines = [json.loads(line) for line in path.read_bytes().decode("utf-8-sig").split("\n")[:-1] if line.strip()]
    if [step.loops for step in steps] != [line["loops"] for line in lines]:
        raise WrongError("the loops are not those of the file")
    counts: dict[int, int] = {}
    for line in lines:
        for text in line["texts"]:  # of a prompt in parts only what comes with and after the last one counts
            counts[text] = 1 if str(int(text)) in line.get("prompts", {}) else counts[text] + 1
    if [len(text.loops) for text in texts] != list(counts.values()):
        raise WrongError("texts lost loops, or have some of others")
    return "other"
