"""What a forward gathers after a block without a neighbour: found out in one, gathered beside the block in the next."""

from __future__ import annotations

import weakref
from typing import Protocol


class Follower(Protocol):
    """A buffer outside blocks."""

    def gather_ahead(self) -> None:
        """Start to gather it, unless it is whole."""

    def release_unread(self) -> None:
        """Release it if it was gathered ahead and nobody has read it since."""


class Followers:
    """Of one block: what its last forward gathered between it and the next block, or the end, in order.

    What is gathered ahead is on every rank what all of them have gathered there before, so that gathers which are
    collectives stay in one order. Nothing is kept alive.
    """

    def __init__(self) -> None:
        self._seen: list[weakref.ref[Follower]] = []

    def note(self, follower: Follower) -> None:
        self._seen.append(weakref.ref(follower))

    def take(self) -> list[Follower]:
        """Those that are noted, which are forgotten."""
        seen, self._seen = self._seen, []
        return [follower for follower in (reference() for reference in seen) if follower is not None]
