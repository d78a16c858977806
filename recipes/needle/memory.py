"""Limit the memory that a process may allocate, on a GPU or on the CPU."""

import ctypes
import resource
from pathlib import Path

import torch

M_MMAP_THRESHOLD = -3  # of mallopt, in glibc's malloc.h


def limit_memory(mebibytes: int, device: torch.device) -> None:
    """Limit the memory that this process may allocate from now on. Allocations beyond the limit raise an error.

    Args:
        mebibytes: the limit in MiB, in addition to the memory that the process has already allocated.
        device: the GPU or the CPU whose memory is limited.
    """
    more = mebibytes << 20
    if device.type == "cuda":
        total = torch.cuda.mem_get_info(device)[1]
        torch.cuda.set_per_process_memory_fraction(
            min(1.0, (torch.cuda.memory_reserved(device) + more) / total), device
        )
        return
    # Make malloc map tensors of 1 MiB and more separately, so that their memory is returned when they are freed. By
    # default glibc raises this threshold over time and puts them into the heap, where gaps between tensors of different
    # sizes would count toward the limit.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20)
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    now = next(int(words[1]) for words in lines if words[0] == "VmData:") << 10
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (now + more, hard))


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` was raised because memory could not be allocated."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
