"""Copy the inputs of recomputed blocks (transformer layers) to host memory in the forward, and back in the backward."""

from __future__ import annotations

import bisect
import weakref
from contextlib import AbstractContextManager
from typing import Any

import torch

from ...engine.base.pinned import pinned_bytes
from ...engine.base.torch_internals import inside_hooks
from ...engine.comm.streams import DONE, Event, WorkStream, work_stream

_INSTEAD = "pass offload_activations=False"


class HostInputs:
    """Keeps the inputs of one model's recomputed blocks in host memory from the forward to the backward.

    This saves GPU memory (`offload_activations` of `auto_wrap`). Only inputs that need a gradient are copied, not masks
    or positions. They are copied on a separate stream while the blocks compute on the current stream:

    * When a block saves its input in the forward, a copy of the input to the host is queued. When the next block is
      about to save its own input, the current stream first waits for this copy, and the copied input is freed on the
      device. So at most one block's input is being copied at a time.
    * The last block's input is copied too, but stays on the device, because backward needs it first.
    * When the backward of a block reads the block's input, the current stream waits until the input has been copied
      back. Then the copy of the preceding block's input is queued. So at most two blocks' inputs are on the device.

    Only streams wait for the copies; the Python thread does not.

    Host memory is allocated in pieces, one for each input, and reused in later steps. A piece can also hold a smaller
    input. If free pieces exist but all are too small for an input, the largest of them is released, and a new piece is
    allocated.

    Args:
        device: the device on which the blocks compute.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: WorkStream | Any = None  # created in the first forward
        self._free: list[torch.Tensor] = []  # unused host memory, as tensors of bytes, in ascending order of size
        self._saved: list[weakref.ref[_Inputs]] = []  # inputs that backward has not used yet, oldest first

    def __deepcopy__(self, memo: dict) -> HostInputs:
        return HostInputs(self._device)

    def saving(self) -> AbstractContextManager[Any] | None:
        """Return a context manager that keeps a block's inputs in host memory. Create one for each forward of a block.

        The inputs are the tensors that torch.utils.checkpoint saves in this context. Returns None inside other
        saved-tensor hooks, because these decide where tensors are saved. (With torch 2.6, which cannot detect such
        hooks, the result is never None.)
        """
        if inside_hooks():
            return None
        self._saved = [each for each in self._saved if each() is not None]
        newest = self._saved[-1]() if self._saved else None
        if newest is not None:
            newest.leave_device()
        inputs = _Inputs(self)
        self._saved.append(weakref.ref(inputs))
        return torch.autograd.graph.saved_tensors_hooks(inputs.pack, _unpack)

    def before(self, inputs: _Inputs) -> _Inputs | None:
        """Return the inputs that backward needs after `inputs`, or None if `inputs` are the last that it needs.

        Backward runs the blocks in reverse order. So the result contains the inputs of the block whose forward ran just
        before the forward that saved `inputs`. The caller copies them back to the device ahead of time. Inputs that no
        longer exist, for example because their backward has ended, are skipped.

        inputs: the saved inputs of one forward of a block.
        """
        found = None
        for each in (reference() for reference in self._saved):
            if each is inputs:
                return found
            found = each or found
        return None

    def download(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Event]:
        """Queue a copy of `tensor` to host memory.

        Args:
            tensor: an input that a block saves for backward, a contiguous tensor on the device.

        Returns:
            (copy, memory, event). `copy` has the shape and dtype of `tensor`, and is complete when `event` occurs.
            Before you free `tensor`, make the current stream wait for `event`. `memory` is the host memory that
            contains `copy`. Pass it to `give_back` when `copy` is no longer needed.
        """
        nbytes = tensor.numel() * tensor.element_size()
        memory = self._memory(nbytes)
        copy = memory[:nbytes].view(tensor.dtype).view(tensor.shape)
        return copy, memory, self.queue([(copy, tensor)])

    def _memory(self, nbytes: int) -> torch.Tensor:
        """Return host memory of at least `nbytes` bytes: the smallest free piece that is large enough, or a new piece.

        If there are free pieces but none is large enough, the largest free piece is released before a new piece is
        allocated. So in this case, the number of pieces does not grow.
        """
        position = bisect.bisect_left(self._free, nbytes, key=_size)
        if position < len(self._free):
            return self._free.pop(position)
        if self._free:
            self._free.pop()
        return pinned_bytes(nbytes, self._device, "inputs of recomputed blocks", _INSTEAD)

    def give_back(self, memory: torch.Tensor) -> None:
        """Allow other inputs to reuse `memory`, which `download` returned.

        Copies from or to `memory` may still be queued. This is safe, because later copies that use `memory` run after
        them, on the same stream.
        """
        bisect.insort(self._free, memory, key=_size)

    def queue(self, copies: list[tuple[torch.Tensor, torch.Tensor]]) -> Event:
        """Queue copies to or from host memory. Return an event that occurs when all of them are complete.

        copies: pairs (target, source).
        """
        if self._stream is None:
            self._stream = work_stream(self._device)
        # Let the copies wait for all work queued so far, which may compute their sources or still use their targets.
        self._stream.follow()

        def copy() -> None:
            for target, source in copies:
                target.copy_(source, non_blocking=True)

        self._stream.run(copy)
        return self._stream.record_event()


class _Saved:
    """One input tensor of a block's forward: the tensor on the device, if it is there, and its copy in host memory.

    If the tensor has stayed on the device since the forward, backward checks that user code has not modified it in
    place. A tensor that was copied back from the host needs no check, because only this object refers to it.

    inputs: the `_Inputs` with all inputs of the same forward.
    tensor: the tensor on the device; None while only the copy exists.
    copy: the copy in host memory, which may not be complete yet.
    memory: the host memory that contains `copy`. Other inputs may reuse it once this object is deleted.
    """

    def __init__(self, inputs: _Inputs, tensor: torch.Tensor, copy: torch.Tensor, memory: torch.Tensor) -> None:
        self.inputs, self.copy, self.memory = inputs, copy, memory
        self.tensor: torch.Tensor | None = tensor
        self.version: int | None = tensor._version  # None if `tensor` was copied back from the host

    def check_unwritten(self) -> None:
        """Raise RuntimeError if user code has modified the saved input tensor in place since the block's forward.

        Does nothing if the tensor is not on the device, or was copied back from the host.
        """
        if self.tensor is not None and self.version not in (None, self.tensor._version):
            raise RuntimeError(
                "The input of a sharded block was modified in place after the block's forward, but backward needs it. "
                "Write `x = x + y` instead of `x += y`."
            )

    def __del__(self) -> None:
        self.inputs.give_back(self)


class _Inputs:
    """Holds the input tensors of one forward of a block until its backward, on the device or in host memory.

    Autograd's graph keeps this object alive, because the objects that `pack` returns to autograd refer to it.
    """

    def __init__(self, store: HostInputs) -> None:
        self._store, self._event = store, DONE
        self._saved: weakref.WeakSet[_Saved] = weakref.WeakSet()

    def pack(self, tensor: torch.Tensor) -> Any:
        """Queue a copy of a block's input to host memory. Return a `_Saved`, which autograd saves instead of `tensor`.

        Tensors that need no gradient, such as masks and positions, are returned unchanged. They stay on the device,
        where all blocks share them. Leaf tensors that need a gradient, such as parameters, and empty or non-contiguous
        tensors are returned unchanged too.
        """
        if not tensor.requires_grad or tensor.is_leaf or not tensor.is_contiguous() or not tensor.numel():
            return tensor
        plain = tensor.detach()
        copy, memory, self._event = self._store.download(plain)
        saved = _Saved(self, plain, copy, memory)
        self._saved.add(saved)
        return saved

    def leave_device(self) -> None:
        """Free the block's inputs on the device, after making the current stream wait for their copies to the host.

        Raises RuntimeError if user code has modified an input in place since the forward.
        """
        self._event.wait()
        for saved in self._saved:
            saved.check_unwritten()
            saved.tensor = None

    def fetch(self) -> None:
        """Queue copies of the block's inputs to the device, except for inputs that are on the device already."""
        copies = []
        for saved in self._saved:
            if saved.tensor is None:
                saved.tensor = torch.empty_like(saved.copy, device=self._store._device, pin_memory=False)
                saved.version = None
                copies.append((saved.tensor, saved.copy))
        if copies:
            self._event = self._store.queue(copies)

    def take(self, saved: _Saved) -> torch.Tensor:
        """Return the input tensor of `saved` on the device. Autograd calls this when it needs the tensor in backward.

        Also queues the copies of the preceding block's inputs to the device, because backward needs them next. Raises
        RuntimeError if user code has modified the tensor in place since the forward.
        """
        self.fetch()
        self._event.wait()
        saved.check_unwritten()
        tensor, saved.tensor = saved.tensor, None
        assert tensor is not None
        before = self._store.before(self)
        if before is not None:
            before.fetch()
        return tensor

    def give_back(self, saved: _Saved) -> None:
        """Allow reuse of the host memory of `saved`, which is being deleted.

        If `saved` has a tensor on the device, copies between this tensor and the host memory may still be queued. So
        the current stream waits for them before the tensor is freed.
        """
        if saved.tensor is not None:
            self._event.wait()
        self._store.give_back(saved.memory)


def _size(memory: torch.Tensor) -> int:
    return memory.nbytes


def _unpack(saved: Any) -> torch.Tensor:
    return saved.inputs.take(saved) if isinstance(saved, _Saved) else saved
