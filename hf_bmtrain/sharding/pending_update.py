"""An update of the weights that an optimizer makes on another stream."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..comm.collectives import Communicator, Ticket


class PendingUpdate:
    """The last update of one shard, for whoever is about to read or write it to wait for.

    A `ShardedBuffer` settles it when it is gathered, and that is enough, because all that computes with the weights
    gathers first: forward, backward, `parameter.gather()`, `state_dict`. A rank gives its shard to a collective
    after its own wait, so the others, too, get what is updated; a lane whose gathers are no collectives is told by
    `announce`. And a gradient is not written before a forward has gathered its buffer: from then on the current
    stream is behind the update that reads it. Besides, `.data` and `take` settle it. Other reads and writes of
    slices (torch operations on a parameter itself) are not seen.

    It keeps the gradients until it is settled: so their memory, of the current stream, is free for what that stream
    does next, and not before the update has read them.
    """

    def __init__(self, lane: Communicator) -> None:
        self._lane = lane
        self._ticket: Ticket | None = None
        self._gradients: Sequence[torch.Tensor] = ()

    def begin(self, ticket: Ticket, gradients: Sequence[torch.Tensor]) -> None:
        """The shard is being written until `ticket`, which comes after earlier ones, from these `gradients`."""
        self._ticket, self._gradients = ticket, gradients

    def announce(self, shard: torch.Tensor) -> None:
        """Let every rank's gathers of this `shard` begin when the update that was just begun is done everywhere.

        Collective: all ranks begin and announce the same updates in the same order, in an optimizer's step.
        """
        assert self._ticket is not None, "begin, then announce"
        self._lane.announce(shard, self._ticket)

    @property
    def pending(self) -> bool:
        """Whether it was begun and nobody has settled it."""
        return self._ticket is not None

    def settle(self) -> None:
        """The current stream waits for it."""
        if self._ticket is not None:
            self._ticket.wait()
            self._ticket, self._gradients = None, ()
