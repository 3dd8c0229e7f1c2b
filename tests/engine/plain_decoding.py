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
from loopscope.models import LoopedModel, LoopState, ouro, transformer
from loopscope.models.memory import GoingOn, Memory
from loopscope.models.packing import Layout


class PlainDecoder:
    """What the caches are meant to be; the model is the real one but for its attention."""

    def __init__(self, model: LoopedModel, policy: ls.ExitPolicy, cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model, self.policy, self.cache = model, policy, cache
        self.kept: dict[tuple[str, int], dict[int, tuple[Tensor, Tensor]]] = defaultdict(dict)
        self.position = self.level = 0
        for module in (ouro, transformer):
            monkeypatch.setattr(module, "attend", self.attend)

    def attend(self, projected: Tensor, heads: tuple[int, int, int], _: Any, rotary: Any, slot: str) -> Tensor:
        query, key, value = torch.split(projected[0], list(heads))  # [H, K]
        if rotary is not None:
            place = torch.tensor([[self.position]])
            query, key = (rotary.turn(part[None, :, None], place)[0, :, 0] for part in (query, key))
        there = self.kept[slot, self.place(slot, self.level)]
        there[self.position] = (key, value)
        keys, values = (torch.stack([there[p][part] for p in range(self.position + 1)]) for part in (0, 1))
        keys, values = (part.repeat_interleave(heads[0] // heads[1], 1) for part in (keys, values))
        scores = torch.einsum("hk,nhk->hn", query, keys) / math.sqrt(query.shape[1])
        return torch.einsum("hn,nhk->hk", scores.softmax(-1), values).flatten()[None]

    def place(self, slot: str, level: int) -> int:
        if slot == "coda":
            return level if self.cache == "all" else 0
        return min(level, 1) if self.cache == "last" else level

    def run(self, tokens: list[int], start: int, depth: int, read: Any) -> list[tuple[Tensor, Tensor | None]]:
        """Takes tokens from position `start` on through `depth` loops: the last one's state and, at the loops in
        `read`, its logits."""
        states = [self.first(token, start + place) for place, token in enumerate(tokens)]
        out = []
        for level in range(1, depth + 1):
            logits = None
            for place, state in enumerate(states):
                states[place] = self.model.step(self.at(state, start + place, level))
            if level in read:
                for place, state in enumerate(states):
                    logits = self.model.predict(self.model.readable(self.at(state, start + place, level)))[0]
            out.append((self.model.pooled(states[-1])[0], logits))
        return out

    def first(self, token: int, position: int) -> LoopState:
        self.position, self.level = position, 0
        return self.model.first(torch.tensor([token]), self.layout(position, 0))

    def at(self, state: LoopState, position: int, level: int) -> LoopState:
        self.position, self.level = position, level
        return state.after(self.layout(position, level).past)

    def layout(self, position: int, level: int) -> Layout:
        past = GoingOn(Memory(1, 1), np.zeros(1, int), np.array([position]), np.array([level]))
        return Layout(torch.tensor([1]), past=past)

    @torch.inference_mode()
    def generate(self, prompt: list[int], count: int) -> tuple[list[int], list[int], Tensor]:
        """The tokens that are said, the loops that they took, and the logits there [n, V]."""
        said: list[int] = []
        loops: list[int] = []
        read: list[Tensor] = []
        new, start, depth = list(prompt), 0, self.model.num_loops
        while True:
            before = copy.deepcopy({at: dict(there) for at, there in self.kept.items()})
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
            if self.cache != "all":
                self.kept = defaultdict(dict, before)
                self.run(new, start, depth if start == 0 else loop, (loop,))
            if self.cache == "fill" and start:
                for slot in {slot for slot, _ in self.kept if slot != "coda"}:
                    for deeper in range(loop + 1, depth + 1):
                        self.kept[slot, deeper][start] = self.kept[slot, loop][start]
            start += len(new)
            new = said[-1:]
