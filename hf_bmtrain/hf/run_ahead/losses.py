"""Replace inf and nan in Trainer's losses without waiting for the GPU."""

from __future__ import annotations

from typing import Any

import torch


class LossFilter:
    """Replaces losses of inf and nan on the device, as Trainer's `logging_nan_inf_filter` does on the host.

    Trainer adds up the losses of micro-batches for its next log entry. In place of a loss of inf or nan, it adds the
    mean of the losses since the last entry. To find such losses, it reads each loss on the host, and so waits until the
    GPU has computed the backward.

    This class replaces `training_step` of a Trainer by one whose result has the mean in place of inf or nan, and for
    which torch.isnan and torch.isinf return False without reading it. Code that calls `trainer.training_step` in a
    callback gets this result, too.

    Args:
        trainer: the Trainer whose `training_step` is replaced, until `close`.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._step = trainer, trainer.training_step
        self._own_step = vars(trainer).get("training_step")
        trainer.training_step = self._training_step

    def _training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss, trainer = self._step(*args, **kwargs), self._trainer
        logged = getattr(trainer, "_tr_loss", None)  # None in old releases of transformers, which wait as before
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
    """A tensor that is known to contain neither inf nor nan: torch.isnan and torch.isinf of it do not read it.

    Results of other functions are plain tensors.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in (torch.isnan, torch.isinf):
                return torch.zeros(args[0].shape, dtype=torch.bool)  # on the CPU, so Trainer reads it without a wait
            return func(*args, **(kwargs or {}))
