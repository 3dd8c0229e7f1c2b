"""How do docs/ and the README become a site? They are laid out in build/docs, and Zensical builds site/ from there.

What lies outside docs/ becomes a page too, or a link to the repository; the tutorial is executed, and shown with what
it printed; tables that a study wrote are kept packed (`.md.xz`) and become pages. A broken link is an error. The site
needs no server: open site/index.html, search included.
"""

import lzma
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
DOCS, LAID_OUT, SITE = ROOT / "docs", ROOT / "build" / "docs", ROOT / "site"
WORKER = Path("assets", "file_worker.js")
REPOSITORY = "https://github.com/loopscope/loopscope"
OUTSIDE = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Pages of the repository's root, by what they are called on the site."""
LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?(\))")


def main() -> int:
    lay_out()
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    for page in SITE.rglob("*.html"):
        make_offline(page)
    shutil.copy(ROOT / "scripts" / WORKER.name, SITE / WORKER)
    return code


def lay_out() -> None:
    """Writes build/docs."""
    shutil.rmtree(LAID_OUT, ignore_errors=True)
    shutil.copytree(DOCS, LAID_OUT, ignore=shutil.ignore_patterns("*.ipynb", "*.md.xz", "report.html", "results.json"))
    for packed in DOCS.rglob("*.md.xz"):
        (LAID_OUT / packed.relative_to(DOCS).with_suffix("")).write_bytes(lzma.decompress(packed.read_bytes()))
    for page in DOCS.rglob("*.md"):
        text = with_links(page.read_text(encoding="utf-8"), page.parent)
        (LAID_OUT / page.relative_to(DOCS)).write_text(text, encoding="utf-8")
    for name, page_name in OUTSIDE.items():
        text = with_links((ROOT / name).read_text(encoding="utf-8"), ROOT)
        (LAID_OUT / page_name).write_text(text, encoding="utf-8")
    for notebook in DOCS.rglob("*.ipynb"):
        (LAID_OUT / notebook.relative_to(DOCS).with_suffix(".md")).write_text(executed(notebook), encoding="utf-8")


def with_links(markdown: str, folder: Path) -> str:
    """The links of a text in `folder`, as the site has them; what the site has not is shown by the repository."""

    def replaced(found: re.Match[str]) -> str:
        target = (folder / found[2]).resolve()
        if not target.exists():
            return found[0]  # which the build will name
        name = target.relative_to(ROOT).as_posix()
        if name in OUTSIDE:
            target = DOCS / OUTSIDE[name]
        if not target.is_relative_to(DOCS):
            kind = "tree" if target.is_dir() else "blob"
            return f"{found[1]}{REPOSITORY}/{kind}/main/{name}{found[3] or ''}{found[4]}"
        where = (target / "README.md" if target.is_dir() else target).relative_to(DOCS)
        if where.suffix == ".ipynb":
            where = where.with_suffix(".md")
        if where.name.endswith(".md.xz"):
            where = where.with_suffix("")
        up = [".."] * (0 if folder == ROOT else len(folder.relative_to(DOCS).parts))
        return f"{found[1]}{Path(*up, where).as_posix()}{found[3] or ''}{found[4]}"

    return LINK.sub(replaced, markdown)


def make_offline(page: Path) -> None:
    """The one script that a page would fetch from elsewhere, for its search without a server, comes from the site."""
    up = [".."] * (len(page.relative_to(SITE).parts) - 1)
    text = page.read_text(encoding="utf-8")
    local = text.replace("https://unpkg.com/iframe-worker/shim", Path(*up, WORKER).as_posix())
    if fetched := re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=[\"']?https?://[^\"'> ]+", local):
        raise SystemExit(f"{page} fetches what is not on the site: {fetched[0]}")
    page.write_text(local, encoding="utf-8")


def executed(path: Path) -> str:
    """A notebook as Markdown, with what its cells print now."""
    notebook: Any = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
    parts = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        printed = "".join(each.get("text") or each.get("data", {}).get("text/plain", "") for each in cell.outputs)
        if printed.strip():
            parts.append(f"```text\n{printed.rstrip()}\n```")
    where = path.relative_to(ROOT).as_posix()
    source = f"[This page is a notebook]({REPOSITORY}/blob/main/{where}), executed when the site is built."
    return "\n\n".join([parts[0], source, *parts[1:]]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
