"""What is a looped model in transformers? Ouro, Huginn and looped Llamas, in the layout of their checkpoints.

The layers are those of `loopscope.models`: a `...ForCausalLM` owns the parts of a `LoopedModel` under the Hub's names,
and its `looped` is this model, for all other functions of LoopScope. A padded batch runs packed, so padding costs no
time and changes no output.

Shapes: B rows, M columns of tokens, P tokens that are no padding, N of them with a label, T loops, D width,
V vocabulary.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import ModelOutput
from transformers.utils import cached_file

from loopscope.analysis.diagnosis import Diagnosis
from loopscope.config import build
from loopscope.errors import UserError
from loopscope.integrations.pretrained_configuration import (
    HuginnPretrainedConfig,
    LoopedLlamaPretrainedConfig,
    LoopedPretrainedConfig,
    OuroPretrainedConfig,
)
from loopscope.integrations.transformers.adaptive_generation import AdaptiveGenerationMixin, reject_authors_arguments
from loopscope.integrations.transformers.padded_batch import LoopedCache, PaddedBatch
from loopscope.integrations.transformers.saved_policy import fetch_saved_policy, save_policy, write_card
from loopscope.models.checkpoint import NETWORKS, first_not_finite, weights_sha256
from loopscope.models.checkpoint_folder import POLICY, check_hashes
from loopscope.models.decoder_layers import SwiGLU
from loopscope.models.huginn import Huginn, HuginnMLP
from loopscope.models.looped_model import LoopedModel
from loopscope.models.ouro import EARLY_EXIT
from loopscope.policy import ExitPolicy
from loopscope.training.language_run import TokenLosses
from loopscope.training.objectives import Unrolling
from loopscope.training.training_loop import BatchLosses

_OTHER_WEIGHTS = ("subfolder", "variant", "state_dict", "gguf_file", "quantization_config")
"""Arguments of `from_pretrained` that replace the weights of the folder's own files."""
_TEXT_BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""Boundaries of packed texts that trainers pass beside `position_ids`, for kernels that need them in advance."""
TeacherLogits = Callable[[Tensor, Tensor | None], Tensor]
"""A teacher: tokens [B, M] and their mask -> the logits [B, M, V] that the model learns to predict."""


@dataclass
class LoopedOutput(ModelOutput):  # type: ignore[misc]
    """Hold a looped model's outputs; outputs by loop are tuples with one tensor for each loop."""

    loss: Tensor | None = None
    logits: Tensor | None = None  # [B, M, V] of the last loop that ran
    past_key_values: LoopedCache | None = None
    hidden_states: tuple[Tensor, ...] | None = None  # 1 + T of [B, M, D]: before the first loop, then the pooled states
    loop_logits: tuple[Tensor, ...] | None = None  # T of [B, M, V]
    gate_logits: tuple[Tensor, ...] | None = None  # T of [B, M], if the model has a gate
    cross_entropy: Tensor | None = None  # [T, N] of every label, with `loop_losses`
    correct: Tensor | None = None  # [T, N]
    halt_logits: Tensor | None = None  # [T, N]
    detached_halt_logits: Tensor | None = None  # [T, N], with gradients that end at the gate
    last_hidden_state: Tensor | None = None  # [B, M, D] the head's input at the last loop, for a custom head


class LoopedForCausalLM(PreTrainedModel, AdaptiveGenerationMixin):  # type: ignore[misc]
    """Be the base of the three looped models in transformers, with their `forward`."""

    configured_depth: ClassVar[Any]
    """A function from a configuration to its number of loops."""
    config: LoopedPretrainedConfig
    diagnosis: Diagnosis | None = None
    """The result of `loopscope.diagnose` on this model, for its model card."""
    looped: LoopedModel
    """The model of `loopscope.models` with the same parts: a change in one changes the other."""
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True
    _travelling: ExitPolicy | None = None
    """The policy that is being saved with the model."""
    _supports_sdpa = True
    _skip_keys_device_placement = ("past_key_values",)

    def __init__(self, config: LoopedPretrainedConfig) -> None:
        super().__init__(config)
        settings, network = NETWORKS[config.model_type]
        looped = network(build(settings, config.to_dict(), config.name_or_path or "the configuration"))
        for name, part in looped.named_children():
            self.add_module(name, part)
        looped._modules = self._modules  # one dictionary, so that replacing a part replaces it in both
        object.__setattr__(self, "looped", looped)  # no submodule itself: its parts have the Hub's names here
        self.post_init()

    def _init_weights(self, module: Any) -> None:
        """Do nothing: the network's own layers initialise their weights."""

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """Whether transformers may pass its own cache; `forward` makes a cache with entries for every loop."""
        return False

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load as transformers does; rejects missing, unknown, misshapen or infinite weights, and models on several
        devices or partly on disk."""

        with_info = kwargs.pop("output_loading_info", False)
        folder = _weights_folder(pretrained_model_name_or_path, kwargs)
        if folder is not None:
            check_hashes(folder)
        model, info = super().from_pretrained(pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs)
        places = {str(place) for place in getattr(model, "hf_device_map", {}).values()}
        if len(places) > 1 or places & {"disk", "meta"}:
            raise UserError(
                f"A looped model runs on one device, and this device_map has {', '.join(sorted(places))}: every loop "
                "would cross all of them; name one (device_map={'': 0}), or serve it with tensor parallelism."
            )
        base = model.__dict__.pop("_loaded", None)
        source = str((kwargs.get("adapter_kwargs") or {}).get("_adapter_model_path", pretrained_model_name_or_path))
        if pretrained_model_name_or_path is not None:
            model._bring_policy(base[0] if model._hf_peft_config_loaded else source, kwargs)
        if model._hf_peft_config_loaded:
            _check_loaded_keys(*base)
        elif folder is not None:
            model.looped.identify_by(partial(weights_sha256, folder))
        _check_loaded_keys(source, info)
        if (wrong := first_not_finite(dict(model.named_parameters()))) is not None:
            raise UserError(
                f"In {source} the tensor '{wrong}' holds a value that is not finite; fetch or make it again."
            )
        return (model, info) if with_info else model

    @staticmethod
    def _finalize_model_loading(model: Any, load_config: Any, loading_info: Any) -> Any:
        """Record what was loaded; with an adapter, `from_pretrained` reports only the adapter."""
        info = PreTrainedModel._finalize_model_loading(model, load_config, loading_info)
        model._loaded = (str(load_config.pretrained_model_name_or_path), info.to_dict())
        return info

    def _bring_policy(self, source: str, options: Mapping[str, Any]) -> None:
        """Copy the exit settings of a checkpoint's generation configuration into the model's."""
        exits, self._policy = fetch_saved_policy(source, options)
        if exits and "generation_config" not in options:  # transformers drops keys that it does not know
            self.generation_config._from_model_config = False
            self.generation_config.__dict__.update(exits)

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        """Save as transformers does, with the exit policy and a model card.

        If the weights are not those of the LoopScope run, they do not keep its name. A policy for other weights is not
        saved: LoopScope warns you.
        """
        self._check_config()
        self._travelling = self._fitting_policy(weights_given=kwargs.get("state_dict") is not None)
        run = getattr(self.config, "run", None)
        if run is not None and (kwargs.get("state_dict") is not None or not self.looped.is_identified):
            self.config.fine_tuning = {"start": run}
            del self.config.run
        named = self.generation_config.__dict__.pop("policy", None)
        if self._travelling is not None:
            self.generation_config.policy = POLICY
            self.generation_config._from_model_config = False  # otherwise transformers would not read the policy again
        try:
            saved = super().save_pretrained(save_directory, *args, **kwargs)
        finally:
            if named is not None:
                self.generation_config.policy = named
        if kwargs.get("is_main_process", True) is not False:
            self._complete(Path(save_directory))
        return saved

    def _upload_modified_files(self, working_dir: Any, *args: Any, **kwargs: Any) -> Any:
        """Upload as transformers does, with the policy and LoopScope's section in the card that transformers wrote."""
        self._complete(Path(working_dir))
        return super()._upload_modified_files(working_dir, *args, **kwargs)

    def _complete(self, folder: Path) -> None:
        """Write the policy and the card into the folder of the saved model."""
        policy = self._travelling
        if policy is None:
            (folder / POLICY).unlink(missing_ok=True)  # from an earlier save
        else:
            policy = save_policy(policy, folder)
        write_card(folder, self, policy, self.diagnosis)

    def _fitting_policy(self, weights_given: bool) -> ExitPolicy | None:
        """The policy, if it is for the current weights."""
        policy = self.exit_policy
        if policy is None:
            return None
        weights = None if weights_given or self._hf_peft_config_loaded else self.looped.weights_sha256
        try:
            policy.check("other weights" if weights is None else weights, self.num_loops, self._decisions)
        except UserError as error:
            warnings.warn(f"The exit policy is not saved with the model. {error}", stacklevel=3)
            return None
        return policy

    def _check_config(self) -> None:
        """Reject a configuration that was changed after the network was made from it: the change has no effect."""
        if (depth := self.configured_depth(self.config)) != self.num_loops:
            raise UserError(
                f"The configuration was changed to {depth} loops, and the model has {self.num_loops}; give another "
                "depth to from_pretrained, or num_loops to a call."
            )
        if getattr(self.config, "early_exit_threshold", 1) not in (None, 1):
            raise UserError(f"{EARLY_EXIT} (generate(policy=...)).")

    @property
    def num_loops(self) -> int:  # type: ignore[override]
        """The depth for which the model was trained."""
        return self.looped.num_loops

    @property
    def gradient_checkpointing(self) -> bool:
        """Whether backward runs each loop again."""
        return self.looped.gradient_checkpointing

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, enable: bool) -> None:
        self.looped.gradient_checkpointing = enable

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.looped.training = mode
        return self

    def compile_mlps(self, **options: Any) -> None:
        """Compile the MLP of every layer in place (`torch.compile`, with its options).

        Attention is not compiled: Python plans it on the host for every batch.
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
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: LoopedCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_loops: int | None = None,
        output_hidden_states: bool | None = None,
        output_loop_logits: bool = False,
        return_dict: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        loop_losses: bool = False,
        unrolling: Unrolling | None = None,
        teacher: TeacherLogits | None = None,
        **others: Any,
    ) -> LoopedOutput | tuple[Any, ...]:
        """Run `num_loops` loops (default: the model's); with `output_loop_logits`, return the logits of every loop.


        Where `position_ids` restart at 0, a new text begins, which does not attend to the text before it. `labels` are
        the tokens themselves, with -100 for tokens without a loss; the loss is the last loop's. With `loop_losses`
        there are no logits, but the losses of every loop, or of the last loop that `unrolling` runs, against the labels
        or the `teacher`. Rejects `others` that are not None or False.
        """
        reject_authors_arguments(others)
        known = set() if position_ids is None else {*_TEXT_BOUNDS}
        unknown = {name for name, value in others.items() if value is not None and value is not False} - known
        if unknown:
            raise UserError(
                f"A looped model does not take {min(unknown)}: it reads input_ids, keeps no attention weights, and "
                "tells several texts in one row apart by their position_ids alone."
            )
        self._check_config()
        if hasattr(self.get_input_embeddings(), "base_layer") and (
            self.looped.tied or self.get_output_embeddings() is None
        ):
            raise UserError(
                "The embeddings of this model are its head, too, which an adapter on them would not change; leave them "
                "out of target_modules, or train them whole (modules_to_save)."
            )
        cache = LoopedCache() if use_cache and past_key_values is None else past_key_values
        batch = PaddedBatch.of(input_ids.to(self.device), attention_mask, position_ids, cache)
        if loop_losses:
            assert labels is not None
            assert cache is None
            assert num_loops is None
            taught = None if teacher is None else batch.pack(teacher(input_ids, attention_mask))
            output = LoopedOutput(*[None] * 6, *self._loop_losses(batch, labels, unrolling, taught))
        else:
            states = bool(self.config.output_hidden_states if output_hidden_states is None else output_hidden_states)
            loops = self.num_loops if num_loops is None else num_loops
            output = self._answer(batch, cache, loops, states, output_loop_logits, logits_to_keep)
            if labels is not None:
                if not isinstance(logits_to_keep, int) or logits_to_keep:
                    raise UserError("A loss needs the logits of all tokens; leave out logits_to_keep, or the labels.")
                output.loss = _mean_loss(batch, output.logits, labels.to(self.device), num_items_in_batch)
        as_output = self.config.return_dict if return_dict is None else return_dict
        return output if as_output else output.to_tuple()

    def _answer(
        self, batch: PaddedBatch, cache: LoopedCache | None, loops: int, with_states: bool, with_loops: bool, keep: Any
    ) -> LoopedOutput:
        """The outputs of a batch; `keep` is the number of last columns with logits (0: all), or their indices."""
        looped, read_at = self.looped, range(1 if with_loops else loops, loops + 1)
        columns = slice(-keep, None) if isinstance(keep, int) else keep
        if cache is not None:
            cache.begin(batch.size, loops, read_at if looped.head_attends else ())
        at_loop = None if cache is None else partial(cache.appending, batch.rows, batch.counts)
        state = looped.begin_packed(batch.tokens, batch.layout(None if at_loop is None else at_loop(0)))
        hidden, logits, halts = [batch.unpack(state.hidden)] if with_states else [], [], []
        for loop, state in enumerate(looped.unroll(state, loops, at_loop), start=1):  # noqa: B020
            if with_states or loop in read_at:
                pooled = looped.pooled(state)
            if with_states:
                hidden.append(batch.unpack(pooled))
            if loop in read_at:
                read = batch.unpack(looped.head_input(state) if looped.head_attends else pooled)
                logits.append(looped.predict(read[:, columns]))
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

    def _loop_losses(
        self, batch: PaddedBatch, labels: Tensor, unrolling: Unrolling | None, taught: Tensor | None
    ) -> BatchLosses:
        """The losses of a batch at every loop; `taught` are the teacher's logits [P, V]."""
        chosen, targets = batch.targets(labels.to(self.device))
        log_probs = None if taught is None else taught.index_select(0, chosen).float().log_softmax(-1)
        state = self.looped.begin_packed(batch.tokens, batch.layout())
        return TokenLosses(self.looped).of_state(state, targets, log_probs, unrolling, chosen)


class OuroForCausalLM(LoopedForCausalLM):
    """Ouro in transformers."""

    configured_depth = staticmethod(lambda config: config.total_ut_steps)
    config: OuroPretrainedConfig
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012


class RavenForCausalLM(LoopedForCausalLM):
    """Huginn in transformers, under the class name of its checkpoints."""

    configured_depth = staticmethod(lambda config: config.mean_recurrence)
    config: HuginnPretrainedConfig
    _input_embed_layer = "wte"
    _keys_to_ignore_on_load_unexpected = tuple(Huginn.unneeded)

    def get_input_embeddings(self) -> Any:
        return self.transformer.wte

    def set_input_embeddings(self, value: Any) -> None:
        self.transformer.wte = value


class LoopedLlamaForCausalLM(LoopedForCausalLM):
    """A looped Llama in transformers."""

    configured_depth = staticmethod(lambda config: config.looping["loops"])
    config: LoopedLlamaPretrainedConfig
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    _keys_to_ignore_on_load_unexpected = (r"rotary_emb\.inv_freq",)


def _mean_loss(batch: PaddedBatch, logits: Any, labels: Tensor, num_items_in_batch: Tensor | int | None) -> Tensor:
    """The mean loss over all labels of the batch, or of the larger batch that it is a part of.

    transformers counts the labels of the larger batch, including labels on padding: so each part has the weight that
    transformers gives it.
    """
    chosen, targets = batch.targets(labels)
    total = F.cross_entropy(batch.pack(logits).index_select(0, chosen).float(), targets, reduction="sum")
    if num_items_in_batch is None:
        return total / len(targets)
    return total / max(1, len(targets)) * (labels[:, 1:] != -100).sum() / num_items_in_batch


def _check_loaded_keys(source: str, info: Mapping[str, Any]) -> None:
    """Reject a load that leaves weights uninitialised, or that leaves out tensors of the file."""
    mismatched = [name for name, *_ in info["mismatched_keys"]]
    for what, problem, names in (
        ("The", "has no tensor", info["missing_keys"]),
        ("The configuration of the", "does not know the tensor", info["unexpected_keys"]),
        ("The configuration of the", "has another shape for the tensor", mismatched),
    ):
        if names:
            raise UserError(f"{what} checkpoint in {source} {problem} '{min(names)}'; fetch or make it again.")


def _weights_folder(source: Any, options: Mapping[str, Any]) -> Path | None:
    """The folder with a checkpoint's files (its own, or the fetched one), if the weights are loaded from it."""
    if any(options.get(name) for name in _OTHER_WEIGHTS):
        return None
    if Path(source).is_dir():
        return Path(source).resolve()
    given = {name: options[name] for name in ("cache_dir", "revision", "token") if name in options}
    try:
        found = cached_file(source, "config.json", local_files_only=bool(options.get("local_files_only")), **given)
    except OSError:
        return None  # transformers has the better error
    return None if found is None else Path(found).parent
