"""Detect on all ranks that one of them has received SIGTERM, which job schedulers send before they end a job."""

from __future__ import annotations

import ctypes
import signal
from typing import Any

from ..engine.runtime.world import current_world

_sigaction = ctypes.CDLL(None).sigaction


class Termination:
    """A handler of SIGTERM that records the signal instead of ending the process, so that a checkpoint can be saved.

    With `save_on_sigterm=True`, BMTrainCallback calls `agreed` after each step and each epoch. If any rank has received
    SIGTERM, all ranks save a checkpoint and exit. `close` restores the previous handler.

    A Termination must be constructed in the main thread, because only this thread may set signal handlers in Python.
    """

    def __init__(self) -> None:
        self._received = False
        # Python does not know handlers that were set in C, for example by faulthandler.register. So also keep the
        # `struct sigaction` of the C library, which is much smaller than 1,024 bytes.
        self._action = ctypes.create_string_buffer(1024)
        _sigaction(signal.SIGTERM, None, self._action)
        self._before = signal.signal(signal.SIGTERM, self._note)

    def _note(self, *_: Any) -> None:
        self._received = True

    def agreed(self) -> bool:
        """Return whether any rank has received SIGTERM since this object was constructed.

        The result is the same on every rank. Called after each step and each epoch. Collective: every rank must call
        it.
        """
        return any(current_world().gather_objects(self._received))

    def close(self) -> None:
        """Restore the handler of SIGTERM that this object has replaced. Called when training ends or fails."""
        # The previous handler is None if it was set in C before Python started. `signal.signal` does not accept None.
        signal.signal(signal.SIGTERM, signal.SIG_DFL if self._before is None else self._before)
        _sigaction(signal.SIGTERM, self._action, None)
