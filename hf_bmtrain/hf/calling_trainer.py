"""Find the Trainer that is calling: Trainer passes its arguments, state and model to callbacks, but not itself."""

from __future__ import annotations

import sys

import transformers


def calling_trainer() -> transformers.Trainer | None:
    """Return the innermost Trainer that has a method running on this thread, or None."""
    frame = sys._getframe(1)
    while frame is not None:
        if isinstance(found := frame.f_locals.get("self"), transformers.Trainer):
            return found
        frame = frame.f_back
    return None
