"""Files and folders: whole or not at all, one writer at a time, nothing left behind."""

import errno
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from loopscope.errors import UserError
from loopscope.files import (
    BusyError,
    atomic_file,
    atomic_folder,
    locked,
    only_writer,
    remove_leftovers,
    remove_scratch,
    write_bytes,
)


def anything(path: Path) -> None:
    """Whatever is there may be replaced."""


def _make(folder: Path, text: str) -> None:
    with atomic_folder(folder, anything) as scratch:
        (scratch / "data.txt").write_text(text)


def test_a_failed_write_leaves_what_was_there(tmp_path: Path) -> None:
    file, folder = tmp_path / "a.json", tmp_path / "thing"
    write_bytes(file, b"old")
    _make(folder, "old")
    with pytest.raises(RuntimeError), atomic_file(file) as scratch:
        scratch.write_bytes(b"half")
        raise RuntimeError
    with pytest.raises(RuntimeError), atomic_folder(folder, anything) as scratch:
        (scratch / "data.txt").write_text("half")
        raise RuntimeError
    assert (file.read_bytes(), (folder / "data.txt").read_text()) == (b"old", "old")
    _make(folder, "new")
    assert (folder / "data.txt").read_text() == "new"
    assert sorted(tmp_path.iterdir()) == [file, folder]


def test_what_a_killed_replacement_left_is_put_back_or_removed(tmp_path: Path) -> None:
    """Killed between its two renames: the old folder stands aside, the new one was never named. Then: after both."""
    _make(tmp_path / "thing", "old")
    (tmp_path / "thing").rename(tmp_path / ".replaced-thing")
    (tmp_path / ".partial-thing").mkdir()
    (tmp_path / ".partial-thing" / "data.txt").write_text("half")
    (tmp_path / ".partial-thing-2").mkdir()  # of another target, whose name begins alike
    with pytest.raises(RuntimeError), atomic_folder(tmp_path / "thing", anything) as scratch:
        assert not list(scratch.iterdir())
        raise RuntimeError
    assert (tmp_path / "thing" / "data.txt").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".partial-thing-2", "thing"]
    (tmp_path / "thing").rename(tmp_path / ".replaced-thing")
    _make(tmp_path / "other", "new")
    (tmp_path / "other").rename(tmp_path / "thing")
    remove_leftovers(tmp_path / "thing")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".partial-thing-2", "thing"]
    assert (tmp_path / "thing" / "data.txt").read_text() == "new"
    (tmp_path / ".partial-file").write_text("half")
    remove_scratch(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thing"]


def test_a_target_has_one_writer_and_its_scratch_one_owner(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "thing", anything) as scratch:
        (scratch / "data.txt").write_text("mine")
        with pytest.raises(BusyError, match="Another process is writing .*thing; wait"):
            _make(tmp_path / "thing", "theirs")
        remove_scratch(tmp_path)
        remove_leftovers(tmp_path / "thing")
        _make(tmp_path / "thing-2", "another")
        assert (scratch / "data.txt").read_text() == "mine"
    assert (tmp_path / "thing" / "data.txt").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["thing", "thing-2"]


def test_writers_of_one_file_wait_for_each_other(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: write_bytes(file, bytes([number]) * 5000), range(60)))
    assert len(set(file.read_bytes())) == 1
    assert list(tmp_path.iterdir()) == [file]


def test_a_scratch_that_vanishes_takes_no_folders_place(tmp_path: Path) -> None:
    _make(tmp_path / "thing", "old")
    with pytest.raises(UserError, match="removed while"), atomic_folder(tmp_path / "thing", anything) as scratch:
        shutil.rmtree(scratch)
        write_bytes(scratch / "data.txt", b"made again")
    assert (tmp_path / "thing" / "data.txt").read_text() == "old"


def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path(os.devnull)):
        with pytest.raises(UserError, match="not a file that could be replaced"):
            write_bytes(path, b"x")


def test_one_process_writes_into_a_folder(tmp_path: Path) -> None:
    with only_writer(tmp_path / "run"):
        for _ in range(2):
            with pytest.raises(BusyError), only_writer(tmp_path / "run"):
                pass
            assert (tmp_path / "run").is_dir()  # who is refused takes nothing along
    assert not list(tmp_path.iterdir())  # nothing was put there


def test_a_filesystem_without_locks_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(handle: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", none)
    with pytest.raises(UserError, match="has no locks"):
        write_bytes(tmp_path / "a", b"x")
    assert not (tmp_path / "a").exists()


def test_a_name_that_leaves_no_room_for_a_prefix_is_refused_before_the_work(tmp_path: Path) -> None:
    _make(tmp_path / ("x" * 245), "longest")
    _make(tmp_path / ("x" * 245), "again")
    with pytest.raises(UserError, match="1 to 245 bytes"), atomic_folder(tmp_path / ("x" * 246), anything):
        raise AssertionError


def test_a_folder_in_a_parent_that_cannot_be_written_can(tmp_path: Path) -> None:
    """A mounted folder, as a container has it: its lock lies inside; by another name it is the same lock."""
    folder = tmp_path / "volume" / "run"
    folder.mkdir(parents=True)
    (tmp_path / "link").symlink_to(folder)
    with only_writer(folder):
        assert sorted(path.name for path in folder.parent.iterdir()) == ["run"]
        with pytest.raises(BusyError), only_writer(tmp_path / "link"):
            pass


def test_a_lock_that_somebody_removed_is_not_removed_from_the_next(tmp_path: Path) -> None:
    first, second = locked(tmp_path / "a"), locked(tmp_path / "a")
    with first:
        (tmp_path / ".lock-a").unlink()
        second.__enter__()
    assert (tmp_path / ".lock-a").exists()
    second.__exit__(None, None, None)
    assert not list(tmp_path.iterdir())
