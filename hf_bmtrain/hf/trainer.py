"""Trainer with BMTrainCallback built in, and a mixin that adds it to any trainer."""

from __future__ import annotations

from typing import Any

import transformers

from .callback import BMTrainCallback
from .speed import count_parameters

_Base: Any = transformers.Trainer


class TrainerMixin:
    """Adds BMTrainCallback to a trainer: `class MyTrainer(bmt.hf.TrainerMixin, SomeTrainer)`.

    The callback's numbers reach every reporter, and parameters are counted whole, not by this rank's slices.
    """

    callback_handler: Any
    args: Any
    model: Any

    def __init__(self, *args: Any, callbacks: list | None = None, **kwargs: Any) -> None:
        callbacks = list(callbacks or [])
        if not any(isinstance(callback, BMTrainCallback) or callback is BMTrainCallback for callback in callbacks):
            callbacks.append(BMTrainCallback())
        super().__init__(*args, callbacks=callbacks, **kwargs)  # pyright: ignore[reportCallIssue]

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, BMTrainCallback):
                callback.take_report(logs)
        super().log(logs, *args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    def save_model(self, *args: Any, _internal_call: bool = False, **kwargs: Any) -> None:
        """Gather the weights, then call Trainer's `save_model`, whose body rank 0 runs alone. Collective."""
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, BMTrainCallback) and not _internal_call:
                callback.stage(self.args, self.model)
        super().save_model(*args, _internal_call=_internal_call, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    def get_num_trainable_parameters(self) -> int:
        return count_parameters(self.model, only_trainable=True)


class Trainer(TrainerMixin, _Base):
    """transformers.Trainer with BMTrainCallback."""
