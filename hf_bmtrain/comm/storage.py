"""A flat tensor whose bytes exist only while they are needed."""

from __future__ import annotations

import torch


class ResizableStorage:
    """One storage object for ever, resized between nothing and `numel` elements.

    Views made of `tensor` stay valid over `free` and `allocate`, among them those that autograd saved, which is
    what lets a block be released between its forward and its backward without being recomputed. Reading a view
    while the storage is empty is undefined (a crash on CPU), so nobody may hold one at rest. It begins allocated:
    views can only be made then.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device, poison: bool) -> None:
        self.tensor = torch.empty(numel, dtype=dtype, device=device)
        self._storage = self.tensor.untyped_storage()
        self._nbytes = self._storage.nbytes()
        self._poison = poison
        self.allocated = True

    def allocate(self) -> torch.Tensor:
        """Give the tensor its bytes (their contents are undefined, or NaN under the debug switch)."""
        if not self.allocated:
            self._storage.resize_(self._nbytes)
            self.allocated = True
            if self._poison:
                self.tensor.fill_(float("nan"))
        return self.tensor

    def free(self) -> None:
        """Give the bytes back to the allocator, on the stream that is current."""
        if self.allocated and self._nbytes:
            if self._poison:
                self.tensor.fill_(float("nan"))
            self._storage.resize_(0)
            self.allocated = False

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is a view of the bytes that are here now."""
        return shares_storage(tensor, self.tensor)

    def view(self, start: int, shape: torch.Size) -> torch.Tensor:
        """A view of `shape` from element `start`, with a version counter of its own.

        `.data` separates the counters: filling the buffer is not a modification that autograd should see.
        """
        assert self.allocated
        return self.tensor.data[start : start + shape.numel()].view(shape)


def shares_storage(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return tensor.untyped_storage()._cdata == other.untyped_storage()._cdata
