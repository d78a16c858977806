"""What fits in device memory: which blocks are recomputed, and which frozen parameters stay unsharded.

With "auto", which needs a GPU, passes are measured, and the ranks agree on a plan. `activations` plans
`use_checkpoint="auto"`, `residents` plans `keep_frozen="auto"`; both measure with a `meter`, and a MemoryPlanner tells
them what happens. `plan` chooses the blocks that are recomputed; `shortage` says what would take less when memory runs
out.
"""

from __future__ import annotations

import functools
import logging
import weakref
from typing import Any

import torch

from ...engine.base.device_memory import DeviceMemory
from ...engine.base.torch_internals import top_saved_tensors_hooks
from ...engine.blocks.observer import Observer
from ...engine.blocks.recompute import ALWAYS, NEVER, Recompute
from ...engine.runtime.world import World
from ...engine.sharding.slots import buffers_of
from ...engine.wrap.extension import Extension, WrapPlan
from ..options import KeepFrozen, Options, UseCheckpoint
from .activations import Activations, AutoCheckpoint, Block
from .meter import shapes_of
from .residents import Residents, keep_all
from .shortage import follow_shortage

_log_once = functools.cache(logging.getLogger("hf_bmtrain").info)


class MemoryPlanner(Observer):
    """Plans what stays in the memory of a world's device between forward and backward, and between steps.

    activations: the plan of blocks with use_checkpoint="auto". residents: the plans of wrapped models with
    keep_frozen="auto". Each counts what the other has chosen. It takes part in measured backwards.
    """

    position = 10  # what is resident is resharded before anything that needs the memory

    def __init__(self, world: World, memory: DeviceMemory) -> None:
        self.world, self.memory = world, memory
        self.residents = weakref.WeakKeyDictionary[torch.nn.Module, Residents]()
        self.activations = Activations(self)

    @property
    def resident_bytes(self) -> int:
        """Bytes of all buffers that are resident by a plan."""
        return sum(plan.nbytes for plan in self.residents.values())

    @property
    def gathered_bytes(self) -> int:
        """Bytes of those that have been gathered."""
        return sum(plan.gathered for plan in self.residents.values())

    def policy(self, block: Block) -> AutoCheckpoint:
        """Return a policy for `block`, which becomes a part of the plan when it has been measured."""
        if self.activations.outlived:
            self.activations = Activations(self)
        return AutoCheckpoint(self.activations, block)

    def before_forward(self, model: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        plan = self.residents.get(model)
        if plan is None:
            return
        if torch.is_grad_enabled():
            plan.begin_forward(shapes_of(args, kwargs))
        else:
            plan.reshard()

    def finish_backward(self) -> None:
        """Use the measurements of a backward, before its last gradients are received."""
        self.activations.finish_backward()

    def abandon_backward(self) -> None:
        self.activations.abandon_backward()

    def end_backward(self) -> None:
        for plan in self.residents.values():
            plan.end_backward()


def planner_of(world: World) -> MemoryPlanner | None:
    """Return the planner of `world`, None if nothing is known of its device's memory."""
    if world.device_memory is None:
        return None
    planner = world.schedule.observer(MemoryPlanner)
    if planner is None:
        planner = MemoryPlanner(world, world.device_memory)
        world.schedule.observe(planner)
    return planner


def choose_recompute(use_checkpoint: UseCheckpoint, block: Block, world: World) -> Recompute:
    """Return what `use_checkpoint` means for `block`: ALWAYS, NEVER, or an AutoCheckpoint.

    Raises RuntimeError for "auto" with torch 2.6.
    """
    if use_checkpoint is True or use_checkpoint is False:
        return ALWAYS if use_checkpoint else NEVER
    planner = planner_of(world)
    if planner is None:
        _log_once("use_checkpoint='auto' recomputes nothing on the CPU: the memory that is left is only known of GPUs")
        return NEVER
    if top_saved_tensors_hooks is None:
        raise RuntimeError(
            f"use_checkpoint='auto' counts what autograd saves, which torch {torch.__version__} does not allow: pass "
            "True or False, or install a newer torch."
        )
    return planner.policy(block)


class Memory(Extension):
    """`auto_wrap(keep_frozen=)`, and the explanation of an error by which memory ran out."""

    def __init__(self, options: Options) -> None:
        self._options = options

    def connect(self, plan: WrapPlan) -> None:
        follow_shortage(plan.model, plan.world)
        if plan.late:
            _extend_keep_frozen(plan.model, plan.world)
        else:
            _apply_keep_frozen(plan.model, plan.world, self._options.keep_frozen)


def _apply_keep_frozen(model: torch.nn.Module, world: World, keep_frozen: KeepFrozen) -> None:
    """Make frozen buffers of `model`, which was just wrapped, resident. Collective."""
    if keep_frozen is False or world.size == 1:
        return
    if keep_frozen is True:
        keep_all(model, world)
        return
    planner = planner_of(world)
    if planner is not None:
        planner.residents[model] = Residents(model, planner)
    elif any(not buffer.gradient.trainable for buffer in buffers_of(model)):
        _log_once(
            "keep_frozen='auto' keeps no frozen parameters whole on the CPU: the memory that is left is only known of "
            "GPUs. True keeps all."
        )


def _extend_keep_frozen(model: torch.nn.Module, world: World) -> None:
    """Treat parameters that were added to `model`, and those frozen since, like those before. Collective."""
    planner = world.schedule.observer(MemoryPlanner)
    if planner is None or not any(module in planner.residents for module in model.modules()):
        if any(buffer.resident for buffer in buffers_of(model)):
            keep_all(model, world)
