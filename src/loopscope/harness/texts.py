"""Where does a text end that lm_eval asks for, and how is it drawn? At strings, not tokens; by its own settings."""

from collections.abc import Collection, Sequence
from typing import Any

from loopscope.engine import Prompt, Sampling
from loopscope.errors import UserError

_NEUTRAL = (None, False, 0, 1)
"""Values of generation settings that change nothing, whatever the setting."""


class Watch:
    """Keeps what texts say, and sees the strings that end them; what comes before `think_end` is no part of a text."""

    def __init__(self, tokenizer: Any, until: Sequence[str], think_end: str | None = None) -> None:
        self._tokenizer, self._until, self._think_end = tokenizer, list(until), think_end
        self._tail = 3 + max((len(string.encode()) for string in until), default=0)  # a token has a byte at least
        self._said: dict[int, list[int]] = {}

    def __call__(self, key: int, token: int) -> bool:
        """Whether the text ends with this token of it."""
        said = self._said.setdefault(key, [])
        said.append(token)
        if not self._ended(self._decoded(said[-self._tail :])):
            return False
        text = self._decoded(said)  # the tail may have begun within a character
        return (self._think_end is None or self._think_end in text) and self._ended(self._answer(text))

    def text(self, key: int, ends: Collection[int]) -> str:
        """Up to the first string, or the token, that ended it."""
        said = self._said[key]
        text = self._answer(self._decoded(said[:-1] if said[-1] in ends else said))
        for string in self._until:
            text = text.split(string, 1)[0]
        return text

    def _decoded(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))

    def _answer(self, text: str) -> str:
        return text if self._think_end is None else text.rsplit(self._think_end, 1)[-1].lstrip()

    def _ended(self, text: str) -> bool:
        return any(string in text for string in self._until)


def sampling_of(wanted: dict[str, Any], seed: int) -> Sampling:
    """lm_eval's settings of a text's tokens; those that are not known must change nothing."""
    rest = dict(wanted)
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
    """So that the memory grows once, and no long one is left for the end."""
    return sorted(prompts, key=lambda prompt: -len(prompt.tokens))
