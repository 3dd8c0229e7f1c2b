"""Does docs/how-to/your-model.md show what runs, and is each way of writing a model right or refused?"""

import re
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import loopscope as ls
from loopscope.models.attention import packed_attention
from loopscope.models.looped_model import LoopedModel, LoopState, SimpleLoopedModel
from loopscope.models.packing import Layout

ROOT = Path(__file__).parents[2]
EXAMPLE = runpy.run_path(str(ROOT / "examples" / "causal.py"), run_name="example")
CausalModel: type[LoopedModel] = EXAMPLE["CausalModel"]


class Packed(CausalModel):  # type: ignore[misc, valid-type]
    """Attention within packed rows, which knows neither a cache nor branches; it says so."""

    kv_cache = branches = False

    def step(self, state: LoopState) -> LoopState:
        hidden = state.hidden
        projected = self.attention_in(self.norm(hidden)).view(len(hidden), 3 * self.heads, -1)
        attended = packed_attention(projected, (self.heads,) * 3, state.layout, self.rotary)
        return self.finish(state, hidden + self.attention_out(attended))

    def finish(self, state: LoopState, hidden: Tensor) -> LoopState:
        hidden = hidden + self.mlp_out(torch.nn.functional.gelu(self.mlp_in(self.norm(hidden))))
        return LoopState(hidden, state.layout, state.loop + 1)


class Unpacked(Packed):
    """Attention on a padded batch, by `layout.unpack` and `pack`."""

    def step(self, state: LoopState) -> LoopState:
        padded = state.layout.unpack(state.hidden, state.layout.longest)
        return self.finish(state, state.layout.pack(padded + self.attention_out(self.attend(padded))))

    def attend(self, padded: Tensor) -> Tensor:
        query, key, value = self.attention_in(self.norm(padded)).unflatten(2, (3 * self.heads, -1)).chunk(3, 2)
        query, key = (self.rotary.rotate(each.transpose(1, 2)) for each in (query, key))
        attended = torch.nn.functional.scaled_dot_product_attention(query, key, value.transpose(1, 2), is_causal=True)
        return attended.transpose(1, 2).flatten(2)


class Simple(SimpleLoopedModel):
    """The same network in the simple tier."""

    causal = True

    def __init__(self) -> None:
        super().__init__()
        self.net = Unpacked()
        self.num_loops, self.block_size, self.vocab_size = 4, 256, 60

    def embed_rows(self, tokens: Tensor, mask: Tensor) -> Tensor:
        return self.net.embedding(tokens)

    def block(self, hidden: Tensor, mask: Tensor) -> Tensor:
        hidden = hidden + self.net.attention_out(self.net.attend(hidden))
        return hidden + self.net.mlp_out(torch.nn.functional.gelu(self.net.mlp_in(self.net.norm(hidden))))

    def predict(self, head_input: Tensor) -> Tensor:
        return self.net.predict(head_input)


class DeclaredPacked(Packed):
    kv_cache = branches = True


class DeclaredUnpacked(Unpacked):
    kv_cache = branches = True


PROMPT, CHOICES = np.array([4, 8, 15, 16, 23, 42]), [np.array([3, 1]), np.array([7])]


def made(kind: type[LoopedModel]) -> LoopedModel:
    torch.manual_seed(0)
    return kind().eval()


def plain_text(model: LoopedModel, count: int) -> list[int]:
    """What a plain pass over everything so far would say next, again and again."""
    tokens = PROMPT.tolist()
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(model.loops(torch.tensor([tokens])).logits[-1, 0, -1].argmax()))
    return tokens[len(PROMPT) :]


def plain_scores(model: LoopedModel) -> list[float]:
    scores = []
    with torch.no_grad():
        for choice in CHOICES:
            logits = model.loops(torch.tensor([[*PROMPT, *choice]])).logits[-1, 0].double().log_softmax(-1)
            scores.append(sum(float(logits[len(PROMPT) - 1 + place, token]) for place, token in enumerate(choice)))
    return scores


def question(shared: int = 0) -> ls.Request:
    return ls.choices("which", PROMPT, CHOICES, shared=shared)


@pytest.mark.parametrize("kind", [CausalModel, Packed, Unpacked, Simple])
def test_every_way_is_the_same_network(kind: type[LoopedModel]) -> None:
    tokens, lengths = torch.randint(60, (3, 9), generator=torch.Generator().manual_seed(1)), torch.tensor([9, 4, 7])
    with torch.no_grad():
        ours, reference = (made(each).loops(tokens, lengths).logits for each in (kind, CausalModel))
    inside = torch.arange(9) < lengths[:, None]
    assert torch.allclose(ours[:, inside], reference[:, inside], atol=1e-5)


def test_the_full_tier_writes_and_scores_as_the_plain_pass() -> None:
    model = made(CausalModel)
    (text,) = ls.generate(model, [ls.Prompt(0, PROMPT)], max_new_tokens=12)
    assert text.tokens == plain_text(model, 12)
    assert len(set(text.tokens)) > 3  # a text of one token would prove little
    for shared in (0, 4):
        (answer,) = ls.run(model, [question(shared)], ls.ExitPolicy("fixed", 4))
        assert answer.logits == pytest.approx(plain_scores(model), abs=1e-4)


@pytest.mark.parametrize("kind", [Packed, Unpacked, Simple])
def test_what_is_not_declared_is_refused(kind: type[LoopedModel]) -> None:
    model = made(kind)
    ls.check_model(model)
    with pytest.raises(ls.UserError, match="Writing text cannot be run with this model.*declares no KV cache"):
        ls.generate(model, [ls.Prompt(0, PROMPT)])
    with pytest.raises(ls.UserError, match="Questions with choices cannot be run.*declares no branches"):
        list(ls.run(model, [question()], ls.ExitPolicy("fixed", 4)))


@pytest.mark.parametrize("kind", [DeclaredPacked, DeclaredUnpacked])
def test_a_false_declaration_is_refused_by_the_functions_that_ignore_it(kind: type[LoopedModel]) -> None:
    model = made(kind)
    for run in (
        lambda: ls.check_model(model),
        lambda: ls.generate(model, [ls.Prompt(0, PROMPT)]),
        lambda: list(ls.run(model, [question()], ls.ExitPolicy("fixed", 4))),
    ):
        with pytest.raises(ls.UserError, match=r"knows rows alone, and these have (a KV cache|branches)"):
            run()


class OwnPositions(CausalModel):  # type: ignore[misc, valid-type]
    """Counts positions by itself, and so begins anew after cached tokens and in every branch."""

    def embed(self, tokens: Tensor, layout: Layout) -> LoopState:
        state = super().embed(tokens, layout)
        place = Layout(layout.host_lengths, sharing=layout.sharing).positions
        return LoopState(state.hidden + 0.3 * torch.sin(place)[:, None], layout, state.loop)


class IgnoresTheCache(CausalModel):  # type: ignore[misc, valid-type]
    """Attends by means of its own, to its packed row and nothing else."""

    def step(self, state: LoopState) -> LoopState:
        plain = Layout(state.layout.host_lengths, sharing=state.layout.sharing)
        after = super().step(LoopState(state.hidden, plain, state.loop))
        return LoopState(after.hidden, state.layout, after.loop)


class OneNameForTwoLayers(CausalModel):  # type: ignore[misc, valid-type]
    """Two applications of the layer a loop, which write to one place of the cache."""

    def step(self, state: LoopState) -> LoopState:
        after = super().step(super().step(state))
        return LoopState(after.hidden, state.layout, state.loop + 1)


class OnlyTheCache(IgnoresTheCache):
    kv_cache = False


def test_the_page_shows_the_examples() -> None:
    page = (ROOT / "docs" / "how-to" / "your-model.md").read_text()
    code = "".join((ROOT / "examples" / name).read_text() for name in ("causal.py", "my_model.py"))
    shown = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert len(shown) == 2
    assert all(block.strip() in code for block in shown)
    assert "class LoopedGRU(ls.SimpleLoopedModel)" in shown[0]
    assert "class CausalModel(LoopedModel)" in shown[1]


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    tokens, scores = EXAMPLE["main"]()
    assert len(tokens) == 12
    assert len(scores) == 2
    assert "Text written with the KV cache is that of the plain pass." in capsys.readouterr().out


class FirstSeesSecond(Simple):
    """The first token sees the second: not causal, and nothing that changes at the end of a row shows it."""

    def block(self, hidden: Tensor, mask: Tensor) -> Tensor:
        after = super().block(hidden, mask)
        if hidden.shape[1] > 1:
            after = torch.cat((after[:, :1] + hidden[:, 1:2] * mask[:, 1:2, None], after[:, 1:]), 1)
        return after


class CountsFromTheEnd(Simple):
    def block(self, hidden: Tensor, mask: Tensor) -> Tensor:
        left = mask.flip(1).cumsum(1).flip(1)
        return super().block(hidden, mask) + 0.1 * left[..., None]


class WrongFromLoop4(Packed):
    """A counter in the module, which matters from loop 4 on."""

    calls = 0

    def embed(self, tokens: Tensor, layout: Layout) -> LoopState:
        self.calls = 0
        return super().embed(tokens, layout)

    def step(self, state: LoopState) -> LoopState:
        self.calls += 1
        after = super().step(state)
        return LoopState(after.hidden * (1 + (self.calls > 3)), state.layout, after.loop)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (OwnPositions, "after cached tokens is not what it says"),
        (IgnoresTheCache, "after cached tokens is not what it says"),
        (OneNameForTwoLayers, "after cached tokens is not what it says"),
        (OnlyTheCache, "scores choices otherwise"),
        (FirstSeesSecond, "must set causal = False"),
        (CountsFromTheEnd, "must set causal = False"),
        (WrongFromLoop4, "joins others at a later loop"),
    ],
)
def test_what_a_model_wrongly_declares_is_found(kind: type[LoopedModel], words: str) -> None:
    with pytest.raises(ls.UserError, match=words):
        ls.check_model(made(kind))


def test_whatever_fails_in_a_check_is_one_sentence() -> None:
    class WrongShape(Simple):
        def block(self, hidden: Tensor, mask: Tensor) -> Tensor:
            return hidden[:, :, :3] @ torch.zeros(4, 4)

    class Nothing(LoopedModel):
        num_loops = block_size = vocab_size = 3

    with pytest.raises(ls.UserError, match="The model fails in the check of 'one step'"):
        ls.check_model(made(WrongShape))
    with pytest.raises(ls.UserError, match="no parameters"):
        ls.check_model(Nothing().eval())


def test_classes_that_are_no_tokens_are_neither_written_nor_scored() -> None:
    model = made(CausalModel)
    model.head = torch.nn.Linear(32, 3)
    for use in (
        lambda: ls.check_model(model),
        lambda: ls.generate(model, [ls.Prompt(0, PROMPT)]),
        lambda: list(ls.run(model, [question()], ls.ExitPolicy("fixed", 4))),
    ):
        with pytest.raises(ls.UserError, match="answers with 3 classes and has 60 tokens"):
            use()
