"""What a device has, and what this process uses of it."""

from __future__ import annotations

from typing import Protocol

import torch

_SMALLEST_RESERVE = 2 << 30


class Memory(Protocol):
    """Bytes of one device, as its caching allocator counts them."""

    def allocated(self) -> int:
        """In tensors, now."""
        ...

    def peak(self) -> int:
        """The most since `reset_peak`."""
        ...

    def reset_peak(self) -> None: ...

    def usable(self) -> int:
        """The most that tensors of this process may take."""
        ...


class DeviceMemory:
    """Memory of a device whose torch module can tell. Nothing here waits for the device.

    Usable is what the device has free and what the allocator holds, less a reserve of 5 % of the device or 2 GiB,
    whichever is more: for fragments, for libraries that allocate beside torch, for steps that differ a little.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._module = device, torch.get_device_module(device)

    def allocated(self) -> int:
        return self._module.memory_allocated(self._device)

    def peak(self) -> int:
        return self._module.max_memory_allocated(self._device)

    def reset_peak(self) -> None:
        self._module.reset_peak_memory_stats(self._device)

    def usable(self) -> int:
        free, total = self._module.mem_get_info(self._device)
        return free + self._module.memory_reserved(self._device) - max(_SMALLEST_RESERVE, total // 20)
