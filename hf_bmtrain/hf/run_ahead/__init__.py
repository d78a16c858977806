"""Let the host launch the next step of Trainer while the GPU still works on this one.

In each step, Trainer, Accelerate and transformers make the host wait for the GPU several times. After each wait, the
GPU has nothing to do until the host has launched more. The modules of this folder remove the waits, without changing a
result:

* `batches`: Accelerate copies batches to the GPU without waiting for it.
* `losses`: inf and nan in losses are replaced on the GPU (`logging_nan_inf_filter`).
* `masks`: transformers does not read position ids or a mask to find out what follows from the inputs.

What remains are the entries of Trainer's log, each of which reads the loss, and what a program reads itself.
"""

from __future__ import annotations

from typing import Any

import torch

from .batches import copy_batches_without_waiting
from .losses import LossFilter
from .masks import MaskQuestions

__all__ = ["RunAhead", "copy_batches_without_waiting"]


class RunAhead:
    """Removes waits for the GPU from the training steps of a Trainer, until `close`.

    Args:
        trainer: the Trainer that trains; None (if a program calls the callback's methods itself) leaves losses as they
            are.
        model: the model that it trains.
    """

    def __init__(self, trainer: Any, model: torch.nn.Module) -> None:
        self._parts = [MaskQuestions(model), *([] if trainer is None else [LossFilter(trainer)])]

    def close(self) -> None:
        """Restore what was replaced. Called when training ends."""
        for part in self._parts:
            part.close()
