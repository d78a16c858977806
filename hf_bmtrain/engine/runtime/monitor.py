"""What the engine tells a monitor of the ranks, and asks it. `hf_bmtrain.faults` has the one that watches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

from ..comm.collective_log import Excerpt
from ..comm.communicator import Communicator
from ..comm.object_comm import ObjectComm

EXIT = "the end of the program"
"""The occasion for which ranks wait before they leave together."""


class Monitor:
    """Watches nothing, as one process or a simulation needs it.

    names: the names of flat buffers by number, for messages.
    """

    def __init__(self) -> None:
        self.names: dict[int, str] = {}

    @property
    def problem(self) -> str | None:
        """Why every rank must stop; None if nothing is known."""
        return None

    def meet(self, rank: int, size: int, timeout: timedelta, init_method: str) -> object:
        """Wait until all ranks have come. Keep the result until the process group is there. Collective.

        Raises RuntimeError, with the ranks that did not come, after the timeout.
        """

    def open(self, control: ObjectComm, rank: int, interrupt: Callable[[], None]) -> None:
        """Begin to watch. Collective.

        Args:
            control: exchanges objects between the ranks.
            interrupt: ends this rank's operations on a GPU that wait for other ranks.
        """

    def add(self, communicator: Communicator) -> None:
        """Watch a communicator that was opened, in the same order on every rank."""

    def excerpts(self) -> list[Excerpt]:
        """Return the end of each collective log, for `compare` on another rank."""
        return []

    def compare(self, rank: int, theirs: Sequence[Excerpt]) -> str | None:
        """Return how this rank's collectives differ from those of another `rank`, None if they do not."""

    def missing(self) -> str:
        """Return for which ranks this one waits, where they are, and why."""
        return ""

    def end(self, how: str) -> None:
        """Show the other ranks how this rank's program ended. A second call does nothing."""

    def stop(self) -> None:
        """Stop watching."""
