"""Which recordings come with LoopScope? Those of five models like the demo's, to be tried right after installation.

`demo/MODEL/SPLIT` is a recording like any other. `scripts/example_recordings.py` made it of a run of `loopscope demo`:
some of the examples, in half precision, with the logits of the two answers and the largest of all others.
"""

from pathlib import Path
from typing import NamedTuple

from loopscope.errors import check_known
from loopscope.recording_paths import ANALYSED
from loopscope.trajectory import Trajectory

EXAMPLES = Path(__file__).parent
PREFIX = "example:"


class Example(NamedTuple):
    """The models of an example, the one that stands for all where one is asked for, and the one to compare with."""

    models: tuple[str, ...]
    subject: str
    reference: str


SHIPPED = {
    "demo": Example(
        ("fixed-geometric", "fixed-uniform", "linear-gate", "mlp-gate", "decoupled-gate"),
        subject="linear-gate",
        reference="fixed-geometric",
    )
}


def load_example(name: str = "demo") -> dict[str, tuple[Trajectory, Trajectory]]:
    """Load the recordings that come with LoopScope.

    Parameters
    ----------
    name
        The name of the example (default: "demo"). The example "demo" has five models like those of `loopscope demo`,
        trained for 2,400 steps. Two models have a fixed prior, two have a jointly trained gate, and one has a decoupled
        gate.

    Returns
    -------
    dict[str, tuple[Trajectory, Trajectory]]
        The validation and the test recording of every model, by name; you can pass the dictionary to `ls.report` and
        `ls.transfer`.

    Raises
    ------
    UserError
        If no example has this name.

    Examples
    --------
    >>> import loopscope as ls
    >>> models = ls.load_example("demo")
    >>> list(models)
    ['fixed-geometric', 'fixed-uniform', 'linear-gate', 'mlp-gate', 'decoupled-gate']
    >>> validation, test = models["decoupled-gate"]
    >>> ls.diagnose(validation, test, reference=models["fixed-geometric"]).verdict
    'neither'
    """
    check_known(name, SHIPPED, "example")
    loaded = {}
    for model in SHIPPED[name].models:
        validation, test = (Trajectory.load(EXAMPLES / name / model / split) for split in ANALYSED)
        loaded[model] = (validation, test)
    return loaded


def example_folder(text: str) -> Path:
    """The folder of `example:NAME`, `example:NAME/MODEL` or `example:NAME/MODEL/SPLIT`."""
    name, *rest = text.removeprefix(PREFIX).split("/", 2)
    check_known(name, SHIPPED, "example")
    for part, known, what in zip(rest, (SHIPPED[name].models, ANALYSED), ("model", "split"), strict=False):
        check_known(part, known, f"{what} of the example")
    return EXAMPLES.joinpath(name, *rest)


def example_of(folder: Path) -> Example | None:
    """The example that a folder belongs to; None for a folder of the user's."""
    inside = folder.is_relative_to(EXAMPLES) and folder.relative_to(EXAMPLES).parts
    return SHIPPED.get(inside[0]) if inside else None


def as_typed(folder: Path) -> str:
    """What to type for a folder: that of an example has a short name."""
    return str(folder) if example_of(folder) is None else f"{PREFIX}{folder.relative_to(EXAMPLES).as_posix()}"
