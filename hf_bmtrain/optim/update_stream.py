"""AdamW beside the computation, on a stream of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch

from ..comm.streams import Ticket, is_captured, work_stream
from ..ops.adam_step import Elements
from ..sharding.buffer import ShardedBuffer
from .state import RunState


class UpdateStream:
    """Updates runs one buffer after another while the current stream goes on.

    Who waits for whom, and why that is enough (the host waits for nothing):
    * an update begins after all that the current stream had queued at `carry`: the gradients, the step's numbers,
      whoever read the weights before;
    * each buffer's PendingUpdate holds the ticket of its own update, and its gradients until the current stream has
      waited for it; ordinary parameters, which nobody gathers, the current stream waits for at once;
    * state and weights are named to the stream, so that nobody gets their memory while it is written, even where
      model and optimizer are dropped meanwhile.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, work_stream(device)

    def carry(
        self,
        owners: Mapping[ShardedBuffer | torch.nn.Parameter, Mapping[int, RunState]],
        update: Callable[[int, Elements], object],
    ) -> None:
        """Queue the updates of all runs, by owner; update: steps `Elements` of a run, which is given by its number."""
        if is_captured(self._device):
            raise RuntimeError(
                "a step that is captured in a CUDA graph is one stream: make the optimizer without overlap_forward, "
                "and leave update_in_backward out of the capture."
            )
        elements = {
            owner: {number: state.elements() for number, state in runs.items()} for owner, runs in owners.items()
        }
        self._stream.follow()
        unguarded: Ticket | None = None
        for owner, parts in elements.items():
            for number, part in parts.items():
                self._stream.run(functools.partial(update, number, part))
                for tensor in (part.master, part.exp_avg, part.exp_avg_sq, part.weight):
                    if tensor is not None:
                        self._stream.uses(tensor)
            ticket = self._stream.mark()
            if isinstance(owner, ShardedBuffer):
                owner.update.begin(ticket, [part.grad for part in parts.values()])
            else:
                unguarded = ticket
        if unguarded is not None:
            unguarded.wait()
