"""Exchange Muon's updates of matrices: send them to the ranks that orthogonalize them, and get the results back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ...engine.comm.communicator import Communicator
from .matrices import Matrix


class Round:
    """Sends the updates of several matrices to ranks that orthogonalize them, and sends the results back.

    The rank that orthogonalizes the update of a matrix is the owner of this matrix.

    Every rank must call `send`, `orthogonalize` and `receive`, in this order. The communication overlaps with other
    work that is queued between these calls.

    Args:
        matrices: the matrices of the round, in the same order on all ranks, with their `owner` set.
        communicator: the communicator of the ranks over which the matrices are sharded.

    Attributes:
        matrices: the matrices, sorted by owner, in the same order on all ranks.
    """

    def __init__(self, matrices: Sequence[Matrix], communicator: Communicator) -> None:
        self._communicator, self._rank, ranks = communicator, communicator.rank, range(communicator.size)
        self.matrices = sorted(matrices, key=lambda matrix: matrix.owner)
        self._mine = [matrix for matrix in self.matrices if matrix.owner == self._rank]
        owned = [[matrix for matrix in self.matrices if matrix.owner == owner] for owner in ranks]
        self._by_rank = [[matrix.counts[source] for matrix in self._mine] for source in ranks]
        self._of_owners = [sum(matrix.counts[self._rank] for matrix in owned[owner]) for owner in ranks]
        self._of_ranks = [*map(sum, self._by_rank)]

    def send(self, parts: Sequence[torch.Tensor]) -> None:
        """Send this rank's elements of all updates to the owners of the matrices, the ranks that orthogonalize them.

        Collective: every rank must call it.

        Args:
            parts: for each of `matrices`, this rank's elements of its update, 1-D bfloat16, possibly empty.
        """
        self._sent = torch.cat([*parts])
        self._received = self._sent.new_empty(sum(self._of_ranks))
        self._ticket = self._communicator.all_to_all(self._received, self._sent, self._of_ranks, self._of_owners)

    def orthogonalize(self, function: Callable[[Matrix, torch.Tensor], torch.Tensor]) -> None:
        """Orthogonalize the updates of the matrices that this rank owns, and send each rank its part of the results.

        Collective: every rank must call it.

        Args:
            function: called with a Matrix and its full update, a tensor of shape `Matrix.shape`, which the function may
                overwrite. It returns the orthogonalized update, a tensor of the same shape and dtype.
        """
        self._ticket.wait()
        # The received elements are sorted by the rank that sent them, and then by matrix. Each of this rank's `count`
        # matrices has one piece from each rank. For the matrix with index `number`, these are the pieces with the
        # indices `number`, `number + count`, `number + 2 * count` and so on.
        pieces = [*self._received.split([count for counts in self._by_rank for count in counts])]
        count = len(self._mine)
        full = [torch.cat(pieces[number::count]) for number in range(count)]
        results = [function(m, x.view(m.shape)).reshape(-1) for m, x in zip(self._mine, full)]
        divided = [result.split(matrix.counts) for matrix, result in zip(self._mine, results)]
        back = [parts[rank] for rank in range(self._communicator.size) for parts in divided]
        self._sent, self._received = torch.cat(back) if back else self._received, torch.empty_like(self._sent)
        self._ticket = self._communicator.all_to_all(self._received, self._sent, self._of_owners, self._of_ranks)

    def receive(self) -> list[torch.Tensor]:
        """Return this rank's elements of the orthogonalized updates, one tensor for each of `matrices`.

        The owners of the matrices have sent these elements in `orthogonalize`. The device's current stream waits until
        they have arrived.
        """
        self._ticket.wait()
        results = self._received
        del self._sent, self._received, self._ticket
        return [*results.split([matrix.counts[self._rank] for matrix in self.matrices])]
