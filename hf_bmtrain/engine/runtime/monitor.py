"""The interface of the monitor, which watches the other ranks for failures. `hf_bmtrain.faults` implements it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

from ..comm.collective_log import Excerpt
from ..comm.communicator import Communicator
from ..comm.object_comm import ObjectComm

EXIT = "the end of the program"
"""The name, in messages, of the barrier at which ranks wait for each other before their processes end."""


class Monitor:
    """Watches the other ranks, to find out whether one has failed, is missing, or has issued other collectives.

    If so, it stops this rank, which would otherwise wait for that rank. This base class does nothing, which suits a
    single process and a simulation.

    Attributes:
        names: {number of a flat buffer: its name in messages}.
    """

    def __init__(self) -> None:
        self.names: dict[int, str] = {}

    @property
    def problem(self) -> str | None:
        """The reason for which every rank must stop, such as an error of another rank, or None."""
        return None

    def meet(self, rank: int, size: int, timeout: timedelta, init_method: str) -> object:
        """Wait until all ranks have called this. It is called before torch's process group is initialized.

        Collective: every rank must call it.

        Args:
            rank: this process's rank.
            size: the number of ranks.
            timeout: the time to wait.
            init_method: the URL at which the ranks meet, as for `torch.distributed.init_process_group`.

        Returns:
            An object that the caller must keep until the process group is initialized.

        Raises:
            RuntimeError: not all ranks arrived in time. The message names the missing ranks.
        """

    def open(self, control: ObjectComm, rank: int, interrupt: Callable[[], None], busy: Callable[[], bool]) -> None:
        """Start watching the other ranks, once this rank can exchange objects with them.

        Collective: every rank must call it.

        Args:
            control: exchanges objects between the ranks.
            rank: this process's rank.
            interrupt: a function that the monitor calls when it finds a problem. It ends those GPU operations of this
                rank that wait for other ranks.
            busy: a function that returns whether this rank's device has unfinished work. Any thread may call it.
        """

    def add(self, communicator: Communicator) -> None:
        """Watch the collectives of a new communicator. All ranks must add their communicators in the same order."""

    def excerpts(self) -> list[Excerpt]:
        """Return, for each communicator, the last collectives of this rank, for `compare` on another rank."""
        return []

    def compare(self, rank: int, theirs: Sequence[Excerpt]) -> str | None:
        """Find out whether another rank has issued other collectives than this rank.

        Args:
            rank: the other rank.
            theirs: the result of `excerpts` on that rank.

        Returns:
            A description of the first difference, or None if there is none.
        """

    def missing(self) -> str:
        """Describe the ranks for which this rank waits, the lines of code at which they are, and the likely cause."""
        return ""

    def end(self, how: str) -> None:
        """Tell the other ranks how this rank's program ended, in the words of `how`. Later calls have no effect."""

    def stop(self) -> None:
        """Stop watching the other ranks."""
