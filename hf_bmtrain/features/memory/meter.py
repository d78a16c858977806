"""What a pass takes in memory: the measurements that plans are made from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ...engine.base.device_memory import DeviceMemory
from ...engine.base.torch_internals import StorageWeakRef, pytree, top_saved_tensors_hooks
from ...engine.runtime.world import World
from ...engine.sharding.buffer import ShardedBuffer

Shapes = tuple[torch.Size, ...]


class SavedBytes:
    """Counts the bytes of the storages that autograd saves inside `counting()`.

    Each storage counts once; those of the tensors in `held` do not count, nor do tensors that are not strided.
    """

    def __init__(self, held: Iterable[torch.Tensor]) -> None:
        # Weak references keep nothing alive, and while they exist no other storage gets the same address.
        self._seen = {StorageWeakRef(tensor.untyped_storage()) for tensor in held}
        self.nbytes = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count in this context. Saved-tensor hooks that are already active, such as a checkpoint's, stay active."""
        pack, unpack = top_saved_tensors_hooks(True) or (_unchanged, _unchanged)

        def count(tensor: torch.Tensor) -> Any:
            if tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)
                if reference not in self._seen:
                    self._seen.add(reference)
                    self.nbytes += storage.nbytes()
            return pack(tensor)

        with torch.autograd.graph.saved_tensors_hooks(count, unpack):
            yield


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def shapes_of(args: tuple, kwargs: dict[str, Any]) -> Shapes:
    """Return the shapes of the tensors among the arguments or, if there are none, of those nested in them."""
    shapes = tuple(value.shape for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
    if shapes:
        return shapes
    return tuple(leaf.shape for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))


def _is_within(shapes: Shapes, measured: Shapes) -> bool:
    """Return whether no tensor is larger in any dimension than the measured one at its position."""
    return [len(shape) for shape in shapes] == [len(shape) for shape in measured] and all(
        size <= most for shape, other in zip(shapes, measured) for size, most in zip(shape, other)
    )


class MeasuredInputs:
    """The shapes of the largest inputs that were measured, each with the number of its forward in the pass."""

    def __init__(self) -> None:
        self._measured: list[tuple[int, Shapes]] = []
        self._covered: dict[Shapes, int] = {}  # the highest number that these shapes are known to be covered for

    def add(self, shapes: Shapes, number: int = 0) -> None:
        """Add the inputs of forward `number` of a pass."""
        kept = [each for each in self._measured if each[0] > number or not _is_within(each[1], shapes)]
        self._measured = [*kept, (number, shapes)]

    def cover(self, shapes: Shapes, number: int = 0) -> bool:
        """Return whether forward `number` of a pass takes no more memory than a measured one.

        That one has this number or a higher one, and its inputs are in no dimension smaller.
        """
        if number <= self._covered.get(shapes, -1):
            return True
        for most, measured in self._measured:
            if number <= most and _is_within(shapes, measured):
                self._covered[shapes] = most
                return True
        return False


class Meter:
    """Measures passes for one plan. A pass begins with the first training forward after a backward.

    Buffers that are resident by a plan can be resharded, so what they take counts as free. began: the bytes allocated
    without them at `begin`.
    """

    def __init__(self, memory: DeviceMemory, resident_bytes: Callable[[], int]) -> None:
        """resident_bytes: returns the bytes that are allocated for buffers which are resident by a plan."""
        self.memory, self._resident_bytes = memory, resident_bytes
        self.began = 0
        self._backwards = -1
        self._versions: list[int] = []

    def enters_pass(self, backwards: int) -> bool:
        """Return whether the training forward that begins is the first of a pass. backwards: their number so far."""
        if backwards == self._backwards:
            return False
        self._backwards = backwards
        return True

    def begin(self, buffers: Iterable[ShardedBuffer]) -> None:
        """Note the bytes that are allocated now, without gradients of `buffers` that nobody needs."""
        self.began = self._allocated(buffers)

    def read_free(self, buffers: Iterable[ShardedBuffer]) -> int:
        """Return the bytes that are free now, without gradients of `buffers` that nobody needs."""
        return self.memory.usable() - self._allocated(buffers)

    def _allocated(self, buffers: Iterable[ShardedBuffer]) -> int:
        for buffer in buffers:
            buffer.gradient.free_if_unused()
        return self.memory.allocated() - self._resident_bytes()

    def taken(self) -> int:
        """Return the most bytes above `began` that were allocated since the allocator's peak was reset."""
        return self.memory.peak() - self._resident_bytes() - self.began

    def note_versions(self, buffers: Iterable[ShardedBuffer]) -> None:
        """Note the versions of the trained shards, for `has_stepped`."""
        self._versions = _versions(buffers)

    def has_stepped(self, buffers: Iterable[ShardedBuffer]) -> bool:
        """Return whether an optimizer has stepped since `note_versions`: its state is allocated then.

        Also True if nothing is trained.
        """
        versions = _versions(buffers)
        return not versions or versions != self._versions


def _versions(buffers: Iterable[ShardedBuffer]) -> list[int]:
    """Return the versions of the shards that an optimizer updates."""
    return [buffer.version for buffer in buffers if buffer.gradient.trainable]


@dataclass(frozen=True)
class Reading:
    """One rank's measurements when a plan is made.

    stepped: whether its optimizer has its state. rooms: the bytes to give at each peak, None if that is not known.
    activations: bytes per block.
    """

    stepped: bool
    rooms: tuple[int, ...] | None
    activations: tuple[int, ...] = ()


def agree(world: World, mine: Reading) -> tuple[list[int], list[int]] | None:
    """Return the least rooms and the largest activations of all ranks. Collective.

    None while it is too early for a plan: no rank has stepped its optimizer, or one does not know its rooms.
    """
    readings: list[Reading] = world.gather_objects(mine)
    rooms = [reading.rooms for reading in readings if reading.rooms is not None]
    if len(rooms) < len(readings) or not any(reading.stepped for reading in readings):
        return None
    activations = zip(*(reading.activations for reading in readings), strict=True)
    return [min(each) for each in zip(*rooms)], [max(sizes) for sizes in activations]
