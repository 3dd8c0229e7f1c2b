"""What did the paper publish? The numbers of its tables, its claims and where it disagrees with itself.

They are the paper's, typed from its tables into `paper.toml`, so that they can be shown beside one's own and labelled
as such; nothing here is measured. The file says how names and units translate.
"""

from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Literal

import msgspec

from loopscope.config import Settings, build, read_toml


class PublishedValue(Settings, frozen=True, kw_only=True):
    """A number of the paper: mean and deviation over seeds."""

    mean: float
    deviation: float


class TrainedWith(Settings, frozen=True, kw_only=True):
    """The training of a model in the paper: its gate, depth prior and beta."""

    gate: Literal["none", "linear", "mlp", "unstated"]  # none: a fixed prior
    prior: Literal["uniform", "geometric"]
    geometric_lambda: float | None = msgspec.field(default=None, name="lambda")
    beta: float | None = None  # None where the paper does not say it, or there is no gate


class PublishedFrontier(Settings, frozen=True, kw_only=True):
    """The D@X of a model and readout in the paper."""

    training: TrainedWith
    readout: str
    depth_at: dict[str, PublishedValue]  # the paper's D@X for X of 0.95, 0.98, 0.99; what it marks N/A is not there


class OverSeedsPoint(Settings, frozen=True, kw_only=True):
    """An operating point in the paper, over seeds."""

    training: TrainedWith
    readout: str
    accuracy: PublishedValue
    loops: PublishedValue


class PublishedPoint(Settings, frozen=True, kw_only=True):
    """An operating point in the paper."""

    accuracy: float
    loops: float


class OuroPair(Settings, frozen=True, kw_only=True):
    """A row of the paper's Ouro table: the gate beside the best readout without one."""

    model: str
    benchmark: str
    gate: PublishedPoint
    readout: str  # the post-hoc one
    post_hoc: PublishedPoint


class OuroBest(PublishedPoint, frozen=True, kw_only=True):
    """A row of the paper's table of reasoning-tuned models: the best readout."""

    model: str
    benchmark: str
    readout: str


class PublishedLatency(PublishedPoint, frozen=True, kw_only=True):
    """A time in the paper."""

    benchmark: str | None = None  # Ouro's
    training: TrainedWith | None = None  # MANO's
    readout: str
    milliseconds: float  # an example
    speedup: float


class PublishedFigure(Settings, frozen=True, kw_only=True):
    """A figure or table that the paper published, and the names of its counterparts among the products."""

    label: str
    number: str
    section: str  # or the appendix's letter
    title: str
    products: tuple[str, ...] = ()  # their counterparts in a report
    key: str = ""  # of a table: the field of `Paper` with its rows


class Claim(Settings, frozen=True, kw_only=True):
    """A number in the paper's text; `borne_out` if the paper's own table agrees."""

    key: str
    section: str
    table: str
    about: str
    low: float
    high: float
    of: int | None = None  # where it counts
    borne_out: bool


class Inconsistency(Settings, frozen=True, kw_only=True):
    """Two places in the paper that contradict each other, or a gap in what it states."""

    key: str
    kind: Literal["contradiction", "tension", "unstated"]
    where: tuple[str, ...]
    one: str
    other: str


class Paper(Settings, frozen=True, kw_only=True):
    """The published numbers of the paper, from `paper.toml`."""

    fixed_prior: tuple[PublishedFrontier, ...]
    fixed_vs_gate: tuple[PublishedFrontier, ...]
    ouro: tuple[OuroPair, ...]
    ouro_latency: tuple[PublishedLatency, ...]
    mano_latency: tuple[PublishedLatency, ...]
    uniform_ordering: dict[str, PublishedValue]  # by readout
    geometric_ordering: dict[str, PublishedValue]
    parity: tuple[OverSeedsPoint, ...]
    ouro_thinking: tuple[OuroBest, ...]
    tables: tuple[PublishedFigure, ...]
    figures: tuple[PublishedFigure, ...]
    claims: tuple[Claim, ...]
    inconsistencies: tuple[Inconsistency, ...]


@cache
def published() -> Paper:
    """Read the paper's numbers, once."""
    return build(Paper, read_toml(Path(str(files("loopscope.paper") / "paper.toml"))), "paper.toml")
