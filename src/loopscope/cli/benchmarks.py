"""`loopscope bench`: what each benchmark prints."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from loopscope.cli.calibrating import check_any_model, policies_by_model
from loopscope.cli.show import percent, print_json, print_table
from loopscope.cli.verbs import check_products, device_of
from loopscope.errors import UserError

if TYPE_CHECKING:
    from loopscope.bench.exits import ExitBench
    from loopscope.bench.measure import Machine
    from loopscope.bench.promises import PromiseBench


def exits(options: argparse.Namespace) -> int:
    from loopscope.bench.exits import bench_exits, random_subject, trained_subject
    from loopscope.models.checkpoint import weights_sha256
    from loopscope.progress import track

    device_of(options)
    check_any_model(options)
    if options.policy and not options.runs:
        raise UserError("A policy needs the run that it was calibrated for; give its folder, too.")
    if options.runs:
        own = policies_by_model(options.policy, [weights_sha256(run) for run in options.runs], options.any_model)
        subjects = [
            trained_subject(run, options.readout, policies) for run, policies in zip(options.runs, own, strict=True)
        ]
    else:
        readouts = options.readout or ["margin"]
        subjects = [random_subject(options.settings, options.set, options.examples, options.loops, readouts)]
    size = options.batch_size or (None if options.runs else 64)
    results = []
    for subject in subjects:
        with track(f"measuring {subject.name}") as advance:
            results.append(bench_exits(subject, options.rounds, size, options.waiting, advance))
    if options.json:
        print_json(results)
        return 0
    for result in results:
        _print_exits(result)
    return 0


def _print_exits(result: "ExitBench") -> None:
    waiting = any(timing.waiting_realised for timing in result.policies)
    columns = ["readout", "accuracy", "loops", "by tokens", "ms", "speed-up", "realised"]
    columns += [*(["waiting"] if waiting else []), "batch", "close", "differ"]
    full, depth = "" if result.full_accuracy is None else percent(result.full_accuracy), f"{result.num_loops:.2f}"
    rows = [["final loop", full, depth, depth, f"{result.full_milliseconds.median:.3g}", "1", ""]]
    rows[0] += [*([""] if waiting else []), str(result.full_batch_size), "", ""]
    for timing in result.policies:
        rows.append(
            [
                timing.readout if timing.max_drop is None else f"{timing.readout}, loss ≤ {100 * timing.max_drop:g} %",
                "" if timing.accuracy is None else percent(timing.accuracy),
                f"{timing.average_loops:.2f}",
                f"{timing.token_loops:.2f}",
                f"{timing.milliseconds.median:.3g}",
                f"{timing.speedup.median:.2f}",
                str(timing.realised),
                *([str(timing.waiting_realised)] if waiting else []),
                str(timing.batch_size),
                str(timing.agreement.close),
                str(timing.agreement.differing + timing.agreement.close_differing),
            ]
        )
    title = (
        f"{result.model}: {result.examples:,} examples. ms: of an example. realised: share of the ideal speed-up (the "
        f"paper's: {result.paper_realised}). close: within 1e-5 of the threshold. differ: unlike the replay. "
        f"{machine_line(result.machine)}"
    )
    print_table(title, columns, rows)


def train(options: argparse.Namespace) -> int:
    from loopscope.bench.train import bench_train
    from loopscope.progress import track
    from loopscope.training import read_settings

    device_of(options)
    settings = read_settings(options.settings, options.set)
    with track("measuring training") as advance:
        result = bench_train(settings, options.settings, options.rounds, options.steps, advance)
    if options.json:
        print_json(result)
        return 0
    rows = [
        ["milliseconds a step", str(result.milliseconds)],
        ["the plain way", str(result.plain_milliseconds)],
        ["speed-up", str(result.speedup)],
        ["block size / mean length", f"{result.padding:.2f}"],
        ["states a token", f"{result.states_a_token:.2f}"],
        ["useful GFLOP/s", str(result.useful_gigaflops)],
        ["share of the matrix-product rate", str(result.share_of_machine)],
    ]
    title = f"{result.settings}: width {result.width}, batch {result.batch_size}. {machine_line(result.machine)}"
    print_table(title, ["", "median [quartiles]"], rows)
    return 0


def record(options: argparse.Namespace) -> int:
    from loopscope.bench.record import bench_record
    from loopscope.progress import track

    device_of(options)
    with track("measuring recording") as advance:
        result = bench_record(options.run, options.split, options.examples, options.rounds, advance)
    if options.json:
        print_json(result)
        return 0
    rows = [
        ["bare forward pass, ms an example", str(result.forward_milliseconds)],
        ["all signals, against it", str(result.signals_ratio)],
        ["logits and signals of the states, against it", str(result.logits_ratio)],
    ]
    title = f"{result.model}: {result.examples:,} examples. {machine_line(result.machine)}"
    print_table(title, ["", "median [quartiles]"], rows)
    return 0


def sweep(options: argparse.Namespace) -> int:
    from loopscope.bench.sweep import bench_sweep
    from loopscope.progress import track

    device_of(options)
    if options.classes < 2 or options.loops < 2:
        raise UserError("The sweep needs at least two classes and two loops.")
    with track("measuring sweeps") as advance:
        result = bench_sweep(options.examples, options.loops, options.classes, options.width, options.rounds, advance)
    if options.json:
        print_json(result)
        return 0
    rows = [
        [timing.readout, str(timing.signal_milliseconds), str(timing.sweep_ratio), str(timing.replay_ratio)]
        for timing in result.readouts
    ]
    title = (
        f"{result.examples:,} examples, {result.loops} loops, {result.classes} classes; calibration and evaluation. "
        f"{machine_line(result.machine)}"
    )
    print_table(title, ["readout", "signal, ms", "sweep / signal", "one by one / sweep"], rows)
    return 0


def promises(options: argparse.Namespace) -> int:
    from loopscope.bench.promises import bench_promises
    from loopscope.progress import track
    from loopscope.trajectory import Trajectory

    if options.figure is not None:
        check_products(())
        if options.figure.suffix != ".png":
            raise UserError("The figure is written as PNG, and as PDF beside it; give a file that ends in .png.")
    names = [_run_name(path) for path in options.recordings]
    if len(set(names)) < len(names):
        raise UserError("Two of the recordings are of one run; give one of each.")
    recordings = {name: Trajectory.load(path) for name, path in zip(names, options.recordings, strict=True)}
    with track("calibrating") as advance:
        result = bench_promises(recordings, options.examples, options.calibrations, advance)
    if options.json:
        print_json(result)
    else:
        _print_promises(result, options)
    if options.figure is not None:
        from loopscope.report.charts import promise_panels, write_figure

        write_figure(promise_panels(result), options.figure.parent, options.figure.stem)
    return 0


def _print_promises(result: "PromiseBench", options: argparse.Namespace) -> None:
    title = (
        f"{options.calibrations:,} calibrations each, on {options.examples:,} examples: a risk of at most "
        f"{percent(result.max_drop)}, with probability {percent(result.confidence)}"
    )
    columns = ["population", "method", "broken, %", "risk, %", "loops", "hindsight", "ratio", "refused"]
    rows = [
        [
            each.population,
            each.method,
            f"{100 * each.broken:.1f} ± {100 * each.broken_error:.1f}",
            f"{100 * each.risk:.3f} ± {100 * each.risk_error:.3f}",
            f"{each.loops:.2f}",
            f"{each.hindsight_loops:.2f}",
            f"{each.loops / each.hindsight_loops:.3f}",
            f"{each.refused:,}",
        ]
        for each in result.coverage
    ]
    print_table(title, columns, rows)
    sizes = sorted({each.examples for each in result.price})
    priced: dict[str, list[str]] = {}
    for each in result.price:
        priced.setdefault(each.population, [f"{each.hindsight_loops:.2f}"]).append(f"{each.loops:.2f}")
    title = (
        f"The price: loops of the promise, by the number of examples ({result.price[0].calibrations:,} calibrations)"
    )
    columns = ["population", "hindsight", *(f"{size:,}" for size in sizes)]
    print_table(title, columns, [[name, *cells] for name, cells in priced.items()])


def _run_name(recording: Path) -> str:
    """The name of the run that a recording is of, as folders usually are; else its own."""
    path = recording.absolute()
    return path.parent.parent.name if path.parent.name == "recordings" else path.name


def machine_line(machine: "Machine") -> str:
    threads = f"{machine.threads} thread{'s' * (machine.threads > 1)}"
    return f"{threads}, {machine.rounds} rounds; matrix products of this width: {machine.gigaflops} GFLOP/s."
