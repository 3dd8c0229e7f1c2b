"""Every option of every verb, found in the parser itself: a verb that joins it needs only some good words here."""

import argparse
from typing import Any

from conftest import verbs

from .mutations import NUMBERS, STRINGS
from .runner import Case
from .world import HARDLY, OWN_MODEL, World, setting

_TINY = setting(*HARDLY)
_TRAINED_ON = "--text {w.texts[0]} --validation {w.texts[1]} --out {c.out}"
_LIVE = "{w.checkpoint} {w.documents[documents.txt]} --recording {w.live_runs[recording]} --out {c.out}"
GOOD = {
    "train": f"demo --out {{c.out}} {_TINY}",
    "pretrain": f"{{w.language_settings}} --set training.steps=1 {_TRAINED_ON}",
    "pretrain --start": f"{{w.further_settings}} --start {{w.checkpoint}} {_TRAINED_ON}",
    "loop": "{w.llama} --prelude 1 --core 1 --loops 3 --out {c.out}",
    "record task": "{w.run} --split test --examples 20 --out {c.out}",
    "record task --with-model": (
        f"{{w.custom_run}} --split test --examples 20 --loops 5 --with-model {OWN_MODEL} --out {{c.out}}"
    ),
    "record text": "{w.checkpoint} {w.documents[documents.txt]} --out {c.out}",
    "record live": f"{_LIVE} --max-drop 0.6 --confidence 0.5 --readout margin --candidates 2",
    "record live --policy": f"{_LIVE} --policy {{w.policies[by-hand]}}",
    "record benchmark": "{w.checkpoint} openbookqa --split test --data {w.benchmarks} --limit 2 --out {c.out}",
    "sweep --at": "example:demo/mlp-gate --readout margin --at 0.9",
    "sweep": "{w.recordings[plain]} {w.recordings[test]} --readout margin",
    "check": "{w.recordings[test]} --policy {w.policies[margin]}",
    "monitor": "{w.recordings[test]} --policy {w.policies[margin]} --audit 0.5",
    "monitor --policy on average": "{w.recordings[test]} --policy {w.policies[average]}",
    "diagnose": "{w.run}",
    "diagnose --reference": "example:demo/mlp-gate --reference example:demo/fixed-geometric",
    "compare": "{w.run} gate margin",
    "report": "{w.run} --out {c.out} --product headline",
    "report --transfer": "{w.run} example:demo/linear-gate --transfer --out {c.out} --product headline",
    "calibrate": "{w.recordings[plain]} --max-drop 0.6 --confidence 0.5 --out {c.out} --readout margin",
    "calibrate --method": (
        "{w.recordings[many]} --max-drop 0.6 --confidence 0.5 --out {c.out} --readout margin --method tolerance"
    ),
    "calibrate --cache": (
        "{w.live_runs[propagate]} --max-drop 0.95 --confidence 0.5 --out {c.out} --loss disagreement --cache propagate"
    ),
    "answer --policy": "{w.run} {w.documents[examples.txt]} --policy {w.policies[by-hand]}",
    "answer": "{w.run} {w.documents[examples.txt]} --threshold 0.5",
    "generate": "{w.checkpoint} 1and2 --max-new-tokens 2",
    "generate --max-new-tokens": "{w.saved_models[guaranteed]} 1and2 --max-new-tokens 2",
    "generate --lossless": "{w.checkpoint} 1and2 --max-new-tokens 3 --readout margin --threshold 0.1 --lossless",
    "bench exits": "{w.run} --rounds 1 --readout margin",
    "bench generation": (
        "{w.checkpoint} --text {w.documents[documents.txt]} --readout margin --threshold 0.5 --prompts 1 --cache full "
        "--prompt-tokens 2 --new-tokens 2 --rounds 1"
    ),
    "harness": "{w.checkpoint} --tasks openbookqa --data {w.benchmarks} --limit 2",
    "selfcheck": "{w.checkpoint} --only replay --rounds 1",
    "fit": "{w.recordings[plain]} --out {c.out} --steps 2",
    "fit --kind": "{w.recordings[many]} --kind induction --out {c.out}",
    "insert": "{w.own_gate} {w.run} --out {c.out}",
    "study plan": "{w.study} --out {c.out} --json",
    "study status": "{w.study} --out {c.out}",
    "study report": "{w.study} --out {c.out} --store {w.store} --product headline",
    "study run": "{w.study} --out {c.out}",
    "demo": f"--out {{c.out}} {_TINY}",
}
"""Words of every verb that are right, and take no time."""


def good_words(name: str, world: World, case: Case) -> list[object]:
    return [*_path(name), *(word.format(w=world, c=case) for word in GOOD[name].split())]


def _path(name: str) -> list[str]:
    """The verb of good words: of those before an option's name."""
    return name.partition(" --")[0].split()


def last_words(name: str, world: World, case: Case) -> list[object]:
    """What nothing else on the line may overrule: whatever is planned, little is trained."""
    if name not in ("study run", "demo"):
        return []
    store = world.store if name == "study run" else world.demo_store
    return ["--store", case.copy(store, "store"), "--engine", "local", "--workers", "1"]


SLOW = (
    *("report", "study report", "selfcheck", "bench exits", "record benchmark", "harness", "study run", "demo"),
    *("record live", "record live --policy", "report --transfer"),
)
"""Verbs that take long, or need what takes long to be imported."""
_LEFT_OUT = ("--open", "--help", "--version", "--force")
_SIZES = (
    *("examples", "max_new_tokens", "width", "classes", "loops", "prompts", "limit", "batch_size", "length"),
    *("batch_tokens", "workers"),
)
"""A large one is long work, which is right; one beyond all bounds is refused."""
_TIMES = ("steps", "rounds", "threads")
"""So often, however often it is."""
_READOUTS = (
    *("margin", "gate", "entropy", "oracle", "fixed", "auto", "gate:linear", "stopper:induction", "none", "os:path"),
    *("no.such:x", ":"),
)
_PLACES = ("bfloat16", "float16", "cpu", "cuda", "cuda:99", "mps", "full", "latest", "train", "extrapolation")
_NAMES = {
    **dict.fromkeys(("readout", "first", "second", "with_readout"), _READOUTS),
    "with_model": (OWN_MODEL, "os:path", "json:JSONDecoder", "no.such:X", ":"),
    **dict.fromkeys(("dtype", "device", "cache", "split"), _PLACES),
    "devices": ("cuda:0", "cuda:0,cuda:1", "cuda:0,cuda:0", "cpu"),
}


def _places(world: World) -> list[object]:
    """Paths of every kind of artifact, and of none."""
    return [
        *(world.run, world.checkpoint, world.golden["huginn-tiny"], world.llama, world.looped),
        *(*world.recordings.values(), *world.gates.values(), *world.live_runs.values()),
        *(world.policies["margin"], world.policies["gate-linear"], world.policies["by-hand"], world.settings),
        *(world.study, *world.documents.values(), world.folder / "none", "/dev/null", ".", "..", "/proc/self/mem"),
        *("/nonexistent/x", "-", "a" * 300, "/" + "a/" * 2_000, *world.saved_models.values()),
        *(
            "example:demo",
            "example:demo/mlp-gate",
            "example:demo/mlp-gate/test",
            "example:",
            "example:x",
            "example:demo/..",
        ),
    ]


def _value(world: World, case: Case, action: argparse.Action) -> object:
    rng = case.rng
    most = {**dict.fromkeys(_SIZES, 2.0**62), **dict.fromkeys(_TIMES, 1e300)}.get(action.dest, 0.0)
    numbers = [number for number in NUMBERS if not 8 < _number(number) < most]
    names = [*(action.choices or ()), *_NAMES.get(action.dest, ())]
    return rng.choice(rng.choice([numbers, STRINGS, _places(world), *[names] * (2 if names else 0)]))


def _number(text: str) -> float:
    try:
        return float(text)
    except (ValueError, OverflowError):
        return -1.0


def arguments(world: World, case: Case) -> str:
    return _try(world, case, case.rng.choice([name for name in GOOD if name not in SLOW]))


def slow_arguments(world: World, case: Case) -> str:
    return _try(world, case, case.rng.choice(SLOW))


def _try(world: World, case: Case, name: str) -> str:
    rng, case.verb = case.rng, name
    words, path = good_words(name, world, case), _path(name)
    actions = [each for each in verbs()[" ".join(path)]._actions if not set(each.option_strings) & set(_LEFT_OUT)]
    for _ in range(rng.choice((0, 0, 1, 1, 2, 3) if name in SLOW else (0, 1, 1, 2, 3))):
        action = rng.choice(actions)
        if not action.option_strings:  # a positional argument: in the place of one that is there
            places = _positional(words, len(path))
            if places:
                words[rng.choice(places[:3])] = _value(world, case, action)
        elif action.nargs == 0:
            words.append(rng.choice(action.option_strings))
        else:
            value = _value(world, case, action)
            words += rng.choice(([action.option_strings[0], value], [f"{action.option_strings[0]}={value}"]))
    if rng.random() < 0.05 and name != "bench exits" and (places := _positional(words, len(path))):
        del words[rng.choice(places)]  # without a run, bench exits trains one
    if rng.random() < 0.05:
        words.insert(rng.randrange(len(words)), rng.choice(STRINGS))
    if "=" not in "".join(map(str, words[-1:])) and rng.random() < 0.5 and "device" in {each.dest for each in actions}:
        words += ["--device", "cpu"]
    words += last_words(name, world, case)
    given = [str(word).replace("\x00", "") for word in words]  # no command line can have it
    printed = case.command(*given, verdicts=(0, 1) if path[0] in ("check", "monitor", "selfcheck") else (0,))
    silent = ("generate", "answer", "insert")
    assert printed or "--out" in given or path[0] in silent, "a command did nothing, and said so"
    return "other"


def _positional(words: list[Any], first: int) -> list[int]:
    """Where words stand that are no option, nor the value of one."""
    return [at for at in range(first, len(words)) if not any(str(words[i]).startswith("--") for i in (at - 1, at))]
