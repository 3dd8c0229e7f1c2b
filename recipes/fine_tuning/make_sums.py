"""Texts to fine-tune on: sums, every number written from its last digit on, so that 17 + 25 = 42 is `71+52=24`.

    python recipes/fine_tuning/make_sums.py --out sums

`base-train.txt` and `base-validation.txt` are of numbers with one or two digits, for a model to begin with;
`train.txt`, `validation.txt` and `test.txt` of numbers with three, to fine-tune on. No sum is in two files.
"""

import argparse
import random
from pathlib import Path

END = "<|endoftext|>"


def document(a: int, b: int) -> str:
    return f"{a}"[::-1] + "+" + f"{b}"[::-1] + "=" + f"{a + b}"[::-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the folder of the texts")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    small = [(a, b) for a in range(100) for b in range(100)]
    draw.shuffle(small)
    large = draw.sample(range(810_000), 8_000)
    pairs = [(100 + number // 900, 100 + number % 900) for number in large]
    parts = {
        "base-train": small[:9_000],
        "base-validation": small[9_000:],
        "train": pairs[:4_000],
        "validation": pairs[4_000:6_000],
        "test": pairs[6_000:],
    }
    options.out.mkdir(parents=True, exist_ok=True)
    for name, found in parts.items():
        (options.out / f"{name}.txt").write_text(END.join(document(*pair) for pair in found), encoding="utf-8")
        print(f"{name}.txt: {len(found):,} sums, such as {document(*found[0])}")


if __name__ == "__main__":
    main()
