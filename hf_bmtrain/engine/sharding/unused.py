"""Agreement between the ranks on the parameters that none of them used in a backward."""

from __future__ import annotations

from collections.abc import Sequence

from ..comm.object_comm import ObjectComm


class UnusedParameters:
    """Finds the parameters of one buffer that no rank used in a backward.

    A rank that used all of them does nothing. Another one posts those that it did not use before it sends the buffer's
    gradient, and reads all ranks' posts after the mean has arrived on the host: every rank has sent by then, so a rank
    without a post used all. The posts of one gradient are deleted after the mean of a later one has arrived: every rank
    has read them by then.

    sent: the number of gradients that were sent, which the owner counts.
    """

    def __init__(self, control: ObjectComm, number: int) -> None:
        """number: of the buffer, the same on every rank."""
        self._control, self.number = control, number
        self.sent = 0
        self._read: str | None = None

    def post(self, indices: Sequence[int]) -> None:
        """Tell the other ranks that this one did not use these parameters, before the gradient is sent."""
        self._control.post(self._key, ",".join(map(str, indices)))

    def agree(self, indices: Sequence[int]) -> set[int]:
        """Return those of `indices`, which this rank posted, that no rank used. The mean has arrived on the host."""
        if self._control.size == 1:
            return set(indices)
        posts = self._control.read_posts(self._key)
        if self._read is not None:
            self._control.delete_posts(self._read)
        self._read = self._key
        if len(posts) < self._control.size:
            return set()
        return set(indices).intersection(*({int(index) for index in post.split(",")} for post in posts))

    @property
    def _key(self) -> str:
        return f"unused/{self.number}/{self.sent}"
