"""`Trainer`, a transformers.Trainer with a BMTrainCallback; `TrainerMixin`, which adds this callback to any trainer."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import transformers

from ..checkpoint.load_state import load_state
from ..checkpoint.manifest import NAME as MANIFEST
from ..engine.base.arguments import expect_kind
from .callback import BMTrainCallback
from .checkpoints import find_damage, has_file, newest_complete, writes_own_weights
from .speed import ParameterCount

_Base: Any = transformers.Trainer


class TrainerMixin:
    """Adds a BMTrainCallback to a trainer class, so that the trainer can train a sharded model.

    Shard the model with `auto_wrap` before you create the trainer. Collective: every rank must create the trainer and
    call its methods. The class differs from a trainer to which you pass a BMTrainCallback:

    * All reporters (such as TensorBoard) receive the callback's metrics.
    * `get_num_trainable_parameters` counts in full the weights that `tp_size` splits over ranks.
    * `save_model` also works before training.
    * `train(resume_from_checkpoint=True)` resumes from the newest intact checkpoint.

    Args:
        *args: passed to the trainer's class.
        callbacks: the trainer's callbacks; a BMTrainCallback is added unless the list contains one.
        **kwargs: passed to the trainer's class.

    Example::

        class MyTrainer(bmt.hf.TrainerMixin, SomeTrainer): ...

        trainer = MyTrainer(model=bmt.auto_wrap(model), args=args, train_dataset=data)
        trainer.train()
    """

    callback_handler: Any
    args: Any
    model: Any

    def __init__(self, *args: Any, callbacks: list | None = None, **kwargs: Any) -> None:
        # The trainers of transformers also accept `callbacks` as a positional argument, so find its position.
        taken = inspect.signature(super().__init__).parameters.values()
        names = [each.name for each in taken if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
        place = names.index("callbacks") if "callbacks" in names else len(args)
        by_position = callbacks is None and place < len(args)
        callbacks = args[place] if by_position else callbacks
        expect_kind("callbacks", callbacks, (list, tuple, type(None)), "a list of callbacks, or None")
        callbacks = list(callbacks or [])
        if not any(isinstance(callback, BMTrainCallback) or callback is BMTrainCallback for callback in callbacks):
            callbacks.append(BMTrainCallback())
        if by_position:
            args = *args[:place], callbacks, *args[place + 1 :]
        else:
            kwargs["callbacks"] = callbacks
        super().__init__(*args, **kwargs)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train the model. Collective: every rank must call it.

        Before training resumes from a checkpoint, its checksums are verified; each rank verifies a part of the files.
        A checkpoint that a trainer without BMTrainCallback wrote has no checksums and is not verified.

        Args:
            resume_from_checkpoint: the folder of a checkpoint, or True for the newest intact one in `output_dir`. Newer
                checkpoints that are damaged or incomplete are skipped with a warning. None or False starts from the
                beginning.
            *args: passed to the trainer's `train`.
            **kwargs: passed to the trainer's `train`.

        Returns:
            The result of the trainer's `train`.

        Raises:
            RuntimeError: on every rank, if the given checkpoint is damaged, or none in `output_dir` is intact.
            ValueError: `resume_from_checkpoint` is True, but `output_dir` contains no checkpoint.
        """
        given: Any = resume_from_checkpoint
        if given is True:
            given = newest_complete(self.args.output_dir) or True
        elif isinstance(given, (str, Path)) and has_file(given, MANIFEST):
            problem = find_damage(Path(given))
            if problem is not None:
                raise RuntimeError(
                    f"The checkpoint {given} is damaged: {problem}. Resume from another checkpoint, or pass "
                    "resume_from_checkpoint=True for the newest intact one."
                )
        given = str(given) if isinstance(given, Path) else given
        return super().train(given, *args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load the weights of the checkpoint from which training resumes.

        If the ranks wrote their own elements of the weights to the checkpoint (see `writes_own_weights`), each rank
        reads only its own elements. But if such a checkpoint also has an optimizer.pt, nothing is read here, because
        BMTrainCallback loads the weights with the optimizer state when training begins.

        For any other checkpoint, the trainer's own method is called, which reads the full weights on every rank.

        Args:
            resume_from_checkpoint: the folder of the checkpoint.
            model: passed to the trainer's own method.
        """
        folder = Path(resume_from_checkpoint)
        if not (has_file(folder, MANIFEST) and writes_own_weights(self.model)):
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # pyright: ignore[reportAttributeAccessIssue]
        elif not has_file(folder, "optimizer.pt"):
            load_state(folder, self.model, random=False)

    def _callbacks(self) -> list[BMTrainCallback]:
        return [each for each in self.callback_handler.callbacks if isinstance(each, BMTrainCallback)]

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Add the metrics of BMTrainCallback (such as tokens_per_second) to a log entry, and log it.

        The trainer calls it. The metrics are added here, and not by the callback, so that all reporters get them.

        Args:
            logs: the entry. If it contains the training loss (the key "loss"), the metrics are added in place.
            *args: passed to the trainer's `log`.
            **kwargs: passed to the trainer's `log`.
        """
        for callback in self._callbacks():
            callback.take_report(logs)
        super().log(logs, *args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    def save_model(self, *args: Any, _internal_call: bool = False, **kwargs: Any) -> None:
        """Gather the full weights on rank 0, and save them there with the trainer's own `save_model`.

        Collective: every rank must call it. Checkpoints during training need no call: the trainer then calls this
        method itself, with `_internal_call=True`. In that case nothing is gathered here, because BMTrainCallback has
        already prepared the save.

        Args:
            *args: passed to the trainer's `save_model`, such as the folder (`output_dir`).
            **kwargs: passed to the trainer's `save_model`.
        """
        for callback in self._callbacks() if not _internal_call else ():
            callback.stage(self.args, self.model)
        super().save_model(*args, _internal_call=_internal_call, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    def get_num_trainable_parameters(self) -> int:
        """Return the number of elements of the model's trainable parameters. Sharded parameters count in full.

        This replaces the method of transformers.Trainer, which would count only this rank's part of weights that
        `tp_size` splits over ranks.
        """
        return ParameterCount(self.model)(only_trainable=True)


class Trainer(TrainerMixin, _Base):
    """transformers.Trainer with a BMTrainCallback, for a model that `auto_wrap` has sharded.

    Use it like transformers.Trainer. Collective: every rank must create it and call its methods. Unlike a stock Trainer
    to which you pass a BMTrainCallback, it also sends the callback's metrics to all reporters (such as TensorBoard),
    counts in full the weights that `tp_size` splits over ranks (`get_num_trainable_parameters`), can save the model
    before training (`save_model`), and resumes from the newest intact checkpoint with
    `train(resume_from_checkpoint=True)`.

    Args:
        *args: passed to transformers.Trainer.
        callbacks: callbacks for transformers.Trainer; a BMTrainCallback is added unless the list contains one.
        **kwargs: passed to transformers.Trainer.

    Example::

        trainer = bmt.hf.Trainer(model=bmt.auto_wrap(model), args=args, train_dataset=data)
        trainer.train()
        trainer.save_model("model")
    """
