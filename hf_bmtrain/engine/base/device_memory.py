"""The memory of one device, as torch's caching allocator counts it."""

from __future__ import annotations

import torch

_SMALLEST_RESERVE = 2 << 30


class DeviceMemory:
    """Bytes of one device, as its caching allocator counts them. No method waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._module = device, torch.get_device_module(device)

    def allocated(self) -> int:
        """Return the bytes that tensors occupy now."""
        return self._module.memory_allocated(self._device)

    def peak(self) -> int:
        """Return the most bytes that tensors have occupied since `reset_peak`."""
        return self._module.max_memory_allocated(self._device)

    def reset_peak(self) -> None:
        self._module.reset_peak_memory_stats(self._device)

    def usable(self) -> int:
        """Return the most bytes that tensors of this process can have.

        They are the device's free bytes and those that the allocator holds, or what
        `torch.cuda.set_per_process_memory_fraction` leaves of the device, less a reserve of 5 % of the device or 2 GiB,
        whichever is more, for fragmentation, libraries that allocate outside torch, and differences of steps.
        """
        free, total = self._module.mem_get_info(self._device)
        allowed = int(total * self._module.get_per_process_memory_fraction(self._device))
        most = min(free + self._module.memory_reserved(self._device), allowed)
        return most - max(_SMALLEST_RESERVE, total // 20)
