"""What does each verb do? Heavy imports happen inside the verbs, so that `--help` stays quick."""

import argparse
import os
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopscope.cli.options import repeated
from loopscope.cli.show import percent, print_json, print_table, say
from loopscope.errors import UserError

if TYPE_CHECKING:
    from loopscope.report import Results
    from loopscope.report.explored import Explored
    from loopscope.training.parallel import Workers


_HEADLINES = ("headline", "certified", "ouro_summary", "ouro_thinking", "ouro_claims", "ouro_latency")


def device_of(options: argparse.Namespace) -> Any:
    import torch

    from loopscope.machine import keep_memory
    from loopscope.models.device import check_device

    keep_memory()
    if options.threads:
        torch.set_num_threads(options.threads)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic; read at the first use of CUDA
    return check_device(options.device)


def train(options: argparse.Namespace) -> int:
    return with_workers(options, _train)


def with_workers(options: argparse.Namespace, do: "Callable[[argparse.Namespace, Workers], int]") -> int:
    """Does it with the workers that torchrun started, or alone."""
    from loopscope.training.parallel import joined, leave

    with joined(options.device) as workers:
        code = do(options, workers)
    if workers.count > 1:
        leave(code)
    return code


def _train(options: argparse.Namespace, workers: "Workers") -> int:
    from loopscope.progress import clock, silent, track
    from loopscope.training import check_memory, estimate, read_settings, train
    from loopscope.training.loop import steps_done

    with workers.together():
        settings = read_settings(options.settings, options.set)
        device = device_of(options)
        start, steps = steps_done(options.out), settings.training.steps
        if workers.leads and start < steps and not options.force:
            check_memory(settings, device, workers)
            expected = estimate(settings, device, start, workers)
            expected.check()
            say(f"{steps - start:,} steps to go, about {clock(expected.seconds)} on a quiet machine.")
    with track("training") if workers.leads else nullcontext(silent) as advance:
        result = train(settings, options.out, device, advance, workers)
    if not workers.leads:
        return 0
    final = result.final
    if options.json:
        print_json({"run": str(result.folder), "resumed_from": result.resumed_from, **final})
        return 0
    state = "was finished already" if start == steps else f"went on from step {start:,}" if start else "is finished"
    print_validation(f"{result.folder} {state}. Validation sample, forced exits:", final)
    return 0


def print_validation(title: str, final: Mapping[str, Any]) -> None:
    each = zip(final["validation_loss"], final["validation_accuracy"], strict=True)
    rows = [[str(loop), f"{loss:.4f}", percent(accuracy)] for loop, (loss, accuracy) in enumerate(each, start=1)]
    print_table(title, ["loop", "loss", "accuracy"], rows)


def record(options: argparse.Namespace) -> int:
    from loopscope.cli.answering import record_benchmark
    from loopscope.cli.language import record_text
    from loopscope.progress import track
    from loopscope.recording import Keep, record

    if options.text and options.benchmark:
        raise UserError("Record a text or a benchmark, not both at once.")
    kind = "text" if options.text else "benchmark" if options.benchmark else "task"
    _check_options(options, kind)
    if options.text:
        return record_text(options)
    if options.benchmark:
        return record_benchmark(options)
    if options.split is None:
        raise UserError("Say which split is to be recorded, for instance with --split validation.")
    out = options.out or options.run / "recordings" / options.split
    with track(f"recording {options.split}") as advance:
        trajectory = record(
            options.run,
            options.split,
            out,
            Keep(logits=not options.no_logits, hidden=options.hidden),
            options.examples,
            options.levels,
            device_of(options),
            advance,
        )
    accuracy = trajectory.correct.mean(axis=0).tolist()
    summary = {
        "recording": str(out),
        "split": trajectory.split,
        "examples": trajectory.num_examples,
        "loops": trajectory.num_loops,
        "accuracy": accuracy,
    }
    if options.json:
        print_json(summary)
        return 0
    rows = [[str(loop), percent(value)] for loop, value in enumerate(accuracy, start=1)]
    title = (
        f"{out}: {trajectory.num_examples:,} {trajectory.split} examples, {trajectory.num_loops} loops. Forced exits:"
    )
    print_table(title, ["loop", "accuracy"], rows)
    return 0


_RECORDED = {
    "text": ("data", "mean_state", "batch_tokens", "examples", "levels", "no_logits"),
    "benchmark": ("context", "examples", "levels", "no_logits"),
    "task": ("context", "data", "mean_state", "batch_tokens", "limit", "dtype"),
}
"""The options of `record` that mean nothing for a text, a benchmark or a task."""


def _check_options(options: argparse.Namespace, kind: str) -> None:
    for name in _RECORDED[kind]:
        if getattr(options, name):
            instead = {"examples": "take --limit", "limit": "take --examples"}.get(name, "leave it out")
            raise UserError(f"--{name.replace('_', '-')} is not for the recording of a {kind}; {instead}.")


def evaluate(options: argparse.Namespace) -> int:
    from loopscope.analysis import resampled_curves
    from loopscope.cli.calibrating import check_any_model
    from loopscope.cli.gating import gates_of
    from loopscope.exits import attach
    from loopscope.exits.sweep import available_readouts, sweep
    from loopscope.report.results import frontier_result
    from loopscope.trajectory import Trajectory

    check_any_model(options)
    if options.policy is not None:
        return _held_out(options)
    if len(options.recordings) != 2:
        raise UserError(
            "Give two recordings: the one that thresholds are chosen on, and the one that they are evaluated on."
        )
    targets = _targets(options.at or [0.9, 0.95, 0.98, 0.99])
    calibration, evaluation = (Trajectory.load(path) for path in options.recordings)
    gates = gates_of(options.gate, calibration)
    calibration, evaluation = attach(calibration, gates), attach(evaluation, gates)
    names = options.readout or available_readouts(calibration, evaluation)
    frontiers = [sweep(name, calibration, evaluation) for name in names]
    if options.json:
        curves = (resampled_curves(each.readout, each.thresholds, evaluation) for each in frontiers)
        told = [frontier_result(each, own, targets, evaluation) for each, own in zip(frontiers, curves, strict=True)]
        print_json({"readouts": told})
        return 0
    rows = []
    for frontier in frontiers:
        depths = [frontier.depth_at(target) for target in targets]
        point = frontier.select()
        rows.append(
            [
                frontier.readout,
                *("N/A" if depth is None else f"{depth:.2f}" for depth in depths),
                "" if point.policy.threshold is None else f"{point.policy.threshold:.4g}",
                percent(point.accuracy),
                f"{point.average_loops:.2f}",
            ]
        )
    title = (
        f"{evaluation.num_examples:,} {evaluation.split or 'evaluation'} examples. D@X: least average loops on the "
        "evaluation curve that reach X. Selected: the most accurate threshold on calibration data, evaluated."
    )
    columns = ["readout", *(f"D@{100 * target:g}" for target in targets), "selected", "accuracy", "loops"]
    print_table(title, columns, rows)
    return 0


def _held_out(options: argparse.Namespace) -> int:
    from loopscope.analysis import hold_out
    from loopscope.cli.calibrating import load_policy, show_held_out
    from loopscope.trajectory import Trajectory

    if len(options.recordings) != 1 or options.readout or options.gate or options.at:
        raise UserError("With --policy, give one recording, of held-out examples, and no readouts, gates or targets.")
    policy = load_policy(options.policy, options.any_model)
    held = hold_out(policy, Trajectory.load(options.recordings[0]))
    if options.json:
        print_json(held)
    else:
        show_held_out(held, policy, options.policy)
    return 1 if held.promise is not None and held.promise.verdict == "broken" else 0


def diagnose(options: argparse.Namespace) -> int:
    from loopscope.analysis import Subject, diagnose
    from loopscope.report import gap_rows, read_source

    (target,) = _targets([options.at])
    source = read_source(options.run, options.unseen)
    subject = Subject(source.validation, source.test)
    reference = None
    if options.reference is not None and options.reference.resolve() == options.run.resolve():
        reference = subject
    elif options.reference is not None:
        other = read_source(options.reference, options.unseen)
        reference = Subject(other.validation, other.test)
    diagnosis = diagnose(subject, reference, target)
    if options.json:
        print_json(diagnosis)
        return 0
    print(diagnosis.sentence)
    columns = ["gap", "between", "at", "loops", "95 % interval", "both reach it", f"each reaches {100 * target:g}%"]
    print_table("", columns, gap_rows(diagnosis))
    return 0


def compare(options: argparse.Namespace) -> int:
    from loopscope.analysis import Side, depth_gap, paired
    from loopscope.cli.gating import gates_of
    from loopscope.exits import attach, sweep
    from loopscope.report import Source, read_source

    (target,) = _targets([options.at])
    source = read_source(options.run, options.unseen)
    gates = gates_of(options.gate, source.validation)
    pair = (attach(source.validation, gates), attach(source.test, gates))
    source = Source(source.name, *pair)
    other = source if options.other is None else read_source(options.other, options.unseen)

    def side(readout: str, where: Source) -> Side:
        name = readout if where is source else f"{readout} on {where.name}"
        return Side(name, sweep(readout, where.validation, where.test).select().policy, where.test)

    compared = paired(side(options.first, source), side(options.second, other))
    gap = depth_gap(target, (source.subject, options.first), (other.subject, options.second))
    if options.json:
        print_json({"selected": compared, "depth": gap})
        return 0
    rows = [
        [what, f"{100 * each.value:+.2f} %", f"[{100 * each.low:+.2f}, {100 * each.high:+.2f}]"]
        if what == "accuracy"
        else [what, f"{each.value:+.3f}", f"[{each.low:+.3f}, {each.high:+.3f}]"]
        for what, each in (("accuracy", compared.accuracy), ("loops", compared.loops))
    ]
    if gap is not None:
        rows.append([f"D@{100 * gap.accuracy:g}", f"{gap.value:+.3f}", f"[{gap.low:+.3f}, {gap.high:+.3f}]"])
    title = (
        f"{compared.first} minus {compared.second} on {compared.examples:,} test examples. Accuracy and loops at the "
        f"thresholds that validation chose; only {compared.first} is right on {compared.only_first_right:,}, only "
        f"{compared.second} on {compared.only_second_right:,}."
    )
    print_table(title, ["", "difference", "95 % interval"], rows)
    return 0


def report(options: argparse.Namespace) -> int:
    from loopscope.cli.calibrating import check_any_model, policies_by_model
    from loopscope.report import collect, read_source

    targets = _targets(options.at or [0.95, 0.98, 0.99])
    check_any_model(options)
    check_opening(options)
    sources = [read_source(run, options.unseen) for run in options.runs]
    models = [source.test.provenance.get("weights_sha256") for source in sources]
    policies = policies_by_model(options.policy, models, options.any_model)
    sources = [replace(source, policies=own) for source, own in zip(sources, policies, strict=True)]
    results, explored = collect(sources, options.reference, targets)
    if options.product:
        return show_products(results, options, options.out)
    said = {"reference": options.reference, "policy": options.policy, "any-model": options.any_model}
    said |= {"at": targets, "unseen": options.unseen, "out": options.out}
    command = shlex.join(["loopscope", "report", *map(str, options.runs), *repeated(said)])
    return write_and_show(results, explored, options, options.out, ("overview",), [command, command])


def check_products(products: Sequence[str]) -> None:
    """Says before anything is computed whether these products can be made."""
    try:
        from loopscope.report.products import product_names
    except ImportError as error:
        raise UserError(f"The report needs {error.name}; install it with: pip install 'loopscope[report]'.") from None
    product_names(products)


def check_opening(options: argparse.Namespace) -> None:
    if options.open and options.product:
        raise UserError("--open opens the page, which --product does not write; leave one of them out.")


def show_products(results: "Results", options: argparse.Namespace, folder: Path) -> int:
    """Prints these tables and writes these figures, and leaves alone whatever else is in the folder."""
    names: Sequence[str] = options.product
    check_products(names)
    from loopscope.report.charts import write_figure
    from loopscope.report.products import make_products, product_names

    made = {product.name: product for product in make_products(results, names)}
    for name in product_names(names):
        if name not in made:
            say(f"{name} cannot be made: the models that it shows are not among these.")
        elif (table := made[name].table) is not None:
            print_table(table.title, table.columns, table.rows)
        elif (figure := made[name].figure) is not None:
            write_figure(figure, folder, name)
            print(f"{folder / name}.png and .pdf")
    if not made:
        raise UserError("None of these products can be made of these models.")
    return 0


def write_and_show(
    results: "Results",
    explored: "Iterable[Explored]",
    options: argparse.Namespace,
    folder: Path,
    products: Sequence[str],
    commands: Sequence[str],
    only_headline: bool = False,
) -> int:
    """Writes the report, then prints its tables (or only those that matter most), the first last, and its verdicts.

    `commands` are the one that made it and the one that makes its products again.
    """
    check_products(products)
    from loopscope.report.products import make_products
    from loopscope.report.write import write_report

    made = make_products(results, products)
    written = write_report(results, explored, made, folder, *commands)
    if options.open:
        _open(written)
    if options.json:
        print_json(results)
        return 0
    shown = [each.table for each in made if each.table is not None and (not only_headline or each.name in _HEADLINES)]
    for table in reversed(shown):
        print_table(table.title, table.columns, table.rows)
    for group in results.groups:
        for name in group.names[:1]:
            model = next(model for model in results.models if model.name == name)
            print(f"\n{model.label}{' (the reference)' if model.is_reference else ''}: {model.diagnosis.sentence}")
    print(f"\nThe report: {written}")
    return 0


def _open(page: Path) -> None:
    import webbrowser

    if not webbrowser.open(page.resolve().as_uri()):
        say(f"No browser could be started here; open {page} in one.")


def _targets(values: list[float]) -> list[float]:
    if not all(0 < target <= 1 for target in values):
        raise UserError("--at takes accuracies between 0 and 1, such as 0.95.")
    return list({f"{target:g}": target for target in values}.values())
