"""How do the docs read? Words per sentence, sentences over 30 words and numbers per 1,000 words of every kind of text.

python -m scripts.prose             a line for each kind of text
python -m scripts.prose --files     and a line for each file
python -m scripts.prose --long      and every sentence over 30 words, with its file
python -m scripts.prose --draw 100  that many sentences drawn at random from all kinds, to be judged by a reader

A word is what stands between spaces, and code between backticks is one word. Tables, code, headings and pictures do
not count. A list entry is a sentence, or several.
"""

import argparse
import inspect
import json
import random
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import loopscope as ls
from loopscope.cli import VERBS, make_parser
from scripts.reference import SETTINGS, _verbs, meanings

ROOT = Path(__file__).parents[1]
LONG = 30
ABBREVIATIONS = r"(?<!e\.g\.)(?<!i\.e\.)(?<!al\.)(?<!vs\.)"
NUMBER = re.compile(r"(?<![\w.@-])[-+±]?\d[\d,.]*\d|(?<![\w.@-])\d(?![\w-])")
ENTRY = re.compile(r"^\s*(?:[-*+]|\d+\.) +")


def sentences(text: str) -> Iterator[str]:
    """The sentences of a text in Markdown: of its paragraphs and list entries."""
    text = re.sub(r"^ *```.*?^ *```", "\n", text, flags=re.MULTILINE | re.DOTALL)
    blocks: list[list[str]] = [[]]
    for line in text.splitlines():
        if not line.strip() or line.lstrip().startswith(("|", "#", "!", ":::", ">>>")):
            blocks.append([])
        elif ENTRY.match(line):
            blocks.append([ENTRY.sub("", line)])
        else:
            blocks[-1].append(line)
    for block in blocks:
        whole = " ".join(line.strip() for line in block)
        whole = re.sub(r"\]\([^)\s]*\)", "]", whole).replace("**", "")
        parts = re.split(ABBREVIATIONS + r"(?<=[.?!])[\])\"'*]*\s+(?=[\[(\"'*`A-Z0-9])", whole)
        for sentence in without_breaks_in_code(parts):
            if re.search(r"[a-zA-Z]", sentence):
                yield sentence.strip()


def without_breaks_in_code(parts: list[str]) -> Iterator[str]:
    """The parts of a text, joined where one ends between two backticks."""
    begun = ""
    for part in parts:
        begun += part
        if begun.count("`") % 2 == 0:
            yield begun
            begun = ""
    if begun:
        yield begun


def words(sentence: str) -> int:
    return sum(bool(re.search(r"\w", word)) for word in re.sub(r"`+[^`]+`+", "code", sentence).split())


def numbers(sentence: str) -> int:
    return len(NUMBER.findall(re.sub(r"`+[^`]+`+", "code", sentence)))


def pages() -> Iterator[tuple[str, str, str]]:
    """Kind, file and text of everything that is read."""
    for path in sorted(path for pattern in ("*.md", "docs/**/*.md", "recipes/**/*.md") for path in ROOT.glob(pattern)):
        name = str(path.relative_to(ROOT))
        if name in ("docs/reference/cli.md", "docs/reference/settings.md"):
            continue  # help and docstrings have their texts
        kind = (
            "README" if name == "README.md" else "evidence" if name.startswith(("docs/evidence", "recipes")) else "docs"
        )
        yield "history" if name in ("CHANGELOG.md", "docs/decisions.md") else kind, name, path.read_text("utf-8")
    for path in sorted(ROOT.glob("docs/**/*.ipynb")):
        cells = [cell for cell in json.loads(path.read_text("utf-8"))["cells"] if cell["cell_type"] == "markdown"]
        yield "docs", str(path.relative_to(ROOT)), "\n\n".join("".join(cell["source"]) for cell in cells)
    parser = make_parser()
    yield "help", "loopscope", "\n\n".join(f"{text}." for text in VERBS.values())
    for path, verb in _verbs(parser):
        _, _, notes = inspect.cleandoc(verb.epilog or "").partition("\n\n")  # after the examples
        helps = [f"{action.help[:1].upper()}{action.help[1:]}." for action in verb._actions[1:] if action.help]
        yield "help", f"loopscope {path}", "\n\n".join([inspect.cleandoc(verb.description or ""), notes, *helps])
    for name in ls.__all__:
        yield "docstrings", name, docstring(getattr(import_module(ls._HOMES[name]), name))
    for group, (text, tables) in SETTINGS.items():
        told = [meaning for _, kind in tables for meaning in meanings(kind, own=True).values()]
        yield "docstrings", group, "\n\n".join([text, *told])


def docstring(what: object) -> str:
    """The prose of a docstring and of its public members, without examples and types."""
    texts = [inspect.cleandoc(what.__doc__ or "")] if callable(what) else []
    for name, member in vars(what).items() if inspect.isclass(what) else ():
        if not name.startswith("_") and (inspect.isroutine(member) or isinstance(member, property)) and member.__doc__:
            texts.append(inspect.cleandoc(member.__doc__))
    prose = []
    for text in texts:
        text = re.sub(r"^Examples\n-+\n.*?(?=^\w+\n-+\n|\Z)", "", text, flags=re.MULTILINE | re.DOTALL)
        prose += re.sub(
            r"^(?:\w+\n-+|\*{0,2}\w[\w., |\[\]*]*)$(?=\n    )",
            "",
            re.sub(r"^\w+\n-+$", "", text, flags=re.M),
            flags=re.M,
        ).split("\n\n")
    return "\n\n".join(re.sub(r"\n(?=\S)(?<=\n\n)", "\n", inspect.cleandoc(each)) for each in prose)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--files", action="store_true")
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--draw", type=int)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    found = [(kind, name, sentence) for kind, name, text in pages() for sentence in sentences(text)]
    if options.draw:
        current = [each for each in found if each[0] != "history"]
        for _, name, sentence in random.Random(options.seed).sample(current, options.draw):
            print(f"- [{name}] {sentence}")
        return
    for kind in dict.fromkeys(kind for kind, _, _ in found):
        show(kind, [sentence for other, _, sentence in found if other == kind])
        names = dict.fromkeys(name for other, name, _ in found if other == kind)
        for name in names if options.files else ():
            show(f"  {name}", [sentence for _, other, sentence in found if other == name])
    show("all", [sentence for _, _, sentence in found])
    for _, name, sentence in found if options.long else ():
        if words(sentence) > LONG:
            print(f"[{name}] {words(sentence)}: {sentence}")


def show(title: str, chosen: list[str]) -> None:
    lengths = [words(sentence) for sentence in chosen]
    total = sum(lengths)
    long = sum(length > LONG for length in lengths) / len(lengths)
    print(
        f"{title:45} {total:6,} words, {total / len(lengths):4.1f} a sentence, {long:5.1%} over {LONG}, "
        f"{1000 * sum(map(numbers, chosen)) / total:3.0f} numbers per 1,000"
    )


if __name__ == "__main__":
    main()
