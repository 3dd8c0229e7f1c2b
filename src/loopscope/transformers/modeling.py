"""Looped models as transformers knows models: Ouro, Huginn and looped Llamas, in the layout of their checkpoints.

The layers are those of `loopscope.models`, and are not written again: a `...ForCausalLM` owns the parts of a
`LoopedModel` under the names of the Hub, and its `looped` is that model, for all that LoopScope does with one. A padded
batch goes through it packed, so that padding takes no time and changes nothing.

Shapes: B rows, M columns of tokens, P tokens that are no padding, N of them with a label, T loops, D width,
V vocabulary.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import ModelOutput

from loopscope.arguments import as_count
from loopscope.config import build
from loopscope.errors import UserError
from loopscope.models import Huginn, HuginnConfig, LoopedLlama, LoopedLlamaConfig, LoopedModel, Ouro, OuroConfig
from loopscope.models.checkpoint import first_not_finite, weights_sha256
from loopscope.models.decoder_layers import SwiGLU
from loopscope.models.huginn import HuginnMLP
from loopscope.models.run_hashes import check_hashes
from loopscope.objectives import Unrolling
from loopscope.pretrained_configuration import (
    HuginnPretrainedConfig,
    LoopedLlamaPretrainedConfig,
    LoopedPretrainedConfig,
    OuroPretrainedConfig,
)
from loopscope.training.language_run import TokenLosses
from loopscope.training.loop import BatchLosses
from loopscope.transformers.adaptive_generation import AdaptiveGenerationMixin
from loopscope.transformers.changed_parts import check_config, check_unchanged
from loopscope.transformers.loading import check_keys, check_places, own_folder
from loopscope.transformers.padded_batch import LoopedCache, PaddedBatch

TeacherLogits = Callable[[Tensor, Tensor | None], Tensor]
"""Tokens [B, M] and their mask -> the logits [B, M, V] that are to be said."""


@dataclass
class LoopedOutput(ModelOutput):  # type: ignore[misc]
    """What a looped model says; what goes by loop is a tuple with one part a loop."""

    loss: Tensor | None = None
    logits: Tensor | None = None  # [B, M, V] of the last loop that was run
    past_key_values: LoopedCache | None = None
    hidden_states: tuple[Tensor, ...] | None = None  # 1 + T of [B, M, D]: before the first loop, then the pooled states
    loop_logits: tuple[Tensor, ...] | None = None  # T of [B, M, V]
    gate_logits: tuple[Tensor, ...] | None = None  # T of [B, M], of a model with a gate
    cross_entropy: Tensor | None = None  # [T, N] of every label, where `loop_losses` is asked for
    correct: Tensor | None = None  # [T, N]
    halt_logits: Tensor | None = None  # [T, N]
    detached_halt_logits: Tensor | None = None  # [T, N]: their gradient ends at the gate
    last_hidden_state: Tensor | None = None  # [B, M, D] what the head reads of the last loop: for those who bring one


class LoopedForCausalLM(PreTrainedModel, AdaptiveGenerationMixin):  # type: ignore[misc]
    """Base of the three; `forward` is theirs, too."""

    config: LoopedPretrainedConfig
    looped: LoopedModel
    """The model of `loopscope.models`, with the same parts: what is changed in one is changed in the other."""
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True
    _supports_sdpa = True
    _skip_keys_device_placement = ("past_key_values",)

    def __init__(self, config: LoopedPretrainedConfig) -> None:
        super().__init__(config)
        looped = self._network(config.to_dict(), config.name_or_path or "the configuration")
        for name, part in looped.named_children():
            self.add_module(name, part)
        looped._modules = self._modules  # one dictionary, so that whoever replaces a part does it in both
        object.__setattr__(self, "looped", looped)  # not a part itself: its parts have the Hub's names here
        self.post_init()

    @staticmethod
    def _network(values: Mapping[str, Any], source: str) -> LoopedModel:
        """The network that a configuration describes: each architecture has its own."""
        raise NotImplementedError

    def _init_weights(self, module: Any) -> None:
        """They are as the network's own layers begin."""

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """Whether transformers may bring a cache; `forward` makes its own, with places for every loop."""
        return False

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As transformers does it; weights that are missing, unknown, of other shapes or not finite are refused."""
        with_info = kwargs.pop("output_loading_info", False)
        folder = own_folder(pretrained_model_name_or_path, kwargs)
        if folder is not None:
            check_hashes(folder)
        model, info = super().from_pretrained(pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs)
        check_places(model)
        base = model.__dict__.pop("_loaded", None)
        source = str((kwargs.get("adapter_kwargs") or {}).get("_adapter_model_path", pretrained_model_name_or_path))
        if model._hf_peft_config_loaded:
            check_keys(*base)
        elif folder is not None:
            model.looped.identify_by(partial(weights_sha256, folder))
        check_keys(source, info)
        model._check_values(source)
        return (model, info) if with_info else model

    @staticmethod
    def _finalize_model_loading(model: Any, load_config: Any, loading_info: Any) -> Any:
        """Takes down what was loaded; if an adapter follows, `from_pretrained` tells of the adapter alone."""
        info = PreTrainedModel._finalize_model_loading(model, load_config, loading_info)
        model._loaded = (str(load_config.pretrained_model_name_or_path), info.to_dict())
        return info

    def _check_values(self, source: str) -> None:
        if (wrong := first_not_finite(dict(self.named_parameters()))) is not None:
            raise UserError(
                f"In {source} the tensor '{wrong}' holds a value that is not finite; fetch or make it again."
            )

    @staticmethod
    def configured_depth(config: Any) -> int:
        """How many loops a configuration asks for."""
        raise NotImplementedError

    @property
    def head_is_embedding(self) -> bool:
        """Whether one tensor is both."""
        return bool(self.looped.tied)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """As transformers does it; weights that are not those that a run of LoopScope left do not go by its name."""
        check_config(self)
        run = getattr(self.config, "run", None)
        if run is not None and (kwargs.get("state_dict") is not None or not self.looped.is_identified):
            self.config.fine_tuning = {"start": run}
            del self.config.run
        return super().save_pretrained(*args, **kwargs)

    @property
    def num_loops(self) -> int:
        """The depth that the model was trained for."""
        return self.looped.num_loops

    @property
    def gradient_checkpointing(self) -> bool:
        """Whether a loop is run again where its gradients are needed."""
        return self.looped.gradient_checkpointing

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, enable: bool) -> None:
        self.looped.gradient_checkpointing = enable

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.looped.training = mode
        return self

    def compile_mlps(self, **options: Any) -> None:
        """Compiles the MLP of every layer in place (`torch.compile`, with its options).

        Attention is left as it is: where rows lie is worked out in Python, on the host, for every batch.
        """
        for module in self.modules():
            if isinstance(module, (SwiGLU, HuginnMLP)):
                module.compile(**{"dynamic": True, **options})

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> Any:
        resized = super().resize_token_embeddings(*args, **kwargs)
        self.looped.vocab_size = resized.num_embeddings
        return resized

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: LoopedCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_loops: int | None = None,
        output_hidden_states: bool | None = None,
        output_loop_logits: bool = False,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        loop_losses: bool = False,
        unrolling: Unrolling | None = None,
        teacher: TeacherLogits | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        max_length_q: int | None = None,
        max_length_k: int | None = None,
    ) -> LoopedOutput | tuple[Any, ...]:
        """What the model says after `num_loops` loops (default: all of its own), and with `output_loop_logits` after
        every one.

        `labels` are the tokens themselves, -100 where none counts; the loss is that of the last loop. With
        `loop_losses` there are no logits, but the losses of every loop, or of the last that `unrolling` runs, against
        the labels or against the `teacher`; in a part of a larger batch (`num_items_in_batch`) there may be none.
        """
        if input_ids is None or inputs_embeds is not None:
            raise UserError("A looped model takes input_ids; what is embedded already (inputs_embeds) it does not.")
        if any(each is not None for each in (cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)):
            raise UserError(
                "Several texts in one row (packing, padding_free, DataCollatorWithFlattening) are not told apart "
                "here; give every text a row of its own: padding takes no time."
            )
        check_unchanged(self)
        if output_attentions:
            raise UserError("A looped model keeps no attention weights (output_attentions); ask for something else.")
        if past_key_values is not None and not isinstance(past_key_values, LoopedCache):
            raise UserError(
                f"past_key_values must be a LoopedCache, which has places for every loop, got a "
                f"{type(past_key_values).__name__}; leave it out, and take the one that comes back."
            )
        cache = LoopedCache() if use_cache and past_key_values is None else past_key_values
        if cache is not None and loop_losses:
            raise UserError("Losses of every loop are computed without a cache; leave out use_cache.")
        if num_loops is not None and loop_losses:
            raise UserError("Losses of every loop are those of all loops of the model; leave out num_loops.")
        batch = PaddedBatch.of(input_ids, attention_mask, cache)
        if loop_losses:
            is_part = num_items_in_batch is not None
            found = self._loop_losses(
                batch, input_ids, attention_mask, position_ids, labels, is_part, unrolling, teacher
            )
            output = LoopedOutput(None, None, None, None, None, None, *found)
        else:
            loops = self.num_loops if num_loops is None else as_count(num_loops, "num_loops")
            states = bool(self.config.output_hidden_states if output_hidden_states is None else output_hidden_states)
            output = self._answer(
                batch, input_ids, position_ids, cache, loops, states, output_loop_logits, logits_to_keep
            )
            if labels is not None:
                assert output.logits is not None
                output.loss = self._loss(batch, output.logits, labels, logits_to_keep, num_items_in_batch)
        as_output = self.config.return_dict if return_dict is None else return_dict
        return output if as_output else output.to_tuple()

    def _answer(
        self,
        batch: PaddedBatch,
        tokens: Tensor,
        position_ids: Tensor | None,
        cache: LoopedCache | None,
        loops: int,
        with_states: bool,
        with_loops: bool,
        logits_to_keep: int | Tensor,
    ) -> LoopedOutput:
        looped, read_at = self.looped, range(1 if with_loops else loops, loops + 1)
        if cache is not None:
            cache.begin(batch.size, loops, read_at if looped.head_attends else ())
        at_loop = None if cache is None else partial(cache.appending, batch.rows, batch.counts)
        layout = batch.layout(self.device, None if at_loop is None else at_loop(0), position_ids)
        state = looped.begin_packed(batch.pack(tokens.to(self.device)), layout)
        hidden, logits, halts = [batch.unpack(state.hidden)] if with_states else [], [], []
        for loop, state in enumerate(looped.unroll(state, loops, at_loop), start=1):  # noqa: B020
            if with_states or loop in read_at:
                pooled = looped.pooled(state)
            if with_states:
                hidden.append(batch.unpack(pooled))
            if loop in read_at:
                read = batch.unpack(looped.head_input(state) if looped.head_attends else pooled)
                logits.append(looped.predict(_kept(read, logits_to_keep)))
                halts.append(looped.halt(pooled))
        if cache is not None:
            cache.extend(batch.rows, batch.counts, batch.columns)
        gates = [batch.unpack(each) for each in halts if each is not None]
        return LoopedOutput(
            logits=logits[-1],
            past_key_values=cache,
            hidden_states=tuple(hidden) if with_states else None,
            loop_logits=tuple(logits) if with_loops else None,
            gate_logits=tuple(gates) if with_loops and gates else None,
            last_hidden_state=read,
        )

    def _loss(
        self,
        batch: PaddedBatch,
        logits: Tensor,
        labels: Tensor,
        logits_to_keep: int | Tensor,
        num_items_in_batch: Tensor | int | None,
    ) -> Tensor:
        """The mean over all labels of the batch, or of the larger one that this is a part of.

        transformers counts the labels of that one, and knows nothing of those on padding: so each part has the weight
        that transformers gives it.
        """
        if not isinstance(logits_to_keep, int) or logits_to_keep:
            raise UserError("A loss needs the logits of all tokens; leave out logits_to_keep, or the labels.")
        chosen, targets = batch.targets(labels.to(logits.device))
        total = F.cross_entropy(batch.pack(logits).index_select(0, chosen).float(), targets, reduction="sum")
        if num_items_in_batch is None:
            return total / len(targets)
        return total / max(1, len(targets)) * (labels[:, 1:] != -100).sum() / num_items_in_batch

    def _loop_losses(
        self,
        batch: PaddedBatch,
        tokens: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        labels: Tensor | None,
        is_part: bool,
        unrolling: Unrolling | None,
        teacher: TeacherLogits | None,
    ) -> BatchLosses:
        if labels is None:
            raise UserError("Losses of every loop need labels; give them (the tokens themselves, -100 for padding).")
        layout = batch.layout(self.device, None, position_ids)
        chosen, targets = batch.targets(labels.to(self.device))
        if not len(targets) and not is_part:
            raise UserError("No label of this batch counts: all are -100, or padding, or the first of their row.")
        taught = None
        if teacher is not None:
            taught = batch.pack(teacher(tokens, attention_mask)).index_select(0, chosen).float().log_softmax(-1)
        state = self.looped.begin_packed(batch.pack(tokens.to(self.device)), layout)
        return TokenLosses(self.looped).of_state(state, targets, taught, unrolling, chosen)


class OuroForCausalLM(LoopedForCausalLM):
    config: OuroPretrainedConfig
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012 - transformers' own way

    @staticmethod
    def _network(values: Mapping[str, Any], source: str) -> LoopedModel:
        return Ouro(build(OuroConfig, values, source))

    @staticmethod
    def configured_depth(config: Any) -> int:
        return int(config.total_ut_steps)


class RavenForCausalLM(LoopedForCausalLM):
    """Huginn, under the name that its checkpoints give it."""

    config: HuginnPretrainedConfig
    _input_embed_layer = "wte"
    _keys_to_ignore_on_load_unexpected = tuple(Huginn.unneeded)

    @staticmethod
    def _network(values: Mapping[str, Any], source: str) -> LoopedModel:
        return Huginn(build(HuginnConfig, values, source))

    @staticmethod
    def configured_depth(config: Any) -> int:
        return int(config.mean_recurrence)

    @property
    def head_is_embedding(self) -> bool:
        return True

    def get_input_embeddings(self) -> Any:
        return self.transformer.wte

    def set_input_embeddings(self, value: Any) -> None:
        self.transformer.wte = value


class LoopedLlamaForCausalLM(LoopedForCausalLM):
    config: LoopedLlamaPretrainedConfig
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    _keys_to_ignore_on_load_unexpected = (r"rotary_emb\.inv_freq",)

    @staticmethod
    def _network(values: Mapping[str, Any], source: str) -> LoopedModel:
        return LoopedLlama(build(LoopedLlamaConfig, values, source))

    @staticmethod
    def configured_depth(config: Any) -> int:
        return int(config.looping["loops"])


def _kept(values: Tensor, logits_to_keep: int | Tensor) -> Tensor:
    """[B, M, D], its last so many columns (0: all), or the columns of these numbers."""
    return values[:, -logits_to_keep:] if isinstance(logits_to_keep, int) else values[:, logits_to_keep]
