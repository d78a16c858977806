"""Trainer for those who would rather change the class than add a callback."""

from __future__ import annotations

from typing import Any

import transformers

from .callback import BMTrainCallback

_Base: Any = transformers.Trainer


class TrainerMixin:
    """`class MyTrainer(bmt.hf.TrainerMixin, SomeTrainer)`: BMTrainCallback is there, and its numbers reach every
    reporter."""

    callback_handler: Any

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


class Trainer(TrainerMixin, _Base):
    """transformers.Trainer with BMTrainCallback."""
