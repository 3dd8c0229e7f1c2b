"""How does a model of one's own get trained? As a class that a settings file names: `model = "my_model:LoopedGRU"`.

    loopscope train demo --out runs/gru --set model=my_model:LoopedGRU --set model.loops=4

Shapes: B rows, M tokens, D width, V vocabulary.
"""

import torch.nn.functional as F
from torch import Tensor, nn

import loopscope as ls


class LoopedGRU(ls.SimpleLoopedModel):
    """In every loop each token attends to its whole row, and a GRU cell updates its state."""

    def __init__(self, vocab_size: int, block_size: int, loops: int, gate: str = "none", width: int = 64) -> None:
        super().__init__()
        self.num_loops, self.block_size, self.vocab_size = loops, block_size, vocab_size
        self.embedding, self.position = nn.Embedding(vocab_size, width), nn.Embedding(block_size, width)
        self.attention, self.cell = nn.Linear(width, 3 * width), nn.GRUCell(width, width)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab_size)
        self.gate = None if gate == "none" else nn.Linear(width, 1)

    def embed_rows(self, tokens: Tensor, mask: Tensor) -> Tensor:
        return self.embedding(tokens) + self.position.weight[: tokens.shape[1]]

    def block(self, hidden: Tensor, mask: Tensor) -> Tensor:
        query, key, value = self.attention(self.norm(hidden)).chunk(3, dim=-1)
        read = F.scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None])  # not what is padded
        return self.cell(read.flatten(0, 1), hidden.flatten(0, 1)).view_as(hidden)

    def predict(self, head_input: Tensor) -> Tensor:
        return self.head(head_input)

    def halt(self, pooled: Tensor) -> Tensor | None:
        return None if self.gate is None else self.gate(pooled).squeeze(-1)
