"""How does a looped model of one's own write text? The full tier: a small causal Transformer with a KV cache.

`CausalModel` is a whole model of the full contract: recorded and run like any other, it answers questions with choices
and writes text at adaptive depth. `main` checks it, writes with it and scores choices; its weights are random.

Shapes: S states of all rows, D width, H heads, V vocabulary.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import loopscope as ls
from loopscope.models.attention import Rotary, cached_attention
from loopscope.models.looped_model import LoopedModel, LoopState, initial_loop_state
from loopscope.models.packing import Layout


class CausalModel(LoopedModel):
    kv_cache = branches = True  # held against the plain pass by ls.check_model

    def __init__(
        self, vocab_size: int = 60, block_size: int = 256, loops: int = 4, width: int = 32, heads: int = 4
    ) -> None:
        super().__init__()
        self.num_loops, self.block_size, self.vocab_size = loops, block_size, vocab_size
        self.heads, self.rotary = heads, Rotary(width // heads, theta=10_000.0)
        self.embedding, self.norm = nn.Embedding(vocab_size, width), nn.RMSNorm(width)
        self.attention_in, self.attention_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp_in, self.mlp_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head = nn.Linear(width, vocab_size)

    def embed(self, tokens: Tensor, layout: Layout) -> LoopState:
        return initial_loop_state(self.embedding(tokens), layout)

    def step(self, state: LoopState) -> LoopState:
        """Tokens of all rows [S, D] lie one after the other; only attention needs to know whose they are."""
        hidden = state.hidden
        projected = self.attention_in(self.norm(hidden)).view(
            len(hidden), 3 * self.heads, -1
        )  # query, key, value heads
        attended = cached_attention(projected, (self.heads,) * 3, state.layout, self.rotary, layer="block")
        hidden = hidden + self.attention_out(attended)
        hidden = hidden + self.mlp_out(F.gelu(self.mlp_in(self.norm(hidden))))
        return LoopState(hidden, state.layout, state.loop + 1)

    def predict(self, head_input: Tensor) -> Tensor:
        return self.head(self.norm(head_input))


def main() -> tuple[list[int], list[float]]:
    torch.manual_seed(0)
    model = CausalModel().eval()
    for check in ls.check_model(model):
        print(f"{check.measured:.0e}  {check.what}")

    prompt = np.array([4, 8, 15, 16, 23, 42])
    (text,) = ls.generate(model, [ls.Prompt("mine", prompt)], ls.ExitPolicy("margin", 0.3), max_new_tokens=12)
    print("tokens:", text.tokens, "loops:", text.loops)
    question = ls.choices("which", prompt, [np.array([3, 1]), np.array([7])])
    (answer,) = ls.run(model, [question], ls.ExitPolicy("margin", 0.3))
    print("log-probabilities of the choices:", answer.logits, "after loop", answer.loop)
    return text.tokens, answer.logits.tolist()


if __name__ == "__main__":
    main()
