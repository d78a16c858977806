"""A flat tensor whose bytes exist only while they are needed."""

from __future__ import annotations

import torch


class ResizableStorage:
    """One storage object that is resized between 0 and `numel` elements.

    Views of `tensor` stay valid over `free` and `allocate`, including those that autograd saved: so a block can be
    released between its forward and its backward without being recomputed. Reading a view while the storage is empty
    is undefined (a crash on CPU). The storage is allocated at first, because views can only be made then.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device, poison: bool) -> None:
        self.tensor = torch.empty(numel, dtype=dtype, device=device)
        self._storage = self.tensor.untyped_storage()
        self._nbytes = self._storage.nbytes()
        numbers = dtype.is_floating_point or dtype.is_complex
        self._poison = (float("nan") if numbers else 0xFF) if poison else None  # bytes that are NaN in any dtype
        self.allocated = True

    def allocate(self) -> torch.Tensor:
        """Allocate the storage. Its contents are undefined, or NaN with `poison`."""
        if not self.allocated:
            self._storage.resize_(self._nbytes)
            self.allocated = True
            if self._poison is not None:
                self.tensor.fill_(self._poison)
        return self.tensor

    def free(self) -> None:
        """Return the memory to the allocator, on the current stream."""
        if self.allocated and self._nbytes:
            if self._poison is not None:
                self.tensor.fill_(self._poison)
            self._storage.resize_(0)
            self.allocated = False

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor` is a view of this storage."""
        return shares_storage(tensor, self.tensor)

    def view(self, start: int, shape: torch.Size) -> torch.Tensor:
        """Return a view of `shape` from element `start`, with its own version counter.

        `.data` separates the counters: autograd must not take filling the buffer for a modification.
        """
        assert self.allocated
        return self.tensor.data[start : start + shape.numel()].view(shape)


def shares_storage(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether the elements of `tensor`, which may be sparse, are in the storage of `other`, which is not."""
    try:
        return tensor.untyped_storage()._cdata == other.untyped_storage()._cdata
    except NotImplementedError:  # a sparse tensor has no storage, nor has one inside vmap
        if tensor.is_sparse:
            return shares_storage(tensor._values(), other)
        return tensor.layout in _COMPRESSED and shares_storage(tensor.values(), other)


_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
