"""The pieces that the verbs' parsers are made of."""

import argparse
from typing import Any


class Version(str):
    """Looked up when it is printed, not at every start."""

    def __mod__(self, _: Any) -> str:
        from loopscope.artifacts import loopscope_version

        return f"loopscope {loopscope_version()}"


def verb(subparsers: Any, name: str, purpose: str, examples: str, run: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        name,
        help=purpose,
        description=purpose.capitalize() + ".",
        epilog="examples:\n" + examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(verb=run)
    return parser


def compute_options(parser: argparse.ArgumentParser, json: bool = True) -> None:
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--threads", type=count, metavar="N", help="CPU threads (default: as PyTorch chooses)")
    if json:
        parser.add_argument("--json", action="store_true", help="print JSON")


def products(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "--product",
        action="append",
        metavar="NAME",
        help=f"a product, or overview or paper for many (repeatable; default: {default})",
    )


def opening(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--open", action="store_true", help="open the page in the browser")


def repeated(options: dict[str, Any]) -> list[str]:
    """These options as they are written on the command line; those without a value are left out."""
    words = []
    for name, value in options.items():
        for each in value if isinstance(value, list) else [value]:
            if each is not None and each is not False:
                words += [f"--{name.removesuffix('s') if name in ('models', 'benchmarks') else name}"]
                words += [] if each is True else [f"{each:g}" if isinstance(each, float) else str(each)]
    return words


def any_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--any-model", action="store_true", help="use a policy without its promise, on any model")


def count(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number from 1 on")
    return int(text)


def whole(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number from 0 on")
    return int(text)


def levels(text: str) -> range:
    first, dash, last = text.partition("-")
    if (
        not first.isdigit()
        or (dash and not last.isdigit())
        or (found := range(int(first), int(last or first) + 1)).start < 1
    ):
        raise argparse.ArgumentTypeError(f"'{text}' is not a range of difficulties such as 11-14")
    if not found:
        raise argparse.ArgumentTypeError(f"'{text}' is an empty range")
    return found
