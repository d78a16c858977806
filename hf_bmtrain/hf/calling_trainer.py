"""Find what Trainer does not pass to callbacks: itself, and the checkpoint that it resumes from."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from types import FrameType

from transformers import Trainer, trainer


def calling_trainer() -> Trainer | None:
    """Return the Trainer that calls this function, directly or indirectly, or None if no Trainer does.

    BMTrainCallback calls this, because it must change methods of the Trainer (to save checkpoints, for example), but
    Trainer does not pass itself to callbacks. The Trainer is found on the call stack of this thread. If there are
    several, because one Trainer runs inside another, the result is the innermost.
    """
    return next((frame.f_locals["self"] for frame in _trainer_frames()), None)


def resumed_folder() -> str | None:
    """Return the checkpoint folder from which the calling Trainer resumes, or None if it does not resume.

    The calling Trainer is the one whose `train` calls this function, directly or indirectly. BMTrainCallback calls this
    function when training begins, to load the sharded weights and the optimizer state from the folder, because Trainer
    does not pass the folder to callbacks.
    """
    name = "resume_from_checkpoint"
    folder = next((frame.f_locals.get(name) for frame in _trainer_frames() if name in frame.f_code.co_varnames), None)
    return None if folder is None else os.fspath(folder)


def _trainer_frames() -> Iterator[FrameType]:
    """Yield the stack frames of this thread that run a method that class Trainer defines, innermost first.

    Before Python 3.13, reading the local variables of a frame stores references to them in the frame, which would keep
    objects of the user's program alive. Therefore only frames of the file that defines Trainer are read.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == trainer.__file__ and isinstance(frame.f_locals.get("self"), trainer.Trainer):
            yield frame
        frame = frame.f_back
