"""Store the shards of float8 layers' weights, and all-gather them in float8, with half the bytes of bfloat16."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ...engine.comm.collective_log import code
from ...engine.comm.communicator import Communicator, Gather
from ...engine.comm.layout import ALIGNMENT_BYTES, Layout
from ...engine.comm.resizable import ResizableStorage, shares_storage
from ...engine.runtime.world import World
from ...engine.sharding.storage import Memory, Storage, StorageKind
from .arithmetic import Float8, Pieces, measure_pieces, quantize_full, round_pieces, scales_of, transpose

LEAST_WEIGHTS = 32
"""Small parameters (norms, biases) share a flat buffer (parameters that are all-gathered together) with weights only if
there are at least this many elements of weights for each byte of small parameters."""


class GatheredFactor(NamedTuple):
    """A weight (R, C) that was all-gathered in float8, with a single scale for all elements.

    The values are in memory only while the weight's flat buffer (parameters that are all-gathered together) is
    unsharded. On a rank whose shard contains the full weight, they are always in memory.

    values: (R, C) float8_e4m3fn, contiguous.
    row_scales: (R, 1) float32, the scale repeated for each row.
    column_scales: (C, 1) float32, the scale repeated for each column.
    """

    values: torch.Tensor
    row_scales: torch.Tensor
    column_scales: torch.Tensor

    def factor(self, turned: bool) -> Float8:
        """Return the weight as an operand of a float8 matrix product, with its scale repeated for each row.

        turned: whether to return a copy of the weight's transpose instead.
        """
        if turned:
            return Float8(transpose(self.values), self.column_scales)
        return Float8(self.values, self.row_scales)


class Float8Requantizer:
    """Rounds the shards of a model's weights to float8 before they are all-gathered. There is one for each model.

    All shards that have changed are rounded together, so that one all-reduce computes the absmax (largest magnitude) of
    every weight in them. A shard that an optimizer has ever updated asynchronously is rounded separately, before its
    own all-gather.

    Each shard is registered with `add(storage, owners)`. The owners are objects that live as long as the model. A shard
    is skipped once its owners have been deleted, even if an optimizer keeps the shard's storage alive on some ranks,
    because all ranks must round the same shards.

    Args:
        communicator: connects the ranks over which the weights are sharded.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._storages: list[tuple[weakref.ref[Float8Storage], list[weakref.ref]]] = []

    def add(self, storage: Float8Storage, owners: Iterable[object]) -> None:
        self._storages.append((weakref.ref(storage), [weakref.ref(owner) for owner in owners]))

    @torch.no_grad()
    def round(self, gathered: Float8Storage) -> None:
        """Round the shard of `gathered` to float8, together with the model's other shards that have changed.

        Called before an all-gather, if the shard of `gathered` has changed since it was last rounded. Other shards are
        left out if their model was deleted, or if an optimizer has ever updated them asynchronously. Collective: every
        rank must call it.

        gathered: the storage whose weights will be all-gathered next. Its shard is rounded in any case.
        """
        changed: list[Float8Storage] = []
        for reference, owners in self._storages:
            storage = reference()
            if storage is gathered:
                changed.append(gathered)
            elif storage is not None and any(owner() is not None for owner in owners):
                if storage.is_stale and not storage.buffer.update.ever_asynchronous:
                    changed.append(storage)
        counts = [storage.count for storage in changed]
        bits = torch.zeros(sum(counts), dtype=torch.int32, device=gathered.buffer.shard.device)
        parts = bits.split(counts)
        for storage, part in zip(changed, parts):
            self._communicator.collective_log.note(code("preparing the all-gather of", storage.buffer.number))
            storage.measure(part)
        self._communicator.all_reduce(bits, maximum=True).wait()
        for storage, part, scales in zip(changed, parts, scales_of(bits)[:, None].split(counts)):
            storage.round(part, scales)


@dataclass(frozen=True)
class Float8Kind(StorageKind):
    """The StorageKind of weights of float8 layers. It defines how these weights are sharded and all-gathered.

    When the model is sharded, `make` creates a Float8Storage for each flat buffer of such weights.
    """

    def make(self, parameters: Sequence[torch.nn.Parameter], small: int) -> Storage:
        return Float8Storage(small)

    def takes(self, small: Sequence[torch.nn.Parameter], own: Sequence[torch.nn.Parameter]) -> bool:
        """Return whether the norms and biases `small` are small enough to share the flat buffer of the weights `own`.

        Called when a block is sharded. In a shared buffer, the norms and biases need no all-gather of their own. But
        the all-gather sends one byte for each element of the buffer, and `small` are not rounded to float8. So the
        buffer reserves one element for each byte of `small`. The result is True if `own` have at least LEAST_WEIGHTS
        (32) elements for each byte of `small`. It does not depend on the number of ranks.

        Args:
            small: full parameters, in any dtype.
            own: full weights of float8 layers.
        """
        nbytes = sum(parameter.numel() * parameter.itemsize for parameter in small)
        return LEAST_WEIGHTS * nbytes <= sum(parameter.numel() for parameter in own)


class Float8Storage(Storage):
    """Stores the shard of a flat buffer with weights of float8 layers, and all-gathers the weights in float8.

    Until `switch` is called, and after `switch_back`, the weights are all-gathered in their own dtype. After `switch`:

    * Each rank rounds its shard to float8 before an all-gather, if the shard has changed since it was last rounded. The
      all-gather sends one byte per element.
    * The layers multiply by the gathered weights, which are in `factors`. The gathered weights equal the full weights
      rounded to float8, bit for bit.
    * The full weights in their own dtype are in memory only within the context `full_values`. Outside this context, the
      full parameter of a weight is a single NaN that is expanded to the weight's shape. This takes almost no memory,
      and shows up if the parameter is read by mistake.

    The flat buffer may also contain small parameters (the block's norms and biases), which then need no all-gather and
    reduction of their own. They are at the start of the buffer, in the shard of rank 0, and are never rounded to
    float8. The all-gather sends one byte for each element of the buffer, but an element of a small parameter has more
    bytes. Therefore the buffer reserves one element for each byte of a small parameter. For example, 2048 elements are
    reserved for a bfloat16 norm of 1024 elements.

    Args:
        small: the number of small parameters; 0 if the buffer contains only weights.

    Attributes:
        in_float8: whether the weights are all-gathered in float8.
        factors: the gathered weights, by which the layers multiply (not scale factors). For each parameter in the
            buffer: a GatheredFactor if it is a weight, None if it is a small parameter. Empty if not `in_float8`.
    """

    in_float8 = False
    factors: tuple[GatheredFactor | None, ...] = ()
    full: ResizableStorage
    _shards: Gather

    def __init__(self, small: int = 0) -> None:
        self._small = small
        self._shown: list[torch.Tensor] = []  # views of the full small parameters (norms and biases)

    def layout(self, numels: Sequence[int], world_size: int, dtype: torch.dtype) -> Layout:
        # Parameters start at multiples of this many elements, not bytes, because they must also be aligned in the
        # float8 copy of the shard, which has one byte per element.
        grain = ALIGNMENT_BYTES
        return Layout.build(numels, world_size, grain, spread=(self._small, dtype.itemsize))

    def allocate(self, world: World, dtype: torch.dtype) -> None:
        super().allocate(world, dtype)
        self._shards, self._poison = world.shards, world.poison

    def view(self, index: int, shape: torch.Size) -> torch.Tensor:
        if self.full.allocated or not self.in_float8:
            return super().view(index, shape)
        if index < self._small:
            return self._shown[index]
        return self._absent.expand(shape)

    @property
    def _weights(self) -> list[GatheredFactor]:
        return [factor for factor in self.factors if factor is not None]

    def memory(self) -> Memory:
        plain = super().memory()
        if not self.in_float8:
            return plain
        codes = [factor.values for factor in self._weights]
        return Memory([*plain.stored, self._rounded], [*plain.gathered, *codes], self.buffer.layout.numel)

    # -- switching the all-gather to float8 ---------------------------------------------------------------------

    @torch.no_grad()
    def switch(self, requantizer: Float8Requantizer, owners: Iterable[object]) -> None:
        """All-gather the weights in float8 from now on. Collective: every rank must call it.

        `gather_float8` calls this once, after the ranks have decided which layers compute in float8. It does not call
        this if one of the buffer's layers has a `reason` in its Float8State. At the time of the call, no forward may be
        waiting for its backward. The weights are all-gathered immediately, to check that they arrive correctly.

        If the buffer is resident (kept unsharded from step to step) and unsharded before the call, it is also unsharded
        after the call. Otherwise it is resharded. The reason: if a resident buffer were resharded, the next forward of
        its block would start an all-gather. Ranks may run different blocks, so the all-gather could wait forever for a
        rank that does not run this block.

        Args:
            requantizer: the object that rounds the shards of all storages of this class together.
            owners: objects that live as long as the layers whose weights are stored here. Once none of them exists,
                `requantizer` skips this storage.

        Raises:
            RuntimeError: the gathered weights are not the full weights rounded to float8.
            RuntimeError: the gathered norms or biases are wrong.
        """
        buffer, layout = self.buffer, self.buffer.layout
        device, was_resident = buffer.shard.device, buffer.is_unsharded and buffer.is_resident
        buffer.drop()
        # This memory is zero at first, and `round` writes only parameters and zero padding into it. So the padding that
        # an all-gather sends is always zero.
        self._rounded = self._shards.allocate(layout.shard_numel, torch.uint8, device, buffer.update.wait)
        self._arrived = ResizableStorage(layout.numel, torch.uint8, device, self._poison)
        self._absent = torch.full((1,), float("nan"), dtype=buffer.shard.dtype, device=device)
        ranges = [
            (local_range.shard_start, local_range.shard_stop) for local_range in buffer.local_ranges[self._small :]
        ]
        self._pieces_here = Pieces(ranges, buffer.shard.dtype, device)
        self._small_numel = layout.offsets[self._small] // buffer.shard.itemsize if buffer.rank == 0 else 0
        self._make_factors()
        self._shown = [self._show_small(index) for index in range(self._small)]
        self._arrived.free()
        self._rounded_version = -1
        buffer.route(self._rounded, self._arrived)
        self.in_float8 = self.prepares = True
        self._requantizer = requantizer
        requantizer.add(self, owners)
        self._show()
        buffer.gather()
        buffer.wait()
        if not buffer.shard.is_meta:
            self._check()
        if not was_resident:
            buffer.reshard()

    @torch.no_grad()
    def switch_back(self) -> None:
        """All-gather the weights in their own dtype again, so that they can be read. Undoes `switch`.

        Collective: every rank must call it, while no forward waits for its backward. If the buffer is resident (kept
        unsharded from step to step) and unsharded before the call, it is also unsharded after the call. The memory of
        the shard in float8 is kept, because other ranks may still be copying from it.
        """
        buffer = self.buffer
        was_resident = buffer.is_unsharded and buffer.is_resident
        buffer.drop()
        buffer.route(buffer.shard, self.full)
        self.in_float8 = self.prepares = False
        self.factors, self._shown = (), []
        self.full.allocate()
        self._show()
        self.full.free()
        if was_resident:
            buffer.gather()
            buffer.wait()

    def _check(self) -> None:
        """Raise RuntimeError if an all-gather in float8 gave this rank wrong norms, biases or rounded weights.

        Collective: every rank must call it. For the comparison, the parameters are also all-gathered in their own
        dtype.
        """
        full_params = self.buffer.full_params
        shown = [small.clone() for small in self._shown]
        with self.buffer.unsharded():
            same = [
                torch.equal(full.detach().reshape(-1).view(torch.uint8), found.reshape(-1).view(torch.uint8))
                for full, found in zip(full_params, shown)
            ]
            for full, found in zip(full_params[self._small :], self._weights):
                values, scales = quantize_full(full.detach())
                known = torch.equal(scales.nan_to_num(-1.0), found.row_scales.nan_to_num(-1.0))
                same.append(known and torch.equal(_bits(values), _bits(found.values)))
        for full, local, is_same in zip(full_params, self.buffer.gradient.slices, same):
            if not is_same:
                origin = getattr(local(), "origin", None)
                name = "a parameter" if origin is None else f"'{origin.path}'"
                raise RuntimeError(
                    f"rank {self.buffer.rank} received wrong values of {name}, shape {tuple(full.shape)}: after an "
                    "all-gather in float8, they differ from the values of an all-gather in the parameter's own dtype "
                    "(rounded to float8, for weights). Leave out float8 on this machine, and report this error."
                )

    def _make_factors(self) -> None:
        """Create `factors`, the weights in float8 with which the layers compute.

        The values of a factor are a view of the memory that contains the full weight after an all-gather. The scales of
        all factors are views of one tensor, which `round` fills. For a weight (R, C), this tensor contains max(R, C)
        copies of the weight's scale. The row scales are a view of the first R copies, and the column scales a view of
        the first C copies.
        """
        first, full_params, device = self._small, self.buffer.full_params, self.buffer.shard.device
        shapes = [full.shape for full in full_params[first:]]
        sides = [max(shape) for shape in shapes]
        self._scales = torch.empty(sum(sides), 1, dtype=torch.float32, device=device)
        weights, repeats = torch.arange(len(sides), device=device), torch.tensor(sides, device=device)
        self._weight_of_scale = weights.repeat_interleave(repeats, output_size=sum(sides))
        scales = [part.data for part in self._scales.split(sides)]
        codes = [self._codes(index).view(torch.float8_e4m3fn) for index in range(first, len(full_params))]
        factors = [
            GatheredFactor(values.data, one[: shape[0]].data, one[: shape[1]].data)
            for values, shape, one in zip(codes, shapes, scales)
        ]
        self.factors = (*[None] * first, *factors)

    def _codes(self, index: int) -> torch.Tensor:
        """Return a view of the float8 values, as bytes, of the weight with this index in the flat buffer.

        If this rank stores the full weight, the result is a view of the rounded shard. Otherwise it is a view of the
        memory into which the weight is all-gathered.
        """
        local_range, shape = self.buffer.local_ranges[index], self.buffer.full_params[index].shape
        if local_range.length < shape.numel():
            return self._arrived.view(self.buffer.layout.offsets[index], shape)
        return self._rounded.data[local_range.shard_start : local_range.shard_stop].view(shape)

    def _show_small(self, index: int) -> torch.Tensor:
        """Return a view of the small parameter (norm or bias) with this index in the buffer, full and in its own dtype.

        On rank 0, which stores all small parameters, it is a view of the shard. On other ranks it is a view of the
        all-gathered bytes, and can be read only while the buffer is unsharded.
        """
        buffer = self.buffer
        full, dtype, offset = buffer.full_params[index], buffer.shard.dtype, buffer.layout.offsets[index]
        if buffer.rank == 0:
            return super().view(index, full.shape)
        nbytes = torch.Size([full.numel() * dtype.itemsize])
        return self._arrived.view(offset * dtype.itemsize, nbytes).view(dtype).view(full.shape).data

    def _show(self) -> None:
        """Set `.data` of every full parameter to a view of its values, or to NaN if its values are not in memory."""
        for index, full in enumerate(self.buffer.full_params):
            full.data = self.view(index, full.shape)

    # -- the all-gather -----------------------------------------------------------------------------------------

    def before_gather(self) -> None:
        self.buffer.update.wait()
        if self.is_stale:
            self._requantizer.round(self)

    def reshard(self) -> None:
        self.full.free()
        if self.in_float8:
            self._arrived.free()

    @property
    def count(self) -> int:
        """The number k of weight tensors (not elements) in this buffer, not counting small parameters (norms, biases).

        `measure` and `round` take tensors with one number for each of these weights.
        """
        return len(self.buffer.full_params) - self._small

    @property
    def is_stale(self) -> bool:
        """Whether the shard must be rounded before an all-gather, because it has changed since it was last rounded.

        Also True if it was never rounded. The result is equal on all ranks.
        """
        return self._rounded_version != self.buffer.shard._version

    def measure(self, bits: torch.Tensor) -> None:
        """Write the absmax (largest magnitude) of this rank's part of each weight to `bits`, as float32 bit patterns.

        Float8Requantizer calls this before `round`. In between, it computes the absmax of the full weights by an
        all-reduce, and derives the weights' scales; `round` takes both. The all-reduce compares the bit patterns as
        integers, which have the same order as the magnitudes.

        bits: (k,) int32, the output, for the k weights of the buffer. It must be zero before the call, and stays 0 for
            a weight of which this rank stores no element.
        """
        measure_pieces(self.buffer.shard.data, self._pieces_here, bits)

    def round(self, bits: torch.Tensor, scales: torch.Tensor) -> None:
        """Write this rank's parts of the k weights, rounded to float8, into the memory that the next all-gather sends.

        The small parameters (norms, biases) are copied there unrounded. The scales are copied into `factors`, for the
        layers' products.

        Args:
            bits: (k,) int32, the absmax (largest magnitude) of each full weight as the bit pattern of a float32.
            scales: (k, 1) float32, the scale of each weight.
        """
        shard = self.buffer.shard
        round_pieces(shard.data, self._pieces_here, bits, self._rounded)
        if self._small_numel:  # this rank stores the small parameters
            small = shard.data[: self._small_numel].view(torch.uint8)
            self._rounded[: len(small)].copy_(small)
        torch.index_select(scales, 0, self._weight_of_scale, out=self._scales)
        # Change the version (torch's counter of writes) on every rank, even on a rank that stores no weights and has
        # written nothing. If the version has changed, the next all-gather publishes the shard to the other ranks. With
        # peer copies (ranks read shards from each other's memory), publishing is collective, so all ranks must do it.
        torch.autograd.graph.increment_version(self._rounded)
        self._rounded_version = shard._version

    def holds(self, tensor: torch.Tensor) -> bool:
        if super().holds(tensor):
            return True
        return self.in_float8 and shares_storage(tensor, self._arrived.tensor, self._rounded)

    @contextmanager
    def full_values(self) -> Iterator[None]:
        if not self.in_float8:
            with super().full_values():
                yield
            return
        buffer, was_shown = self.buffer, self.full.allocated
        if not was_shown:
            buffer.update.wait()
            self._shards.gather(self.full.allocate(), buffer.shard, buffer.layout.cut_ranges(buffer.rank)).wait()
            self._show()
        try:
            yield
        finally:
            if not was_shown:
                self.full.free()
                self._show()


def _bits(values: torch.Tensor) -> torch.Tensor:
    """Return e4m3 values as bytes, for an exact comparison. Both bit patterns of NaN become the same byte."""
    codes = values.view(torch.uint8)
    return torch.where(codes & 0x7F == 0x7F, 0x7F, codes)
