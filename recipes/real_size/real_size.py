"""Does a model of Ouro's real size load, run and exit early on this machine? With random weights: no download.

    python recipes/real_size/real_size.py build runs/ouro-1.4b-random            (sharded, in the layout of the Hub)
    python recipes/real_size/real_size.py time runs/ouro-1.4b-random             (in a process of its own)

`build` takes --layers 48 for the size of Ouro-2.6B, and --dtype; `time` prints JSON: the peak memory of loading and of
running against the weights and the cache, and the time at exit loops 1 to T, interleaved.
"""

import argparse
import json
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import loopscope as ls
from loopscope.bench.measure import interleaved, spread
from loopscope.config import write_json
from loopscope.engine.generation import GenerationStats, Prompt, stream
from loopscope.models.checkpoint import DTYPES, read_config, save_model
from loopscope.models.ouro import Ouro
from loopscope.progress import track

CONFIG = {
    "architectures": ["OuroForCausalLM"],
    "model_type": "ouro",
    "vocab_size": 49152,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "max_position_embeddings": 65536,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "total_ut_steps": 4,
    "early_exit_threshold": 1.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "eos_token_id": 0,
}


def build(out: Path, layers: int, dtype: str, shard: int) -> dict[str, Any]:
    write_json(out / "config.json", {**CONFIG, "num_hidden_layers": layers})
    with torch.device("meta"):
        model = Ouro(read_config(out))
    draw = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.ones(tensor.shape, dtype=DTYPES[dtype])
        if "norm" in name
        else torch.empty(tensor.shape, dtype=DTYPES[dtype]).normal_(std=0.02, generator=draw)
        for name, tensor in model.state_dict().items()
    }
    save_model(tensors, out, shard)
    return {
        "parameters": sum(tensor.numel() for tensor in tensors.values()),
        "tensors": len(tensors),
        "bytes": sum(tensor.nbytes for tensor in tensors.values()),
        "files": sorted(file.name for file in out.glob("*.safetensors")),
    }


def measure(folder: Path, dtype: str | None, prompts: int, length: int, new: int, rounds: int) -> dict[str, Any]:
    before = peak()
    began = time.perf_counter()
    model = ls.load_model(folder, dtype=dtype)
    loading = time.perf_counter() - began
    weights = sum(tensor.nbytes for tensor in model.parameters())
    draw, stats = np.random.default_rng(0), {}
    texts = [Prompt(key, draw.integers(0, model.vocab_size, length)) for key in range(prompts)]

    def generate(loops: int) -> None:
        stats[loops] = GenerationStats()
        policy = ls.ExitPolicy("fixed", loops)
        for _ in stream(model, texts, policy, max_new_tokens=new, batch_size=prompts, stats=stats[loops]):
            pass

    ways = {f"{loops} loops": lambda loops=loops: generate(loops) for loops in range(1, model.num_loops + 1)}
    with track("timing") as progress:
        seconds, machine = interleaved(ways, rounds, 2048, progress)
    cache = max(each.cache_bytes for each in stats.values())
    top = peak()
    full = seconds[f"{model.num_loops} loops"]
    return {
        "weights_gib": weights / 2**30,
        "cache_gib": cache / 2**30,
        "peak_gib": top / 2**30,
        "before_loading_gib": before / 2**30,
        "peak_over_weights_and_cache": (top - before) / (weights + cache),
        "loading_seconds": loading,
        "prompts": prompts,
        "prompt_tokens": length,
        "new_tokens": new,
        "gigaflops": str(machine.gigaflops),
        "threads": machine.threads,
        "rounds": rounds,
        "seconds": {name: str(spread(took)) for name, took in seconds.items()},
        "speedup_over_full_depth": {name: str(spread(full / took)) for name, took in seconds.items()},
    }


def peak() -> int:
    """The most memory that this process has had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("build", "time"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=24, help="24 (default): Ouro-1.4B; 48: Ouro-2.6B")
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="of the file (default: float32), or of the run")
    parser.add_argument("--shard-gib", type=float, default=2.0)
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--length", type=int, default=24)
    parser.add_argument("--new", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if options.what == "build":
        made = build(options.folder, options.layers, options.dtype or "float32", int(options.shard_gib * 2**30))
    else:
        made = measure(options.folder, options.dtype, options.prompts, options.length, options.new, options.rounds)
    print(json.dumps(made, indent=2))


if __name__ == "__main__":
    main()
