"""Reports for the tests of the page: of random recordings, whole or partial, harmless or hostile."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from conftest import random_trajectory
from simulated import pair

import loopscope as ls
from loopscope.analysis.model_analysis import ModelRecordings, analyse_models
from loopscope.analysis.schema import Results
from loopscope.paper.counterparts import PRODUCTS
from loopscope.report.figure_style import STYLES
from loopscope.report.products import Catalogue
from loopscope.report.tables import Table
from loopscope.report.write import write_report

TARGETS = [0.6, 0.9]
HOSTILE = (
    "<img src=x onerror=\"alert('x')\">",
    "</script><script>window.hacked = 1; alert(1)</script>",
    "{{ 7 * 7 }} {% raw %} ${7*7}",
    "a \"quoted\" & 'single' \\ back|pipe, comma; $math$ _under_ #hash",
    "\u202eright to left\u202c \u200f\u05d0\u05d1\u05d2 \u0000\u0007",
    "=cmd|' /C calc'!A0",
    "`tick` _edge_ [x](javascript:alert(1)) *b* \\| &lt; \x1b[31m\r\nline",
)


def texts(rows: int) -> list[str]:
    return [f"- {row} 1" for row in range(rows)]


def source(name: str, seed: int, **changes: object) -> ModelRecordings:
    """Validation and test recordings of one model."""
    rows = changes.get("rows", 200)
    assert isinstance(rows, int)
    fields: dict[str, Any] = {"examples": texts(rows), **changes}
    others = fields | {"examples": fields["examples"] and [f"validation {text}" for text in fields["examples"]]}
    return ModelRecordings(
        name,
        random_trajectory(seed=10 + seed, split="validation", **others),
        random_trajectory(seed=20 + seed, split="test", **fields),
    )


def with_policy(made: ModelRecordings, readout: str = "margin") -> ModelRecordings:
    """With a certified policy whose threshold is not on the grid."""
    policy = ls.calibrate(made.validation, readout=readout, max_drop=0.2, confidence=0.8)
    return ModelRecordings(made.name, made.validation, made.test, policies=[policy])


def two() -> list[ModelRecordings]:
    return [source("a", 0, gate_logits=None), with_policy(source("b", 1))]


def hostile() -> list[ModelRecordings]:
    examples = [HOSTILE[row % len(HOSTILE)] for row in range(200)]
    examples[:20] = [f"{row} " + "\u202e<b>x</b>" * 1000 for row in range(20)]  # 10,000 characters
    return [source(name, seed, examples=examples) for seed, name in enumerate((*HOSTILE, "y" * 10_000))]


def of_seeds(name: str, rows: int = 90, **changes: object) -> list[ModelRecordings]:
    """Two runs of ours that differ in their seed only."""
    made = []
    for seed in (0, 1):
        parts = {"task": {"name": "mano"}, "model": {"gate": "linear"}, "training": {"seed": seed}}
        run = {**parts, "objective": {"name": "learned_gate", "prior": "uniform", "geometric_lambda": 0.3, "beta": 0.1}}
        both = [replace(each, provenance={"run": run}) for each in pair(rows=rows, seed=seed, **changes)]
        made.append(ModelRecordings(f"{name}-{seed}", *both))
    return made


def never_exits(made: ls.Trajectory) -> ls.Trajectory:
    """Its gate never opens: no threshold of its grid is ever met."""
    return ls.Trajectory(logits=made.logits, labels=made.labels, split=made.split, gate_logits=np.full((200, 4), -50.0))


def predictions_only(made: ls.Trajectory) -> ls.Trajectory:
    return ls.Trajectory(
        predictions=made.predicted,
        labels=made.labels,
        split=made.split,
        signals={"entropy": ls.signal("entropy", made)},
    )


def table_of(products: Catalogue, results: Results, name: str) -> Table:
    (product,) = products.make(results, [name])
    assert product.table is not None
    assert all(len(row) == len(product.table.columns) for row in product.table.rows)
    return product.table


def figure_of(products: Catalogue, results: Results, name: str) -> dict[str, Any]:
    """What is drawn on the page."""
    (product,) = products.make(results, [name])
    assert product.figure is not None
    return product.figure(STYLES["page"])


def written(sources: Sequence[ModelRecordings], folder: Path, reference: str | None = None) -> tuple[Path, Results]:
    results, details = analyse_models(sources, reference, TARGETS)
    products = PRODUCTS.make(results, ["overview"])
    command = "loopscope report a b --out report"
    return write_report(results, details, products, folder, command, command), results
