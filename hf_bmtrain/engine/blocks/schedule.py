"""Schedule, which decides during forward and backward when blocks are resharded and when reductions are waited for."""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from ..base.torch_internals import call_after_backward, current_graph_task, next_node
from ..comm.communicator import Gather
from ..comm.object_comm import ObjectComm
from ..comm.reduce import Reduction
from ..sharding.buffer import ShardedBuffer
from ..sharding.gradient import GradientBuffer
from ..sharding.on_demand import OnDemandGather
from ..tensors.backward import double_backward
from .containers import tensors_in
from .negotiation import BACKWARD, EVALUATION, FORWARD, Negotiation
from .observer import Kind, Observer, ObserverHandle, Observers

if TYPE_CHECKING:
    from .block_state import BlockState

_log = logging.getLogger("hf_bmtrain")


class BackwardParticipant(Protocol):
    """A block, or a flat buffer of root parameters (those outside blocks), that takes part in a backward.

    At the end of the backward, the schedule calls `finish_backward` of all participants, in the same order on every
    rank.

    Attributes:
        buffers: the flat buffers whose gradients the participant reduces.
    """

    @property
    def buffers(self) -> Sequence[ShardedBuffer]: ...

    def finish_backward(self) -> None:
        """Free the full parameters, and start the reductions of gradients that the backward has not started yet.

        Called at the end of a backward. Collective: every rank must call it.
        """

    def abandon_backward(self) -> None:
        """Free the full parameters, and drop the gradients of a backward that raised an exception.

        The schedule calls this instead of `finish_backward`, for example when the next forward begins or the next model
        is wrapped (see `Schedule.discard_failed_backward`).
        """


class Order(NamedTuple):
    """A record of one training forward of a module: the first block that it called, and what it read after its blocks.

    The schedule assumes that the module's next training forward does the same, and uses the record to prefetch. (Root
    parameters are those outside blocks.)

    * When the next forward reads root parameters before it has called a block, the all-gathers of `first` are started.
    * In the next forward's `calls`-th call of a block, the all-gathers of `tail` are started.

    Attributes:
        first: the block that the forward called first.
        calls: the number of calls of blocks in the forward. A block that was called twice counts twice.
        tail: the OnDemandGathers of the flat buffers that the forward first read after its last call of a block, such
            as the head's. (An OnDemandGather all-gathers one flat buffer of root parameters.)
    """

    first: BlockState
    calls: int
    tail: Sequence[OnDemandGather]


class ForwardPass:
    """One forward of the outermost sharded module. It records what the backward of this forward needs.

    If a block in `blocks` is called while the backward runs, the call is a recomputation by a checkpoint around the
    block. Calls in the second forward of a reentrant checkpoint are the exception: they are new forwards, which have
    their own backward. (For blocks that are not in `blocks`, see the comment in `BlockState.forward`.)

    Args:
        enter: a function that is called with this forward pass when a backward reaches the forward. It returns False if
            this backward has already reached the forward.
        negotiation: see the attribute.

    Attributes:
        readers: {OnDemandGather: whether its flat buffer must stay unsharded during the whole backward}. Each
            OnDemandGather all-gathers one flat buffer of root parameters (those outside blocks) that the forward has
            read. The values are valid after `end`; before, all are True.
        blocks: the blocks that this forward called and that returned an output that requires a gradient.
        token: the version counters of the flat buffers of root parameters at the end of the forward. None until then.
        module: a weak reference to the module that was called. None in a rehearsal (a forward that only measures).
        expected: the Order of the same module's last training forward, which determines what to prefetch. None if the
            module has had no training forward yet, if gradients are disabled, in a rehearsal, or if the ranks may enter
            different blocks.
        first: the block that this forward called first; None before this call.
        calls: the number of calls of blocks so far.
        last: the block that was called last, if one of its outputs requires a gradient. Otherwise None. Also None
            before the first block is called, while a block is running, and after a backward has called
            `Schedule.send_tail`.
        tail: {OnDemandGather: None}, used as an ordered set: the OnDemandGathers of the flat buffers of root parameters
            that were first read after the last call of a block, such as those of the final norm and the head.
        prefetched: the OnDemandGathers whose flat buffers were prefetched because they are in the tail of `expected`.
        negotiation: makes the ranks agree on each collective of an uneven model, whose ranks may enter different
            blocks. None for other models.
        entry: FORWARD, or EVALUATION if gradients are disabled. `negotiation` writes this constant to the collective
            log, the list of operations that the ranks compare.
    """

    def __init__(self, enter: Callable[[ForwardPass], bool], negotiation: Negotiation | None) -> None:
        self._enter, self.negotiation = enter, negotiation
        self.entry = FORWARD if torch.is_grad_enabled() else EVALUATION
        self.readers: dict[OnDemandGather, bool] = {}
        self.blocks: set[Any] = set()
        self.token: list[int] | None = None
        self.module: weakref.ref[torch.nn.Module] | None = None
        self.expected: Order | None = None
        self.first: BlockState | None = None
        self.calls = 0
        self.last: BlockState | None = None
        self.tail: dict[OnDemandGather, None] = {}
        self.prefetched: Sequence[OnDemandGather] = ()
        self._first_node = next_node()

    # -- forward ------------------------------------------------------------------------------------------------

    def begin_block(self, block: BlockState) -> None:
        """Record that the forward is about to call `block`."""
        if self.first is None:
            self.first = block
        self.calls, self.last = self.calls + 1, None

    def end_block(self) -> None:
        """Empty `tail`. Called when a call of a block has ended.

        At the end of the forward, `tail` must contain only flat buffers that were first read after the last call of a
        block. Those that it contains now were read before this call ended, so they are removed.
        """
        self.tail.clear()

    def add_reader(self, reader: OnDemandGather) -> None:
        """Register that the forward reads the root parameters (those outside blocks) that `reader` all-gathers."""
        if reader not in self.readers:
            self.tail[reader] = None
            if self.entry == FORWARD:
                reader.count_pass()
        self.readers[reader] = True

    def end(self) -> list[int]:
        """End the forward. Return the version counters of the flat buffers of root parameters that it has read.

        Root parameters are those outside blocks. The caller passes the counters to `before_backward`, which checks that
        the parameters were not modified after the forward.
        """
        self.readers = {reader: reader.unwatched for reader in self.readers}
        self.token = [reader.version for reader in self.readers]
        return self.token

    def watch(self, tensors: Iterable[Any]) -> None:
        """Register hooks on `tensors`, which call `before_backward` when a backward reaches one of them.

        This is for a loss that does not depend on the model's outputs, but on other tensors that the forward computed,
        such as those that a module stores in an attribute.

        tensors: any values. Those that are not tensors, and tensors that were computed before this forward or without
            autograd, are ignored.
        """
        for tensor in tensors:
            if type(tensor) is torch.Tensor and (node := tensor.grad_fn) is not None:
                if node._sequence_nr() >= self._first_node:  # pyright: ignore[reportAttributeAccessIssue]
                    tensor.register_hook(self._reached)

    def _reached(self, gradient: torch.Tensor) -> None:
        if torch.is_grad_enabled():
            raise double_backward()
        # The token is None while the forward is still running. A backward that starts inside the forward need not
        # gather root parameters, because those that it reads are still unsharded.
        if self.token is not None:
            self.before_backward(self.token)

    def check_unwritten(self) -> None:
        """Raise RuntimeError if the forward wrote to a root parameter (one outside blocks) or cast it to another dtype.

        Called at the end of the outermost forward, for the root parameters that it has read. Full parameters are freed
        without being copied back to the shards. So a write would be lost, except on a rank whose shard contains the
        whole parameter. If the shard is the full buffer, which it usually is with one rank, writes are allowed. Casts
        are never allowed, because the optimizer would not update the cast values.
        """
        for reader in self.readers:
            reader.check_unwritten()

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor` is a view of a root parameter (one outside blocks) that this forward has read.

        `DistributedModule` calls this for the tensors in the model's outputs, and in lists and dicts among its
        arguments. It replaces views by copies, because a view becomes invalid when the full parameter is freed.

        The result is False for views of a flat buffer whose attribute `OnDemandGather.unwatched` is False, because
        these views cannot have left the modules that read the parameters.
        """
        return any(reader.unwatched and reader.holds(tensor) for reader in self.readers)

    def reshard(self) -> None:
        """Free the full root parameters that this forward has read. Called if no backward will follow.

        Root parameters are those outside blocks.
        """
        for reader in self.readers:
            reader.reshard()

    # -- backward -----------------------------------------------------------------------------------------------

    def before_backward(self, token: list[int]) -> None:
        """Start the all-gathers of the root parameters that backward needs. Collective: every rank must call it.

        Root parameters are those outside blocks. Called when a backward reaches the outputs, a block, or one of the
        tensors passed to `watch`. Only the first call in a backward has an effect.

        Raises RuntimeError if root parameters that the forward has read were modified after it.

        token: the version counters of the parameters' flat buffers at the end of the forward, as returned by `end`.
        """
        if not self._enter(self):
            return  # do not compare versions again: an optimizer may have updated parameters in this backward
        if token != [reader.version for reader in self.readers]:
            raise RuntimeError(
                "Weights outside the blocks (transformer layers) changed between the forward and its backward, for "
                "example by an optimizer step or by loading weights, so the gradients would be wrong. Run forward "
                "again."
            )
        readers = list(self.readers.items())
        if (negotiation := self.negotiation) is not None:  # ranks may have read the buffers in different orders
            readers.sort(key=lambda pair: negotiation.gather_order(pair[0].buffers))
        for reader, unwatched in readers:
            reader.prepare_backward(unwatched)


class ForwardDepth:
    """A reentrant context manager that counts the nested forwards that are running.

    It is entered by the outermost forward of a model, by each forward of a block, and by recomputations, but not by the
    forward of a model that is called inside another model's forward. The count shows whether any forward is running.
    For example, reading a root parameter (one outside blocks) all-gathers it only while a forward or backward is
    running.

    Attributes:
        depth: the number of these forwards that are running; 0 if none is.
    """

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *exception) -> None:
        self.depth -= 1


class Schedule:
    """Decides when blocks are resharded and when reductions are waited for. All models share one schedule.

    Args:
        control: exchanges Python objects between the ranks, for `negotiation`.
        shards, blocks, outside, inside: see the attributes of the same names.

    Attributes:
        shards: allocates and all-gathers shards.
        blocks: averages the gradients of blocks (sharded transformer layers) over the ranks.
        outside: averages the gradients of root parameters (those outside blocks) over the ranks.
        inside: the context in which the outermost forward of a model, each forward of a block, and recomputations run.
            Its `depth` is the number of such forwards that are running now, one inside another.
        observers: this rank's observers, the objects whose methods are called at events of training.
        negotiation: makes the ranks agree on each collective of models in which they may enter different blocks.
        running: the forward pass that is running; None if none is.
        backwards: the number of backwards that have ended without an error.
        failed_backwards: the number of backwards that have raised an error, and have been cleaned up since.
        failed_forwards: the number of forwards of outermost modules that have raised an error on this rank.
        collective_layers: whether layers of any model issue collectives in their own forwards. A recomputation repeats
            these collectives, so all ranks must then recompute the same forwards.
    """

    collective_layers = False

    def __init__(
        self, shards: Gather, blocks: Reduction, outside: Reduction, inside: ForwardDepth, control: ObjectComm
    ) -> None:
        self.shards, self.blocks, self.outside, self.inside = shards, blocks, outside, inside
        self.negotiation = Negotiation(control, self._start)
        self.observers = Observers()
        self.backwards = self.failed_backwards = self.failed_forwards = 0
        self.running: ForwardPass | None = None
        self._calibrates = False
        self._members: dict[
            int, dict[BackwardParticipant, None]
        ] = {}  # the participants of each backward, keyed by autograd's graph task (`current_graph_task`)
        self._passes: dict[int, list[ForwardPass]] = {}  # the forward passes that each backward has reached
        self._left_unsharded: weakref.ref[BlockState] | None = None  # weak, so that it keeps no model alive
        self._prefetched: weakref.ref[BlockState] | None = None
        # What the last training forward of each outermost module did. The references to blocks are strong. With weak
        # ones, a block that was removed from the model would disappear when a rank's garbage collector runs, so that
        # the ranks might prefetch different blocks.
        self._orders: weakref.WeakKeyDictionary[torch.nn.Module, Order] = weakref.WeakKeyDictionary()
        # The gradients whose reductions have been started but not yet waited for: one list for each call of `_start`.
        self._pending: deque[list[GradientBuffer]] = deque()
        # The gradients of the flat buffers that have a parameter which this rank did not use in this backward, as long
        # as it is unknown whether another rank used it. `_decide` empties the list.
        self._undecided: list[GradientBuffer] = []

    # -- observers ----------------------------------------------------------------------------------------------

    def observe(self, observer: Observer, owner: object | None = None) -> ObserverHandle:
        """Add `observer`, whose methods are then called at events of training. Return a handle for removing it.

        owner: an object to which the observer belongs, such as a model. When the owner is freed, the observer is
            removed. None keeps the observer until it is removed through the handle.
        """
        self.observers.add(observer)
        return ObserverHandle(self.observers, observer, owner)

    def observer(self, kind: type[Kind]) -> Kind | None:
        """Return the first observer that is an instance of `kind`, or None if there is none.

        Observers are objects whose methods are called at events of training; `observe` adds them.
        """
        return next((observer for observer in self.observers if isinstance(observer, kind)), None)

    def before_forward(self, model: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Call the `before_forward` methods of observers, except in recomputations and rehearsals.

        Observers are objects whose methods are called at events of training. A rehearsal is a forward that only
        measures something (see `calibration`).

        model: the model whose forward is about to start.
        args, kwargs: the arguments of the forward.
        """
        if not self.repeats:
            self.discard_failed_backward()
            for observer in self.observers.before_forward:
                observer.before_forward(model, args, kwargs)

    # -- memory -------------------------------------------------------------------------------------------------

    @property
    def mapped_bytes(self) -> int:
        """The number of bytes of shards and received gradients that torch's memory statistics do not count.

        The package allocates this memory outside torch's allocator.
        """
        return self.shards.mapped_bytes + self.blocks.mapped_bytes

    def explain_shortage(self, error: BaseException) -> None:
        """If `error` is a torch.OutOfMemoryError, add explanations of the shortage to it.

        The observers (objects called at events of training) return these explanations from their method
        `out_of_memory`. They are added as a note of the exception, or logged in Python 3.10, which has no notes.
        """
        if not isinstance(error, torch.OutOfMemoryError):
            return
        lines = [text for observer in self.observers.out_of_memory if (text := observer.out_of_memory()) is not None]
        if not lines:
            return
        add_note = getattr(error, "add_note", None)  # only exists in Python 3.11 and later
        if add_note is None:
            _log.error("%s", "\n".join(lines))
        else:
            add_note("\n".join(lines))

    def free_dropped(self) -> None:
        """Free the memory that was allocated outside torch for models that every rank has deleted.

        Each rank's Python may free a deleted model at a different time, but this memory can only be freed by all ranks
        together. `bmt.synchronize` calls this method. Collective: every rank must call it.
        """
        self.shards.free_dropped()
        if not self.shards.mapped_bytes:
            self.blocks.free()

    def wait_for_readers(self) -> None:
        """Make the current stream wait until no rank is reading shards of other ranks, so that shards may be written.

        A rank reads the shards of others when it all-gathers by peer copies (from the memory of other GPUs). This
        method is called at the end of each backward, so that an optimizer may write the shards afterwards. Other code
        that writes shards, such as `init_parameters`, calls it first. Collective: every rank must call it.
        """
        self.shards.wait_for_readers()

    # -- forward ------------------------------------------------------------------------------------------------

    @property
    def in_forward(self) -> bool:
        """True while a forward runs. Reading a root parameter (one outside blocks) then all-gathers it."""
        return self.inside.depth > 0

    @property
    def in_backward(self) -> bool:
        """True while autograd's engine runs a backward in this thread."""
        return current_graph_task() != -1

    @property
    def repeats(self) -> bool:
        """True if a forward that runs now is not a new forward of training, so that observers must ignore it.

        This is the case in a backward, where forwards are recomputations, and in a rehearsal: a forward that only
        measures something (see `calibration`).
        """
        return self._calibrates or self.in_backward

    @contextmanager
    def forward(self, uneven: bool, module: torch.nn.Module | None = None) -> Iterator[ForwardPass]:
        """Return a context for the outermost forward of a model. It yields the ForwardPass of this forward.

        uneven: whether the ranks may enter different blocks of the model. If so, the context is collective: every rank
            must enter it, and waits at its end until all ranks have reached the end.
        module: the module that was called. None in a rehearsal (see `calibration`).
        """
        self.discard_failed_backward()
        if uneven:
            self.shards.publish()
        begun = ForwardPass(self._enter_pass, self.negotiation if uneven else None)
        # A training forward uses the Order of its module for prefetching, and replaces it at the end. Forwards without
        # gradients, and forwards of models in which ranks may enter different blocks, do neither: `ordered` is then
        # None.
        ordered = module if torch.is_grad_enabled() and not uneven else None
        if module is not None:
            begun.module = weakref.ref(module)
        if ordered is not None:
            begun.expected = self._orders.get(ordered)
        outer, self.running = self.running, begun
        try:
            with self.inside:
                yield begun
                if uneven:
                    self.negotiation.finish(begun.entry)
            if ordered is not None and begun.first is not None:
                self._orders[ordered] = Order(begun.first, begun.calls, [*begun.tail])
        except BaseException:
            self.failed_forwards += 1
            raise
        finally:
            self.running = outer
            for reader in begun.prefetched:
                if reader not in begun.readers:
                    reader.reshard()

    @contextmanager
    def calibration(self) -> Iterator[None]:
        """Return a context for a rehearsal: a forward without a backward that only measures, before the real forward.

        For example, a feature uses a rehearsal to measure rounding noise before it decides how layers compute. In the
        context, `repeats` is True, so that observers ignore the rehearsal. At the end of the context, root parameters
        (those outside blocks) that only the rehearsal has read are resharded.
        """
        outer = {} if self.running is None else self.running.readers
        with self.forward(self.running is not None and self.running.negotiation is not None) as own:
            self._calibrates = True
            try:
                yield
            finally:
                self._calibrates = False
                for reader in own.readers.keys() - outer.keys():
                    reader.reshard()

    def add_reader(self, reader: OnDemandGather) -> None:
        """Register that the running forward pass reads the root parameters (outside blocks) that `reader` all-gathers.

        If no backward will follow, these parameters are resharded at the end of the forward pass. Otherwise, when the
        backward begins, the parameters that it needs are all-gathered, unless they are still unsharded.
        """
        if self.running is not None:
            self.running.add_reader(reader)

    def is_reading(self, reader: OnDemandGather) -> bool:
        """Return whether the running forward pass, if any, has read the root parameters that `reader` all-gathers.

        Root parameters are those outside blocks. If the result is True, the full parameters must not be freed at the
        end of a backward that runs inside this forward.
        """
        return self.running is not None and reader in self.running.readers

    def watch(self, module: torch.nn.Module, outputs: Any) -> None:
        """Prepare for a backward that begins at a tensor inside the model instead of at the model's outputs.

        When a backward reaches the model's outputs, hooks on them start the all-gathers of the root parameters (those
        outside blocks). But a loss may use a tensor that the model does not return. This method therefore registers
        such hooks (see `ForwardPass.watch`) on:

        * the tensors that `module` has stored in its attributes and buffers.
        * if `module` has forward hooks: the tensors in `outputs`, because a hook may have stored them.

        module: a DistributedModule, whose forward has ended.
        outputs: the return value of this forward.
        """
        if self.running is not None:
            self.running.watch([*vars(module).values(), *module._buffers.values()])
            if module._forward_hooks:
                self.running.watch(tensors_in((outputs,), set(), []))

    def record(self, block: BlockState) -> None:
        """Register in the running forward pass that it called `block`.

        In the backward of this forward, `was_recorded` then returns True for the block. Call this only if an output of
        the block requires a gradient.
        """
        if self.running is not None:
            self.running.blocks.add(block)
            self.running.last = block

    def gather(self, *buffers: ShardedBuffer) -> None:
        """Start the all-gathers of flat buffers, in this order, except those of buffers that are unsharded already.

        Collective: every rank must call it with the same buffers. The exception is a model whose ranks may enter
        different blocks. There, each rank passes the buffers that it needs, and `Negotiation` makes all ranks take part
        in their all-gathers.
        """
        entry = self.negotiated
        for buffer in buffers:
            if entry is None:
                buffer.gather()
                continue
            self.negotiation.before_gather(buffer, entry)
            # The collective log, which the ranks compare, records the grad mode of each all-gather. Ranks that enter
            # different blocks may have different grad modes, which is no error. So let all ranks record the same mode.
            with torch.enable_grad():
                buffer.gather()

    @property
    def negotiated(self) -> int | None:
        """The pass that an uneven model is in: FORWARD, EVALUATION (without gradients) or BACKWARD; None if in none.

        A model is uneven if the ranks may enter different blocks of it. In a pass of such a model, the ranks must agree
        on each collective before they start it. So code that is about to start a collective reads this property. If the
        value is not None, the code passes it to a method of `negotiation`, which writes it to the collective log, or
        starts no collective.
        """
        if self._passes:
            uneven = any(each.negotiation is not None for passes in self._passes.values() for each in passes)
            return BACKWARD if uneven else None
        return None if self.running is None or self.running.negotiation is None else self.running.entry

    def prefetch_first(self) -> None:
        """Start the all-gathers of the block that the running forward will probably call first.

        Called when the forward reads root parameters (those outside blocks), such as those of the embedding, after
        their all-gathers have been started. Does nothing once the forward has called a block. Collective: every rank
        must call it. If the forward then calls another block first, the prefetched one is resharded.
        """
        running = self.running
        if running is None or (expected := running.expected) is None or running.first is not None:
            return
        if self._prefetched is None or self._prefetched() is not expected.first:
            self.open_block(None, expected.first)
            self.gather(*expected.first.buffers)

    def prefetch_tail(self, running: ForwardPass) -> None:
        """Start the all-gathers of the root parameters that the running forward will probably read after its blocks.

        Root parameters are those outside blocks, such as those of the head. This method is called in each call of a
        block, after the block has been unsharded. It starts the all-gathers only in the call that is probably the last:
        the n-th, if the module's previous training forward made n calls of blocks. If the forward does not read the
        parameters, they are resharded at its end. Collective: every rank must call it.
        """
        if running.expected is not None and running.calls == running.expected.calls:
            running.prefetched = running.expected.tail
            for reader in running.prefetched:
                self.gather(*reader.buffers)

    def open_block(self, block: BlockState | None, prefetched: BlockState | None) -> None:
        """Reshard blocks that are no longer needed, before the caller unshards `block` and prefetches `prefetched`.

        At most two blocks are resharded: the block that was prefetched last, and the block that was last passed to
        `leave_unsharded`. A block that is `block` or `prefetched` stays unsharded.

        At the end of a backward, both arguments are None, so both of these blocks are resharded.

        block: the block whose forward or backward starts now; None if none starts.
        prefetched: the block that the caller will prefetch after this call; None if it prefetches none. The next call
            of this method reshards that block, unless it is needed then.
        """
        for reference in (self._left_unsharded, self._prefetched):
            kept = reference() if reference is not None else None
            if kept is not None and kept is not block and kept is not prefetched:
                kept.reshard()
        self._left_unsharded, self._prefetched = None, None if prefetched is None else weakref.ref(prefetched)

    def leave_unsharded(self, block: BlockState) -> None:
        """Leave `block` unsharded until another block starts. This saves an all-gather if `block` itself runs next.

        For example, the last block of the forward is the first of the backward. If another block was left unsharded
        before, it is resharded now.
        """
        if self._left_unsharded is not None:
            kept = self._left_unsharded()
            if kept is not None and kept is not block:
                kept.reshard()
        self._left_unsharded = weakref.ref(block)

    # -- backward -----------------------------------------------------------------------------------------------

    def join_backward(self, member: BackwardParticipant, forward_pass: ForwardPass | None = None) -> None:
        """Add a participant to the running backward. When this backward ends, its participants' `finish_backward` runs.

        A backward may run inside another one (in a reentrant checkpoint). The participant is then added to the inner
        one, which ends first.

        member: for example a block, or the OnDemandGather of a root buffer (a flat buffer of parameters outside
            blocks). Adding it again has no effect.
        forward_pass: the forward pass in which `member` was used, or None if it is unknown. Usually, the backward has
            already reached the outputs of this forward pass, and hooks on them have started the all-gathers of root
            parameters. If the loss depends only on an activation inside the model, this method starts these all-gathers
            (see `ForwardPass.before_backward`). If the forward pass is still running, none are started.
        """
        task = current_graph_task()
        if forward_pass is not None and forward_pass not in self._passes.get(task, ()):
            if forward_pass.token is not None:  # None if the forward is still running, and this backward inside it
                forward_pass.before_backward(forward_pass.token)
        self._members_of(task)[member] = None

    def _enter_pass(self, forward_pass: ForwardPass) -> bool:
        """Register that the running backward has reached `forward_pass`. Return False if it is registered already.

        Until this backward ends, `was_recorded` then returns True for the blocks in `forward_pass.blocks`.
        """
        task = current_graph_task()
        self._members_of(task)
        passes = self._passes.setdefault(task, [])
        if forward_pass in passes:
            return False
        passes.append(forward_pass)
        return True

    def _members_of(self, task: int) -> dict[BackwardParticipant, None]:
        assert task != -1, "no backward is running"
        members = self._members.get(task)
        if members is None:
            members = self._members[task] = {}
            call_after_backward(lambda: self._end_backward(task))
        return members

    def was_recorded(self, block: BackwardParticipant) -> bool:
        """Return whether `block` was called (see `record`) in a forward whose backward is running.

        If the result is True, a call of the block now is a recomputation by a checkpoint around the block. Several
        backwards are running if one runs inside another. The result is False if the schedule does not know the forward,
        because the block was called outside a sharded model, or because backward started from an activation that no
        block computed.
        """
        return any(block in each.blocks for passes in self._passes.values() for each in passes)

    def in_backward_of(self, module: torch.nn.Module) -> bool:
        """Return whether a running backward belongs to a forward in which `module` was the outermost module.

        `DistributedModule` uses this to refuse a new forward of a model during a backward of the same model.
        """
        passes = [each for passes in self._passes.values() for each in passes]
        return any(each.module is not None and each.module() is module for each in passes)

    def is_member(self, member: BackwardParticipant) -> bool:
        """Return whether `member` was added (see `join_backward`) to a backward that has not ended.

        A backward counts as ended when it begins to call `finish_backward` of its participants. So if `member` calls
        this method in its `finish_backward`, True means that it also takes part in another backward, which still needs
        its full parameters. (In a reentrant checkpoint, a backward runs inside another one.)
        """
        return any(member in members for members in self._members.values())

    @torch.no_grad()
    def _end_backward(self, task: int) -> None:
        """End a backward: call `finish_backward` of its participants, wait for all reductions, and set every `.grad`.

        Collective: every rank must call it.

        task: autograd's number for the backward (`current_graph_task`).
        """
        self.open_block(None, None)
        members = self._members.pop(task)
        uneven = any(each.negotiation is not None for each in self._passes.get(task, ()))
        ordered = list(members)
        if uneven:  # ranks may have added the participants in different orders
            ordered.sort(key=lambda member: self.negotiation.reduction_order(member.buffers))
        try:
            for member in ordered:
                member.finish_backward()
            if uneven:
                self.negotiation.finish(BACKWARD)
            self._receive(ahead=0)
            self._decide()
        except BaseException:
            self._members[task] = members  # so that the next forward cleans up (`discard_failed_backward`)
            raise
        self._passes.pop(task, None)
        self.wait_for_readers()  # so that the optimizer may write the shards
        self.backwards += 1
        for observer in self.observers.end_backward:
            observer.end_backward()

    def discard_failed_backward(self) -> None:
        """Clean up after a backward that raised an exception: drop its gradients and reductions, and reshard.

        Autograd calls no function when a backward fails. So this method is called later, for example when the next
        forward begins or the next model is wrapped. It does nothing if no backward has failed, or if a backward is
        running. A failed backward is recognized by its participants (such as blocks), which are still registered
        although no backward runs.
        """
        if not self._members or self.in_backward:
            return
        self.failed_backwards += 1
        members = [member for task in self._members.values() for member in task]
        self._members.clear()
        self._passes.clear()
        self.open_block(None, None)
        for gradients in self._pending:
            for gradient in gradients:
                gradient.discard()
        self._pending.clear()
        self._undecided.clear()
        for member in members:
            member.abandon_backward()

    # -- pending reductions -------------------------------------------------------------------------------------

    def make_room(self) -> None:
        """Make the current stream wait for pending reductions, except those that the most recent `send` has started.

        This limits the memory for gradients: while a block computes its backward, usually only the reductions of the
        block whose backward has just ended are pending. With only one rank, no reduction stays pending.

        Call this before a block's backward creates gradients, but after issuing the all-gathers that should overlap
        with this backward. All-gathers that are issued later would also wait for the reductions.
        """
        self._receive(self.blocks.ahead)

    def receive_all(self) -> None:
        """Make the current stream wait for all pending reductions of gradients, and set the `.grad` of the parameters.

        Called in backward, before a gradient is added to a flat buffer whose reduction is pending. Collective: every
        rank must call it, at the same point of the backward, because it calls gradient hooks, which may be collective.

        For each local parameter (this rank's elements) that requires a gradient, the mean gradient is added to the
        `.grad`, or becomes the `.grad` if there is none. A parameter that has no `.grad` yet and that this rank did not
        use in this backward gets a `.grad` only if another rank used it. If this is not known yet, the `.grad` stays
        None, and `_decide` sets it at the end of the backward if necessary.
        """
        self._receive(ahead=0)

    def send(self, gradients: list[GradientBuffer]) -> None:
        """Start to average gradients over the ranks: those of one block, or of parameters outside blocks.

        Collective: every rank must call it. To limit the memory for gradients, the current stream first waits for
        earlier reductions (with several ranks, usually for all but those of the previous call). If ranks may enter
        different blocks, this rank also takes part in the collectives that other ranks need, until all ranks agree that
        this reduction is next.

        gradients: the gradients of all trainable flat buffers of a block, or of one or more root buffers (flat buffers
            of root parameters).
        """
        if self.negotiated is None:
            self._start(gradients, self.blocks.ahead)
        else:
            self.negotiation.before_reduction(gradients)
            self._start(gradients)

    def send_tail(self, forward_pass: ForwardPass) -> None:
        """Start to average the gradients of the root parameters that a forward first read after its last block.

        Root parameters are those outside blocks, such as those of the head. Called in backward when the gradients of
        the last block's outputs exist. Autograd runs the operations of a forward in reverse order, so the gradients of
        these parameters are complete, and their reduction can overlap with the backward of the blocks. The full
        gradients are then freed early. Collective: every rank must call it.

        In three cases, the reduction starts only at the end of the backward:

        * The gradients may still change.
        * A backward runs inside another one.
        * The ranks may enter different blocks.
        """
        forward_pass.last = None  # so that a second backward through the same forward does not call this method
        if len(self._members) > 1 or self.negotiated is not None:
            return
        gradients = [gradient for reader in forward_pass.tail for gradient in reader.take_complete_gradients()]
        if gradients:
            self.send(gradients)

    def _start(self, gradients: list[GradientBuffer], ahead: int = 0) -> None:
        """Start to reduce `gradients`. Before that, make the current stream wait for earlier reductions.

        ahead: the current stream does not wait for the reductions that the last `ahead` calls have started.
        """
        # `_receive` calls gradient hooks, which may be collective. So all ranks must receive a gradient at the same
        # point of the backward. Usually, the last `ahead` reductions are left for `make_room` to receive. But if ranks
        # may enter different blocks, they call `make_room` at different points. Callers then pass ahead=0: all earlier
        # gradients are received here, at a point that all ranks reach together.
        self._receive(ahead)
        for gradient in gradients:
            if gradient.is_pending:
                self._receive(ahead=0)
            for observer in self.observers.before_reduce:
                for index, values in gradient.own():
                    observer.before_reduce(gradient, index, values)
            gradient.send()
        if gradients:
            self._pending.append(gradients)

    def _receive(self, ahead: int) -> None:
        """Make the current stream wait for pending reductions, oldest first, and set the `.grad` of the parameters.

        ahead: the reductions that the last `ahead` calls of `_start` have started stay pending.
        """
        while len(self._pending) > ahead:
            for gradient in self._pending[0]:
                if gradient.receive():
                    self._undecided.append(gradient)
            self._pending.popleft()

    def _decide(self) -> None:
        """Set the `.grad` of the parameters that only other ranks used in this backward.

        `_receive` sets the `.grad` of the parameters that this rank used. A parameter that this rank did not use, and
        that has no `.grad` yet, gets one only if another rank used it. If that is still unknown when `_receive` is
        called, the parameter is left to this method, which is called at the end of the backward.
        """
        undecided, self._undecided = self._undecided, []
        for gradient in undecided:
            gradient.decide()
