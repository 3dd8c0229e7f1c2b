"""What are a question's tokens? Those that lm_eval's Hugging Face model would run, with the context kept apart.

As lm_eval does it: whitespace at the end of the context moves to the choices; context and context + choice are
tokenised, with the special tokens that the tokenizer adds by itself (none where the text already begins with the
tokenizer's first token); the tokens of a choice are those of context + choice beyond the number of the context's
tokens. So all choices of a question have one context, the tokens of the context alone, even where a tokenizer merges
across the border. An empty context is the tokenizer's first token (bos, or else eos).

A model runs all tokens of a row but the last one, `max_length` at most; what is too much is cut from the left. lm_eval
cuts every row by itself. Here a context is cut as its question's longest choice needs it, so that it stays one context,
and `cut` says by how much.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopscope.errors import UserError
from loopscope.questions.lm_eval_tasks import Question

Tokens = NDArray[np.int64]

_BATCH = 256
"""Questions in one call of the tokenizer: enough for its threads; it keeps far more than the ids of a batch."""


@dataclass(frozen=True, eq=False)
class EncodedQuestion:
    """One question in tokens: choice c is scored by the log-probabilities of `choices[c]` after `context`."""

    context: Tokens
    choices: tuple[Tokens, ...]
    prefix: int  # leading tokens of the context that all given questions of its subject share; 0 without others
    cut: int  # tokens that the context lost on its left


def encode_questions(
    questions: Sequence[Question], tokenizer: Any, max_length: int | None = None
) -> list[EncodedQuestion]:
    """In the order of `questions`; `tokenizer` is a fast one of transformers, `max_length` what the model can run."""
    pairs = []
    for start in range(0, len(questions), _BATCH):
        pairs += _pairs(questions[start : start + _BATCH], tokenizer)
    contexts, cuts = [], []
    for question, (context, choices) in zip(questions, pairs, strict=True):
        if not context or not all(choices):
            raise UserError(f"The tokenizer leaves {question.key} without a token for its context or for a choice.")
        longest = max(map(len, choices))
        if max_length is not None and longest > max_length:
            raise UserError(f"A choice of {question.key} has {longest} tokens; the model runs {max_length} at most.")
        cuts.append(0 if max_length is None else max(0, len(context) + longest - 1 - max_length))
        contexts.append(context[cuts[-1] :])
    prefixes = {
        subject: _shared([context for q, context in zip(questions, contexts, strict=True) if q.subject == subject])
        for subject in {question.subject for question in questions} - {None}
    }
    return [
        EncodedQuestion(_array(context), tuple(map(_array, choices)), prefixes.get(question.subject, 0), cut)
        for question, (_, choices), context, cut in zip(questions, pairs, contexts, cuts, strict=True)
    ]


def _pairs(questions: Sequence[Question], tokenizer: Any) -> list[tuple[list[int], list[list[int]]]]:
    """Context and choices of every question."""
    first = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    texts = [text for q in questions for text in (q.context.rstrip(), *(q.context + choice for choice in q.choices))]
    bare = [not q.context for q in questions for _ in (q.context, *q.choices)]
    if first is not None:
        begin = tokenizer.decode(first)
        bare = [alone or text.startswith(begin) for alone, text in zip(bare, texts, strict=True)]
    tokens = iter(_tokens(texts, bare, tokenizer))
    pairs = []
    for question in questions:
        context, *rows = [next(tokens) for _ in (question.context, *question.choices)]
        if question.context:
            choices = [row[len(context) :] for row in rows]
        else:
            context = [] if first is None else [first]
            choices = [row[1:] if row[:1] == context else row for row in rows]
        pairs.append((context, choices))
    return pairs


def _tokens(texts: list[str], bare: list[bool], tokenizer: Any) -> list[list[int]]:
    """Every text's tokens, without special ones where it is `bare`."""
    tokens: list[list[int]] = [[]] * len(texts)
    for alone in {*bare}:
        chosen = [index for index, value in enumerate(bare) if value == alone]
        batch = [texts[index] for index in chosen]
        ids = tokenizer(batch, add_special_tokens=not alone, return_attention_mask=False, verbose=False)["input_ids"]
        for index, row in zip(chosen, ids, strict=True):
            tokens[index] = row
    return tokens


def _shared(contexts: list[list[int]]) -> int:
    """Leading tokens that all contexts share; of each at least the last token is its own."""
    if len(contexts) < 2:
        return 0
    low, high = min(contexts), max(contexts)  # in dictionary order: what these two share, all between them share
    most = min(map(len, contexts)) - 1
    return next((place for place in range(most) if low[place] != high[place]), most)


def _array(tokens: list[int]) -> Tokens:
    return np.array(tokens, dtype=np.int64)
