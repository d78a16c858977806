"""Files and folders that are complete or not there; tests/checkpoint/test_store.py has kills and abandoned folders."""

import os

import pytest

from hf_bmtrain.engine.base.files import atomic_file, staged_folder


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
