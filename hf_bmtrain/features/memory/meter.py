"""Measurement of what autograd saves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ...engine.base.torch_internals import StorageWeakRef, top_saved_tensors_hooks


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
