"""Simulate training steps on the meta device: real code runs on tensors without values, and their bytes are counted."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ...engine.base.torch_internals import pytree
from ...engine.blocks.block import CheckpointBlock
from ...engine.optim.compat import install
from ...engine.optim.manager import OptimManager
from ...engine.runtime.world import World, simulated
from ...engine.sharding.slots import buffers_of
from ..auto_wrap import auto_wrap
from .device_choices import cuda_choices
from .live_bytes import Change, LiveBytes
from .quiet_world import META, quiet_world

_STEPS = 2
"""The number of simulated steps: two, because only the second step begins with the optimizer's state in memory.
With use_checkpoint="auto" there is one more step, because the first step is then measured, as in real training."""
Phase = tuple[str, int, int]
"""(name, live bytes at the end, peak of live bytes) of a phase of a step: "forward", "backward" or "optimizer"."""


@dataclass(frozen=True)
class Simulated:
    """The result of a simulation of a few training steps. Only the last step is used for the prediction.

    Attributes:
        changes: all changes of memory since the start of the simulation, in order: one Change for each time that a
            tensor's storage, or an operation's workspace, was allocated, released or resized.
        begin: the index in `changes` at which the last step begins.
        kinds: {number of a storage (`Change.number`): its purpose} for storages with parameters, gradients or optimizer
            state. A purpose says what the memory is used for, such as "gradient" (see `prediction.ROWS`). The purposes
            of other storages are not known.
        host: the bytes of page-locked host memory.
        mapped: the bytes of shards and received gradients that real training allocates outside torch's allocator, in
            memory that other ranks on the host access. `changes` includes them.
        phases: the phases (forward, backward, optimizer) of the last step.
        kept: for each block, whether it keeps its activations, which are then not recomputed.
    """

    changes: Sequence[Change]
    begin: int
    kinds: dict[int, str]
    host: int
    mapped: int
    phases: list[Phase]
    kept: tuple[bool, ...]


class _Memory:
    """Replaces `DeviceMemory` in a simulation. Its methods return the memory of the simulated device in bytes.

    live: the counter of the bytes in use.
    usable: the bytes that are available for tensors.
    """

    def __init__(self, live: LiveBytes, usable: int) -> None:
        self.allocated = lambda: live.live
        self.peak = lambda: live.peak
        self.reset_peak = live.reset_peak
        self.usable = lambda: usable


def on_meta(model: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of `model` whose parameters and buffers are on the meta device, without allocating real memory.

    `predict_memory` simulates training with this copy, so that the user's model does not change.
    """
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = torch.nn.Parameter(torch.empty_like(parameter, device=META), parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device=META)
    return copy.deepcopy(model, memo)


def simulate(
    model: torch.nn.Module,
    batch: dict[str, torch.Tensor],
    make_optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
    ranks: int,
    usable: int,
    micro_batches: int = 1,
    **options: Any,
) -> Simulated:
    """Train `model` on the meta device for a few steps, as rank 0 of `ranks`, and record the memory.

    There are two steps, because only the second begins with the optimizer's state in memory. With use_checkpoint="auto"
    there are three, because the first step is then measured, as in real training, and the blocks that are recomputed
    are chosen from this measurement.

    Args:
        model: a model on the meta device to which `auto_wrap` was not applied. It cannot be used afterwards.
        batch: the keyword arguments of its forward, on any device. The output must have a `loss`.
        make_optimizer: a function that returns the optimizer for a list of parameters.
        ranks: the number of ranks.
        usable: the bytes of GPU memory that this rank can use for tensors. use_checkpoint="auto" and keep_frozen="auto"
            choose what to keep in memory accordingly.
        micro_batches: the number of backwards per step.
        **options: passed to `auto_wrap`.

    Returns:
        A `Simulated`, which contains all changes of the allocated memory, the index of the change at which the last
        step begins, and what the memory is used for.

    Raises:
        ValueError: the model's output has no loss.
        ValueError: `auto_wrap` refuses the model or an option.
        RuntimeError: the forward needs values of tensors, which the meta device does not have.
    """
    stage = ["wrap"]
    live = LiveBytes(lambda: _label(world, stage[0]))
    world = quiet_world(ranks, _Memory(live, usable))
    with simulated(world), _checked_optimizers(), cuda_choices(), live:
        auto_wrap(model, **options)
        optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad])
        manager = OptimManager()
        manager.add_optimizer(optimizer)
        kinds: dict[int, str] = {}
        phases: list[Phase] = []
        begin = 0
        steps = _STEPS + 1 if options.get("use_checkpoint") == "auto" else _STEPS
        for _ in range(steps):
            begin, phases = len(live.changes), []
            inputs = pytree.tree_map_only(torch.Tensor, lambda t: torch.empty_like(t, device=META), batch)
            _step(model, inputs, manager, live, stage, phases, micro_batches)
            kinds |= _kinds(model, optimizer, live)
        blocks = [module for module in model.modules() if isinstance(module, CheckpointBlock)]
        kept = tuple(block._bmt.recompute.keeps_activations for block in blocks)
        return Simulated(live.changes, begin, kinds, live.host, world.schedule.mapped_bytes, phases, kept)


@contextmanager
def _checked_optimizers() -> Iterator[None]:
    """Return a context that prepares torch's optimizers for sharded parameters, as `init_distributed` does in training.

    In the context, each optimizer is checked before its steps, and torch's foreach functions, which optimizers call,
    accept sharded parameters.
    """
    undo = install()
    try:
        yield
    finally:
        undo()


def _step(model, inputs, manager: OptimManager, live: LiveBytes, stage: list[str], phases: list[Phase], count) -> None:
    """Run one training step with `count` micro-batches, and record the memory of its phases.

    Args:
        model: the wrapped model.
        inputs: the keyword arguments of its forward.
        manager: the OptimManager of the optimizer.
        live: the counter of bytes.
        stage: a list whose only item is set to the name of the running phase: "forward", "backward" or "optimizer".
        phases: a list to which (name, live bytes at the end, peak) is appended when a phase ends.
        count: the number of micro-batches, each with a forward and a backward.
    """

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        stage[0] = name
        live.reset_peak()
        first = len(live.changes)
        yield
        phases.append((name, live.live, _peak(live, first)))

    manager.zero_grad()
    for _ in range(count):
        with phase("forward"):
            loss = getattr(model(**inputs), "loss", None)
        if loss is None:
            raise ValueError("predict_memory: the model's output has no loss. Add `labels` to `batch`.")
        with phase("backward"):
            manager.backward(loss / count if count > 1 else loss)
        del loss
    with phase("optimizer"):
        groups = [group for optimizer in manager.optimizers for group in optimizer.param_groups]
        manager.clip_grad_norm(groups, 1.0)
        manager.step()


def _peak(live: LiveBytes, first: int) -> int:
    """Return the largest number of live bytes since the change with index `first` in `live.changes`.

    It is computed from the changes, because use_checkpoint="auto" may have reset `live.peak` in the meantime.
    """
    now = live.live
    most = now
    for change in reversed(live.changes[first:]):
        now -= change.nbytes
        most = max(most, now)
    return most


def _label(world: World, stage: str) -> str:
    """Return the name of the part of the step that is running, for `Change.label`.

    In the forward, the name is "block" while a block is running, and otherwise "outside". In the backward, it is
    "recomputation" while a forward is repeated, and otherwise "backward". At other times it is `stage`.

    world: the simulated world.
    stage: the phase of the simulation that is running: "wrap", "forward", "backward" or "optimizer".
    """
    depth = world.inside.depth
    if world.schedule.in_backward:
        return "recomputation" if depth else "backward"
    if stage == "forward":
        return "block" if depth > 1 else "outside"
    return stage


def _kinds(model: torch.nn.Module, optimizer: torch.optim.Optimizer, live: LiveBytes) -> dict[int, str]:
    """Return {number: purpose} for the storages that contain parameters, gradients or optimizer state.

    A number identifies a storage: `live` has given it to the storage when it was allocated. A purpose says what the
    memory is used for, such as "gradient" (see `prediction.ROWS`).

    model: the wrapped model.
    optimizer: its optimizer.
    live: the counter of bytes.
    """
    kinds: dict[int | None, str] = {}
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                kinds[live.number_of(getattr(value, "part", value))] = "optimizer"
    for buffer in buffers_of(model):
        memory = buffer.storage.memory()
        for view in memory.gathered:
            kinds[live.number_of(view)] = "whole"
        if buffer.gradient.shard is not None:
            kinds[live.number_of(buffer.gradient.shard)] = "gradient"
        for shard in memory.stored:
            kinds[live.number_of(shard)] = "shard"
    return {number: kind for number, kind in kinds.items() if number is not None}
