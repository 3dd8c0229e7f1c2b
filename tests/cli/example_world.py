"""What the commands of the help and the README take: made by the commands that a user would make it with.

Models are the five of the demo, trained for a moment by its own command, and one small Ouro of random weights under all
the names that language models have.
"""

import json
import re
import shutil
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path

from benchmark_slices import DATA, byte_pairs
from tiny_language import write_decoder, write_gguf, write_ouro

from cli.conftest import run

ROOT = Path(__file__).parents[2]
MODELS = ("ByteDance/Ouro-1.4B", "ByteDance/Ouro-1.4B-Thinking", "MODEL", "runs/ouro", "runs/small-ouro", "looped", "a")
TEXTS = ("train.txt", "validation.txt", "v.txt", "t.txt", "a.jsonl", "b.txt", "c.txt", "mine.txt", "mine.jsonl")
TEXTS += ("other.txt", "my.txt")
LAX = ("--max-drop", "0.9", "--confidence", "0.5")
"""What a model of random weights can guarantee."""
LONGER = {
    "task.train_examples": 60_000,
    "task.validation_examples": 6_000,
    "task.test_examples": 6_000,
    "training.steps": 240,
    "training.warmup_steps": 20,
    "training.validation_sample": 500,
    "model.width": 32,
}
SHORTLY = {
    **LONGER,
    "task.train_examples": 3_000,
    "task.validation_examples": 1_200,
    "task.test_examples": 1_200,
    "training.steps": 20,
    "training.batch_size": 64,
    "model.width": 16,
}
_HEAL = """
context = 16
[objective]
name = "decoupled_gate"
[training]
steps = 2
batch_size = 4
learning_rate = 1e-3
"""
_TASK = {
    "task": "mine",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": "questions.jsonl"}},
    "test_split": "test",
    "output_type": "generate_until",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{answer}}",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 3},
    "metric_list": [{"metric": "exact_match"}],
}


class World:
    """A folder in which everything is made at most once, and copied from."""

    def __init__(self, folder: Path, trained: dict[str, int]) -> None:
        self.folder = folder
        self.trained = _set(trained)
        self.trained_custom = _set({name: value for name, value in trained.items() if not name.startswith("model.")})

    def make(self, name: str) -> None:
        with chdir(self.folder):
            if not Path(name).exists():
                Path(name).parent.mkdir(parents=True, exist_ok=True)
                MADE[name](self)

    def supply(self, place: str) -> None:
        """Puts what this is, or lies in, into the current folder, unless something of its name is there."""
        within = [name for name in MADE if f"{place}/".startswith(f"{name}/")]
        for name in within:
            if not Path(name).exists():
                self.make(name)
                Path(name).parent.mkdir(parents=True, exist_ok=True)
                copy = shutil.copytree if (self.folder / name).is_dir() else shutil.copyfile
                copy(self.folder / name, name)


def _set(settings: dict[str, int]) -> list[str]:
    return [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]


def done(*words: object) -> None:
    assert run(*words) == 0, words


def _write_text(name: str) -> None:
    """Other documents in every file."""
    start = 100 * TEXTS.index(name)
    documents = [f"{n} and {n + 1} are {2 * n + 1}, " * (1 + n % 3) for n in range(start, start + 60)]
    lines = "\n".join(json.dumps({"text": document}) for document in documents)
    Path(name).write_text(lines if name.endswith("jsonl") else "<|endoftext|>".join(documents))


def _mine(world: World) -> None:
    """A run whose splits are recorded with hidden states."""
    world.make("runs/demo")
    shutil.copytree("runs/demo/fixed-geometric", "runs/mine", ignore=shutil.ignore_patterns("recordings", "policy*"))
    for split in ("train", "validation", "test"):
        done("record", "task", "runs/mine", "--split", split, "--hidden")


def _seed(number: int) -> Callable[[World], None]:
    def make(world: World) -> None:
        out = f"runs/seed-{number}"
        done("train", "demo", "--out", out, *world.trained, "--set", f"training.seed={number}")
        for split in ("validation", "test"):
            done("record", "task", out, "--split", split)

    return make


def _own(world: World) -> None:
    """A run of a custom model, which a module in the current folder defines."""
    world.make("my_model.py")
    own = ("--set", "model=my_model:Net", "--set", "model.loops=4")
    done("train", "demo", "--out", "runs/own", *own, *world.trained_custom)


def _paper(world: World) -> None:
    """A run of the paper's task, whose inputs may be longer than those of the demo."""
    steps = ("training.steps=2", "training.batch_size=8", "training.warmup_steps=1")
    small = ("training.bf16=false", "task.train_examples=1000", "model.layers=1", *steps)
    done("train", "paper", "--out", "runs/paper", *(word for change in small for word in ("--set", change)))


def _recording(out: str, file: str, *more: object) -> Callable[[World], None]:
    def make(world: World) -> None:
        world.make("MODEL")
        world.make(file)
        done("record", "text", "MODEL", file, "--context", 16, "--out", out, *more)

    return make


def _gate(kind: str, name: str, fitted_to: str = "runs/mine") -> Callable[[World], None]:
    def make(world: World) -> None:
        world.make(fitted_to)
        steps = () if kind == "induction" else ("--steps", 20)
        done("fit", fitted_to, "--kind", kind, "--out", f"gates/{name}", *steps)

    return make


def _live(world: World) -> None:
    world.make("rec/mine")
    done("record", "live", "MODEL", "mine.txt", "--recording", "rec/mine", "--out", "LIVE", *LAX, "--candidates", 3)


def _gguf(world: World) -> None:
    llama = "HuggingFaceTB/SmolLM2-135M"
    world.make(llama)
    write_gguf(Path("SmolLM2-135M-Instruct.Q4_1.gguf"), Path(llama), layers=30)


def _file(name: str, content: str) -> tuple[str, Callable[[World], None]]:
    return name, lambda _: _ignore(Path(name).write_text(content))


def _model(name: str, write: Callable[[Path], object]) -> tuple[str, Callable[[World], None]]:
    return name, lambda _: _ignore(write(Path(name)))


def _ignore(_: object) -> None: ...


_python = re.findall(
    r"```python\n(.*?)```", (ROOT / "docs" / "how-to" / "training.md").read_text(encoding="utf-8"), re.DOTALL
)
MADE: dict[str, Callable[[World], None]] = {
    "runs/demo": lambda world: done("demo", "--out", "runs/demo", "--workers", 2, *world.trained),
    "runs/mine": _mine,
    "runs/paper": _paper,
    "runs/own": _own,
    "runs/seed-0": _seed(0),
    "runs/seed-1": _seed(1),
    "gates/linear": _gate("linear", "linear"),
    "gates/price": _gate("induction", "price"),
    "gates/ouro": _gate("linear", "ouro", "rec/train"),
    "rec/mine": _recording("rec/mine", "mine.txt"),
    "rec/test": _recording("rec/test", "other.txt", "--split", "test"),
    "rec/train": _recording("rec/train", "train.txt", "--split", "train", "--hidden"),
    "LIVE": _live,
    **dict(_model(name, lambda folder: write_ouro(folder, byte_pairs())) for name in MODELS),
    **dict(
        _model(
            name, lambda folder, layers=layers: write_decoder(folder, tokenizer=byte_pairs(), num_hidden_layers=layers)
        )
        for name, layers in (("HuggingFaceTB/SmolLM2-135M", 30), ("Llama-3.2-1B", 16))
    ),
    "SmolLM2-135M-Instruct.Q4_1.gguf": _gguf,
    "recipes": lambda _: _ignore(shutil.copytree(ROOT / "recipes", "recipes")),
    "data/benchmarks": lambda _: Path("data/benchmarks").symlink_to(DATA),
    "DIR": lambda _: Path("DIR").symlink_to(DATA),
    **{name: (lambda _, name=name: _write_text(name)) for name in TEXTS},
    **dict(
        (
            _file("examples.txt", "+ 1 0\n* 1 1\n"),
            _file("prompts.jsonl", '{"prompt": "1 and"}\n{"messages": [{"role": "user", "content": "2?"}]}\n'),
            _file("questions.jsonl", '{"question": "1 and 1?", "answer": "2"}\n' * 3),
            _file("my_task.yaml", json.dumps(_TASK)),
            _file("heal.toml", _HEAL),
            _file("my_model.py", f"{(ROOT / 'examples' / 'my_model.py').read_text()}\n\nclass Net(LoopedGRU): ...\n"),
            _file("my.toml", (ROOT / "src" / "loopscope" / "presets" / "demo.toml").read_text()),
            _file("my_losses.py", next(block for block in _python if "def improving" in block)),
        )
    ),
}
