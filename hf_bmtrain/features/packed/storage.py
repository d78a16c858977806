"""Frozen parameters that are stored and gathered packed, and unpacked where they are computed with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from ...engine.base.torch_internals import WithoutTorchFunction, make_subclass
from ...engine.comm.reduce import Reduction
from ...engine.comm.resizable import ResizableStorage, shares_storage
from ...engine.runtime.world import World
from ...engine.sharding.buffer import ShardedBuffer
from ...engine.sharding.parameter import DistributedParameter
from ...engine.sharding.sourced import ScatteredParameter
from ...engine.tensors.functions import find_tensors, replace_tensors
from ...engine.tensors.tensor import SliceTensor
from .arithmetic import CELL, Format


class Quantization(NamedTuple):
    """Which parameters of a model are packed in `form`: their names, by the ids of the parameters."""

    form: Format
    names: dict[int, str]


class PackedParameter(torch.nn.Parameter):
    """A frozen whole parameter on the meta device, which is packed already and is never unpacked to be sharded.

    It stands for a parameter in a model that auto_wrap is about to shard.

    form: of the packed cells. pack: returns all of them, in new memory.
    """

    form: Format
    pack: Callable[[], torch.Tensor]

    @classmethod
    def of(cls, shape: Sequence[int], dtype: torch.dtype, form: Format, pack: Callable[[], torch.Tensor]) -> Any:
        """Return a parameter of this shape and dtype."""
        made: Any = make_subclass(cls, torch.empty(tuple(shape), dtype=dtype, device="meta"), False)
        made.form, made.pack = form, pack
        return made


class QuantizedBuffer(ShardedBuffer):
    """Frozen parameters of which this rank stores 1/N packed, in whole cells.

    `gather` gathers packed bytes, and `wait` unpacks them into the full buffer, in one launch on the current stream; so
    a block that is prefetched takes packed memory alone. With one rank, too, the full buffer is memory of its own. The
    values never change.

    shard: no memory, NaN in every element; only its length, dtype and device are used. stored: the packed cells.
    """

    def __init__(
        self,
        world: World,
        parameters: Sequence[torch.nn.Parameter],
        reduction: Reduction,
        quantization: Quantization,
    ) -> None:
        """Pack `parameters`, with rank 0's values. Collective. Raises ValueError for values that `form` cannot hold.

        A PackedParameter is stored as it is, and needs no name in `quantization`.
        """
        self.form = quantization.form
        self._quantized = [quantization.names.get(id(parameter)) for parameter in parameters]
        self._waiting = False  # from `gather` to `wait`
        super().__init__(world, parameters, reduction)

    # -- construction -------------------------------------------------------------------------------------------

    def _grain(self, dtype: torch.dtype) -> int:
        return CELL

    def _allocate(self, world: World, dtype: torch.dtype) -> None:
        device = world.device
        self._full = ResizableStorage(self.layout.numel, dtype, device, world.poison)
        self.shard = torch.full((1,), float("nan"), dtype=dtype, device=device).expand(self.layout.shard_numel)
        nbytes = self.form.packed_bytes(self.layout.shard_numel)
        self.stored = self._gather.allocate(nbytes, torch.uint8, device, self.update.wait)
        size = self._communicator.size
        self._arrived = None if size == 1 else ResizableStorage(size * nbytes, torch.uint8, device, world.poison)

    def _view(self, index: int, shape: torch.Size) -> torch.Tensor:
        return self._memory.view(self.layout.offsets[index], shape)

    @property
    def _memory(self) -> ResizableStorage:
        assert self._full is not None
        return self._full

    @torch.no_grad()
    def _fill(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Pack rank 0's values, one parameter after the other. Every rank has one whole at a time, and packs it.

        Of packed ones every rank has the cells of one at a time.
        """
        self._memory.free()
        if self._arrived is not None:
            self._arrived.free()
        nbytes = self.form.cell_bytes
        for parameter, piece, name in zip(parameters, self.pieces, self._quantized):
            try:
                packed = self._cells(parameter).view(-1, nbytes)
            except ValueError as error:
                raise ValueError(
                    f"auto_wrap: '{name}' cannot be quantized to {self.form.name}: {error}. Part of the model is "
                    "sharded already: load it again, leave out quantize_frozen, or cast it to a wider dtype first."
                ) from error
            first, begin, count = piece.tensor_start // CELL, piece.shard_start // CELL, -(-piece.length // CELL)
            self.stored.view(-1, nbytes)[begin : begin + count] = packed[first : first + count]

    def _cells(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Return rank 0's cells on this device. Collective."""
        if not isinstance(parameter, PackedParameter):
            return self.form.pack(self._values(parameter))
        packed = parameter.pack().to(self.stored.device)
        self._communicator.broadcast(packed, 0).wait()
        return packed

    def _values(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Return rank 0's values on this device. Collective."""
        device = self.stored.device
        if isinstance(parameter, ScatteredParameter):
            values = torch.empty(parameter.numel(), dtype=parameter.dtype, device=device)
            parameter.move(values, 0, self._communicator)
            return values
        values = parameter.detach().to(device, copy=True).reshape(-1)
        self._communicator.broadcast(values, 0).wait()
        return values

    # -- gather, use, release -----------------------------------------------------------------------------------

    def gather(self) -> None:
        if self.is_whole:
            return
        self._waiting = True
        if self._arrived is not None:
            self._arrived.allocate()
            self._note_gather()
            everything = [(0, self.stored.numel())]
            self._ticket = self._gather.gather(self._arrived.tensor, self.stored, everything)

    def wait(self) -> None:
        if not self._waiting:
            return
        super().wait()
        self._waiting = False
        packed = self.stored if self._arrived is None else self._arrived.tensor
        self.form.unpack(packed, self._memory.allocate())
        if self._arrived is not None:
            self._arrived.free()

    def release(self) -> None:
        if self._waiting:  # and nothing has read it: it need not be unpacked
            super().wait()
            self._waiting = False
            if self._arrived is not None:
                self._arrived.free()
        super().release()

    @property
    def is_whole(self) -> bool:
        return self._waiting or self._memory.allocated

    def unpacked(self, index: int) -> torch.Tensor:
        """Return this rank's elements of parameter `index`, (n,) in new memory."""
        piece, nbytes = self.pieces[index], self.form.cell_bytes
        begin, count = piece.shard_start // CELL, -(-piece.length // CELL)
        values = torch.empty(count * CELL, dtype=self.shard.dtype, device=self.shard.device)
        self.form.unpack(self.stored[begin * nbytes : (begin + count) * nbytes], values)
        return values[: piece.length]


class QuantizedParameter(DistributedParameter):
    """This rank's slice of a frozen parameter that is stored packed.

    Functions of torch read it like another slice, unpacked into new memory for each of them. It cannot be written or
    trained: both raise RuntimeError.
    """

    in_memory = False
    buffer: QuantizedBuffer

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if cls.reads_elements(func):
            args, kwargs = replace_tensors(_unpacked, (args, kwargs or {}))
            return func(*args, **kwargs)
        return super().__torch_function__(func, types, args, kwargs)

    @property
    def part(self) -> torch.Tensor:
        """This rank's elements, (n,): an ordinary tensor in new memory."""
        return self.buffer.unpacked(self.index)

    @property
    def data(self) -> SliceTensor:
        return self.detach()

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        raise written(self)

    def detach(self) -> SliceTensor:
        return _unpack(self)

    @property
    def requires_grad(self) -> bool:
        return False

    @requires_grad.setter
    def requires_grad(self, required: bool) -> None:
        if required:
            raise RuntimeError(
                f"A quantized parameter of shape {tuple(self.full_shape)} cannot be trained: it stays as it was "
                "rounded. Require its gradient before auto_wrap(quantize_frozen=...), or load it without "
                "load_in_4bit=True."
            )

    @property
    def quant_state(self) -> NoReturn:
        """bitsandbytes' statistics, of which only PEFT's merging of adapters asks: refused as a write is."""
        raise written(self)


class UnpackedSlice(SliceTensor):
    """This rank's elements of a quantized parameter in new memory, or a view of them. A write raises RuntimeError."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with WithoutTorchFunction():
            copies = [each for each in find_tensors((args, kwargs or {})) if isinstance(each, UnpackedSlice)]
            versions = [each._version for each in copies]
        result = super().__torch_function__(func, types, args, kwargs)
        with WithoutTorchFunction():
            if versions != [each._version for each in copies]:
                raise written(copies[0])
            if isinstance(result, SliceTensor) and any(shares_storage(result, each) for each in copies):  # a view
                return cls.of(result, result.placement)
        return result


def written(parameter: DistributedParameter | SliceTensor) -> RuntimeError:
    """Return the error of a write to a quantized parameter."""
    return RuntimeError(
        f"A quantized parameter of shape {tuple(parameter.full_shape)} was written, which would be lost: it is stored "
        "packed, as it was rounded. Load or change weights before auto_wrap; to merge adapters, load the model without "
        "quantize_frozen or load_in_4bit."
    )


def _unpack(parameter: QuantizedParameter) -> SliceTensor:
    return UnpackedSlice.of(parameter.part, parameter.placement)


def _unpacked(value: torch.Tensor) -> torch.Tensor:
    return _unpack(value) if isinstance(value, QuantizedParameter) else value
