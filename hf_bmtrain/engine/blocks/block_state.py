"""The operations around one block's forward and backward: gather, compute, release, reduce."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from ..sharding.buffer import ShardedBuffer
from ..sharding.slots import Slot
from .autograd import enter_backward, leave_backward, uncached_autocast
from .recompute import ALWAYS, NEVER, Recompute, Replay
from .schedule import Schedule


@dataclass(eq=False, repr=False)
class BlockState:
    """A CheckpointBlock's buffers, the slots that show them, and its neighbours in execution order.

    The wholes are in the slots exactly while forward or backward runs in the block. The block that ran last stays whole
    until another one opens, and its neighbour is prefetched.

    recompute: decides which forwards are recomputed. own_forward: replaces
    the forward of the layer's class (one set on the instance, or a compiled one). eager_forward: what it was before it
    was compiled. pending: the number of forwards whose backward has not run yet, so that a block that is used several
    times is reduced once, when its gradient is complete.

    Whether a block is reduced follows from `pending` and `_entered` (backward has entered the block, and its gradient
    is not reduced yet), and not from the presence of gradients, because these are the same on every rank.
    """

    schedule: Schedule
    buffers: list[ShardedBuffer]
    slots: list[Slot]
    replay: Replay
    zero_level: int
    recompute: Recompute = ALWAYS
    previous: weakref.ref[BlockState] | None = None
    next: weakref.ref[BlockState] | None = None
    own_forward: Callable | None = None
    compiled: bool = False
    eager_forward: Callable | None = None
    pending: int = field(default=0, init=False)
    _open: bool = field(default=False, init=False)  # the wholes are shown in the slots
    _entered: bool = field(default=False, init=False)

    @property
    def keeps_no_cache(self) -> bool:
        """True if training forwards must not fill a key-value cache."""
        return not self.recompute.fills_cache or self.compiled

    # -- forward ------------------------------------------------------------------------------------------------

    def forward(self, layer_forward: Callable, args: tuple, kwargs: dict) -> Any:
        """Run the layer's own forward on whole parameters."""
        layer_forward = self.own_forward or layer_forward
        if self.schedule.in_backward:
            recorded = self.schedule.was_recorded(self)
            if recorded or (recorded is None and self.pending):
                return self._recompute_for_others(layer_forward, args, kwargs)
        self.schedule.discard_failed_backward()
        training = torch.is_grad_enabled()
        recomputes = training and self.recompute.recomputes(args, kwargs, self.pending)
        differentiable = False
        try:
            self.unshard(self.next and self.next())
            if training:
                for buffer in self.buffers:
                    buffer.gradient.follow_requires_grad()
                    buffer.gradient.free_if_unused()
                outputs, differentiable = self._forward_with_grad(layer_forward, args, kwargs, recomputes)
            else:
                outputs = self._inside(layer_forward, *args, **kwargs)
            for buffer in self.buffers:
                buffer.check_unwritten()
        finally:
            self.show_local()
            if not differentiable:
                self.reshard()
        if self.zero_level == 3 and differentiable:
            self.schedule.leave_unsharded(self)
        return outputs

    def _forward_with_grad(
        self, layer_forward: Callable, args: tuple, kwargs: dict, recompute: bool
    ) -> tuple[Any, bool]:
        """Return the outputs, between the boundaries of the block's backward, and whether they are differentiable."""
        args, kwargs, inputs, filled = leave_backward(self.after_backward, args, kwargs)
        versions = [tensor._version for tensor in inputs]
        try:
            if recompute:
                outputs = self._forward_to_recompute(layer_forward, args, kwargs)
            else:
                outputs = self._inside(layer_forward, *args, **kwargs)
        finally:
            if filled is not None:
                filled.restore()
        if versions != [tensor._version for tensor in inputs]:
            raise RuntimeError(
                "The layer modified one of its inputs in place, which a sharded block cannot follow in backward: "
                "write `x = x + y` for `x += y` at the start of its forward."
            )
        shown = [buffer.version for buffer in self.buffers]
        outputs, differentiable = enter_backward(self.before_backward, shown, outputs, filled)
        self.pending += differentiable
        if differentiable:
            self.schedule.record(self)
        return outputs, differentiable

    def _forward_to_recompute(self, layer_forward: Callable, args: tuple, kwargs: dict) -> Any:
        """Run the layer's own forward now, and again in backward instead of keeping its activations."""
        again = False

        def run(*args, **kwargs):
            nonlocal again
            if not again:
                again = True
                with self.recompute.first_forward(args, kwargs, self.pending) or nullcontext():
                    return self._inside(layer_forward, *args, **kwargs)
            if not self._open:
                raise RuntimeError(
                    "Backward entered a sharded block without passing its output: the loss reads an activation from "
                    "inside the block (a hook, a stored attribute). Return that activation from the block's forward."
                )
            self.recompute.backward_begins(recomputed=True)
            with self.replay.restore(snapshot):
                return self._inside(layer_forward, *args, **kwargs)

        with self.replay.record(args, kwargs) as snapshot:
            return checkpoint(functools.partial(run, **kwargs), *args, use_reentrant=False)

    def _inside(self, layer_forward: Callable, /, *args, **kwargs) -> Any:
        with self.schedule.inside:
            autocast = uncached_autocast()
            if autocast is None:
                return layer_forward(*args, **kwargs)
            with autocast:
                return layer_forward(*args, **kwargs)

    # -- recomputation by a checkpoint around the block ---------------------------------------------------------

    def _recompute_for_others(self, layer_forward: Callable, args: tuple, kwargs: dict) -> Any:
        """Run a recorded forward again for a checkpoint around this block, perhaps before the block's own backward.

        Autograd must save what it saved in the first forward, so the block's own checkpoint is there again.
        """
        closed = not self._open
        if closed:
            self.unshard(None)
        run = functools.partial(self._inside, layer_forward, **kwargs)
        try:
            return run(*args) if self.recompute is NEVER else checkpoint(run, *args, use_reentrant=False)
        finally:  # torch ends a recomputation early by an exception
            if closed:
                self.show_local()
                if self.zero_level == 3:
                    self.schedule.leave_unsharded(self)

    # -- wholes and slices --------------------------------------------------------------------------------------

    def unshard(self, neighbour: BlockState | None) -> None:
        """Gather the block, prefetch the neighbour behind it, and put the wholes into the slots."""
        self.schedule.open_block(self, neighbour)
        for buffer in self.buffers:
            buffer.gather()
        if neighbour is not None:
            for buffer in neighbour.buffers:
                buffer.gather()
        for buffer in self.buffers:
            buffer.wait()
        for parameters, name, full, local in self.slots:
            shown = parameters[name] if name in parameters else None
            if shown is not local and shown is not full:
                raise RuntimeError(
                    f"'{name}' of a block was replaced by a {type(shown).__name__} after it was sharded (by "
                    "torch.func.functional_call, or assigned), and the block would compute with its own. Use a copy "
                    "of the model made before auto_wrap, or write other values under `with bmt.gathered(model, "
                    "modify=True):`."
                )
            parameters[name] = full
        self._open = True

    def show_local(self) -> None:
        for parameters, name, _, local in self.slots:
            parameters[name] = local
        self._open = False

    def reshard(self) -> None:
        """Free the full buffers."""
        for buffer in self.buffers:
            buffer.reshard()

    # -- backward -----------------------------------------------------------------------------------------------

    def before_backward(self, token: list[int]) -> None:
        """Open the block. token: the buffers' versions in forward, which must be the present ones."""
        self.schedule.join_backward(self)
        self.recompute.backward_begins(recomputed=False)
        if token != [buffer.version for buffer in self.buffers]:
            raise RuntimeError(
                "The weights of a block changed between its forward and its backward (an optimizer step or a load "
                "came between them); its gradients would be wrong. Run forward again."
            )
        self._entered = True
        ahead = self.previous and self.previous()
        self.unshard(ahead if ahead is not None and ahead.pending > 0 else None)
        self.schedule.make_room()

    def after_backward(self) -> None:
        """Close the block after one call's backward; reduce and release it if no other call is pending."""
        self.show_local()
        if self.pending > 0:
            self.pending -= 1
        if self.pending > 0:
            self.schedule.leave_unsharded(self)
            return
        self._reduce()
        self.reshard()

    def finish_backward(self) -> None:
        """End the backward of a block whose inputs needed no gradient, or of whose calls some had no backward."""
        if self._open:
            self.show_local()
        self.pending = 0
        if self._entered:
            self._reduce()
        self.reshard()
        for buffer in self.buffers:
            if not buffer.gradient.trainable:
                buffer.gradient.discard()  # frozen since the forward
            for full in buffer.full_params:
                if full.grad is not None:
                    raise RuntimeError(
                        "A block's gradient arrived after its backward was over: one of its parameters is used outside "
                        "its own forward. Pass what is shared through the block's inputs and outputs."
                    )

    def abandon_backward(self) -> None:
        """Close the block after a backward that raised, and forget its gradient."""
        self.pending, self._entered = 0, False
        self.show_local()
        self.reshard()
        for buffer in self.buffers:
            buffer.gradient.discard()

    def _reduce(self) -> None:
        self._entered = False
        self.schedule.send([buffer.gradient for buffer in self.buffers if buffer.gradient.trainable])
