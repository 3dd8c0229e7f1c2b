"""Check a model on this machine: contract, precision, batches, caches, exits, speed.

loopscope selfcheck runs/mine
loopscope selfcheck ByteDance/Ouro-1.4B --device cuda --dtype bfloat16
loopscope selfcheck MODEL --text my.txt --json
loopscope selfcheck MODEL --only cache --only replay

LoopScope checks that the model keeps its contract (docs/how-to/your-model.md). It also compares low precision
with float32, batches with single rows, cached with uncached runs, and replays with live runs. The last check measures
the speed-up of running fewer loops. If any check fails, the exit code is 1. A check of a low precision can fail only
for the precision of --dtype.
"""

import argparse
from typing import TYPE_CHECKING, Any

import numpy as np

import loopscope as ls
from loopscope.cli.inputs import add_custom_model, device_of, find_model, finished_run, import_models, text_file
from loopscope.cli.options import COMPUTE, PRECISIONS, add_shared, add_verb, given, option, rounds
from loopscope.cli.output import print_note, print_sentences, print_table, show, working
from loopscope.files import read_text
from loopscope.models.checkpoint_folder import is_of_task
from loopscope.models.tokenizer import FILE, encode, load_tokenizer

if TYPE_CHECKING:
    from loopscope.checks.machine_checks import SelfCheck
    from loopscope.checks.model_contract import Check, CheckKind

KINDS: "tuple[CheckKind, ...]" = ("contract", "precision", "batch", "cache", "replay", "speed")
"""The names in `checks`, which would import PyTorch."""


def define(subparsers: Any) -> None:
    """Add the arguments of `loopscope selfcheck` to the parser."""
    parser = add_verb(subparsers, "selfcheck", __doc__, execute)
    option(parser, "model", "a run's folder, the folder of a checkpoint, or its name on the Hub")
    option(parser, "--dtype NAME", "precision to check", choices=PRECISIONS, default="float32")
    option(parser, "--text FILE", "text to check on (default: a sample that comes with LoopScope)", type=text_file)
    kinds = f"run only this check: {', '.join(KINDS)} (repeatable; default: all)"
    option(parser, "--only KIND", kinds, action="append", choices=KINDS)
    option(parser, "--rounds N", "number of rounds of the speed check", type=rounds, default=3)
    add_shared(parser, *COMPUTE)
    add_custom_model(parser)


def execute(options: argparse.Namespace) -> int:
    """Execute `loopscope selfcheck` with its parsed arguments."""
    folder = find_model(options.model, text=options.text is not None)
    if is_of_task(folder):
        finished_run(folder, options.with_model)
    from loopscope.checks.machine_checks import TEXT, selfcheck

    device = device_of(options)
    import_models(options)
    text = None
    if options.text is not None or (folder / FILE).is_file():  # a model of a task has no tokenizer
        written = TEXT if options.text is None else read_text(options.text, "text file")
        text = np.array(encode(load_tokenizer(folder), written), dtype=np.int64)
    with working(options, "checking") as advance:
        found = selfcheck(
            options.model,
            lambda dtype: ls.load_model(folder, device, dtype),
            text,
            kinds=options.only or KINDS,
            **given(options, "dtype", "rounds"),
            source="a sample that LoopScope has" if options.text is None else str(options.text),
            progress=advance,
        )
    show(found, options.json, lambda: _print_checks(found))
    for check in found.failed:
        why = _measured_text(check) or check.note.rstrip(".")
        print_note(f"loopscope: {check.kind}: {check.what} is not as it should be ({why}).")
    return 1 if found.failed else 0


def _print_checks(found: "SelfCheck") -> None:
    """Print the checks of a model."""
    verdicts = {True: "PASS", False: "FAIL", None: "-"}
    rows = []
    for check in found.checks:
        what = f"{check.what} ({check.note})" if check.note else check.what
        limit = "" if check.limit is None else f"{'≥' if check.kind == 'speed' else '≤'} {check.limit:g}"
        rows.append([check.kind, what, _measured_text(check), limit, verdicts[check.passed]])
    title = f"{found.model}: {found.num_loops} loops, {found.dtype} on {found.device}, checked on {found.tokens}"
    print_table(title, ["check", "what", "measured", "limit", "verdict"], rows, keys=2)
    print_sentences(found.sentence)


def _measured_text(check: "Check") -> str:
    """The measured value of a check, as text."""
    return "" if check.measured is None else f"{check.measured:.3g} {check.unit}"
