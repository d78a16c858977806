"""How much a forward keeps for its backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef


def saving_hooks() -> tuple[Callable, Callable] | None:
    """The saved-tensor hooks that are in force here: somebody's checkpoint, say."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)  # pyright: ignore[reportAttributeAccessIssue]


class SavedBytes:
    """Bytes of the storages that autograd saves under `counting`, each counted once, those of `held` not at all."""

    def __init__(self, held: Iterable[torch.Tensor]) -> None:
        # Weak, so that counting keeps nothing alive; while they are there no other storage has the same number.
        self._seen = {StorageWeakRef(tensor.untyped_storage()) for tensor in held}
        self.nbytes = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """What is saved goes on to the hooks that are in force outside: they are not replaced."""
        pack, unpack = saving_hooks() or (_as_it_is, _as_it_is)

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


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
