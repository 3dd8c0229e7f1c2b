"""The numbers behind the claims table: what scripts/claims.py prints of the kept results, and what the docs say."""

import re
import runpy
import sys
from collections import Counter
from pathlib import Path

import pytest

from loopscope.paper.published import published

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "evidence" / "claims.md"


@pytest.fixture(scope="module")
def printed() -> dict[str, str]:
    """By section of the output."""
    captured = pytest.MonkeyPatch()
    lines: list[str] = []
    with captured.context() as patch:
        patch.setattr(sys, "argv", ["claims.py", str(ROOT / "docs" / "evidence" / "results.json.xz")])
        patch.setattr("builtins.print", lambda *words: lines.append(" ".join(map(str, words))))
        runpy.run_path(str(ROOT / "scripts" / "claims.py"), run_name="__main__")
    sections = re.split(r"^## ", "\n".join(lines), flags=re.MULTILINE)
    return {section.partition("\n")[0]: section for section in sections}


VERDICTS = [
    ("mano: marginal-utility", "utility exits earlier in 36 of 36", "in 36 of 36 pairs"),
    ("mano: marginal-utility", "selected points later 13, as late 1, of 36", "exit later in 13 of 36, earlier in 22"),
    ("mano: marginal-utility", "paper grid, D@95: utility less 31, ponder less 5", "the lower D@95 in 31 of 36"),
    ("mano: marginal-utility", "fine grid, D@95: utility less 8, ponder less 28", "the lower D@95 in 28 and"),
    ("mano: marginal-utility", "lowest threshold: ponder 24", "24 ponder gates, and of no utility gate"),
    ("mano: average loops", "b0.001-s0: paper's grid 5.32 to 6.00 loops", "5.32 to 6.00 loops with β 0.001"),
    ("mano: average loops", "uniform-linear-b0.5-s0: paper's grid 1.00 to 6.00 loops", "1.00 to 6.00 (0.5)"),
    ("mano: how many", "fixed priors, 0.99: best loop 8, margin 8, of 9", "the best loop of 8 of 9 fixed-prior runs"),
    ("mano: how many", "joint gates, 0.99: best loop 18, gate 19, of 20", "reaches it in 19 of 20"),
    ("mano: the fixed prior's margin", "1.37 [1.32, 1.41] against 1.54 [1.51, 1.59]", "1.37 [1.32, 1.41] against 1.54"),
    ("mano: the fixed prior's margin", "N/A (46%) against 1.75 [1.71, 1.79]", "98 % in 46 % of the resamples"),
    ("mano: the fixed prior's margin", "N/A against 2.02 [1.89, 2.99]", "the gate needs 1.75 and 2.02 loops"),
    ("mano: steps", "uniform-fixed-s0, margin falls in 9 of 25 (36 %)", "uniform: 36, 28, 24 %"),
    ("mano: steps", "geometric0.3-fixed-s2, margin falls in 5 of 25 (20 %)", "geometric: 32, 32, 20 %"),
    (
        "mano: what looks odd",
        "D@95 = D@98 of the own gate in 8 of 20",
        "This happens for 8 of our 20 jointly trained gates",
    ),
    ("mano: what looks odd", "that reaches 0.99: 3.50 ± 0.71 (2 of 3)", "need a fixed depth of 3.50 ± 0.71"),
]


@pytest.mark.parametrize(("section", "found", "said"), VERDICTS, ids=[found for _, found, _ in VERDICTS])
def test_a_corrected_verdict_has_its_numbers(printed: dict[str, str], section: str, found: str, said: str) -> None:
    (text,) = [text for name, text in printed.items() if name.startswith(section)]
    assert found in text
    assert said in " ".join(PAGE.read_text(encoding="utf-8").split())


def test_every_mean_over_seeds_in_the_docs_is_printed(printed: dict[str, str]) -> None:
    means = set(re.findall(r"\d+\.\d+ ± \d+\.\d+", PAGE.read_text(encoding="utf-8")))
    assert len(means) > 50
    text = "\n".join(printed.values())
    assert [mean for mean in means if mean not in text] == []


def test_the_docs_count_the_places_where_the_paper_disagrees_with_itself() -> None:
    """Without those that LoopScope's own results show, too."""
    kinds = Counter(found.kind for found in published().inconsistencies)
    counted = f"{kinds['contradiction']} contradictions, {kinds['tension']} tensions, {kinds['unstated']} things"
    assert f"lists {kinds.total()} places ({counted}" in " ".join(PAGE.read_text(encoding="utf-8").split())
    listed = {found.key for found in published().inconsistencies}
    assert not listed & {"three_readouts_alike", "same_depth_for_95_and_98", "seeds_behind_fixed_depth"}
