"""Which rules pick an exit? A readout maps a trajectory to an exit loop, by a threshold on one of its signals.

A `Readout` has one definition, a step from loop to loop, which a replay runs over a recording and the engine over
whatever is active: what it decides is causal, and the same in both. Those of a user are defined with `readout`, or come
with an installed package, whose entry points in the group `loopscope.readouts` have their names.

Shapes: N rows, V classes, D width.
"""

import inspect
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import entry_points
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from loopscope.config import digest
from loopscope.errors import UserError, did_you_mean, reason, reject
from loopscope.readouts.signals import (
    CONVERGENCE,
    FITTED_GATE,
    OWN_GATES,
    SIGNALS,
    STOPPER,
    Array,
    Source,
    State,
    halting,
    hidden_acceleration,
    one_loop,
    patience,
    running_cdf,
    settling,
    two_loops,
)

Step = Callable[..., Any]

GROUP = "loopscope.readouts"
OwnSource = Literal["logits", "hidden", "gate_logits", "predictions"]
OWN_SOURCES: tuple[OwnSource, ...] = get_args(OwnSource)
"""The values that a custom readout may read: those of a running model."""
NOT_LIVE = ("correct", None)
"""The sources that a running model lacks: the right answers, and signals that exist only recorded."""


@dataclass(frozen=True)
class Readout:
    """Define a signal, and whether an example exits above or below a threshold.

    LoopScope runs the same step on recordings and in the engine, so a replay and a live run make the same decisions.
    The step must compute each row independently of all other rows. Without `reads` and `step`, the signal must come
    with the recording; then LoopScope can replay the readout, but not run it live.

    Parameters
    ----------
    name
        The readout's name, of letters, digits, `_`, `.` and `-`.
    exits
        "above" or "below": the side of the threshold on which an example exits. An example also exits if its signal
        equals the threshold.
    reads
        The input of the step: "logits" [N, V], "hidden" [N, D], "gate_logits" [N] or "predictions" [N].
    step
        `step(now)` returns the signal [N]. `step(now, state)` returns the signal and the state for the next loop. The
        state is a tuple of arrays with one entry per row; at loop 1 it is None. At loops where the signal has no value
        yet, it is NaN.
    takes
        The kind of the threshold: a value of the signal ("threshold", the default), a loop ("depth"), or "nothing".

    Raises
    ------
    UserError
        If the name or the definition is not valid.

    Examples
    --------
    >>> def best_logit(logits):
    ...     return logits.max(axis=1)
    >>> ls.Readout("best_logit", exits="above", reads="logits", step=best_logit).name
    'best_logit'
    """

    name: str
    exits: Literal["above", "below"]
    reads: Source | None = None
    step: Step | None = field(default=None, repr=False)
    takes: Literal["threshold", "depth", "nothing"] = "threshold"

    def __post_init__(self) -> None:
        if self.is_own and (self.reads not in (None, *OWN_SOURCES) or (self.reads is None) != (self.step is None)):
            raise UserError(
                f"A readout reads one of {', '.join(OWN_SOURCES)} in its step, or it has neither, if it only exists "
                f"recorded; '{self.name}' reads {self.reads!r}."
            )
        named = re.fullmatch(r"[A-Za-z_][\w.-]*", self.name) and self.name != "auto"
        if not named or self.exits not in ("above", "below"):
            raise UserError(
                f"A readout has a name of letters, digits, '_', '.' and '-' (not 'auto') and exits 'above' or 'below' "
                f"its threshold; got {self.name!r} and {self.exits!r}."
            )

    @cached_property
    def looks_back(self) -> bool:
        """Tell whether the step takes a state."""
        if self.step is None or isinstance(self.step, np.ufunc):
            return False
        try:
            first, *others = inspect.signature(self.step).parameters.values()
        except (TypeError, ValueError):  # some compiled functions do not say
            return False
        if first.kind == first.VAR_POSITIONAL:
            return True
        positional = [each for each in others[:1] if each.kind not in (each.KEYWORD_ONLY, each.VAR_KEYWORD)]
        return any(each.default is each.empty or each.default is None for each in positional)

    @property
    def is_own(self) -> bool:
        """Tell whether the readout is custom, and not built in."""
        return self.step is None or not str(getattr(self.step, "__module__", "")).startswith("loopscope.")

    @cached_property
    def definition_sha256(self) -> str | None:
        """Return the hash of a custom readout: of its inputs, its exit side, and the source of its step."""
        if not self.is_own:
            return None
        try:
            step = self.step if self.step is None or inspect.isroutine(self.step) else type(self.step)
            source = None if step is None else inspect.getsource(step)
        except (OSError, TypeError):
            source = None
        return digest([self.name, self.exits, self.reads, source])

    def advance(self, now: Array, state: State | None) -> tuple[NDArray[np.float64], State | None]:
        """Compute the signal of rows at one loop.

        Parameters
        ----------
        now
            The input of the step, with one entry per row.
        state
            The state after the previous loop; None at loop 1.

        Returns
        -------
        tuple[NDArray[np.float64], State or None]
            [N] the signal, and the state for the next loop.

        Raises
        ------
        UserError
            If a custom step fails, or if it does not return one number per row.
        """
        assert self.step is not None
        now = now.view()
        now.flags.writeable = False
        try:
            found = self.step(now, state) if self.looks_back else (self.step(now), None)
            if self.is_own:
                reject(_step_problems(found, len(now)))
        except Exception as error:
            if not self.is_own:
                raise
            raise UserError(f"The step of the readout '{self.name}' failed: {reason(error)}.") from error
        result = np.asarray(found[0]).astype(np.float64)
        if result.shape != now.shape[:1] or np.isinf(result).any():
            raise UserError(
                f"The readout '{self.name}' gave values {list(result.shape)} for {len(now)} rows; it gives one each, "
                "and NaN, not infinity, where there is none yet."
            )
        return result, None if found[1] is None else tuple(map(np.asarray, found[1]))


def _step_problems(found: Any, rows: int) -> Iterator[str]:
    """What is wrong with the result of a custom step: its type, shape or values."""
    if not isinstance(found, tuple) or len(found) != 2 or isinstance(found[0], tuple):
        yield "a step takes its state as second argument and returns the values and a state"
    if np.asarray(found[0]).dtype.kind not in "biuf":
        yield f"its values must be numbers, got {np.asarray(found[0]).dtype}"
    if found[1] is not None and not (
        isinstance(found[1], tuple) and all(np.shape(each)[:1] == (rows,) for each in found[1])
    ):
        yield "its state must be a tuple of arrays with a row for every row"


def identity_step(values: Array) -> Array:
    """The step of a signal that is the value it reads."""
    return values.astype(np.float64)


POST_HOC = ("entropy", "top1", "margin", "kl", "logit_change", "hidden_change", "hidden_cosine")
"""The paper's, which any trajectory has, without a gate and without labels."""
_ABOVE = ("top1", "margin")
_PROBABILITIES = (*OWN_GATES, "top1")
_NEVER_NEGATIVE = ("entropy", "kl", "logit_change", "hidden_change", "hidden_cosine", "hidden_acceleration")
READOUTS: dict[str, Readout] = {
    each.name: each
    for each in (
        Readout("fixed", "above", "loop", identity_step, takes="depth"),
        Readout("gate", "above", "gate_logits", running_cdf),
        *(
            Readout(
                name,
                "above" if name in _ABOVE else "below",
                SIGNALS[name][0],
                (two_loops if name in CONVERGENCE else one_loop)(SIGNALS[name][1]),
            )
            for name in POST_HOC
        ),
        Readout("patience", "above", "predictions", patience),
        Readout("settling", "above", "logits", settling),
        Readout("halting", "above", "gate_logits", halting),
        Readout("hidden_acceleration", "below", "hidden", hidden_acceleration),
        Readout("oracle", "above", "correct", identity_step, takes="nothing"),
    )
}
"""All readouts by name, built-in or registered. An example exits at the first loop where the signal is above or below
the threshold, or equals the threshold. If no loop meets the rule, the example exits at loop T."""


def _without_its_stopper(now: Array) -> Array:
    """The step of `stopper` without a learned stopper: an error."""
    raise UserError("A stopper is run by a policy that carries it; give it with --fitted.")


_STOPPER = Readout("stopper", "below", "hidden", _without_its_stopper)
"""Of what kind learned stoppers are; each has a step of its own, in `learned.stopper`."""


def readout(name: str, *, exits: Literal["above", "below"], reads: OwnSource) -> Callable[[Step], Readout]:
    """Register the function below this decorator as the step of a readout.

    Parameters
    ----------
    name
        The readout's name.
    exits
        "above" or "below": the side of the threshold on which an example exits.
    reads
        The input of the step: "logits", "hidden", "gate_logits" or "predictions".

    Returns
    -------
    Callable
        The decorator, which turns the step into a `Readout`.

    Raises
    ------
    UserError
        If a different readout has this name.

    Examples
    --------
    >>> @ls.readout("largest_logit", exits="above", reads="logits")
    ... def largest_logit(logits):
    ...     return logits.max(axis=1)
    >>> ls.sweep("largest_logit", validation, test).depth_at(0.9) < 4
    True
    """
    return lambda step: register_readout(Readout(name, exits, reads, step))


def register_readout(new: Readout) -> Readout:
    """Register a readout, so that you can use the readout by its name.

    Parameters
    ----------
    new
        The readout to register.

    Returns
    -------
    Readout
        The registered readout.

    Raises
    ------
    UserError
        If a different readout has this name.

    Examples
    --------
    >>> spread = ls.Readout("spread", exits="above", reads="logits", step=lambda logits: logits.std(axis=1))
    >>> ls.register_readout(spread).name in ls.READOUTS
    True
    """
    old = READOUTS.get(new.name)
    if old is not None and old != new and not (old.is_own and _defined_again(old, new)):
        raise UserError(f"There is another readout '{new.name}' already; give yours another name.")
    _ = new.definition_sha256  # of the text as it is now: its file may be edited while this process runs
    READOUTS[new.name] = new
    return new


def find_readout(name: str) -> Readout | None:
    """The definition of a readout, built in, registered or from an installed package; None if unknown."""
    if name.startswith(STOPPER):
        return _STOPPER
    name = "gate" if name.startswith(FITTED_GATE) else name
    if name not in READOUTS:
        for offered in entry_points(group=GROUP, name=name):
            register_readout(offered.load())
    return READOUTS.get(name)


def required_readout(name: str) -> Readout:
    """The definition of a readout; an unknown name is an error that lists the known names."""
    found = find_readout(name)
    if found is None:
        raise unknown_readout(name, READOUTS)
    return found


def unknown_readout(name: str, known: Collection[str]) -> UserError:
    """The error for an unknown readout name."""
    return UserError(
        f"There is no readout '{name}'{did_you_mean(name, known)}; choose one of {', '.join(known)}, "
        f"{FITTED_GATE}NAME, {STOPPER}NAME, or import the module that defines it."
    )


def has_threshold(name: str) -> bool:
    """Whether a readout exits by a threshold on a signal; a fixed depth and the oracle do not."""
    return required_readout(name).takes == "threshold"


def needs_labels(name: str) -> bool:
    """Whether a readout needs labels, as the oracle does."""
    return required_readout(name).reads == "correct"


def check_threshold(name: str, threshold: float) -> None:
    """Reject a threshold that no value of the signal can meet: nothing would ever exit early."""
    known = "gate" if name.startswith(FITTED_GATE) else name
    if (known in _PROBABILITIES and threshold > 1) or (known in _NEVER_NEGATIVE and threshold < 0):
        span = "from 0 to 1" if known in _PROBABILITIES else "from 0 on"
        raise UserError(f"'{name}' never reaches {threshold:g}: its values lie {span}; give such a threshold.")


def readout_definition(name: str) -> str | None:
    """The hash of a custom readout's definition; None for a built-in one."""
    found = find_readout(name)
    return None if found is None else found.definition_sha256


def readouts_reading(*sources: str) -> list[Readout]:
    """The readouts that read one of these sources."""
    return [each for each in READOUTS.values() if each.reads in sources]


def _defined_again(old: Readout, new: Readout) -> bool:
    """Whether the same lines define a custom readout again, as a notebook cell does."""
    homes = [(getattr(each.step, "__module__", None), getattr(each.step, "__qualname__", None)) for each in (old, new)]
    return homes[0] == homes[1] and homes[0][1] is not None and "<lambda>" not in homes[0][1]
