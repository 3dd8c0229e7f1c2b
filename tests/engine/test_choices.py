"""Questions at the edges: choices of one token, rows as long as the model takes, means over choices, greedy choices."""

import numpy as np
import pytest
import torch
from tiny_language import outspoken

import loopscope as ls
from loopscope.engine import choices, run
from loopscope.engine.prefix_cache import PrefixCache
from loopscope.engine.request_batch import decision_states, embed_requests
from loopscope.models import LoopedModel, Ouro


@torch.no_grad()
def plainly(model: LoopedModel, context: np.ndarray, choice: np.ndarray) -> tuple[float, bool]:
    """One forward pass over the row without its last token, as lm_eval does it."""
    row = torch.from_numpy(np.concatenate((context, choice)))
    logits = model.loops(row[None, :-1]).logits[-1, 0, len(context) - 1 :]
    targets = row[len(context) :]
    likely = logits.double().log_softmax(-1).gather(1, targets[:, None]).sum()
    return float(likely), bool((logits.argmax(-1) == targets).all())


def full(model: Ouro) -> ls.ExitPolicy:
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
    answers = {answer.key: answer for answer in run(model, full(model), asked, greedy=True)}
    for key, answer in answers.items():
        expected = [plainly(model, contexts[key], choice) for choice in parts[key]]
        np.testing.assert_allclose(answer.logits, [likely for likely, _ in expected], rtol=1e-5)
        assert answer.greedy is not None
        assert answer.greedy.tolist() == [greedy for _, greedy in expected]
    assert answers[0].greedy is not None
    assert answers[0].greedy[0]
    assert next(iter(run(model, full(model), asked))).greedy is None
    too_long = choices(0, contexts[0], [rng.integers(0, 600, 6)])
    with pytest.raises(ls.UserError, match="block size is 20"):
        list(run(model, full(model), [too_long]))


@torch.no_grad()
def test_a_mean_over_choices_needs_them_whole() -> None:
    model, rng = outspoken(), np.random.default_rng(1)
    context, parts = rng.integers(0, 600, 6), [rng.integers(0, 600, length) for length in (3, 1)]
    with pytest.raises(ls.UserError, match="whole=True"):
        list(run(model, ls.ExitPolicy("gate", 0.5), [choices(0, context, parts)], mean=True))
    whole = choices(0, context, parts, whole=True)
    state = model.step(embed_requests(model, [whole], torch.device("cpu"), PrefixCache(model, torch.device("cpu"))))
    states = [model.loops(torch.from_numpy(row)[None]).hidden[0, 0, 6:] for row in whole.rows]
    torch.testing.assert_close(decision_states(model, state, [whole], True)[0], torch.cat(states).mean(0))
    for mean in (False, True):
        (answer,) = run(model, full(model), [whole], mean=mean)
        np.testing.assert_allclose(answer.logits, [plainly(model, context, part)[0] for part in parts], rtol=1e-5)
