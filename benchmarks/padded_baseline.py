"""The plain way to train, as a measure: rows padded to the block size, PyTorch's fused attention, all else the same.

Shapes: B rows, M the block size, T loops.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from loopscope.models.transformer import LoopedTransformer, TransformerLayer
from loopscope.tasks import Examples
from loopscope.training.objectives import LoopLosses


def plain_losses(model: LoopedTransformer, batch: Examples) -> LoopLosses:
    """Those of the answers, as at the first step."""
    rows, width = len(batch), model.block_size
    tokens = F.pad(torch.from_numpy(batch.tokens), (0, width - batch.tokens.shape[1]))
    ends, labels = torch.from_numpy(batch.lengths) - 1, torch.from_numpy(batch.labels)
    hidden = model.embedding(tokens)
    if model.position is not None:
        hidden = hidden + model.position(torch.arange(width))
    pooled = []
    for _ in range(model.num_loops):
        for layer in model.block:
            assert isinstance(layer, TransformerLayer)
            hidden = _layer(layer, hidden)
        pooled.append(model.norm(hidden[torch.arange(rows), ends]))
    read = torch.stack(pooled)
    targets = labels.expand(model.num_loops, -1)
    losses = F.cross_entropy(model.predict(read).flatten(0, 1), targets.flatten(), reduction="none")
    return LoopLosses(losses.view_as(targets), model.halt(read), 0, model.halt(read.detach()))


def _layer(layer: TransformerLayer, hidden: Tensor) -> Tensor:
    rows, width, _ = hidden.shape
    projected = layer.attention_in(layer.attention_norm(hidden)).view(rows, width, 3, layer.heads, layer.head_width)
    query, key, value = projected.permute(2, 0, 3, 1, 4)
    if layer.rotary is not None:
        query, key = layer.rotary.rotate(query), layer.rotary.rotate(key)
    attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    hidden = hidden + layer.attention_out(attended.transpose(1, 2).reshape(rows, width, -1))
    out: Tensor = hidden + layer.mlp_out(F.gelu(layer.mlp_in(layer.mlp_norm(hidden))))
    return out
