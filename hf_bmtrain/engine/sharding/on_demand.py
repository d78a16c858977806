"""All-gather the parameters outside blocks (root parameters) when a forward reads them, and reshard them after use."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from .buffer import ShardedBuffer
from .gradient import GradientBuffer

if TYPE_CHECKING:
    from ..blocks.schedule import Schedule


class _Saved:
    """Stands for a view of a full parameter that autograd has saved. It lives as long as backward may need the view."""

    def __init__(self, view: torch.Tensor) -> None:
        self.view = view


class OnDemandGather:
    """All-gathers a flat buffer of root parameters (outside blocks) when it is read, and reshards it after use.

    The time at which the buffer is resharded depends on where its parameters are read:

    * Usually, all reads are inside the context `watch`, which sees every tensor that autograd saves. The buffer can
      then be resharded early, when autograd keeps no view of its parameters. An embedding saves no view of its weight,
      so the buffer is resharded at the end of the embedding's forward. A linear layer saves its weight until its own
      backward. `watch` describes the exact conditions.
    * If a parameter is read outside `watch`, or if a view of one leaves the context (for example in the outputs of a
      module), autograd may save views that `watch` does not see. The buffer then stays unsharded until the whole
      backward is over or, if no backward can follow, until the end of the forward.

    If autograd unpacks a saved view after the buffer was resharded, for example in a second backward, the buffer is
    gathered again. Each all-gather is collective, so every rank must read the buffer at the same points of the forward
    and the backward.

    Args:
        schedule: the Schedule of this process, which starts all-gathers and reductions.
        buffer: the flat buffer to unshard.

    Attributes:
        unwatched: whether, in this forward pass, there may be views of the parameters that `watch` does not see. If
            True, the buffer is not resharded early. A read outside `watch` sets it to True. Code that lets a view out
            of the context `watch` must set it to True before the context ends.
        read_inside: whether the buffer was read since the current or last context `watch` began.
    """

    def __init__(self, schedule: Schedule, buffer: ShardedBuffer) -> None:
        self._schedule, self._buffer = schedule, buffer
        self._parameters = weakref.WeakKeyDictionary[torch.nn.Module, dict[tuple[int, bool], torch.nn.Parameter]]()
        self._saved = weakref.WeakSet[_Saved]()
        self._watched = False
        self.unwatched = self.read_inside = False
        self._passes = 0  # the number of training forwards that have read the parameters since the last backward
        # True once `note_read` or `count_pass` has recorded a read whose gradient may be computed at any point of
        # backward. From then on, the gradients are reduced only at the end of each backward.
        self._read_elsewhere = False
        self._sent = False  # whether the running backward has started the reduction

    @classmethod
    def of(cls, sharded: Any, schedule: Schedule) -> OnDemandGather:
        """Return the OnDemandGather of the flat buffer that contains the local (sharded) parameter `sharded`.

        The first call creates it, and sets it as the attribute `on_demand` of all local parameters of the buffer.

        schedule: the Schedule of this process, which starts all-gathers and reductions. It is used only if the
            OnDemandGather is created.
        """
        gather = sharded.on_demand
        if gather is None:
            gather = cls(schedule, sharded.buffer)
            for local in sharded.buffer.slices:
                local.on_demand = gather
        return gather

    @property
    def buffers(self) -> tuple[ShardedBuffer]:
        """The flat buffer that this object unshards, as a tuple of one element.

        Blocks have an attribute of the same name, which may contain several flat buffers. This allows the Schedule to
        treat blocks and OnDemandGathers alike.
        """
        return (self._buffer,)

    @property
    def version(self) -> int:
        """Torch's version counter of the flat buffer's shard, which every write to the shard increments.

        `ForwardPass` (one call of the outermost module) reads it at the end of the forward and at the beginning of the
        backward. If the two values differ, the parameters were modified in between.
        """
        return self._buffer.version

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor` is a view of one of the full parameters that this object unshards.

        Called, for example, for each output of the model (by `ForwardPass.holds`), because such a view becomes invalid
        when the parameters are freed. False if this rank's shard is the full buffer, because nothing is freed then.
        """
        return self._buffer.storage.holds(tensor)

    # -- forward ------------------------------------------------------------------------------------------------

    def read(self, sharded: Any, reader: torch.nn.Module) -> torch.nn.Parameter:
        """Return the full parameter inside a forward or backward, and the local parameter `sharded` elsewhere.

        Called when code accesses a parameter as an attribute of a DistributedModule. Collective inside a forward or
        backward if the buffer is sharded at this moment, because it is then all-gathered.

        If several modules read a (tied) parameter, each gets its own Parameter over the same memory. Thus autograd
        computes a separate gradient for each module. As soon as this gradient is complete, `collect` adds it to the
        flat buffer's gradient, without waiting for the other modules.

        While the parameter is frozen, a module gets another Parameter, which requires no gradient. The Parameter that
        an earlier forward has read still requires one. So if the user freezes `sharded` after that forward, but
        unfreezes it before the backward, the gradient is not lost.

        Args:
            sharded: the local parameter.
            reader: the module whose attribute is accessed.
        """
        if self._schedule.in_backward:
            self._schedule.join_backward(self)
        elif not self._schedule.in_forward:
            return sharded
        self._schedule.add_reader(self)
        self._buffer.gradient.free_if_unused()
        self._schedule.gather(self._buffer)
        self._schedule.prefetch_first()
        self._buffer.wait()
        self.unwatched |= not self._watched
        self.read_inside = True
        index = sharded.index
        own, key = self._parameters.setdefault(reader, {}), (index, self._buffer.gradient.requires_grad[index])
        if key not in own:
            own[key] = self._readable(*key)
        return own[key]

    def count_pass(self) -> None:
        """Count a training forward pass that reads the parameters. Called at the first read in the pass.

        A backward may reduce the gradients of these parameters before its end only if exactly one pass has been counted
        since the last backward (see `take_complete_gradients`). After several passes, the gradients of another pass may
        still follow.

        If gradients are disabled at this read, the pass is not counted. Instead, all later backwards reduce the
        gradients only at their end, because the read may be inside a reentrant checkpoint, which repeats it in
        backward.
        """
        if torch.is_grad_enabled():
            self._passes += 1
        else:
            self._read_elsewhere = True

    def note_read(self) -> None:
        """Record that a parameter was read where it is unknown when backward will compute the gradient of this use.

        If gradients are enabled now, every backward from now on reduces the gradients of the buffer's parameters only
        at its end. Called in two cases:

        * A fused loss reads the parameter.
        * `DistributedParameter.gather`, or a function of torch, reads it outside a forward or during a backward.
        """
        if torch.is_grad_enabled():
            self._read_elsewhere = True

    def _readable(self, index: int, required: bool) -> torch.nn.Parameter:
        full = torch.nn.Parameter(self._buffer.full_params[index].data, required)
        for name, value in self._buffer.attributes[index].items():
            setattr(full, name, value)
        if not required:
            return full  # torch allows gradient hooks only on tensors that require a gradient
        owner = weakref.ref(self)  # weak, because the garbage collector cannot free a cycle through autograd's hooks

        def collect(full: torch.nn.Parameter) -> None:
            gather, gradient = owner(), full.grad
            full.grad = None
            # `gather` is None if the model was garbage-collected, and the gradient is None if the loss does not depend
            # on the parameter.
            if gather is not None and gradient is not None:
                gather.collect(index, gradient)
                gather._release_if_unneeded()

        full.register_post_accumulate_grad_hook(collect)
        return full

    def full_params(self, index: int) -> list[torch.nn.Parameter]:
        """Return all Parameter objects for which autograd computes gradients of one parameter.

        There is one for each module that has read the parameter while the parameter required a gradient. So autograd
        computes a separate gradient for each module. All have the full shape and share memory. In
        `loss.backward(inputs=[parameter])`, these objects replace the sharded parameter that the user has passed.

        index: the index of the parameter in the flat buffer.
        """
        return [own[index, True] for own in self._parameters.values() if (index, True) in own]

    def collect(self, index: int, gradient: torch.Tensor) -> None:
        """Add a gradient to the flat buffer's gradient, which is later averaged over the ranks.

        Called in backward, once for each reader of the parameter, when autograd has computed that reader's gradient. A
        reader is a module, a call of `DistributedParameter.gather`, or a fused loss. The gradients of several readers
        are summed.

        Args:
            index: the index of the parameter in the flat buffer.
            gradient: the gradient of the full parameter, on this rank.
        """
        self._schedule.join_backward(self)
        # Wait for an earlier reduction of this buffer, if one is still pending, before adding `gradient`. One may be
        # pending in two cases:
        # * The buffer belongs to a block, but one of its parameters was also read outside the block.
        # * The gradients that `take_complete_gradients` returned are being reduced, and `gradient` was computed later.
        # In both cases, `gradient` is averaged at the end of the backward, and added to the mean of the earlier
        # reduction.
        if self._buffer.gradient.is_pending:
            self._schedule.receive_all()
        self._sent = False
        for observer in self._schedule.observers.before_reduce:
            observer.before_reduce(self._buffer.gradient, index, gradient)
        self._buffer.gradient.collect(index, gradient)

    def check_unwritten(self) -> None:
        """Raise RuntimeError if a forward wrote to a full parameter in place, or cast it to a different dtype.

        Called at the end of the outermost forward, because the change is lost when the full parameters are freed.
        """
        copies = [full for own in self._parameters.values() for full in own.values() if full._version]
        self._buffer.check_unwritten(copies)

    def _release_if_unneeded(self) -> None:
        if not (self._watched or self.unwatched or self._saved):
            self._buffer.reshard()

    def reshard(self) -> None:
        """Free the full parameters at the end of the forward pass or of its backward, unless the buffer is resident.

        A resident buffer keeps its full parameters from step to step.
        """
        self.unwatched = False
        self._buffer.reshard()

    # -- backward -----------------------------------------------------------------------------------------------

    def _restore(self, saved: _Saved) -> torch.Tensor:
        if not self._schedule.in_backward:
            raise RuntimeError(
                "A full weight that autograd saved was freed after the forward. It can be read only while backward "
                "runs. Do not read saved tensors (grad_fn._saved_...) outside backward."
            )
        self._schedule.join_backward(self)
        self._schedule.gather(self._buffer)
        self._buffer.wait()
        self._saved.discard(saved)
        return saved.view

    def prepare_backward(self, unwatched: bool) -> None:
        """Start to all-gather the full parameters if backward may read them. Called when backward begins.

        Backward may read them in two cases: `watch` has seen that autograd saved a view of a full parameter, or the
        argument `unwatched` is True. Otherwise nothing is gathered. Collective if an all-gather is started.

        unwatched: the value of the attribute `unwatched` at the end of the forward pass. If it is True, autograd may
            have saved views that `watch` has not seen. The current stream then also waits for the all-gather.
        """
        self._schedule.join_backward(self)
        self.unwatched = unwatched or (self.unwatched and self._schedule.is_reading(self))
        if unwatched or self._saved:
            self._schedule.gather(self._buffer)
        if unwatched:
            # Make the current stream wait now. Autograd may have saved views outside `watch`, and calls nothing when
            # backward reads such a view. (For views that were saved inside `watch`, it calls `_restore`, which waits.)
            self._buffer.wait()

    def take_complete_gradients(self) -> list[GradientBuffer]:
        """Return the flat buffer's gradient, for the caller to average now, before the end of the backward.

        Called by `Schedule.send_tail`, when the running backward has computed all gradients of these parameters that
        come from its own forward pass. The caller must average the returned gradient. `finish_backward` then does not
        average it again.

        In rare cases, another gradient of these parameters still follows, for example if the backward also runs through
        a graph that an earlier backward has retained. It is averaged at the end of the backward, and gradient hooks are
        called a second time.

        Returns:
            A list that contains the GradientBuffer of the flat buffer. The list is empty in three cases:

            * All parameters are frozen.
            * Since the last backward, no training forward pass has read them, or more than one.
            * `note_read` or `count_pass` has ever recorded a read whose gradient may be computed at any point of a
              backward.
        """
        if self._passes != 1 or self._read_elsewhere or not self._buffer.gradient.trainable:
            return []
        self._sent = True
        return [self._buffer.gradient]

    def finish_backward(self) -> None:
        """Free the full parameters and start to average their gradients over the ranks. Called when backward ends.

        If `Schedule.send_tail` has started to average them earlier in this backward, another average is started only if
        a gradient has been collected since.

        Collective: every rank must call it. The full parameters are not freed if this backward runs inside another one
        (in a reentrant checkpoint) that still needs them, or inside a forward that has read them.
        """
        if not self._schedule.is_member(self):
            self._end_backward()
        if self._buffer.gradient.trainable and not self._sent:
            self._schedule.send([self._buffer.gradient])
        self._passes, self._sent = 0, False

    def _end_backward(self) -> None:
        # If a forward calls backward itself, it may still use the full parameters that it has read: do not free them.
        if not self._schedule.is_reading(self):
            self.reshard()

    def abandon_backward(self) -> None:
        """Free the full parameters and drop their gradients, because the last backward raised an exception.

        Called later, for example when the next forward begins or the next model is wrapped.
        """
        self._end_backward()
        self._passes, self._sent = 0, False
        self._buffer.gradient.discard()


@contextmanager
def watch(group: Sequence[OnDemandGather]) -> Iterator[None]:
    """Context manager that tracks which views of full parameters autograd saves, to know when to free the parameters.

    A DistributedModule (a module that all-gathers its parameters when they are read) runs its forward inside this
    context if it has no children and gradients are enabled.

    At the end of the context, the full parameters of a flat buffer are freed if all of the following hold:

    * Autograd has saved no view of them.
    * They were read in this context.
    * They were not read outside `watch` in this forward pass.
    * Only one module has ever read parameters of this buffer. (Otherwise, for example if weights are tied, another
      module may soon read them.)

    Views that autograd has not saved then become invalid. Code outside the context may have such views, for example in
    the outputs of the module. If so, set `unwatched` of their OnDemandGather to True before the context ends. Nothing
    is freed then.

    If contexts for the same buffer are nested, its parameters are freed only at the end of the outer one, whose code
    may still have views.

    Inside the context, torch does not check whether saved tensors are modified in place before backward. This context
    checks it instead, for all tensors but views of the full parameters: backward raises RuntimeError if the version
    counter of a saved tensor has changed since it was saved.

    group: the OnDemandGathers (one for each flat buffer of root parameters) whose views are tracked.
    """

    def pack(tensor: torch.Tensor):
        view = tensor.detach()  # with its autograd history, the saved tensor would be part of a reference cycle
        for gather in group:
            if gather._buffer.storage.holds(view):
                saved = _Saved(view)
                gather._saved.add(saved)
                return gather, saved
        return view, view._version

    def unpack(packed) -> torch.Tensor:
        owner, value = packed
        if isinstance(owner, OnDemandGather):
            return owner._restore(value)
        if owner._version != value:  # torch does not check versions if there are saved-tensor hooks
            raise RuntimeError(
                f"A tensor of shape {tuple(owner.shape)} that backward needs was modified in place. It is at version "
                f"{owner._version}, and was saved at version {value}. Write `x = x + y` instead of `x += y`."
            )
        return owner

    begun = [gather for gather in group if not gather._watched]
    for gather in begun:
        gather._watched, gather.read_inside = True, False
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
    finally:
        for gather in begun:
            gather._watched = False
    for gather in begun:
        # Do not free a buffer that was not read here: it may have been prefetched for a read that follows.
        if gather.read_inside and len(gather._parameters) == 1:
            gather._release_if_unneeded()
