"""Say which part is to blame, the trajectory or the readout.

loopscope diagnose runs/demo/linear-gate --reference fixed-geometric --unseen
loopscope diagnose runs/demo/linear-gate --at 0.9 --json

A run needs its validation and test splits recorded; a folder that holds two recordings named so will do.
"""

import argparse
from pathlib import Path
from typing import Any

from loopscope.cli.inputs import find_run
from loopscope.cli.options import AT, RECORDED, REFERENCE, add_shared, add_verb, target_accuracies
from loopscope.cli.output import print_json, print_sentences, print_table, watched
from loopscope.recording_places import find_recordings


def define(subparsers: Any) -> None:
    parser = add_verb(subparsers, "diagnose", __doc__, execute)
    parser.add_argument("run", type=Path, help=RECORDED)
    parser.add_argument("--reference", metavar="RUN", help=REFERENCE)
    parser.add_argument("--at", type=float, metavar="X", help=AT)
    add_shared(parser, "--unseen", "--with-readout", "--json")


def execute(options: argparse.Namespace) -> None:
    target = None if options.at is None else target_accuracies([options.at])[0]
    find_recordings(options.run)
    measure = None if options.reference is None else find_run(options.reference, [options.run])
    if measure is not None:
        find_recordings(measure)
    from loopscope.analysis import diagnose_subject
    from loopscope.analysis.model_analysis import read_recordings

    with watched(options, "diagnosing") as advance:
        advance(0, 3, "its readouts")
        subject = read_recordings(options.run, options.unseen).subject_at(target)
        advance(1, 3, "the reference" if measure is not None else "")
        reference = None
        if measure is not None:
            same = find_recordings(measure).resolve() == find_recordings(options.run).resolve()
            reference = subject if same else read_recordings(measure, options.unseen).measure
        advance(2, 3, "the gaps")
        diagnosis = diagnose_subject(subject, reference, target)
        advance(3, 3, "")
    if options.json:
        print_json(diagnosis)
        return
    for sentence in filter(None, (diagnosis.sentence, diagnosis.target_sentence, diagnosis.room_sentence)):
        print_sentences(sentence)
    if diagnosis.table:
        columns, *rows = diagnosis.table
        print_table("", columns, rows, keys=2)
