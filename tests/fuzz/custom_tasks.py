"""A task of the user's own is code: what its methods return is checked before anything is trained, or it trains.

The task of the docs, in which one or two expressions say something else: a wrong type or shape, no value, an error.
"""

import re
import sys
from pathlib import Path

from .runner import Case
from .world import HARDLY, World, setting

DOCS = Path(__file__).parents[2] / "docs" / "reference" / "tasks.md"
_RETURNED = re.compile(r"(?<=return ).+")
_ASSIGNED = re.compile(r"(?<=int = )\d+")
_ODD = (
    *("None", "1", "-1", "2**70", "'x'", "[]", "()", "{}", "self", "type", "np.nan", "np.inf", "True", "1j", "1.5"),
    *("1 / 0", "undefined_name", "[].pop()", "int('\\x1b[31m')", "exit(3)", "next(iter([]))", "(x for x in ())"),
    *("range(0)", "range(-3, 4)", "range(2, 50, 2)", "range(1, 3)", "range(5, 6)", "[1, 2, 3]", "np.arange(4)"),
    *("['a'] * 3", "['\\x1b[31m', 'b']", "['a b', 'c']", "['', 'a']", "[str(n) for n in range(300)]", "'abc'"),
    *("np.zeros(3)", "np.zeros((2, 2, 2))", "np.zeros((0, 4), int)", "[[1], [2, 3]]", "np.full(1, np.inf)"),
    *(
        "difficulty",
        "difficulty + 1",
        "difficulty / 2",
        "-difficulty",
        "np.ones_like(difficulty)",
        "0 * difficulty + 9",
    ),
    *("tokens", "tokens[:, 1]", "tokens[:, 0] - 1", "lengths", "tokens[::2].sum(axis=1) % 5", "tokens.sum() % 5"),
    *("draws.integers(np.full((len(difficulty), 40), 5))", "draws.integers(np.full((7, 3), 5))", "draws.integers(5)"),
    *("np.random.default_rng().integers(0, 5, (len(difficulty), difficulty.max()))", "np.ma.masked_all(3)", "b'ab'"),
)
_SIZES = ("task.train_examples=200", *HARDLY[1:], "model.loops=2", "model.block_size=11", "task.options.max_terms=4")


def sums() -> str:
    """The module of the docs."""
    found = re.search(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert found is not None
    return found[1]


def custom_task(world: World, case: Case) -> str:
    """It trains, and its examples are recorded; or one sentence says what is wrong, before anything is written."""
    module = f"task_{case.folder.name.replace('-', '_')}"
    text = sums()
    for _ in range(case.rng.choice((1, 1, 2))):
        pattern = _RETURNED if case.rng.random() < 0.85 else _ASSIGNED
        at = case.rng.choice([*pattern.finditer(text)])
        text = text[: at.start()] + case.rng.choice(_ODD) + text[at.end() :]
    Path(f"{module}.py").write_text(text)
    case.notes.append(text[text.index("class") :])
    case.verb, words = "train, a custom task", setting(*_SIZES).split()
    try:
        case.command("train", "demo", "--out", case.out, "--set", f"task={module}:Sums", *words, "--device", "cpu")
        named, split = ("--with-task", f"{module}:Sums"), case.rng.choice(("validation", "test", "extrapolation"))
        case.command("record", "task", case.out, "--split", split, *named)
    finally:
        sys.modules.pop(module, None)
    return "other"
