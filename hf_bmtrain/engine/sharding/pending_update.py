"""PendingUpdate: an optimizer's update of a shard that may still be running."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..comm.communicator import Gather
from ..comm.streams import Ticket


class PendingUpdate:
    """The last update of a shard that an optimizer started asynchronously, for example on another stream.

    The current stream must wait for the update before the shard is read or written. These operations include the wait:

    * `ShardedBuffer.gather`,
    * the attribute `.data` of a local (sharded) parameter, and torch operations on it,
    * `parameter.take(full)`, because its result is usually written to the shard next.

    With peer copies, other ranks read this rank's shard directly. `announce` makes them wait for the update as well.

    Until `wait` is called, this object keeps references to the gradients that the update reads, so that their memory is
    not reused.

    Args:
        gather: the object that all-gathers the shard. `announce` makes its later all-gathers wait for the update.

    Attributes:
        ticket: a handle whose `wait` makes the current stream wait until the update has written the shard; None if no
            update is pending.
        ever_asynchronous: whether `begin` has ever been called. All ranks must call `begin` for the same flat buffers,
            so the value is the same on every rank. Code may test it to decide whether to call a collective.
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

        Called in an optimizer's step, after `begin`. It is needed for peer copies: without it, another rank could copy
        the shard from this rank's memory before the update has written it. If the shard is gathered by collectives,
        this method does nothing, because each rank waits for its own update before it joins the all-gather.

        Collective: every rank must call it, for the same flat buffers in the same order.

        shard: this rank's shard, which the update writes.
        """
        assert self.ticket is not None, "call `begin` before `announce`"
        self._gather.announce(shard, self.ticket)

    def wait(self) -> None:
        """Make the current stream wait for the optimizer's update of the shard, if one is pending.

        Call it before the current stream reads or writes the shard. Until the next `begin`, further calls do nothing.
        """
        if self.ticket is not None:
            self.ticket.wait()
            self.ticket, self._gradients = None, ()
