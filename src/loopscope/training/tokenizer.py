"""How does a new language model get its tokenizer? A byte-level BPE of its training text, made as Ouro's is."""

from collections.abc import Iterable
from pathlib import Path

from loopscope.documents import END
from loopscope.errors import UserError
from loopscope.models.tokenizer import FILE
from loopscope.writing import write_bytes, write_json

SPECIAL = (END, "<|im_start|>", "<|im_end|>")
"""Tokens 0 to 2: the end of a document, and the marks around a turn of a chat."""
SMALLEST = 256 + len(SPECIAL)
"""Tokens that every vocabulary has."""

TOKENIZER_CONFIG = "tokenizer_config.json"

_CHAT = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def train_tokenizer(documents: Iterable[str], vocab_size: int, longest: int, folder: Path) -> None:
    """Writes the tokenizer of these documents: digits stand alone, and words take the space before them."""
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError:
        raise UserError("Text needs transformers; install it with: pip install 'loopscope[lm]'.") from None
    bpe = Tokenizer(models.BPE())
    pieces = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    bpe.pre_tokenizer = pre_tokenizers.Sequence(pieces)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(documents, trainer)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), END),
        "additional_special_tokens": SPECIAL[1:],
        "chat_template": _CHAT,
        "clean_up_tokenization_spaces": False,
        "model_max_length": longest,
    }
    write_json(folder / TOKENIZER_CONFIG, settings)
    write_bytes(folder / FILE, bpe.to_str(pretty=True).encode())
