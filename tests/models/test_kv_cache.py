"""The KV cache: does every loop find its keys and values, wherever rows, loops and tokens were added?"""

import numpy as np
import torch

from loopscope.models.kv_cache import AppendingRows, KeysValues, KVCache


def put(kv_cache: KVCache, layer: str, loop: int, cells: list[int], keys: torch.Tensor) -> None:
    """Keys, and values that are their opposites, at these cells of a loop."""
    kv_cache.write(layer, kv_cache.at(loop), torch.tensor(cells), keys.view(-1, 1, 1), -keys.view(-1, 1, 1))


def read(kv_cache: KVCache, layer: str, loop: int, rows: slice | torch.Tensor, upto: int) -> KeysValues:
    return kv_cache.read(layer, kv_cache.at(loop), rows, upto)


def test_a_cache_has_room_for_the_loops_that_were_asked_for() -> None:
    kv_cache, taken = KVCache(1, 2, most_loops=5), []
    for loop in (3, 1, 5, 2, 4):
        put(kv_cache, "a", loop, [0], torch.tensor([float(loop)]))
        taken.append(kv_cache.nbytes // 16)
    assert taken == [1, 2, 4, 4, 5]
    put(kv_cache, "a", 0, [0], torch.tensor([9.0]))  # what comes before the loops lies elsewhere
    for loop, more in ((4, 1), (5, 2), (1, 1)):  # a layer that begins with the last of them has none before it
        before = kv_cache.nbytes
        put(kv_cache, "late", loop, [1], torch.tensor([10.0 * loop]))
        assert kv_cache.nbytes == before + 16 * more
    kv_cache.take(torch.tensor([0, 0]))
    for row in (0, 1):
        found = [read(kv_cache, "a", loop, torch.tensor([row]), 1).keys.item() for loop in range(6)]
        assert found == [9, 1, 2, 3, 4, 5]
        found = [read(kv_cache, "late", loop, torch.tensor([row]), 2).keys[0, 0, 1].item() for loop in (1, 4, 5)]
        assert found == [10, 40, 50]


def test_rows_at_several_loops_lie_where_each_loop_finds_them() -> None:
    """Also where a layer has its first keys late, and an earlier loop comes after it; and after the cache has grown."""
    kv_cache, rows = KVCache(2, 3, most_loops=3), np.array([0, 1])
    put(kv_cache, "a", 1, [0, 3], torch.tensor([1.0, 2.0]))
    kv_cache.number(2)
    put(kv_cache, "late", 3, [0], torch.tensor([5.0]))
    assert kv_cache.nbytes == 4 * 2 * 6 * (1 + 1)  # of one loop in either layer
    mixed = AppendingRows(kv_cache, rows, rows, np.array([3, 1]))
    assert mixed.at.number is None
    for layer in ("a", "late"):
        cells = torch.from_numpy(mixed.places * kv_cache.capacity + 1)
        kv_cache.write(layer, mixed.at, cells, torch.tensor([7.0, 8.0]).view(-1, 1, 1), torch.zeros(2, 1, 1))
        copied = kv_cache.read(layer, mixed.at, torch.from_numpy(mixed.places), 2).keys
        in_place = [kv_cache.read(layer, mixed.at, slice(int(each), int(each) + 1), 2).keys for each in mixed.places]
        assert [keys.flatten()[1] for keys in copied] == [keys.flatten()[1] for keys in in_place] == [7, 8]
    kv_cache.grow(70)
    assert read(kv_cache, "a", 1, slice(0, 2), 2).keys.flatten().tolist() == [1, 0, 2, 8]
    assert read(kv_cache, "a", 3, slice(0, 2), 2).keys.flatten().tolist() == [0, 7, 0, 0]
    assert read(kv_cache, "late", 1, slice(1, 2), 2).keys.flatten().tolist() == [0, 8]
    assert read(kv_cache, "late", 3, slice(0, 1), 2).keys.flatten().tolist() == [5, 7]
    put(kv_cache, "late", 3, [0], torch.tensor([9.0]))
    assert read(kv_cache, "late", 3, slice(0, 1), 2).keys.flatten().tolist() == [9, 7]
