"""Page-locked memory: as much as asked for, given back when the last view is gone, refused with the numbers."""

from pathlib import Path
from unittest import mock

import pytest
import torch

from cases import full
from hf_bmtrain.engine.base import pinned

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


@full
def test_memory_is_zero_and_writable():
    memory = pinned.pinned_bytes(1 << 20, CPU, "a test")
    assert memory.shape == (1 << 20,)
    assert not memory.any()
    memory.view(torch.float32).fill_(1.5)
    assert pinned.pinned_bytes(0, GPU, "nothing").shape == (0,)


@full
def test_it_is_unlocked_after_the_last_view():
    with mock.patch.object(pinned, "register") as register, mock.patch.object(pinned, "unregister") as unregister:
        memory = pinned.pinned_bytes(8192, GPU, "a test")
        pointer = memory.data_ptr()
        register.assert_called_once_with(pointer, 8192, GPU)
        view = memory[100:200].view(torch.float32)
        del memory
        view.fill_(1.0)
        unregister.assert_not_called()
        del view
        unregister.assert_called_once_with(pointer, GPU)


def test_it_is_not_given_back_before_it_is_unlocked():
    """Another thread that allocates meanwhile would get addresses that CUDA still holds locked."""
    mapped = []

    def look(pointer, device):
        mapped.append(f"{pointer:x}-" in Path("/proc/self/maps").read_text())

    with mock.patch.object(pinned, "register"), mock.patch.object(pinned, "unregister", look):
        memory = pinned.pinned_bytes(40 << 20, GPU, "a test")
        start = f"{memory.data_ptr():x}-"
        assert start in Path("/proc/self/maps").read_text()
        del memory
        assert mapped == [True] and start not in Path("/proc/self/maps").read_text()


def test_refusals_name_the_numbers():
    with mock.patch.object(pinned, "available_bytes", return_value=5 << 30):
        told = r"6\.0 GiB of pinned host memory for a test .* 5\.0 GiB .* available.* or use AdamOptimizer\."
        with pytest.raises(RuntimeError, match=told):
            pinned.pinned_bytes(6 << 30, CPU, "a test", "use AdamOptimizer")
        with mock.patch.object(pinned, "register", side_effect=OSError("no more")):
            with pytest.raises(RuntimeError, match=r"1\.0 GiB .* a test .*CUDA refused .*no more.*5\.0 GiB are"):
                pinned.pinned_bytes(1 << 30, GPU, "a test")


def test_the_control_group_bounds_what_is_available(tmp_path):
    limit, usage = tmp_path / "max", tmp_path / "current"
    usage.write_text(str(7 << 20))
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 2097152\n")
    with mock.patch.object(pinned, "CONTROL_GROUPS", ((limit, usage, "inactive_file"),)):
        free = pinned.available_bytes()
        assert free > 0
        limit.write_text("max\n")
        assert abs(pinned.available_bytes() - free) < free / 2
        limit.write_text(str(10 << 20))
        assert pinned.available_bytes() == 5 << 20
