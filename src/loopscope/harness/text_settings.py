"""How is a text drawn that lm_eval asks for, and in which order? By the settings of its task; long prompts first."""

from collections.abc import Sequence
from typing import Any

from loopscope.engine import Prompt, Sampling
from loopscope.errors import UserError

_NEUTRAL = (None, False, 0, 1)
"""Values of generation settings that change nothing, whatever the setting."""


def sampling_of(options: dict[str, Any], seed: int) -> Sampling:
    """lm_eval's settings of a text's tokens; those that are not known must change nothing."""
    rest = dict(options)
    temperature = float(rest.pop("temperature", 0.0) or 0.0)
    if not rest.pop("do_sample", False):
        temperature = 0.0
    known = {name: rest.pop(name) for name in ("top_k", "top_p") if rest.get(name) is not None}
    for name, value in rest.items():
        if value not in _NEUTRAL:
            raise UserError(f"A task asks for '{name}' = {value} in its texts, and LoopScope has no such setting.")
    try:
        return Sampling(temperature=temperature, seed=seed, **known)
    except ValueError as error:
        raise UserError(f"A task asks for texts in a way that cannot be: {error}.") from None


def longest_first(prompts: Sequence[Prompt]) -> list[Prompt]:
    """So that the cache grows once, and no long one is left for the end."""
    return sorted(prompts, key=lambda prompt: -len(prompt.tokens))
