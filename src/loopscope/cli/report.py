"""Write tables, figures and a page on some runs, or on folders of recordings.

loopscope report runs/demo/fixed-geometric runs/demo/linear-gate --reference fixed-geometric --out report
loopscope report runs/seed-* --out report --at 0.95 --at 0.99 --unseen
loopscope report runs/mine --policy policy.json --out report --open
"""

import argparse
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from loopscope.cli.inputs import POLICIES, add_custom_readouts, find_run, load_policy, policies_by_model
from loopscope.cli.options import (
    RECORDED,
    add_report_options,
    add_shared,
    option,
    option_words,
    out_folder,
    target_accuracies,
)
from loopscope.cli.output import watched
from loopscope.cli.parser import add_verb
from loopscope.recording_paths import find_recordings, recorded_name


def define(subparsers: Any) -> None:
    parser = add_verb(subparsers, "report", __doc__, execute)
    option(parser, "runs", f"{RECORDED}; or several of them", type=Path, nargs="+", metavar="RUN")
    add_shared(parser, "--reference RUN")
    option(parser, "--policy FILE", POLICIES, action="append")
    add_shared(parser, "--any-model")
    option(parser, "--out DIR", "folder of the report", type=out_folder, required=True)
    add_shared(parser, "--at X", action="append")
    add_shared(parser, "--unseen", "--json")
    add_custom_readouts(parser)
    add_report_options(parser)


def execute(options: argparse.Namespace) -> None:
    targets = target_accuracies(options.at)
    runs, reference = _runs(options)
    for path in options.policy:
        load_policy(path, options.any_model)  # what is wrong with it is said before recordings are read
    from loopscope.analysis.model_analysis import analyse_models, read_recordings
    from loopscope.cli.report_output import check_report, show_products, write_and_show

    check_report(options.product, options.out)

    sources = [read_recordings(run, options.unseen) for run in runs]
    models = [source.test.provenance.get("weights_sha256") for source in sources]
    policies = policies_by_model(options.policy, models, options.any_model)
    sources = [replace(source, policies=own) for source, own in zip(sources, policies, strict=True)]
    with watched(options, "analysing") as advance:
        results, details = analyse_models(sources, reference, targets, advance)
    if options.product:
        show_products(results, options.product, options.out, options.json, options.style)
        return
    words = {"reference": options.reference, "policy": options.policy, "any-model": options.any_model}
    words |= {"at": targets, "unseen": options.unseen, "with-readout": options.with_readout}
    words |= {"out": options.out, "style": None if options.style == "page" else options.style}
    command = shlex.join(["loopscope", "report", *map(str, options.runs), *option_words(words)])
    write_and_show(results, details, options, options.out, ("overview",), (command, command))


def _runs(options: argparse.Namespace) -> tuple[list[Path], str | None]:
    """The runs that are shown, and the name of the reference, which is one of them."""
    runs = [find_recordings(run) for run in options.runs]
    if options.reference is None:
        return runs, None
    measure = find_recordings(find_run(options.reference, options.runs))
    if (recorded_name(measure), measure.resolve()) not in [(recorded_name(run), run.resolve()) for run in runs]:
        runs.insert(0, measure)
    return runs, recorded_name(measure)
