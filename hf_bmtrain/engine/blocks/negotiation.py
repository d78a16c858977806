"""Negotiation: ranks that may enter different blocks of a model agree on the next collective."""

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
"""The entries of requests in the collective log. They differ, so that ranks in different passes are noticed."""
_UNITS = 1 << 30  # greater than the number of blocks and root buffers of a world
_STRIDE = 1 << 20  # greater than the number of buffers of a block
_SPACE = _UNITS * _STRIDE
_END = 6 * _SPACE


class _Requests(NamedTuple):
    """The numbers of the requests for one buffer: its all-gathers in a forward and in a backward, and its reduction."""

    forward: int
    backward: int
    reduction: int


class Negotiation:
    """Ranks that enter different blocks agree, before each collective of a forward or backward, which one is next.

    A rank requests the operation that it needs. The smallest request of all ranks is granted. The ranks that made this
    request continue with the operation. The other ranks take part in it and then repeat their own request. In an
    all-gather, they do not use the result. In a reduction, they send the gradients that they have, which are zeros if
    they have not entered the block. A rank at the end of its forward or backward takes part until all ranks are there.

    The order of the requests does not change the results: each rank's operations are granted in its own order, and if a
    buffer is reduced twice, the second mean is added to the first. The order only decides how often a buffer is
    gathered or reduced twice because ranks need it at different times.

    In a forward, the order is that of the model's modules, except that the longest list of blocks comes last. Modules
    that only some ranks enter (such as an image tower) usually precede this list. In a backward, the all-gathers of
    root buffers come first. The blocks follow in the opposite order. A block's all-gather, which may be a prefetch,
    precedes its own reduction and also the reduction of the block before it in the backward. The reductions of root
    buffers come last.
    """

    def __init__(self, control: ObjectComm, reduce: Callable[[list[GradientBuffer]], None]) -> None:
        """Create the negotiation of one world.

        Args:
            control: exchanges the requests.
            reduce: starts the reduction of gradients of one block, or of one root buffer. It is collective.
        """
        self._control, self._reduce = control, reduce
        self._units = 0
        self._requests: dict[int, _Requests] = {}  # the requests for each buffer, by the number of the buffer
        self._served: dict[int, Callable[[], None]] = {}  # for each request, a function that takes part in it

    def register(
        self, buffers: Iterable[ShardedBuffer], blocks: Iterable[BlockState], last: Collection[BlockState]
    ) -> None:
        """Register a model, or update it after buffers were added to it. Every rank passes the same buffers.

        Args:
            buffers: the model's flat buffers, in the order of its modules.
            blocks: the states of its blocks.
            last: the states of the blocks that come last in a forward.
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
        """Add one buffer.

        index: the position of the buffer among the buffers of its block.
        """
        place = self._units * _STRIDE + index
        if block is None:
            requests = _Requests(place, place, 4 * _SPACE + place)
        else:
            begin = _SPACE + 2 * (_UNITS - self._units) * _STRIDE + index
            requests = _Requests(place, begin - 2 * _STRIDE, begin + _STRIDE)
        self._requests[buffer.number] = requests
        here, owner = weakref.ref(buffer), None if block is None else weakref.ref(block)

        def serve_gather() -> None:
            with torch.enable_grad():  # for the log: the rank that needs the buffer uses this grad mode, too
                _alive(here).take_part()

        def serve_reduction() -> None:
            together = [_alive(here)] if owner is None else _alive(owner).buffers
            self._reduce([each.gradient for each in together if each.gradient.trainable])

        self._served[requests.forward] = self._served[requests.backward] = serve_gather
        self._served[requests.reduction] = serve_reduction

    def covers(self, buffer: ShardedBuffer) -> bool:
        """Return whether the model of `buffer` was registered. A backward may then reduce the buffer more than once."""
        return buffer.number in self._requests

    # -- requests -----------------------------------------------------------------------------------------------

    def before_gather(self, buffer: ShardedBuffer, entry: int) -> None:
        """Wait until the ranks agree on the all-gather of `buffer`. The caller must then issue it.

        Collective: every rank must call it. Does nothing if no collective is needed, or if the buffer's model was not
        registered.

        Args:
            buffer: the buffer.
            entry: the pass that needs it: FORWARD, EVALUATION or BACKWARD.
        """
        requests = self._requests.get(buffer.number)
        if requests is not None and buffer.needs_collective:
            self._agree(requests.backward if entry == BACKWARD else requests.forward, entry)

    def before_reduction(self, gradients: Sequence[GradientBuffer]) -> None:
        """Wait until the ranks agree on the reduction of `gradients`. The caller must then start it.

        Collective: every rank must call it. Does nothing if `gradients` is empty, or if their model was not registered.
        """
        if gradients and (requests := self._requests.get(gradients[0].number)) is not None:
            self._agree(requests.reduction, BACKWARD)

    def reduction_order(self, buffers: Sequence[ShardedBuffer]) -> int:
        """Return the position of a participant in the order in which a backward finishes them at its end.

        buffers: the participant's buffers.
        """
        return min((found.reduction for each in buffers if (found := self._requests.get(each.number))), default=_END)

    def gather_order(self, buffers: Sequence[ShardedBuffer]) -> int:
        """Return the position of root buffers in the order in which a backward gathers them when it begins."""
        return min((found.backward for each in buffers if (found := self._requests.get(each.number))), default=_END)

    def finish(self, entry: int) -> None:
        """Take part in the operations of other ranks until all ranks have reached the end of their pass.

        Collective: every rank must call it.

        entry: the pass that ends: FORWARD, EVALUATION or BACKWARD.
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
            "Another rank is running a part of a model that this rank has deleted. Keep the model on every rank."
        )
    return found
