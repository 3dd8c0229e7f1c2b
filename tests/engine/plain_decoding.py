"""Generation written out, for tests: one text, one token at a time, keys and values in dictionaries."""

import copy
import math
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import loopscope as ls
from loopscope.models import decoder_layers, transformer
from loopscope.models.kv_cache import AppendingRows, KVCache
from loopscope.models.looped_llama import LoopedLlama
from loopscope.models.looped_model import LoopedModel, LoopState
from loopscope.models.packing import Layout


class PlainDecoder:
    """What the caches are meant to be; the model is the real one but for its attention."""

    def __init__(self, model: LoopedModel, policy: ls.ExitPolicy, cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model, self.policy, self.cache = model, policy, cache
        self.kept: dict[tuple[str, int], dict[int, tuple[Tensor, Tensor]]] = defaultdict(dict)
        self.position = self.loop = 0
        self.coda = {"coda"}  # layers that the head has for itself
        if isinstance(model, LoopedLlama):
            last = model.config.num_hidden_layers
            self.coda = {str(layer) for layer in range(last - model.config.coda, last)}
        for module in (decoder_layers, transformer):
            monkeypatch.setattr(module, "cached_attention", self.cached_attention)

    def cached_attention(
        self, projected: Tensor, heads: tuple[int, int, int], _: Any, rotary: Any, layer: str
    ) -> Tensor:
        query, key, value = torch.split(projected[0], list(heads))  # [H, K]
        if rotary is not None:
            angles = rotary.angles(torch.tensor([self.position]), query.dtype, self.position + 1)
            query, key = (rotary.apply_rotary(part, angles) for part in (query, key))
        stored = self.kept[layer, self.place(layer, self.loop)]
        stored[self.position] = (key, value)
        keys, values = (torch.stack([stored[p][part] for p in range(self.position + 1)]) for part in (0, 1))
        keys, values = (part.repeat_interleave(heads[0] // heads[1], 1) for part in (keys, values))
        scores = torch.einsum("hk,nhk->hn", query, keys) / math.sqrt(query.shape[1])
        return torch.einsum("hn,nhk->hk", scores.softmax(-1), values).flatten()[None]

    def place(self, layer: str, loop: int) -> int:
        if layer in self.coda:
            return loop if self.cache == "full" else 0
        return min(loop, 1) if self.cache == "latest" else loop

    def run(self, tokens: list[int], start: int, depth: int, read: Any) -> list[tuple[Tensor, Tensor | None]]:
        """Takes tokens from position `start` on through `depth` loops: the last one's state and, at the loops in
        `read`, its logits."""
        states = [self.embedded(token, start + place) for place, token in enumerate(tokens)]
        out = []
        for loop in range(1, depth + 1):
            logits = None
            for place, state in enumerate(states):
                states[place] = self.model.step(self.at(state, start + place, loop))
            if loop in read:
                for place, state in enumerate(states):
                    logits = self.model.predict(self.model.head_input(self.at(state, start + place, loop)))[0]
            out.append((self.model.pooled(states[-1])[0], logits))
        return out

    def embedded(self, token: int, position: int) -> LoopState:
        self.position, self.loop = position, 0
        return self.model.embed(torch.tensor([token]), self.layout(position, 0))

    def at(self, state: LoopState, position: int, loop: int) -> LoopState:
        self.position, self.loop = position, loop
        return state.with_cache(self.layout(position, loop).cache)

    def layout(self, position: int, loop: int) -> Layout:
        cache = AppendingRows(KVCache(1, 1), np.zeros(1, int), np.array([position]), np.array([loop]))
        return Layout(np.array([1]), cache=cache)

    @torch.inference_mode()
    def generate(self, prompt: list[int], count: int) -> tuple[list[int], list[int], Tensor]:
        """The tokens that are said, the loops that they took, and the logits there [n, V]."""
        said: list[int] = []
        loops: list[int] = []
        read: list[Tensor] = []
        new, start, depth = list(prompt), 0, self.model.num_loops
        while True:
            before = copy.deepcopy({at: dict(stored) for at, stored in self.kept.items()})
            out = self.run(new, start, depth, range(1, depth + 1))
            hidden, logits = (torch.stack(part)[None] for part in zip(*out, strict=True))
            gates = self.model.halt(hidden)
            told = ls.Trajectory(
                logits=logits.numpy(), hidden=hidden.numpy(), gate_logits=None if gates is None else gates.numpy()
            )
            (loop,) = self.policy.exit_loops(told).tolist()
            said.append(int(told.predicted[0, loop - 1]))
            loops.append(loop)
            read.append(logits[0, loop - 1])
            if len(said) == count:
                return said, loops, torch.stack(read)
            if self.cache != "full":
                self.kept = defaultdict(dict, before)
                self.run(new, start, depth if start == 0 else loop, (loop,))
            if self.cache == "propagate" and start:
                for layer in {layer for layer, at in self.kept if at and layer not in self.coda}:
                    for deeper in range(loop + 1, depth + 1):
                        self.kept[layer, deeper][start] = self.kept[layer, loop][start]
            start += len(new)
            new = said[-1:]
