"""Requests: are shared prefixes run once and without a trace, and choices scored as a plain pass scores them?"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_language import MODELS, VOCABULARY, outspoken

import loopscope as ls
from loopscope.engine.requests import Request, choices
from loopscope.engine.scheduler import Answer, run
from loopscope.models.kv_cache import AppendingRows
from loopscope.models.looped_model import LoopedModel, LoopState

POLICIES = {"gate": 0.55, "margin": 0.5, "hidden_cosine": 0.3, "fixed": 2}
FIRST, SECOND = 40, 70
"""Tokens of the two texts that requests begin with."""


def questions(rows: bool = False, together: bool = True) -> list[Request]:
    """Twelve that begin with one text, with another or with none, of two to five choices (or `rows` without any)."""
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, VOCABULARY, length) for length in (FIRST, SECOND, 0)]
    asked = []
    for key in range(12):
        text = texts[key // 4 if together else key % 3]
        context = np.concatenate((text, rng.integers(0, VOCABULARY, int(rng.integers(1, 30)))))
        if rows:
            asked.append(Request(key, [context], shared=len(text)))
        else:
            lengths = rng.integers(1, 6, int(rng.integers(2, 6))).tolist()
            each = [rng.integers(0, VOCABULARY, length) for length in lengths]
            asked.append(choices(key, context, each, lengths, shared=len(text)))
    return asked


def unshared(request: Request) -> Request:
    return Request(request.key, request.rows, request.scored, request.norms)


def by_key(answers: list[Answer]) -> list[Answer]:
    return sorted(answers, key=lambda answer: answer.key)


@pytest.mark.parametrize(
    ("name", "rows"), [("ouro", False), ("learned positions", True), ("coda", False), ("looped llama", True)]
)
def test_the_answers_are_those_without_sharing(name: str, rows: bool) -> None:
    model, asked = MODELS[name](), questions(rows, together=False)
    exits = set()
    for readout, threshold in POLICIES.items():
        policy = ls.ExitPolicy(readout, threshold)
        plain = by_key(list(run(model, map(unshared, asked), policy, 1)))
        for batch_size, batch_tokens in ((5, None), (100, 120)):
            answers = by_key(list(run(model, asked, policy, batch_size, batch_tokens=batch_tokens)))
            for ours, theirs in zip(answers, plain, strict=True):
                assert (ours.key, ours.loop) == (theirs.key, theirs.loop)
                assert ours.logits == pytest.approx(theirs.logits, abs=5e-5)
        exits |= {answer.loop for answer in plain}
    assert exits == set(range(1, model.num_loops + 1))


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> tuple[LoopedModel, list[tuple[bool, int]]]:
    """A model, and of every step that it takes whether it is a beginning's and how many tokens it has."""
    model, taken = MODELS["ouro"](), []
    real = model.step

    def counted(state: LoopState) -> LoopState:
        taken.append((isinstance(state.layout.cache, AppendingRows), len(state.hidden)))
        return real(state)

    monkeypatch.setattr(model, "step", counted)
    return model, taken


@pytest.mark.parametrize(
    ("readout", "threshold", "batch_size"), [("fixed", 1, 2), ("fixed", 3, 3), ("gate", 0.85, 3), ("gate", 0.85, 100)]
)
def test_a_beginning_runs_once_and_as_deep_as_the_deepest(
    readout: str, threshold: float, batch_size: int, steps: tuple[LoopedModel, list[tuple[bool, int]]]
) -> None:
    """Even where the requests of one text still run while those of the next come in."""
    (model, taken), asked = steps, questions()
    loops = {answer.key: answer.loop for answer in run(model, asked, ls.ExitPolicy(readout, threshold), batch_size)}
    deepest = [max(loops[key] for key in keys) for keys in (range(4), range(4, 8))]
    assert [taken.count((True, length)) for length in (FIRST, SECOND)] == deepest
    own = sum(len(request.tokens) * loops[request.key] for request in asked)
    assert sum(tokens for _, tokens in taken) == own + FIRST * deepest[0] + SECOND * deepest[1]


def test_what_is_shared_is_less_than_what_is_read() -> None:
    asked = questions()[0]
    for shared in (-1, asked.trunk):
        with pytest.raises(ls.UserError, match="shares with others is less"):
            replace(asked, shared=shared)
    replace(asked, shared=asked.trunk - 1)


def test_choices_may_differ_in_their_contexts() -> None:
    """As where a blank is filled in: what they have in common is the trunk, and only the ends are scored."""
    model, rng = MODELS["ouro"](), np.random.default_rng(1)
    context, one, other, ending = (rng.integers(0, VOCABULARY, length) for length in (7, 2, 4, 3))
    one[0], other[0] = 1, 2
    rows = [np.concatenate((context, part, ending)) for part in (one, other)]
    asked = Request(0, rows, np.array([3, 3]))
    assert asked.trunk == 7
    (answer,) = run(model, [asked], ls.ExitPolicy("fixed", 2))
    for row, score in zip(rows, answer.logits, strict=True):
        with torch.inference_mode():
            log_p = model.loops(torch.from_numpy(row)[None]).logits[1, 0].double().log_softmax(-1)
        assert score == pytest.approx(sum(log_p[place - 1, row[place]].item() for place in range(-3, 0)), abs=1e-4)
    with pytest.raises(ls.UserError, match="begin with nothing alike"):
        Request(0, [rows[0], rows[1][1:]], [3, 3])


@torch.no_grad()
def plainly(model: LoopedModel, context: np.ndarray, choice: np.ndarray) -> tuple[float, bool]:
    """One forward pass over the row without its last token, as lm_eval does it."""
    row = torch.from_numpy(np.concatenate((context, choice)))
    logits = model.loops(row[None, :-1]).logits[-1, 0, len(context) - 1 :]
    targets = row[len(context) :]
    likely = logits.double().log_softmax(-1).gather(1, targets[:, None]).sum()
    return float(likely), bool((logits.argmax(-1) == targets).all())


def full(model: LoopedModel) -> ls.ExitPolicy:
    return ls.ExitPolicy("fixed", model.num_loops)


@pytest.mark.parametrize("shared", [0, 5])
def test_choices_of_one_token_and_rows_that_fill_the_block(shared: int) -> None:
    """Choices take more room together than there is; a row may be a token longer than what the model runs."""
    model, rng = outspoken(max_position_embeddings=20), np.random.default_rng(0)
    beginning = rng.integers(0, 600, shared)
    contexts = [np.concatenate((beginning, rng.integers(0, 600, 16 - shared))) for _ in range(3)]
    lengths = [(1, 1, 1), (1, 5, 4), (5, 5, 5, 5)]
    parts = [[rng.integers(0, 600, length) for length in each] for each in lengths]
    for context, each in zip(contexts, parts, strict=True):
        row = torch.from_numpy(context)[None]
        each[0][0] = int(model.loops(row).logits[-1, 0, -1].argmax())  # what the model would say itself
    asked = [choices(key, contexts[key], parts[key], shared=shared) for key in range(3)]
    answers = {answer.key: answer for answer in run(model, asked, full(model), greedy=True)}
    for key, answer in answers.items():
        expected = [plainly(model, contexts[key], choice) for choice in parts[key]]
        np.testing.assert_allclose(answer.logits, [likely for likely, _ in expected], rtol=1e-5)
        assert answer.greedy is not None
        assert answer.greedy.tolist() == [greedy for _, greedy in expected]
    assert answers[0].greedy is not None
    assert answers[0].greedy[0]
    assert next(iter(run(model, asked, full(model)))).greedy is None
    too_long = choices(0, contexts[0], [rng.integers(0, 600, 6)])
    with pytest.raises(ls.UserError, match="block size is 20"):
        list(run(model, [too_long], full(model)))


@torch.no_grad()
def test_a_mean_over_choices_needs_them_whole() -> None:
    model, rng = outspoken(), np.random.default_rng(1)
    context, parts = rng.integers(0, 600, 6), [rng.integers(0, 600, length) for length in (3, 1)]
    with pytest.raises(ls.UserError, match="whole=True"):
        list(run(model, [choices(0, context, parts)], ls.ExitPolicy("gate", 0.5), mean=True))
    whole = choices(0, context, parts, whole=True)
    for mean in (False, True):
        (answer,) = run(model, [whole], full(model), mean=mean)
        np.testing.assert_allclose(answer.logits, [plainly(model, context, part)[0] for part in parts], rtol=1e-5)


@pytest.mark.parametrize("rows", [[1, 2, 3], np.array([1, 2, 3]), torch.tensor([1, 2, 3]), []])
def test_one_row_is_not_a_list_of_rows(rows: Any) -> None:
    with pytest.raises(ls.UserError, match=r"takes a list of rows of tokens; give one row as Request\(key, \[row\]\)"):
        Request(0, rows)
