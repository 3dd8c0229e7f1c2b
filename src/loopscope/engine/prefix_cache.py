"""What do several requests begin with? A shared prefix runs once for all of them, and no further than the deepest."""

import numpy as np
import torch
from numpy.typing import NDArray

from loopscope.engine.requests import Requests
from loopscope.models import LoopedModel
from loopscope.models.device import upload
from loopscope.models.kv_cache import AppendingRows, KVCache, SharedPrefix
from loopscope.models.layout import Layout


class Prefix:
    """What several requests begin with: it keeps its keys and values of every loop that was asked for."""

    def __init__(self, model: LoopedModel, tokens: NDArray[np.int64], device: torch.device) -> None:
        self.kv_cache, self._loop, self._model = KVCache(1, len(tokens), most_loops=model.num_loops), 0, model
        layout = Layout.from_host(np.array([len(tokens)]), device, cache=self._appending(0))
        self._state = model.begin_packed(upload(tokens, device), layout)

    def run_to(self, loop: int) -> None:
        """Goes on to this loop, if it is not there yet."""
        while self._loop < loop:
            self._loop += 1
            self._state = self._model.step(self._state.with_cache(self._appending(self._loop)))
            if self._model.head_attends:
                self._model.head_input(self._state)

    def _appending(self, loop: int) -> AppendingRows:
        nothing = np.zeros(1, dtype=np.int64)
        return AppendingRows(self.kv_cache, nothing, nothing, np.array([loop]))


class PrefixCache:
    """The prefixes that are needed now."""

    def __init__(self, model: LoopedModel, device: torch.device) -> None:
        self._model, self._device = model, device
        self._prefixes: dict[bytes, Prefix] = {}

    def shared_prefix(self, requests: Requests, loops: NDArray[np.int64]) -> SharedPrefix | None:
        """What stands before these requests, which are about to go through these loops."""
        if not any(request.shared for request in requests):
            return None
        kv_caches: NDArray[np.object_] = np.full(len(requests), None, dtype=object)
        for place, (request, loop) in enumerate(zip(requests, loops.tolist(), strict=True)):
            if request.shared:
                if request.prefix not in self._prefixes:
                    tokens = request.rows[0][: request.shared]
                    self._prefixes[request.prefix] = Prefix(self._model, tokens, self._device)
                self._prefixes[request.prefix].run_to(loop)
                kv_caches[place] = self._prefixes[request.prefix].kv_cache
        return SharedPrefix(kv_caches, np.array([request.shared for request in requests]), loops)

    def evict_unused(self, requests: Requests) -> None:
        """Forgets those that none of these requests begins with."""
        needed = {request.prefix for request in requests}
        self._prefixes = {name: prefix for name, prefix in self._prefixes.items() if name in needed}
