"""Are the tokens those that lm_eval's Hugging Face model would run?"""

from typing import Any

import numpy as np
import pytest
from benchmark_slices import asked, byte_pairs

from loopscope.errors import UserError
from loopscope.questions import BENCHMARKS, Question, encode_questions


def lm_eval_pairs(questions: list[Question], tokenizer: Any) -> list[tuple[list[int], list[int]]]:
    """Context and continuation of every request, by lm_eval's own code."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    class TokensOnly(HFLM):
        def __init__(self) -> None:
            self.tokenizer, self.backend = tokenizer, "causal"
            self.add_bos_token = self.custom_prefix_token_id = self.enable_thinking = None

        def _loglikelihood_tokens(self, requests: Any, **_: Any) -> Any:
            return [(context, continuation) for _, context, continuation in requests]

    requests = [Instance("loglikelihood", {}, (q.context, choice), 0) for q in questions for choice in q.choices]
    return TokensOnly().loglikelihood(requests, disable_tqdm=True)


def asking(context: str, *choices: str) -> Question:
    return Question(key="made/0", context=context, choices=choices, label=0, norms=tuple(map(len, choices)))


ODD = [
    asking("ends in spaces  \n ", " a", " longer one"),
    asking("", " nothing before", "<|endoftext|> the first token"),
    asking("<|endoftext|>begins with the first token", " a", " b"),
    asking("Where do cats sle", "ep", "ep in the sun", "pt"),  # words that go on
]


@pytest.mark.parametrize("settings", [{}, {"words": False}, {"first": True}], ids=["plain", "merging", "bos"])
def test_tokens_are_those_of_lm_eval(settings: dict[str, bool]) -> None:
    tokenizer = byte_pairs(**settings)
    questions = [question for name in BENCHMARKS for question in asked(name)[:6]] + ODD
    ours = encode_questions(questions, tokenizer)
    pairs = [(encoded.context.tolist(), choice.tolist()) for encoded in ours for choice in encoded.choices]
    assert pairs == lm_eval_pairs(questions, tokenizer)
    assert all(encoded.cut == 0 for encoded in ours)
    merged = [
        tokenizer(q.context + q.choices[0])["input_ids"][: len(encoded.context)] != encoded.context.tolist()
        for q, encoded in zip(questions, ours, strict=True)
    ]
    assert any(merged[:-4]) == ("words" in settings)  # the odd case is among the real questions


def test_a_subjects_questions_share_their_first_tokens() -> None:
    questions = asked("mmlu") + asked("arc_easy")[:5]
    encoded = encode_questions(questions, byte_pairs())
    for subject in {question.subject for question in questions} - {None}:
        group = [e for q, e in zip(questions, encoded, strict=True) if q.subject == subject]
        (prefix,) = {e.prefix for e in group}
        assert len({tuple(e.context[:prefix]) for e in group}) == 1
        assert len({tuple(e.context[: prefix + 1]) for e in group}) > 1
        text = byte_pairs().decode(group[0].context[:prefix])
        assert text.count("\nAnswer:") == 5
    assert [e.prefix for e in encoded[-5:]] == [0] * 5
    assert encode_questions(questions[:1], byte_pairs())[0].prefix == 0
    assert encode_questions(questions[:1] * 2, byte_pairs())[0].prefix == len(encoded[0].context) - 1


def test_what_is_too_long_is_cut_from_the_left_as_the_longest_choice_needs_it() -> None:
    questions = asked("arc_challenge")[:20]
    whole = encode_questions(questions, byte_pairs())
    limit = int(np.median([len(e.context) for e in whole]))
    for full, short in zip(whole, encode_questions(questions, byte_pairs(), limit), strict=True):
        longest = max(map(len, full.choices))
        row = np.concatenate([full.context, max(full.choices, key=len)])[-(limit + 1) :]  # as lm_eval cuts it
        np.testing.assert_array_equal(short.context, row[:-longest])
        assert short.cut == len(full.context) - len(short.context)
        assert [c.tolist() for c in short.choices] == [c.tolist() for c in full.choices]
    with pytest.raises(UserError, match="A choice of .* has .* tokens; the model runs 2 at most"):
        encode_questions(questions, byte_pairs(), 2)


def test_a_question_without_tokens_is_refused() -> None:
    with pytest.raises(UserError, match="leaves made/0 without a token"):
        encode_questions([asking("context", "", " b")], byte_pairs())
    with pytest.raises(UserError, match="leaves made/0 without a token"):
        encode_questions([asking("  ", " a")], byte_pairs())
    assert encode_questions([], byte_pairs()) == []
