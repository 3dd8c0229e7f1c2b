"""Small looped language models with random weights, for tests: in memory, and as a checkpoint with a tokenizer."""

import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from benchmark_slices import byte_pairs
from torch import Tensor

from loopscope.engine.decoder import Decoder
from loopscope.engine.draft_spacing import DraftGain, DraftSpacing, Spacing
from loopscope.engine.logit_signals import Integers
from loopscope.models.checkpoint import save_model
from loopscope.models.looped_llama import LoopedLlama, LoopedLlamaConfig
from loopscope.models.looped_model import LoopedModel, LoopState
from loopscope.models.model_settings import TransformerSettings
from loopscope.models.ouro import Ouro, OuroConfig
from loopscope.models.transformer import LoopedTransformer, TransformerLayer

VOCABULARY = 50


def ouro_config(**changes: Any) -> dict[str, Any]:
    """What the `config.json` of a small Ouro says."""
    return {
        "model_type": "ouro",
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 256,
        "rope_theta": 10_000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "total_ut_steps": 4,
        **changes,
    }


def change_tokenizer(file: Path) -> None:
    """It begins every text with an a."""
    file.write_text(json.dumps(json.loads(file.read_text()) | {"normalizer": {"type": "Prepend", "prepend": "a"}}))


def seeded(make: Callable[[], LoopedModel]) -> Any:
    """A model whose random weights are the same every time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make().eval().requires_grad_(False)


def tiny_ouro(sure: float = 1.0, **changes: Any) -> Ouro:
    values = ouro_config(**changes)
    del values["model_type"]
    model: Ouro = seeded(lambda: Ouro(OuroConfig(**values)))
    model.lm_head.weight *= sure  # more than 1: it has opinions
    return model


def write_ouro(
    folder: Path, tokenizer: Any = None, shard_bytes: int = 1 << 30, sure: float = 1.0, **changes: Any
) -> Path:
    """The checkpoint of a small Ouro in the layout of the Hub; with a tokenizer, it has that one's vocabulary."""
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
        changes = {"vocab_size": len(tokenizer), "max_position_embeddings": 8192, **changes}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(ouro_config(**changes)), encoding="utf-8")
    save_model(tiny_ouro(sure, **changes).state_dict(), folder, shard_bytes)
    return folder


_OUTSPOKEN = {
    "sure": 8.0,
    "vocab_size": 600,  # that of `byte_pairs()`
    "intermediate_size": 64,
    "max_position_embeddings": 1024,
    "total_ut_steps": 3,
}


def outspoken(**changes: Any) -> Ouro:
    """A small Ouro of words, with opinions."""
    return tiny_ouro(**_OUTSPOKEN | changes)


def write_outspoken(folder: Path, **changes: Any) -> Path:
    return write_ouro(folder, byte_pairs(), **_OUTSPOKEN | changes)


def hugging_face(model: LoopedModel, depth: int) -> Any:
    """lm_eval's own backend, one forward pass a request, at this depth."""
    from lm_eval.models.huggingface import HFLM
    from transformers import GenerationConfig, GenerationMixin, PretrainedConfig, PreTrainedModel
    from transformers.modeling_outputs import CausalLMOutput

    class Wrapped(PreTrainedModel, GenerationMixin):
        config_class = PretrainedConfig

        def __init__(self) -> None:
            super().__init__(PretrainedConfig(num_hidden_layers=1, max_position_embeddings=model.block_size))
            self.looped = model
            self.generation_config = GenerationConfig(eos_token_id=[0, 2], pad_token_id=0)

        def prepare_inputs_for_generation(self, input_ids: Any, attention_mask: Any = None, **_: Any) -> Any:
            return {"input_ids": input_ids}

        def forward(self, input_ids: Any, attention_mask: Any = None, **_: Any) -> Any:
            return CausalLMOutput(logits=model.loops(input_ids, num_loops=depth).logits[-1])

    return HFLM(pretrained=Wrapped(), tokenizer=byte_pairs(), backend="causal", max_length=model.block_size)


def looped_llama_config(**changes: Any) -> dict[str, Any]:
    """A small looped Llama: one layer once, one looped, one at every exit; with all that may be added."""
    how = {"source": "llama", "prelude": 1, "core": 1, "loops": 3, "damping": 0.9, "injection": True, "gate": "linear"}
    values = {**ouro_config(), "model_type": "looped_llama", "num_hidden_layers": 3, "num_key_value_heads": 2}
    del values["total_ut_steps"]
    return {**values, "looping": how | changes.pop("looping", {}), **changes}


def tiny_looped_llama(**changes: Any) -> LoopedLlama:
    """Of random weights, those of the injection and of the gate included; its core is loud, so that loops differ."""

    config = msgspec.convert(looped_llama_config(**changes), LoopedLlamaConfig)

    def make() -> LoopedLlama:
        model, looping = LoopedLlama(config), config.looping
        for part in (model.model.injection, model.model.early_exit_gate):
            if part is not None:
                part.reset_parameters()
        for layer in islice(model.model.layers, looping.prelude, looping.prelude + looping.core):
            layer.mlp.down_proj.weight.data *= 20
            layer.self_attn.o_proj.weight.data *= 20
        return model

    model: LoopedLlama = seeded(make)
    return model


def draft_at(spacing: Spacing, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lossless text is drafted with this spacing, whether it pays here or not."""

    def choose(self: DraftSpacing, rows: int, first: int, every_loop: bool) -> Spacing:
        self.current = self.full_depth if every_loop and spacing.loops > 1 else spacing
        return self.current

    monkeypatch.setattr(DraftSpacing, "choose", choose)


def draft_exits(monkeypatch: pytest.MonkeyPatch, drafting: bool = True) -> list[int]:
    """Tokens with exits draft their successors, or do not, whether that pays here or not; returns the drafts begun."""
    drafts: list[int] = []
    draft = Decoder._draft

    def drafted(self: Decoder, slots: Integers) -> None:
        before = int(self._lengths.sum())
        draft(self, slots)
        drafts.append(int(self._lengths.sum()) - before)

    monkeypatch.setattr(DraftGain, "pays", lambda self, rows: drafting)
    monkeypatch.setattr(Decoder, "_draft", drafted)
    return drafts


class WithCoda(LoopedTransformer):
    """A model whose head attends: one more layer stands before it, outside the loops."""

    head_attends = True

    def __init__(self, settings: TransformerSettings, vocab_size: int, block_size: int) -> None:
        super().__init__(settings, vocab_size, block_size)
        self.coda = TransformerLayer(settings, "coda")

    def head_input(self, state: LoopState, positions: Tensor | None = None) -> Tensor:
        layout = state.layout
        read: Tensor = self.coda(self.norm(state.hidden), layout)
        return read if positions is None else read.index_select(0, layout.states(layout.starts + positions))

    def last_pooled(self, state: LoopState, positions: Tensor) -> None:  # type: ignore[override]
        return None


def _transformer(kind: type[LoopedTransformer] = LoopedTransformer, **changes: Any) -> LoopedModel:
    settings = TransformerSettings(**{"layers": 2, "heads": 2, "width": 16, "loops": 3, "gate": "linear", **changes})
    return seeded(lambda: kind(settings, VOCABULARY, 256))


MODELS: dict[str, Callable[[], LoopedModel]] = {
    "ouro": lambda: tiny_ouro(num_hidden_layers=2),
    "grouped heads": lambda: tiny_ouro(num_key_value_heads=2),
    "transformer": _transformer,
    "learned positions": lambda: _transformer(positions="learned"),
    "coda": lambda: _transformer(WithCoda),
    "looped llama": tiny_looped_llama,
    "looped qwen": lambda: tiny_looped_llama(
        head_dim=16, num_hidden_layers=2, looping={"source": "qwen3", "injection": False, "damping": 1.0}
    ),
}
"""One of every kind that can differ in what attention does."""


def write_decoder(folder: Path, kind: str = "llama", tokenizer: Any = None, **changes: Any) -> Any:
    """transformers' own model of this type with random weights and opinions, saved in `folder` as the Hub has it."""
    import transformers

    name = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "mixtral": "Mixtral"}[kind]
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    more = {"mistral": {"sliding_window": None}, "qwen3": {"head_dim": 16}}.get(kind, {})
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
        sizes |= {"vocab_size": len(tokenizer), "max_position_embeddings": 1024}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = getattr(transformers, f"{name}Config")(**{**sizes, **more, **ends, **changes})
        model = getattr(transformers, f"{name}ForCausalLM")(config).eval().requires_grad_(False)
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter) * (0.2 if parameter.dim() > 1 else 0.1)
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder)
    return model


def write_gguf(file: Path, llama: Path, layers: int = 6) -> None:
    """The weights of `llama` as they are, under the names of GGUF; in 16 bits, as files of that kind are smaller."""
    import gguf
    from safetensors.torch import load_file

    tokenizer = byte_pairs()
    vocabulary = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer = gguf.GGUFWriter(file, "llama")
    for name, value in {"block_count": layers, "context_length": 1024, "embedding_length": 32}.items():
        getattr(writer, f"add_{name}")(value)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(8)
    writer.add_vocab_size(len(vocabulary))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(vocabulary)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, layers)
    for name, tensor in load_file(llama / "model.safetensors").items():
        kind = np.float16 if tensor.dim() > 1 else np.float32
        writer.add_tensor(names.get_name(name, (".weight",)), tensor.numpy().astype(kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
