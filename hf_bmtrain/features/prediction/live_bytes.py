"""Count the bytes of live tensor storages on the meta device, as torch's caching allocator would on a GPU."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ...engine.base.torch_internals import TorchDispatchMode

_aten = torch.ops.aten
_ALL = (_aten.all.default, _aten.all.dim, _aten.all.dims)
_ROUND = 512
"""torch's caching allocator rounds the size of every request up to a multiple of this many bytes."""


class Change(NamedTuple):
    """A change of a tensor's storage: it was allocated or grew (nbytes > 0), or it was freed or shrank (nbytes < 0).

    An operation's workspace (memory that the operation would allocate and free again on CUDA) has no storage on the
    meta device. It is represented by two changes with a number of its own: one with its size, then one with the
    negative of its size.

    Attributes:
        number: a number that identifies the storage or workspace.
        nbytes: the change of the storage's size in bytes. Sizes of storages, but not of workspaces, are rounded up to
            multiples of 512 bytes, as by torch's allocator.
        label: the part of the step in which the storage was allocated or grew, such as "backward"; "" if it was freed
            or shrank. "workspace" in both changes of a workspace.
        shape: the shape of the first tensor in the storage, or () if it is unknown.
    """

    number: int
    nbytes: int
    label: str
    shape: tuple[int, ...] = ()


class LiveBytes(TorchDispatchMode):
    """Context manager that counts the bytes of all tensor storages on the meta device, which represents a GPU.

    A storage counts with its current size, from the operation that creates it until it is freed.
    `UntypedStorage.resize_` may change this size. Page-locked tensors (`pin_memory=True`) count as host memory.

    Tensors on the meta device have no values, so reading a value on the host returns 0 or False. `torch.equal`, and
    reading a result of `torch.all`, return True instead, because models call these functions to test for the usual
    case, such as a mask without padding.

    Args:
        label: a function that returns the name of the part of the step that is running, for `Change.label`.

    Attributes:
        live: the bytes of all live storages.
        host: the bytes of all page-locked tensors that were allocated so far, including freed ones.
        peak: the largest sum of `live` and the workspace of the operation that was running, since the last call of
            `reset_peak` (or since the start).
        changes: every change so far, in order.
    """

    def __init__(self, label: Callable[[], str]) -> None:
        super().__init__()
        self.live = self.host = self.peak = 0
        self.changes: list[Change] = []
        self._label = label
        # {address of a storage: (weak reference to the storage, its bytes, its number)}
        self._known: dict[int, tuple[Any, int, int]] = {}
        self._hosted: dict[int, Any] = {}  # {address of a page-locked storage: weak reference to it}
        # The numbers of storages that contain a result of torch.all. If the model reads such a result on the host, it
        # gets True, as the class docstring explains.
        self._all: set[int | None] = set()
        self._count = 0  # the last number that was given to a storage or workspace (`Change.number`)

    def reset_peak(self) -> None:
        self.peak = self.live

    def __enter__(self):
        plain = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, nbytes: int):
            result = plain(storage, nbytes)
            if storage.device.type == "meta":
                self._follow(storage)
            return result

        # The memory of full parameters is freed and allocated by resizing storages, which does not call
        # __torch_dispatch__. So replace `resize_` by a function that also counts the bytes.
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, *exception) -> None:
        del torch.UntypedStorage.resize_
        super().__exit__(*exception)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is _aten._local_scalar_dense.default and args[0].is_meta:
            if args[0].dtype is torch.bool:
                return self.number_of(args[0]) in self._all
            return 0.0 if args[0].dtype.is_floating_point else 0
        if function is _aten.equal.default and args[0].is_meta:
            return True
        hosted = kwargs.get("pin_memory") and torch.device(kwargs.get("device") or "cpu").type == "meta"
        if hosted:
            kwargs = kwargs | {"pin_memory": False}
        outputs = function(*args, **kwargs)
        for output in outputs if isinstance(outputs, (tuple, list)) else (outputs,):
            if isinstance(output, torch.Tensor):
                self._see(output, bool(hosted))
            elif isinstance(output, (tuple, list)):
                for each in output:
                    if isinstance(each, torch.Tensor):
                        self._see(each, False)
        if function in _ALL and isinstance(outputs, torch.Tensor) and outputs.is_meta:
            self._all.add(self.number_of(outputs))
        nbytes = workspace(function, args)
        if nbytes:
            self.peak = max(self.peak, self.live + nbytes)
            self._count += 1
            self.changes += [Change(self._count, nbytes, "workspace"), Change(self._count, -nbytes, "workspace")]
        return outputs

    def _see(self, tensor: torch.Tensor, hosted: bool) -> None:
        """Count the storage of `tensor`, the output of an operation, unless it was counted before.

        hosted: whether the tensor represents page-locked host memory.
        """
        if not tensor.is_meta:
            return
        storage = tensor.untyped_storage()
        if hosted:
            key = storage._cdata
            self.host += storage.nbytes()
            self._hosted[key] = weakref.ref(storage, lambda _: self._hosted.pop(key))
        elif storage._cdata not in self._known and storage._cdata not in self._hosted:
            self._follow(storage, tuple(tensor.shape))

    def _follow(self, storage: torch.UntypedStorage, shape: tuple[int, ...] = ()) -> None:
        """Record that a tensor storage was allocated or, if it was counted before, that its size has changed.

        shape: the shape of the first tensor in the storage; needed only for a new storage.
        """
        key, nbytes = storage._cdata, -(-storage.nbytes() // _ROUND) * _ROUND
        known = self._known.get(key)
        if known is None:
            self._count += 1
            reference, before, number = weakref.ref(storage, lambda _: self._freed(key)), 0, self._count
        else:
            reference, before, number = known
        self._known[key] = reference, nbytes, number
        self._change(number, nbytes - before, shape)

    def _freed(self, key: int) -> None:
        _, nbytes, number = self._known.pop(key)
        self._change(number, -nbytes)

    def _change(self, number: int, nbytes: int, shape: tuple[int, ...] = ()) -> None:
        if nbytes:
            self.live += nbytes
            self.peak = max(self.peak, self.live)
            self.changes.append(Change(number, nbytes, self._label() if nbytes > 0 else "", shape))

    def number_of(self, tensor: torch.Tensor) -> int | None:
        """Return the number that identifies a tensor's storage (`Change.number`); None if its bytes are not counted."""
        known = self._known.get(tensor.untyped_storage()._cdata)
        return None if known is None else known[2]


def workspace(function: Any, args: tuple) -> int:
    """Return the size in bytes of the temporary memory that an operation would allocate and free again on CUDA.

    Called for each operation on the meta device, where no such memory (workspace) is allocated. The size is computed
    from the shapes and dtypes of the arguments. It is 0 for all operators except the backwards of flash attention and
    of memory-efficient attention.

    Args:
        function: the operator, such as `torch.ops.aten.mm.default`.
        args: the positional arguments of the operation.
    """
    if function is _aten._scaled_dot_product_flash_attention_backward.default:
        query, key = args[1], args[2]
        batch, heads, length, width = query.shape
        length, wide = _round_up(length, 128), _round_up(width, 32)
        sums = batch * heads * length * (wide + 1) * 4
        expanded = 2 * batch * heads * key.shape[2] * width * key.itemsize if key.shape[1] != heads else 0
        return sums + expanded
    if function is _aten._scaled_dot_product_efficient_attention_backward.default:
        query = args[1]
        wide = math.prod(query.shape) * 4 * 3 if query.dtype != torch.float32 else 0
        return wide + math.prod(query.shape[:3]) * 4
    return 0


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
