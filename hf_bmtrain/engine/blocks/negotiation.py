"""Negotiation, by which ranks that may enter different blocks of a model agree on the next collective."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch

from ..base.torch_internals import disable_compiler
from ..comm.collective_log import code
from ..comm.object_comm import ObjectComm
from ..sharding.buffer import ShardedBuffer
from ..sharding.gradient import GradientBuffer

if TYPE_CHECKING:
    from .block_state import BlockState

FORWARD, EVALUATION, BACKWARD = (
    code(f"next operation of a {kind}", 0) for kind in ("forward", "forward without gradients", "backward")
)
"""The three kinds of passes, as numbers. When a rank requests a collective in a pass, it adds the number of this kind
of pass to the collective log (the list of operations that the ranks compare). The ranks thus notice if one rank is in a
forward and another rank is in a backward.
"""
_UNITS = 1 << 30  # an upper bound on the number of blocks and root buffers (of parameters outside blocks)
_STRIDE = 1 << 20  # an upper bound on the number of buffers in one block
_SPACE = _UNITS * _STRIDE
# If ranks request different numbers, the smallest is granted. A rank requests this number at the end of its forward or
# backward. It is larger than the numbers of all collectives (`_add` chooses them below 5 * _SPACE), so it is granted
# only when all ranks request it.
_END = 6 * _SPACE


class _Requests(NamedTuple):
    """The numbers of the collectives of one flat buffer, in a model whose ranks may enter different blocks.

    A rank requests each collective by its number. If ranks request different collectives, the one with the smallest
    number is issued first.

    Attributes:
        forward: the number of the all-gather in a forward.
        backward: the number of the all-gather in a backward.
        reduction: the number of the reduction of the gradient.
    """

    forward: int
    backward: int
    reduction: int


class Negotiation:
    """Makes the ranks agree on each next collective of a model in which they may enter different blocks.

    For example, each rank may drop different layers at random. Without an agreement, one rank could then wait in a
    collective that other ranks never issue.

    Each collective of the model has a number, which is the same on all ranks. Before a collective, every rank requests
    the number of the collective that it needs next. All ranks then issue the collective with the smallest requested
    number. A rank that requested a different number takes part too: in an all-gather, it discards the result, and in a
    reduction, it contributes the gradients that it has computed so far, or zeros. Then it repeats its request. A rank
    that has reached the end of its forward or backward takes part in the same way until all ranks have reached the end
    of theirs.

    The numbers do not affect the results of training. They only affect how many flat buffers are all-gathered or
    reduced twice in a pass, because ranks need them at different times. (If a gradient is reduced twice, the second
    mean is added to the first.)
    """

    def __init__(self, control: ObjectComm, reduce: Callable[[list[GradientBuffer]], None]) -> None:
        """Create the object by which the ranks agree on each next collective.

        Args:
            control: the communicator by which the ranks exchange their requests (numbers of collectives).
            reduce: a collective function that starts to average gradients over the ranks. It takes the GradientBuffers
                of one block, or of one root buffer (a flat buffer of parameters outside blocks).
        """
        self._control, self._reduce = control, reduce
        self._units = 0
        self._requests: dict[int, _Requests] = {}  # {number of a flat buffer: the numbers of its collectives}
        # {number of a collective: a function with which this rank takes part in the collective}. The function is called
        # if other ranks have requested the collective and this rank has not.
        self._served: dict[int, Callable[[], None]] = {}

    def register(
        self, buffers: Iterable[ShardedBuffer], blocks: Iterable[BlockState], last: Collection[BlockState]
    ) -> None:
        """Assign a number to each collective of a model's flat buffers. Ranks request a collective by its number.

        Call this again after buffers were added to the model. Every rank must pass the same buffers.

        Args:
            buffers: the model's flat buffers, in the order of its modules.
            blocks: the BlockStates of its blocks.
            last: the BlockStates of the model's longest list of blocks. In a forward, the all-gathers of these blocks
                get the highest numbers and so are issued last, because modules that only some ranks enter (such as an
                image tower) usually run before this list.
        """
        owners = {buffer: block for block in blocks for buffer in block.buffers}
        units: dict[object, list[ShardedBuffer]] = {}
        for buffer in buffers:
            units.setdefault(owners.get(buffer, buffer), []).append(buffer)
        for unit in sorted(units, key=lambda unit: unit in last):
            for index, buffer in enumerate(units[unit]):
                self._add(buffer, owners.get(buffer), index)
            self._units += 1

    def _add(self, buffer: ShardedBuffer, block: BlockState | None, index: int) -> None:
        """Assign numbers to the collectives of one flat buffer. Ranks request a collective by its number.

        Also store, for each number, a function with which this rank takes part in the collective if only other ranks
        have requested it.

        block: the block to which the buffer belongs, or None for a root buffer (of parameters outside blocks).
        index: the position of the buffer among the buffers of its block.
        """
        # If ranks request different collectives, the one with the smallest number is issued first. So the numbers
        # follow the order in which the collectives usually run.
        # Forward: the order of the model's modules, except that `register` puts the longest list of blocks last,
        # because modules that only some ranks enter (such as an image tower) usually run before this list.
        # Backward: the all-gathers of root buffers, then the blocks from the last to the first, then the reductions of
        # root buffers. The all-gather of block N may be prefetched while the backward of block N+1 runs. Hence the
        # order: all-gather N, reduction N+1, all-gather N-1, reduction N, and so on.
        place = self._units * _STRIDE + index
        if block is None:
            requests = _Requests(place, place, 4 * _SPACE + place)
        else:
            begin = _SPACE + 2 * (_UNITS - self._units) * _STRIDE + index
            requests = _Requests(place, begin - 2 * _STRIDE, begin + _STRIDE)
        self._requests[buffer.number] = requests
        here, owner = weakref.ref(buffer), None if block is None else weakref.ref(block)

        def serve_gather() -> None:
            # The entry of an all-gather in the collective log depends on the grad mode, and must be the same on all
            # ranks. The ranks that requested this all-gather issue it with gradients enabled (see `Schedule.gather`),
            # so do the same here.
            with torch.enable_grad():
                _alive(here).take_part()

        def serve_reduction() -> None:
            together = [_alive(here)] if owner is None else _alive(owner).buffers
            self._reduce([each.gradient for each in together if each.gradient.trainable])

        self._served[requests.forward] = self._served[requests.backward] = serve_gather
        self._served[requests.reduction] = serve_reduction

    def covers(self, buffer: ShardedBuffer) -> bool:
        """Return whether `buffer` belongs to a model in which ranks may enter different blocks (see `register`).

        If the result is True, use the gradients of `buffer` only after the whole backward. After their first reduction,
        they may be incomplete: each rank contributes the gradients that it has computed so far, or zeros. A rank that
        computes its gradients later starts another reduction in the same backward, and the second mean is added to the
        first. An optimizer that updates parameters during backward must therefore call this method.
        """
        return buffer.number in self._requests

    # -- requests -----------------------------------------------------------------------------------------------

    def before_gather(self, buffer: ShardedBuffer, entry: int) -> None:
        """Wait until the ranks agree that the all-gather of `buffer` is the next collective. The caller then issues it.

        Until then, this method takes part in the collectives that other ranks need first. The host waits for the other
        ranks. Collective: meanwhile, every other rank must call `before_gather`, `before_reduction` or `finish`.

        In two cases, there is nothing to agree on, and this method returns immediately:

        * The buffer needs no collective now, for example because it is unsharded.
        * The buffer was never passed to `register`. Then all ranks run the same blocks of its model, and need no
          agreement.

        Args:
            buffer: the flat buffer to be gathered.
            entry: the kind of pass in which the buffer is needed: FORWARD, EVALUATION or BACKWARD. This constant is
                written to the collective log (the list of operations that the ranks compare), so that ranks notice if
                they are in different kinds of passes.
        """
        requests = self._requests.get(buffer.number)
        if requests is not None and buffer.needs_collective:
            self._agree(requests.backward if entry == BACKWARD else requests.forward, entry)

    def before_reduction(self, gradients: Sequence[GradientBuffer]) -> None:
        """Wait until the ranks agree that the reduction of `gradients` is the next collective.

        Until then, this method takes part in the collectives that other ranks need first. Afterwards, the caller must
        start the reduction. The host waits for the other ranks. Collective: meanwhile, every other rank must call
        `before_gather`, `before_reduction` or `finish`.

        Returns immediately if `gradients` is empty, or if their flat buffers were never passed to `register`.

        gradients: the gradients of one block, or of one root buffer (of parameters outside blocks).
        """
        if gradients and (requests := self._requests.get(gradients[0].number)) is not None:
            self._agree(requests.reduction, BACKWARD)

    def reduction_order(self, buffers: Sequence[ShardedBuffer]) -> int:
        """Return the sort key of a block or root buffer for the reductions that start at the end of a backward.

        Ranks may have used blocks and root buffers in different orders. The caller sorts them by this key, so that all
        ranks start these last reductions in the same order.

        Args:
            buffers: the flat buffers of one block; or a sequence of one root buffer (of parameters outside blocks).

        Returns:
            The key. Smaller keys come first. Buffers that were never passed to `register`, because all ranks run the
            same blocks of their model, come last.
        """
        return min((found.reduction for each in buffers if (found := self._requests.get(each.number))), default=_END)

    def gather_order(self, buffers: Sequence[ShardedBuffer]) -> int:
        """Return the sort key of a root buffer for the all-gathers that start when a backward begins.

        Root buffers are the flat buffers of parameters outside blocks. Ranks may have read them in different orders in
        the forward. The caller sorts them by this key, so that all ranks gather them in the same order.

        Args:
            buffers: the root buffer, as a sequence of length 1.

        Returns:
            The key. Smaller keys come first. Buffers that were never passed to `register`, because all ranks run the
            same blocks of their model, come last.
        """
        return min((found.backward for each in buffers if (found := self._requests.get(each.number))), default=_END)

    def finish(self, entry: int) -> None:
        """Take part in other ranks' collectives until all ranks have reached the end of this forward or backward.

        Called at the end of each forward and backward of a model in which ranks may enter different blocks. The host
        waits for the other ranks. Collective: every rank must call it.

        entry: the kind of pass that ends: FORWARD, EVALUATION or BACKWARD. This constant is written to the collective
            log (the list of operations that the ranks compare), so that ranks notice if they are in different kinds of
            passes.
        """
        self._agree(_END, entry)

    @disable_compiler
    def _agree(self, request: int, entry: int) -> None:
        while (granted := self._control.smallest(request, entry)) != request:
            self._served[granted]()


Owned = TypeVar("Owned")


def _alive(reference: weakref.ref[Owned]) -> Owned:
    found = reference()
    if found is None:
        raise RuntimeError(
            "Another rank is running a model that this rank has deleted. Keep a reference to the model on every rank."
        )
    return found
