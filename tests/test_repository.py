"""What is tracked: can every clone follow its symbolic links?"""

import os
import shutil
import subprocess
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parents[1]
LINK = "120000"  # git's mode of a symbolic link


def git(folder: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=True).stdout


def stray_links(folder: Path) -> list[str]:
    """A sentence about every tracked link that leaves the repository or leads to nothing that is tracked."""
    links: dict[str, str] = {}  # to what is written in them
    targets: set[PurePosixPath] = set()  # files, and the folders that they are in
    for entry in git(folder, "ls-files", "-s", "-z").split("\0")[:-1]:
        about, name = entry.split("\t", 1)
        mode, blob, _ = about.split()
        if mode == LINK:
            links[name] = git(folder, "cat-file", "blob", blob)
        else:
            targets |= {PurePosixPath(name), *PurePosixPath(name).parents}
    root = os.path.realpath(folder)
    sentences = []
    for name, written in links.items():
        target = PurePosixPath(os.path.relpath(os.path.realpath(folder / name), root))
        if PurePosixPath(written).is_absolute() or target.parts[:1] == ("..",):
            sentences.append(f"{name} points outside the repository: {written}")
        elif target not in targets:
            sentences.append(f"{name} points to nothing that is tracked: {written}")
    return sentences


def is_checkout(folder: Path) -> bool:
    try:
        return Path(git(folder, "rev-parse", "--show-toplevel").rstrip("\n")) == folder.resolve()
    except (FileNotFoundError, subprocess.CalledProcessError):  # no git, or none that reads this folder
        return False


def test_every_tracked_link_can_be_followed() -> None:
    if not is_checkout(ROOT):
        pytest.skip("this is no git checkout: nothing says what is tracked")
    assert stray_links(ROOT) == []


def test_links_that_a_clone_cannot_follow_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("git") is None:
        pytest.skip("there is no git")
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)  # a hook of git's has them, and they name another repository
    folder = tmp_path / "a repository"
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "file").touch()
    (folder / "made").touch()
    (folder / ".gitignore").write_text("made\n")
    assert not is_checkout(folder)
    git(folder, "init", "--quiet")
    assert is_checkout(folder)
    outside, nothing = "points outside the repository", "points to nothing that is tracked"
    inside = str(folder / "data" / "file")  # which every other clone does not have
    wrong = {"../beside": outside, "/nowhere": outside, inside: outside, "missing": nothing, "made": nothing}
    for number, target in enumerate(["data/file", "data", ".", "./data/../data/file", *wrong]):
        (folder / f"link-{number}").symlink_to(target)
    git(folder, "add", ".")
    expected = [f"link-{number} {words}: {target}" for number, (target, words) in enumerate(wrong.items(), start=4)]
    assert stray_links(folder) == expected
