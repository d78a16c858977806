"""Limit the memory that a process may allocate, on a GPU or on the CPU."""

import ctypes
import resource
from pathlib import Path

import torch

M_MMAP_THRESHOLD = -3  # of mallopt, in glibc's malloc.h


def limit_memory(mebibytes: int, device: torch.device) -> None:
    """Limit what this process may allocate in addition to its present memory. Further allocations raise an error."""
    more = mebibytes << 20
    if device.type == "cuda":
        total = torch.cuda.mem_get_info(device)[1]
        torch.cuda.set_per_process_memory_fraction(
            min(1.0, (torch.cuda.memory_reserved(device) + more) / total), device
        )
        return
    # Large tensors get pages of their own, which are returned when they are freed. In the heap, where glibc would put
    # them after a while, gaps between tensors of other lengths would count against the limit.
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
