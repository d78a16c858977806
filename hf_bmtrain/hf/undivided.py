"""Warn if every rank trains on the same rows, because the Trainer's data loader does not divide them over the ranks."""

from __future__ import annotations

import hashlib
import logging
import weakref
from typing import Any

import torch
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard

from ..engine.blocks.observer import Observer
from ..engine.runtime.world import current_world
from ..engine.wrap.accelerator import ranks_per_row

_log = logging.getLogger("hf_bmtrain")


class UndividedBatches(Observer):
    """Compares the first training batch across the ranks, and logs a warning if all ranks have the same one.

    A subclass of Trainer whose `get_train_dataloader` returns a plain DataLoader trains every rank on the same rows.
    Several ranks then compute the same as one rank would, and no error is raised.

    The batches are compared in the first training forward of the model, by a collective. They are not compared if there
    is only one rank, or if all ranks share each row (`sequence_parallel`, `tp_size`) and so must have the same batch.
    Nor are they compared if Accelerate has prepared the data loader (`accelerator.prepare`), because Accelerate then
    divides the rows over the ranks. A data loader that Accelerate has not prepared may also divide the rows, for
    example by a DistributedSampler. The batches then differ, and no warning is logged.

    Args:
        model: the sharded model that is trained. It is referenced weakly.
        loader: the Trainer's data loader for training. None if it is unknown: nothing is then compared.
    """

    def __init__(self, model: Any, loader: Any) -> None:
        self._model, self._handle = weakref.ref(model), None
        several = current_world().size > ranks_per_row(model)
        if several and loader is not None and not isinstance(loader, (DataLoaderShard, DataLoaderDispatcher)):
            self._handle = current_world().schedule.observe(self, model)

    def close(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def before_forward(self, model: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if model is not self._model() or not (model.training and torch.is_grad_enabled()):
            return
        self.close()
        world = current_world()
        prints = world.gather_objects(_fingerprint([*args, *kwargs.values()]))
        if prints[0] is not None and len(set(prints)) == 1 and world.rank == 0:
            _log.warning(
                "all %d ranks got the same first batch, so they probably all train on the same rows, as one rank "
                "would. The trainer's data loader does not divide the rows, because Accelerate has not prepared it. In "
                "get_train_dataloader, return self.accelerator.prepare(DataLoader(...)), or give the DataLoader a "
                "DistributedSampler",
                world.size,
            )  # fmt: skip


def _fingerprint(values: list[Any]) -> str | None:
    """Return a hash of the elements of the tensors in `values`, except scalars. None if there is no such tensor."""
    tensors = [each for each in values if isinstance(each, torch.Tensor) and each.dim()]
    found = hashlib.sha256()
    for each in tensors:
        found.update(each.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest() if tensors else None
