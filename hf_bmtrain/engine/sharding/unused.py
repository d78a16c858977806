"""UnusedParameters: find the parameters that no rank used in a backward."""

from __future__ import annotations

from collections.abc import Sequence

from ..comm.object_comm import ObjectComm


class UnusedParameters:
    """Finds the parameters of one flat buffer that no rank used in a backward, so that their `.grad` is not changed.

    1. Before the gradient of the buffer is reduced, a rank that did not use some parameters posts their indices in a
       key-value store (`post`). A rank that used all parameters posts nothing.
    2. After the host has waited for the mean gradient, each rank that has posted reads all posts (`agree`). By then,
       every rank has started the reduction, so every rank with unused parameters has posted them. No rank used a
       parameter if its index is in the posts of all ranks.

    The caller does not post frozen parameters, which get no `.grad` in any case. It also leaves out parameters that
    already have a `.grad`, because the mean is added to it in any case.

    Args:
        control: gives access to the key-value store in which the ranks post their unused parameters.
        number: the flat buffer's number in the order of creation, the same on every rank.

    Attributes:
        sent: the number of gradient reductions of the flat buffer that were started so far. GradientBuffer increments
            it. The number is part of the key under which a post is stored.
    """

    def __init__(self, control: ObjectComm, number: int) -> None:
        self._control, self.number = control, number
        self.sent = 0
        self._read: str | None = None

    def post(self, indices: Sequence[int]) -> None:
        """Post the indices of the parameters that this rank did not use, for the other ranks to read in `agree`.

        Call this before the reduction of the gradient starts, and only if there are such parameters.

        indices: the indices of these parameters in the flat buffer.
        """
        self._control.post(self._key, ",".join(map(str, indices)))

    def agree(self, indices: Sequence[int]) -> set[int]:
        """Return the indices of the parameters that no rank used in the backward.

        Call this after the host has waited for the mean gradient: by then, every rank with unused parameters has called
        `post`.

        indices: the indices of the parameters that this rank did not use, as passed to `post`.
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
        """Whether there is only one rank, so that no other rank's posts have to be read."""
        return self._control.size == 1

    @property
    def _key(self) -> str:
        return f"unused/{self.number}/{self.sent}"
