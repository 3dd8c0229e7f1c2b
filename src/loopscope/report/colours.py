"""Which colour and which mark has a line, on a light and on a dark ground?

Colours are safe for colour-blind readers (Okabe-Ito for readouts, viridis for difficulty); every readout has its own
mark too.
"""

from collections.abc import Collection, Sequence
from itertools import count

Look = tuple[str, str]
"""A colour and a mark."""

_LOOKS: dict[str, Look] = {
    "fixed": ("#000000", "square"),
    "gate": ("#D55E00", "diamond"),
    "entropy": ("#0072B2", "circle"),
    "top1": ("#56B4E9", "triangle-up"),
    "margin": ("#009E73", "triangle-down"),
    "kl": ("#CC79A7", "cross"),
    "logit_change": ("#E69F00", "triangle-right"),
    "hidden_change": ("#999999", "triangle-left"),
    "hidden_cosine": ("#8C564B", "M-.7,-.7L.7,.7M.7,-.7L-.7,.7"),  # an x
    "patience": ("#332288", "M-.9,0L-.45,-.8L.45,-.8L.9,0L.45,.8L-.45,.8Z"),  # a hexagon
    "settling": ("#AA4499", "M0,-1L.28,-.28L1,0L.28,.28L0,1L-.28,.28L-1,0L-.28,-.28Z"),  # a star of four points
    "hidden_acceleration": ("#997700", "M-.9,-.8L-.9,.8L.9,-.8L.9,.8Z"),  # a bow tie
    "stopper:induction": ("#DC267F", "diamond"),
    "stopper:classifier": ("#785EF0", "square"),
    "oracle": ("#7F3C8D", "M0,.5L.6,.8L.5,.1L1,-.3L.3,-.4L0,-1L-.3,-.4L-1,-.3L-.5,.1L-.6,.8L0,.5Z"),  # a star
}
COLOURS = ("#882255", "#EE99AA", "#332288", "#DDAA33", "#CC3311", "#AA4499", "#997700", "#663333")
SHAPES = ("diamond", "triangle-up", "circle", "triangle-down", "square", "cross", "triangle-left")
"""For lines that are not a readout by itself: gates of several betas, fitted gates."""
_PLACES = {
    **{f"gate, β {beta:g}": place for place, beta in enumerate((0.001, 0.005, 0.02, 0.1, 0.5, 0.01, 0.05, 0.2))},
    "fitted linear-ponder": 8,
    "fitted linear-utility": 9,
    "fitted mlp-ponder": 10,
    "fitted mlp-utility": 11,
}
"""Those of the paper's lines, so that a line looks the same in every figure; others take what is free."""
MODELS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255", "#999999")
"""For lines of several models."""
INK = "#000000"

_VIRIDIS = ("440154", "482878", "3B528B", "2C728E", "21918C", "28AE80", "5EC962", "ADDC30", "FDE725")
_SHADES = 64


def _viridis(place: float) -> str:
    """The colour at a place from 0 (dark) to 1 (light)."""
    below = min(int(place * (len(_VIRIDIS) - 1)), len(_VIRIDIS) - 2)
    share = place * (len(_VIRIDIS) - 1) - below
    ends = [[int(_VIRIDIS[each][start : start + 2], 16) for start in (0, 2, 4)] for each in (below, below + 1)]
    return "#" + "".join(f"{round(a + share * (b - a)):02X}" for a, b in zip(*ends, strict=True))


def _shades(easy: float, hard: float) -> tuple[str, ...]:
    return tuple(_viridis(easy + (hard - easy) * each / (_SHADES - 1)) for each in range(_SHADES))


_ON_LIGHT, _ON_DARK = _shades(0.75, 0.0), _shades(1.0, 0.42)
"""From easy to hard: no yellow on white, no dark blue on black."""

DARK = {
    "#000000": "#F2F2F2",
    "#777777": "#A3ADB8",  # notes and titles of keys
    "#0072B2": "#4CA6E8",
    "#D55E00": "#FF8A3D",
    "#009E73": "#2CC79B",
    "#8C564B": "#C98F80",
    "#7F3C8D": "#C58AD4",
    "#882255": "#D9679C",
    "#332288": "#8F83E0",
    "#CC3311": "#FF7A5C",
    "#AA4499": "#D683C7",
    "#997700": "#C9A632",
    "#663333": "#B98383",
    "#DC267F": "#FF6FAE",
    "#785EF0": "#A594FF",
    **dict(zip(_ON_LIGHT, _ON_DARK, strict=True)),
}
"""What the darker colours become on a dark ground."""


def looks_of(names: Collection[str]) -> dict[str, Look]:
    """The colour and the mark of each, readouts by themselves first."""
    more = sorted((name for name in names if name not in _LOOKS), key=_natural)
    taken = {_PLACES[name] for name in more if name in _PLACES}
    free = (place for place in count() if place not in taken)
    places = [_PLACES[name] if name in _PLACES else next(free) for name in more]
    looks = {name: look for name, look in _LOOKS.items() if name in names}
    return looks | {
        name: (COLOURS[place % len(COLOURS)], SHAPES[place % len(SHAPES)])
        for name, place in zip(more, places, strict=True)
    }


def shades_of(levels: Sequence[float]) -> dict[float, str]:
    """The colour of every difficulty, by where it lies between the easiest and the hardest."""
    low, high = min(levels), max(levels)
    return {level: _ON_LIGHT[round((_SHADES - 1) * (level - low) / ((high - low) or 1))] for level in levels}


def _natural(name: str) -> tuple[str, float]:
    """Sorts names that end in a number by that number."""
    words, _, last = name.rpartition(" ")
    try:
        return words, float(last)
    except ValueError:
        return name, 0.0
