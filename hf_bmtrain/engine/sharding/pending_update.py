"""PendingUpdate: an optimizer's update of a shard that may still be running."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..comm.communicator import Gather
from ..comm.streams import Ticket


class PendingUpdate:
    """The last update of a shard that an optimizer started asynchronously, for example on another stream.

    The current stream must wait for the update before the shard is read or written. `ShardedBuffer.gather`,
    `parameter.take`, the attribute `.data` and torch operations on a local parameter include this wait. If other ranks
    copy weights directly from this rank's memory, `announce` makes them wait as well.

    Until `wait` is called, this object keeps references to the gradients that the update reads, so that their memory is
    not reused.

    Args:
        gather: the object that all-gathers the shard. `announce` tells it about the update.

    Attributes:
        ticket: a handle whose `wait` makes the current stream wait until the update has written the shard; None if no
            update is pending.
        ever_asynchronous: whether `begin` has ever been called; the same on every rank.
    """

    def __init__(self, gather: Gather) -> None:
        self._gather = gather
        self.ticket: Ticket | None = None
        self.ever_asynchronous = False
        self._gradients: Sequence[torch.Tensor] = ()

    def begin(self, ticket: Ticket, gradients: Sequence[torch.Tensor]) -> None:
        """Register an asynchronous update of the shard that an optimizer has started.

        Args:
            ticket: a handle whose `wait` makes the current stream wait until the shard is written. Because it replaces
                the ticket of an earlier update, it must not complete before that update does.
            gradients: the tensors that the update reads. They are kept in memory until `wait` is called.
        """
        # References to the gradients are enough, copies are not needed: the next backward overwrites the gradients only
        # after the update has read them, because the forward before this backward waits for the update.
        self.ticket, self._gradients, self.ever_asynchronous = ticket, gradients, True

    def announce(self, shard: torch.Tensor) -> None:
        """Make later all-gathers of `shard` wait until every rank has completed the update that `begin` registered.

        Collective: every rank must call it. In an optimizer's step, all ranks must call `begin` and `announce` for the
        same flat buffers in the same order.
        """
        assert self.ticket is not None, "call `begin` before `announce`"
        self._gather.announce(shard, self.ticket)

    def wait(self) -> None:
        """Make the current stream wait for the optimizer's update of the shard, if one is pending.

        Call it before the current stream reads or writes the shard. More calls have no effect until the next `begin`.
        """
        if self.ticket is not None:
            self.ticket.wait()
            self.ticket, self._gradients = None, ()
