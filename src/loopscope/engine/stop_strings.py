"""Where does a text end that is to end at strings, not tokens?"""

from collections.abc import Collection, Sequence
from typing import Any

from loopscope.models.tokenizer import Detokenizer, decode


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
        return self._cut(self._answer(decode(self._tokenizer, tokens[:-1] if tokens[-1] in ends else tokens)))

    def sure(self, key: int) -> str:
        """The text so far, without what may be the beginning of a string that ends it."""
        text = self._cut(self._answer(self._texts[key].text))
        held = range(min(self._longest - 1, len(text)), 0, -1)
        for count in held:
            if any(string.startswith(text[-count:]) for string in self._until):
                return text[:-count]
        return text

    def forget(self, key: int) -> None:
        """A text that is not asked for again."""
        self._texts.pop(key, None)

    def _cut(self, text: str) -> str:
        """Before the first of the strings in it, whichever was named first."""
        ends = [place for string in self._until if (place := text.find(string)) >= 0]
        return text[: min(ends, default=len(text))]

    def _answer(self, text: str) -> str:
        return text if self._think_end is None else text.rsplit(self._think_end, 1)[-1].lstrip()

    def _ended(self, text: str) -> bool:
        return any(string in text for string in self._until)
