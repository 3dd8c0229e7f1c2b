"""Pointer jumping: where does a chain of pointers end? Difficulty is the number of hops.

- p-hop induction: a text of letters, then as many marks as there are hops. From the last letter, a hop goes to the
  letter that followed the latest earlier occurrence of the same letter. Which letter is reached?
- reachability: for every node of a graph of several paths its next node, then a node. At which end does its path end?

Each hop needs the hop before it, so a model that makes one hop per loop needs as many loops as hops. Known
constructions need about log2 of the hops: with every loop they double the length of a jump.
"""

import math
from functools import lru_cache
from itertools import accumulate
from typing import Annotated, Any, ClassVar

import msgspec
import numpy as np

from loopscope.tasks.examples import Draws, Integers
from loopscope.tasks.task import Task

_MARK = ">"
_NAMES = "abcdefghijklmnopqrstuvwxyz"
_RAREST = 100
"""A level has at least one text in so many with all its hops: `draw_inputs` draws texts until it finds one."""


class HopInduction(Task, frozen=True, kw_only=True, tag="hop-induction"):
    """Hop through a text: each hop goes to the letter that followed the latest earlier occurrence of the same letter.

    No letter follows itself, so every hop goes back. Texts are drawn uniformly from all texts in which every hop
    exists.

    Parameters
    ----------
    alphabet
        The number of different letters.
    letters
        The number of letters in a text.
    max_hops
        The maximum number of hops; the number of hops is the difficulty.
    """

    alphabet: Annotated[int, msgspec.Meta(ge=3, le=26)] = 4
    letters: Annotated[int, msgspec.Meta(ge=3, le=1_000)] = 32
    max_hops: Annotated[int, msgspec.Meta(ge=1, le=1_000)] = 8
    separator: ClassVar[str] = ""

    def __post_init__(self) -> None:
        if self.max_hops > self.hardest:
            text = f"one text in {_RAREST} of {self.letters} letters of an alphabet of {self.alphabet}"
            raise ValueError(f"fewer than {text} has {self.max_hops} hops; choose {self.hardest} at most")

    @property
    def symbols(self) -> list[str]:
        return [*_NAMES[: self.alphabet], _MARK]

    @property
    def levels(self) -> range:
        return range(1, self.max_hops + 1)

    @property
    def hardest(self) -> int:
        return sum(_RAREST * texts >= self._texts_with[0] for texts in self._texts_with[1:])

    @property
    def _texts_with(self) -> tuple[int, ...]:
        """By the number of hops, how many texts have at least as many hops."""
        return _texts_with_hops(self.alphabet, self.letters)

    @property
    def input_form(self) -> str:
        return (
            f"{self.letters} of the letters {_NAMES[0]} to {_NAMES[self.alphabet - 1]}, no two neighbours the same, "
            f"and a mark {_MARK} for every hop, each of which has an earlier letter to go to"
        )

    def length(self, difficulty: Any) -> Any:
        return self.letters + difficulty + 2

    def space(self, difficulty: int) -> int:
        return self._texts_with[difficulty]

    def is_input(self, row: list[int]) -> bool:
        text, marks = np.array([row[: self.letters]]), row[self.letters :]
        if text.shape[1] < self.letters or not marks or {*marks} != {self.alphabet} or self.alphabet in text:
            return False
        return bool((text[:, 1:] != text[:, :-1]).all() and self._reached(text, np.array([len(marks)]))[0] >= 0)

    def draw_inputs(self, draws: Draws, difficulty: Integers) -> Integers:
        texts = self._draw_texts(draws, len(difficulty))
        pending = np.arange(len(difficulty))
        while len(pending := pending[self._reached(texts[pending], difficulty[pending]) < 0]):
            texts[pending] = self._draw_texts(draws, len(pending))
        marks = np.full((len(difficulty), int(difficulty.max(initial=0))), self.alphabet)
        return np.concatenate([texts, marks], axis=1)

    def answers(self, tokens: Integers, lengths: Integers) -> Integers:
        texts = tokens[:, 1 : self.letters + 1]
        reached = self._reached(texts, lengths - self.length(0))
        letters: Integers = texts[np.arange(len(texts)), reached]
        return letters

    def _draw_texts(self, draws: Draws, rows: int) -> Integers:
        bounds = np.full((rows, self.letters), self.alphabet - 1)
        bounds[:, 0] = self.alphabet
        steps = draws.integers(bounds)
        steps[:, 1:] += 1  # from a letter to a different letter
        return steps.cumsum(axis=1) % self.alphabet

    def _reached(self, texts: Integers, hops: Integers) -> Integers:
        """[N] the index of the letter at which the hops end; -1 if a hop has no earlier occurrence."""
        rows, places = np.arange(len(texts)), np.arange(self.letters)
        place = np.full(len(texts), self.letters - 1)
        for hop in range(int(hops.max(initial=0))):
            same = (texts == texts[rows, place][:, None]) & (places < place[:, None])
            latest = np.where(same, places, -1).max(axis=1)
            moved = np.where((latest >= 0) & (place >= 0), latest + 1, -1)
            place = np.where(hop < hops, moved, place)
        return place


@lru_cache
def _texts_with_hops(alphabet: int, letters: int) -> tuple[int, ...]:
    """By the number of hops, how many texts have at least as many hops.

    For a hop, each earlier letter is the sought letter with the same probability, 1 / (alphabet - 1).
    So the hops of a text are the successes of `letters` - 2 trials.
    """
    trials, others = letters - 2, alphabet - 2
    exactly = [math.comb(trials, hops) * others ** (trials - hops) for hops in range(trials + 1)]
    at_least = accumulate(reversed(exactly))
    return tuple(alphabet * (alphabet - 1) * texts for texts in at_least)[::-1]


class Reachability(Task, frozen=True, kw_only=True, tag="reachability"):
    """Find the end of a node's path in a graph that consists of several paths.

    An input lists the next node of every node, in the order of the nodes' names; the last node of a path leads to
    itself. Then the input names the node that begins the path. This path has `difficulty` edges, and the other paths
    share the remaining edges. There are always `nodes - paths` edges, so neither the length of the input nor the number
    of edges reveals the difficulty.

    Parameters
    ----------
    nodes
        The number of nodes in the graph.
    paths
        The number of paths in the graph.
    max_edges
        The maximum number of edges on the path; the number of edges is the difficulty.
    """

    nodes: Annotated[int, msgspec.Meta(ge=3, le=26)] = 10
    paths: Annotated[int, msgspec.Meta(ge=2, le=25)] = 3
    max_edges: Annotated[int, msgspec.Meta(ge=1, le=24)] = 6

    def __post_init__(self) -> None:
        if self.max_edges > self.hardest:
            edges = max(self.hardest, 0)
            raise ValueError(f"{self.nodes} nodes on {self.paths} paths leave {edges} edges for one at most")

    @property
    def symbols(self) -> list[str]:
        return [*_NAMES[: self.nodes]]

    @property
    def levels(self) -> range:
        return range(1, self.max_edges + 1)

    @property
    def hardest(self) -> int:
        return self.nodes - self.paths

    @property
    def input_form(self) -> str:
        return (
            f"the {self.nodes} nodes to which the edges of {_NAMES[0]} to {_NAMES[self.nodes - 1]} lead (an end leads "
            f"to itself) on {self.paths} paths, and the node at which one of them begins"
        )

    def length(self, difficulty: Any) -> Any:
        return 0 * difficulty + self.nodes + 3

    def difficulties(self, tokens: Integers, lengths: Integers) -> Integers:
        return self._walk(tokens[:, 1:-1])[1]

    def space(self, difficulty: int) -> int:
        others, rest = self.paths - 1, self.nodes - difficulty - 1  # the nodes that are on other paths
        cuts = math.comb(rest - 1, others - 1) if rest else 0
        return math.factorial(self.nodes) * cuts // math.factorial(others)

    def is_input(self, row: list[int]) -> bool:
        if len(row) != self.nodes + 1:
            return False
        *following, start = row
        heads = [head for node, head in enumerate(following) if head != node]
        reached = self._walk(np.array([[*following, node] for node in range(self.nodes)]))[0]
        all_end = all(following[end] == end for end in reached.tolist())  # no edge is on a circle
        distinct = len({*heads}) == len(heads) == self.nodes - self.paths  # a node with two edges in is on no path
        return all_end and distinct and start not in heads and following[start] != start

    def draw_inputs(self, draws: Draws, difficulty: Integers) -> Integers:
        order, places = draws.permutations(len(difficulty), self.nodes), np.arange(self.nodes - 1)
        lots = draws.integers(np.full((len(difficulty), self.nodes - 1), 2**31))
        lots[places <= difficulty[:, None]] = 2**31  # the first path is whole, and ends at its own place
        cut = np.argsort(np.argsort(lots, axis=1, kind="stable"), axis=1) < self.paths - 2
        cut |= places == difficulty[:, None]
        heads = np.where(cut, order[:, :-1], order[:, 1:])
        following = np.empty_like(order)
        np.put_along_axis(following, order, np.concatenate([heads, order[:, -1:]], axis=1), axis=1)
        return np.concatenate([following, order[:, :1]], axis=1)

    def answers(self, tokens: Integers, lengths: Integers) -> Integers:
        return self._walk(tokens[:, 1:-1])[0]

    def _walk(self, inputs: Integers) -> tuple[Integers, Integers]:
        """[N] the ends of the paths from the last node of each input, and [N] their numbers of edges."""
        rows, following, node = np.arange(len(inputs)), inputs[:, :-1], inputs[:, -1]
        edges = np.zeros(len(inputs), dtype=np.int64)
        for _ in range(self.nodes - 1):
            edges += following[rows, node] != node
            node = following[rows, node]  # an end leads to itself
        return node, edges
