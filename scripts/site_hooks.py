"""What does the site of the docs need beyond docs/? The README as its first page, and links that lead out of docs/."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
OUTSIDE = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}
"""Pages of the repository's root, by what they are called on the site."""
_LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?(\))")


def on_files(files: Files, config: Any) -> Files:
    for name, page in OUTSIDE.items():
        text = _rewritten((ROOT / name).read_text(encoding="utf-8"), ROOT, config["repo_url"])
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    path = page.file.abs_src_path
    if path is None or page.file.src_uri.endswith(".ipynb"):
        return markdown  # generated above, or a notebook
    return _rewritten(markdown, Path(path).parent, config["repo_url"])


def _rewritten(markdown: str, folder: Path, repository: str) -> str:
    """Links to what the site has become links to its pages; whatever else is in the repository is shown there."""

    def replaced(found: re.Match[str]) -> str:
        target = (folder / found[2]).resolve()
        if not target.exists():
            return found[0]  # which the strict build names
        name = target.relative_to(ROOT).as_posix()
        if name in OUTSIDE or target.is_relative_to(ROOT / "docs"):
            where = ROOT / "docs" / OUTSIDE[name] if name in OUTSIDE else target
            home = ROOT / "docs" if folder == ROOT else folder
            if where.is_dir():
                where = where / "README.md"
            link = Path(*[".."] * len(home.relative_to(ROOT / "docs").parts), where.relative_to(ROOT / "docs"))
            return f"{found[1]}{link.as_posix()}{found[3] or ''}{found[4]}"
        kind = "tree" if target.is_dir() else "blob"
        return f"{found[1]}{repository}/{kind}/main/{name}{found[3] or ''}{found[4]}"

    return _LINK.sub(replaced, markdown)
