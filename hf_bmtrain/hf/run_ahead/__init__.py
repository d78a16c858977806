"""Let the host launch the next step of Trainer while the GPU still runs the current one.

In each step, Trainer and Accelerate make the host wait for the GPU. After each wait, the GPU is idle until the host has
launched more work. The modules of this folder remove the waits, without changing any result:

* `losses`: inf and nan in losses are replaced on the GPU (`logging_nan_inf_filter`).
* `batches`: batches are copied to the GPU without waiting for it. Attention masks without zeros are recognized before
  the copy, so that the model need not read them on the GPU.

`features/masks` removes the waits in the forwards of transformers' models. Two kinds of waits remain: for the entries
of Trainer's log, each of which reads the loss, and for values that the program itself reads.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from ...features.masks import defining_module
from .batches import BatchCopies
from .losses import LossFilter

_log = logging.getLogger("hf_bmtrain")
_PACKAGES = ("transformers", "trl", "hf_bmtrain")


class RunAhead:
    """Lets the host launch the next training step of a Trainer while the GPU runs the current one, until `close`.

    In each step, Trainer and Accelerate make the host wait for the GPU. After each wait, the GPU is idle until the host
    has launched more work. These waits are removed, without changing any result:

    * Trainer reads each loss on the host, to find inf and nan. `LossFilter` makes this read unnecessary.
    * Accelerate waits until each batch is copied to the GPU. `BatchCopies` makes it copy without waiting.
    * Models from transformers read each attention mask on the GPU. For masks without zeros, `BatchCopies` makes this
      read unnecessary.

    A wait stays if the user's program has a method or data collator of its own that might need it. For example, a data
    collator might write the next batch to the memory from which the last batch is still being copied. The waits for
    copies also stay if `BatchCopies` does not support the data loader. If the waits for copies stay, so do the reads of
    attention masks. The log says which waits stay, and why.

    Args:
        trainer: the Trainer that trains. None if no Trainer trains, because the program calls the methods of
            BMTrainCallback itself. With None, nothing is changed.
        loader: the Trainer's data loader for training. None if it is unknown: the waits for copies then stay.
    """

    def __init__(self, trainer: Any, loader: Any) -> None:
        self._parts: list[Any] = []
        if trainer is None:
            return
        waits = []
        # One of these methods (which one depends on the release of transformers) calls `training_step`, and checks its
        # loss for inf and nan. A method of the program that overrides it may also use the loss in other ways, so leave
        # its loss as it is.
        if own := _own(trainer, ["_inner_training_loop", "_run_epoch"]):
            waits.append(f"reading each loss, which the program's own {own} may need")
        else:
            self._parts.append(LossFilter(trainer))
        if own := _own(trainer, ["data_collator", "get_train_dataloader", "_get_dataloader"]):
            advice = 'if it returns new tensors for each batch, set accelerator_config={"non_blocking": True}'
            waits.append(f"the copy of each batch, because the program's own {own} may reuse its tensors ({advice})")
        elif not BatchCopies.supports(loader):
            waits.append(
                "the copy of each batch, because the data loader is not a DataLoader that Accelerate has prepared"
            )
        else:
            # The four methods listed below run after an attention mask was copied to the GPU, and before the forward.
            # If the program overrides one of them, its own method could write to the mask without torch noticing. So
            # then do not note, before the copy, whether the mask is all ones (`note_masks=False`). Instead, the forward
            # reads the mask on the GPU, for which the host waits.
            own = _own(trainer, ["get_batch_samples", "training_step", "_prepare_inputs", "compute_loss"])
            self._parts.append(BatchCopies(loader, note_masks=not own))
            if own:
                waits.append(f"reading each attention_mask, which the program's own {own} may change")
        left = (
            f", except for {' and for '.join(waits)}. The results are the same, but these waits take time"
            if waits
            else ""
        )
        _log.info("In steps of Trainer, the host does not wait for the GPU%s", left)

    def close(self) -> None:
        """Restore the methods and settings that this object has replaced. Called when training ends."""
        for part in self._parts:
            part.close()


def _own(trainer: Any, names: Iterable[str]) -> str:
    """Return the names of the attributes of `trainer`, among `names`, that the user's program defines.

    The result joins them by " and "; it is "" if transformers, TRL or this package defines all of them.
    """
    own = []
    for name in names:
        value = getattr(trainer, name, None)  # not every release of transformers has all these methods
        if value is not None and defining_module(value).partition(".")[0] not in _PACKAGES:
            own.append(name)
    return " and ".join(own)
