"""How does transformers' `generate` run under an exit policy? It prepares, and LoopScope's engine writes.

transformers reads the settings, pads and counts; the decoding loop itself is `loopscope.engine.stream`: every token as
deep as its policy says, no row waiting for another. So the tokens are those of `loopscope.generate`.

Shapes: B rows, M columns of the prompts, N new tokens of the longest text.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import (
    EosTokenCriteria,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.modeling_outputs import ModelOutput

from loopscope.engine import Prompt, Sampling, stream
from loopscope.engine.decoder import CacheMode
from loopscope.errors import UserError
from loopscope.exits import ExitPolicy
from loopscope.transformers.padded_batch import PaddedBatch

_KNOWN = (*(TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper), *(MaxLengthCriteria, EosTokenCriteria))
"""What the engine does itself."""
_INPUTS = ("attention_mask", "position_ids", "use_cache", "logits_to_keep")
"""What transformers itself gives to whoever decodes."""
_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


@dataclass
class AdaptiveGenerateOutput(ModelOutput):  # type: ignore[misc]
    sequences: Tensor | None = None  # [B, M + N]
    loops: Tensor | None = None  # [B, N] that every new token took; 0 after a text's end


def adaptive_decoding(
    model: Any,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    policy: ExitPolicy,
    cache: CacheMode,
    lossless: bool = False,
    streamer: Any = None,
    **inputs: Any,
) -> Tensor | AdaptiveGenerateOutput:
    """The texts, under a policy; what `generate` was asked for and the engine does not do is refused.

    transformers gives the mask among the `inputs`, which it would give twice to a function that names it.
    """
    attention_mask = inputs.get("attention_mask")
    _check(generation_config, logits_processor, stopping_criteria, streamer, len(input_ids), inputs)
    PaddedBatch.of(input_ids, attention_mask, None).layout(input_ids.device, None, inputs.get("position_ids"))
    masks = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    rows = [tokens[mask.bool()].cpu().numpy() for tokens, mask in zip(input_ids, masks, strict=True)]
    pad, ends = generation_config._pad_token_tensor, generation_config._eos_token_tensor
    found: list[list[tuple[int, int]]] = [[] for _ in rows]
    for token in stream(
        model.looped,
        [Prompt(number, tokens) for number, tokens in enumerate(rows)],
        policy,
        max_new_tokens=generation_config.max_length - input_ids.shape[1],
        stop=() if ends is None else ends.flatten().tolist(),
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
    texts = np.zeros((len(rows), max(map(len, found)), 2), dtype=np.int64)
    texts[:, :, 0] = 0 if pad is None else int(pad)
    for row, text in enumerate(found):
        texts[row, : len(text)] = text
    tokens, loops = torch.from_numpy(texts).to(input_ids.device).unbind(2)
    sequences = torch.cat((input_ids, tokens), 1)
    return AdaptiveGenerateOutput(sequences, loops) if generation_config.return_dict_in_generate else sequences


def _sampling(config: GenerationConfig) -> Sampling:
    """The seed is drawn from PyTorch's own random numbers, which `torch.manual_seed` fixes."""
    if not config.do_sample:
        return Sampling()
    temperature = 1.0 if config.temperature is None else config.temperature
    top_p = 1.0 if config.top_p is None else config.top_p
    seed = int(torch.randint(2**62, ()))
    return Sampling(temperature=temperature, top_k=config.top_k or 0, top_p=top_p, seed=seed)


def _check(
    config: GenerationConfig,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    streamer: Any,
    rows: int,
    inputs: Mapping[str, Any],
) -> None:
    unknown = [type(each).__name__ for each in (*processors, *criteria) if type(each) not in _KNOWN]
    unknown += [name for name in _OUTPUTS if getattr(config, name)]
    unknown += [name for name, value in inputs.items() if name not in _INPUTS and value is not None]
    if (config.num_beams or 1) > 1:
        unknown.insert(0, "beams")
    if streamer is not None and rows > 1:
        unknown.insert(0, "a streamer of several rows")
    if unknown:
        raise not_done(unknown[0])


def not_done(what: str) -> UserError:
    return UserError(
        f"Under an exit policy texts are greedy or sampled (temperature, top_k, top_p), and {what} is not done; leave "
        "it out, or generate without a policy."
    )
