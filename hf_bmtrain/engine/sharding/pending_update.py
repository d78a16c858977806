"""The last asynchronous update of a shard."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..comm.communicator import Gather
from ..comm.streams import Ticket


class PendingUpdate:
    """The last asynchronous update of a shard. Wait for it before reading or writing the shard.

    `ShardedBuffer.gather` waits for the update. This is enough, because whatever computes with the weights gathers
    first: forward, backward, `parameter.gather()`, `state_dict`. Other ranks get the updated weights too: each rank
    waits for its own update before it passes the shard to a collective, and peer copies wait as `announce` tells
    them. Gradients are safe as well: the next gradient is written after a forward has gathered the buffer, so the
    current stream has waited by then for the update that reads the old gradient. `.data` and `take` wait too. Other
    reads and writes of local parameters (torch operations on a parameter itself) do not wait.

    The gradients are referenced until the wait. The allocator reuses their memory in the order of the current stream,
    which is behind the update from then on.

    Attributes:
        ticket: the ticket of the update, None if no update is pending.
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
            ticket: completes when the shard is written, and not before earlier updates are complete.
            gradients: the tensors that the update reads.
        """
        self.ticket, self._gradients, self.ever_asynchronous = ticket, gradients, True

    def announce(self, shard: torch.Tensor) -> None:
        """Make later all-gathers of `shard` wait until every rank has made the update registered last. Collective.

        It is the update of the last call of `begin`. All ranks begin and announce the same updates in the same order,
        in an optimizer's step.
        """
        assert self.ticket is not None, "begin, then announce"
        self._gather.announce(shard, self.ticket)

    def wait(self) -> None:
        """Make the current stream wait for the update, if one is pending."""
        if self.ticket is not None:
            self.ticket.wait()
            self.ticket, self._gradients = None, ()
