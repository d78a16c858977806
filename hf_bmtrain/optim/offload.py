"""AdamW whose state lies in host memory."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import torch

from ..comm.streams import DONE, has_own_memory
from ..ops.adam_step import Elements, TorchSteps, master_dtype
from ..sharding.buffer import ShardedBuffer
from .adam import AdamOptimizer
from .chunk_update import ChunkUpdate
from .delta import DeltaRecord
from .device_update import Conveyor
from .host_update import HostUpdate
from .runs import Run, index_bases
from .slabs import Chunk, Place, allocate_slabs, cut
from .state import by_owner

_log = logging.getLogger("hf_bmtrain")


class AdamOffloadOptimizer(AdamOptimizer):
    """AdamOptimizer with its state in page-locked host memory; the results are the same bits.

    Each way, and in host memory, the state of an element takes AdamOptimizer's 10 bytes for bfloat16 weights, 12 for
    float16, 8 for float32; 2 less with exp_avg_dtype=torch.bfloat16. The state dict is AdamOptimizer's; of bfloat16
    weights one takes 8 bytes an element more. With update_on="host" the state takes 12 bytes always.

    `step` streams the state through the device in chunks, on streams of its own, and returns while chunks are under
    way: those of the first buffers first, so that the next forward begins before the last ones are updated. A
    buffer waits for its own update when it is gathered (see PendingUpdate), hence forward, backward,
    `parameter.gather()` and `state_dict` need no care, and neither do loading, `.data` and the next `step`. Before
    anything else that reads or writes slices, or writes their gradients in place, after a `step` (an average over
    `model.parameters()`, say) call `wait()`. `optimizer.state` is on the host: read it through `state_dict()`.
    `update_in_backward` moves all of it under the backward, from the last block to the first: the next forward then
    begins after the last chunk.

    update_on: "device" as said; "host" brings the gradients to the host instead and runs torch's fused AdamW on the
    CPU's cores, for which `step` waits. On CPU there is nothing to move: both are AdamOptimizer itself.

    record_delta: every step also finds the mean and the variance of its update over all elements, in units of the
    learning rate (see DeltaRecord), for `get_avg_delta()` and `get_var_delta()`. To look with, not to train with: it
    takes some 30 MiB where the arithmetic is done and an all-reduce of three numbers, torch computes it beside the
    fused update, which takes several times as long then, and the next forward begins after the last chunk.

    RuntimeError where there is less host memory than the state takes.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        hold_steps: int = 0,
        record_delta: bool = False,
        *,
        exp_avg_dtype: torch.dtype = torch.float32,
        update_on: str = "device",
    ) -> None:
        settings = lr, betas, eps, weight_decay, hold_steps
        super().__init__(params, *settings, exp_avg_dtype=exp_avg_dtype, overlap_forward=True)
        if update_on not in ("device", "host"):
            raise ValueError(f"update_on must be 'device' or 'host', not {update_on!r}")
        if update_on == "host" and exp_avg_dtype != torch.float32:
            raise ValueError(f"update_on='host' is torch's AdamW, whose exp_avg is float32, not {exp_avg_dtype}")
        self._on_host = update_on == "host"
        self._delta = DeltaRecord() if record_delta else None
        self._places: dict[Run, Place] = {}
        self._chunks: list[Chunk] = []
        self._mover: Conveyor | HostUpdate | None = None

    def get_avg_delta(self) -> float:
        """The mean of the last step's update in units of the learning rate; 0 without `record_delta`."""
        return 0.0 if self._delta is None else self._delta.mean

    def get_var_delta(self) -> float:
        """The variance of the last step's update in units of the learning rate; 0 without `record_delta`."""
        return 0.0 if self._delta is None else self._delta.variance

    def wait(self) -> None:
        """The current stream waits until the last step has written the weights; the host does not."""
        if self._mover is not None:
            self._mover.updated.wait()

    def _hindrance(self) -> str | None:
        if self._on_host:
            return "update_on='host', where the host's cores make the backward wait"
        if self._delta is not None:
            return "record_delta, which adds up the update of all parameters"
        return super()._hindrance()

    def _finish(self) -> None:
        """The host waits until weights and state are those of the last step."""
        if self._mover is not None:
            self._mover.updated.synchronize()
            self._mover.downloaded.synchronize()

    # -- a step -------------------------------------------------------------------------------------------------

    def _update_beside(self, numbers: Sequence[int]) -> None:
        if self._delta is None:
            return self._carry(numbers)
        self._delta.begin(self._steps.counts.device)
        self._carry(numbers)
        self.wait()
        updated = [p for number in numbers for p in self._states[number].run.parameters]
        self._delta.end(updated, getattr(self, "found_inf", None))

    def _carry(self, numbers: Sequence[int]) -> None:
        if self._mover is None:
            return self._update(numbers)
        if isinstance(self._steps, TorchSteps) and self._steps.skip:
            return
        owners = by_owner(self._states, numbers)
        chunks = [chunk for chunk in self._chunks if self._states[chunk.parts[0].run].run.owner in owners]
        update = ChunkUpdate(chunks, self._states, numbers, self._update_elements)
        tickets = dict.fromkeys(owners, DONE)  # a rank may hold nothing of a buffer
        for chunk, ticket in zip(chunks, self._mover.carry(update)):
            tickets[self._states[chunk.parts[0].run].run.owner] = ticket
        for owner, ticket in tickets.items():
            if isinstance(owner, ShardedBuffer):
                owner.update.begin(ticket, [update.gradients[number] for number in owners[owner]])
            else:
                ticket.wait()  # nobody waits before ordinary parameters are read

    def _update_elements(self, run: int, elements: Elements) -> None:
        if self._delta is not None:
            self._delta.add(self._steps, run, elements, self._states[run].run.buffer is not None)
        super()._update_elements(run, elements)

    # -- runs and state -----------------------------------------------------------------------------------------

    def _arrange(self, active: list[list[torch.nn.Parameter]]) -> None:
        super()._arrange(active)
        runs = [state.run for state in self._states]
        self._places = {run: self._places[run] for run in runs if run in self._places}
        if not self._places:
            self._chunks, self._mover = [], None
            return
        left = [number for number, state in enumerate(self._states) if state not in self._early]
        owners = by_owner(self._states, left).values()  # no chunk belongs to two: each may be updated by itself
        self._chunks = [chunk for numbers in owners for chunk in cut(runs, self._places, list(numbers))]
        device = runs[0].weights.device
        numel = max((chunk.stop - chunk.start for chunk in self._chunks), default=0)
        if self._on_host:
            self._mover = HostUpdate(numel, device)
        else:
            masters = [place.slab.master for place in self._places.values()]
            width = max(0 if master is None else master.itemsize for master in masters)
            self._mover = Conveyor(numel, width, self._exp_avg_dtype, device)

    def _allocate(self, runs: Sequence[Run]) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """In slabs, in the order of the buffers and not of the groups: so the first buffers are updated first."""
        if not runs or not has_own_memory(runs[0].weights.device):
            return super()._allocate(runs)
        bases, device = index_bases(self.param_groups), self._steps_device(runs)
        ordered = sorted(runs, key=lambda run: (bases[run.owner], run.start))
        masters = [torch.float32 if self._on_host else master_dtype(run.weights.dtype, device) for run in ordered]
        places = allocate_slabs(ordered, masters, self._exp_avg_dtype)
        _log.info(
            "the Adam state of %d elements lies in %d slabs of page-locked host memory and is updated on the %s",
            sum(run.weights.numel() for run in runs),
            len({place.slab for place in places.values()}),
            "host" if self._on_host else "device",
        )
        self._places.update(places)
        states = []
        for run in runs:
            place = self._places[run]
            master, exp_avg, exp_avg_sq = place.slab.part(place.start, place.start + run.weights.numel())
            if master is not None and master.dtype == torch.float32:
                master.copy_(run.weights)  # zero is the residual of a master that is the weight
            states.append((run.weights if master is None else master, exp_avg, exp_avg_sq))
        return states

    def _steps_device(self, runs: Sequence[Run]) -> torch.device:
        device = super()._steps_device(runs)
        return torch.device("cpu") if self._on_host else device
