"""Plans of device memory: which blocks are recomputed, and which frozen parameters stay unsharded between steps.

With "auto", which needs a GPU, training passes are measured and the ranks agree on a plan. `activations` plans
`use_checkpoint="auto"`; `residents` plans `keep_frozen="auto"`. Both measure with `meter`. A MemoryPlanner forwards the
events of training to them. `plan` chooses the blocks that are recomputed. `attention` keeps the outputs of attention in
recomputed blocks, so that attention is not recomputed. `shortage` explains out-of-memory errors: it lists what takes
memory and how to save some.
"""

from __future__ import annotations

import functools
import logging
import weakref
from typing import Any

import torch

from ...engine.base.device_memory import DeviceMemory
from ...engine.base.torch_internals import modes_see_compiled, top_saved_tensors_hooks
from ...engine.blocks.observer import Observer
from ...engine.blocks.recompute import ALWAYS, NEVER, Recompute
from ...engine.runtime.world import World
from ...engine.sharding.slots import buffers_of
from ...engine.wrap.extension import Extension, WrapPlan
from ..options import KeepFrozen, Options, UseCheckpoint
from .activations import Activations, AutoCheckpoint, Block
from .attention import KeepAttention
from .meter import shapes_of
from .residents import Residents, keep_all
from .shortage import follow_shortage

_log_once = functools.cache(logging.getLogger("hf_bmtrain").info)


class MemoryPlanner(Observer):
    """Plans which activations stay in device memory until backward, and which frozen buffers stay unsharded.

    There is at most one planner per world. It is an observer, called before each forward of a wrapped model and after
    each backward. It also takes part in each backward in which memory is measured.

    Attributes:
        activations: the plan for all blocks with use_checkpoint="auto". It counts resident buffers as memory in use.
        residents: for each wrapped model with keep_frozen="auto", the plan of its resident buffers (buffers that stay
            unsharded between steps). These plans share the memory that `activations` leaves.
    """

    buffers = ()  # a participant of a backward lists its buffers; the planner has none
    position = 10  # early: resident buffers are resharded before other observers may need the memory

    def __init__(self, world: World, memory: DeviceMemory) -> None:
        self.world, self.memory = world, memory
        self.residents = weakref.WeakKeyDictionary[torch.nn.Module, Residents]()
        self.activations = Activations(self)
        self._has_policies = False

    @property
    def resident_bytes(self) -> int:
        """Bytes of all buffers that a plan keeps resident, gathered or not."""
        return sum(plan.nbytes for plan in self.residents.values())

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the buffers that a plan keeps resident and that are gathered now."""
        return sum(plan.gathered for plan in self.residents.values())

    def policy(self, block: Block) -> AutoCheckpoint:
        """Return a new recomputation policy for `block`.

        `activations` plans for it once the block has been measured.
        """
        self._has_policies = True
        if self.activations.outlived:
            self.activations = Activations(self)
        return AutoCheckpoint(self.activations, block)

    def before_forward(self, model: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        plan, training = self.residents.get(model), torch.is_grad_enabled()
        if plan is not None:
            if training:
                plan.begin_forward(shapes_of(args, kwargs))
            else:
                plan.reshard()
        if training and self._has_policies and self.world.schedule.collective_layers:
            self.activations.begin_together(shapes_of(args, kwargs))

    def finish_backward(self) -> None:
        """Use the measurements of a backward. Called at its end, before its last gradients are received."""
        self.activations.finish_backward()

    def abandon_backward(self) -> None:
        self.activations.abandon_backward()

    def end_backward(self) -> None:
        for plan in self.residents.values():
            plan.end_backward()


def planner_of(world: World) -> MemoryPlanner | None:
    """Return the planner of `world`, creating it if needed. Return None on the CPU, whose free memory is unknown."""
    if world.device_memory is None:
        return None
    planner = world.schedule.observer(MemoryPlanner)
    if planner is None:
        planner = MemoryPlanner(world, world.device_memory)
        world.schedule.observe(planner)
    return planner


def choose_recompute(use_checkpoint: UseCheckpoint, block: Block, world: World) -> Recompute:
    """Return the recomputation policy that `use_checkpoint` selects for `block`.

    Args:
        use_checkpoint: the argument of `auto_wrap`: whether the block is recomputed in backward. "attention" recomputes
            everything except attention. "auto" lets a plan choose.
        block: the state of the block.
        world: the world whose device runs the block.

    Raises:
        RuntimeError: "auto" with torch 2.6, which cannot count the bytes that autograd saves, or "attention" with a
            version of torch that cannot intercept the operations of compiled code.
    """
    if use_checkpoint is True or use_checkpoint is False:
        return ALWAYS if use_checkpoint else NEVER
    if use_checkpoint == "attention":
        if not modes_see_compiled:
            raise RuntimeError(
                f"use_checkpoint='attention' is not supported by torch {torch.__version__}, in which finding attention "
                "would keep functions from being compiled. Pass True, or install a newer torch."
            )
        return KeepAttention()
    planner = planner_of(world)
    if planner is None:
        _log_once(
            "use_checkpoint='auto' recomputes no block on the CPU, because free memory is known only on GPUs. To "
            "recompute every block, pass True."
        )
        return NEVER
    if top_saved_tensors_hooks is None:
        raise RuntimeError(
            f"use_checkpoint='auto' counts the bytes that autograd saves, which torch {torch.__version__} does not "
            "support. Pass True or False, or install a newer torch."
        )
    return planner.policy(block)


class Memory(Extension):
    """The extension for `auto_wrap(keep_frozen=)`. It also adds an explanation to out-of-memory errors."""

    def __init__(self, options: Options) -> None:
        self._options = options

    def connect(self, plan: WrapPlan) -> None:
        follow_shortage(plan.model, plan.world)
        if plan.late:
            _extend_keep_frozen(plan.model, plan.world)
        else:
            _apply_keep_frozen(plan.model, plan.world, self._options.keep_frozen)


def _apply_keep_frozen(model: torch.nn.Module, world: World, keep_frozen: KeepFrozen) -> None:
    """Apply `keep_frozen` to `model`, which has just been wrapped. Collective: every rank must call it.

    keep_frozen: True makes all frozen buffers resident now; "auto" lets a plan choose some later; False makes none.
    """
    if keep_frozen is False or world.shard_group.size == 1:
        return
    if keep_frozen is True:
        keep_all(model, world)
        return
    planner = planner_of(world)
    if planner is not None:
        planner.residents[model] = Residents(model, planner)
    elif any(not buffer.gradient.trainable for buffer in buffers_of(model)):
        _log_once(
            "keep_frozen='auto' keeps no frozen parameters unsharded on the CPU, because free memory is known only on "
            "GPUs. To keep all of them unsharded between steps, pass True."
        )


def _extend_keep_frozen(model: torch.nn.Module, world: World) -> None:
    """Make buffers resident that were added to `model`, or frozen, after it was wrapped.

    Collective: every rank must call it. Does nothing unless `model` was wrapped with keep_frozen=True.
    """
    planner = world.schedule.observer(MemoryPlanner)
    if planner is None or not any(module in planner.residents for module in model.modules()):
        if any(buffer.resident for buffer in buffers_of(model)):
            keep_all(model, world)
