"""What of a run of `loopscope demo` comes with LoopScope? Examples of every model, small enough for the package.

python scripts/example_recordings.py runs/demo

An example keeps its text without spaces, its halt logits and three logits, in half precision: those of the two
answers, and the largest of the symbols that are no answer. The script ends with an error if that changes answers, or
turns a verdict into another one than "cannot tell", which fewer examples may bring.
"""

import shutil
import sys
from pathlib import Path

import numpy as np

import loopscope as ls
from loopscope.example_recordings import EXAMPLES, SHIPPED

NAME, ANSWERS = "demo", 2
SIZES = {"validation": 1900, "test": 2000}
MAX_BYTES = 1_000_000
MAX_CHANGED = 1e-3
"""Share of the answers, of all loops, that half precision may turn: those of two answers that are all but even."""


def main(run: Path) -> None:
    shutil.rmtree(EXAMPLES / NAME, ignore_errors=True)
    example = SHIPPED[NAME]
    whole = {model: pair(run / model / "recordings") for model in example.models}
    for model, recordings in whole.items():
        for recording in recordings:
            smaller(recording).save(EXAMPLES / NAME / model / str(recording.split))
    small = ls.load_example(NAME)
    for model in example.models:
        before, now = (ls.diagnose(*of[model], reference=of[example.reference]) for of in (whole, small))
        print(f"{model}\n  of all examples: {before.sentence}\n  of those that ship: {now.sentence}")
        if now.verdict not in (before.verdict, "cannot tell"):
            raise SystemExit(f"The verdict on {model} changed from {before.verdict} to {now.verdict}.")
    size = sum(file.stat().st_size for file in (EXAMPLES / NAME).rglob("*") if file.is_file())
    print(f"{size:,} bytes")
    if size >= MAX_BYTES:
        raise SystemExit(f"That is more than {MAX_BYTES:,}; keep fewer examples.")


def pair(recordings: Path) -> tuple[ls.Trajectory, ls.Trajectory]:
    """The validation and the test recording of a model, without the examples that training had."""
    validation, test = (ls.Trajectory.load(recordings / split).unseen() for split in SIZES)
    return validation, test


def smaller(recording: ls.Trajectory) -> ls.Trajectory:
    """Some of the examples, the same ones of every model."""
    rows = np.random.default_rng(0).permutation(recording.num_examples)[: SIZES[str(recording.split)]]
    part = recording.take(np.sort(rows))
    assert part.logits is not None
    assert part.examples is not None
    others = part.logits[..., ANSWERS:].max(axis=-1, keepdims=True)
    kept = ls.Trajectory(
        logits=np.concatenate((part.logits[..., :ANSWERS], others), axis=-1).astype(np.float16),
        gate_logits=None if part.gate_logits is None else part.gate_logits.astype(np.float16),
        labels=part.labels,
        difficulty=part.difficulty,
        seen=part.seen,
        examples=[text.replace(" ", "") for text in part.examples],
        split=part.split,
        provenance={**part.provenance, "examples": part.num_examples, "taken_from": recording.sha256},
    )
    changed = int((part.predicted != kept.predicted).sum())
    print(f"{part.split}: {changed} answers changed")
    for name in ("entropy", "top1", "margin"):
        print(f"  {name} changed by at most {np.abs(ls.signal(name, part) - ls.signal(name, kept)).max():.4f}")
    if changed > MAX_CHANGED * kept.predicted.size:
        raise SystemExit("Half precision changes too many answers.")
    return kept


if __name__ == "__main__":
    main(Path(sys.argv[1]))
