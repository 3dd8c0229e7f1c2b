"""TRL trains looped models as it trains any other: it brings its own head, and its loss is that of the last loop."""

from pathlib import Path

import pytest
import torch
from conftest import GOLDEN
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import loopscope.integrations.transformers  # noqa: F401 - registers the models

pytestmark = pytest.mark.filterwarnings("ignore")  # TRL's own
OURO = GOLDEN / "ouro-tiny"


def test_its_loss_is_that_of_the_last_loop(tmp_path: Path) -> None:
    import trl  # its import warns, which is an error outside a test

    model, draws = AutoModelForCausalLM.from_pretrained(OURO), torch.Generator().manual_seed(0)
    rows = [torch.randint(2, 49, (length,), generator=draws).tolist() for length in range(4, 10)]
    with torch.no_grad():
        losses = [model(torch.tensor([row]), labels=torch.tensor([row])).loss.item() * (len(row) - 1) for row in rows]
    expected = sum(losses) / sum(len(row) - 1 for row in rows)
    words = {str(token): token for token in range(model.config.vocab_size)}
    data = Dataset.from_list([{"input_ids": row} for row in rows])
    trainer = trl.SFTTrainer(
        str(OURO),
        args=trl.SFTConfig(
            str(tmp_path),
            model_init_kwargs={"dtype": "float32"},
            max_steps=8,
            learning_rate=1e-2,
            per_device_eval_batch_size=6,
            max_length=16,
            bf16=False,
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
            save_strategy="no",
        ),
        train_dataset=data,
        eval_dataset=data,
        processing_class=PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(WordLevel(words, unk_token="0")), eos_token="1", pad_token="0"
        ),
    )
    before = trainer.evaluate()["eval_loss"]
    assert before == pytest.approx(expected, abs=1e-4)
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before
