"""The interface by which the engine informs and asks a monitor, which finds out what goes wrong on other ranks.

The implementation is in `hf_bmtrain.faults`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

from ..comm.collective_log import Excerpt
from ..comm.communicator import Communicator
from ..comm.object_comm import ObjectComm

EXIT = "the end of the program"
"""The occasion of the barrier at which ranks wait for each other before their processes end."""


class Monitor:
    """Watches the other ranks, to find out which of them failed, is missing, or issued other collectives.

    It then stops this rank, which would wait for them. This base class does nothing: a single process and a simulation
    use it as it is.

    Attributes:
        names: by the number of each flat buffer, the name that messages show for it.
    """

    def __init__(self) -> None:
        self.names: dict[int, str] = {}

    @property
    def problem(self) -> str | None:
        """Why every rank must stop, such as an error of another rank; None while nothing is known."""
        return None

    def meet(self, rank: int, size: int, timeout: timedelta, init_method: str) -> object:
        """Wait until all ranks have called this, before torch's process group is initialized. Collective.

        Args:
            rank: this process's rank.
            size: the number of ranks.
            timeout: how long to wait.
            init_method: where the ranks meet, as for `torch.distributed.init_process_group`.

        Returns:
            An object that the caller must keep until the process group is initialized.

        Raises:
            RuntimeError: not all ranks have come in time. The message names those that are missing.
        """

    def open(self, control: ObjectComm, rank: int, interrupt: Callable[[], None], busy: Callable[[], bool]) -> None:
        """Start watching the other ranks, once this rank can exchange objects with them. Collective.

        Args:
            control: exchanges objects between the ranks.
            rank: this process's rank.
            interrupt: to be called when a problem is found; ends this rank's GPU operations that wait for other ranks.
            busy: returns whether this rank's device has work that is not complete. Any thread may call it.
        """

    def add(self, communicator: Communicator) -> None:
        """Watch the collectives of a new communicator. Every rank adds its communicators in the same order."""

    def excerpts(self) -> list[Excerpt]:
        """Return the last entries of each communicator's collective log, for `compare` on another rank."""
        return []

    def compare(self, rank: int, theirs: Sequence[Excerpt]) -> str | None:
        """Compare this rank's collective logs with those of another rank.

        Args:
            rank: the other rank.
            theirs: what `excerpts` returned there.

        Returns:
            The first difference in words, or None if there is none.
        """

    def missing(self) -> str:
        """Say in words which ranks this rank is waiting for, where in their programs they are, and the likely cause."""
        return ""

    def end(self, how: str) -> None:
        """Tell the other ranks how this rank's program ended, in words. Only the first call has an effect."""

    def stop(self) -> None:
        """Stop watching the other ranks."""
