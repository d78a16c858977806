"""Find what Trainer does not pass to callbacks: itself, and the checkpoint that it resumes from."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from types import FrameType

import transformers


def calling_trainer() -> transformers.Trainer | None:
    """Return the innermost Trainer that has a method running on this thread, or None."""
    return next((frame.f_locals["self"] for frame in _trainer_frames()), None)


def resumed_folder() -> str | None:
    """Return the checkpoint folder from which the Trainer that is calling has resumed, or None."""
    trainer = calling_trainer()
    given = (
        frame.f_locals.get("resume_from_checkpoint") for frame in _trainer_frames() if frame.f_locals["self"] is trainer
    )
    return next((os.fspath(each) for each in given if isinstance(each, (str, os.PathLike))), None)


def _trainer_frames() -> Iterator[FrameType]:
    """Yield the frames of this thread that run a method of a Trainer, innermost first."""
    frame = sys._getframe(1)
    while frame is not None:
        if isinstance(frame.f_locals.get("self"), transformers.Trainer):
            yield frame
        frame = frame.f_back
