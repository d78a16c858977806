"""Memory statistics of one device, from torch's caching allocator and the device's driver."""

from __future__ import annotations

import torch

_SMALLEST_RESERVE = 2 << 30


class DeviceMemory:
    """Memory statistics of one device, in bytes, from torch's caching allocator and the device's driver.

    Features that fit training into the device's memory, such as use_checkpoint="auto", read these statistics. No method
    waits for the work that is queued on the device.

    Args:
        device: the device, which must not be the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._module = device, torch.get_device_module(device)

    def allocated(self) -> int:
        """Return the bytes that this process's tensors occupy now."""
        return self._current("allocated_bytes")

    def peak(self) -> int:
        """Return the largest number of bytes that this process's tensors have occupied at once since `reset_peak`."""
        return self._module.max_memory_allocated(self._device)

    def reset_peak(self) -> None:
        """Restart the measurement of `peak`: its value becomes the number of bytes that tensors occupy now."""
        self._module.reset_peak_memory_stats(self._device)

    def usable(self) -> int:
        """Return the number of bytes that the tensors of this process may occupy in total.

        The result is the memory available to this process, minus a reserve. The available memory is the device's free
        memory plus the memory that torch's allocator has already reserved, but at most the fraction of the device's
        memory that `torch.cuda.set_per_process_memory_fraction` allows.

        The reserve is 5 % of the device's memory, but at least 2 GiB. It leaves room for fragmentation, for libraries
        that allocate outside torch, and for steps that need more memory than others.
        """
        free, total = self._module.mem_get_info(self._device)
        allowed = int(total * self._module.get_per_process_memory_fraction(self._device))
        most = min(free + self._current("reserved_bytes"), allowed)
        return most - max(_SMALLEST_RESERVE, total // 20)

    def _current(self, name: str) -> int:
        # `torch.cuda.memory_allocated` and `memory_reserved` would return the same, but are slower: each call sorts all
        # of the allocator's statistics.
        statistics = self._module.memory_stats_as_nested_dict(self._device)
        return statistics[name]["all"]["current"] if statistics else 0
