"""Measure free device memory and the memory and time of training, for use_checkpoint="auto" and keep_frozen="auto"."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
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
    """Counts the bytes that autograd saves for backward inside the context `counting()`.

    Each tensor storage counts once. Tensors that are not strided (such as sparse ones) do not count.

    Args:
        held: tensors that do not count, such as parameters, because they stay in memory anyway.

    Attributes:
        nbytes: the number of bytes that were counted so far.
    """

    def __init__(self, held: Iterable[torch.Tensor]) -> None:
        # A weak reference lets the storage free the memory of its values, but keeps the small object that represents
        # the storage. So no new storage can get the address of this object and be mistaken for one that was counted.
        self._seen = {StorageWeakRef(tensor.untyped_storage()) for tensor in held}
        self.nbytes = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Return a context that adds to `nbytes` the bytes that autograd saves for backward inside it.

        torch calls only the innermost saved-tensor hooks. So the hooks of this context call the hooks that were active
        before, so that those keep working.
        """
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


class Stopwatch:
    """A context that measures how long a GPU takes for the operations that are queued inside it on the current stream.

    Call `milliseconds` after the context to read the time.

    device: the GPU. On the CPU and on the meta device nothing is measured.
    """

    def __init__(self, device: torch.device) -> None:
        module = None if device.type in ("cpu", "meta") else torch.get_device_module(device)
        self._events = [] if module is None else [module.Event(enable_timing=True) for _ in range(2)]

    def __enter__(self) -> Stopwatch:
        for begin in self._events[:1]:
            begin.record()
        return self

    def __exit__(self, *exception) -> None:
        for end in self._events[1:]:
            end.record()

    def milliseconds(self) -> float:
        """Return how many milliseconds the GPU took for the operations inside the context.

        Returns nan on the CPU and on the meta device, where nothing is measured. The host waits for the GPU.
        """
        if not self._events:
            return math.nan
        self._events[1].synchronize()
        return self._events[0].elapsed_time(self._events[1])


def shapes_of(args: tuple, kwargs: dict[str, Any]) -> Shapes:
    """Return the shapes of those arguments of a forward that are tensors.

    `MeasuredInputs` compares these shapes with those of measured forwards, to find out whether a forward may need more
    memory than the measured ones.

    Args:
        args: the positional arguments of the forward.
        kwargs: the keyword arguments of the forward.

    Returns:
        One shape for each argument that is a tensor, first of `args`, then of `kwargs`. If no argument is a tensor: one
        shape for each tensor nested in the arguments, for example in a dict.
    """
    shapes = tuple(value.shape for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
    if shapes:
        return shapes
    return tuple(leaf.shape for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))


def _is_within(shapes: Shapes, measured: Shapes) -> bool:
    """Return whether each of `shapes` is, in every dimension, at most as large as the corresponding measured shape.

    Returns False if the numbers of shapes, or of their dimensions, differ.
    """
    return [len(shape) for shape in shapes] == [len(shape) for shape in measured] and all(
        size <= most for shape, other in zip(shapes, measured) for size, most in zip(shape, other)
    )


class MeasuredInputs:
    """Stores the input shapes of the forwards whose memory was measured, to find forwards that must be measured, too.

    Call `cover` before each forward: it returns False if the forward may need more memory than all measured forwards.
    Call `add` after a forward was measured. Both take the shapes of the forward's inputs, and the number of forwards
    that ran between the last backward and this forward. The activations of those forwards are still in memory, so the
    measurement contains them.
    """

    def __init__(self) -> None:
        self._measured: list[tuple[int, Shapes]] = []
        # A cache of `cover`. The entry {shapes: n} says that `cover(shapes, number)` is True if `number` is at most n.
        self._covered: dict[Shapes, int] = {}

    def add(self, shapes: Shapes, number: int = 0) -> None:
        """Store the input shapes of a forward whose memory was measured.

        Args:
            shapes: the shapes of the forward's inputs, from `shapes_of`.
            number: how many other forwards had run since the last backward. Their activations were in memory, too,
                during the measurement.
        """
        kept = [each for each in self._measured if each[0] > number or not _is_within(each[1], shapes)]
        self._measured = [*kept, (number, shapes)]

    def cover(self, shapes: Shapes, number: int = 0) -> bool:
        """Return True if a forward needs at most as much memory as a measured one, False if it may need more.

        The result is True if one of the measured forwards had inputs that were at least as large in every dimension,
        and was stored (by `add`) with the same or a larger `number`.

        Args:
            shapes: the shapes of the forward's inputs, from `shapes_of`.
            number: how many other forwards have run since the last backward. Their activations are in memory, too.
        """
        if number <= self._covered.get(shapes, -1):
            return True
        for most, measured in self._measured:
            if number <= most and _is_within(shapes, measured):
                self._covered[shapes] = most
                return True
        return False


class Meter:
    """Measures how much memory is free when a pass begins, and how much the pass takes at its peak.

    A pass consists of all training forwards between two backwards, and of the backward that follows them. (A forward
    pass, `ForwardPass`, is something else: one call of the outermost module.) The results are for planning which
    activations or which unsharded parameters can stay in memory. Flat buffers that are resident (kept unsharded between
    steps) can be resharded at any time, so their bytes count as free.

    Attributes:
        memory: reads the allocated, peak and usable bytes of the device.
        began: the number of bytes that were allocated when `begin` was called, without resident buffers.

    Args:
        memory: reads the allocated, peak and usable bytes of the device.
        resident_bytes: a function without arguments, which returns how many bytes are allocated now for flat buffers
            that are kept unsharded between steps.
    """

    def __init__(self, memory: DeviceMemory, resident_bytes: Callable[[], int]) -> None:
        self.memory, self._resident_bytes = memory, resident_bytes
        self.began = 0
        self._backwards = -1
        self._versions: list[int] = []

    def enters_pass(self, backwards: int) -> bool:
        """Return whether the training forward that is starting begins a pass: whether it is the first since a backward.

        A pass consists of all training forwards between two backwards, and of the backward that follows them. Call this
        method at the start of each training forward.

        backwards: the number of backwards that have ended so far, such as `Schedule.backwards`. A pass begins if this
            number is not the one that was passed in the previous call.
        """
        if backwards == self._backwards:
            return False
        self._backwards = backwards
        return True

    def begin(self, buffers: Iterable[ShardedBuffer]) -> None:
        """Store in `began` how many bytes are allocated now, without resident buffers (those unsharded between steps).

        Call it before the forwards whose memory is measured. The memory of gradients to which no `.grad` refers is
        freed first, because the forwards can use it.

        buffers: the flat buffers whose unused gradient memory is freed.
        """
        self.began = self._allocated(buffers)

    def read_free(self, buffers: Iterable[ShardedBuffer]) -> int:
        """Return how many more bytes of device memory this process's tensors may occupy now.

        Flat buffers that are kept unsharded between steps count as free, because they can be resharded. The memory of
        gradients to which no `.grad` refers also counts as free: this method frees it first.

        buffers: the flat buffers whose unused gradient memory is freed.
        """
        return self.memory.usable() - self._allocated(buffers)

    def _allocated(self, buffers: Iterable[ShardedBuffer]) -> int:
        for buffer in buffers:
            buffer.gradient.free_if_unused()
        return self.memory.allocated() - self._resident_bytes()

    def taken(self) -> int:
        """Return how many more bytes were allocated at the peak than when `begin` was called.

        The peak is the largest number of allocated bytes since the last call of `memory.reset_peak()`. The bytes that
        resident buffers (those kept unsharded between steps) take now are subtracted from the peak.
        """
        return self.memory.peak() - self._resident_bytes() - self.began

    def note_versions(self, buffers: Iterable[ShardedBuffer]) -> None:
        """Store torch's write counters (versions) of the trainable shards of `buffers`.

        Call it before an optimizer may step. `has_stepped` compares the stored counters with later ones.
        """
        self._versions = _versions(buffers)

    def has_stepped(self, buffers: Iterable[ShardedBuffer]) -> bool:
        """Return whether an optimizer has stepped since `note_versions`, and has therefore allocated its state.

        It has stepped if torch's write counters of the trainable shards of `buffers` have changed. Also returns True if
        `buffers` have no trainable shards, because a step cannot be detected then.
        """
        versions = _versions(buffers)
        return not versions or versions != self._versions


def _versions(buffers: Iterable[ShardedBuffer]) -> list[int]:
    """Return the versions (torch's counters of writes) of the trainable shards of `buffers`. A step increments them."""
    return [buffer.version for buffer in buffers if buffer.gradient.trainable]


@dataclass(frozen=True)
class Reading:
    """One rank's measurements, from which the ranks plan what to keep in memory.

    There are two kinds of plans. With use_checkpoint="auto", a plan decides which blocks keep their activations. With
    keep_frozen="auto", a plan decides which frozen parameters stay unsharded between steps.

    Attributes:
        stepped: whether the rank's optimizer has stepped, and has therefore allocated its state.
        rooms: for use_checkpoint="auto", the bytes that may still be allocated at the forward's peak, and those at the
            backward's peak. For keep_frozen="auto", one number: the bytes that the parameters kept unsharded between
            steps may take. None if the rank has not measured this yet.
        activations: the bytes of each block's activations, in the order of `blocks`.
        attention: the bytes of the outputs of each block's attention, in the order of `blocks`.
        attention_first: whether keeping only the outputs of attention saves more time per byte than keeping all
            activations.
        blocks: the `AutoCheckpoint.number` of each measured block. A block has the same number on every rank. For
            keep_frozen="auto", `blocks`, `activations` and `attention` are empty.
    """

    stepped: bool
    rooms: tuple[int, ...] | None
    activations: tuple[int, ...] = ()
    attention: tuple[int, ...] = ()
    attention_first: bool = False
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Agreed:
    """The memory measurements (`Reading`) of the ranks that plan together, combined into the worst case.

    Attributes:
        rooms: the numbers of bytes in `Reading.rooms`, each from the rank on which it is smallest.
        activations: the bytes of each block's activations, on the rank with the most, in the order of `blocks`.
        attention: the bytes of the outputs of each block's attention, on the rank with the most, in the order of
            `blocks`.
        attention_first: whether, on every rank, keeping only the outputs of attention saves more time per byte than
            keeping all activations.
        blocks: the `AutoCheckpoint.number` of each block that is in all readings, in the order of the first reading.
            Blocks of a model that a rank has already deleted are left out.
    """

    rooms: list[int]
    activations: list[int]
    attention: list[int]
    attention_first: bool
    blocks: list[int]


def agree(world: World, mine: Reading) -> Agreed | None:
    """Exchange the measurements of all ranks, and return them combined. Collective: every rank must call it.

    Returns None if it is too early to plan what to keep in memory: no rank's optimizer has stepped yet, or a rank has
    not yet measured how much memory its training steps leave free.

    Args:
        world: the ranks that exchange their measurements.
        mine: this rank's measurements.
    """
    return combine(world.gather_objects(mine))


def combine(readings: Sequence[Reading]) -> Agreed | None:
    """Combine the memory measurements of several ranks into the worst case: least free memory, largest activations.

    Returns None if it is too early to plan what to keep in memory: no rank's optimizer has stepped yet, or a rank has
    not yet measured how much memory its training steps leave free (its `rooms` is None).

    Args:
        readings: the measurements of all ranks, if they plan together. If this rank plans alone, only its own.
    """
    rooms = [reading.rooms for reading in readings if reading.rooms is not None]
    if len(rooms) < len(readings) or not any(reading.stepped for reading in readings):
        return None
    sizes = [dict(zip(each.blocks, zip(each.activations, each.attention), strict=True)) for each in readings]
    common = [block for block in readings[0].blocks if all(block in each for each in sizes)]
    return Agreed(
        [min(each) for each in zip(*rooms)],
        [max(each[block][0] for each in sizes) for block in common],
        [max(each[block][1] for each in sizes) for block in common],
        all(reading.attention_first for reading in readings),
        common,
    )
