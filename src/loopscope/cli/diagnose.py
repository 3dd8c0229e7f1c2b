"""Find which part of a model is to blame: its trajectory or its readout.

loopscope diagnose example:demo
loopscope diagnose runs/demo/linear-gate --reference fixed-geometric \\
    --unseen
loopscope diagnose runs/demo/linear-gate --at 0.9 --json

Give a run whose validation and test splits are recorded, or a folder with recordings named validation and test. The
recordings example:demo come with LoopScope. For example:demo, `diagnose` compares the demo's model with a linear gate
to the model with a fixed prior. To diagnose another model of the demo, add its name, as in example:demo/mlp-gate.
"""

import argparse
from typing import Any

from loopscope.cli.inputs import RECORDED, add_custom_readouts, recording_argument, reference_of
from loopscope.cli.options import add_shared, add_verb, option
from loopscope.cli.output import print_json, print_sentences, print_table, watched
from loopscope.recording_paths import find_recordings


def define(subparsers: Any) -> None:
    """Add the arguments of `loopscope diagnose` to the parser."""
    parser = add_verb(subparsers, "diagnose", __doc__, execute)
    option(parser, "run", RECORDED, type=recording_argument)
    add_shared(parser, "--reference RUN", "--at X", "--unseen", "--json")
    add_custom_readouts(parser)


def execute(options: argparse.Namespace) -> None:
    """Execute `loopscope diagnose` with its parsed arguments."""
    own = find_recordings(options.run)
    reference_run = reference_of(options.reference, [options.run])
    measure = None if reference_run is None else find_recordings(reference_run)
    from loopscope.analysis import diagnosis as diagnoses, model_analysis

    with watched(options, "diagnosing") as advance:
        advance(0, 3, "its readouts")
        subject = model_analysis.read_recordings(own, options.unseen).subject_at(options.at)
        advance(1, 3, "the reference" if measure is not None else "")
        reference = None
        if measure is not None:
            same = measure.resolve() == own.resolve()
            reference = subject if same else model_analysis.read_recordings(measure, options.unseen).measure
        advance(2, 3, "the gaps")
        diagnosis = diagnoses.diagnose_subject(subject, reference, options.at)
        advance(3, 3, "")
    if options.json:
        print_json(diagnosis)
        return
    for sentence in filter(None, (diagnosis.sentence, diagnosis.target_sentence, diagnosis.room_sentence)):
        print_sentences(sentence)
    if diagnosis.table:
        columns, *rows = diagnosis.table
        print_table("", columns, rows, keys=2)
