"""Where does a text end that lm_eval asks for, and how is it drawn? At strings, not tokens; by its own settings."""

from collections.abc import Collection, Sequence
from typing import Any

from loopscope.engine import Prompt, Sampling
from loopscope.errors import UserError
from loopscope.models.tokenizer import Detokenizer, decode

_NEUTRAL = (None, False, 0, 1)
"""Values of generation settings that change nothing, whatever the setting."""


class StopStrings:
    """Keeps the texts, and sees the strings that end them; what comes before `think_end` is no part of a text."""

    def __init__(self, tokenizer: Any, until: Sequence[str], think_end: str | None = None) -> None:
        self._tokenizer, self._until, self._think_end = tokenizer, list(until), think_end
        self._longest = max(map(len, self._until), default=0)
        self._texts: dict[int, Detokenizer] = {}

    def __call__(self, key: int, token: int) -> bool:
        """Whether the text ends with this token of it."""
        stream = self._texts.setdefault(key, Detokenizer(self._tokenizer))
        new = stream.add(token)
        if not new or not self._ended(stream.text[-len(new) - self._longest :]):
            return False
        text = stream.text
        return (self._think_end is None or self._think_end in text) and self._ended(self._answer(text))

    def text(self, key: int, ends: Collection[int]) -> str:
        """Up to the first string, or the token, that ended it."""
        tokens = self._texts[key].tokens
        text = self._answer(decode(self._tokenizer, tokens[:-1] if tokens[-1] in ends else tokens))
        for string in self._until:
            text = text.split(string, 1)[0]
        return text

    def _answer(self, text: str) -> str:
        return text if self._think_end is None else text.rsplit(self._think_end, 1)[-1].lstrip()

    def _ended(self, text: str) -> bool:
        return any(string in text for string in self._until)


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
