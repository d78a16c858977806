"""Files and folders that are complete or not there; tests/checkpoint/test_store.py has kills and abandoned folders."""

import errno
import fcntl
import os
from unittest import mock

import pytest

from hf_bmtrain.engine.base.files import atomic_file, delete_abandoned, staged_folder
from log_lines import log_lines


def test_a_file_is_replaced_at_the_end(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with atomic_file(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    with pytest.raises(ZeroDivisionError), atomic_file(path) as temporary:
        temporary.write_text(str(1 / 0))
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("exists", [False, True])
def test_a_folder_is_there_at_the_end(tmp_path, exists):
    path = tmp_path / "folder"
    if exists:
        path.mkdir()
    with pytest.raises(ZeroDivisionError), staged_folder(path) as temporary:
        (temporary / "file").write_text(str(1 / 0))
    assert path.exists() == exists
    with staged_folder(path) as temporary:
        (temporary / "file").write_text("new")
        assert not (path / "file").exists()
    assert os.listdir(tmp_path) == ["folder"]
    assert (path / "file").read_text() == "new"


def test_a_folder_with_contents_is_not_replaced(tmp_path):
    path = tmp_path / "folder"
    path.mkdir()
    (path / "file").write_text("old")
    with pytest.raises(OSError, match="not empty"), staged_folder(path) as temporary:
        (temporary / "file").write_text("new")
    assert (path / "file").read_text() == "old"
    assert os.listdir(tmp_path) == ["folder"]


def test_what_is_in_place_is_not_an_error(tmp_path):
    """The new name cannot be flushed: `bmt.save` said that the earlier file was not changed."""
    flush = os.fsync

    def fail(handle):
        if os.readlink(f"/proc/self/fd/{handle}") == str(tmp_path):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        flush(handle)

    with mock.patch.object(os, "fsync", fail), log_lines() as lines:
        with atomic_file(tmp_path / "file") as temporary:
            temporary.write_text("new")
        with staged_folder(tmp_path / "folder"):
            pass
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]
    for name, line in zip(("file", "folder"), lines, strict=True):
        assert line.startswith(f"{tmp_path / name} is complete, but its folder could not be flushed to disk")


def test_a_folder_in_use_is_not_deleted(tmp_path, monkeypatch):
    """Another writer of the same path looks for abandoned folders while this one takes its lock."""
    path, lock = tmp_path / "numbers", fcntl.flock

    def late(file, operation):
        if operation == fcntl.LOCK_EX:
            delete_abandoned(path)
        lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with atomic_file(path) as temporary:
        temporary.write_text("1")
    assert path.read_text() == "1"
