"""A flat tensor whose memory is allocated only while it is needed."""

from __future__ import annotations

import torch


class ResizableStorage:
    """A storage that is resized between 0 and `numel` elements.

    Views of `tensor` stay valid across `free` and `allocate`, including views that autograd saved. This is why a
    block's full parameters can be freed between its forward and its backward without recomputing the forward. Reading a
    view while the storage is empty is undefined; on the CPU it crashes. The memory is allocated at first, since views
    can only be made of allocated memory.

    Attributes:
        tensor: (numel,), the tensor over the whole storage.
        allocated: whether the memory is allocated.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device, poison: bool) -> None:
        self.tensor = torch.empty(numel, dtype=dtype, device=device)
        self._storage = self.tensor.untyped_storage()
        self._nbytes = self._storage.nbytes()
        numbers = dtype.is_floating_point or dtype.is_complex
        # A uint8 storage holds bytes of packed floats: 0xFF bytes are NaN in float8_e4m3fn and in all wider floats.
        self._poison = (float("nan") if numbers else 0xFF) if poison else None
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
        """Free the memory, to be reused by work that is queued on the current stream later. Views stay valid."""
        if self.allocated and self._nbytes:
            if self._poison is not None:
                self.tensor.fill_(self._poison)
            self._storage.resize_(0)
            self.allocated = False

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor` is a view of this storage."""
        return shares_storage(tensor, self.tensor)

    def view(self, start: int, shape: torch.Size) -> torch.Tensor:
        """Return a view of `shape` that starts at element `start`, with a version counter of its own.

        It is made from `.data`: with a shared counter, autograd would take each refill of the storage for an in-place
        write to the views that it has saved, and backward would raise.
        """
        assert self.allocated
        return self.tensor.data[start : start + shape.numel()].view(shape)


def shares_storage(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether the elements of `tensor`, which may be sparse, are in the storage of `other`, which is dense."""
    try:
        return tensor.untyped_storage()._cdata == other.untyped_storage()._cdata
    except NotImplementedError:  # sparse tensors have no storage, and neither have tensors inside vmap
        if tensor.is_sparse:
            return shares_storage(tensor._values(), other)
        return tensor.layout in _COMPRESSED and shares_storage(tensor.values(), other)


_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
