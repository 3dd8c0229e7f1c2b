"""Measure speed-ups over full depth, in interleaved rounds.

loopscope bench exits runs/demo/fixed-geometric
loopscope bench generation runs/small-ouro --text validation.txt \\
    --policy policy.json
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import loopscope as ls
from loopscope.cli import inputs
from loopscope.cli.options import COMPUTE, add_group, add_shared, add_verb, option
from loopscope.cli.output import machine_line, percent, print_note, print_table, show, working
from loopscope.errors import UserError
from loopscope.models.checkpoint_folder import read_model_shape
from loopscope.models.tokenizer import read_documents, tokenize_documents
from loopscope.recording_paths import find_recordings
from loopscope.scope import CacheMode, Scope
from loopscope.training.run_folder import run_weights, task_of_run
from loopscope.training.settings import presets, read_settings

if TYPE_CHECKING:
    from loopscope.bench.exit_timing import ExitBench, ExitTiming
    from loopscope.bench.text_timing import GenerationBench, GenerationTiming


def define(subparsers: Any) -> None:
    """Add the arguments of `loopscope bench` to the parser."""
    kinds = add_group(subparsers, "bench", __doc__)
    parser = add_verb(kinds, "exits", _bench_exits.__doc__, _bench_exits)
    measured = "recorded runs to measure (default: a model with random weights)"
    option(parser, "runs", measured, type=Path, nargs="*", default=[], metavar="RUN")
    rules = f"measure exits by this readout: {inputs.READOUT_NAMES} (repeatable; default: several)"
    option(parser, "--readout NAME", rules, type=inputs.readout_name, action="append")
    option(parser, "--policy FILE", inputs.POLICIES, action="append")
    inputs.add_policy_options(parser)
    option(parser, "--batch-size N", "number of rows per batch (default: 64 for random weights, else the fastest)")
    option(parser, "--waiting", "also measure batches in which all rows wait for the slowest row")
    random = f"settings of the random model: a TOML file, or {', '.join(presets())}"
    option(parser, "--settings SETTINGS", random, default="paper")
    option(parser, "--set A.B=C", "change a setting of the random model (repeatable)", action="append")
    option(parser, "--examples N", "number of examples for the random model", default=2048)
    option(parser, "--loops X", "average number of loops per row of the random model", default=1.3)
    add_shared(parser, "--rounds N", *COMPUTE)
    inputs.add_custom_model(parser)
    inputs.add_custom_tasks(parser)
    parser.needs(policy="runs")
    parser = add_verb(kinds, "generation", _bench_generation.__doc__, _bench_generation)
    add_shared(parser, "model")
    continued = "text files with the documents to continue"
    option(parser, "--text FILE", continued, type=inputs.text_file, nargs="+", required=True)
    option(parser, "--policy FILE", "policy file to measure (repeatable)", action="append")
    inputs.add_policy_options(parser)
    rules = f"measure this readout at its --threshold: {inputs.READOUT_NAMES} (repeatable)"
    option(parser, "--readout NAME", rules, type=inputs.readout_name, action="append")
    thresholds = "threshold of each readout, in the order of the readouts (repeatable)"
    option(parser, "--threshold X", thresholds, action="append")
    caches = f"measure this KV cache: {', '.join(get_args(CacheMode))} (repeatable; default: all)"
    option(parser, "--cache MODE", caches, action="append", choices=get_args(CacheMode))
    option(parser, "--lossless", "also measure lossless text, with drafts by each rule")
    option(parser, "--plain", "also measure full depth with padded rows, as in public implementations")
    option(parser, "--prompts N", "number of documents to continue", default=16)
    option(parser, "--prompt-tokens N", "number of tokens in each prompt", default=64)
    option(parser, "--new-tokens N", "number of tokens that continue each prompt", default=64)
    option(parser, "--batch-size N", "number of documents per batch", default=8)
    add_shared(parser, "--dtype NAME", "--compile", "--rounds N", *COMPUTE)


def _bench_exits(options: argparse.Namespace) -> None:
    """Measure the speed-up of adaptive depth over full depth.

    # the paper's model, random weights, about 1.3 loops
    loopscope bench exits --waiting
    loopscope bench exits runs/demo/fixed-geometric runs/demo/linear-gate
    loopscope bench exits runs/demo/fixed-geometric --readout margin --waiting \\
        --json
    loopscope bench exits runs/demo/fixed-geometric \\
        --policy runs/demo/fixed-geometric/policy.json
    """
    for run in options.runs:
        task_of_run(run, inputs.finished_run(run, options.with_model), options.with_task)
        find_recordings(run)
    inputs.check_readouts(*options.readout)
    policies = inputs.policies_by_model(options.policy, [run_weights(run) for run in options.runs], options.any_model)
    for run, own in zip(options.runs, policies, strict=True):
        for policy in own:
            inputs.check_runs_on(policy, run)
    if not options.runs:
        read_settings(options.settings, options.set)
    from loopscope.bench.exit_timing import bench_exits, random_model, trained_model

    device = inputs.device_of(options)
    inputs.import_models(options)
    size = options.batch_size or (None if options.runs else 64)
    models = [
        trained_model(run, options.readout, own, device, custom_tasks=options.with_task)
        for run, own in zip(options.runs, policies, strict=True)
    ]
    if not models:
        readouts = options.readout or ["margin"]
        models = [random_model(options.settings, options.set, options.examples, options.loops, readouts, device)]
    results = []
    for model in models:
        with working(options, f"measuring {model.name}") as advance:
            results.append(bench_exits(model, options.rounds, size, options.waiting, advance))
    show(results, options.json, lambda: _print_exit_timings(results))


def _print_exit_timings(results: "list[ExitBench]") -> None:
    """Print the timings of rows and questions under policies."""
    for result in results:
        columns = ["readout", "accuracy", "loops", "by tokens", "ms", "speed-up", "realised"]
        columns += ["waiting", "batch", "close", "differ"]
        full, depth = _accuracy_cell(result.full_accuracy), f"{result.num_loops:.2f}"
        rows = [["final loop", full, depth, depth, f"{result.full_milliseconds.median:.3g}", "1", "", ""]]
        rows[0] += [str(result.full_batch_size), "", ""]
        for timing in result.policies:
            loops = [f"{timing.average_loops:.2f}", f"{timing.token_loops:.2f}"]
            speed = [f"{timing.milliseconds.median:.3g}", f"{timing.speedup.median:.2f}", str(timing.realised)]
            speed.append(str(timing.waiting_realised or ""))
            differ = timing.agreement.differing + timing.agreement.close_differing
            last = [str(number) for number in (timing.batch_size, timing.agreement.close, differ)]
            rows.append([_exit_timing_rule(timing), _accuracy_cell(timing.accuracy), *loops, *speed, *last])
        title = (
            f"{result.model}: {result.examples:,} examples. loops: mean over examples; by tokens: mean over tokens. "
            f"ms: of an example. realised: share of the ideal speed-up (the paper's: {result.paper_realised}). "
            f"close: within 1e-5 of the threshold. differ: unlike the replay. {machine_line(result.machine)}"
        )
        print_table(title, columns, rows)


def _accuracy_cell(share: float | None) -> str:
    """An accuracy as a cell of the timings."""
    return "" if share is None else percent(share)


def _exit_timing_rule(timing: "ExitTiming | GenerationTiming") -> str:
    """The exit rule of a timing, as a cell."""
    return timing.readout if timing.max_drop is None else f"{timing.readout}, loss ≤ {100 * timing.max_drop:g} %"


def _bench_generation(options: argparse.Namespace) -> None:
    """Measure the speed-up of policies and caches over full depth, on a text.

    loopscope bench generation runs/small-ouro --text validation.txt \\
        --policy policy.json
    loopscope bench generation runs/small-ouro --text validation.txt \\
        --readout gate --threshold 0.5 --cache propagate
    loopscope bench generation runs/small-ouro --text validation.txt \\
        --readout top1 --threshold 0.8 --lossless --plain

    LoopScope gives the model the beginning of each document and then the real next tokens. All policies and caches
    therefore process the same tokens. With --lossless, the model writes the same number of tokens itself, and LoopScope
    compares the written text with the text of full depth.
    """
    if len(options.readout) != len(options.threshold) or not options.policy + options.readout:
        raise UserError("Give a --policy, or every --readout with its --threshold.")
    policies = [inputs.load_policy(path, options.any_model) for path in options.policy]
    policies += [inputs.policy_by_hand(name, at) for name, at in zip(options.readout, options.threshold, strict=True)]
    folder = inputs.find_model(options.model, text=True)
    shape, size = read_model_shape(folder), options.prompt_tokens + options.new_tokens
    if size > shape.block_size:
        size_text = f"A prompt of {options.prompt_tokens:,} tokens and {options.new_tokens:,} after it"
        fewer = "ask for fewer (--prompt-tokens, --new-tokens)"
        raise UserError(f"{size_text} are more than the {shape.block_size:,} that the model takes; {fewer}.")
    for policy in policies:
        inputs.check_runnable(policy, shape.num_loops, Scope(unit="tokens"))
    from loopscope.bench.text_timing import bench_generation, ways_of

    model = inputs.load_text_model(folder, options)
    prompts, caches = _prompts_to_time(folder, options), options.cache or list(get_args(CacheMode))
    for policy in policies:
        if others := [cache for cache in caches if policy.scope.cache not in (None, cache)]:
            without = f"with {' and '.join(others)} it is measured without its guarantee"
            print_note(f"{policy} was calibrated for the cache '{policy.scope.cache}'; {without}.")
    with working(options, "measuring") as advance:
        ways = ways_of(policies, caches, options.lossless)
        result = bench_generation(
            options.model, model, prompts, ways, options.batch_size, options.rounds, advance, options.plain
        )
    show(result, options.json, lambda: _print_text_timings(result))


def _prompts_to_time(folder: Path, options: argparse.Namespace) -> "list[ls.Prompt]":
    """The documents that are long enough, each cut into a prompt and the text after it."""
    cut, size = options.prompt_tokens, options.prompt_tokens + options.new_tokens
    documents = tokenize_documents(read_documents(options.text), folder)
    found = [tokens for tokens in documents if len(tokens) >= size]
    if len(found) < options.prompts:
        fewer = "ask for fewer --prompts, or for shorter ones (--prompt-tokens, --new-tokens)"
        raise UserError(f"Only {len(found)} of the documents have {size:,} tokens; {fewer}.")
    some = [found[place * len(found) // options.prompts] for place in range(options.prompts)]
    return [ls.Prompt(key, tokens[:cut], tokens[cut:size]) for key, tokens in enumerate(some)]


def _print_text_timings(result: "GenerationBench") -> None:
    """Print the timings of text under policies and caches."""
    rows = []
    for timing in result.ways:
        row = [_exit_timing_rule(timing), "" if timing.threshold is None else f"{timing.threshold:.4g}", timing.cache]
        row.append("" if timing.average_loops is None else f"{timing.average_loops:.2f}")
        row += [f"{timing.run_loops:.2f}", percent(timing.agreement), f"{timing.kl:.4f}"]
        row.append("" if timing.drafts is None else f"{timing.drafts.accepted:,} of {timing.drafts.drafted:,}")
        row.append(f"{timing.cache_bytes / 2**20:.1f}")
        realised = (timing.realised or "", timing.realised_after_prompts or "")
        ratios = (timing.speedup, *realised, timing.prompt_speedup, timing.writing_speedup)
        rows.append([*row, *map(str, (*ratios, timing.realised_of_run))])
    title = (
        f"{result.model}: {result.prompts} prompts of {result.prompt_tokens} tokens, {result.new_tokens:,} after them, "
        f"{result.batch_size} at a time; full depth ({result.num_loops} loops): "
        f"{result.full_tokens_per_second} tokens per second. run: loops that were run for a token, for the cache too. "
        "agrees, KL: with full depth's prediction. drafts: those that stood. speed-up: against full depth, in all, and "
        "until the first token (prompts) and after it (writing). realised: share of what the average loops allow; "
        "after prompts: the same, with full depth's time for prompts, which go through all loops in the end; of "
        f"loops run: after the first token, of what these allow. {machine_line(result.machine)}"
    )
    if (plain := result.plain) is not None:
        title += (
            f" Full depth itself is {plain.speedup} times as fast as the plain way, prompts {plain.prompt_speedup}, "
            f"writing {plain.writing_speedup}; {plain.differing} tokens differ."
        )
    columns = ["readout", "at", "cache", "loops", "run", "agrees", "KL", "drafts", "cache, MiB"]
    columns += ["speed-up", "realised", "after prompts", "prompts", "writing", "of loops run"]
    print_table(title, columns, rows, keys=3)
