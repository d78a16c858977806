"""Find the matrices that Muon updates, choose the rank that orthogonalizes each, and plan their exchange in rounds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from ...engine.blocks.block import CheckpointBlock
from ...engine.sharding.parameter import DistributedParameter, is_part
from ...engine.sharding.slots import find_places

ROUND_ELEMENTS = 1 << 24
"""The approximate number of elements that each rank orthogonalizes in one round (an exchange of several matrices). In
bfloat16 they take 32 MiB, enough for the full speed of the links between GPUs."""
_NOT_HIDDEN = (torch.nn.Embedding, torch.nn.EmbeddingBag, torch.nn.modules.conv._ConvNd)


def is_matrix(shape: torch.Size) -> bool:
    """Return whether `shape` is that of a matrix, or of a stack of matrices, with at least two rows and two columns."""
    return len(shape) in (2, 3) and min(shape[-2:]) > 1 and shape.numel() > 0


def refuse_parts(parameters: Iterable[torch.Tensor]) -> None:
    """Raise ValueError if tensor parallelism has split one of `parameters`: Muon needs the full matrix."""
    if any(map(is_part, parameters)):
        raise ValueError(
            "MuonOptimizer orthogonalizes full matrices, but with tp_size each rank has only a part of some of them. "
            "Use bmt.optim.AdamOptimizer(model.parameters()), or call init_distributed without tp_size."
        )


def divide(model: torch.nn.Module) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    """Return two lists of a model's parameters: the matrices of hidden layers, and all others, in the model's order.

    Muon updates the first list, and AdamW the second. A parameter is in the first list if it meets these conditions:

    * It is a matrix, or a stack of matrices (such as the experts of a layer), with at least two rows and two columns.
    * All modules that use it are in blocks, and none of them is an embedding or a convolution.

    Raises ValueError if tensor parallelism has split a parameter of the model.
    """
    inside = {module for block in model.modules() if isinstance(block, CheckpointBlock) for module in block.modules()}
    refuse_parts(model.parameters())
    hidden: set[torch.nn.Parameter] = set()
    others: set[torch.nn.Parameter] = set()
    for module, _, parameter in find_places(model.modules()):
        usable = module in inside and not isinstance(module, _NOT_HIDDEN) and is_matrix(parameter.shape)
        (hidden if usable else others).add(parameter)
    matrices = [p for p in model.parameters() if p in hidden and p not in others]
    return matrices, [p for p in model.parameters() if p not in hidden or p in others]


@dataclass(eq=False)
class Matrix:
    """A matrix, or several consecutive matrices of a stack, which one rank orthogonalizes.

    Attributes:
        run: the index of the optimizer's run (a contiguous range of parameters that are updated together) that contains
            the parameter.
        parameter: the parameter that contains the matrix.
        start: the index of the matrix's first element in the flattened parameter.
        shape: (rows, columns) or (count, rows, columns).
        owner: the rank that orthogonalizes it.
    """

    run: int
    parameter: torch.nn.Parameter
    start: int
    shape: tuple[int, ...]
    owner: int = 0

    @property
    def cost(self) -> int:
        """The cost of orthogonalizing the matrix by the Newton–Schulz iteration, in arbitrary units.

        `assign` and `rounds_of` use it to divide the work evenly.
        """
        return math.prod(self.shape) * min(self.shape[-2:])

    @cached_property
    def counts(self) -> list[int]:
        """The numbers of elements of the matrix that the ranks store, in rank order.

        In the flattened matrix, the elements of rank 0 come first, then those of rank 1, and so on. Each rank sends its
        elements to the owner of the matrix, and gets as many elements of the result back.
        """
        return [max(0, stop - start) for start, stop in map(self._range, range(self._size))]

    def local(self, rank: int) -> tuple[int, int]:
        """Return (start, stop) of the matrix's elements, as indices into the flat local parameter of `rank`.

        The local parameter consists of the elements that `rank` stores. Returns (0, 0) if none of them belongs to the
        matrix.
        """
        start, stop = self._range(rank)
        first = self._layout_range(rank).tensor_start if isinstance(self.parameter, DistributedParameter) else 0
        return (start - first, stop - first) if start < stop else (0, 0)

    @property
    def _size(self) -> int:
        return self.parameter.buffer.layout.world_size if isinstance(self.parameter, DistributedParameter) else 1

    def _layout_range(self, rank: int):
        assert isinstance(self.parameter, DistributedParameter)
        return self.parameter.buffer.layout.range_of(self.parameter.index, rank)

    def _range(self, rank: int) -> tuple[int, int]:
        """Return (start, stop) of the matrix's elements that `rank` stores, as indices into the flat full parameter.

        If `rank` stores no element of the matrix, `stop` is not above `start`.
        """
        stop = self.start + math.prod(self.shape)
        if not isinstance(self.parameter, DistributedParameter):
            return self.start, stop
        stored = self._layout_range(rank)
        return max(self.start, stored.tensor_start), min(stop, stored.tensor_stop)


def matrices_of(run: int, parameter: torch.nn.Parameter, size: int) -> list[Matrix]:
    """Divide a parameter into Matrix objects, each of which one rank will orthogonalize.

    A 2-D parameter is one Matrix. A 3-D parameter, a stack of matrices, becomes at most `size` Matrix objects, so that
    all ranks can share the work.

    Args:
        run: the index of the optimizer's run (a contiguous range of parameters that are updated together) that contains
            the parameter.
        parameter: the parameter, a matrix or a stack of matrices.
        size: the number of ranks.
    """
    shape = tuple(parameter.shape)
    if len(shape) == 2:
        return [Matrix(run, parameter, 0, shape)]
    count, each = -(-shape[0] // size), math.prod(shape[1:])
    return [
        Matrix(run, parameter, first * each, (min(count, shape[0] - first), *shape[1:]))
        for first in range(0, shape[0], count)
    ]


def assign(matrices: Sequence[Matrix], size: int) -> None:
    """Choose the rank that orthogonalizes each matrix, its owner, so that all ranks have about the same cost.

    All ranks make the same choice. Matrices are assigned in descending order of cost. A matrix goes to the rank that
    stores the largest part of it, which saves traffic. If that rank's total cost would then exceed an equal share (the
    cost of all matrices divided by `size`), the matrix goes to the rank with the smallest total cost so far instead.

    Args:
        matrices: the matrices. Their `owner` is set.
        size: the number of ranks.
    """
    totals, mean = [0] * size, sum(matrix.cost for matrix in matrices) / size
    for matrix in sorted(matrices, key=lambda matrix: -matrix.cost):
        nearest = max(range(size), key=matrix.counts.__getitem__)
        least = min(range(size), key=totals.__getitem__)
        matrix.owner = nearest if totals[nearest] + matrix.cost <= mean else least
        totals[matrix.owner] += matrix.cost


def rounds_of(matrices: Sequence[Matrix], size: int) -> list[list[Matrix]]:
    """Divide matrices into rounds, so that communication overlaps with computation in each optimizer step.

    The matrices of a round are sent together to their owners (the ranks that orthogonalize them). While the owners
    orthogonalize the matrices of one round, those of the next round are sent, and the results of the previous round are
    returned.

    The cost of each owner's matrices is divided evenly over the rounds, so that a round takes all ranks about the same
    time. The number of rounds is chosen so that an owner gets at most about ROUND_ELEMENTS (2²⁴) elements in a round,
    unless a single matrix has more.

    Args:
        matrices: the matrices, whose `owner` is set (see `assign`).
        size: the number of ranks.

    Returns:
        The rounds, each a list of matrices. Every matrix is in one of them.
    """
    queues = [sorted((m for m in matrices if m.owner == rank), key=lambda m: -m.cost) for rank in range(size)]
    elements = max(sum(math.prod(matrix.shape) for matrix in queue) for queue in queues)
    count = min(-(-elements // ROUND_ELEMENTS), max(map(len, queues)))
    rounds: list[list[Matrix]] = [[] for _ in range(count)]
    for queue in queues:
        done, total = 0, sum(matrix.cost for matrix in queue)
        for matrix in queue:
            rounds[int(count * (done + matrix.cost / 2) / total)].append(matrix)
            done += matrix.cost
    return [each for each in rounds if each]
