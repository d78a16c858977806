"""Detect on all ranks that one of them has received SIGTERM, which job schedulers send before they end a job."""

from __future__ import annotations

import signal
from typing import Any

from ..engine.runtime.world import current_world


class Termination:
    """A handler of SIGTERM that records the signal instead of ending the process. `close` removes the handler.

    It must be constructed in the main thread, because Python allows only this thread to set handlers of signals.
    """

    def __init__(self) -> None:
        self._received = False
        self._before = signal.signal(signal.SIGTERM, self._note)

    def _note(self, *_: Any) -> None:
        self._received = True

    def agreed(self) -> bool:
        """Return whether any rank has received SIGTERM. Collective: every rank must call it."""
        return any(current_world().gather_objects(self._received))

    def close(self) -> None:
        """Restore the previous handler of SIGTERM."""
        signal.signal(signal.SIGTERM, self._before)
