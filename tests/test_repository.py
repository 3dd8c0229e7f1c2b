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


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One with a tracked file, an ignored one, and a file beside the repository."""
    if shutil.which("git") is None:
        pytest.skip("there is no git")
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)  # a hook of git's has them, and they name another repository
    folder = tmp_path / "a repository"
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "file").touch()
    (folder / "made").touch()
    (folder / ".gitignore").write_text("made\n")
    (tmp_path / "beside").touch()
    assert not is_checkout(folder)
    git(folder, "init", "--quiet")
    assert is_checkout(folder)
    return folder


@pytest.mark.parametrize("target", ["data/file", "data", ".", "./data/../data/file"])
def test_a_link_within_the_repository_is_fine(repository: Path, target: str) -> None:
    (repository / "link").symlink_to(target)
    (repository / "data" / "link to a link").symlink_to("../link")
    git(repository, "add", ".")
    assert stray_links(repository) == []


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("../beside", "points outside the repository"),
        ("/", "points outside the repository"),
        ("/nowhere/sudo", "points outside the repository"),
        ("missing", "points to nothing that is tracked"),
        ("made", "points to nothing that is tracked"),
        ("link", "points to nothing that is tracked"),  # to itself
    ],
)
def test_a_link_that_a_clone_cannot_follow_is_named(repository: Path, target: str, words: str) -> None:
    (repository / "link").symlink_to(target)
    assert stray_links(repository) == []  # it is not tracked yet
    git(repository, "add", ".")
    assert stray_links(repository) == [f"link {words}: {target}"]


def test_an_absolute_link_into_the_repository_is_refused(repository: Path) -> None:
    """It leads to this clone from every other one."""
    (repository / "link").symlink_to(repository / "data" / "file")
    git(repository, "add", ".")
    assert "link points outside the repository" in stray_links(repository)[0]
