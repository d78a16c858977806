"""Parameters outside blocks: gathered when a forward reads them, released when backward no longer needs them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from .buffer import ShardedBuffer

if TYPE_CHECKING:
    from ..blocks.schedule import Schedule


class _Saved:
    """A view of the whole buffer that autograd keeps for its backward."""

    def __init__(self, view: torch.Tensor) -> None:
        self.view = view


class OnDemandGather:
    """Gathers one buffer outside blocks from its first read in a forward pass to the end of the pass's backward.

    It is released as soon as backward no longer needs its values. That is known for a read inside `watch`, which sees
    every tensor that autograd saves: an embedding saves no weights, a linear layer does until its own backward is over.
    Any other read, an unwatched one, keeps the buffer whole until the whole backward is over. If it was released too
    early (before a second backward, say) it is gathered again when autograd unpacks it. All ranks guess alike.
    """

    def __init__(self, schedule: Schedule, buffer: ShardedBuffer) -> None:
        self._schedule, self._buffer = schedule, buffer
        self._parameters = weakref.WeakKeyDictionary[torch.nn.Module, dict[int, torch.nn.Parameter]]()
        self._saved = weakref.WeakSet[_Saved]()
        self._watched = False
        self.unwatched = False

    @classmethod
    def of(cls, sharded: Any, schedule: Schedule) -> OnDemandGather:
        """Return the on-demand gather of the buffer of `sharded`, which its slices own, made at the first read."""
        gather = sharded.on_demand
        if gather is None:
            gather = cls(schedule, sharded.buffer)
            for local in sharded.buffer.slices:
                local.on_demand = gather
        return gather

    @property
    def version(self) -> int:
        """The buffer's version."""
        return self._buffer.version

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor` is a view of the buffer's wholes."""
        return self._buffer.holds(tensor)

    # -- forward ------------------------------------------------------------------------------------------------

    def read(self, sharded: Any, reader: torch.nn.Module) -> torch.nn.Parameter:
        """Return the whole of `sharded`, gathered once per pass, inside a forward or a backward; otherwise the slice.

        Every reader (a module; tied parameters have several) gets a Parameter of its own over the same memory, so
        that its gradient is collected when it is complete, without waiting for those of the others.
        """
        if self._schedule.in_backward:
            self._schedule.join_backward(self)
        elif not self._schedule.in_forward:
            return sharded
        self._schedule.add_reader(self)
        self._buffer.gradient.free_if_unused()
        self._buffer.gather()
        self._buffer.wait()
        self.unwatched |= not self._watched
        own, index = self._parameters.setdefault(reader, {}), sharded.index
        if index not in own:
            own[index] = self._readable(index)
        full, required = own[index], self._buffer.gradient.requires_grad[index]
        if full.requires_grad != required:
            full.requires_grad_(required)
        return full

    def _readable(self, index: int) -> torch.nn.Parameter:
        weights = self._buffer.full_params[index].data
        full = torch.nn.Parameter(weights, requires_grad=weights.is_floating_point() or weights.is_complex())
        if not full.requires_grad:
            return full  # torch admits no hook
        owner = weakref.ref(self)  # autograd keeps the hook where the garbage collector cannot see a cycle

        def collect(full: torch.nn.Parameter) -> None:
            gather, gradient = owner(), full.grad
            full.grad = None
            # The model may have been dropped. What was read may have no part in the loss: then there is no gradient.
            if gather is not None and gradient is not None:
                gather.collect(index, gradient)
                gather._release_if_unneeded()

        full.register_post_accumulate_grad_hook(collect)
        return full

    def full_params(self, index: int) -> list[torch.nn.Parameter]:
        """Return the Parameters by which modules have read parameter `index`."""
        return [own[index] for own in self._parameters.values() if index in own]

    def collect(self, index: int, gradient: torch.Tensor) -> None:
        """Take over the gradient of parameter `index` in the running backward."""
        self._schedule.join_backward(self)
        if self._buffer.gradient.is_pending:  # that of a block, whose parameter is read outside of it as well
            self._schedule.receive_all()
        for observer in self._schedule.observers.before_reduce:
            observer.before_reduce(self._buffer.gradient, index, gradient)
        self._buffer.gradient.collect(index, gradient)

    def check_unwritten(self) -> None:
        """Raise RuntimeError if a forward modified a parameter that it read."""
        copies = [full for own in self._parameters.values() for full in own.values() if full._version]
        self._buffer.check_unwritten(copies)

    def _release_if_unneeded(self) -> None:
        if not self.unwatched and not self._saved:
            self._buffer.reshard()

    def reshard(self) -> None:
        """Release the buffer at the end of the pass."""
        self.unwatched = False
        self._buffer.reshard()

    # -- backward -----------------------------------------------------------------------------------------------

    def _restore(self, saved: _Saved) -> torch.Tensor:
        if not self._schedule.in_backward:
            raise RuntimeError("A weight that autograd saved can only be read inside a backward: it is sharded.")
        self._schedule.join_backward(self)
        self._buffer.gather()
        self._buffer.wait()
        self._saved.discard(saved)
        return saved.view

    def prepare_backward(self, unwatched: bool) -> None:
        """Start the gather that backward needs. unwatched: as it was at the end of the forward."""
        self._schedule.join_backward(self)
        self.unwatched = unwatched
        if unwatched or self._saved:
            self._buffer.gather()
        if unwatched:
            self._buffer.wait()  # no later call would

    def finish_backward(self) -> None:
        """Release the buffer, unless an enclosing backward needs it, and send its gradient."""
        if not self._schedule.is_member(self):
            self.reshard()
        if self._buffer.gradient.trainable:
            self._schedule.send([self._buffer.gradient])

    def abandon_backward(self) -> None:
        """Release the buffer and forget its gradient."""
        self.reshard()
        self._buffer.gradient.discard()


@contextmanager
def watch(group: Sequence[OnDemandGather]) -> Iterator[None]:
    """Note the views of these buffers that autograd saves under `with`; only the code inside reads the buffers.

    A buffer of which nothing was saved, and which has no other reader, is released at the end.
    """

    def pack(tensor: torch.Tensor):
        view = tensor.detach()  # a saved tensor with autograd history would be a cycle
        for gather in group:
            if gather._buffer.holds(view):
                saved = _Saved(view)
                gather._saved.add(saved)
                return gather, saved
        return view, view._version

    def unpack(packed) -> torch.Tensor:
        owner, value = packed
        if isinstance(owner, OnDemandGather):
            return owner._restore(value)
        if owner._version != value:  # saved-tensor hooks switch autograd's own check off
            raise RuntimeError(
                f"A tensor of shape {tuple(owner.shape)} that backward needs was modified in place (it is at version "
                f"{owner._version}, was saved at {value}): write `x = x + y` for `x += y`."
            )
        return owner

    for gather in group:
        gather._watched = True
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
    finally:
        for gather in group:
            gather._watched = False
    for gather in group:
        if len(gather._parameters) == 1:
            gather._release_if_unneeded()
