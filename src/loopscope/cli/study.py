"""Run a study: one file describes many runs, and one report compares the runs.

loopscope study plan mano
loopscope study run mano
loopscope study status mano
loopscope study report mano
"""

import argparse
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from loopscope.cli.inputs import device_of
from loopscope.cli.options import (
    PRECISIONS,
    Parser,
    add_group,
    add_shared,
    add_verb,
    given,
    gpu_names,
    option,
    real_number,
)
from loopscope.cli.output import print_json, print_note, print_sentences, print_table, working
from loopscope.cli.report import add_report_options, check_products, show_report, shown_command
from loopscope.errors import UserError
from loopscope.files import out_folder
from loopscope.progress import clock
from loopscope.studies.study_file import ExpandedStudy, expand_study

if TYPE_CHECKING:
    from loopscope.studies.plan import Model, Plan
    from loopscope.training.settings import RunSettings

_STEPS = {"run": "training runs", "recording": "recordings", "gate": "fitted gates"}
_STEPS |= {"policy": "policies", "analysis": "analyses", "transfer": "transfers", "timing": "timings"}
_CHECKPOINT_OPTIONS = ("models", "benchmarks", "data", "limit", "dtype")
"""The settings of a study's checkpoints that the command line can change."""
_USUAL_TFLOPS = 40, 125
"""Between these is what training reaches on a GPU of today, by rule of thumb: none of ours was there to be measured."""
_HASH_DIGITS = 8
"""The characters of an artifact's key that tell runs apart and leave room for their names."""


def define(subparsers: Any) -> None:
    """Add the arguments of `loopscope study` to the parser."""
    kinds = add_group(subparsers, "study", __doc__)
    shipped = sorted(entry.name.removesuffix(".toml") for entry in (files("loopscope.studies") / "shipped").iterdir())
    for name, execute in (("plan", _plan), ("run", _run), ("status", _status), ("report", _report_finished)):
        parser = add_verb(kinds, name, execute.__doc__, execute, resumes=name == "run")
        option(parser, "study", f"a TOML file, or a study that ships with LoopScope: {', '.join(shipped)}")
        option(parser, "--out DIR", "folder of the study (default: runs/NAME-OF-THE-FILE)", type=out_folder)
        _add_compute_options(parser)
        add_shared(parser, "--device NAME")
        group = parser.add_argument_group("settings that replace those of the study's checkpoints")
        models = "folder of a checkpoint, or its name on the Hub (repeatable)"
        option(group, "--model DIR|ID", models, action="append", dest="models", default=None)
        benchmarks = "name of a benchmark on which to run the checkpoints (repeatable)"
        option(group, "--benchmark NAME", benchmarks, action="append", dest="benchmarks", default=None)
        option(group, "--data DIR", "folder with the benchmarks' files (default: download them from the Hub)", type=str)
        option(group, "--limit N", "maximum number of questions per split")
        option(group, "--dtype NAME", "precision: float32, bfloat16, float16 or int8", choices=PRECISIONS)
        parser.set_defaults(product=(), style="page")  # of all but `report`
        if name == "plan":
            rate = partial(real_number, fits=lambda value: 0 < value <= 1e6, which="above 0 and up to 1e6")
            reached = "speed of training on your GPU in TFLOP/s (default: measured on --device)"
            option(parser, "--tflops X", reached, type=rate)
        if name == "run":
            _add_worker_options(parser)
            shared = "GPUs that share the work, such as cuda:0,cuda:1 (default: --device, where cuda means all GPUs)"
            option(parser, "--devices LIST", shared, type=gpu_names)
            parser.excludes("devices", "device", "engine")
        if name == "report":
            add_report_options(parser)


def define_demo(subparsers: Any) -> None:
    """Add the arguments of `loopscope demo` to the parser."""
    parser = add_verb(subparsers, "demo", _run_demo.__doc__, _run_demo, resumes=True)
    option(parser, "--out DIR", "folder of the demo", type=out_folder, default="runs/demo")
    _add_compute_options(parser)
    _add_worker_options(parser)
    unused = dict.fromkeys((*_CHECKPOINT_OPTIONS, "devices"))
    parser.set_defaults(study="demo", product=(), style="page", device="cpu", **unused)


def _add_compute_options(parser: Parser) -> None:
    """Add the options of a study's devices and threads."""
    option(
        parser, "--store DIR", "folder for all artifacts (default: the folder `store` beside --out)", type=out_folder
    )
    changed = "change a setting in all runs, such as training.steps=300 (repeatable)"
    option(parser, "--set A.B=C", changed, action="append")
    add_shared(parser, "--json")
    option(parser, "--threads N", "number of CPU threads per task", default=1)


def _add_worker_options(parser: Parser) -> None:
    """Add the options of a study's workers and engine."""
    engines = "run tasks in local processes (default), or on Ray"
    option(parser, "--engine", engines, choices=("local", "ray"), default="local")
    option(parser, "--address HOST:PORT", "address of a Ray cluster (auto: the cluster of this machine)")
    parser.needs(address="engine")
    option(
        parser,
        "--workers N",
        "number of tasks that run together on local CPU cores (default: cores divided by --threads)",
    )
    add_shared(parser, "--force", "--open")


def _run(options: argparse.Namespace) -> None:
    """Make all missing artifacts of a study, then write its report.

    loopscope study run mano
    loopscope study run mano --workers 4 --threads 2
    loopscope study run paper --device cuda  # on every GPU of this machine
    loopscope study run paper --devices cuda:0,cuda:1
    loopscope study run paper --engine ray --address auto --device cuda \\
        --out /shared/paper
    loopscope study run ouro --device cuda
    loopscope study run ouro --model runs/small-ouro --data data/benchmarks \\
        --limit 100 --dtype float32

    If a study is interrupted, the same command continues the study. LoopScope reuses the artifacts of other studies in
    the store.
    """
    expanded = _expanded_study(options)
    from loopscope.studies.executors import run_study, training_left, training_time

    check_products(expanded.study.products)
    requested = options.device
    options.device = requested if options.devices is None else "cuda"
    plan, store = _plan_and_store(options, expanded)
    devices = _worker_devices(options, requested)
    plan.check_folder(_study_folder(options))
    if options.engine == "local" and not options.force:
        for expected in training_time(training_left(plan.steps, store), devices[0]):
            expected.check()
    compute = (options.engine, options.address, devices, options.threads, options.workers)
    with working(options, plan.study.title, unit="steps of work") as advance:
        try:
            run_study(plan, store, advance, *compute)
        finally:
            plan.link(store, _study_folder(options))
    _write_study_report(options, plan, store)


def _worker_devices(options: argparse.Namespace, requested: str) -> list[str]:
    """The devices of a study's workers: named GPUs, or all of them if --device has no number."""
    from loopscope.models.device import check_device, devices_of_type

    if options.devices is None and (options.engine == "ray" or requested not in ("auto", "cuda")):
        return [options.device]
    devices: list[str] = options.devices or devices_of_type(check_device(options.device))
    for name in devices:
        check_device(name)
    if len(devices) > 1:
        options.device = "cuda"
        options.chosen_device = f"Devices: {', '.join(devices)}." if options.devices is None else None
    return devices


def _run_demo(options: argparse.Namespace) -> None:
    """Train, record and diagnose five small models, and write the report.

    loopscope demo --out runs/demo
    loopscope demo --out runs/quick --set training.steps=300

    The command `loopscope demo` runs the same study as `loopscope study run demo`. If the demo is interrupted, the same
    command continues the demo.
    """
    _run(options)


def _report_finished(options: argparse.Namespace) -> None:
    """Write the report on the finished part of a study.

    loopscope study report mano  # of what is finished so far
    # one table; docs/how-to/paper.md lists all products
    loopscope study report mano --product gate_summary
    """
    expanded = _expanded_study(options)
    device = None if options.device == "auto" else options.device
    nothing = UserError(f"Nothing of this study is analysed yet; run it with: {_command(options, 'run', device)}.")
    check_products([*expanded.study.products, *options.product])
    if not (_study_folder(options).exists() or any(_study_store(options).glob("analysis-*"))):  # needs no plan
        raise nothing
    plan, store = _plan_and_store(options, expanded)
    plan.check_folder(_study_folder(options))
    missing = sum(not model.analysis.done(store) for model in plan.models)
    if missing == len(plan.models):
        raise nothing
    if missing:
        print_note(f"{missing} of {len(plan.models)} models are not analysed yet; the report is of the others.")
    _write_study_report(options, plan, store)


def _expanded_study(options: argparse.Namespace) -> ExpandedStudy:
    """Read the study that the arguments name, with all of its runs and without PyTorch."""
    return expand_study(options.study, options.set, given(options, *_CHECKPOINT_OPTIONS))


def _plan_and_store(options: argparse.Namespace, expanded: ExpandedStudy) -> tuple["Plan", Path]:
    """The plan of a study and its store; other threads or devices make other artifacts."""
    from loopscope.studies.plan import make_plan

    device_of(options)
    usual = (options.device, options.threads) == ("cpu", 1)
    arithmetic = "" if usual else f"{options.device.partition(':')[0]}, {options.threads} threads"
    return make_plan(expanded, arithmetic), _study_store(options)


def _write_study_report(options: argparse.Namespace, plan: "Plan", store: Path) -> None:
    """Write the report of a study's results."""
    from loopscope.models.device import check_device

    results = plan.results(store)
    folder = _study_folder(options) / "report"
    device = None if options.device == "cpu" == check_device("auto").type else options.device
    run, report = (_command(options, kind, device) for kind in ("run", "report"))
    details = plan.details(results, store)
    show_report(results, details, options, folder, plan.study.products, (run, report))


def _command(options: argparse.Namespace, kind: str, device: str | None) -> str:
    """The command line that continues the same study."""
    words = {"set": options.set, "model": options.models, "benchmark": options.benchmarks, "data": options.data}
    words |= {"limit": options.limit, "dtype": options.dtype, "out": options.out, "store": options.store}
    words |= {"device": device, "threads": None if options.threads == 1 else options.threads}
    return shown_command(["study", kind, options.study], words)


def _plan(options: argparse.Namespace) -> None:
    """List the artifacts of a study, and show which artifacts exist.

    loopscope study plan mano
    loopscope study plan paper --tflops 40  # the GPU hours at this rate
    loopscope study plan paper --json
    """
    plan, store = _plan_and_store(options, _expanded_study(options))
    from loopscope.studies.executors import training_left
    from loopscope.training.estimate import step_flops

    left = training_left(plan.steps, store)
    known = [(settings, steps) for settings, steps in left if not settings.model.is_custom]
    work = _Training(sum(steps for _, steps in left), sum(step_flops(settings) * steps for settings, steps in known))
    if options.json:
        models = [{"name": model.name, "run": (model.training or model.analysis).key} for model in plan.models]
        steps = [
            {"key": step.key, "needs": [need.key for need in step.needs], "done": step.done(store)}
            for step in plan.steps
        ]
        training = {"steps": work.steps, "flop": work.flop}
        if options.tflops is not None:
            training["gpu_hours"] = work.hours(options.tflops)
        summary = {"title": plan.study.title, "store": str(store), "training": training}
        print_json({**summary, "models": models, "steps": steps})
        return
    _print_models(plan)
    _print_steps(plan, store)
    if left:
        rest = "" if len(known) == len(left) else ", without those of custom models"
        expected = _expected_time(options, known, work)
        print_sentences(f"{work.steps:,} training steps are to be done: {expected}{rest}.")
    hashes = "; a run's is named run- and a hash, which begins as in the table"
    print_sentences(f"Artifacts are in {store}{hashes if any(model.training for model in plan.models) else ''}.")


class _Training(NamedTuple):
    """The training that is left in a study."""

    steps: int
    flop: float

    def hours(self, tflops: float) -> float:
        return self.flop / (tflops * 1e12) / 3600


def _expected_time(options: argparse.Namespace, left: "list[tuple[RunSettings, int]]", work: _Training) -> str:
    """The expected time of training: at a given rate, at the rate measured here, or on GPUs."""
    from loopscope.studies.executors import training_time

    flop = f"{work.flop / 1e18:.3g} EFLOP"
    if options.tflops is not None:
        return f"{flop}, about {work.hours(options.tflops):,.3g} GPU hours at {options.tflops:g} TFLOP/s"
    expected = training_time(left, options.device)
    seconds = sum(each.seconds for each in expected)
    if options.device != "cpu":
        reached = work.flop / seconds / 1e12
        return (
            f"{flop}, about {seconds / 3600:,.3g} GPU hours at the {reached:.3g} TFLOP/s measured on {options.device}"
        )
    if any(each.is_too_long for each in expected):
        slow, fast = _USUAL_TFLOPS
        hours = f"{work.hours(fast):,.0f} to {work.hours(slow):,.0f} GPU hours at {fast} to {slow} TFLOP/s"
        return f"{flop}, about {hours}, which is an estimate (--tflops takes the rate of yours)"
    return f"about {clock(seconds)} of this machine's CPU"


def _print_models(plan: "Plan") -> None:
    """Print the models of a study's plan."""
    trained, scored = [], []
    for model in plan.models:
        gates = str(len(model.analysis.gates) or "")
        if model.training is not None:
            key, steps = model.training.key.removeprefix("run-"), model.training.settings.training.steps
            harder = "yes" if model.analysis.extrapolation else ""
            trained.append([model.name, key[:_HASH_DIGITS], f"{steps:,}", gates, harder])
        if model.checkpoint is not None:
            scored.append([model.name, model.checkpoint.source, gates, "yes" if model.timing else ""])
    if trained:
        print_table(plan.study.title, ["run", "artifact", "steps", "fitted gates", "harder examples"], trained)
    if scored:
        print_table(plan.study.title, ["checkpoint on benchmark", "from", "fitted gates", "timed"], scored)
    if timed := [model.name for model in plan.models if model.timing and model.training]:
        print_sentences(f"The exits of {', '.join(timed)} are timed.\n")
    if references := [model.name for model in plan.models if model.analysis.is_reference]:
        print_sentences(f"Trajectories are measured against {', '.join(references)}.\n")


def _status(options: argparse.Namespace) -> None:
    """Show the progress of a study.

    loopscope study status mano
    """
    plan, store = _plan_and_store(options, _expanded_study(options))
    plan.check_folder(_study_folder(options))
    states = {model.name: _model_state(model, store) for model in plan.models}
    if options.json:
        done = sum(step.done(store) for step in plan.steps)
        print_json({"models": states, "done": done, "steps": len(plan.steps)})
        return
    print_table(plan.study.title, ["run", "state"], [list(pair) for pair in states.items()])
    _print_steps(plan, store)


def _model_state(model: "Model", store: Path) -> str:
    """The state of a model in a study: finished, begun or missing."""
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


def _print_steps(plan: "Plan", store: Path) -> None:
    """Print the steps of a study's plan, and which artifacts exist."""
    rows = []
    for kind, name in _STEPS.items():
        done = [step.done(store) for step in plan.steps if step.kind == kind]
        if done:
            rows.append([name, *(f"{count:,}" for count in (len(done), sum(done), len(done) - sum(done)))])
    print_table("", ["what", "in all", "there", "to be made"], rows)


def _study_folder(options: argparse.Namespace) -> Path:
    """The folder of a study: --out, or a folder with its name."""
    return options.out or Path("runs") / Path(options.study).stem


def _study_store(options: argparse.Namespace) -> Path:
    """The store of a study's artifacts."""
    return options.store or _study_folder(options).parent / "store"
