"""`loopscope study` and `loopscope demo`: many runs, one file, one report."""

import argparse
import shlex
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopscope.cli.options import count, opening, products, repeated, verb
from loopscope.cli.show import print_json, print_table, say
from loopscope.cli.verbs import check_opening, check_products, device_of, show_products, write_and_show
from loopscope.errors import UserError

if TYPE_CHECKING:
    from loopscope.studies import Plan

_KINDS = {
    "run": "training runs",
    "recording": "recordings",
    "gate": "fitted gates",
    "analysis": "analyses",
    "timing": "timings",
}
_CHECKPOINTS = ("models", "benchmarks", "data", "limit", "dtype")
"""What of a study's checkpoints the command line can change."""


def define(subparsers: Any) -> None:
    study = subparsers.add_parser(
        "study", help="run a study: many runs, one report", description="Run a study: many runs, one report."
    )
    kinds = study.add_subparsers(title="what", metavar="WHAT", required=True)
    examples = {
        "plan": "  loopscope study plan studies/mano.toml\n  loopscope study plan studies/paper.toml --json",
        "run": """\
  loopscope study run studies/mano.toml
  loopscope study run studies/mano.toml --workers 4 --threads 2
  loopscope study run studies/paper.toml --engine ray --address auto --device cuda --out /shared/paper
  loopscope study run studies/ouro.toml --device cuda
  loopscope study run studies/ouro.toml --model runs/small-ouro --data data/benchmarks --limit 100 --dtype float32

An interrupted study continues with the same command. Whatever another study made already is used again.""",
        "status": "  loopscope study status studies/mano.toml",
        "report": """\
  loopscope study report studies/mano.toml                          (of what is finished so far)
  loopscope study report studies/mano.toml --product gate_summary   (one table; docs/paper.md lists all products)""",
    }
    purposes = {
        "plan": "list what a study makes, and what of it is there",
        "run": "make whatever is missing, then the report",
        "status": "say how far a study has come",
        "report": "write the report of what is finished",
    }
    verbs = {"plan": plan, "run": run, "status": status, "report": report}
    for name, purpose in purposes.items():
        parser = verb(kinds, name, purpose, examples[name], verbs[name])
        parser.add_argument("study", help="a TOML file, or a study that ships with LoopScope (demo)")
        parser.add_argument("--out", type=Path, metavar="DIR", help="default: runs/NAME-OF-THE-FILE")
        parser.add_argument("--store", type=Path, metavar="DIR", help="of all artifacts (default: store beside OUT)")
        parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help="change a setting of all runs")
        _checkpoints(parser)
        parser.add_argument("--json", action="store_true", help="print JSON")
        if name == "report":
            products(parser, "the study's")
        if name == "run":
            _execution(parser)
        if name in ("run", "report"):
            opening(parser)
        parser.add_argument("--threads", type=count, default=1, metavar="N", help="of every task (default: 1)")
        parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
        parser.set_defaults(product=None)  # of all but `report`

    demo = verb(
        subparsers,
        "demo",
        "train, record, diagnose and report four small models",
        """\
  loopscope demo --out runs/demo
  loopscope demo --out runs/quick --set training.steps=300

The same as `loopscope study run demo`. An interrupted demo continues with the same command; what is finished is used
again.""",
        run,
    )
    demo.add_argument("--out", type=Path, default=Path("runs/demo"), metavar="DIR", help="default: runs/demo")
    demo.add_argument("--store", type=Path, metavar="DIR", help="of all artifacts (default: store beside OUT)")
    demo.add_argument("--set", action="append", default=[], metavar="A.B=C", help="change a setting of all models")
    demo.add_argument("--json", action="store_true", help="print the results as JSON")
    _execution(demo)
    opening(demo)
    demo.add_argument("--threads", type=count, default=1, metavar="N", help="of every task (default: 1)")
    demo.set_defaults(study="demo", product=None, device="cpu", **dict.fromkeys(_CHECKPOINTS))


def _checkpoints(parser: argparse.ArgumentParser) -> None:
    """The same study on other checkpoints or data."""
    group = parser.add_argument_group("in place of what the study says of its checkpoints")
    group.add_argument("--model", action="append", dest="models", metavar="DIR|ID", help="a checkpoint (repeatable)")
    group.add_argument("--benchmark", action="append", dest="benchmarks", metavar="NAME", help="(repeatable)")
    group.add_argument("--data", metavar="DIR", help="the benchmarks' files (default: from the Hub)")
    group.add_argument("--limit", type=count, metavar="N", help="questions of every split")
    group.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))


def _execution(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engine", choices=("local", "ray"), default="local", help="worker processes here, or Ray")
    parser.add_argument("--address", metavar="HOST:PORT", help="of a Ray cluster (auto: the one this machine is in)")
    parser.add_argument("--workers", type=count, metavar="N", help="tasks at a time here (default: as there are cores)")
    parser.add_argument("--force", action="store_true", help="start even runs that are far too big for this machine")


def run(options: argparse.Namespace) -> int:
    from loopscope.progress import track
    from loopscope.studies import run_study
    from loopscope.studies.run import training_time

    if options.address is not None and options.engine != "ray":
        raise UserError("--address is of a Ray cluster; add --engine ray.")
    made, store = _planned(options)
    check_products(made.study.products)
    made.check_names(_out(options))
    if options.engine == "local":
        device_of(options)
    if options.engine == "local" and not options.force:
        for expected in training_time(made.steps, store, options.device):
            expected.check()
    with track(made.study.title) as advance:
        try:
            run_study(
                made,
                store,
                advance,
                options.engine,
                options.address,
                options.device,
                options.threads,
                options.workers,
            )
        finally:
            made.link(store, _out(options))
    return _report(options, made, store)


def report(options: argparse.Namespace) -> int:
    made, store = _planned(options)
    missing = sum(not model.analysis.done(store) for model in made.models)
    if missing:
        say(f"{missing} of {len(made.models)} models are not analysed yet; the report is of the others.")
    return _report(options, made, store)


def _planned(options: argparse.Namespace) -> tuple["Plan", Path]:
    """The plan and its store. With other threads or devices floats add up otherwise: those are other artifacts."""
    from loopscope.studies import make_plan

    usual = (options.device, options.threads) == ("cpu", 1)
    arithmetic = "" if usual else f"{options.device.partition(':')[0]}, {options.threads} threads"
    return make_plan(options.study, options.set, arithmetic, _changes(options)), _store(options)


def _changes(options: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name in _CHECKPOINTS if (value := getattr(options, name)) is not None}


def _report(options: argparse.Namespace, made: "Plan", store: Path) -> int:
    check_opening(options)
    results = made.results(store)
    folder = _out(options) / "report"
    if options.product:
        return show_products(results, options, folder)
    said = {"set": options.set, **_changes(options), "out": options.out, "store": options.store}
    said |= {"device": options.device if options.device != "cpu" else None}
    said |= {"threads": options.threads if options.threads != 1 else None}
    commands = [shlex.join(["loopscope", "study", verb, options.study, *repeated(said)]) for verb in ("run", "report")]
    explored = made.explored(results, store)
    return write_and_show(results, explored, options, folder, made.study.products, commands, only_headline=True)


def plan(options: argparse.Namespace) -> int:
    from loopscope.progress import clock
    from loopscope.studies.run import training_time
    from loopscope.studies.steps import Train

    made, store = _planned(options)
    steps = made.steps
    if options.json:
        print_json(
            {
                "title": made.study.title,
                "store": str(store),
                "models": [
                    {"name": model.name, "run": (model.training or model.analysis).key} for model in made.models
                ],
                "steps": [
                    {"key": step.key, "needs": [need.key for need in step.needs], "done": step.done(store)}
                    for step in steps
                ],
            }
        )
        return 0
    rows = [
        [
            model.name,
            model.training.key,
            f"{model.training.settings.training.steps:,}",
            f"{len(model.analysis.gates) or ''}",
            "yes" if model.analysis.extrapolation else "",
            "yes" if model.analysis.is_reference else "",
        ]
        for model in made.models
        if model.training is not None
    ]
    if rows:
        print_table(made.study.title, ["run", "artifact", "steps", "fitted gates", "extrapolates", "reference"], rows)
    scored = [
        [model.name, model.checkpoint.source, f"{len(model.analysis.gates) or ''}", "yes" if model.timing else ""]
        for model in made.models
        if model.checkpoint is not None
    ]
    if scored:
        print_table(made.study.title, ["checkpoint on benchmark", "from", "fitted gates", "timed"], scored)
    print_table("", ["what", "in all", "there", "to be made"], _counts(steps, store))
    left = sum(step.units - step.units_done(store) for step in steps if isinstance(step, Train))
    if left:
        seconds = sum(each.seconds for each in training_time(steps, store))
        print(f"{left:,} training steps are to be done: about {clock(seconds)} of this machine's CPU.")
    print(f"Artifacts are in {store}.")
    return 0


def status(options: argparse.Namespace) -> int:
    made, store = _planned(options)
    steps = made.steps
    states = [_state(model, store) for model in made.models]
    if options.json:
        print_json(
            {
                "models": {model.name: state for model, state in zip(made.models, states, strict=True)},
                "done": sum(step.done(store) for step in steps),
                "steps": len(steps),
            }
        )
        return 0
    rows = [[model.name, state] for model, state in zip(made.models, states, strict=True)]
    print_table(made.study.title, ["run", "state"], rows)
    print_table("", ["what", "in all", "there", "to be made"], _counts(steps, store))
    return 0


def _state(model: Any, store: Path) -> str:
    training, analysis = model.training, model.analysis
    if analysis.done(store):
        return "analysed" + ("; not timed yet" if model.timing and not model.timing.done(store) else "")
    below = [analysis.validation, analysis.test, *analysis.gates]
    made = sum(step.done(store) for step in below)
    if training is None:
        return f"{made} of {len(below)} recordings and gates are made"
    if training.done(store):
        return f"trained; {made} of {len(below)} recordings and gates are made"
    done = training.units_done(store)
    return f"training, step {done:,} of {training.units:,}" if done else "not begun"


def _counts(steps: Any, store: Path) -> list[list[str]]:
    every = Counter(step.kind for step in steps)
    there = Counter(step.kind for step in steps if step.done(store))
    return [
        [name, f"{every[kind]:,}", f"{there[kind]:,}", f"{every[kind] - there[kind]:,}"]
        for kind, name in _KINDS.items()
        if every[kind]
    ]


def _out(options: argparse.Namespace) -> Path:
    return options.out or Path("runs") / Path(options.study).stem


def _store(options: argparse.Namespace) -> Path:
    return options.store or _out(options).parent / "store"
