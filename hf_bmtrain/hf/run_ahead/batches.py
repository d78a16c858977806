"""Copy batches to the GPU without waiting for it."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

import torch
from accelerate.data_loader import DataLoaderShard
from torch.utils.data import DataLoader

from ...features.masks import MASK, note_full


class BatchCopies:
    """Makes a data loader of Accelerate copy batches without waiting for the GPU, until `close`.

    By default, Accelerate waits for each copy, and so for the optimizer step that was launched before the copy. Only
    then does it collect the next batch, and meanwhile the GPU is idle.

    Without this wait, a copy may still run when the next batch is collected. This is safe only if the next batch is not
    written to the pinned memory from which the copy reads. Data collators that make new tensors for each batch, as
    those of transformers and TRL do, are safe: torch does not use the pinned memory of a batch again before its copy
    has ended.

    Args:
        loader: the data loader. `BatchCopies.supports(loader)` must be True.
        note_masks: whether to check the `attention_mask` of each batch for zeros before the copy, in host memory. If
            there are none, the copy is marked as a mask without zeros. Models from transformers then need not read it
            on the GPU, a read for which the host would wait. A later write to the copy cancels the mark. But torch does
            not notice every write, so pass False if the program's own code might write to the copy before the forward.
    """

    def __init__(self, loader: DataLoaderShard, note_masks: bool) -> None:
        self._loader, self._waits_not = loader, loader._non_blocking
        loader._non_blocking = True
        if note_masks:
            loader.base_dataloader.__class__ = _NotingLoader

    @staticmethod
    def supports(loader: Any) -> bool:
        """Return whether `loader` is Accelerate's DataLoaderShard around torch's DataLoader.

        Subclasses of these two classes are not supported.
        """
        return type(loader) is DataLoaderShard and type(loader.base_dataloader) is DataLoader

    def close(self) -> None:
        """Restore the data loader's original class and settings."""
        self._loader._non_blocking = self._waits_not
        self._loader.base_dataloader.__class__ = DataLoader


class _NotingLoader(DataLoader):
    """A DataLoader that marks each attention mask without zeros, by yielding it as a tensor of the class `_Full`."""

    def __iter__(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        for batch in super().__iter__():
            mask = batch.get(MASK) if isinstance(batch, MutableMapping) else None
            if type(mask) is torch.Tensor and mask.ndim == 2 and mask.device.type == "cpu" and mask.all():
                batch[MASK] = mask.as_subclass(_Full)
            yield batch


class _Full(torch.Tensor):
    """The class of an attention mask without zeros, between the data loader and the copy to the GPU.

    Accelerate copies this tensor by its method `to`. The copy is a plain tensor, which `note_full` has marked as a mask
    without zeros, so that the model need not read it on the GPU.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            if func is not torch.Tensor.to:
                return result
            copy = result.as_subclass(torch.Tensor)
            note_full(copy)
            return copy
