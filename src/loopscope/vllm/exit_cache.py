"""What do tokens that exited leave in the deeper loops of vLLM's KV cache? The keys and values of their exit loop.

vLLM fixes before a step which tokens attend, and where their keys and values go. So in a deeper loop the tokens that
run take those that exited along: with the keys and values that these had at their exit, which are written once more.
Nothing else is computed for them.

Shapes: P tokens of a step, n that run, d that continue a text, H heads times their width.
"""

from collections.abc import Iterator

from torch import Tensor


class ExitCache:
    """One step's tokens; at first all of them run. Those of prompts never exit."""

    def __init__(self, count: int, decoding: Tensor) -> None:
        self._count, self._decoding = count, decoding  # [d] the tokens that continue a text
        self._running: Tensor | None = None  # [n] the tokens that run; None: all
        self._exited: Tensor | None = None  # [e] of the decoding ones, by their places among them
        self._kept: dict[str, tuple[Tensor, Tensor]] = {}  # [d, H] keys and values of the last loop, by layer

    def leave(self, running: Tensor, exited: Tensor) -> None:
        """From now on only these tokens run; of those that continue a text, the ones at these places have exited."""
        self._running, self._exited = running, exited

    def taken(self, values: Tensor) -> Tensor:
        """[n, ...] of values [P, ...], those of the tokens that run."""
        return values if self._running is None else values.index_select(0, self._running)

    def put(self, values: Tensor, new: Tensor) -> Tensor:
        """Values [P, ...] with new ones [n, ...] for the tokens that run."""
        return new if self._running is None else values.index_copy(0, self._running, new)

    def completed(self, layer: str, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[P, H] each, of those of the tokens that run; queries of others are zero."""
        if self._running is not None and self._exited is not None:
            query, key, value = (
                self.put(part.new_zeros(self._count, part.shape[1]), part) for part in (query, key, value)
            )
            places = self._decoding.index_select(0, self._exited)
            for part, kept in zip((key, value), self._kept[layer], strict=True):
                part.index_copy_(0, places, kept.index_select(0, self._exited))
        self._kept[layer] = (key.index_select(0, self._decoding), value.index_select(0, self._decoding))
        return query, key, value

    def last(self, layer: str) -> Iterator[Tensor]:
        """[P, H] keys, then values, that the tokens that continue a text left last in a layer; zero for others."""
        for kept in self._kept[layer]:
            yield kept.new_zeros(self._count, kept.shape[1]).index_copy_(0, self._decoding, kept)
