"""What requests begin with alike: does it run once, only as deep as needed, and change no answer?"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_language import MODELS, VOCABULARY

import loopscope as ls
from loopscope.engine import Answer, Request, choices, run
from loopscope.models import LoopedModel, LoopState
from loopscope.models.kv_cache import AppendingRows

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


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("name", ["ouro", "learned positions", "coda", "looped llama"])
def test_the_answers_are_those_without_sharing(name: str, rows: bool) -> None:
    model, asked = MODELS[name](), questions(rows, together=False)
    exits = set()
    for readout, threshold in POLICIES.items():
        policy = ls.ExitPolicy(readout, threshold)
        plain = by_key(list(run(model, policy, map(unshared, asked), 1)))
        for batch_size, batch_tokens in ((5, None), (100, 120)):
            answers = by_key(list(run(model, policy, asked, batch_size, batch_tokens=batch_tokens)))
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


@pytest.mark.parametrize("batch_size", [2, 3, 100])
@pytest.mark.parametrize(("readout", "threshold"), [("fixed", 1), ("fixed", 3), ("gate", 0.85)])
def test_a_beginning_runs_once_and_as_deep_as_the_deepest(
    readout: str, threshold: float, batch_size: int, steps: tuple[LoopedModel, list[tuple[bool, int]]]
) -> None:
    """Even where the requests of one text still run while those of the next come in."""
    (model, taken), asked = steps, questions()
    loops = {answer.key: answer.loop for answer in run(model, ls.ExitPolicy(readout, threshold), asked, batch_size)}
    deepest = [max(loops[key] for key in keys) for keys in (range(4), range(4, 8))]
    assert [taken.count((True, length)) for length in (FIRST, SECOND)] == deepest
    own = sum(len(request.tokens) * loops[request.key] for request in asked)
    assert sum(tokens for _, tokens in taken) == own + FIRST * deepest[0] + SECOND * deepest[1]


def test_what_is_shared_is_less_than_what_is_read() -> None:
    asked = questions()[0]
    for shared, words in ((-1, "shared must be at least 0"), (asked.trunk, "shares with others is less")):
        with pytest.raises(ls.UserError, match=words):
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
    (answer,) = run(model, ls.ExitPolicy("fixed", 2), [asked])
    for row, score_all_loops in zip(rows, answer.logits, strict=True):
        with torch.inference_mode():
            log_p = model.loops(torch.from_numpy(row)[None]).logits[1, 0].double().log_softmax(-1)
        assert score_all_loops == pytest.approx(
            sum(log_p[place - 1, row[place]].item() for place in range(-3, 0)), abs=1e-4
        )
    with pytest.raises(ls.UserError, match="begin with nothing alike"):
        Request(0, [rows[0], rows[1][1:]], [3, 3])


def test_many_choices_fit_where_each_fits() -> None:
    model, rng = MODELS["learned positions"](), np.random.default_rng(1)
    parts = [rng.integers(0, VOCABULARY, length) for length in (200, 50, 50, 50, 70)]
    (answer,) = run(model, ls.ExitPolicy("fixed", 1), [choices(0, parts[0], parts[1:4])])
    assert len(answer.logits) == 3
    with pytest.raises(ls.UserError, match="block size is 256"):
        list(run(model, ls.ExitPolicy("fixed", 1), [choices(0, parts[0], parts[1:])]))
