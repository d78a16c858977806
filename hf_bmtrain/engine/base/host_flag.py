"""A device scalar that the host reads later, without a synchronization at this point."""

from __future__ import annotations

import torch


class HostFlag:
    """An asynchronous copy to the host of the value that `flag` (1,) has at this point of the current stream."""

    def __init__(self, flag: torch.Tensor) -> None:
        self.immediate = not flag.is_cuda
        if self.immediate:
            self._value = flag.clone()
        else:
            self._value = torch.empty(flag.shape, dtype=flag.dtype, device="cpu", pin_memory=True)
        self._event: torch.cuda.Event | None = None
        if flag.is_cuda:
            self._value.copy_(flag, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    @property
    def arrived(self) -> bool:
        """True if `read` would not wait."""
        return self._event is None or self._event.query()

    def read(self) -> float:
        """Return the value. Waits for the device if it has not reached that point yet."""
        if self._event is not None:
            self._event.synchronize()
        return self._value.item()
