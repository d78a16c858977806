"""An update of the weights that an optimizer makes on another stream."""

from __future__ import annotations

from .comm import Ticket


class PendingUpdate:
    """The last update of one shard, for whoever is about to read or write it to wait for.

    A `ShardedBuffer` settles it when it is gathered, and that is enough, because all that computes with the weights
    gathers first: forward, backward, `parameter.gather()`, `state_dict`. A rank gives its shard to a collective
    after its own wait, so the others, too, get what is updated. And a gradient is not written before a forward has
    gathered its buffer: from then on the current stream is behind the update that reads it. Besides, `.data` and
    `take` settle it. Other reads and writes of slices (torch operations on a parameter itself) are not seen.
    """

    def __init__(self) -> None:
        self._ticket: Ticket | None = None

    def begin(self, ticket: Ticket) -> None:
        """The shard is being written until `ticket`, which comes after earlier ones."""
        self._ticket = ticket

    def settle(self) -> None:
        """The current stream waits for it."""
        if self._ticket is not None:
            self._ticket.wait()
            self._ticket = None
