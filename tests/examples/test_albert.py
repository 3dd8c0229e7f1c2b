"""The foreign model: is the adapted ALBERT the one of `transformers`, loop by loop, and does LoopScope take it?"""

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

import loopscope as ls
from loopscope.engine.requests import choices

pytest.importorskip("transformers")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def albert() -> ModuleType:
    spec = importlib.util.spec_from_file_location("albert_example", ROOT / "examples" / "albert.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model(albert: ModuleType) -> ls.LoopedModel:
    torch.manual_seed(1)
    model = albert.small_albert()
    for parameter in model.parameters():  # larger than at the start, so that differences show
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


@torch.no_grad()
def test_every_loop_is_a_layer_of_the_original(model: ls.LoopedModel) -> None:
    """With rows of different lengths, two of which begin alike; padding and batch change nothing."""
    lengths = torch.tensor([10, 4, 7, 10])
    tokens = torch.randint(4, (4, 10), generator=torch.Generator().manual_seed(0))
    tokens[3, :6] = tokens[0, :6]
    inside = torch.arange(10) < lengths[:, None]
    out = model.loops(tokens, lengths)
    theirs = model.albert(tokens, attention_mask=inside.long(), output_hidden_states=True)
    assert len(theirs.hidden_states) == 1 + len(out.hidden)
    for ours, layer in zip(out.hidden, theirs.hidden_states[1:], strict=True):
        assert torch.allclose(ours[inside], layer[inside], atol=1e-5)
    assert torch.allclose(out.logits[-1][inside], theirs.logits[inside], atol=1e-4)
    assert (out.hidden[1:] - out.hidden[:-1]).abs().max() > 0.1
    for row, length in enumerate(lengths.tolist()):
        alone = model.albert(tokens[row : row + 1, :length], output_hidden_states=True).hidden_states
        assert torch.allclose(out.hidden[:, row, :length], torch.cat(alone[1:]), atol=1e-5)


def test_beginnings_are_shared_by_causal_models_only(model: ls.LoopedModel) -> None:
    tokens = torch.zeros(3, 5, dtype=torch.long)
    assert len(model.begin(tokens, share=True).hidden) == 15


def test_the_adapter_keeps_the_protocol(model: ls.LoopedModel) -> None:
    assert max(check.measured for check in ls.check_model(model)) < 1e-5
    question = choices(0, np.array([2, 1]), [np.array([0]), np.array([1])])
    with pytest.raises(ls.UserError, match="LoopedAlbert declares no branches"):
        list(ls.run(model, [question], ls.ExitPolicy("fixed", 1)))


def test_other_alberts_are_refused(albert: ModuleType) -> None:
    config = albert.small_albert().albert.config
    config.num_hidden_groups = 2
    with pytest.raises(ls.UserError, match="one group"):
        albert.LoopedAlbert(albert.AlbertForMaskedLM(config))


@pytest.mark.filterwarnings("ignore::UserWarning:albert_example")  # a model of few steps is at chance
def test_the_example_runs_and_replay_and_live_agree(albert: ModuleType) -> None:
    agreement = albert.main(steps=20, examples=300)
    assert agreement.examples == 300
    assert agreement.differing == agreement.close_differing == 0
    assert agreement.average_loops < 6
