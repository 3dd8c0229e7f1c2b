"""What does text cost at a real size, and what takes the time? With random weights, or any checkpoint.

    python recipes/real_size/generation.py build runs/ouro-254m --size 254      (or 5; --calm 0.05: loops that agree)
    python recipes/real_size/generation.py bench runs/ouro-254m --batch-size 8 --lossless --plain
    python recipes/real_size/generation.py bench runs/ouro-254m --lossless --standing 0.8
    python recipes/real_size/generation.py profile runs/ouro-254m --loops 2 --context 128 1024 4096
    python recipes/real_size/generation.py tokens runs/ouro-254m

`bench` is `loopscope bench generation` on random tokens, with the margin whose tokens take --loops on average, and
prints its JSON. With `--standing 0.8` drafts stand in 8 of 10: what early loops say is replaced by what is said in the
end, or by something else. `profile` says for every context which share of a token's
time matrix products, attention, copies and the rest take, and Python between them. `tokens` says what a loop and the
head take for 1 to 32 tokens together, with packed weights, with our layers of plain ones and with PyTorch's. All take
any checkpoint that LoopScope reads.
"""

import argparse
import copy
import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import loopscope as ls
from loopscope.bench.text_timing import bench_generation, ways_of
from loopscope.config import write_json
from loopscope.engine.decoder import CACHE_MODES, Decoder
from loopscope.engine.generation import Prompt, _ExitingTexts, generate, stream
from loopscope.engine.wavefront import Wavefront
from loopscope.models.checkpoint import read_config, save_model
from loopscope.models.linear import Linear
from loopscope.models.looped_model import LoopedModel
from loopscope.models.ouro import Ouro
from loopscope.progress import track

SIZES = {
    5: {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4},
    254: {"vocab_size": 49152, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12},
}
"""In millions of parameters: the small Ouro of recipes/small_ouro, and one of which a loop is bound by its weights."""
SHARED = {
    "architectures": ["OuroForCausalLM"],
    "model_type": "ouro",
    "max_position_embeddings": 8192,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "total_ut_steps": 4,
    "early_exit_threshold": 1.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "eos_token_id": 0,
}
CPU = ProfilerActivity.CPU
KINDS = {
    "matrix products": ("aten::addmm", "aten::mm", "aten::bmm", "aten::linear", "aten::matmul"),
    "attention": ("aten::scaled_dot", "aten::_scaled_dot", "aten::_softmax", "aten::baddbmm"),
    "copies": ("aten::copy_", "aten::index", "aten::cat", "aten::clone", "aten::gather", "aten::_to_copy"),
}


def build(out: Path, size: int, calm: float) -> dict[str, Any]:
    heads = SIZES[size]["hidden_size"] // 64
    heads = {"num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": 64}
    write_json(out / "config.json", {**SHARED, **SIZES[size], **heads})
    with torch.device("meta"):
        model = Ouro(read_config(out))
    draw = torch.Generator().manual_seed(0)
    tensors = {}
    for name, tensor in model.state_dict().items():
        if "norm" in name:  # the norms after attention and MLP: what a loop adds to its state
            tensors[name] = torch.full(tensor.shape, calm if "layernorm_2" in name else 1.0)
        else:
            tensors[name] = torch.empty(tensor.shape).normal_(std=0.02, generator=draw)
    save_model(tensors, out)
    return {"parameters": sum(tensor.numel() for tensor in tensors.values()), "calm": calm}


def texts(model: LoopedModel, count: int, length: int, new: int) -> list[Prompt]:
    draw = np.random.default_rng(0)
    return [
        Prompt(key, draw.integers(0, model.vocab_size, length), draw.integers(0, model.vocab_size, new))
        for key in range(count)
    ]


@torch.inference_mode()
def margin_for(model: LoopedModel, loops: float) -> ls.ExitPolicy:
    """The margin at which random tokens exit after so many loops on average."""
    rows = torch.from_numpy(np.random.default_rng(1).integers(0, model.vocab_size, (4, 48)))
    top = model.loops(rows).logits.float().topk(2, -1).values
    margins = (top[..., 0] - top[..., 1]).flatten(1)[:-1].numpy()  # the last loop ends whatever comes
    low, high = 0.0, float(margins.max())
    for _ in range(40):
        middle = (low + high) / 2
        stops = np.vstack((margins >= middle, np.ones(margins.shape[1], dtype=bool)))
        low, high = (middle, high) if stops.argmax(0).mean() + 1 < loops else (low, middle)
    return ls.ExitPolicy("margin", low)


@contextmanager
def standing(model: LoopedModel, prompts: list[Prompt], share: float) -> Iterator[None]:
    """Text whose drafts stand in this share: loops before the last, or before the exit, say what will be said there,
    or something else.

    They are run and read all the same.
    """
    free = [replace(prompt, forced=None) for prompt in prompts]
    written = generate(model, free, max_new_tokens=len(prompts[0].forced), batch_size=len(prompts))
    said = [np.concatenate((prompt.tokens, text.tokens)) for prompt, text in zip(free, written, strict=True)]
    forced = [np.concatenate((prompt.tokens, prompt.forced)) for prompt in prompts]
    stands = np.random.default_rng(2).random((len(said), len(said[0]))) < share
    numbers: dict[tuple[int, int], int] = {}  # of the prompt in each row of some texts
    unforced, proposed, begin = Wavefront._next_tokens, Decoder._proposed, _ExitingTexts.begin

    def early(texts: list[Any], number: int, position: int, otherwise: int) -> int:
        if position + 1 >= len(texts[number]):
            return otherwise
        return int(texts[number][position + 1] + (not stands[number, position])) % model.vocab_size

    def next_tokens(self: Wavefront, reads: Any, *given: Any) -> list[int]:
        tokens = unforced(self, reads, *given)
        for place, (row, position, loop) in enumerate(zip(*(each.tolist() for each in reads), strict=True)):
            if loop < model.num_loops:
                tokens[place] = early(said, self._flights[row].number, position, tokens[place])
        return tokens

    def begun(self: _ExitingTexts, row: int, *given: Any) -> None:
        numbers[id(self), row] = given[-1]
        begin(self, row, *given)

    def next_proposed(self: Decoder, slots: Any, likeliest: Any) -> Any:
        rows, positions, _ = (each.tolist() for each in self._places(slots))
        given = proposed(self, slots, likeliest).tolist()
        asked = zip(rows, positions, given, strict=True)
        return np.array([early(forced, numbers[id(self), row], *each) for row, *each in asked], dtype=np.int64)

    with (
        patch.object(Wavefront, "_next_tokens", next_tokens),
        patch.object(Decoder, "_proposed", next_proposed),
        patch.object(_ExitingTexts, "begin", begun),
    ):
        yield


def measure(model: LoopedModel, name: str, options: argparse.Namespace) -> Any:
    ways = ways_of([margin_for(model, options.loops)], options.caches, False)
    if options.lossless:
        ways += ways_of([ls.ExitPolicy("fixed", 1)], [], True)
    prompts = texts(model, options.prompts or options.batch_size, options.length, options.new)
    forced = nullcontext() if options.standing is None else standing(model, prompts, options.standing)
    with forced, track("measuring") as advance:
        return bench_generation(name, model, prompts, ways, options.batch_size, options.rounds, advance, options.plain)


def written(
    model: LoopedModel, prompts: list[Prompt], policy: ls.ExitPolicy, observed: AbstractContextManager[Any]
) -> tuple[int, float]:
    """Tokens that are written when every row has its first (a shallow one may have several by then), and seconds."""
    tokens, begun = stream(model, prompts, policy, batch_size=len(prompts)), set()
    while len(begun) < len(prompts):
        begun.add(next(tokens).key)
    with observed:
        began = time.perf_counter()
        return sum(1 for _ in tokens), time.perf_counter() - began


def profiled(model: LoopedModel, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Where the time of a token goes, by context; what it takes is measured by itself, since a profiler slows it."""
    policy = ls.ExitPolicy("fixed", model.num_loops) if options.loops is None else margin_for(model, options.loops)
    found = []
    for context in options.context:
        prompts, profiling = texts(model, options.batch_size, context, options.new), profile(activities=[CPU])
        _, seconds = written(model, prompts, policy, profiling)
        count, alone = written(model, prompts, policy, nullcontext())
        spent: Counter[str] = Counter()
        for event in profiling.key_averages():
            kind = next((kind for kind, names in KINDS.items() if event.key.startswith(names)), "other operations")
            spent[kind] += event.self_cpu_time_total / 1e6
        spent["Python"] = max(0.0, seconds - sum(spent.values()))
        shares = {kind: round(each / seconds, 3) for kind, each in spent.most_common()}
        found.append({"context": context, "milliseconds_a_token": 1e3 * alone / count, "shares": shares})
    return found


@torch.inference_mode()
def by_tokens(model: LoopedModel, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Milliseconds of a loop and of the head for so many tokens of a row, by linear layer; all in turns."""
    draw, counts = np.random.default_rng(0), (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
    plain = copy.deepcopy(model)  # a copy has plain matrices
    ours, packed = (plain, Linear.forward), (model, Linear.forward)
    ways = {"packed": packed, "ours": ours, "pytorch": (plain, nn.Linear.forward)}
    spent: dict[tuple[int, str, str], list[float]] = {}
    for turn in range(options.rounds + 1):
        for count in counts:
            begun = model.begin(torch.from_numpy(draw.integers(0, model.vocab_size, (1, count))))
            for way, (network, forward) in ways.items():
                with patch.object(Linear, "forward", forward):
                    start = time.perf_counter()
                    state = network.step(begun)
                    between = time.perf_counter()
                    network.predict(state.hidden)
                    taken = {"loop": between - start, "head": time.perf_counter() - between}
                for what, seconds in taken.items() if turn else ():  # the first turn warms up
                    spent.setdefault((count, way, what), []).append(1e3 * seconds)
    medians = {key: round(float(np.median(each)), 3) for key, each in spent.items()}
    return [
        {"tokens": count} | {f"{what}, {way}": medians[count, way, what] for what in ("loop", "head") for way in ways}
        for count in counts
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("build", "bench", "profile", "tokens"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", type=int, choices=tuple(SIZES), default=254, help="million parameters (build)")
    parser.add_argument("--calm", type=float, default=1.0, help="how much a loop changes its state (build)")
    parser.add_argument("--loops", type=float, help="average of the margin (bench: 2; profile: full depth)")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--prompts", type=int, help="default: the batch size (bench)")
    parser.add_argument("--length", type=int, default=32, help="of a prompt (bench)")
    parser.add_argument("--new", type=int, default=24, help="tokens after it")
    parser.add_argument("--context", type=int, nargs="+", default=[128, 512, 1024, 2048, 4096], help="(profile)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--caches", nargs="*", choices=CACHE_MODES, default=["full", "propagate"], help="(bench)")
    parser.add_argument("--lossless", action="store_true", help="and lossless text, drafted at loop 1 (bench)")
    parser.add_argument("--standing", type=float, help="share of drafts that stand (bench)")
    parser.add_argument("--plain", action="store_true", help="and the plain way at full depth (bench)")
    options = parser.parse_args()
    if options.what == "build":
        print(json.dumps(build(options.folder, options.size, options.calm), indent=2))
        return
    model = ls.load_model(options.folder)
    if options.what == "bench":
        options.loops = options.loops or 2.0
        print(json.dumps(msgspec.to_builtins(measure(model, str(options.folder), options)), indent=2))
    else:
        print(json.dumps((profiled if options.what == "profile" else by_tokens)(model, options), indent=2))


if __name__ == "__main__":
    main()
