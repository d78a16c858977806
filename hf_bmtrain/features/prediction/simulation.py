"""A training step on the meta device: the engine runs on tensors without values, and its storages are followed."""

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
from ..options import KeepFrozen, UseCheckpoint, UseFloat8
from .device_choices import cuda_choices
from .live_bytes import Change, LiveBytes
from .quiet_world import META, quiet_world

_STEPS = 2
"""The optimizer's state exists from the second step on."""
Phase = tuple[str, int, int]
"""A part of a step, the bytes that were live at its end, and the peak inside."""


@dataclass(frozen=True)
class Simulated:
    """The last step of a simulation.

    changes: of all storages, from the first one. begin: the index of the first change of the last step. kinds: what the
    storages of the engine are, by number. host: bytes of page-locked host memory. mapped: bytes outside torch's
    allocator, which `changes` contain. phases: of the last step. activations: bytes that autograd saves per block, in
    execution order; empty unless use_checkpoint is "auto".
    """

    changes: Sequence[Change]
    begin: int
    kinds: dict[int, str]
    host: int
    mapped: int
    phases: list[Phase]
    kept: tuple[bool, ...]


class _Memory:
    """The memory of a device that is not there: see `DeviceMemory`."""

    def __init__(self, live: LiveBytes, usable: int) -> None:
        self._live, self._usable = live, usable
        self.allocated = lambda: live.live
        self.peak = lambda: live.peak
        self.reset_peak = live.reset_peak
        self.usable = lambda: usable


def on_meta(model: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of `model` on the meta device. Its values are not copied."""
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
    zero_level: int,
    use_checkpoint: UseCheckpoint,
    usable: int,
    micro_batches: int = 1,
    copies: bool = True,
    keep_frozen: KeepFrozen = "auto",
    quantize_frozen: str | None = None,
    float8: UseFloat8 = False,
) -> Simulated:
    """Train `model`, which is on the meta device and not wrapped, for a few steps as rank 0 of `ranks`.

    batch: keyword arguments of its forward, of any device; the loss is the output's `loss`. usable: bytes that
    use_checkpoint="auto" and keep_frozen="auto" plan for. copies: the ranks are on one host whose GPUs reach
    each other's memory.
    quantize_frozen, float8: of `auto_wrap`.
    """
    stage = ["wrap"]
    live = LiveBytes(lambda: _label(world, stage[0]))
    world = quiet_world(ranks, zero_level, copies, _Memory(live, usable))
    with simulated(world), _checked_optimizers(), cuda_choices(), live:
        frozen: dict[str, Any] = {"keep_frozen": keep_frozen, "quantize_frozen": quantize_frozen}
        auto_wrap(model, zero_level, use_checkpoint, float8=float8, **frozen)
        optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad])
        manager = OptimManager()
        manager.add_optimizer(optimizer)
        kinds: dict[int, str] = {}
        phases: list[Phase] = []
        begin = 0
        steps = _STEPS + 1 if use_checkpoint == "auto" else _STEPS
        for _ in range(steps):
            begin, phases = len(live.changes), []
            inputs = pytree.tree_map_only(torch.Tensor, lambda t: torch.empty_like(t, device=META), batch)
            _step(model, inputs, manager, live, stage, phases, micro_batches)
            kinds |= _kinds(model, optimizer, live)
        blocks = [module for module in model.modules() if isinstance(module, CheckpointBlock)]
        return Simulated(
            live.changes, begin, kinds, live.host, world.schedule.mapped_bytes, phases, tuple(map(_keeps, blocks))
        )


@contextmanager
def _checked_optimizers() -> Iterator[None]:
    """Check optimizers before their steps, as `init_distributed` makes it so."""
    undo = install()
    try:
        yield
    finally:
        undo()


def _step(model, inputs, manager: OptimManager, live: LiveBytes, stage: list[str], phases: list[Phase], count) -> None:
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
            loss = model(**inputs).loss
        with phase("backward"):
            manager.backward(loss / count if count > 1 else loss)
        del loss
    with phase("optimizer"):
        groups = [group for optimizer in manager.optimizers for group in optimizer.param_groups]
        manager.clip_grad_norm(groups, 1.0)
        manager.step()


def _peak(live: LiveBytes, first: int) -> int:
    """Return the most bytes live since change `first`; the planner resets the peak of `live`."""
    now = live.live
    most = now
    for change in reversed(live.changes[first:]):
        now -= change.nbytes
        most = max(most, now)
    return most


def _label(world: World, stage: str) -> str:
    depth = world.inside.depth
    if world.schedule.in_backward:
        return "recomputation" if depth else "backward"
    if stage == "forward":
        return "block" if depth > 1 else "outside"
    return stage


def _keeps(block: Any) -> bool:
    return block._bmt.recompute.keeps_activations


def _kinds(model: torch.nn.Module, optimizer: torch.optim.Optimizer, live: LiveBytes) -> dict[int, str]:
    """Return what the storages of the engine are, by number."""
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
