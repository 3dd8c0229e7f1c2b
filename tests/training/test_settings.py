"""Settings: what an objective may have, how files and overrides name it, and what cannot be is explained."""

import re
from pathlib import Path

import pytest
from conftest import tiny_language_run, tiny_settings

import loopscope as ls
from loopscope.config import build, plain
from loopscope.training.settings import Objective, read_settings

RANDOM = "objective.name=random_depth"


def test_built_in_runs_are_what_they_were() -> None:
    """No key more in their settings, so neither their files nor their addresses change."""
    for name, gate in (("final", "none"), ("fixed_prior", "none"), ("learned_gate", "linear")):
        objective = plain(tiny_settings(f"objective.name={name}", f"model.gate={gate}"))["objective"]
        assert list(objective.items())[1:] == [("prior", "geometric"), ("geometric_lambda", 0.3), ("beta", 0.1)]
    assert plain(Objective(name="m:f", options={"x": 1})) == {"name": "m:f", "options": {"x": 1}}


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["objective=fixed"], "no objective 'fixed' (did you mean 'fixed_prior'?); choose one of final, fixed_prior,"),
        (["objective.name=my/losses.py:f"], "no objective 'my/losses.py:f'"),
        (["objective.name=m:f", "objective.beta=0.5"], "beta needs the objective final or fixed_prior or"),
        (["objective.options.x=1"], "options needs the objective module:function, and this is 'fixed_prior'"),
        (["objective=m:f", "objective.options.x=[1]"], "options"),
        (["objective=m:f", "objective.options.x=nan"], "options"),
        (["objective.truncated=2"], "truncated needs the objective random_depth, and this is 'fixed_prior'"),
        ([RANDOM, "objective.truncated=0"], "truncated"),
        ([RANDOM, "model.gate=linear"], "model.gate = 'none'"),
        (["objective.name=decoupled_gate"], "gate_channels and act need model.gate = 'linear' or 'mlp'"),
        (["objective.name=learned_gate", "objective.gate_weight=1"], "gate_weight needs the objective gate_channels"),
        (["objective.name=gate_channels", "objective.gate_gradient=1.5"], "gate_gradient: expected a number <= 1"),
        (["objective.prior=geometri"], "no prior 'geometri' (did you mean 'geometric'?); choose uniform or geometric,"),
        (["objective.prior=[0.5, 0.4]"], "the weights of prior add up to 0.9; make it 1"),
        (["objective.prior=[]"], "the weights of prior add up to 0; make it 1"),
        (["objective.prior=[1.5, -0.5]"], "prior"),
        (["objective={name='learned_gate', prior=[1, 0]}"], "has a KL to its prior, so no weight of prior may be 0"),
        (["objective.prior=[0.5, 0.5]", "objective.geometric_lambda=0.5"], "geometric_lambda needs the prior"),
        (["objective.prior_sha256=ab"], "prior_sha256 needs a custom prior"),
        (["objective={name='act', prior='uniform'}"], "prior needs the objective final or fixed_prior"),
        (["objective=act"], "need model.gate = 'linear' or 'mlp'"),
        (["training.learning_rate=1e-6"], "min_learning_rate is above learning_rate"),
    ],
)
def test_settings_that_cannot_be_are_explained(overrides: list[str], words: str) -> None:
    with pytest.raises(ls.UserError, match=re.escape(words)) as error:
        read_settings("demo", overrides)
    assert str(error.value).startswith(f"demo --set {' --set '.join(overrides)}: ")


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("context=65", "takes 64 tokens"),
        ("vocab_size=100", ">= 259"),
        ("model.num_attention_heads=16", "even width"),
        ("model.layers=2", "unknown key"),
    ],
)
def test_language_settings_that_cannot_be_are_explained(tmp_path: Path, override: str, told: str) -> None:
    with pytest.raises(ls.UserError, match=told):
        tiny_language_run(tmp_path, override)


def test_the_corners_of_gate_channels_are_the_objectives_of_these_names() -> None:
    def plainly(**shares: float) -> dict[str, object]:
        return plain(Objective(name="gate_channels", **shares))  # type: ignore[arg-type, no-any-return]

    assert plainly() == plainly(gate_weight=1, gate_gradient=1) == plain(Objective(name="learned_gate"))
    assert plainly(gate_weight=0, gate_gradient=0) == plain(Objective(name="decoupled_gate"))
    between = plainly(gate_weight=0.5)
    assert between == plainly(gate_weight=0.5, gate_gradient=1)
    assert (between["name"], between["gate_weight"], between["gate_gradient"]) == ("gate_channels", 0.5, 1)
    assert build(Objective, between, "it") == Objective(name="gate_channels", gate_weight=0.5)


def test_the_short_form_is_a_table_with_a_name(tmp_path: Path) -> None:
    file = tmp_path / "my.toml"
    file.write_text('objective = "m:f"\n[task]\nname = "parity"\n')
    assert read_settings(str(file)).objective == Objective(name="m:f")
    more = read_settings(str(file), ["objective.options.x=1", "objective.options.word=a"]).objective
    assert more.options == {"x": 1, "word": "a"}
    assert read_settings(str(file), ["objective=final"]).objective.name == "final"
