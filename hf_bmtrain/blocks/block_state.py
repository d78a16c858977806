"""When to gather, reduce and free a transformer block."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from ..recompute.policy import Fixed, Recomputation, UseCheckpoint
from ..recompute.replay import Replay
from ..runtime.schedule import Schedule
from ..sharding.buffer import ShardedBuffer
from ..sharding.slots import Slot
from .autocast import uncached_autocast
from .autograd import enter_backward, leave_backward


class BlockState:
    """What a CheckpointBlock owns: its buffers, the slots they show up in, and its neighbours.

    Its parameters are whole exactly while forward or backward runs in it; the block that ran last stays whole
    until another one opens, and the neighbour is gathered ahead. own_forward: runs in the place of the forward of the
    layer's class (one set on the instance, a compiled one). `pending` counts forwards whose backward is to
    come, so that a block used several times is reduced once, when its gradient is complete; `_unreduced` says that
    backward has entered the block since. These decide and not the presence of gradients, because they are the same
    on every rank.
    """

    def __init__(
        self,
        schedule: Schedule,
        buffers: list[ShardedBuffer],
        slots: list[Slot],
        replay: Replay,
        zero_level: int,
    ) -> None:
        self.schedule, self.buffers, self.slots, self.replay = schedule, buffers, slots, replay
        self.zero_level = zero_level
        self.recomputation: Recomputation = Fixed(True)
        self.previous: BlockState | None = None
        self.next: BlockState | None = None
        self.own_forward: Callable | None = None
        self.compiled = False
        self._places = [slot.place() for slot in slots]
        self.pending = 0
        self._unreduced = False
        self._opened = False

    def add(self, buffers: list[ShardedBuffer], slots: list[Slot], replay: Replay) -> None:
        """Parameters that came into the layer later, in buffers of their own."""
        self.buffers += buffers
        self.slots += slots
        self._places += [slot.place() for slot in slots]
        self.replay = replay

    @property
    def use_checkpoint(self) -> UseCheckpoint:
        return self.recomputation.use_checkpoint

    @property
    def keeps_no_cache(self) -> bool:
        """Whether a key-value cache must stay out of its training forward."""
        return bool(self.use_checkpoint) or self.compiled

    # -- forward ------------------------------------------------------------------------------------------------

    def forward(self, layer_forward: Callable, args: tuple, kwargs: dict) -> Any:
        """Run the layer's own forward on whole parameters."""
        layer_forward = self.own_forward or layer_forward
        if self.schedule.in_backward and self._is_recomputed():
            return self._run_again(layer_forward, args, kwargs)
        self.schedule.discard_failed_backward()
        training = torch.is_grad_enabled()
        recompute = training and self.recomputation.recomputes(args, kwargs, self.pending)
        differentiable = False
        try:
            self._open(self.next)
            if training:
                for buffer in self.buffers:
                    buffer.gradient.follow_requires_grad()
                    buffer.gradient.free_if_unused()
                outputs, differentiable = self._forward_with_grad(layer_forward, args, kwargs, recompute)
            else:
                with uncached_autocast(), self.schedule.inside():
                    outputs = layer_forward(*args, **kwargs)
            self.check_unwritten()
        finally:
            self._show_slices()
            if not differentiable:
                self.release()
        if self.zero_level == 3 and differentiable:
            self.schedule.leave_whole(self)
        return outputs

    def _is_recomputed(self) -> bool:
        """Whether a call during a backward repeats one that autograd has recorded."""
        recorded = self.schedule.was_recorded(self)
        return self.pending > 0 if recorded is None else recorded

    def _run_again(self, layer_forward: Callable, args: tuple, kwargs: dict) -> Any:
        """Somebody's own checkpoint around this block recomputes it: autograd must save what it saved in the forward,
        so own recomputation is there again, and nothing else happens. It may come before the block's own backward."""
        closed = not self._opened
        if closed:
            self._open(None)
        run = functools.partial(self._inside, layer_forward, **kwargs)
        try:
            with uncached_autocast():
                return checkpoint(run, *args, use_reentrant=False) if self.use_checkpoint else run(*args)
        finally:  # torch ends a recomputation early by an exception
            if closed:
                self._show_slices()
                if self.zero_level == 3:
                    self.schedule.leave_whole(self)

    def _recompute(self, layer_forward: Callable, args: tuple, kwargs: dict) -> Any:
        """The layer's own forward inside a backward, which has opened the block and will close it."""
        if not self._opened:
            raise RuntimeError(
                "Backward entered a sharded block without passing its output: the loss reads an activation from "
                "inside the block (a hook, a stored attribute). Return that activation from the block's forward."
            )
        return self._inside(layer_forward, *args, **kwargs)

    def _inside(self, layer_forward: Callable, /, *args, **kwargs) -> Any:
        with self.schedule.inside():
            return layer_forward(*args, **kwargs)

    def _forward_with_grad(
        self, layer_forward: Callable, args: tuple, kwargs: dict, recompute: bool
    ) -> tuple[Any, bool]:
        args, kwargs, inputs = leave_backward(self, args, kwargs)
        versions = [tensor._version for tensor in inputs]
        with uncached_autocast():
            if recompute:
                outputs = self._forward_to_recompute(layer_forward, args, kwargs)
            else:
                outputs = self._inside(layer_forward, *args, **kwargs)
        if versions != [tensor._version for tensor in inputs]:
            raise RuntimeError(
                "The layer modified one of its inputs in place, which a sharded block cannot follow in backward: "
                "write `x = x + y` for `x += y` at the start of its forward."
            )
        outputs, differentiable = enter_backward(self, [buffer.version for buffer in self.buffers], outputs)
        self.pending += differentiable
        if differentiable:
            self.schedule.record(self)
        return outputs, differentiable

    def _forward_to_recompute(self, layer_forward: Callable, args: tuple, kwargs: dict) -> Any:
        """Run the layer's own forward now, and again in backward instead of keeping its activations."""
        again = False

        def run(*args, **kwargs):
            nonlocal again
            recorder = self.recomputation.recorder
            if again:
                if recorder is not None:
                    recorder.mark(recomputed=True)
                with self.replay.restore(snapshot, args, kwargs) as (args, kwargs):
                    return self._recompute(layer_forward, args, kwargs)
            again = True
            if recorder is None:
                return self._inside(layer_forward, *args, **kwargs)
            with recorder.count_saved(args, kwargs, self.pending):
                return self._inside(layer_forward, *args, **kwargs)

        with self.replay.record(args, kwargs) as snapshot:
            return checkpoint(functools.partial(run, **kwargs), *args, use_reentrant=False)

    def _open(self, neighbour: BlockState | None) -> None:
        """Whole and shown. Order of the gather lane: this block, then the neighbour."""
        self.schedule.open_block(self, neighbour)
        for buffer in self.buffers:
            buffer.gather()
        if neighbour is not None:
            for buffer in neighbour.buffers:
                buffer.gather()
        for buffer in self.buffers:
            buffer.wait()
        for parameters, name, whole, _ in self._places:
            parameters[name] = whole
        self._opened = True

    def release(self) -> None:
        for buffer in self.buffers:
            buffer.release()

    def check_unwritten(self) -> None:
        for buffer in self.buffers:
            buffer.check_unwritten()

    def _show_slices(self) -> None:
        for parameters, name, _, piece in self._places:
            parameters[name] = piece
        self._opened = False

    # -- backward -----------------------------------------------------------------------------------------------

    def before_backward(self, token: list[int]) -> None:
        """Whole again. token: the buffers' versions in forward, which must still be the present ones."""
        self.schedule.join_backward(self)
        if (recorder := self.recomputation.recorder) is not None:
            recorder.mark(recomputed=False)
        if token != [buffer.version for buffer in self.buffers]:
            raise RuntimeError(
                "The weights of a block changed between its forward and its backward (an optimizer step or a load "
                "came between them); its gradients would be wrong. Run forward again."
            )
        self._unreduced = True
        ahead = self.previous
        self._open(ahead if ahead is not None and ahead.pending > 0 else None)
        self.schedule.make_room()

    def after_backward(self) -> None:
        """The gradients of this call are complete: reduce when no other call is pending, then free."""
        self._show_slices()
        if self.pending > 0:
            self.pending -= 1
        if self.pending > 0:
            self.schedule.leave_whole(self)
            return
        self._reduce()
        self.release()

    def flush_backward(self) -> None:
        """The end of backward, for a block whose inputs needed no gradient or whose calls are not all done."""
        if self._opened:
            self._show_slices()
        self.pending = 0
        if self._unreduced:
            self._reduce()
        self.release()
        for buffer in self.buffers:
            if not buffer.gradient.trainable:
                buffer.gradient.discard()  # frozen since the forward
            for whole in buffer.wholes:
                if whole.grad is not None:
                    raise RuntimeError(
                        "A block's gradient arrived after its backward was over: one of its parameters is used outside "
                        "its own forward. Pass what is shared through the block's inputs and outputs."
                    )

    def abandon_backward(self) -> None:
        self.pending, self._unreduced = 0, False
        self._show_slices()
        self.release()
        for buffer in self.buffers:
            buffer.gradient.discard()

    def _reduce(self) -> None:
        self._unreduced = False
        self.schedule.send([buffer.gradient for buffer in self.buffers if buffer.gradient.trainable])
