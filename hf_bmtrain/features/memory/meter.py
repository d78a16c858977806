"""Measurements of memory: of the device, and of what autograd saves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ...engine.base.torch_internals import StorageWeakRef, top_saved_tensors_hooks

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


class SavedBytes:
    """Counts the bytes of the storages that autograd saves inside `counting()`.

    Each storage counts once; those of the tensors in `held` do not count, nor do tensors that are not strided.
    """

    def __init__(self, held: Iterable[torch.Tensor]) -> None:
        # Weak references keep nothing alive, and while they exist no other storage gets the same address.
        self._seen = {StorageWeakRef(tensor.untyped_storage()) for tensor in held}
        self.nbytes = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count in this context. Saved-tensor hooks that are already active, such as a checkpoint's, stay active."""
        pack, unpack = top_saved_tensors_hooks(True) or (_unchanged, _unchanged)

        def count(tensor: torch.Tensor) -> Any:
            if tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)
                if reference not in self._seen:
                    self._seen.add(reference)
                    self.nbytes += storage.nbytes()
            return pack(tensor)

        with torch.autograd.graph.saved_tensors_hooks(count, unpack):
            yield


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
