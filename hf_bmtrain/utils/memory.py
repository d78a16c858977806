"""How much memory this process has and had."""

from __future__ import annotations

import resource

import torch

from ..world import current_world, print_rank

_GIB = 2**30


def see_memory(message: str, detail: bool = False) -> None:
    """Rank 0 prints `message` and its device's allocated memory, now and at the peak since the last call, in GiB.

    detail: the allocator's own table. On CPU it is the process's resident memory and its peak since the start.
    """
    world = current_world()
    device = torch.get_device_module(world.device)
    if world.device.type == "cpu":
        pages = int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print_rank(f"{message}: resident {pages / _GIB:.2f} GiB, peak {peak / _GIB:.2f} GiB")
    elif detail:
        print_rank(f"{message}\n{device.memory_summary(world.device)}")
    else:
        now, peak = device.memory_allocated(world.device), device.max_memory_allocated(world.device)
        print_rank(f"{message}: allocated {now / _GIB:.2f} GiB, peak {peak / _GIB:.2f} GiB")
    if world.device.type != "cpu":
        device.reset_peak_memory_stats(world.device)
