"""The interface of the monitor, which watches the other ranks for failures. `hf_bmtrain.faults` implements it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

from ..comm.collective_log import Excerpt
from ..comm.communicator import Communicator
from ..comm.object_comm import ObjectComm

EXIT = "the end of the program"
"""The name of the barrier at which ranks wait for each other before their processes end, for messages."""


class Monitor:
    """The interface of a monitor, which watches the other ranks.

    If another rank has failed, is missing, or has issued different collectives, this rank would wait for it forever. So
    the monitor stops this rank. The subclass `Watch` in hf_bmtrain/faults does this if there are several ranks. The
    base class, whose methods do nothing, is used if there is only one rank, and in simulations of several ranks in one
    process.

    Attributes:
        names: {`number` of a ShardedBuffer: the name by which messages refer to this flat buffer}.
    """

    def __init__(self) -> None:
        self.names: dict[int, str] = {}

    @property
    def problem(self) -> str | None:
        """The reason why every rank must stop, such as an error on another rank; None if there is no reason."""
        return None

    def meet(self, rank: int, size: int, timeout: timedelta, init_method: str) -> object:
        """Wait until all ranks have called this. Called before torch's process group is initialized.

        Collective: every rank must call it.

        Args:
            rank: this process's rank.
            size: the number of ranks.
            timeout: the longest time to wait.
            init_method: the URL at which the ranks meet, as for `torch.distributed.init_process_group`.

        Returns:
            An object to which the caller must keep a reference until the process group is initialized, because it may
            be the server of the key-value store through which the group connects.

        Raises:
            RuntimeError: not all ranks arrived in time. The message names the missing ranks.
        """

    def open(self, control: ObjectComm, rank: int, interrupt: Callable[[], None], busy: Callable[[], bool]) -> None:
        """Start watching the other ranks. Called as soon as this rank can exchange objects with them.

        Collective: every rank must call it.

        Args:
            control: exchanges objects between the ranks.
            rank: this process's rank.
            interrupt: a function that aborts the GPU operations in which this rank waits for other ranks. The monitor
                calls it if every rank must stop and this rank does not stop by itself.
            busy: a function that returns whether this rank's device has unfinished work. Any thread may call it.
        """

    def add(self, communicator: Communicator) -> None:
        """Watch the collectives of a new communicator. All ranks must add their communicators in the same order."""

    def excerpts(self) -> list[Excerpt]:
        """Return the last collectives that this rank has issued in each communicator.

        Used to find a rank that has issued different collectives: the ranks exchange their results of this method, for
        example in `World.barrier`, and each rank passes the other ranks' results to `compare`.
        """
        return []

    def compare(self, rank: int, theirs: Sequence[Excerpt]) -> str | None:
        """Compare the collectives that another rank has issued with those of this rank.

        Args:
            rank: the other rank.
            theirs: the result of `excerpts` on that rank.

        Returns:
            A description of the first difference, or None if there is none.
        """

    def missing(self) -> str:
        """Return a description of the ranks for which other ranks are waiting, for an error message after a timeout.

        The description says how long the other ranks have waited, and in which operations. For each rank for
        which they wait, it gives the line of the program that the rank is executing, and why that rank has not joined
        these operations.
        """
        return ""

    def end(self, how: str) -> None:
        """Report to the other ranks how this rank's program ended. Later calls have no effect.

        Called after an uncaught exception, and when the process exits.

        Args:
            how: a description of the end, such as "raised ValueError: ...".
        """

    def stop(self) -> None:
        """Stop watching the other ranks. Called when the process exits, and if the communicators cannot be opened."""
