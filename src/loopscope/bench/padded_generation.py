"""The plain way to write text, as a measure: rows padded on the left, a cache that is concatenated, every loop of all.

As public implementations of looped models do it, with the weights of the model at hand: its own projections, norms and
rotary angles, PyTorch's own linear layers (rows of a padded batch are no packed tokens, of which our layers know a
faster product) and fused attention, one forward pass of the whole batch a token, the likeliest token of each row.

Shapes: B rows, M new tokens, N all of them so far, H heads, K head width, D width.
"""

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from loopscope.engine.generation import Prompt
from loopscope.errors import UserError
from loopscope.models.decoder_layers import Attention
from loopscope.models.looped_llama import LoopedLlama
from loopscope.models.looped_model import LoopedModel
from loopscope.models.ouro import Ouro


@torch.inference_mode()
def plain_text(model: LoopedModel, prompts: Sequence[Prompt], new_tokens: int, batch_size: int) -> list[list[int]]:
    """So many tokens after every prompt, which is as long as the others of its batch after padding."""
    if not isinstance(model, Ouro | LoopedLlama):
        raise UserError(
            f"The plain way to write text knows Ouro and looped Llamas, not {type(model).__name__}; leave out --plain."
        )
    device = model.model.embed_tokens.weight.device
    texts: list[list[int]] = []
    for start in range(0, len(prompts), batch_size):
        rows = [torch.from_numpy(prompt.tokens) for prompt in prompts[start : start + batch_size]]
        tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side="left").to(device)
        first = torch.tensor([tokens.shape[1] - len(row) for row in rows], device=device)
        run, written = _Forward(model, first), []
        for _ in range(new_tokens):
            tokens = run(tokens).argmax(-1, keepdim=True)
            written.append(tokens)
        texts += torch.cat(written, 1).tolist()
    return texts


class _Forward:
    """One forward pass after the other, with what the ones before left in the cache."""

    def __init__(self, model: Ouro | LoopedLlama, first: Tensor) -> None:
        self.model, self.first = model, first  # [B] where every row begins
        self.padded = bool(first.any())
        self.cache: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}
        self.seen = 0

    def __call__(self, tokens: Tensor) -> Tensor:
        """[B, V] after the last of tokens [B, M]."""
        model, new = self.model, tokens.shape[1]
        places = torch.arange(self.seen, self.seen + new, device=tokens.device)
        positions = (places - self.first[:, None]).clamp(min=0)
        self.angles = model.config.rotary.angles(positions, model.model.embed_tokens.weight.dtype, self.seen + new)
        self.mask = None  # [B, 1, M, N] what new tokens see; None: all before them
        if self.padded:
            every = torch.arange(self.seen + new, device=tokens.device)
            inside = (every >= self.first[:, None, None]) | (every == places[:, None])  # padding sees itself: no NaN
            self.mask = (inside & (every <= places[:, None]))[:, None]
        hidden = model.model.embed_tokens(tokens)
        hidden = self._ouro(hidden) if isinstance(model, Ouro) else self._looped_llama(model, hidden)
        self.seen += new
        return model.lm_head(hidden[:, -1:])[:, 0]

    def _ouro(self, hidden: Tensor) -> Tensor:
        for loop in range(1, self.model.num_loops + 1):
            hidden = self.model.model.norm(self._through(self.model.model.layers, hidden, loop))
        return hidden

    def _looped_llama(self, model: LoopedLlama, hidden: Tensor) -> Tensor:
        looping, layers = model.config.looping, model.model.layers
        inner = looping.prelude + looping.core
        embedded = hidden = self._through(islice(layers, looping.prelude), hidden, 0)
        for loop in range(1, model.num_loops + 1):
            before = hidden
            if model.model.injection is not None:
                hidden = hidden + model.model.injection(embedded)
            hidden = self._through(islice(layers, looping.prelude, inner), hidden, loop)
            if looping.damping != 1:
                hidden = before + looping.damping * (hidden - before)
        return model.model.norm(self._through(islice(layers, inner, None), hidden, 0))

    def _through(self, layers: Iterable[Any], hidden: Tensor, loop: int) -> Tensor:
        for layer in layers:
            attended = self._attention(layer.self_attn, layer.input_layernorm(hidden), loop)
            hidden = hidden + layer.input_layernorm_2(attended)
            hidden = hidden + layer.post_attention_layernorm_2(layer.mlp(layer.post_attention_layernorm(hidden)))
        return hidden

    def _attention(self, own: Attention, hidden: Tensor, loop: int) -> Tensor:
        rows, new, _ = hidden.shape
        query, key, value = (
            projection(hidden).view(rows, new, -1, own.head_width)
            for projection in (own.q_proj, own.k_proj, own.v_proj)
        )
        if own.query_key_norm:
            query, key = own.q_norm(query), own.k_norm(key)
        cos, sin = (each[:, None] for each in self.angles)
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        query, key = (own.rotary.apply_rotary(each, (cos, sin)) for each in (query, key))
        if (before := self.cache.get((own.layer_name, loop))) is not None:
            key, value = torch.cat((before[0], key), 2), torch.cat((before[1], value), 2)
        self.cache[own.layer_name, loop] = (key, value)
        grouped = key.shape[1] != query.shape[1]
        causal = self.mask is None and new > 1
        attended = F.scaled_dot_product_attention(
            query, key, value, attn_mask=self.mask, is_causal=causal, enable_gqa=grouped
        )
        return own.o_proj(attended.transpose(1, 2).reshape(rows, new, -1))
