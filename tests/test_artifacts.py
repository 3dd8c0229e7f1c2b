"""Artifacts: whole or not at all, plain safetensors, and every alteration noticed."""

import errno
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from loopscope.artifacts import (
    BusyError,
    atomic_file,
    atomic_folder,
    create_tensors,
    locked,
    map_tensors,
    only_writer,
    read_manifest,
    remove_leftovers,
    remove_scratch,
    save_tensors,
    write_bytes,
    write_manifest,
)
from loopscope.errors import UserError


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    write_bytes(file, b"old")
    with pytest.raises(RuntimeError), atomic_file(file) as scratch:
        scratch.write_bytes(b"half")
        raise RuntimeError
    assert file.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [file]


def test_a_failed_folder_leaves_the_old_folder(tmp_path: Path) -> None:
    folder = tmp_path / "thing"
    _make(folder, "old")
    with pytest.raises(RuntimeError), atomic_folder(folder, "thing") as scratch:
        (scratch / "data.txt").write_text("half")
        raise RuntimeError
    assert (folder / "data.txt").read_text() == "old"
    _make(folder, "new")
    assert (folder / "data.txt").read_text() == "new"
    assert list(tmp_path.iterdir()) == [folder]


def test_a_foreign_folder_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="not a thing"):
        _make(tmp_path / "mine", "new")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"


def test_leftovers_of_a_killed_writer_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".partial-abc").write_text("half")
    (tmp_path / ".partial-dir").mkdir()
    (tmp_path / "kept").write_text("whole")
    remove_scratch(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_a_killed_replacement_is_put_back_and_its_scratch_removed(tmp_path: Path) -> None:
    """Killed between its two renames: the old folder stands aside, the new one was never named."""
    _make(tmp_path / "thing", "old")
    (tmp_path / "thing").rename(tmp_path / ".replaced-thing")
    (tmp_path / ".partial-thing").mkdir()
    (tmp_path / ".partial-thing" / "data.txt").write_text("half")
    (tmp_path / ".partial-thing-2").mkdir()  # of another target, whose name begins alike
    with pytest.raises(RuntimeError), atomic_folder(tmp_path / "thing", "thing") as scratch:
        assert not list(scratch.iterdir())
        raise RuntimeError
    assert (tmp_path / "thing" / "data.txt").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".partial-thing-2", "thing"]


def test_what_a_finished_replacement_left_is_removed(tmp_path: Path) -> None:
    """Killed after its second rename: the old folder was not removed any more."""
    _make(tmp_path / "thing", "old")
    (tmp_path / "thing").rename(tmp_path / ".replaced-thing")
    _make(tmp_path / "other", "new")
    (tmp_path / "other").rename(tmp_path / "thing")
    remove_leftovers(tmp_path / "thing")
    assert [path.name for path in tmp_path.iterdir()] == ["thing"]
    assert (tmp_path / "thing" / "data.txt").read_text() == "new"


def test_a_target_has_one_writer_and_its_scratch_one_owner(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "thing", "thing") as scratch:
        (scratch / "data.txt").write_text("mine")
        with pytest.raises(BusyError, match="Another process is writing .*thing; wait"):
            _make(tmp_path / "thing", "theirs")
        remove_scratch(tmp_path)
        remove_leftovers(tmp_path / "thing")
        _make(tmp_path / "thing-2", "another")
        assert (scratch / "data.txt").read_text() == "mine"
        write_manifest(scratch, "thing", 1, {}, {})
    assert read_manifest(tmp_path / "thing", "thing", 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["thing", "thing-2"]


def test_writers_of_one_file_wait_for_each_other(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: write_bytes(file, bytes([number]) * 5000), range(200)))
    assert len(set(file.read_bytes())) == 1
    assert list(tmp_path.iterdir()) == [file]


def test_a_scratch_that_vanishes_takes_no_artifacts_place(tmp_path: Path) -> None:
    _make(tmp_path / "thing", "old")
    with (
        pytest.raises(UserError, match="removed while it was written"),
        atomic_folder(tmp_path / "thing", "thing") as s,
    ):
        shutil.rmtree(s)
        write_bytes(s / "data.txt", b"made again")
    assert (tmp_path / "thing" / "data.txt").read_text() == "old"
    with pytest.raises(UserError, match="data.txt vanished"), atomic_folder(tmp_path / "thing", "thing") as scratch:
        write_manifest(scratch, "thing", 1, {}, {}, needed=["data.txt"])


def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path(os.devnull)):
        with pytest.raises(UserError, match="not a file that could be replaced"):
            write_bytes(path, b"x")


def test_one_process_writes_into_a_folder(tmp_path: Path) -> None:
    with only_writer(tmp_path / "run"):
        with pytest.raises(BusyError), only_writer(tmp_path / "run"):
            pass
        assert (tmp_path / "run").is_dir()  # who is refused takes nothing along
        with pytest.raises(BusyError), only_writer(tmp_path / "run"):
            pass
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
    with pytest.raises(UserError, match="1 to 245 bytes"), atomic_folder(tmp_path / ("x" * 246), "thing"):
        raise AssertionError


def test_what_lost_its_manifest_is_replaced_if_it_holds_nothing_else(tmp_path: Path) -> None:
    for manifest in (b"\0" * 40, b"", b"{"):
        _make(tmp_path / "thing", "old")
        (tmp_path / "thing" / "manifest.json").write_bytes(manifest)
        (tmp_path / "thing" / "data.txt").unlink()
        with pytest.raises(UserError, match="not a thing"), atomic_folder(tmp_path / "thing", "thing", ["data.txt"]):
            raise AssertionError  # a manifest alone may be anybody's
        (tmp_path / "thing" / "data.txt").write_text("old")
        with atomic_folder(tmp_path / "thing", "thing", ["data.txt"]) as scratch:
            write_manifest(scratch, "thing", 1, {}, {})
        assert read_manifest(tmp_path / "thing", "thing", 1).files == {}


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, np.int64, np.bool_])
def test_tensor_files_are_plain_safetensors(tmp_path: Path, dtype: type) -> None:
    arrays = {
        "a": np.arange(24).reshape(2, 3, 4).astype(dtype),
        "b": np.ones(3, dtype),
        "empty": np.ones((0, 2), dtype),
    }
    save_tensors(tmp_path / "x.safetensors", arrays)
    for loaded in (load_file(tmp_path / "x.safetensors"), map_tensors(tmp_path / "x.safetensors")):
        assert set(loaded) == set(arrays)
        for name, array in arrays.items():
            assert loaded[name].dtype == dtype
            assert np.array_equal(loaded[name], array)


def test_created_tensors_write_through_and_mapped_ones_are_read_only(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    create_tensors(file, {"a": ((4, 2), np.float32)})["a"][1] = 7.0
    mapped = map_tensors(file)["a"]
    assert mapped.tolist() == [[0, 0], [7, 7], [0, 0], [0, 0]]
    with pytest.raises(ValueError, match="read-only"):
        mapped[0] = 1.0


def test_a_broken_tensor_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    for content in (b"", b"junk", b"\xff" * 64, b"\x02" + b"\0" * 7 + b"{}"[:1]):
        file.write_bytes(content)
        with pytest.raises(UserError, match=r"x\.safetensors"):
            map_tensors(file)


def test_every_alteration_is_noticed_and_named(tmp_path: Path) -> None:
    for change, words in [
        (lambda folder: (folder / "data.txt").write_text("loud"), "altered"),
        (lambda folder: (folder / "data.txt").write_text("qu"), "cut off or altered"),
        (lambda folder: (folder / "data.txt").unlink(), "missing"),
    ]:
        folder = tmp_path / words.replace(" ", "-")
        _make(folder, "quit")
        assert read_manifest(folder, "thing", 1).contents == {"size": 1}
        change(folder)
        with pytest.raises(UserError, match=f"data.txt.*{words}"):
            read_manifest(folder, "thing", 1)


def test_an_altered_manifest_is_noticed(tmp_path: Path) -> None:
    folder = tmp_path / "thing"
    _make(folder, "x")
    manifest = folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"size": 1', '"size": 2'))
    with pytest.raises(UserError, match="manifest.json was altered"):
        read_manifest(folder, "thing", 1)
    manifest.write_text("{")
    with pytest.raises(UserError, match="not a readable"):
        read_manifest(folder, "thing", 1)


def test_the_wrong_folder_is_explained(tmp_path: Path) -> None:
    _make(tmp_path / "thing", "x")
    for folder, kind, version, words in [
        (tmp_path / "nowhere", "thing", 1, "There is no folder"),
        (tmp_path, "thing", 1, "no manifest.json"),
        (tmp_path / "thing", "cup", 1, "is a thing, not a cup"),
        (tmp_path / "thing", "thing", 2, "schema version 1"),
    ]:
        with pytest.raises(UserError, match=words):
            read_manifest(folder, kind, version)


def _make(folder: Path, text: str) -> None:
    with atomic_folder(folder, "thing") as scratch:
        (scratch / "data.txt").write_text(text)
        write_manifest(scratch, "thing", 1, {"size": 1}, {"from": "a test"})


def test_a_folder_with_a_manifest_of_somebody_else_stays(tmp_path: Path) -> None:
    theirs = tmp_path / "extension"
    theirs.mkdir()
    for manifest in ('{"manifest_version": 3}', "", "{"):
        (theirs / "manifest.json").write_text(manifest)
        (theirs / "settings.json").write_text("years of work")
        with pytest.raises(UserError, match="not a thing"), atomic_folder(theirs, "thing", ["data.txt"]):
            raise AssertionError
        assert (theirs / "settings.json").read_text() == "years of work"


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


def test_a_reader_ends_a_replacement_that_was_killed(tmp_path: Path) -> None:
    _make(tmp_path / "thing", "old")
    (tmp_path / "thing").rename(tmp_path / ".replaced-thing")
    assert read_manifest(tmp_path / "thing", "thing", 1).contents == {"size": 1}
