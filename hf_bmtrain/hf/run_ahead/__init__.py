"""Let the host launch the next step of Trainer while the GPU still works on this one.

In each step, Trainer and Accelerate make the host wait for the GPU. After each wait, the GPU has nothing to do until
the host has launched more. The modules of this folder remove the waits, without changing a result:

* `losses`: inf and nan in losses are replaced on the GPU (`logging_nan_inf_filter`).
* `batches`: batches are copied to the GPU without waiting for it. Attention masks without zeros are recognized before
  the copy, so that the model need not read them on the GPU.

`features/masks` removes the waits in the forwards of models of transformers. Two kinds of waits remain: for the entries
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
    """Removes waits for the GPU from the training steps of a Trainer, until `close`.

    If the program has a method or data collator of its own that might rely on a wait, this wait stays. The log says
    which waits stay, and why.

    Args:
        trainer: the Trainer that trains; None if a program calls the callback's methods itself. With None, nothing is
            changed.
        loader: the data loader of its batches; None if it is unknown.
    """

    def __init__(self, trainer: Any, loader: Any) -> None:
        self._parts: list[Any] = []
        if trainer is None:
            return
        waits = []
        # One of these methods calls `training_step`, and checks its loss for inf and nan. A method of the program's own
        # may read the loss in another way, so it gets the loss unchanged.
        if own := _own(trainer, ["_inner_training_loop", "_run_epoch"]):
            waits.append(f"each loss (the program has its own {own})")
        else:
            self._parts.append(LossFilter(trainer))
        if own := _own(trainer, ["data_collator", "get_train_dataloader", "_get_dataloader"]):
            advice = 'if it reuses no memory, set accelerator_config={"non_blocking": True}'
            waits.append(f"the copy of each batch (the program has its own {own}; {advice})")
        elif not BatchCopies.supports(loader):
            waits.append(
                "the copy of each batch (its data loader is not a plain DataLoader that Accelerate has prepared)"
            )
        else:
            # These methods run after an attention mask was copied to the GPU, and before the forward. One that the
            # program has overridden could write to the mask in a way that torch does not notice. Then do not rely on
            # what the mask was before the copy (`note_masks`): the forward reads it on the GPU, and the host waits.
            own = _own(trainer, ["get_batch_samples", "training_step", "_prepare_inputs", "compute_loss"])
            self._parts.append(BatchCopies(loader, note_masks=not own))
            if own:
                waits.append(f"each attention_mask (the program has its own {own})")
        left = f", except for {' and '.join(waits)}" if waits else ""
        _log.info("in steps of Trainer, the host does not wait for the GPU%s", left)

    def close(self) -> None:
        """Restore what was replaced. Called when training ends."""
        for part in self._parts:
            part.close()


def _own(trainer: Any, names: Iterable[str]) -> str:
    """Return the names of those attributes of `trainer` that neither transformers nor TRL nor this package defines."""
    own = []
    for name in names:
        value = getattr(trainer, name, None)  # releases of transformers have different methods
        if value is not None and defining_module(value).partition(".")[0] not in _PACKAGES:
            own.append(name)
    return " and ".join(own)
