"""Check a model on this machine: contract, precision, batches, caches, exits, speed.

loopscope selfcheck runs/mine
loopscope selfcheck ByteDance/Ouro-1.4B --device cuda --dtype bfloat16
loopscope selfcheck MODEL --text my.txt --json
loopscope selfcheck MODEL --only cache --only replay

The contract of a model, low precision against float32, batch against single, cached against uncached, replay against
live, and the measured speed-up of fewer loops. The exit code is 1 if a check fails; of low precisions, that of --dtype
is judged.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopscope.cli.devices import device_of, working
from loopscope.cli.inputs import check_texts, find_model
from loopscope.cli.options import CHECK_KINDS, COMPUTE, add_shared, add_verb, rounds
from loopscope.cli.output import print_json, print_note, print_sentences, print_table
from loopscope.reading import read_text

if TYPE_CHECKING:
    from loopscope.checks.check import Check
    from loopscope.checks.selfcheck import SelfCheck


def define(subparsers: Any) -> None:
    parser = add_verb(subparsers, "selfcheck", __doc__, execute)
    parser.add_argument("model", help="a run's folder, the folder of a checkpoint, or its name on the Hub")
    parser.add_argument("--dtype", default="float32", metavar="NAME", help="precision to check (default: float32)")
    parser.add_argument("--text", type=Path, metavar="FILE", help="text to check on (default: a sample of our own)")
    kinds = f"check only this: {', '.join(CHECK_KINDS)} (repeatable; default: all)"
    parser.add_argument("--only", action="append", metavar="KIND", help=kinds)
    parser.add_argument("--rounds", type=rounds, default=3, metavar="N", help="rounds of the speed check (default: 3)")
    add_shared(parser, *COMPUTE)


def execute(options: argparse.Namespace) -> int:
    check_texts([] if options.text is None else [options.text])
    folder = find_model(options.model, text=options.text is not None)
    from loopscope.checks.selfcheck import selfcheck
    from loopscope.models import load_model

    device = device_of(options)
    text = _tokens(folder, options.text)
    with working(options, "checking") as advance:
        found = selfcheck(
            options.model,
            lambda dtype: load_model(folder, device, dtype),
            text,
            dtype=options.dtype,
            kinds=options.only or CHECK_KINDS,
            rounds=options.rounds,
            source="a sample of our own" if options.text is None else str(options.text),
            progress=advance,
        )
    if options.json:
        print_json(found)
    else:
        _print(found)
    for check in found.failed:
        why = _measured(check) or check.note.rstrip(".")
        print_note(f"loopscope: {check.kind}: {check.what} is not as it should be ({why}).")
    return 1 if found.failed else 0


def _tokens(folder: Path, file: Path | None) -> Any:
    """The text's tokens; None where the model has no tokenizer and no text was asked for."""
    import numpy as np

    from loopscope.checks.sample import TEXT
    from loopscope.models.tokenizer import FILE, encode, load_tokenizer

    if file is None and not (folder / FILE).is_file():
        return None
    text = TEXT if file is None else read_text(file, "text file")
    return np.array(encode(load_tokenizer(folder), text), dtype=np.int64)


def _print(found: "SelfCheck") -> None:
    verdicts = {True: "PASS", False: "FAIL", None: "-"}
    rows = [
        [
            check.kind,
            f"{check.what} ({check.note})" if check.note else check.what,
            _measured(check),
            _limit(check),
            verdicts[check.passed],
        ]
        for check in found.checks
    ]
    title = f"{found.model}: {found.num_loops} loops, {found.dtype} on {found.device}, checked on {found.tokens}"
    print_table(title, ["check", "what", "measured", "limit", "verdict"], rows, keys=2)
    print_sentences(found.sentence)


def _measured(check: "Check") -> str:
    return "" if check.measured is None else f"{check.measured:.3g} {check.unit}"


def _limit(check: "Check") -> str:
    return "" if check.limit is None else f"{'≥' if check.kind == 'speed' else '≤'} {check.limit:g}"
