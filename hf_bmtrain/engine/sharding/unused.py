"""UnusedParameters: find the parameters that no rank used in a backward."""

from __future__ import annotations

from collections.abc import Sequence

from ..comm.object_comm import ObjectComm


class UnusedParameters:
    """Finds the parameters of one flat buffer that no rank used in a backward.

    A rank that used all parameters does nothing. Any other rank writes the unused ones to the ranks' key-value store (a
    post) before it starts the reduction of the buffer's gradient. After the CPU has waited for the mean, it reads the
    posts of all ranks. Every rank has started the reduction by then, so a rank without a post used all parameters. The
    posts of one reduction are deleted after the CPU has waited for the mean of a later one, because every rank has
    read them by then.

    Attributes:
        sent: the number of reductions that were started so far. The owner increments it.
    """

    def __init__(self, control: ObjectComm, number: int) -> None:
        """Create it for one flat buffer.

        Args:
            control: exchanges posts between the ranks.
            number: the buffer's number, the same on every rank.
        """
        self._control, self.number = control, number
        self.sent = 0
        self._read: str | None = None

    def post(self, indices: Sequence[int]) -> None:
        """Tell the other ranks, before the reduction starts, which parameters this rank did not use."""
        self._control.post(self._key, ",".join(map(str, indices)))

    def agree(self, indices: Sequence[int]) -> set[int]:
        """Return the parameters that no rank used. The host must have waited for the mean of the gradient.

        indices: the parameters that this rank did not use, as it posted them.
        """
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
    def alone(self) -> bool:
        """Whether there is only one rank."""
        return self._control.size == 1

    @property
    def _key(self) -> str:
        return f"unused/{self.number}/{self.sent}"
