"""The division of tokens and attention heads among the ranks of a group that share rows (sequences) of a batch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from ...engine.comm.communicator import Communicator
from ...engine.runtime.world import current_world


def divide(count: int, size: int) -> list[range]:
    """Divide items (such as tokens or heads) among ranks, in order, and return the range of each rank's items.

    If `count` is not a multiple of `size`, the first ranks get one item more than the others.

    Args:
        count: the number of items. If it is less than `size`, some ranges are empty.
        size: the number of ranks.
    """
    least, more = divmod(count, size)
    starts = [rank * least + min(rank, more) for rank in range(size + 1)]
    return [range(start, stop) for start, stop in zip(starts, starts[1:])]


@dataclass(frozen=True)
class Parts:
    """The division of a row's tokens among the ranks of a group. A row is one sequence of a batch.

    This object does not store the communicator of the group, so a model that refers to this object can be deep-copied.
    The property `group` gets the communicator from the current world each time.

    Attributes:
        length: the number of tokens in a row.
        size: the number of ranks in the group.
        rank: the index of this rank in the group.
    """

    length: int
    size: int
    rank: int

    @cached_property
    def tokens(self) -> list[range]:
        """For each rank of the group, the range of the positions of its tokens in the row (sequence)."""
        return divide(self.length, self.size)

    @property
    def own(self) -> range:
        """The range of the positions of this rank's tokens in the row (sequence)."""
        return self.tokens[self.rank]

    @property
    def group(self) -> Communicator:
        """The communicator between the ranks that share the rows (sequences) of a batch."""
        return current_world().open_group(self.size)

    def take(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Return a view of this rank's tokens of a tensor that has all tokens.

        Args:
            tensor: a tensor with all tokens of a row (sequence) in the dimension `dim`.
            dim: the dimension of the tokens.
        """
        return tensor.narrow(dim, self.own.start, len(self.own))


@dataclass(frozen=True)
class Heads:
    """The division of attention heads among the ranks of a group that share rows (sequences).

    Query heads are divided as evenly as possible. Each rank gets the key-value heads that its query heads use, so
    several ranks may get the same key-value head.

    Attributes:
        queries: the number of query heads.
        keys: the number of key-value heads, a divisor of `queries`.
        size: the number of ranks in the group.
    """

    queries: int
    keys: int
    size: int

    @cached_property
    def of_queries(self) -> list[range]:
        """For each rank of the group, the indices of its query heads. A rank may have no head."""
        return divide(self.queries, self.size)

    @cached_property
    def of_keys(self) -> list[range]:
        """For each rank of the group, the indices of the key-value heads that the rank's query heads use."""
        share = self.queries // self.keys
        return [range(heads.start // share, -(-heads.stop // share) if heads else heads.start // share)
                for heads in self.of_queries]  # fmt: skip

    def repeated(self, rank: int) -> list[int] | None:
        """Return which key-value head each query head of `rank` uses, or None if the heads need not be copied.

        Attention functions assume that each key-value head belongs to the same number of consecutive query heads. If
        this is true for the heads of `rank`, the result is None. If it is false, the caller copies key-value heads, so
        that each query head has its own.

        For example, divide 12 query heads and 3 key-value heads between 2 ranks. Rank 0 has 6 query heads, of which
        four use its first key-value head, and two use its second. The result is [0, 0, 0, 0, 1, 1].

        Args:
            rank: the index of a rank in the group.

        Returns:
            For each query head of the rank, the index of its key-value head among the key-value heads of the rank; or
            None.
        """
        share, queries, keys = self.queries // self.keys, self.of_queries[rank], self.of_keys[rank]
        places = [head // share - keys.start for head in queries]
        if keys and len(queries) % len(keys) == 0:
            each = len(queries) // len(keys)
            if places == [number // each for number in range(len(queries))]:
                return None
        return places
