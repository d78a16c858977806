"""The last asynchronous update of a shard."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..comm.communicator import Gather
from ..comm.streams import Ticket


class PendingUpdate:
    """The last asynchronous update of a shard. Wait for it before reading or writing the shard.

    Everything that gathers the weights waits for the update, because `ShardedBuffer.gather` does: forward, backward,
    `parameter.gather()` and `state_dict`. Torch operations on a local parameter, `.data` and `parameter.take` also
    wait, through `settle`. Other ranks get the updated weights as well: a rank passes its shard to a collective only
    after its own update, and `announce` makes copies between peers wait for the updates of all ranks. Gradients are
    safe as well. The next gradient is written after a forward has gathered the buffer. By then the current stream has
    waited for the update that reads the old gradient.

    The gradients are referenced until the wait, because the update reads them on another stream. After the wait, the
    current stream runs after the update, so the allocator may reuse the gradients' memory on the current stream.

    Attributes:
        ticket: the ticket of the update; None if no update is pending.
        ever_asynchronous: whether `begin` has ever been called; the same on every rank.
    """

    def __init__(self, gather: Gather) -> None:
        self._gather = gather
        self.ticket: Ticket | None = None
        self.ever_asynchronous = False
        self._gradients: Sequence[torch.Tensor] = ()

    def begin(self, ticket: Ticket, gradients: Sequence[torch.Tensor]) -> None:
        """Register an update of the shard.

        Args:
            ticket: completes when the shard is written. It must not complete before earlier updates do.
            gradients: the tensors that the update reads.
        """
        self.ticket, self._gradients, self.ever_asynchronous = ticket, gradients, True

    def announce(self, shard: torch.Tensor) -> None:
        """Make later all-gathers of `shard` wait until every rank has made the update of the last `begin`.

        Collective: every rank must call it. All ranks must begin and announce the same updates in the same order, in an
        optimizer's step.
        """
        assert self.ticket is not None, "call `begin` before `announce`"
        self._gather.announce(shard, self.ticket)

    def wait(self) -> None:
        """Make the current stream wait for the update, if one is pending."""
        if self.ticket is not None:
            self.ticket.wait()
            self.ticket, self._gradients = None, ()
