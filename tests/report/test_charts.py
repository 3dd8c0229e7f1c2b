"""Figures: bands, lines that lie on each other, keys that can be read, full grids, and a column's width."""

import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import numpy as np
import pytest
from conftest import random_trajectory
from pages import figure_of, of_seeds
from simulated import pair

from loopscope.analysis.model_analysis import ModelRecordings, analyse_models
from loopscope.analysis.schema import Binned, FrontierResult, Results
from loopscope.readouts.readout import POST_HOC
from loopscope.report.charts import difficulty_chart, frontiers, write_figure
from loopscope.report.curves import MAX_KEY_ENTRIES, Binning, Line, Panel, chosen_lines, continued
from loopscope.report.figure_style import DARK, GREY, STYLES, looks_of, shades_of
from loopscope.report.products import OVERVIEW

WHOLE = (0.0, 1.0)


@pytest.fixture(scope="module")
def results() -> Results:
    """Two seeds of one model, and another model; of so few examples no stoppers are learned, which takes time."""
    sources = [*of_seeds("seed", right=0.9), ModelRecordings("third", *pair(right=0.8, rows=90))]
    return analyse_models(sources, None, [0.7])[0]


def frontier(results: Results, model: int, readout: str) -> FrontierResult:
    found = results.models[model].frontier(readout)
    assert found is not None
    return found


def line(name: str, accuracy: Any, loops: Any = (1, 2, 3, 4)) -> Line:
    heights = np.asarray(accuracy, dtype=float)
    return Line(name, np.asarray(loops, dtype=float), heights, heights, heights)


def drawn_on_page(panels: list[Panel], scaled_alone: bool = False) -> dict[str, Any]:
    made = frontiers(panels, scaled_alone)
    assert made is not None
    return made(STYLES["page"])


def key_of(specification: dict[str, Any]) -> list[str]:
    """What the key of a figure says: below its panels, or among them."""
    grid, *below = specification["vconcat"]
    (key,) = below or grid["concat"][-1:]
    return [row["name"].replace("\n", " ") for row in key["data"]["values"]]


def foot_of(specification: dict[str, Any]) -> str:
    """The note below a figure."""
    return " ".join(specification["title"]["text"])


def test_every_point_of_a_curve_has_an_interval_over_examples(results: Results) -> None:
    margin = frontier(results, 2, "margin")
    assert len(margin.accuracy_low) == len(margin.accuracy_high) == len(margin.accuracy) > 40
    place = int(np.argmax(margin.accuracy))
    share, width = margin.accuracy[place], margin.accuracy_high[place] - margin.accuracy_low[place]
    assert width == pytest.approx(2 * 1.96 * (share * (1 - share) / 90) ** 0.5, rel=0.3)
    for table in (results.models[2].forced_accuracy_by_difficulty, results.models[2].signals["entropy"]):
        values, low, high = (np.array(each) for each in (table.values, table.low, table.high))
        assert np.all((low <= values + 1e-4) & (values <= high + 1e-4))
        assert np.any(high > low + 1e-3)


def test_a_line_over_seeds_is_their_mean_and_range(results: Results) -> None:
    both = [frontier(results, seed, "margin") for seed in (0, 1)]
    made = Line.of(both)
    assert made.seeds == 2
    for place in (0, 30, 60):
        curves = [Line.of([each]) for each in both]
        at = [float(np.interp(made.loops[place], each.loops, each.accuracy)) for each in curves]
        assert made.accuracy[place] == pytest.approx(np.mean(at))
        assert (made.low[place], made.high[place]) == pytest.approx((min(at), max(at)))
    fixed = Line.of([frontier(results, seed, "fixed") for seed in (0, 1)])
    assert fixed.loops.tolist() == [1, 2, 3, 4]
    assert fixed.accuracy[3] == pytest.approx(np.mean([results.models[seed].forced_accuracy[3] for seed in (0, 1)]))
    one = Line.of(both[:1])
    assert (one.seeds, sorted(one.low.tolist())) == (1, sorted(both[0].accuracy_low))


def test_lines_on_each_other_are_drawn_once_and_said_to_be() -> None:
    rising = np.array([0.5, 0.7, 0.9, 0.95])
    same, near, apart = line("entropy", rising), line("top1", rising + 0.005), line("margin", rising - 0.1)
    first = Panel("one", [same, near, apart], 4, 0.9)
    other = Panel("two", [same, line("top1", rising + 0.1), apart], 4, 0.9)
    drawn = chosen_lines([first, other], [WHOLE, WHOLE])
    assert [each.name for each in drawn.panels[0].lines] == ["entropy", "margin"]
    assert drawn.panels[0].same == (("entropy", "top1"),)
    assert ([each.name for each in drawn.panels[1].lines], drawn.merged) == (["entropy", "top1", "margin"], ())
    third = Panel("three", [same, line("top1", rising + 0.1), line("margin", rising + 0.102)], 4, 0.9)
    followed = Panel("four", [same, line("top1", rising + 0.005), line("margin", rising - 0.005)], 4, 0.9)
    told = [panel.same for panel in chosen_lines([third, followed], [WHOLE, WHOLE]).panels]
    assert told == [(("top1", "margin"),), (("entropy", "top1", "margin"),)]  # one that is drawn nowhere is said, too
    everywhere = chosen_lines([first, first], [WHOLE, WHOLE])
    assert everywhere.merged == (("entropy", "top1"),)
    made = drawn_on_page([first, Panel("without lines", [], 4, 0.9), first])
    assert key_of(made) == ["entropy ≈ top1", "margin"]
    assert "drawn once" in foot_of(made)
    late = line("kl", rising, (2, 2.5, 3, 4))  # it begins elsewhere
    assert len(chosen_lines([Panel("", [same, late], 4, 0.9)], [WHOLE]).panels[0].lines) == 2


def test_bands_that_would_cover_every_line_are_left_out() -> None:
    """A few hundred questions: the intervals stand at the fixed depths, and the panel has room for them."""
    flat = np.array([0.30, 0.31, 0.32, 0.31])
    narrow, wide = ([line(name, flat + shift) for name, shift in (("gate", 0), ("fixed", 0.01))] for _ in range(2))
    wide = [replace(each, low=each.accuracy - 0.05, high=each.accuracy + 0.05) for each in wide]
    areas = []
    for lines in (narrow, wide):
        panel = Panel("one", lines, 4, 0.3)
        made = drawn_on_page([panel], scaled_alone=True)
        areas.append(str(made).count("'area'"))
        assert panel.wide == (lines is wide) == ("fixed depths only" in foot_of(made))
    assert areas == [1, 0]
    assert panel.heights[0] < 0.26 < 0.38 < panel.heights[1]


def test_a_key_has_eight_entries_says_what_is_left_out_and_has_whatever_was_chosen() -> None:
    """Though it lies on another one in the first panel, and though there are more of them than entries of a key."""
    many = [line(f"r{place}", np.linspace(0.1, 0.9, 4) * (1 - place / 20)) for place in range(12)]
    with_gate = [*many, line("gate", [0.9, 0.91, 0.92, 0.93]), line("fixed", [0.2, 0.4, 0.6, 0.8])]
    made = drawn_on_page([Panel("without", many, 4, 0.9), Panel("with", with_gate, 4, 0.9)])
    assert len(key_of(made)) == MAX_KEY_ENTRIES
    assert {"fixed", "gate", "r0", "r5"} <= set(key_of(made))  # whatever panel they are of
    assert "Not drawn: r6, r7, r8, r9, r10, r11." in foot_of(made)
    hidden = [line("r11", many[0].accuracy) if each.name == "r11" else each for each in many]
    first, second = Panel("a", hidden, 4, 0.9, ("r0",)), Panel("b", many, 4, 0.9, ("r11",))
    drawn = chosen_lines([first, second], [WHOLE, WHOLE])
    assert "r11" in {each.name for each in drawn.panels[1].lines}
    assert len({each.name for panel in drawn.panels for each in panel.lines}) == MAX_KEY_ENTRIES
    everything = chosen_lines([Panel("a", many, 4, 0.9, tuple(f"r{place}" for place in range(12)))], [WHOLE])
    assert (len(everything.panels[0].lines), everything.left_out) == (12, [])


def test_a_chosen_line_is_drawn_though_it_lies_on_one_that_is_left_out() -> None:
    """It stands for those that lie on it, the same one in every panel; nor is a gate of a figure on gates left out."""
    many = [line(f"r{place}", np.linspace(0.1, 0.9, 4) * (1 - place / 20)) for place in range(12)]
    hidden = [line("r11", many[10].accuracy) if each.name == "r11" else each for each in many]
    panels = [Panel("a", hidden, 4, 0.9, ("r11",)), Panel("b", hidden, 4, 0.9)]
    drawn = chosen_lines(panels, [WHOLE, WHOLE])
    assert drawn.merged == (("r11", "r10"),)
    assert all("r11" in {each.name for each in panel.lines} for panel in drawn.panels)
    assert "r10" not in drawn.left_out  # it is in the key, beside r11
    gates = [line(f"gate, β {place}", many[place].accuracy) for place in range(10)]
    shown = chosen_lines([Panel("a", [*many, *gates], 4, 0.9)], [WHOLE]).panels[0]
    assert {each.name for each in gates} <= {each.name for each in shown.lines}


def test_a_panel_says_what_its_lines_are_of() -> None:
    panel = Panel("one", [line("fixed", [0.2, 0.4, 0.6, 0.8])], 4, 0.9, note="fixed: of the prior")
    assert "fixed: of the prior" in str(drawn_on_page([panel])["vconcat"][0])


def test_every_readout_has_a_mark_of_its_own_and_a_line_of_the_paper_always_the_same() -> None:
    """Where colours tell models apart, marks alone tell readouts apart; those of learned stoppers are hollow."""
    names = {*POST_HOC, "fixed", "gate", "oracle", "settling", "hidden_acceleration", "patience"}
    drawn = [shape for _, shape in looks_of(names).values() if shape.startswith("M")]
    assert all(shape.endswith("Z") for shape in drawn)  # marks are filled, and what is not closed has no area
    for own in (names, {"stopper:induction", "stopper:classifier"}):
        assert len({shape for _, shape in looks_of(own).values()}) == len(own)
    betas = [f"gate, β {beta:g}" for beta in (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)]
    fitted = [f"fitted {kind}" for kind in ("linear-ponder", "linear-utility", "mlp-ponder", "mlp-utility")]
    for family in (betas, fitted):
        together = looks_of({*family, "fixed"})
        assert len({together[name][0] for name in family}) == len(family)
        assert all(looks_of([name])[name] == together[name] for name in family)
    beside = looks_of([*betas[:3], "one's own", "another"])
    assert len({colour for colour, _ in beside.values()}) == 5
    everything = looks_of([*betas, *fitted, "fixed", "gate, β 0.3", "fitted own", *(f"own {k}" for k in range(9))])
    assert len(set(everything.values())) == len(everything)


@pytest.mark.parametrize("style", STYLES)
def test_grids_are_full_but_for_the_place_of_the_key(style: str) -> None:
    for panels in range(1, 50):
        assert -panels % STYLES[style].columns(panels) <= 1
        assert -panels % STYLES[style].columns(panels, 4) <= 1


@pytest.mark.parametrize("style", STYLES)
def test_the_same_figure_as_png_pdf_and_svg(results: Results, tmp_path: Path, style: str) -> None:
    (figure,) = OVERVIEW.make(results, ["frontiers"])
    assert figure.figure is not None
    write_figure(figure.figure, tmp_path, "made", style)
    svg = (tmp_path / "made.svg").read_text()
    texts = "".join(ElementTree.fromstring(svg).itertext())
    assert all(words in texts for words in ("average loops", "oracle", "gate", "mean of 2 seeds"))
    width, height = (float(re.findall(rf'<svg[^>]* {side}="([\d.]+)', svg)[0]) for side in ("width", "height"))
    assert abs(width - 234) < 2 or style == "page"
    box = re.findall(rb"MediaBox *\[ *0 0 ([\d.]+) ([\d.]+)", (tmp_path / "made.pdf").read_bytes())
    assert [float(each) for each in box[0]] == pytest.approx([width, height], abs=1)  # in points
    shape = [int.from_bytes((tmp_path / "made.png").read_bytes()[start : start + 4]) for start in (16, 20)]
    assert shape == pytest.approx([each * STYLES[style].png_ppi / 72 for each in (width, height)], abs=9)


def test_difficulties_share_a_short_key(results: Results) -> None:
    for name in ("forced_exits", "exit_distributions", "signals"):
        assert key_of(figure_of(OVERVIEW, results, name)) == ["1", "2", "3", "4"]


def by_levels(count: int, first: float = 1.0) -> Binned:
    """Difficulties of 10, 20, ... examples, whose value at loop t is (level + t) / 100 within a hundredth."""
    levels = [first + place for place in range(count)]
    values = [[(level + loop) / 100 for loop in (1, 2, 3)] for level in levels]
    low, high = ([[value + off for value in row] for row in values] for off in (-0.01, 0.01))
    return Binned(levels, [10 * (place + 1) for place in range(count)], values, low, high)


def test_many_difficulties_are_joined_until_their_lines_can_be_told_apart() -> None:
    """Weighted by their examples; over seeds the band is that of the joined means."""
    table = by_levels(24)
    made = difficulty_chart([Binning("length", "accuracy", [table])])
    assert made is not None
    figure = made(STYLES["page"])
    names = [f"{first} to {first + 2}" for first in range(1, 24, 3)]
    assert key_of(figure) == names
    assert "joined" in foot_of(figure)
    (panel,) = (each for each in figure["vconcat"][0]["concat"] if "title" in each)
    rows = {(row["level"], row["loop"]): row for row in panel["data"]["values"]}
    assert len(rows) == 8 * 3
    last = rows[23.0, 2]  # 22, 23 and 24
    assert last["value"] == pytest.approx((220 * 24 + 230 * 25 + 240 * 26) / 690 / 100)
    assert last["high"] - last["value"] == pytest.approx(0.01 * np.sqrt(220**2 + 230**2 + 240**2) / 690)
    assert last["value"] - last["low"] == pytest.approx(last["high"] - last["value"])
    other = msgspec.structs.replace(table, values=[[value + 0.1 for value in row] for row in table.values])
    over = {(row["level"], row["loop"]): row for row in Binning("", "", [table, other]).rows(defaultdict(str))}
    assert over[23.0, 2]["high"] - over[23.0, 2]["low"] == pytest.approx(0.1)
    assert key_of(drawn_difficulties(Binning("", "", [by_levels(10)]))) == [str(level) for level in range(1, 11)]


def drawn_difficulties(panel: Binning) -> dict[str, Any]:
    made = difficulty_chart([panel])
    assert made is not None
    return made(STYLES["page"])


@pytest.mark.parametrize(("known", "beyond"), [(5, 4), (7, 6), (10, 4), (11, 3), (40, 12)])
def test_the_key_of_an_extrapolation_has_the_last_difficulty_of_training(known: int, beyond: int) -> None:
    """And no line joins difficulties on both sides of it."""
    table = continued(by_levels(known), by_levels(beyond, known + 1.0))
    panel = Binning("", "", [table], trained=float(known))
    names = key_of(drawn_difficulties(panel))
    assert len([name for name in names if name.endswith(f"{known} (last of training)")]) == 1
    assert len(names) <= 10
    assert names[-1] == f"{known + beyond}"
    assert {place for line in panel.difficulties for place in line.places} == set(range(known + beyond))
    assert not [line for line in panel.difficulties if line.places[0] < known <= line.places[-1]]


def luminance(colour: str) -> float:
    channels = np.array([*bytes.fromhex(colour[1:])]) / 255
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    return float(linear @ (0.2126, 0.7152, 0.0722))


def test_difficulties_and_notes_are_legible_on_a_dark_ground() -> None:
    ground = luminance("#14181d")
    for colour in (GREY, *shades_of([float(level) for level in range(50)]).values()):
        assert (luminance(DARK[colour]) + 0.05) / (ground + 0.05) >= 3  # what WCAG asks of graphics


def test_nothing_is_said_to_be_by_difficulty_where_there_is_none(results: Results) -> None:
    splits = enumerate(("validation", "test"))
    both = [random_trajectory(seed, rows=60, split=split, difficulty=None) for seed, split in splits]
    without = analyse_models([ModelRecordings("a", *both)], None)[0]
    for models, said in ((results, True), (without, False)):
        made = OVERVIEW.make(models, ["forced_exits", "exit_distributions", "signals"])
        assert len(made) == 3
        assert {"by difficulty" in f"{product.title} {product.note}" for product in made} == {said}
