"""How does transformers' `generate` run a looped model? Without an exit policy like any other model; under a policy,
LoopScope's engine generates.

transformers reads the settings, pads and counts. The decoding loop is `loopscope.engine.stream`: every token is as deep
as its policy decides, and no row waits for another. So the tokens are those of `loopscope.generate`.

Shapes: B rows, M columns of the prompts, N new tokens of the longest text.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, GenerationMixin
from transformers.generation import (
    EosTokenCriteria,
    GenerationMode,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.modeling_outputs import ModelOutput

from loopscope.engine.generation import Prompt, stream
from loopscope.engine.sampling import Sampling
from loopscope.errors import UserError
from loopscope.integrations.transformers.padded_batch import PaddedBatch
from loopscope.models.checkpoint_folder import POLICY
from loopscope.models.looped_model import LoopedModel
from loopscope.policy import ExitPolicy
from loopscope.scope import CacheMode, Scope

_DONE = (*(TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper), *(MaxLengthCriteria, EosTokenCriteria))
"""Processors and criteria that the engine itself applies."""
_INPUTS = ("attention_mask", "position_ids", "use_cache", "logits_to_keep")
"""Inputs that transformers passes to every decoding function."""
_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
_CONFIGURED: Any = object()
"""The default of an argument: the value of the generation configuration."""
_COUNTED = "it counts loops from 0; here num_loops=N runs N loops, so that step 2 is num_loops=3"
_EXITS = "here an exit rule is a policy: generate(policy=ls.ExitPolicy('gate', 0.5)) for Ouro's threshold of 0.5"
_AUTHORS_ARGUMENTS = {
    "exit_threshold": _EXITS,
    "early_exit_threshold": _EXITS,
    "criterion": "here an exit rule is a policy, with one of LoopScope's readouts: generate(policy=...)",
    "exit_at_step": _COUNTED,
    "early_exit_step": _COUNTED,
    "num_steps": "here num_loops=N runs N loops",
    "use_weighted_exit": "it is not offered; output_loop_logits=True gives loop_logits and gate_logits to compute it",
}
"""Arguments of the published code of Ouro and Huginn, with their replacements here."""


@dataclass
class AdaptiveGenerateOutput(ModelOutput):  # type: ignore[misc]
    """The output of `generate` under an exit policy."""

    sequences: Tensor | None = None  # [B, M + N]
    loops: Tensor | None = None  # [B, N] loops of every new token; 0 after a text's end


class AdaptiveGenerationMixin(GenerationMixin):  # type: ignore[misc]
    """Add `generate` with exit policies to the looped models."""

    looped: LoopedModel
    num_loops: int
    _policy: ExitPolicy | Path | None = None
    """The saved policy that `generation_config` names: the policy, or its file."""
    _supported_generation_modes = (
        *(GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE),
        *(GenerationMode.BEAM_SEARCH, GenerationMode.BEAM_SAMPLE),
    )
    """No assisted generation: it drops tokens, and the cache of a looped model cannot be cut."""

    @torch.no_grad()
    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        logits_processor: LogitsProcessorList | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        *args: Any,
        policy: ExitPolicy | str | Path | None = _CONFIGURED,
        cache: CacheMode | None = _CONFIGURED,
        lossless: bool = _CONFIGURED,
        streamer: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Generate as transformers does, or under an exit policy (or its file) by LoopScope's engine.

        The default policy is the one that the generation configuration names (`policy=None`: full depth). `cache`
        chooses what a token that exits early leaves in deeper loops (default: as the policy was calibrated, or `full`).
        With `lossless` the text is that of full depth, as in `loopscope.generate`.
        """
        configured = _GenerationSettings(generation_config, self.generation_config)
        reject_authors_arguments({name: configured[name] for name in _AUTHORS_ARGUMENTS} | kwargs)
        given = (inputs, generation_config, logits_processor, stopping_criteria, *args)
        if policy is not _CONFIGURED:
            configured = _GenerationSettings()
        policy = self._policy_of(configured["policy"] if policy is _CONFIGURED else policy)
        cache = configured["cache"] if cache is _CONFIGURED else cache
        lossless = bool(configured["lossless"]) if lossless is _CONFIGURED else lossless
        if policy is None:
            if lossless or cache is not None:
                name = "lossless" if lossless else "cache"
                raise UserError(f"{name} is of an exit policy, by which tokens exit early; name one (policy=...).")
            return super().generate(*given, streamer=streamer, **kwargs)
        unsupported = [type(each).__name__ for each in (*(logits_processor or ()), *(stopping_criteria or ()))]
        stops = kwargs.get("stop_strings") or getattr(generation_config, "stop_strings", None)
        _reject_options([*unsupported, "stop_strings"] if stops else unsupported)
        decoding = partial(adaptive_decoding, policy=policy, cache=cache, lossless=lossless, streamer=streamer)
        return super().generate(*given, custom_generate=decoding, streamer=streamer, **kwargs)

    @property
    def exit_policy(self) -> ExitPolicy | None:
        """The default policy of `generate`, which is saved with the model.

        Set it to a policy, to its file, or to None.
        """
        return self._policy_of(getattr(self.generation_config, "policy", None))

    @exit_policy.setter
    def exit_policy(self, policy: ExitPolicy | str | Path | None) -> None:
        self._policy = self._policy_of(policy)
        if self._policy is None:
            self.generation_config.__dict__.pop("policy", None)
            return
        self._policy.check(self.looped.weights_sha256, self.num_loops, self._decisions)
        self.generation_config.policy = POLICY

    @property
    def _decisions(self) -> Scope:
        """The kind of decisions that a policy makes here."""
        return Scope(unit="tokens", precision=self.looped.precision)

    def _policy_of(self, named: Any) -> ExitPolicy | None:
        """Load a policy: given as such, by its file, or by the name of a saved policy."""
        if str(named) == POLICY and self._policy is not None:
            named = self._policy
        return named if named is None or isinstance(named, ExitPolicy) else ExitPolicy.load(named)

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Reject `generate_batch`, which begins with this method."""
        raise UserError(
            "The continuous batching of transformers (generate_batch) keeps one set of keys and values per layer, and "
            "a looped model has one per loop. ls.generate(model.looped, prompts, batch_size=8) gives the place of a "
            "finished text to the next prompt; LoopScope's vLLM plugin serves many users."
        )

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        *args: Any,
        attention_mask: Tensor | None = None,
        is_first_iteration: bool = False,
        tokenizer: Any = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Prepare inputs as transformers does; the tokenizer was for the stopping criteria, which have it already."""
        if is_first_iteration and attention_mask is not None and bool((attention_mask[:, -1] == 0).any()):
            raise UserError(
                "transformers goes on after the last column of a batch, and there is padding; pad prompts on the "
                'left (tokenizer.padding_side = "left"), or give an exit policy, which takes both.'
            )
        return super().prepare_inputs_for_generation(
            input_ids, *args, attention_mask=attention_mask, is_first_iteration=is_first_iteration, **kwargs
        )

    def _validate_generated_length(self, generation_config: Any, input_ids_length: int, has_default: bool) -> None:
        """Check the length before generation, not when the model's longest row is reached."""
        if generation_config.max_length > self.looped.block_size:
            raise UserError(
                f"A prompt of {input_ids_length} tokens and {generation_config.max_length - input_ids_length} after it "
                f"are more than the {self.looped.block_size} that the model has positions for; ask for fewer."
            )
        super()._validate_generated_length(generation_config, input_ids_length, has_default)


def adaptive_decoding(
    model: Any,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    policy: ExitPolicy,
    cache: CacheMode | None,
    lossless: bool = False,
    streamer: Any = None,
    **inputs: Any,
) -> Tensor | AdaptiveGenerateOutput:
    """Generate texts under a policy by the engine; rejects options of `generate` that the engine lacks.

    transformers passes the mask among the `inputs`, and would pass it twice to a function that names it.
    """
    attention_mask = inputs.get("attention_mask")
    _reject_options(
        [
            *(["beams"] if (generation_config.num_beams or 1) > 1 else []),
            *(["a streamer of several rows"] if streamer is not None and len(input_ids) > 1 else []),
            *(type(each).__name__ for each in (*logits_processor, *stopping_criteria) if type(each) not in _DONE),
            *(name for name in _OUTPUTS if getattr(generation_config, name)),
            *(name for name, value in inputs.items() if name not in _INPUTS and value is not None),
        ]
    )
    batch = PaddedBatch.of(input_ids, attention_mask, inputs.get("position_ids"))
    batch.require_one_text_a_row()
    batch.layout()
    masks = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    rows = [tokens[mask.bool()].cpu().numpy() for tokens, mask in zip(input_ids, masks, strict=True)]
    pad, ends = _special_tokens(generation_config)
    found: list[list[tuple[int, int]]] = [[] for _ in rows]
    for token in stream(
        model.looped,
        [Prompt(number, tokens) for number, tokens in enumerate(rows)],
        policy,
        max_new_tokens=generation_config.max_length - input_ids.shape[1],
        stop=ends,
        cache=cache,
        sampling=_sampling(generation_config),
        lossless=lossless,
        batch_size=len(rows),
    ):
        found[token.key].append((token.token, token.loops))
        if streamer is not None:
            streamer.put(torch.tensor([token.token]))
    if streamer is not None:
        streamer.end()
    texts = [torch.tensor(text, device=input_ids.device).view(-1, 2) for text in found]
    tokens = pad_sequence([text[:, 0] for text in texts], batch_first=True, padding_value=pad)
    loops = pad_sequence([text[:, 1] for text in texts], batch_first=True)
    sequences = torch.cat((input_ids, tokens), 1)
    return AdaptiveGenerateOutput(sequences, loops) if generation_config.return_dict_in_generate else sequences


def _special_tokens(config: GenerationConfig) -> tuple[int, list[int]]:
    """The pad token, the default end token, and all end tokens of a text."""
    pad, ends = (
        [] if ids is None else ids.flatten().tolist() for ids in (config._pad_token_tensor, config._eos_token_tensor)
    )
    if config.eos_token_id is not None and not ends:
        raise UserError(
            f"eos_token_id must be the number of a token or a list of some, got {config.eos_token_id!r}; correct "
            "generation_config.json."
        )
    return (*pad, 0)[0], ends


class _GenerationSettings:
    """Look up LoopScope's settings in several generation configurations; the first one with a value counts."""

    def __init__(self, *configs: GenerationConfig | None) -> None:
        self._configs = configs

    def __getitem__(self, name: str) -> Any:
        return next((getattr(config, name) for config in self._configs if hasattr(config, name)), None)


def reject_authors_arguments(given: Mapping[str, Any]) -> None:
    """Reject arguments of a checkpoint's published code, which would have no effect here."""
    for name, value in given.items():
        if value is not None and value is not False and name in _AUTHORS_ARGUMENTS:
            raise UserError(f"{name} belongs to the code of the model's authors: {_AUTHORS_ARGUMENTS[name]}.")


def _sampling(config: GenerationConfig) -> Sampling:
    """The sampling of a generation configuration; PyTorch's random numbers give the seed (`torch.manual_seed`)."""
    if not config.do_sample:
        return Sampling()
    temperature = 1.0 if config.temperature is None else config.temperature
    top_p = 1.0 if config.top_p is None else config.top_p
    seed = int(torch.randint(2**62, ()))
    return Sampling(temperature=temperature, top_k=config.top_k or 0, top_p=top_p, seed=seed)


def _reject_options(unsupported: list[str]) -> None:
    """Reject options of `generate` that the engine lacks."""
    if unsupported:
        raise UserError(
            f"Under an exit policy texts are greedy or sampled (temperature, top_k, top_p), and {unsupported[0]} is "
            "not done; leave it out, or generate without a policy (policy=None)."
        )
