"""Parameters read outside blocks: who reads them in a pass, and until when their values are needed."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from ..runtime.schedule import Step
from .gradient import GradientBuffer


class Source(Protocol):
    """The flat buffer that is read."""

    wholes: list[torch.nn.Parameter]
    slices: list
    gradient: GradientBuffer

    @property
    def version(self) -> int: ...
    def gather(self) -> None: ...
    def wait(self) -> None: ...
    def release(self) -> None: ...
    def holds(self, tensor: torch.Tensor) -> bool: ...
    def check_unwritten(self, besides: Sequence[torch.nn.Parameter]) -> None: ...


class _Saved:
    """A view of the whole buffer that autograd keeps for its backward."""

    def __init__(self, view: torch.Tensor) -> None:
        self.view = view


class Reads:
    """The reads of one buffer outside blocks, from the first of a pass to the end of its backward.

    The buffer is gathered at the first read and released as soon as backward needs its values no more. That is
    known where the read happens inside `watch`, which sees every tensor that autograd saves: an embedding saves no
    weights, a linear layer does until its own backward is over. A read that nobody watches keeps the buffer whole
    until the whole backward is over. What was released too early (a second backward, say) is gathered again when
    autograd unpacks it, so a wrong guess costs time and never a value; it is the same guess on every rank.
    """

    def __init__(self, step: Step, source: Source) -> None:
        self._step, self._source = step, source
        self._parameters: weakref.WeakKeyDictionary[torch.nn.Module, dict[int, torch.nn.Parameter]]
        self._parameters = weakref.WeakKeyDictionary()
        self._saved: weakref.WeakSet[_Saved] = weakref.WeakSet()
        self._watched = False
        self.unwatched = False

    @property
    def version(self) -> int:
        return self._source.version

    # -- forward ------------------------------------------------------------------------------------------------

    def read(self, index: int, reader: torch.nn.Module) -> torch.nn.Parameter:
        """The whole parameter inside a forward or a backward, gathered once a pass; its slice otherwise.

        Every reader (a module; tied parameters have several) gets a Parameter of its own over the same memory, so
        that its gradient is collected the moment it is complete, instead of waiting for those of the others.
        """
        piece = self._source.slices[index]
        if self._step.in_backward:
            self._step.enlist(self)
        elif not self._step.in_forward:
            return piece
        self._step.meet(self)
        self._source.gradient.let_go()
        self._source.gather()
        self._source.wait()
        self.unwatched |= not self._watched
        own = self._parameters.setdefault(reader, {})
        if index not in own:
            own[index] = self._readable(index)
        whole = own[index]
        if whole.requires_grad != piece.requires_grad:
            whole.requires_grad_(piece.requires_grad)
        return whole

    def _readable(self, index: int) -> torch.nn.Parameter:
        whole = torch.nn.Parameter(self._source.wholes[index].data)
        owner = weakref.ref(self)  # autograd keeps the hook where the garbage collector cannot see a cycle

        def collect(whole: torch.nn.Parameter) -> None:
            reads = owner()
            assert reads is not None and whole.grad is not None
            reads._step.enlist(reads)
            reads._source.gradient.collect(index, whole.grad)
            whole.grad = None
            reads._release_if_unneeded()

        whole.register_post_accumulate_grad_hook(collect)
        return whole

    def _written(self) -> list[torch.nn.Parameter]:
        """The readers' Parameters that a forward has modified in place."""
        return [whole for own in self._parameters.values() for whole in own.values() if whole._version]

    def check_unwritten(self) -> None:
        self._source.check_unwritten(self._written())

    def _release_if_unneeded(self) -> None:
        if not self.unwatched and not self._saved:
            self._source.release()

    def release(self) -> None:
        """The pass is over."""
        self.unwatched = False
        self._source.release()

    # -- what autograd saves ------------------------------------------------------------------------------------

    def _save(self, view: torch.Tensor) -> _Saved:
        saved = _Saved(view)
        self._saved.add(saved)
        return saved

    def _restore(self, saved: _Saved) -> torch.Tensor:
        if not self._step.in_backward:
            raise RuntimeError("A weight that autograd saved can only be read inside a backward: it is sharded.")
        self._step.enlist(self)
        self._source.gather()
        self._source.wait()
        self._saved.discard(saved)
        return saved.view

    # -- backward -----------------------------------------------------------------------------------------------

    def prepare_backward(self, unwatched: bool) -> None:
        """Start the gather of what backward will ask for. unwatched: as it was at the end of the forward."""
        self._step.enlist(self)
        self.unwatched = unwatched
        if unwatched or self._saved:
            self._source.gather()
        if unwatched:
            self._source.wait()  # nobody asks again

    def flush_backward(self) -> None:
        if not self._step.takes_part(self):
            self.release()
        if self._source.gradient.trainable:
            self._step.send_apart(self._source.gradient)

    def abandon_backward(self) -> None:
        self.release()
        self._source.gradient.discard()


@contextmanager
def watch(group: Sequence[Reads]) -> Iterator[None]:
    """See what autograd saves of these buffers in the code under `with`, which reads them.

    A buffer of which nothing was saved, and that nobody else is known to read, is released at the end.
    """

    def pack(tensor: torch.Tensor):
        view = tensor.detach()  # autograd must not find itself in what it saves
        for reads in group:
            if reads._source.holds(view):
                return reads, reads._save(view)
        return view, view._version

    def unpack(packed) -> torch.Tensor:
        owner, value = packed
        if isinstance(owner, Reads):
            return owner._restore(value)
        if owner._version != value:  # saved-tensor hooks switch autograd's own check off
            raise RuntimeError(
                f"A tensor of shape {tuple(owner.shape)} that backward needs was modified in place (it is at version "
                f"{owner._version}, was saved at {value}): write `x = x + y` for `x += y`."
            )
        return owner

    for reads in group:
        reads._watched = True
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
    finally:
        for reads in group:
            reads._watched = False
    for reads in group:
        if len(reads._parameters) == 1:
            reads._release_if_unneeded()
