"""BlockState: all-gathers and frees the parameters of one block, and reduces its gradients, in forward and backward."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from ..base.torch_internals import inside_hooks, inside_reentrant_checkpoint, top_saved_tensors_hooks
from ..sharding.buffer import ShardedBuffer
from ..sharding.slots import Slot
from .autograd import enter_backward, leave_backward, uncached_autocast
from .containers import copy_views, tensors_in
from .recompute import ALWAYS, InputStore, Keeps, Recompute, Replay
from .recomputed_graph import CannotRecompute, NotCompiled, RecomputedGraphs
from .schedule import ForwardPass, Schedule

_log_once = functools.cache(logging.getLogger("hf_bmtrain").info)
_Token = tuple[ForwardPass | None, list[tuple[int, int]], list[Sequence[bool]]]
_WHOLE_FORWARD = (
    "The recomputation of a compiled block repeats its whole forward, not only what the gradients need, because %s"
)


@dataclass(eq=False, repr=False)
class BlockState:
    """The state of one CheckpointBlock (a transformer layer sharded in place), with methods for forward and backward.

    While the block's forward or backward runs, its modules have the full parameters, and at other times the sharded
    ones. When its forward starts, the parameters of the next block are prefetched. When its backward starts, those of
    the previous block are prefetched, if the backward of that block is still to come.

    The full parameters are freed:

    * after a forward of which no output requires a gradient: at once.
    * after any other forward: with `zero_level` 3, when another block starts; with `zero_level` 2, after the block's
      backward.
    * after a backward: at once. If other calls of the block still wait for their backward, however, with `zero_level`
      3 when another block starts, and with `zero_level` 2 after the last of these backwards.

    The gradients are reduced when `pending` becomes 0, that is, when no call of the block waits for its backward any
    longer. In some cases (see `finish_backward`), they are reduced only at the end of the whole backward.

    Attributes:
        layer: a weak reference to the layer.
        schedule: tracks, for all blocks of this rank, which are unsharded and which reductions are pending.
        buffers: the flat buffers of the block's parameters.
        slots: the entries of these parameters in the `_parameters` of the layer's modules.
        replay: saves the layer's state (such as running means and random generators) before a forward, and restores it
            for the recomputation of this forward.
        zero_level: 3 frees the full parameters between forward and backward, and 2 keeps them.
        recompute: decides which forwards are recomputed in backward.
        inputs: stores the inputs of recomputed forwards in host memory until backward. None leaves them on the device.
        previous: a weak reference to the state of the block before this one in the block list; None if there is none.
        next: a weak reference to the state of the block after this one in the block list; None if there is none.
        own_forward: the function to call instead of the class's forward: a forward that was set on the instance, or a
            compiled one. None calls the class's forward.
        compiled: whether the forward is compiled.
        eager_forward: the value of `own_forward` before the forward was compiled.
        graphs: compiles the forward together with its recomputation in backward. None if the forward is not compiled.
        lists_as_tuples: whether a list that the layer returns is converted to a tuple.
        pending: the number of forwards whose backward has not run yet. If a block is called several times, its
            gradients are reduced once, after the last of these backwards.
        left: the buffers that left the block, because all of their parameters were deleted from the layer.
    """

    layer: weakref.ref[torch.nn.Module]
    schedule: Schedule
    buffers: list[ShardedBuffer]
    slots: list[Slot]
    replay: Replay
    zero_level: int
    recompute: Recompute = ALWAYS
    inputs: InputStore | None = None
    previous: weakref.ref[BlockState] | None = None
    next: weakref.ref[BlockState] | None = None
    own_forward: Callable | None = None
    compiled: bool = False
    eager_forward: Callable | None = None
    graphs: RecomputedGraphs | None = None
    lists_as_tuples: bool = False
    pending: int = field(default=0, init=False)
    left: weakref.WeakSet[ShardedBuffer] = field(default_factory=weakref.WeakSet, init=False)
    _open: bool = field(default=False, init=False)  # whether the slots are set to full parameters
    # whether backward has reached the block, and has not yet started to reduce its gradients
    _entered: bool = field(default=False, init=False)
    _recomputed: bool = field(default=True, init=False)  # whether backward recomputes the last training forward
    # whether backward recomputes the last training forward that ran inside saved-tensor hooks
    _recomputed_in_hooks: bool = field(default=True, init=False)

    @property
    def keeps_no_cache(self) -> bool:
        """True if training forwards must not fill a key-value cache, because they may be recomputed or are compiled.

        Hooks of the model's modules (see `keep_cache_out`) read this before each training forward. If it is True for
        any block, they pass use_cache=False to the forward.
        """
        return not self.recompute.fills_cache or self.compiled

    # -- forward ------------------------------------------------------------------------------------------------

    def forward(self, layer_forward: Callable, args: tuple, kwargs: dict) -> Any:
        """Unshard the block, run the layer's forward, and return its outputs. Collective: every rank must call it.

        layer_forward: the forward of the layer's own class, bound to the layer.
        args, kwargs: the arguments of the forward.
        """
        layer_forward = self.own_forward or layer_forward
        if self.schedule.in_backward and not inside_reentrant_checkpoint():
            # The block is called during a backward. Either a checkpoint around the block recomputes an earlier call of
            # the block, or this is a new forward. It counts as a recomputation in two cases:
            # * The forward whose backward is running has called the block (`was_recorded`).
            # * An earlier call of the block still waits for its backward (`pending`), and saved-tensor hooks are
            #   active, as in a non-reentrant checkpoint. For example, a reentrant checkpoint runs its second forward
            #   during the backward, and that second forward has called the block inside a non-reentrant checkpoint.
            # torch 2.6 cannot report whether hooks are active. There, assume that they are.
            hooked = top_saved_tensors_hooks is None or top_saved_tensors_hooks(True) is not None
            if self.schedule.was_recorded(self) or (self.pending and hooked):
                return self._recompute_for_others(layer_forward, args, kwargs)
        self.schedule.discard_failed_backward()
        running = self.schedule.running
        if running is not None:
            running.begin_block(self)
        training = torch.is_grad_enabled()
        if training:
            self._recomputed = self.recompute.recomputes(args, kwargs, self.pending)
            if top_saved_tensors_hooks is None or top_saved_tensors_hooks(True) is not None:
                self._recomputed_in_hooks = self._recomputed
        differentiable = False
        try:
            self.unshard(self.next and self.next())
            if running is not None:
                self.schedule.prefetch_tail(running)
            if training:
                for buffer in self.buffers:
                    buffer.gradient.require_grad(buffer.gradient.requires_grad)
                    buffer.gradient.free_if_unused()
                outputs, differentiable = self._forward_with_grad(layer_forward, args, kwargs)
            else:
                outputs = self._inside(layer_forward, *args, **kwargs)
            for buffer in self.buffers:
                buffer.check_unwritten()
        finally:
            self.show_local()
            if not differentiable:
                self.reshard()
            if running is not None:
                running.end_block()
        if self.zero_level == 3 and differentiable:
            self.schedule.leave_unsharded(self)
        return tuple(outputs) if self.lists_as_tuples and type(outputs) is list else outputs

    def _forward_with_grad(self, layer_forward: Callable, args: tuple, kwargs: dict) -> tuple[Any, bool]:
        """Run the layer's forward, and make autograd call `before_backward` and `after_backward` around its backward.

        Returns the outputs, and whether any of them requires a gradient.

        layer_forward: the layer's forward, or the function that replaces it (`own_forward`).
        args, kwargs: the arguments of the forward.
        """
        args, kwargs, inputs, filled = leave_backward(self.after_backward, args, kwargs)
        versions = [tensor._version for tensor in inputs]
        try:
            if self._recomputed:
                outputs = self._forward_to_recompute(layer_forward, args, kwargs)
            else:
                outputs = self._inside(layer_forward, *args, **kwargs)
        finally:
            if filled is not None:
                filled.restore()
        if versions != [tensor._version for tensor in inputs]:
            raise RuntimeError(
                "The forward of a block modified one of its inputs in place (a tensor of shape "
                f"{' or '.join(str(tuple(x.shape)) for x, old in zip(inputs, versions) if x._version != old)}). A "
                "sharded block does not support this, because the gradients would be wrong. Write `x = x + y` instead "
                "of `x += y` in the layer's forward."
            )
        state = [(buffer.number, buffer.shard._version) for buffer in self.buffers]
        required = [buffer.gradient.full_params_require_grad for buffer in self.buffers]
        token = self.schedule.running, state, required
        outputs, differentiable = enter_backward(self.before_backward, token, outputs, filled)
        self.pending += differentiable
        if differentiable:
            self.schedule.record(self)
        return outputs, differentiable

    def _forward_to_recompute(self, layer_forward: Callable, args: tuple, kwargs: dict) -> Any:
        """Run a forward of the layer that backward will recompute, and return its outputs.

        The layer's compiled graph recomputes it if possible. Otherwise torch's checkpoint does.

        layer_forward: the layer's forward, or the function that replaces it (`own_forward`).
        args, kwargs: the arguments of the forward.
        """
        keeps = self._kept_in_graph(args, kwargs)
        if keeps is not None:
            graphs = self.graphs
            assert graphs is not None
            try:
                # `_kept_in_graph` allows the graph only if earlier forwards have not changed the layer's buffers. If
                # this forward writes to a buffer nevertheless, `record` raises an error.
                with self.replay.record(args, kwargs):
                    return self._inside(lambda *args, **kwargs: graphs.run(keeps, args, kwargs), *args, **kwargs)
            except CannotRecompute as reason:
                _log_once(_WHOLE_FORWARD, str(reason))
                # NotCompiled means that torch.compile has no effect here, for example because it is disabled in a
                # context around the forward. In backward it may have an effect. So use `eager` for both the forward and
                # its recomputation.
                if isinstance(reason, NotCompiled):
                    layer_forward = graphs.eager
        nothing = nullcontext()
        around_first, around_again = self.recompute.contexts(args, kwargs, self.pending) or (nothing, nothing)
        again = False

        def run(*args, **kwargs):
            nonlocal again
            if not again:
                again = True
                with around_first:
                    return self._inside(layer_forward, *args, **kwargs)
            if not self._open:
                raise RuntimeError(
                    "The loss uses an activation from inside a sharded block (taken by a hook, or stored in an "
                    "attribute). Backward therefore reached the inside of the block before the block's outputs, when "
                    "the weights were not yet all-gathered. Return that activation from the block's forward."
                )
            self.recompute.backward_begins(recomputed=True)
            with self.replay.restore(snapshot), around_again:
                return self._inside(layer_forward, *args, **kwargs)

        with self.replay.record(args, kwargs) as snapshot:
            saving = None if self.inputs is None else self.inputs.saving()
            if saving is None:
                return checkpoint(functools.partial(run, **kwargs), *args, use_reentrant=False)
            count, names = len(args), list(kwargs)

            def run_on(*values):
                return run(*values[:count], **dict(zip(names, values[count:])))

            with saving:  # all arguments become positional, because torch's checkpoint saves no keyword arguments
                return checkpoint(run_on, *args, *kwargs.values(), use_reentrant=False)

    def _kept_in_graph(self, args: tuple, kwargs: dict) -> Keeps | None:
        """Decide whether a compiled graph or torch's checkpoint will recompute the forward that is about to start.

        Returns None for torch's checkpoint. For the graph, returns a function that selects the operators whose outputs
        the graph keeps instead of recomputing them. The checkpoint is used in these cases:

        * The block is not compiled, its inputs are kept in host memory, or nothing requires a gradient.
        * Layers issue collectives in their forwards. Each rank's graph could recompute these collectives in a different
          order.
        * Saved-tensor hooks are active, or torch is 2.6, which cannot report them. If hooks offload tensors, they would
          also offload the full parameters that the graph saves. If they belong to an activation checkpoint around the
          block, the block will run again in backward, without the graph (`_recompute_for_others`), and must then save
          the same tensors as now.
        * The forward changes buffers, or may do so. The graph would recompute with the changed values.
        * The block's Recompute object requires it.

        args, kwargs: the arguments of the forward.
        """
        if self.graphs is None or self.inputs is not None or self.schedule.collective_layers:
            return None
        trained = any(buffer.gradient.trainable for buffer in self.buffers)
        if not trained and next(tensors_in((*args, *kwargs.values()), set(), []), None) is None:
            # Nothing requires a gradient, so there will be no backward. torch.compile cannot compile a checkpoint with
            # random operators in this case.
            return None
        if top_saved_tensors_hooks is None:
            _log_once(_WHOLE_FORWARD, "torch before 2.7 cannot tell whether saved-tensor hooks are active")
            return None
        if inside_hooks():
            _log_once(_WHOLE_FORWARD, "saved-tensor hooks, such as those of a checkpoint, are active in the forward")
            return None
        # `changes_buffers` says whether the layer's forward changes registered buffers of the layer, such as running
        # means. Only if the result is False may the compiled graph recompute the forward. If it is True or None (not
        # known yet), torch's checkpoint recomputes this forward. The forward then runs inside `Replay.record`, which
        # finds out whether buffers change.
        changes = self.replay.changes_buffers()
        if changes is not False:
            if changes:
                _log_once(_WHOLE_FORWARD, "this forward changes buffers of the block, such as running means")
            return None
        return self.recompute.kept_in_graph(args, kwargs, self.pending)

    def _inside(self, layer_forward: Callable, /, *args, **kwargs) -> Any:
        """Run the layer's forward, and return its outputs. Views of the block's parameters are replaced by copies.

        A view would become invalid when the block is resharded, although other modules may still read it. Views that
        the forward has put into its arguments are replaced, too: those in lists and dicts and, if gradients are
        enabled, those in other objects.

        layer_forward: the layer's forward, or a function that replaces it.
        args, kwargs: the arguments of the forward.
        """
        with self.schedule.inside:
            autocast = uncached_autocast()
            if autocast is None:
                outputs = layer_forward(*args, **kwargs)
            else:
                with autocast:
                    outputs = layer_forward(*args, **kwargs)
        # Replace views of the block's parameters by copies: in the outputs, and in lists and dicts among the arguments,
        # into which the forward may have put such views. If gradients are enabled, also search other objects among the
        # arguments. Without gradients, this would take too long: in generation, every layer gets the key-value cache
        # of all layers.
        return copy_views(outputs, (*args, *kwargs.values()), self._holds, objects=torch.is_grad_enabled())

    def _holds(self, tensor: torch.Tensor) -> bool:
        for buffer in self.buffers:
            if buffer.storage.holds(tensor):
                return True
        return False

    # -- recompute by a checkpoint around the block -------------------------------------------------------------

    def _recompute_for_others(self, layer_forward: Callable, args: tuple, kwargs: dict) -> Any:
        """Run the forward again in backward, for an activation checkpoint that the user has put around the block.

        The block is unsharded first if necessary, because its backward may not have started yet. If the block's first
        forward ran inside the block's own checkpoint, this second forward runs inside it too, because autograd must
        save the same tensors in both.

        layer_forward: the layer's forward, or the function that replaces it (`own_forward`).
        args, kwargs: the arguments of the recomputation.
        """
        closed = not self._open
        if closed:
            self.unshard(None)
        run = functools.partial(self._inside, layer_forward, **kwargs)
        try:
            return checkpoint(run, *args, use_reentrant=False) if self._recomputed_in_hooks else run(*args)
        finally:  # torch ends a recomputation by an exception as soon as all tensors that backward needs are computed
            if closed:
                self.show_local()
                if self.zero_level == 3:
                    self.schedule.leave_unsharded(self)

    # -- full and local parameters ------------------------------------------------------------------------------

    def forget_deleted(self, leave: bool) -> None:
        """Remove the slots of parameters that were deleted from the layer, by themselves or with their module.

        A slot is the entry of a parameter in the `_parameters` of a module. A parameter does not count as deleted if
        the layer has it under another name, or if its module has another value (parameter, buffer, submodule or
        attribute) under its name.

        leave: whether to also remove each flat buffer whose parameters were all deleted. The block no longer
            all-gathers such a buffer, so every rank must remove it at the same point.
        """
        layer = self.layer()
        modules = () if layer is None else layer.modules()
        owners = {id(module._parameters): module for module in modules}
        present = {id(parameter) for module in owners.values() for parameter in module._parameters.values()}

        def deleted(slot: Slot) -> bool:
            if id(slot.sharded) in present or id(slot.full) in present:
                return False
            owner = owners.get(id(slot.parameters))
            places = () if owner is None else (owner._parameters, owner._buffers, owner._modules, vars(owner))
            return not any(slot.name in place for place in places)

        self.slots = [slot for slot in self.slots if not deleted(slot)]
        if leave:
            used = {slot.sharded.buffer for slot in self.slots}
            for buffer in [buffer for buffer in self.buffers if buffer not in used]:
                if buffer.sharded and buffer.is_unsharded:
                    buffer.drop()
                self.buffers.remove(buffer)
                self.left.add(buffer)

    def current_slots(self) -> list[Slot]:
        """Remove the slots (entries of modules' `_parameters`) of deleted parameters from `slots`. Return `slots`."""
        if not all(name in parameters for parameters, name, _, _ in self.slots):
            self.forget_deleted(leave=False)
        return self.slots

    def put_back(self, slot: Slot) -> None:
        """Add the slot of a parameter that was deleted from the layer (see `forget_deleted`) and is now back in it.

        A slot is the parameter's entry in the `_parameters` of a module. The block all-gathers the parameter's flat
        buffer again, so every rank must call this at the same point.
        """
        self.slots.append(slot)
        if slot.sharded.buffer not in self.buffers:
            self.left.discard(slot.sharded.buffer)
            self.buffers.append(slot.sharded.buffer)

    def unshard(self, neighbour: BlockState | None) -> None:
        """All-gather the block's parameters, put the full parameters into its modules, and prefetch `neighbour`.

        Collective: every rank must call it. The current stream waits only for the all-gathers of this block, which are
        issued before those of the neighbour. Raises RuntimeError if a parameter of a module was replaced by the user.

        neighbour: the block that will probably run next, or None.
        """
        self.schedule.open_block(self, neighbour)
        self.schedule.gather(*self.buffers, *(() if neighbour is None else neighbour.buffers))
        for buffer in self.buffers:
            buffer.wait()
        for parameters, name, _, _ in self.slots:
            if name not in parameters:  # the parameter was deleted, or moved to another name
                self.forget_deleted(leave=False)
                break
        for parameters, name, full, local in self.slots:
            shown = parameters[name] if name in parameters else None
            if shown is not local and shown is not full:
                raise RuntimeError(
                    f"The parameter '{name}' of a block was replaced by a {type(shown).__name__} after the model was "
                    "sharded (by torch.func.functional_call or an assignment). The block would not use the "
                    "replacement. Use a copy of the model made before auto_wrap, or write the new values inside `with "
                    "bmt.gathered(model, modify=True):`."
                )
            parameters[name] = full
        self._open = True

    def show_local(self) -> None:
        for parameters, name, _, local in self.slots:
            if name in parameters:  # False if the parameter was deleted from its module (see `forget_deleted`)
                parameters[name] = local
        self._open = False

    def reshard(self) -> None:
        """Free the full (all-gathered) parameters, unless they are resident (kept from step to step).

        Called when the block's forward or backward no longer needs them. Before the call, the modules must have their
        sharded parameters again (`show_local`).
        """
        for buffer in self.buffers:
            buffer.reshard()

    # -- backward -----------------------------------------------------------------------------------------------

    def before_backward(self, token: _Token) -> None:
        """Unshard the block for its backward, and prefetch the previous block if its backward is still to come.

        Autograd calls this when it reaches the block's outputs. Collective: every rank must call it.

        Raises RuntimeError if the block's weights were modified since its forward: the gradients would be wrong.

        token: a tuple of three facts about the forward of the block whose backward begins:

            * the ForwardPass, which is the forward of the model in which the block was called. None if the block was
              called by itself, without a sharded model around it.
            * for each flat buffer of the block, a pair (number of the buffer, version counter of its shard), as of the
              end of the block's forward.
            * for each flat buffer of the block, `requires_grad` of each of its full parameters in the block's forward.
        """
        forward_pass, versions, required = token
        self.schedule.join_backward(self, forward_pass)
        self.recompute.backward_begins(recomputed=False)
        if versions != [(buffer.number, buffer.shard._version) for buffer in self.buffers]:
            raise RuntimeError(
                "The weights of a block changed between its forward and its backward, for example by an optimizer "
                "step, by loading weights or by deleting parameters, so its gradients would be wrong. Run forward "
                "again."
            )
        for buffer, flags in zip(self.buffers, required):
            buffer.gradient.require_grad(flags)
        self._entered = True
        ahead = self.previous and self.previous()
        self.unshard(ahead if ahead is not None and ahead.pending > 0 else None)
        self.schedule.make_room()
        if forward_pass is not None and forward_pass.last is self and self.pending == 1:
            self.schedule.send_tail(forward_pass)

    def after_backward(self) -> None:
        """Put the sharded parameters back into the layer, start to reduce their gradients, and reshard the block.

        Autograd calls this when the gradients of the block's inputs exist. Collective: every rank must call it. If the
        block was called several times in forward, autograd calls this method equally often. Only the last call of this
        method reduces the gradients and reshards the block.
        """
        self.show_local()
        if self.pending > 0:
            self.pending -= 1
        if self.pending > 0:
            if self.zero_level == 3:
                self.schedule.leave_unsharded(self)
            return
        self._reduce()
        self.reshard()

    def finish_backward(self) -> None:
        """At the end of a backward, reduce the block's gradients and reshard the block, if this is still to be done.

        The schedule calls this for every block that the backward has reached. Collective: every rank must call it.

        Usually, `after_backward` has reduced the gradients and resharded the block already. It has not, for example, in
        these cases:

        * No input of the block requires a gradient. Autograd then does not call `after_backward`.
        * The forward called the block several times, and backward has reached only some of these calls. Then
          `after_backward` still waits for the backward of the other calls.

        Raises RuntimeError if a parameter got a gradient after the block's gradients were reduced, because the
        parameter is also used outside the block's forward. Without the error, this gradient would be lost.
        """
        if self._open:
            self.show_local()
        self.pending = 0
        if self._entered:
            self._reduce()
        self.reshard()
        for buffer in self.buffers:
            if not buffer.gradient.trainable:
                buffer.gradient.discard()  # the parameters were frozen after the forward, so no gradient is wanted
            for full in buffer.full_params:
                if full.grad is not None:
                    raise RuntimeError(
                        f"A parameter of a block, of shape {tuple(full.shape)}, got a gradient after the block's "
                        "backward had ended, because it is also used outside the block's forward. This gradient would "
                        "be lost. Use the parameter only in the block's forward, and return from there what other "
                        "modules need."
                    )

    def abandon_backward(self) -> None:
        """Reshard the block and drop the gradients of a backward that raised an exception.

        torch calls nothing when a backward fails. So the schedule calls this method at the next opportunity, for
        example when the next forward begins or the next model is wrapped.
        """
        self.pending, self._entered = 0, False
        self.show_local()
        self.reshard()
        for buffer in self.buffers:
            buffer.gradient.discard()

    def _reduce(self) -> None:
        # Reduce even if no parameter has a gradient on this rank: another rank may have gradients, and the reduction is
        # collective.
        self._entered = False
        self.schedule.send([buffer.gradient for buffer in self.buffers if buffer.gradient.trainable])
