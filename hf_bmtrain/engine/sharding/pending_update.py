"""The shard's last asynchronous update."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..comm.communicator import Gather
from ..comm.streams import Ticket


class PendingUpdate:
    """The shard's last asynchronous update. Wait for it before reading or writing the shard.

    A `ShardedBuffer` waits for it when it is gathered, and that is enough, because all that computes with the weights
    gathers first: forward, backward, `parameter.gather()`, `state_dict`. A rank gives its shard to a collective
    after its own wait, so the others, too, get what is updated; copies between GPUs are told by `announce`. And a
    gradient is not written before a forward has gathered its buffer: from then on the current stream is behind the
    update that reads it. Besides, `.data` and `take` wait for it. Other reads and writes of slices (torch operations
    on a parameter itself) are not seen.

    It keeps the gradients until it has been waited for: so their memory, of the current stream, is free for what that
    stream does next, and not before the update has read them.

    ticket: of the update, None if none is pending. ever_asynchronous: whether one has been begun, the same on every
    rank.
    """

    def __init__(self, gather: Gather) -> None:
        self._gather = gather
        self.ticket: Ticket | None = None
        self.ever_asynchronous = False
        self._gradients: Sequence[torch.Tensor] = ()

    def begin(self, ticket: Ticket, gradients: Sequence[torch.Tensor]) -> None:
        """Note that the shard is being written until `ticket`, which follows earlier ones, from these `gradients`."""
        self.ticket, self._gradients, self.ever_asynchronous = ticket, gradients, True

    def announce(self, shard: torch.Tensor) -> None:
        """Make every rank's gathers of this `shard` begin when the update that was just begun is done everywhere.

        Collective: all ranks begin and announce the same updates in the same order, in an optimizer's step.
        """
        assert self.ticket is not None, "begin, then announce"
        self._gather.announce(shard, self.ticket)

    def wait(self) -> None:
        """Make the current stream wait for the update."""
        if self.ticket is not None:
            self.ticket.wait()
            self.ticket, self._gradients = None, ()
