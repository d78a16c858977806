"""Replace inf and nan in Trainer's losses without waiting for the GPU."""

from __future__ import annotations

from typing import Any

import torch


class LossFilter:
    """Replaces losses of inf and nan on the GPU, so that Trainer need not wait for the GPU to find and replace them.

    Trainer adds up the losses of micro-batches for its next log entry. With `logging_nan_inf_filter` (the default), it
    adds something else in place of a loss of inf or nan: about the mean of the losses since the last entry (their sum,
    divided by 1 plus the number of steps since then). To find such losses, Trainer reads torch.isnan and torch.isinf of
    each loss on the host, which therefore waits until the GPU has computed the backward.

    This class replaces `training_step` of a Trainer by one that makes the same replacement on the GPU. The new
    `training_step` returns the loss as a special tensor: torch.isnan and torch.isinf return False for it without
    reading its value, so Trainer does not wait. Other code that calls `trainer.training_step`, for example a callback,
    gets this tensor, too. Without `logging_nan_inf_filter`, or with an older release of transformers, the loss is
    returned unchanged.

    Args:
        trainer: the Trainer whose `training_step` is replaced, until `close`.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._step = trainer, trainer.training_step
        self._own_step = vars(trainer).get("training_step")
        trainer.training_step = self._training_step

    def _training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss, trainer = self._step(*args, **kwargs), self._trainer
        # Older releases of transformers have no `_tr_loss`. The loss is then returned unchanged, and Trainer's own
        # filter waits for it.
        logged = getattr(trainer, "_tr_loss", None)
        if logged is None or not trainer.args.logging_nan_inf_filter:
            return loss
        mean = logged / (1 + trainer.state.global_step - trainer._globalstep_last_logged)
        return torch.where(loss.isfinite(), loss, mean).as_subclass(_Finite)

    def close(self) -> None:
        """Restore the Trainer's `training_step`, unless the program has replaced it since."""
        if vars(self._trainer).get("training_step") != self._training_step:
            return
        del self._trainer.training_step
        if self._own_step is not None:
            self._trainer.training_step = self._own_step


class _Finite(torch.Tensor):
    """A tensor without inf and nan, for which torch.isnan and torch.isinf return False without reading its values.

    Results of other functions are plain tensors.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in (torch.isnan, torch.isinf):
                # On the CPU, so Trainer reads it without waiting for the GPU.
                return torch.zeros(args[0].shape, dtype=torch.bool, device="cpu")
            return func(*args, **(kwargs or {}))
