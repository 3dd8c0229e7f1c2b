"""How does text become tokens? By the checkpoint's own `tokenizer.json`, read as data: no code from it, no Python class
that it names, no model configuration.

Where does generated text end? At the configuration's eos and at the end of a chat turn, which is another token.
"""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from loopscope.errors import UserError
from loopscope.models.chat_template import render_chat
from loopscope.reading import is_folder

FILE = "tokenizer.json"
ENDS_OF_TURN = ("<|im_end|>", "<|end_turn|>")
"""Ouro's (2, while its configuration says eos 0) and Huginn's (65508)."""


def load_tokenizer(source: str | Path) -> Any:
    """transformers' `PreTrainedTokenizerFast` from a checkpoint's folder or a Hub id."""
    try:
        from transformers import PreTrainedTokenizerFast
    except ImportError:
        raise UserError("Text needs transformers; install it with: pip install 'loopscope[lm]'.") from None
    require_tokenizer(source)
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(str(source))
        tokenizer.eos_token_id  # noqa: B018 - of the wrong type where the file is wrong
        return tokenizer
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the Hub out of reach, or a file that is no tokenizer, over which Rust may panic
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"No tokenizer could be read from {source} ({reason}).") from None


def require_tokenizer(source: str | Path) -> None:
    """Refuses a folder without one."""
    if is_folder(Path(source)) and not (Path(source) / FILE).is_file():
        raise UserError(f"{source} has no {FILE}; put the model's tokenizer files there.")


def stop_tokens(tokenizer: Any, configured: Collection[int] = ()) -> set[int]:
    """The tokens that end a generated text: eos, by the configuration and the tokenizer, and the ends of a turn."""
    vocabulary = tokenizer.get_vocab()
    ends = {vocabulary[end] for end in ENDS_OF_TURN if end in vocabulary} | set(configured)
    return ends if tokenizer.eos_token_id is None else ends | {tokenizer.eos_token_id}


def chat_prompt(tokenizer: Any, messages: Sequence[dict[str, str]]) -> list[int]:
    """The tokens of a chat (messages with `role` and `content`), up to where the model's turn begins."""
    ids: list[int] = encode(tokenizer, render_chat(tokenizer, messages, add_generation_prompt=True), False)
    if not ids:
        raise UserError("The model's chat template makes nothing of these messages; give them as plain text.")
    return ids


def encode(tokenizer: Any, text: str, special: bool = True) -> list[int]:
    """The tokens of a text, with those that the tokenizer adds by itself (`special`) or without."""
    try:
        text.encode()
        ids: list[int] = tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
    except UnicodeEncodeError:  # which a JSON file can write and no text can hold
        raise UserError(f"'{text[:60]}' is not text in Unicode: it holds half a character.") from None
    except (TypeError, ValueError, OverflowError) as error:
        raise UserError(f"The model's tokenizer cannot be used ({error}); fetch its files again.") from None
    return ids


class Detokenizer:
    """Tokens become text as they come."""

    def __init__(self, tokenizer: Any) -> None:
        from tokenizers.decoders import DecodeStream

        if not hasattr(tokenizer, "backend_tokenizer"):
            raise UserError(
                "Text is spelt by a fast tokenizer (transformers' PreTrainedTokenizerFast); give one of those."
            )
        self._tokenizer, self._stream = tokenizer, DecodeStream(skip_special_tokens=True)
        self.tokens: list[int] = []
        self.text = ""
        """What is sure by now; the rest of a character may be still to come."""

    def add(self, token: int) -> str:
        """What this token makes sure."""
        self.tokens.append(token)
        new = self._stream.step(self._tokenizer.backend_tokenizer, token) or ""
        self.text += new
        return new

    def rest(self) -> str:
        """What is left at the end: of a character that was never finished."""
        return decode(self._tokenizer, self.tokens)[len(self.text) :]


def decode(tokenizer: Any, tokens: Sequence[int]) -> str:
    """The text of these tokens, without special ones."""
    return str(tokenizer.decode(tokens, skip_special_tokens=True))
