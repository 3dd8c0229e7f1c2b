"""Artifacts: plain safetensors, replaced by their own kind only, and every alteration noticed."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from loopscope.artifacts import (
    artifact_folder,
    create_tensors,
    map_tensors,
    read_manifest,
    save_tensors,
    write_manifest,
)
from loopscope.errors import UserError


def _make(folder: Path, text: str) -> None:
    with artifact_folder(folder, "thing") as scratch:
        (scratch / "data.txt").write_text(text)
        write_manifest(scratch, "thing", 1, {"size": 1}, {"from": "a test"})


@pytest.mark.parametrize("manifest", [None, '{"manifest_version": 3}', "", "{"])
def test_a_foreign_folder_is_not_replaced(manifest: str | None, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    if manifest is not None:
        (tmp_path / "mine" / "manifest.json").write_text(manifest)
    with pytest.raises(UserError, match="not a thing"), artifact_folder(tmp_path / "mine", "thing", ["data.txt"]):
        raise AssertionError
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"


def test_an_artifact_is_sealed_only_with_all_it_must_have(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="data.txt vanished"), artifact_folder(tmp_path / "thing", "thing") as scratch:
        write_manifest(scratch, "thing", 1, {}, {}, needed=["data.txt"])


def test_what_lost_its_manifest_is_replaced_if_it_holds_nothing_else(tmp_path: Path) -> None:
    for manifest in (b"\0" * 40, b"", b"{"):
        _make(tmp_path / "thing", "old")
        (tmp_path / "thing" / "manifest.json").write_bytes(manifest)
        (tmp_path / "thing" / "data.txt").unlink()
        with pytest.raises(UserError, match="not a thing"), artifact_folder(tmp_path / "thing", "thing", ["data.txt"]):
            raise AssertionError  # a manifest alone may be anybody's
        (tmp_path / "thing" / "data.txt").write_text("old")
        with artifact_folder(tmp_path / "thing", "thing", ["data.txt"]) as scratch:
            write_manifest(scratch, "thing", 1, {}, {})
        assert read_manifest(tmp_path / "thing", "thing", 1).files == {}


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, np.int64, np.bool_])
def test_tensor_files_are_plain_safetensors(tmp_path: Path, dtype: type) -> None:
    arrays = {"a": np.arange(24).reshape(2, 3, 4).astype(dtype), "b": np.ones(3, dtype), "c": np.ones((0, 2), dtype)}
    save_tensors(tmp_path / "x.safetensors", arrays)
    for loaded in (load_file(tmp_path / "x.safetensors"), map_tensors(tmp_path / "x.safetensors")):
        assert set(loaded) == set(arrays)
        for name, array in arrays.items():
            assert loaded[name].dtype == dtype
            assert np.array_equal(loaded[name], array)


def test_created_tensors_write_through_mapped_ones_are_read_only_and_a_broken_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    create_tensors(file, {"a": ((4, 2), np.float32)})["a"][1] = 7.0
    mapped = map_tensors(file)["a"]
    assert mapped.tolist() == [[0, 0], [7, 7], [0, 0], [0, 0]]
    with pytest.raises(ValueError, match="read-only"):
        mapped[0] = 1.0
    for content in (b"", b"junk", b"\xff" * 64, b"\x02" + b"\0" * 7 + b"{}"[:1]):
        file.write_bytes(content)
        with pytest.raises(UserError, match=r"x\.safetensors"):
            map_tensors(file)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda folder: (folder / "data.txt").write_text("loud"), "data.txt.*altered"),
        (lambda folder: (folder / "data.txt").write_text("qu"), "data.txt.*cut off or altered"),
        (lambda folder: (folder / "data.txt").unlink(), "data.txt.*missing"),
        (lambda folder: _edit(folder / "manifest.json", '"size": 1', '"size": 2'), "manifest.json was altered"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "not a readable"),
    ],
)
def test_every_alteration_is_noticed_and_named(change: Callable[[Path], object], words: str, tmp_path: Path) -> None:
    _make(tmp_path / "thing", "quit")
    assert read_manifest(tmp_path / "thing", "thing", 1).contents == {"size": 1}
    change(tmp_path / "thing")
    with pytest.raises(UserError, match=words):
        read_manifest(tmp_path / "thing", "thing", 1)


def _edit(file: Path, old: str, new: str) -> None:
    file.write_text(file.read_text().replace(old, new))


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


def test_a_reader_ends_a_replacement_that_was_killed(tmp_path: Path) -> None:
    _make(tmp_path / "thing", "old")
    (tmp_path / "thing").rename(tmp_path / ".replaced-thing")
    assert read_manifest(tmp_path / "thing", "thing", 1).contents == {"size": 1}
