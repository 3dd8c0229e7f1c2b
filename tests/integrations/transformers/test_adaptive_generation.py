"""`generate` of looped models: is what it cannot do refused before a token is written?"""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_language import byte_pairs, write_ouro
from transformers import AutoModelForCausalLM, GenerationConfig

import loopscope as ls
import loopscope.integrations.transformers

PROMPTS = torch.arange(1, 13).view(2, 6)
POLICY = ls.ExitPolicy("gate", 0.5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = write_ouro(tmp_path_factory.mktemp("generation") / "ouro", byte_pairs(), max_position_embeddings=64)
    return AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.mark.parametrize("policy", [None, POLICY], ids=["full depth", "a policy"])
def test_more_than_the_model_has_positions_for(model: Any, policy: ls.ExitPolicy | None) -> None:
    with pytest.raises(ls.UserError, match="6 tokens and 59 after it are more than the 64"):
        model.generate(PROMPTS, max_new_tokens=59, policy=policy)
    assert model.generate(PROMPTS, max_new_tokens=58, policy=policy, eos_token_id=None).shape[1] == 64


def test_padding_after_a_prompt_is_found_also_where_transformers_makes_the_mask(model: Any) -> None:
    padded = PROMPTS.clone()
    padded[1, 4:] = 13
    with pytest.raises(ls.UserError, match="pad prompts on the left"):
        model.generate(padded, max_new_tokens=1, pad_token_id=13, eos_token_id=14)


def test_a_text_stops_at_a_string(model: Any) -> None:
    """The tokenizer is of the criterion, not of the network."""
    tokenizer = byte_pairs()
    whole = model.generate(PROMPTS[:1], max_new_tokens=12, eos_token_id=None)
    said = tokenizer.decode(whole[0, 6:])
    stopped = model.generate(
        PROMPTS[:1], max_new_tokens=12, eos_token_id=None, stop_strings=[said[4]], tokenizer=tokenizer
    )
    assert 6 < stopped.shape[1] < whole.shape[1]
    assert torch.equal(stopped[0], whole[0, : stopped.shape[1]])


@pytest.mark.parametrize("policy", [None, POLICY], ids=["full depth", "a policy"])
@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"penalty_alpha": 0.6, "top_k": 4}, "contrastive"),
        ({"dola_layers": "low"}, "dola"),
        ({"prompt_lookup_num_tokens": 3}, "assisted"),
        ({"assistant_early_exit": 1}, "assisted"),
        ({"generation_config": GenerationConfig(prompt_lookup_num_tokens=3)}, "assisted"),
    ],
)
def test_modes_that_take_tokens_back_are_refused(
    model: Any, policy: ls.ExitPolicy | None, asked: dict[str, Any], words: str
) -> None:
    """By transformers itself, with and without a policy."""
    with pytest.raises(ValueError, match=f"(?i){words}"):
        model.generate(PROMPTS, policy=policy, **{"max_new_tokens": 4, **asked})


def test_a_string_to_stop_at_is_refused_under_a_policy(model: Any) -> None:
    for asked in ({"stop_strings": ["x"]}, {"generation_config": GenerationConfig(stop_strings=["x"])}):
        with pytest.raises(ls.UserError, match="stop_strings is not done"):
            model.generate(PROMPTS, policy=POLICY, tokenizer=byte_pairs(), **{"max_new_tokens": 4, **asked})


def test_a_cache_goes_on_with_more_that_is_read(model: Any, tmp_path: Path) -> None:
    """A head that does not attend reads what it likes; the loops are as many, or fewer."""
    begun = model(PROMPTS, use_cache=True)
    more = model(PROMPTS[:, :1], past_key_values=begun.past_key_values, use_cache=True, output_loop_logits=True)
    both = model(torch.cat((PROMPTS, PROMPTS[:, :1]), 1), output_loop_logits=True)
    for found, expected in zip(more.loop_logits, both.loop_logits, strict=True):
        torch.testing.assert_close(found[:, -1], expected[:, -1])
    fewer = model(PROMPTS[:, :1], past_key_values=more.past_key_values, use_cache=True, num_loops=2)
    with pytest.raises(ls.UserError, match="2 rows and 2 loops"):
        model(PROMPTS[:, :1], past_key_values=fewer.past_key_values, use_cache=True)
