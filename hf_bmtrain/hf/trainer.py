"""Trainer with BMTrainCallback built in, and a mixin that adds it to any trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers

from ..checkpoint.load_state import load_state
from ..checkpoint.manifest import NAME as MANIFEST
from ..engine.base.arguments import expect_kind
from .callback import BMTrainCallback
from .checkpoints import find_damage, newest_complete, writes_own_weights
from .speed import ParameterCount

_Base: Any = transformers.Trainer


class TrainerMixin:
    """Adds BMTrainCallback to a trainer.

    The callback's numbers reach every reporter, and parameters are counted in full, not by this rank's shards.
    `train(resume_from_checkpoint=True)` resumes from the newest intact checkpoint.

    Args:
        *args: of the trainer.
        callbacks: of the trainer; a BMTrainCallback is added unless there is one.
        **kwargs: of the trainer.

    Example::

        class MyTrainer(bmt.hf.TrainerMixin, SomeTrainer): ...
    """

    callback_handler: Any
    args: Any
    model: Any

    def __init__(self, *args: Any, callbacks: list | None = None, **kwargs: Any) -> None:
        expect_kind("callbacks", callbacks, (list, tuple, type(None)), "a list of callbacks, or None")
        callbacks = list(callbacks or [])
        if not any(isinstance(callback, BMTrainCallback) or callback is BMTrainCallback for callback in callbacks):
            callbacks.append(BMTrainCallback())
        super().__init__(*args, callbacks=callbacks, **kwargs)  # pyright: ignore[reportCallIssue]

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train the model. Collective.

        A checkpoint to resume from is verified first; every rank reads a part of it.

        Args:
            resume_from_checkpoint: a checkpoint, or True for the newest one in `output_dir`: one that is damaged or
                incomplete is passed over for the one before it, with a warning.
            *args: of the trainer's `train`.
            **kwargs: of the trainer's `train`.

        Returns:
            What the trainer's `train` returns.

        Raises:
            RuntimeError: on every rank, if the given checkpoint is damaged, or no checkpoint is intact.
        """
        given: Any = resume_from_checkpoint
        if given is True:
            given = newest_complete(self.args.output_dir) or True
        elif isinstance(given, (str, Path)) and (Path(given) / MANIFEST).exists():
            problem = find_damage(Path(given))
            if problem is not None:
                raise RuntimeError(f"The checkpoint {given} is damaged: {problem}")
        given = str(given) if isinstance(given, Path) else given
        for callback in self._callbacks():
            callback.resumed = given if isinstance(given, str) else None
        return super().train(given, *args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Let each rank read its own parts of the weights: at once, or with the optimizer when training begins."""
        folder = Path(resume_from_checkpoint)
        if not ((folder / MANIFEST).exists() and writes_own_weights(self.model)):
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # pyright: ignore[reportAttributeAccessIssue]
        elif not (folder / "optimizer.pt").exists():
            load_state(folder, self.model, random=False)

    def _callbacks(self) -> list[BMTrainCallback]:
        return [each for each in self.callback_handler.callbacks if isinstance(each, BMTrainCallback)]

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log an entry, with the callback's numbers.

        Args:
            logs: the entry.
            *args: of the trainer's `log`.
            **kwargs: of the trainer's `log`.
        """
        for callback in self._callbacks():
            callback.take_report(logs)
        super().log(logs, *args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    def save_model(self, *args: Any, _internal_call: bool = False, **kwargs: Any) -> None:
        """Gather the weights, then call the trainer's `save_model`, whose body rank 0 runs alone. Collective.

        Args:
            *args: of the trainer's `save_model`.
            **kwargs: of the trainer's `save_model`.
        """
        for callback in self._callbacks() if not _internal_call else ():
            callback.stage(self.args, self.model)
        super().save_model(*args, _internal_call=_internal_call, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    def get_num_trainable_parameters(self) -> int:
        """Return the number of elements of all trainable parameters, in full."""
        return ParameterCount(self.model)(only_trainable=True)


class Trainer(TrainerMixin, _Base):
    """transformers.Trainer with BMTrainCallback.

    Args:
        *args: of transformers.Trainer.
        callbacks: of transformers.Trainer; a BMTrainCallback is added unless there is one.
        **kwargs: of transformers.Trainer.
    """
