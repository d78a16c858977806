"""A flat tensor whose memory is allocated only while it is needed."""

from __future__ import annotations

import torch


class ResizableStorage:
    """A flat tensor whose memory can be freed and allocated again. Views of the tensor then use the new memory.

    This includes views that autograd has saved. A block's full parameters can therefore be freed between its forward
    and its backward without recomputing the forward. Do not read a view while the memory is freed: the values are
    undefined, and on the CPU the process crashes. A new object has its memory allocated, because views can be made only
    of allocated memory.

    Args:
        numel: the number of elements.
        dtype: their dtype.
        device: the device of the memory.
        poison: whether to fill the memory with NaN before it is freed and when it is allocated again, for debugging.

    Attributes:
        tensor: (numel,), the flat tensor.
        allocated: whether the memory is allocated.
        keeps_address: if True, `free` keeps the memory and only marks it as not allocated, and `allocate` returns the
            same memory again. CUDA graphs need this, because they read weights at the addresses that they were recorded
            with.
    """

    keeps_address = False

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device, poison: bool) -> None:
        self.tensor = torch.empty(numel, dtype=dtype, device=device)
        self._storage = self.tensor.untyped_storage()
        self._nbytes = self._storage.nbytes()
        # For debugging: the memory as bytes. Bytes of 0xFF are NaN in float8_e4m3fn and all wider floating-point types.
        self._poisoned = self.tensor.view(torch.uint8) if poison else None
        self.allocated = True

    def allocate(self) -> torch.Tensor:
        """Allocate the memory if it is not allocated, and return `tensor`. The values in new memory are undefined."""
        if not self.allocated:
            if not (self.keeps_address and self._storage.nbytes()):  # otherwise `free` has kept the memory
                self._storage.resize_(self._nbytes)
            self.allocated = True
            if self._poisoned is not None:
                self._poisoned.fill_(0xFF)
        return self.tensor

    def keep_address(self) -> None:
        """Make `free` keep the memory from now on, so that its address does not change. (Sets `keeps_address`.)

        CUDA graphs need this, because they read weights at the addresses that they were recorded with. If the memory is
        free when this method is called, it is allocated during the call, so that measurements of memory include it from
        then on. The attribute `allocated` stays False in this case.
        """
        self.keeps_address = True
        if not self.allocated:
            self._storage.resize_(self._nbytes)

    def release_address(self) -> None:
        """Undo `keep_address`: `free` frees the memory again. Memory that is marked as not allocated is freed now."""
        self.keeps_address = False
        if not self.allocated:
            self._storage.resize_(0)

    def free(self) -> None:
        """Free the memory. If `keeps_address` is True, keep it, and only mark it as not allocated.

        Freed memory may be reused by later work on the current stream. Call `allocate` before you read `tensor` or a
        view of it again.
        """
        if self.allocated and self._nbytes:
            if self._poisoned is not None:
                self._poisoned.fill_(0xFF)
            if not self.keeps_address:
                self._storage.resize_(0)
            self.allocated = False

    def view(self, start: int, shape: torch.Size) -> torch.Tensor:
        """Return a view of elements of this memory, with its own version counter.

        If views shared the counter of `tensor`, each write to the memory would increment the counter of views that
        autograd has saved, and backward would raise an error.

        Args:
            start: the index of the view's first element in `tensor`.
            shape: the shape of the view.
        """
        assert self.allocated
        return self.tensor.data[start : start + shape.numel()].view(shape)


def shares_storage(tensor: torch.Tensor, *others: torch.Tensor) -> bool:
    """Return whether `tensor` has the same storage as one of `others`, for example because one is a view of the other.

    Called, for example, for the outputs of a block: an output that is a view of a full parameter becomes invalid when
    the parameter's memory is freed.

    tensor: the tensor to check. A sparse tensor has no storage, so the storage of its values is compared.
    others: dense tensors.
    """
    try:
        storage = tensor.untyped_storage()._cdata
    except NotImplementedError:  # sparse tensors, and tensors inside vmap, have no storage
        if tensor.is_sparse:
            return shares_storage(tensor._values(), *others)
        return tensor.layout in _COMPRESSED and shares_storage(tensor.values(), *others)
    for other in others:  # a loop is faster than `any` with a generator, and this runs for the outputs of every block
        if other.untyped_storage()._cdata == storage:
            return True
    return False


_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
