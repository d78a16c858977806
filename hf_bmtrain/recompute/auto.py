"""One block's part in the plan of use_checkpoint="auto"."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree

from ..sharding.buffer import ShardedBuffer
from .policy import UseCheckpoint
from .random_state import RandomState
from .saved_bytes import SavedBytes, saving_hooks

Shapes = tuple[torch.Size, ...]


class Block(Protocol):
    """What is planned for."""

    buffers: list[ShardedBuffer]
    zero_level: int


@dataclass(frozen=True)
class Measure:
    """One forward of a block: the shapes of its inputs, the bytes it would keep, how many then waited for backward."""

    shapes: Shapes
    nbytes: int
    calls: int

    def or_more(self, other: Measure) -> Measure:
        return Measure(self.shapes, max(self.nbytes, other.nbytes), max(self.calls, other.calls))


class Owner(Protocol):
    """The planner: see `planner.Planner`."""

    measuring: bool

    @property
    def in_backward(self) -> bool: ...
    def enter(self) -> None: ...
    def measure(self) -> None: ...
    def note(self, share: Share, measure: Measure) -> None: ...
    def before_backward(self) -> None: ...
    def before_recomputation(self) -> None: ...
    def remember_draws(self) -> RandomState: ...
    def take_back(self, share: Share) -> None: ...


class Share:
    """One block's part: what its activations take, for which inputs that is known, and whether it keeps them.

    Inputs are known by the shapes of the tensors among them; those that are in no dimension larger than measured ones
    take no more. nbytes: the most measured in a forward, times `calls`, the most forwards ahead of one backward.
    """

    use_checkpoint: UseCheckpoint = "auto"

    def __init__(self, planner: Owner, block: Block) -> None:
        self._planner, self.block = planner, block
        self.kept = False
        self.calls = self._most = 0
        self._measured: list[Shapes] = []
        self._fitting: set[Shapes] = set()

    @property
    def nbytes(self) -> int:
        return self._most * self.calls

    @property
    def parameters(self) -> int:
        """Bytes of the whole parameters, 0 where nothing frees them between forward and backward."""
        if self.block.zero_level == 2:
            return 0
        return sum(b.layout.numel * b.shard.dtype.itemsize for b in self.block.buffers if b.sharded)

    def enter(self) -> None:
        self._planner.enter()

    def recomputes(self, args: tuple, kwargs: dict[str, Any], pending: int) -> bool:
        """Someone else's checkpoint, or offloading, around the block has its own way with activations: as if True."""
        if self._planner.in_backward or saving_hooks() is not None:
            return True
        if not self._fits(_shapes(args, kwargs)):
            self._planner.measure()
        return self._planner.measuring or not self.kept or pending >= self.calls

    def _fits(self, shapes: Shapes) -> bool:
        if shapes not in self._fitting and any(_within(shapes, measured) for measured in self._measured):
            self._fitting.add(shapes)
        return shapes in self._fitting

    @contextmanager
    def counting(self, args: tuple, kwargs: dict[str, Any], pending: int) -> Iterator[None]:
        if not self._planner.measuring or self._planner.in_backward:
            yield
            return
        held = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        held += [whole for buffer in self.block.buffers for whole in buffer.wholes]
        saved = SavedBytes(held)
        with saved.counting():
            yield
        self._planner.note(self, Measure(_shapes(args, kwargs), saved.nbytes, pending + 1))

    def learn(self, measure: Measure) -> None:
        self._most, self.calls = max(self._most, measure.nbytes), max(self.calls, measure.calls)
        self._measured = [shapes for shapes in self._measured if not _within(shapes, measure.shapes)]
        self._measured.append(measure.shapes)
        self._fitting.add(measure.shapes)

    def remember_draws(self) -> RandomState | None:
        return self._planner.remember_draws()

    def take_back(self) -> None:
        self._planner.take_back(self)

    def before_backward(self) -> None:
        if self._planner.measuring:
            self._planner.before_backward()

    def before_recomputation(self) -> None:
        if self._planner.measuring:
            self._planner.before_recomputation()


def _shapes(args: tuple, kwargs: dict[str, Any]) -> Shapes:
    """Of the tensors among the arguments or, where there are none, inside of them."""
    shapes = tuple(value.shape for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
    if shapes:
        return shapes
    return tuple(leaf.shape for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))


def _within(shapes: Shapes, measured: Shapes) -> bool:
    """Whether no tensor is larger in any dimension than the measured one in its place."""
    return [len(shape) for shape in shapes] == [len(shape) for shape in measured] and all(
        size <= most for shape, other in zip(shapes, measured) for size, most in zip(shape, other)
    )
