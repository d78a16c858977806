"""Storage of frozen parameters that are kept and all-gathered in 4 or 8 bits, and unpacked after each all-gather."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from ...engine.base.torch_internals import WithoutTorchFunction, make_subclass
from ...engine.comm.layout import Layout
from ...engine.comm.resizable import ResizableStorage, shares_storage
from ...engine.runtime.world import World
from ...engine.sharding.parameter import DistributedParameter
from ...engine.sharding.sourced import SourcedParameter
from ...engine.sharding.storage import Memory, Storage, StorageKind
from ...engine.tensors.functions import find_tensors, replace_tensors
from ...engine.tensors.tensor import ShardTensor
from .arithmetic import CELL, Format


@dataclass(frozen=True)
class PackedKind(StorageKind):
    """The StorageKind of frozen parameters that are packed, that is, quantized to 4 or 8 bits.

    A StorageKind tells `auto_wrap` in what form to store and send the shards of parameters. The method `make` of a
    PackedKind returns a PackedStorage for a flat buffer (parameters that are sharded together).

    Attributes:
        form: the format in which the parameters are packed.
        names: {id(parameter): name} of the parameters to pack, which `choose_quantized` has chosen. The names are for
            error messages. A PackedParameter, which is packed already, has its own PackedKind (its attribute
            `storage_kind`), in which this dict is empty.
    """

    form: Format
    names: dict[int, str] = field(default_factory=dict, compare=False)

    def make(self, parameters: Sequence[torch.nn.Parameter], small: int) -> Storage:
        return PackedStorage(self.form, [self.names.get(id(parameter)) for parameter in parameters])

    @property
    def parameter_class(self) -> type[DistributedParameter]:
        return QuantizedParameter


class PackedParameter(torch.nn.Parameter):
    """A frozen full parameter that refers to values that are already packed (quantized to 4 or 8 bits).

    When auto_wrap shards a model that bitsandbytes has quantized, it first replaces the quantized weights in blocks by
    PackedParameters, so that the values need not be unpacked. As a tensor, a PackedParameter is on the meta device and
    has only a shape and a dtype. When it is sharded, `PackedStorage.fill` calls `pack` to get the packed values.

    Attributes:
        form: the format in which the values are packed.
        pack: a function without arguments. It returns the packed values of the full parameter in new memory, as
            (cells * form.cell_bytes,) uint8. Each cell contains the codes and scales of CELL (16,384) elements.
        storage_kind: the PackedKind of `form`, which tells `auto_wrap` how to shard the parameter.
    """

    form: Format
    storage_kind: PackedKind
    pack: Callable[[], torch.Tensor]

    @classmethod
    def of(cls, shape: Sequence[int], dtype: torch.dtype, form: Format, pack: Callable[[], torch.Tensor]) -> Any:
        """Create a PackedParameter from its shape and dtype and a function that returns its packed values.

        Args:
            shape: the shape of the full parameter, that is, of its unpacked values.
            dtype: the dtype of its unpacked values.
            form: the format in which the values are packed.
            pack: a function without arguments, which is called when the parameter is sharded. It returns the packed
                values of the full parameter in new memory, as (cells * form.cell_bytes,) uint8. Each cell contains the
                codes and scales of CELL (16,384) elements.
        """
        made: Any = make_subclass(cls, torch.empty(tuple(shape), dtype=dtype, device="meta"), False)
        made.form, made.pack, made.storage_kind = form, pack, PackedKind(form)
        return made


class PackedStorage(Storage):
    """Stores this rank's shard of frozen parameters, quantized ("packed") to 4 or 8 bits. The values never change.

    The values are packed in cells. A cell contains the codes and scales of CELL (16,384) elements, and is never divided
    between ranks.

    An all-gather sends packed bytes. When a block starts, `after_gather` allocates the full buffer and unpacks the
    bytes into it, on a GPU with one kernel launch on the current stream. So until a block runs, it takes memory only
    for packed bytes, even if it was all-gathered in advance. The full buffer is separate memory even with one rank.

    This rank's shard is never kept in unpacked form. The attribute `shard` of the flat buffer has the shape and dtype
    of an unpacked shard, but consists of a single NaN in memory, expanded to that shape.

    Attributes:
        full: the unpacked values of all ranks, allocated only while the block is unsharded.
        stored: this rank's packed cells, 1-D uint8.
    """

    unpacks = True
    has_fixed_addresses = False
    read_only = "they are quantized. To merge adapters, load the model without quantize_frozen or load_in_4bit"
    full: ResizableStorage
    stored: torch.Tensor

    def __init__(self, form: Format, names: Sequence[str | None]) -> None:
        """Create the storage of one flat buffer (parameters that are sharded together), without memory for its values.

        form: the packed format.
        names: the name of each parameter, for error messages; None for a PackedParameter, which is already packed.
        """
        self.form, self._names = form, names

    def layout(self, numels: Sequence[int], world_size: int, dtype: torch.dtype) -> Layout:
        return Layout.build(numels, world_size, CELL)

    def allocate(self, world: World, dtype: torch.dtype) -> None:
        buffer, device, size = self.buffer, world.device, world.shards.communicator.size
        self.full = ResizableStorage(buffer.layout.numel, dtype, device, world.poison)
        buffer.shard = torch.full((1,), float("nan"), dtype=dtype, device=device).expand(buffer.layout.shard_numel)
        nbytes = self.form.packed_bytes(buffer.layout.shard_numel)
        self.stored = world.shards.allocate(nbytes, torch.uint8, device, buffer.update.wait)
        self._arrived = None if size == 1 else ResizableStorage(size * nbytes, torch.uint8, device, world.poison)
        buffer.route(self.stored, self._arrived, [(0, nbytes)])

    def view(self, index: int, shape: torch.Size) -> torch.Tensor:
        return self.full.view(self.buffer.layout.offsets[index], shape)

    @torch.no_grad()
    def fill(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Pack rank 0's values of `parameters`, and store this rank's part of the packed bytes in `stored`.

        Collective: every rank must call it. Parameters are broadcast one at a time, so that the device needs memory for
        only one full parameter. Every rank receives the full parameter, packs it in cells of CELL (16,384) elements,
        and copies its own cells. A PackedParameter, whose values are packed already, is broadcast in packed form.

        Raises ValueError for values that the packed format cannot represent, such as inf and NaN.
        """
        self.reshard()
        nbytes = self.form.cell_bytes
        for parameter, local_range, name in zip(parameters, self.buffer.local_ranges, self._names):
            try:
                packed = self._cells(parameter).view(-1, nbytes)
            except ValueError as error:
                raise ValueError(
                    f"auto_wrap: '{name}' cannot be quantized to {self.form.name}: {error}. Part of the model is "
                    "already sharded, so load the model again. Then remove this cause, or leave out quantize_frozen."
                ) from error
            first, begin, count = (
                local_range.tensor_start // CELL,
                local_range.shard_start // CELL,
                -(-local_range.length // CELL),
            )
            self.stored.view(-1, nbytes)[begin : begin + count] = packed[first : first + count]

    def _cells(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Return all elements of rank 0's `parameter`, packed: (bytes,) uint8 on this rank's device.

        Collective: every rank must call it.
        """
        if not isinstance(parameter, PackedParameter):
            return self.form.pack(self._values(parameter))
        packed = parameter.pack().to(self.stored.device)
        self.buffer.communicator.broadcast(packed, 0).wait()
        return packed

    def _values(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Return rank 0's values of `parameter` on this rank's device, flattened and in new memory.

        Collective: every rank must call it.
        """
        device = self.stored.device
        if isinstance(parameter, SourcedParameter):
            values = torch.empty(parameter.numel(), dtype=parameter.dtype, device=device)
            parameter.move(values, 0, self.buffer.communicator)
            return values
        values = parameter.detach().to(device, copy=True).reshape(-1)
        self.buffer.communicator.broadcast(values, 0).wait()
        return values

    def after_gather(self) -> None:
        packed = self.stored if self._arrived is None else self._arrived.tensor
        self.form.unpack(packed, self.full.allocate())
        if self._arrived is not None:
            self._arrived.free()

    def reshard(self) -> None:
        self.full.free()
        if self._arrived is not None:
            self._arrived.free()

    def memory(self) -> Memory:
        return super().memory()._replace(stored=[self.stored])

    def unpacked(self, index: int) -> torch.Tensor:
        """Return this rank's elements of one parameter, unpacked into new memory: (n,).

        Called when the local parameter is read. (Forwards of blocks read the all-gathered, full parameter instead.)

        index: the index of the parameter in the flat buffer (the parameters that are sharded together).
        """
        local_range, nbytes, shard = self.buffer.local_ranges[index], self.form.cell_bytes, self.buffer.shard
        begin, count = local_range.shard_start // CELL, -(-local_range.length // CELL)
        values = torch.empty(count * CELL, dtype=shard.dtype, device=shard.device)
        self.form.unpack(self.stored[begin * nbytes : (begin + count) * nbytes], values)
        return values[: local_range.length]


class QuantizedParameter(DistributedParameter):
    """This rank's elements of a frozen parameter, stored in 4 or 8 bits.

    torch's functions can read the parameter: each call unpacks the elements into new memory. A write, and setting
    `requires_grad` to True, raise RuntimeError.
    """

    in_memory = False

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if cls.reads_elements(func):
            args, kwargs = replace_tensors(_unpacked, (args, kwargs or {}))
            return func(*args, **kwargs)
        return super().__torch_function__(func, types, args, kwargs)

    @property
    def part(self) -> torch.Tensor:
        """This rank's elements, (n,). Each access unpacks them into an ordinary tensor in new memory."""
        storage: Any = self.buffer.storage
        return storage.unpacked(self.index)

    @property
    def data(self) -> ShardTensor:
        return self.detach()

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        raise written(self)

    def detach(self) -> ShardTensor:
        return _unpack(self)

    @property
    def requires_grad(self) -> bool:
        return False

    @requires_grad.setter
    def requires_grad(self, required: bool) -> None:
        if required:
            raise RuntimeError(
                f"{_told(self)} cannot be trained, because its quantized values cannot change. To train it, set "
                "requires_grad=True before auto_wrap(quantize_frozen=...), which quantizes only frozen parameters. If "
                "bitsandbytes quantized it, load the model without load_in_4bit=True."
            )

    @property
    def quant_state(self) -> NoReturn:
        """Raises RuntimeError when it is read, because quantized weights cannot change.

        bitsandbytes' parameters have an attribute of this name. PEFT reads it, for example, to merge LoRA adapters into
        a quantized weight. The merged weight could not be stored here.
        """
        raise written(self)


class UnpackedSlice(ShardTensor):
    """This rank's elements of a quantized parameter, unpacked into new memory, or a view of this memory.

    `parameter.detach()`, `parameter.data`, and torch functions that return a view of the parameter's elements return
    an object of this class. A write raises RuntimeError, because it would change only this copy and not the parameter.
    """

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with WithoutTorchFunction():
            copies = [each for each in find_tensors((args, kwargs or {})) if isinstance(each, UnpackedSlice)]
            versions = [each._version for each in copies]
        result = super().__torch_function__(func, types, args, kwargs)
        with WithoutTorchFunction():
            if versions != [each._version for each in copies]:
                raise written(copies[0])
            if isinstance(result, ShardTensor) and any(shares_storage(result, each) for each in copies):
                return cls.of(result, result.placement)
        return result


def written(parameter: DistributedParameter | ShardTensor) -> RuntimeError:
    """Create the error for a write to a quantized parameter, because the write would be lost. The caller raises it.

    parameter: the quantized parameter, or its unpacked copy (`UnpackedSlice`), to which a write was made or attempted.
    """
    return RuntimeError(
        f"{_told(parameter)} cannot be written, because its quantized values cannot change: the write would be lost. "
        "Load or change weights before auto_wrap. To merge adapters, load the model without quantize_frozen or "
        "load_in_4bit."
    )


def _told(parameter: DistributedParameter | ShardTensor) -> str:
    """Return the description of a quantized parameter in error messages: its shape and, if known, its name."""
    origin = getattr(parameter, "origin", None)
    name = "" if origin is None else f" ('{origin.path}')"
    return f"A quantized parameter of shape {tuple(parameter.full_shape)}{name}"


def _unpack(parameter: QuantizedParameter) -> ShardTensor:
    """Return this rank's elements of a quantized parameter, converted to the parameter's dtype, in new memory."""
    return UnpackedSlice.of(parameter.part, parameter.placement)


def _unpacked(value: torch.Tensor) -> torch.Tensor:
    """Return the elements of a quantized parameter, as `_unpack` does. Return any other tensor unchanged."""
    return _unpack(value) if isinstance(value, QuantizedParameter) else value
