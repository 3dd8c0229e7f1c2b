"""Is every page and every public name on the site, does the tutorial run, and is no link of the site broken?"""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

import loopscope as ls
from loopscope.analysis.schema import RESULTS_SCHEMA
from loopscope.artifacts import MANIFEST
from loopscope.certify.live_runs import LIVE, LIVE_FILES, LIVE_SCHEMA
from loopscope.certify.monitor import MonitorFile
from loopscope.learned.fitted_gate import GATE, GATE_SCHEMA, GATE_WEIGHTS
from loopscope.models.checkpoint_folder import CONFIG, HASHES, INDEX, WEIGHTS
from loopscope.policy import POLICY_SCHEMA, PolicyFile
from loopscope.report.write import PAGE, RESULTS, TABLES
from loopscope.scope import Scope
from loopscope.training.run_folder import DATA_FILE, METRICS_FILE, STATE_FILE
from loopscope.trajectory import RECORDING, RECORDING_FILES, RECORDING_SCHEMA
from scripts.reference import SETTINGS, meanings, pages

ROOT = Path(__file__).parents[1]


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = set(re.findall(r": ([\w/-]+)\.md$", navigation, re.MULTILINE))
    docs = ROOT / "docs"
    pages = {
        path.relative_to(docs).with_suffix("").as_posix()
        for kind in ("md", "ipynb")
        for path in docs.rglob(f"*.{kind}")
    }
    packed = {path.relative_to(docs).as_posix().removesuffix(".md.xz") for path in docs.rglob("*.md.xz")}
    assert pages | packed | {"index", "contributing", "changelog"} == listed


def test_every_public_name_is_in_the_reference() -> None:
    found = re.findall(
        r"^::: ([\w.]+)$", (ROOT / "docs" / "reference" / "python.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    for path in found:
        module, _, name = path.rpartition(".")
        assert find_spec(module) is not None, path
        assert hasattr(sys.modules.get(module) or __import__(module, fromlist=[name]), name), path
    assert sorted(path.rpartition(".")[2] for path in found) == ls.__all__


def test_generated_pages_are_current() -> None:
    """`make docs` writes them, or: python scripts/reference.py"""
    for name, text in pages().items():
        assert (ROOT / "docs" / "reference" / name).read_text(encoding="utf-8") == text, name


def test_every_setting_has_a_meaning() -> None:
    for kind in (kind for _, tables in SETTINGS.values() for _, kind in tables):
        assert set(kind.__struct_fields__) <= meanings(kind).keys(), kind


def test_every_file_is_described() -> None:
    page = (ROOT / "docs" / "reference" / "files.md").read_text(encoding="utf-8")
    files = (*RECORDING_FILES, *LIVE_FILES, GATE_WEIGHTS, MANIFEST, CONFIG, WEIGHTS, INDEX, HASHES)
    for name in (*files, STATE_FILE, METRICS_FILE, DATA_FILE, RESULTS, TABLES, PAGE):
        assert f"`{name}`" in page, name
    for words in (
        f"`{RECORDING}` {RECORDING_SCHEMA}, `{LIVE}` {LIVE_SCHEMA} or `{GATE}` {GATE_SCHEMA}",
        f"one JSON file, schema {POLICY_SCHEMA}.",
        f"one JSON file, schema {get_args(get_type_hints(MonitorFile)['schema_version'])[0]},",
        f"`results.json` (schema {RESULTS_SCHEMA})",
        *(f"`{name}`" for name in (*PolicyFile.__struct_fields__, *Scope.__struct_fields__)),
    ):
        assert words in page, words


@pytest.mark.filterwarnings("ignore")  # of the kernel's libraries; in its own process nothing is an error
def test_the_tutorial_runs(tmp_path: Path) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.read(ROOT / "docs" / "start" / "tutorial.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "outputs are made when the site is built"
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": tmp_path}}).execute()
    printed = "".join(each.get("text", "") for cell in notebook.cells for each in cell.get("outputs", ()))
    assert "The readout is to blame" in printed
    assert printed.count("Kept: ") == 2


@pytest.mark.long
def test_the_site_is_built_strictly() -> None:
    for module in ("zensical", "mkdocstrings", "nbclient"):
        pytest.importorskip(module)
    built = subprocess.run([sys.executable, ROOT / "scripts" / "site.py"], capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    site = ROOT / "site"
    assert "With probability 95 %" in (site / "start" / "tutorial.html").read_text(encoding="utf-8")
    assert "ls.diagnose" in (site / "index.html").read_text(encoding="utf-8")
    assert 'id="loopscope.trajectory.Trajectory"' in (site / "reference" / "python.html").read_text(encoding="utf-8")
    assert "Paired comparisons" in (site / "evidence" / "tables.html").read_text(encoding="utf-8")
    assert (site / "search.js").stat().st_size > 100_000  # what a search without a server reads
