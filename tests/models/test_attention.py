"""Branches, prefixes and the KV cache: are the states those of plain rows, whatever else is in the batch?"""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tiny_language import MODELS, VOCABULARY
from torch import Tensor

from loopscope.models.kv_cache import AppendingRows, KeysValues, KVCache, SharedPrefix
from loopscope.models.looped_model import LoopedModel, LoopState
from loopscope.models.packing import Layout

CPU = torch.device("cpu")
Tokens = NDArray[np.int64]
Asked = tuple[Tokens, list[Tokens]]  # a context and its choices
Said = tuple[Tensor, Tensor]  # pooled states [T, P, D] and logits [T, P, V]


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> LoopedModel:
    return MODELS[request.param]()


def some(*lengths: int, seed: int = 0) -> list[Tokens]:
    rng = np.random.default_rng([seed, *lengths])
    return [rng.integers(0, VOCABULARY, length) for length in lengths]


def questions() -> list[Asked]:
    """Short and long ones (there are two kernels), of three, three, four and two choices."""
    shapes = ((40, (3, 5, 2)), (90, (1, 7, 4)), (38, (2, 2, 2, 6)), (1, (1, 1)))
    return [(some(context)[0], some(*lengths, seed=context)) for context, lengths in shapes]


def laid_out(asked: Sequence[Asked], cache: SharedPrefix | None = None) -> tuple[Tensor, Layout]:
    most = max(len(choices) for _, choices in asked)
    counts = [[len(choice) for choice in choices] for _, choices in asked]
    lengths = [len(context) + sum(each) for (context, _), each in zip(asked, counts, strict=True)]
    branches = np.array([each + [0] * (most - len(each)) for each in counts])
    tokens = np.concatenate([np.concatenate((context, *choices)) for context, choices in asked])
    return torch.from_numpy(tokens), Layout(np.array(lengths), CPU, branches, cache)


def said(model: LoopedModel, row: Tokens, start: int = 0) -> Said:
    """What the model says of a plain row, from this token on."""
    out = model.loops(torch.from_numpy(row)[None])
    return out.hidden[:, 0, start:], out.logits[:, 0, start:]


def plainly(model: LoopedModel, asked: Sequence[Asked], before: Sequence[Tokens] | None = None) -> Said:
    """The same of every choice in a row of its own, in the order of the layout."""
    parts: list[Said] = []
    for prefix, (context, choices) in zip(before or [np.empty(0, np.int64)] * len(asked), asked, strict=True):
        start = len(prefix) + len(context)
        parts.append(said(model, np.concatenate((prefix, context)), len(prefix)))
        parts += [said(model, np.concatenate((prefix, context, choice)), start) for choice in choices]
    hidden, logits = (torch.cat(values, dim=1) for values in zip(*parts, strict=True))
    return hidden, logits


def check(model: LoopedModel, state: LoopState, expected: Said, loop: int) -> None:
    pooled, logits = model.pooled(state), model.predict(model.head_input(state))
    assert torch.allclose(pooled, expected[0][loop - 1], atol=2e-5)
    assert torch.allclose(logits, expected[1][loop - 1], atol=5e-5)


@torch.inference_mode()
def test_every_choice_is_a_row_of_its_own(model: LoopedModel) -> None:
    state, expected = model.begin_packed(*laid_out(questions())), plainly(model, questions())
    for loop in range(1, model.num_loops + 1):
        state = model.step(state)
        check(model, state, expected, loop)


@torch.inference_mode()
def test_branched_rows_are_taken_and_joined(model: LoopedModel) -> None:
    """Rows with more choices join, at another loop, and rows are left out."""
    asked = questions()
    early = model.step(model.begin_packed(*laid_out(asked[:2]))).take(torch.tensor([1]))
    late = model.begin_packed(*laid_out(asked[2:]))
    joined = model.step(type(early).join([early, late]))
    assert joined.loop.tolist() == [2, 1, 1]
    for row, loop in ((0, 2), (1, 1), (2, 1)):
        alone = joined.take(torch.tensor([row]))
        check(model, alone, plainly(model, [asked[row + 1]]), loop)
    last = model.step(joined.take(torch.tensor([2, 0])))
    check(model, last.take(torch.tensor([0])), plainly(model, asked[3:]), 2)
    check(model, last.take(torch.tensor([1])), plainly(model, asked[1:2]), 3)


@torch.inference_mode()
def test_a_row_without_branches_joins_rows_with_some() -> None:
    model = MODELS["ouro"]()
    (row,) = some(9)
    joined = LoopState.join([model.begin(torch.from_numpy(row)[None]), model.begin_packed(*laid_out(questions()))])
    state = model.step(joined)
    check(model, state.take(torch.tensor([0])), said(model, row), 1)
    check(model, state.take(torch.arange(1, 5)), plainly(model, questions()), 1)


def remembering(model: LoopedModel, text: Tokens) -> KVCache:
    """The keys and values of a text in every loop."""
    kv_cache, nothing = KVCache(1, len(text)), np.zeros(1, dtype=np.int64)
    caches = [AppendingRows(kv_cache, nothing, nothing, np.array([at_loop])) for at_loop in range(model.num_loops + 1)]
    state = model.begin_packed(torch.from_numpy(text), Layout(np.array([len(text)]), cache=caches[0]))
    for cache in caches[1:]:
        state = model.step(state.with_cache(cache))
        model.head_input(state)
    return kv_cache


@torch.inference_mode()
@pytest.mark.parametrize("branching", [True, False])
def test_after_a_text_that_was_read_before(model: LoopedModel, branching: bool) -> None:
    """Two texts and none in one batch; rows of one text are not beside each other, rows of one length are."""
    one, two, three, four = questions()
    asked = [one, three, two, four] if branching else [(context, []) for context, _ in (one, three, two, four)]
    texts = some(17, 70)
    memories = [*(remembering(model, text) for text in texts), None]
    whose = [0, 1, 2, 0]
    before = [*texts, np.empty(0, dtype=np.int64)]
    of_rows = np.empty(4, dtype=object)
    of_rows[:] = [memories[which] for which in whose]
    counts = np.array([len(before[which]) for which in whose])
    caches = [SharedPrefix(of_rows, counts, np.full(4, at_loop)) for at_loop in range(model.num_loops + 1)]
    if branching:
        tokens, layout = laid_out(asked, caches[0])
    else:
        tokens = torch.from_numpy(np.concatenate([context for context, _ in asked]))
        layout = Layout(np.array([len(context) for context, _ in asked]), cache=caches[0])
    state = model.begin_packed(tokens, layout)
    expected = plainly(model, asked, [before[which] for which in whose])
    for loop in range(1, model.num_loops + 1):
        state = model.step(state.with_cache(caches[loop]))
        check(model, state, expected, loop)
    taken = state.take(torch.tensor([3, 1]))
    rows = [asked[3], asked[1]]
    check(model, taken, plainly(model, rows, [before[0], before[1]]), model.num_loops)


@torch.inference_mode()
def test_rows_go_on_where_they_are(model: LoopedModel) -> None:
    """Two rows with different pasts go on by chunks, one a loop behind the other; the memory grows on the way."""
    first, second = some(12, 80)
    chunks = ([first[:9], *np.split(first[9:], 3)], [second[:70], second[70:71], second[71:78], second[78:]])
    expected = said(model, first), said(model, second)
    kv_cache = KVCache(3, 75)
    done = [0, 0]
    for ours, theirs in zip(*chunks, strict=True):
        kv_cache.grow(done[1] + len(theirs))

        def cache(rows: list[int], loops: list[int]) -> AppendingRows:
            before = np.array([done[0] if row == 0 else done[1] for row in rows])  # noqa: B023 - used at once
            return AppendingRows(kv_cache, np.array(rows), before, np.array(loops))

        states: list[LoopState] = []
        for row, tokens in ((0, ours), (2, theirs)):
            layout = Layout(np.array([len(tokens)]), cache=cache([row], [0]))
            states.append(model.begin_packed(torch.from_numpy(tokens), layout))
        for loop in range(1, model.num_loops + 2):
            running = [row for row, ahead in ((0, 0), (2, 1)) if 1 <= loop - ahead <= model.num_loops]
            loops = [loop - (row == 2) for row in running]
            joined = type(states[0]).join([states[row // 2] for row in running]).with_cache(cache(running, loops))
            joined = model.step(joined)
            read = model.head_input(joined)
            for place, (row, at_loop) in enumerate(zip(running, loops, strict=True)):
                states[row // 2] = joined.take(torch.tensor([place]))
                start, count = int(joined.layout.starts[place]), int(joined.lengths[place])
                want = tuple(part[:, done[row // 2] : done[row // 2] + count] for part in expected[row // 2])
                assert torch.allclose(model.pooled(states[row // 2]), want[0][at_loop - 1], atol=2e-5)
                logits = model.predict(read[start : start + count])
                assert torch.allclose(logits, want[1][at_loop - 1], atol=5e-5)
        done = [done[0] + len(ours), done[1] + len(theirs)]
    assert kv_cache.capacity == 128  # it grew


def put(kv_cache: KVCache, layer: str, loop: int, cells: list[int], keys: torch.Tensor) -> None:
    """Keys, and values that are their opposites, at these cells of a loop."""
    kv_cache.write(layer, kv_cache.at(loop), torch.tensor(cells), keys.view(-1, 1, 1), -keys.view(-1, 1, 1))


def read(kv_cache: KVCache, layer: str, loop: int, rows: slice | torch.Tensor, upto: int) -> KeysValues:
    return kv_cache.read(layer, kv_cache.at(loop), rows, upto)


def test_what_a_cache_propagates() -> None:
    kv_cache = KVCache(2, 3, most_loops=4)
    for loop in (1, 2, 3):
        put(kv_cache, "a", loop, [0, 1, 2, 3, 4, 5], loop * torch.arange(6.0))
    put(kv_cache, "b", 2, [4], torch.ones(1))
    kv_cache.propagate(2, range(3, 5), torch.tensor([1, 4]))
    both = torch.tensor([0, 1])
    assert read(kv_cache, "a", 1, both, 3).keys.flatten().tolist() == [0, 1, 2, 3, 4, 5]
    assert read(kv_cache, "a", 3, both, 3).keys.flatten().tolist() == [0, 2, 6, 9, 8, 15]
    assert read(kv_cache, "a", 4, both, 3).values.flatten().tolist() == [0, -2, 0, 0, -8, 0]
    assert read(kv_cache, "b", 4, torch.tensor([1]), 2).keys.flatten().tolist() == [0, 1]
    in_place = read(kv_cache, "a", 2, slice(1, 2), 3).keys
    assert in_place.flatten().tolist() == [6, 8, 10]
    assert in_place.untyped_storage().nbytes() > in_place.nbytes  # no copy
    assert kv_cache.nbytes == 2 * 4 * 6 * (4 + 3)


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


def test_one_place_for_all_loops() -> None:
    kv_cache = KVCache(1, 2, latest_only=True)
    for loop in (0, 1, 2):
        put(kv_cache, "a", loop, [0], torch.tensor([float(loop)]))
    found = [read(kv_cache, "a", loop, torch.tensor([0]), 1).keys.item() for loop in (0, 1, 2, 7)]
    assert found == [0, 2, 2, 2]
    kv_cache.grow(3)
    kv_cache.grow(2, rows=2)
    assert (kv_cache.rows, kv_cache.capacity) == (2, 64)
    assert read(kv_cache, "a", 2, torch.tensor([1]), 1).keys.item() == 0
    assert read(kv_cache, "a", 2, torch.tensor([0]), 3).keys.flatten().tolist() == [2, 0, 0]


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
        for reading in (torch.from_numpy(mixed.places), None):
            if reading is None:  # one after the other, in place
                found = [
                    kv_cache.read(layer, mixed.at, slice(int(each), int(each) + 1), 2).keys for each in mixed.places
                ]
            else:
                found = list(kv_cache.read(layer, mixed.at, reading, 2).keys)
            assert [keys.flatten()[1] for keys in found] == [7, 8]
    kv_cache.grow(70)
    assert read(kv_cache, "a", 1, slice(0, 2), 2).keys.flatten().tolist() == [1, 0, 2, 8]
    assert read(kv_cache, "a", 3, slice(0, 2), 2).keys.flatten().tolist() == [0, 7, 0, 0]
    assert read(kv_cache, "late", 1, slice(1, 2), 2).keys.flatten().tolist() == [0, 8]
    assert read(kv_cache, "late", 3, slice(0, 1), 2).keys.flatten().tolist() == [5, 7]
    put(kv_cache, "late", 3, [0], torch.tensor([9.0]))
    assert read(kv_cache, "late", 3, slice(0, 1), 2).keys.flatten().tolist() == [9, 7]
