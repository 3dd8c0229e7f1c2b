"""Real slices of the benchmarks, and small tokenizers trained on them, for tests."""

import os
from functools import cache
from pathlib import Path
from typing import Any

from loopscope.questions import BENCHMARKS, Question, Split, load_questions

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}  # read when the libraries are imported

DATA = Path(__file__).parent / "data" / "benchmarks"
CHAT = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant:"


@cache
def asked(name: str, split: Split = "test") -> list[Question]:
    """Built once for all tests."""
    return load_questions(BENCHMARKS[name], split, DATA)


@cache
def byte_pairs(words: bool = True, first: bool = False) -> Any:
    """600 byte pairs; without `words` they go across spaces, with `first` every text begins with bos."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [question.context + choice for question in asked("openbookqa") for choice in question.choices]
    tokenizer.train_from_iterator(texts, trainer)
    if first:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|endoftext|>", eos_token="<|endoftext|>", chat_template=CHAT
    )
