"""Page-locked host memory, which a GPU reads and writes directly."""

from __future__ import annotations

import mmap
import resource
import weakref
from pathlib import Path

import torch

from .launch import import_cupy

_PORTABLE = 1  # cudaHostRegisterPortable
_GROUP = Path("/sys/fs/cgroup")
CONTROL_GROUPS = (
    (_GROUP / "memory.max", _GROUP / "memory.current", "inactive_file"),
    (_GROUP / "memory/memory.limit_in_bytes", _GROUP / "memory/memory.usage_in_bytes", "total_inactive_file"),
)
"""Files of a control group: the limit, the usage, and the field of memory.stat that counts reclaimable file cache."""


def pinned_bytes(nbytes: int, device: torch.device, purpose: str) -> torch.Tensor:
    """Allocate zeroed host memory, uint8 (nbytes,), page-locked if `device` is CUDA, until its last view is freed.

    torch's own pinned allocator rounds up to a power of two; this function does not. Raises RuntimeError, with the
    numbers, if the memory is not available. purpose: names the use of the memory in that error.
    """
    if device.type == "meta":
        return torch.empty(nbytes, dtype=torch.uint8, device=device, pin_memory=True)
    if nbytes == 0:
        return torch.zeros(0, dtype=torch.uint8, device="cpu")
    available = available_bytes()
    if nbytes > available:
        raise RuntimeError(_shortage(nbytes, purpose, f"{available / 2**30:.1f} GiB of host memory are available"))
    try:
        memory = mmap.mmap(-1, nbytes)
    except (OSError, ValueError, OverflowError) as error:
        raise RuntimeError(_shortage(nbytes, purpose, f"the system refused it: {error}")) from error
    shown = memoryview(memory)  # all views of the tensor refer to it
    tensor = torch.frombuffer(shown, dtype=torch.uint8)
    if device.type == "cuda":
        try:
            register(tensor.data_ptr(), nbytes, device)
        except Exception as error:
            limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
            locked = "no limit" if limit == resource.RLIM_INFINITY else f"{limit / 2**30:.1f} GiB"
            free = f"{available / 2**30:.1f} GiB are free"
            reason = f"CUDA refused to lock it ({error}; ulimit -l allows {locked}, {free})"
            raise RuntimeError(_shortage(nbytes, purpose, reason)) from error
        weakref.finalize(shown, _unlock, memory, tensor.data_ptr(), device).atexit = False
    return tensor


def _unlock(memory: mmap.mmap, pointer: int, device: torch.device) -> None:
    """Undo `register` for `memory`, which is given back afterwards: until then no other thread may get its addresses,
    which CUDA would refuse to lock."""
    unregister(pointer, device)


def available_bytes() -> int:
    """Return the bytes of host memory available to this process, within the limits of its control group."""
    free = _fields(Path("/proc/meminfo"))["MemAvailable:"] * 1024
    for limit, usage, cached in CONTROL_GROUPS:
        if limit.is_file() and limit.read_text().strip() != "max":
            used = int(usage.read_text()) - _fields(usage.parent / "memory.stat").get(cached, 0)
            free = min(free, int(limit.read_text()) - used)
    return max(free, 0)


def _fields(path: Path) -> dict[str, int]:
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines}


def _shortage(nbytes: int, purpose: str, reason: str) -> str:
    return (
        f"{nbytes / 2**30:.1f} GiB of pinned host memory for {purpose} cannot be had: {reason}. Train on more ranks "
        "(each keeps its share), give the container more memory, raise `ulimit -l`, or keep the state on the GPU "
        "with AdamOptimizer."
    )


def register(pointer: int, nbytes: int, device: torch.device) -> None:
    """Page-lock host memory, so that `device` reads and writes it directly."""
    runtime = import_cupy().cuda.runtime
    runtime.setDevice(device.index)
    runtime.hostRegister(pointer, nbytes, _PORTABLE)


def unregister(pointer: int, device: torch.device) -> None:
    """Undo `register`, after all copies of the device are complete."""
    runtime = import_cupy().cuda.runtime
    runtime.setDevice(device.index)
    runtime.deviceSynchronize()
    runtime.hostUnregister(pointer)
