"""The policy of one block with use_checkpoint="auto"."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..ops.torch_internals import pytree, top_saved_tensors_hooks
from ..sharding.buffer import ShardedBuffer
from .memory import SavedBytes

Shapes = tuple[torch.Size, ...]


class Block(Protocol):
    """The attributes of a block's state that a plan reads and sets."""

    buffers: list[ShardedBuffer]
    zero_level: int


@dataclass(frozen=True)
class Measurement:
    """Forwards of one block: the shapes of their inputs, the most bytes saved by one, the most pending at once."""

    shapes: Shapes
    nbytes: int
    calls: int

    def maximum(self, other: Measurement) -> Measurement:
        return Measurement(self.shapes, max(self.nbytes, other.nbytes), max(self.calls, other.calls))


class Owner(Protocol):
    """The planner of all blocks: see `planner.Planner`."""

    measuring: bool

    @property
    def in_backward(self) -> bool: ...
    def begin_forward(self) -> None: ...
    def measure(self) -> None: ...
    def add(self, block: AutoCheckpoint, measurement: Measurement) -> None: ...
    def mark(self, recomputed: bool) -> None: ...


class AutoCheckpoint:
    """Recomputes a block or keeps its activations, according to the plan of `planner`.

    kept: whether the plan keeps the block's activations. calls: the most forwards measured ahead of one backward.

    A plan is valid for inputs that are in no dimension larger than those of one measured forward, since they need no
    more memory. Larger inputs start a measurement.
    """

    def __init__(self, planner: Owner, block: Block) -> None:
        self.planner, self.block = planner, weakref.proxy(block)  # the block owns this object
        self.kept = False
        self.calls = self._most = 0
        self._measured: list[Shapes] = []
        self._fitting: set[Shapes] = set()

    @property
    def nbytes(self) -> int:
        """Bytes of the block's activations: the most of one measured forward, times `calls`."""
        return self._most * self.calls

    @property
    def parameters(self) -> int:
        """Bytes of the whole parameters; 0 if they are not released between forward and backward."""
        if self.block.zero_level == 2:
            return 0
        return sum(b.layout.numel * b.shard.dtype.itemsize for b in self.block.buffers if b.sharded)

    @property
    def recorder(self) -> AutoCheckpoint | None:
        """This object while its planner measures the pass, otherwise None."""
        return self if self.planner.measuring else None

    def recomputes(self, args: tuple, kwargs: dict[str, Any], pending: int) -> bool:
        """Return whether the training forward that is about to begin is recomputed in backward.

        Call it before the block is gathered. Collective in the first forward of a pass, until there is a plan.
        pending: the number of the block's forwards whose backward has not run.

        It is also True under saved-tensor hooks (of a checkpoint or of offloading around the block), which determine
        themselves which tensors are kept.
        """
        self.planner.begin_forward()
        if self.planner.in_backward or top_saved_tensors_hooks(True) is not None:
            return True
        if not self._fits(_shapes(args, kwargs)):
            self.planner.measure()
        return self.planner.measuring or not self.kept or pending >= self.calls

    def _fits(self, shapes: Shapes) -> bool:
        if shapes not in self._fitting and any(_within(shapes, measured) for measured in self._measured):
            self._fitting.add(shapes)
        return shapes in self._fitting

    @contextmanager
    def count_saved(self, args: tuple, kwargs: dict[str, Any], pending: int) -> Iterator[None]:
        """Count, inside the context, the bytes that autograd saves in the block's first forward."""
        if self.planner.in_backward:
            yield
            return
        held = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        held += [whole for buffer in self.block.buffers for whole in buffer.wholes]
        saved = SavedBytes(held)
        with saved.counting():
            yield
        self.planner.add(self, Measurement(_shapes(args, kwargs), saved.nbytes, pending + 1))

    def mark(self, recomputed: bool) -> None:
        """Mark the start of the block's backward or, with `recomputed`, the start of its recomputation."""
        self.planner.mark(recomputed)

    def learn(self, measurement: Measurement) -> None:
        """Add a measurement whose backward has ended."""
        self._most, self.calls = max(self._most, measurement.nbytes), max(self.calls, measurement.calls)
        self._measured = [shapes for shapes in self._measured if not _within(shapes, measurement.shapes)]
        self._measured.append(measurement.shapes)
        self._fitting.add(measurement.shapes)


def _shapes(args: tuple, kwargs: dict[str, Any]) -> Shapes:
    """Return the shapes of the tensors among the arguments or, if there are none, of those nested in them."""
    shapes = tuple(value.shape for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
    if shapes:
        return shapes
    return tuple(leaf.shape for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))


def _within(shapes: Shapes, measured: Shapes) -> bool:
    """Return whether no tensor is larger in any dimension than the measured one at its position."""
    return [len(shape) for shape in shapes] == [len(shape) for shape in measured] and all(
        size <= most for shape, other in zip(shapes, measured) for size, most in zip(shape, other)
    )
