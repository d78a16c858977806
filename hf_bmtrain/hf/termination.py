"""Termination: SIGTERM, as a scheduler sends it before it takes a machine away, agreed on by the ranks."""

from __future__ import annotations

import signal
from typing import Any

from ..engine.runtime.world import current_world


class Termination:
    """Notes SIGTERM instead of dying of it, until `close`. Made in the main thread, as Python requires."""

    def __init__(self) -> None:
        self._received = False
        self._before = signal.signal(signal.SIGTERM, self._note)

    def _note(self, *_: Any) -> None:
        self._received = True

    def agreed(self) -> bool:
        """Return whether any rank has received the signal: the same on every rank. Collective."""
        return any(current_world().gather_objects(self._received))

    def close(self) -> None:
        """Let the signal do what it did before."""
        signal.signal(signal.SIGTERM, self._before)
