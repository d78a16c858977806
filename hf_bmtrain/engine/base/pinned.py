"""Page-locked (pinned) host memory, which a GPU reads and writes directly."""

from __future__ import annotations

import mmap
import resource
import weakref
from pathlib import Path

import torch

from .launch import import_cupy

_PORTABLE = 1  # cudaHostRegisterPortable: the memory counts as page-locked for every GPU
_GROUP = Path("/sys/fs/cgroup")
CONTROL_GROUPS = (
    (_GROUP / "memory.max", _GROUP / "memory.current", "inactive_file"),
    (_GROUP / "memory/memory.limit_in_bytes", _GROUP / "memory/memory.usage_in_bytes", "total_inactive_file"),
)
"""The files in which Linux reports the memory limit of a container (control group), for control groups v2 and v1.

Each entry is (the file with the limit in bytes, the file with the usage in bytes, the field of memory.stat with the
bytes of file cache, which the system can reclaim).
"""


def pinned_bytes(nbytes: int, device: torch.device, purpose: str, instead: str = "") -> torch.Tensor:
    """Allocate zeroed host memory, page-locked if `device` is a CUDA device.

    torch's own pinned allocator rounds sizes up to a power of two; this function does not.

    Args:
        nbytes: the number of bytes.
        device: the device that will read and write the memory; "meta" allocates a meta tensor.
        purpose: what the memory is for, such as "the optimizer state", for the error.
        instead: for the error: what the user can do to need less of this memory, as a phrase that follows "or". Empty
            if there is no such advice.

    Returns:
        A uint8 tensor (nbytes,). The memory is unlocked and freed when the last view of it is freed.

    Raises:
        RuntimeError: the memory cannot be allocated or page-locked. The message contains the reason.
    """
    if device.type == "meta":
        return torch.empty(nbytes, dtype=torch.uint8, device=device, pin_memory=True)
    if nbytes == 0:
        return torch.zeros(0, dtype=torch.uint8, device="cpu")
    available = available_bytes()
    if nbytes > available:
        raise RuntimeError(
            _shortage(nbytes, purpose, instead, f"only {available / 2**30:.1f} GiB of host memory is available")
        )
    try:
        memory = mmap.mmap(-1, nbytes)
    except (OSError, ValueError, OverflowError) as error:
        raise RuntimeError(_shortage(nbytes, purpose, instead, f"the system refused it: {error}")) from error
    # The tensor and its views keep `shown` alive. When the last of them is freed, `shown` is freed too, and its
    # finalizer (see the end of this function) unlocks the memory.
    shown = memoryview(memory)
    tensor = torch.frombuffer(shown, dtype=torch.uint8)
    if device.type == "cuda":
        try:
            register(tensor.data_ptr(), nbytes, device)
        except Exception as error:
            limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
            locked = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit / 2**30:.1f} GiB"
            free = f"{available / 2**30:.1f} GiB are available"
            reason = f"CUDA refused to lock it ({error}; `ulimit -l`, the limit of locked memory, is {locked}; {free})"
            raise RuntimeError(_shortage(nbytes, purpose, instead, reason)) from error
        weakref.finalize(shown, _unlock, memory, tensor.data_ptr(), device).atexit = False
    return tensor


def _unlock(memory: mmap.mmap, pointer: int, device: torch.device) -> None:
    """Unlock page-locked memory that is no longer used.

    memory: the mapping of the memory. It is passed only to keep the addresses mapped until CUDA has unlocked them. If
        they were unmapped earlier, another thread could map the same addresses, and CUDA would refuse to lock them.
    pointer: the address of the memory.
    device: the CUDA device that was passed to `register`.
    """
    unregister(pointer, device)


def available_bytes() -> int:
    """Return how many bytes of host memory this process can still allocate.

    This is the host's available memory. If the process runs in a container (control group) with a memory limit, the
    result is at most the part of the limit that is not in use.
    """
    free = _fields(Path("/proc/meminfo"))["MemAvailable:"] * 1024
    for limit, usage, cached in CONTROL_GROUPS:
        if limit.is_file() and limit.read_text().strip() != "max":
            used = int(usage.read_text()) - _fields(usage.parent / "memory.stat").get(cached, 0)
            free = min(free, int(limit.read_text()) - used)
    return max(free, 0)


def _fields(path: Path) -> dict[str, int]:
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines}


def _shortage(nbytes: int, purpose: str, instead: str, reason: str) -> str:
    size = f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"
    others = f"raise `ulimit -l`, or {instead}" if instead else "or raise `ulimit -l`"
    return (
        f"{size} of pinned host memory for {purpose} cannot be allocated: {reason}. Give the container more memory, "
        f"{others}."
    )


def register(pointer: int, nbytes: int, device: torch.device) -> None:
    """Page-lock host memory so that `device` can read and write it directly. `unregister` undoes this.

    Args:
        pointer: the address of the memory.
        nbytes: the size of the memory in bytes.
        device: the CUDA device.

    Raises:
        RuntimeError: CUDA refuses to lock the memory, or CuPy is not installed.
    """
    runtime = import_cupy().cuda.runtime
    runtime.setDevice(device.index)
    runtime.hostRegister(pointer, nbytes, _PORTABLE)


def unregister(pointer: int, device: torch.device) -> None:
    """Wait until `device` has completed all queued work, and unlock the memory that `register` locked at `pointer`.

    Args:
        pointer: the address of the memory.
        device: the CUDA device that was passed to `register`.
    """
    runtime = import_cupy().cuda.runtime
    runtime.setDevice(device.index)
    runtime.deviceSynchronize()
    runtime.hostUnregister(pointer)
