"""GradientBuffer: averages the gradients of a flat buffer over the ranks and sets `.grad` of its local parameters."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from ..base.torch_internals import WithoutTorchFunction
from ..comm.collective_log import code
from ..comm.reduce import PendingReduce, Reducer
from ..comm.streams import finish
from ..ops.grad_norm import Segments, as_real
from ..tensors.norms import SegmentNorms
from ..tensors.placement import Placement
from ..tensors.tensor import SET_GRAD, ShardTensor
from .unused import UnusedParameters


class _Norms:
    """Creates a SegmentNorms, the object that computes the norms of gradients in a flat gradient, on demand.

    Calling this object returns the SegmentNorms. The first call creates it, and later calls return the same one. It is
    not created earlier, because the norms are usually not read.

    arguments: the arguments of SegmentNorms.
    """

    def __init__(self, arguments: tuple) -> None:
        self._arguments = arguments
        self._norms: SegmentNorms | None = None

    def __call__(self) -> SegmentNorms:
        if self._norms is None:
            self._norms = SegmentNorms(*self._arguments)
        return self._norms


class GradientBuffer:
    """The gradient of a flat buffer, which is averaged over the ranks and accumulated over several backwards.

    `send` starts to average the gradients that autograd stored in the `.grad` of the full parameters. `receive` waits
    for the mean, and then sets the `.grad` of the local parameters (this rank's elements of each) to views of `shard`,
    or adds the mean to an existing `.grad`. Half-precision gradients of several backwards are summed in float32, and
    the sum is rounded into `shard`. A rank that did not use a parameter contributes zeros. If no rank used a parameter,
    its `.grad` does not change.

    Attributes:
        shard: (n,) this rank's shard of the flat gradient; None before the first backward, and after `free_if_unused`
            has freed it.
        slices: weak references to the local parameters, set when they are created. A local parameter is freed with its
            module.
        requires_grad: for each local parameter, whether it requires a gradient. Setting the parameter's own
            `requires_grad` changes this entry.
        full_params_require_grad: for each full parameter, whether it requires a gradient now. If the user changes
            `requires_grad` of a local parameter, the next forward replaces this list by another one (see
            `require_grad`). A list is never modified, so callers may keep it.
        trained: for each local parameter, whether it required a gradient in any call of `send` so far, or whether a
            loaded checkpoint says that it was trained.
        number: the number of the flat buffer in the order of creation. It identifies the buffer in the collective log,
            the list of operations that the ranks compare.
    """

    def __init__(
        self,
        placements: Sequence[Placement],
        reducer: Reducer,
        full_params: list[torch.nn.Parameter],
        like: torch.Tensor,
        unused: UnusedParameters,
    ) -> None:
        """Create the gradient buffer that belongs to one flat buffer of parameters.

        Args:
            placements: for each parameter, its position in the flat buffer and the elements that each rank stores.
            reducer: averages the gradients over the ranks.
            full_params: the full parameters, whose `.grad` autograd sets.
            like: this rank's shard of the parameters. The gradient's shard gets its shape, dtype and device.
            unused: finds the parameters that no rank used in a backward.
        """
        self._placements, self._reducer, self._full_params, self._like = placements, reducer, full_params, like
        self._communicator = placements[0].communicator
        self._unused, self._alone = unused, unused.alone
        self.number = unused.number
        self._entry = code("reduction of the gradient of", self.number)
        self.slices: list[weakref.ref[Any]] = []
        self._indices = range(len(full_params))
        self._local_ranges = [placement.range for placement in placements]
        self.requires_grad = [full.requires_grad for full in full_params]
        self.trained = [False] * len(full_params)
        self.full_params_require_grad = list(self.requires_grad)
        self._noted_require_grad = list(self.requires_grad)  # the values last recorded in the collective log
        self._begun = False  # True while the shard is being written: from a backward's first gradient to `receive`
        self._pending: PendingReduce | None = None  # None except from `send` to `receive`
        self._collected: set[int] = set()
        # The indices of parameters that have no `.grad` and that this rank did not use in the last backward. The list
        # is emptied when `receive` or `decide` has found out whether another rank used these parameters.
        self._absent: list[int] = []
        self._squares: torch.Tensor | None = None
        self._norms: _Norms | None = None
        self.shard: torch.Tensor | None = None
        # The sum of the gradients of several backwards, in float32 or wider. `shard` contains this sum, rounded to the
        # dtype of the parameters. None if only one backward has contributed so far.
        self._total: torch.Tensor | None = None
        self._handed: list[ShardTensor | None] = [None] * len(full_params)
        sizes = placements[0].layout.shard_sizes(self._communicator.rank)
        # `sizes` alternates between padding (at even positions) and parameters (at odd positions). `_hand_out` splits
        # the shard into pieces of these sizes. Leave out padding of size 0, to get fewer pieces. Keep parameters of
        # which this rank stores no element (size 0), because each parameter needs a piece.
        present = [position for position, size in enumerate(sizes) if size or position % 2]
        self._sizes = [sizes[position] for position in present]
        self._parts = [number for number, position in enumerate(present) if position % 2]
        self._version = -1
        # The boundaries of the parameters in the shard, with which SegmentNorms computes the norms of all gradients in
        # the shard at once. None for float64, which SegmentNorms does not support: torch then computes each norm.
        self._segments: Segments | None = None
        self._is_complex = like.is_complex()
        if like.dtype.to_real() != torch.float64:
            numbers = 2 if self._is_complex else 1  # real numbers per element
            ends = [*(local_range.shard_start for local_range in self._local_ranges), self._local_ranges[-1].shard_stop]
            self._segments = Segments([numbers * end for end in ends], like.device)

    @property
    def trainable(self) -> bool:
        """True if any local (sharded) parameter of the flat buffer requires a gradient."""
        return True in self.requires_grad

    def require_grad(self, required: Sequence[bool]) -> None:
        """Set `requires_grad` of the full parameters.

        Users set `requires_grad` of the local (sharded) parameters, which are in `model.parameters()`, but autograd
        uses the full parameters. So blocks call this method at two times:

        * Before a training forward of the block, with `requires_grad` of the local parameters.
        * Before the backward of this forward, with the values that the forward used. Otherwise, if the user has frozen
          parameters and run another forward in between, autograd would drop gradients of the earlier forward.

        Root parameters do not need this: `OnDemandGather.read` returns separate Parameters for them, with the right
        `requires_grad`.

        required: for each full parameter, whether it requires a gradient.
        """
        if required != self.full_params_require_grad:
            for full, each in zip(self._full_params, required):
                full.requires_grad_(each)
            self.full_params_require_grad = list(required)

    def free_if_unused(self) -> None:
        """Free the memory of the flat gradient (`shard` and the running sum) if it is no longer needed.

        Called, for example, before each training forward of a block, so that the forward can use the memory. Setting
        every `.grad` to None, as `zero_grad` does, does not free it, because this object refers to it.

        The memory is still needed, and nothing is freed, in three cases:

        * A local (sharded) parameter has a `.grad`.
        * A backward is writing to `shard`: from its first gradient until `receive`.
        * `receive` returned True, and `decide`, which may set a `.grad` to a view of `shard`, was not called yet.
        """
        if self.shard is not None and not self._begun and not self._absent and self._fresh:
            self.shard = self._total = self._squares = self._norms = None
            self._handed = [None] * len(self._handed)

    @property
    def _fresh(self) -> bool:
        for reference in self.slices:
            local = reference()
            if local is not None and local.grad_now is not None:
                return False
        return True

    @property
    def _gradients(self) -> list[torch.Tensor | None]:
        """The `.grad` of each local (sharded) parameter, in the order of the flat buffer.

        An entry is None if the parameter has no gradient, or was garbage-collected with its module.
        """
        return [None if (local := reference()) is None else local.grad_now for reference in self.slices]

    def set_aside(self) -> Callable[[], None]:
        """Remove the `.grad` and gradient hooks of the sharded parameters until the returned function is called.

        Call this before a backward that is not part of training, for example one that only checks whether the gradients
        are right. That backward then adds nothing to the gradients of training, and calls none of these hooks. No
        backward may be running.

        Returns:
            A function without arguments. Call it after that backward: it sets every `.grad` back to its former value,
            and registers the hooks again.
        """
        slices = [local for each in self.slices if (local := each()) is not None]
        gradients = [(local, local.grad, local._gradient_hooks.copy()) for local in slices]
        names = ("shard", "trained", "_total", "_squares", "_norms", "_handed", "_version")
        values = {name: getattr(self, name) for name in names}
        self.shard = self._total = self._squares = self._norms = None
        self._handed = [None] * len(self._handed)
        for local in slices:
            local.grad = None
            local._gradient_hooks.clear()  # keep this dict, because the handles of the hooks refer to it

        def restore() -> None:
            for local, gradient, hooks in gradients:
                local.grad = gradient
                local._gradient_hooks.update(hooks)
            vars(self).update(values)

        return restore

    # -- one backward -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def collect(self, index: int, gradient: torch.Tensor) -> None:
        """Store a gradient of a full parameter, to be averaged over the ranks by the next `send`.

        Called in backward for gradients that autograd does not store in the `.grad` of the full parameters. These are
        the gradients of parameters outside blocks (each module reads a separate Parameter object for them), and the
        gradients that a fused loss or the backward of `DistributedParameter.gather` computes. Several gradients of one
        parameter are added up. Gradients of a frozen parameter are dropped.

        index: the index of the parameter in the flat buffer.
        gradient: this rank's gradient, in the parameter's full shape.
        """
        if self.requires_grad[index]:  # False if the user has frozen the parameter after the forward
            self._collected.add(index)
            self._reducer.collect(index, gradient, self._begin)

    @property
    def is_pending(self) -> bool:
        """True from `send`, which starts to average gradients over the ranks, until `receive` has waited for them."""
        return self._pending is not None

    def own(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the index and the `.grad` of each full parameter that has a `.grad`: this rank's own gradients.

        Used to pass these gradients to observers, such as a check for nan, before they are averaged over the ranks.
        Call this before `send`, which sets every such `.grad` to None.
        """
        for index, full in enumerate(self._full_params):
            if full.grad is not None:
                yield index, full.grad

    def send(self) -> None:
        """Start to average the full parameters' `.grad`, and the gradients passed to `collect`, over the ranks.

        Called in backward, when the gradients of all parameters of the flat buffer are complete. It sets the `.grad` of
        the full parameters to None. `receive` later waits for the mean. Collective: every rank must call it.
        """
        shard, total = self._begin()
        # Ignore the gradients of parameters that were frozen after the forward.
        gradients = [full.grad if required else None for full, required in zip(self._full_params, self.requires_grad)]
        for full in self._full_params:
            full.grad = None
        # Record a change of `requires_grad` in the collective log, which the ranks compare. They thus notice if only
        # some ranks have frozen a parameter. These ranks would contribute zeros to the parameter's mean gradient.
        if self.requires_grad != self._noted_require_grad:
            self._noted_require_grad = list(self.requires_grad)
            self._communicator.collective_log.note(code("change of requires_grad in", self.number))
        self.trained = [*map(operator.or_, self.trained, self.requires_grad)]
        self._communicator.collective_log.note(self._entry)
        self._unused.sent += 1
        lacking = [index for index, gradient in enumerate(gradients) if gradient is None]
        if lacking:
            self._note_absent(lacking)
        if self._collected:
            self._collected.clear()
        self._pending = self._reducer.send(gradients, shard, total)

    def _note_absent(self, lacking: list[int]) -> None:
        """Post the indices of the parameters that this rank did not use in the backward, for the other ranks to read.

        Frozen parameters are left out, because they get no `.grad`. So are parameters that have a `.grad` from an
        earlier backward, because the mean is added to it in any case.

        lacking: the indices of full parameters whose `.grad` is None. Some of these parameters may have been used, and
            their gradients passed to `collect`. They are left out, too.
        """
        present = self._gradients
        self._absent = [
            index
            for index in lacking
            if self.requires_grad[index] and index not in self._collected and present[index] is None
        ]
        if self._absent:
            self._unused.post(self._absent)

    def receive(self) -> bool:
        """Make the current stream wait for the mean gradient after `send`, and set the `.grad` of local parameters.

        A local parameter has only this rank's elements. Its `.grad` is a view of `shard`, this rank's shard of the flat
        gradient. Under gradient accumulation, the mean is added to the earlier gradients.

        A parameter that has no `.grad` yet, and that this rank did not use in the backward, gets a `.grad` only if
        another rank used it. This is known only when the mean has arrived on the device. The host does not wait for the
        mean here, so this method leaves such a parameter undecided. `decide` waits later, and sets the `.grad` if
        needed.

        If a local parameter of the buffer has a gradient hook, however, the host waits here, and no parameter stays
        undecided. This is necessary because all ranks must call the hooks in the same order.

        Returns:
            True if a parameter is undecided, so that `decide` must be called later. False otherwise; always False with
            one rank, or if a local parameter has a gradient hook.
        """
        assert self._pending is not None and self.shard is not None
        self._pending.wait()
        self._squares, self._pending, self._begun = self._pending.squares, None, False
        torch.autograd.graph.increment_version(self.shard)  # NCCL writes to the shard without incrementing its version
        self._version = self.shard._version
        if self._segments is not None:
            values = as_real(self.shard) if self._is_complex else self.shard
            # Compute the norms only if they are read, for example by torch.nn.utils.clip_grad_norm_. OptimManager does
            # not read them.
            self._norms = _Norms((values, self._segments, self._placements[0].norms, self._squares, self._version))
        if not self._absent:
            self._hand_out(self._indices)
            return False
        # Gradient hooks may be collective, so all ranks must call them in the same order. If a parameter has hooks, the
        # host therefore waits here, instead of later in `decide`, to find out which parameters no rank used. With one
        # rank, there is nothing to wait for.
        hooked = any(local is not None and local._gradient_hooks for local in (each() for each in self.slices))
        if hooked or self._alone:
            self._absent, unused = [], self._find_unused()
            self._hand_out(index for index in self._indices if index not in unused)
            return False
        absent = set(self._absent)
        self._hand_out(index for index in self._indices if index not in absent)
        return True

    def decide(self) -> None:
        """Set the `.grad` of the parameters that only other ranks used in the backward.

        If `receive` returned True, call this before the next reduction of the buffer starts. The host waits until the
        mean gradient has been computed. If `receive` returned False, or after the next `send`, the call has no effect.
        """
        if self._pending is not None or not self._absent:
            return
        unused = self._find_unused()
        absent, self._absent = self._absent, []
        self._hand_out(index for index in absent if index not in unused)

    def _find_unused(self) -> set[int]:
        if not self._alone:
            finish(self._like.device)
        return self._unused.agree(self._absent)

    def discard(self) -> None:
        """Drop all gradients of this backward, and the result of a pending reduction.

        Called after an exception in the backward, or if all parameters were frozen between forward and backward. The
        memory of the flat gradient is freed if no local (sharded) parameter has a `.grad`.
        """
        for full in self._full_params:
            full.grad = None
        self._reducer.discard()
        self._collected.clear()
        self._absent = []
        if self._pending is not None:
            self._pending.cancel()
            # The cancelled reduction may have overwritten the shard. `_squares` still has the sums of squares of the
            # shard's earlier values, so drop them as well.
            self._pending = self._squares = None
        self._begun = False
        # The contents of the shard, including its padding, are undefined now. If the shard were kept, and the user then
        # set a `.grad`, the next backward would add its gradients to these contents.
        self.free_if_unused()

    def _begin(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the tensors into which this backward's gradients are reduced.

        The first call in each backward prepares these tensors.

        Returns:
            (shard, total): `shard` receives this rank's part of the mean gradient. `total` is the sum of the gradients
                of earlier backwards, to which the mean is added; None if no local (sharded) parameter has a `.grad`.
        """
        assert self._pending is None, "`receive` was not called after the last `send`"
        if not self._begun:
            if self._absent:
                self.decide()
            self.free_if_unused()
            if self._fresh:
                self.shard = torch.empty_like(self._like)
            else:
                self._resume_total()
            self._begun = True
        assert self.shard is not None
        return self.shard, self._total

    # -- accumulation -------------------------------------------------------------------------------------------

    @property
    def intact(self) -> bool:
        """True if the `.grad` of every sharded parameter is None or the view of `shard` that this object has set.

        Optimizers may then read the gradients of several parameters as one piece of `shard`, the flat gradient. False
        if the user has replaced a `.grad` by another tensor, which is not in `shard`.
        """
        for mine, handed in zip(self._gradients, self._handed):
            if mine is not None and mine is not handed:
                return False
        return True

    @property
    def _unwritten(self) -> bool:
        return self.shard is not None and self.shard._version == self._version

    def squares(self, indices: Sequence[int]) -> torch.Tensor | None:
        """Return the sums of squares of the gradients of k parameters, over this rank's elements, as (k,) float64.

        OptimManager uses them for the gradient norm. Some reductions compute them while they average the gradients.
        Returns None in these cases:

        * The last reduction did not compute them.
        * One of these gradients is None, or was replaced after the reduction.
        * `shard`, the flat gradient, was written to after the reduction.

        Args:
            indices: the indices of k consecutive parameters.
        """
        if self._squares is None or not self._unwritten:
            return None
        gradients, handed = self._gradients, self._handed
        if any(gradients[index] is None or gradients[index] is not handed[index] for index in indices):
            return None
        return self._squares[indices[0] : indices[-1] + 1]

    def wide(self, start: int, stop: int) -> torch.Tensor | None:
        """Return elements start:stop of the sum of several backwards' gradients, in float32 or wider, as a view.

        `shard` contains this sum, rounded to its own dtype. Optimizers use the sum instead of a half-precision `.grad`,
        because the sum is more precise. Returns None in two cases:

        * There is no sum, because the gradients come from a single backward (all were None before it).
        * `shard`, or a `.grad` that is a view of it, was written to after the last reduction.

        start, stop: indices into `shard`.
        """
        if self._total is None or not self._unwritten:
            return None
        return self._total[start:stop]

    def _resume_total(self) -> None:
        """Prepare the running sum of gradients, to which another backward will be added.

        The running sum of earlier backwards is kept if there is one, because the sum may be more precise than `.grad`.
        If there is none, or if the user has written to a `.grad` in place, a new sum begins with the values of `shard`.
        The new sum is a float32 copy of a half-precision `shard`. If `shard` is float32 or wider, the new sum is
        `shard` itself.

        The user may also have replaced the `.grad` of a parameter, or set it to None. The parameter's part of the sum
        is then overwritten with the present `.grad`, or with zeros if the present `.grad` is None. The former `.grad`
        is copied to other memory, because the user may still refer to it.
        """
        if self.shard is None:
            self.shard = torch.zeros_like(self._like)
        if self._total is None or not self._unwritten:
            wide = torch.promote_types(self.shard.dtype, torch.float32)
            self._total = self.shard if wide == self.shard.dtype else self.shard.to(wide)
        gradients = self._gradients
        with WithoutTorchFunction():
            for index, handed in enumerate(self._handed):
                if handed is not None and gradients[index] is not handed:
                    handed.separate()
                    self._handed[index] = None
            for gradient, local_range, handed in zip(gradients, self._local_ranges, self._handed):
                if gradient is handed and gradient is not None:
                    continue
                target = self._total[local_range.shard_start : local_range.shard_stop]
                target.zero_() if gradient is None else target.copy_(gradient)

    def _hand_out(self, indices: Iterable[int]) -> None:
        """Set the `.grad` of the local (sharded) parameters with these indices, then call their gradient hooks.

        Each `.grad` becomes a view of `shard`, this rank's shard of the flat gradient. The `.grad` of frozen parameters
        does not change.
        """
        assert self.shard is not None
        norms = self._norms
        parts = self.shard.split_with_sizes(self._sizes)
        required, handed, placements, hooked = self.requires_grad, self._handed, self._placements, []
        with WithoutTorchFunction():
            for index in indices:
                local = self.slices[index]()
                if local is None:
                    continue
                if required[index] and (handed[index] is None or local.grad_now is not handed[index]):
                    part: Any = parts[self._parts[index]]
                    part.__class__ = ShardTensor  # faster than ShardTensor.of, which would create another tensor
                    part.placement, part.segment = placements[index], None if norms is None else (norms, index)
                    SET_GRAD(local, part)
                    handed[index] = local.grad_now = part
                if local._gradient_hooks:
                    hooked.append(local)
        for local in hooked:
            for hook in list(local._gradient_hooks.values()):
                hook(local)
