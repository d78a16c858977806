"""Device memory: the options `use_checkpoint` and `keep_frozen` of `auto_wrap`, and advice when memory runs out.

With the value "auto" (GPU only), memory is measured in the first training steps, and then the ranks agree on a plan:

* `activations` plans use_checkpoint="auto": which blocks are recomputed. `plan` contains the algorithm.
* `residents` plans keep_frozen="auto": which frozen parameters stay unsharded between steps.
* Both use `meter` to measure memory. `MemoryPlanner` owns both plans, and calls their methods when forwards and
  backwards begin and end.

`attention` implements use_checkpoint="attention", which recomputes blocks except for their attention. `shortage` adds
to out-of-memory errors a table of what takes memory, and advice on how to save memory.
"""

from __future__ import annotations

import functools
import logging
import weakref
from typing import Any

import torch

from ...engine.base.device_memory import DeviceMemory
from ...engine.base.torch_internals import modes_see_compiled, top_saved_tensors_hooks
from ...engine.blocks.block import CheckpointBlock
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
    """Owns the plans for use_checkpoint="auto" and keep_frozen="auto", and calls their methods during training.

    With use_checkpoint="auto", a plan decides which blocks are recomputed in backward. With keep_frozen="auto", a plan
    decides which frozen parameters stay unsharded between steps.

    There is at most one planner per world. The schedule calls these methods of the planner:

    * `before_forward`: before each forward of a wrapped model.
    * `finish_backward`: at the end of a backward in which memory was measured for use_checkpoint="auto". If this
      backward raises an error, `abandon_backward` is called instead, at a later occasion such as the next forward.
    * `end_backward`: at the end of each backward, after `finish_backward`.

    Args:
        world: the ranks that plan together.
        memory: reads how much memory of this rank's device is allocated and free.

    Attributes:
        activations: the plan for all blocks with use_checkpoint="auto". It is made before the plans in `residents`. If
            it is made again later, it does not use the memory of resident buffers (those kept unsharded between steps).
        residents: for each wrapped model with keep_frozen="auto", the plan of its resident buffers. If blocks have
            use_checkpoint="auto", all these plans share the memory that remains free after the plan `activations`.
    """

    buffers = ()  # the schedule reads `buffers` of each object that it calls in a backward; the planner has none
    position = 10  # low: most observers are called after this one, and may use the memory that it frees

    def __init__(self, world: World, memory: DeviceMemory) -> None:
        self.world, self.memory = world, memory
        self.residents = weakref.WeakKeyDictionary[torch.nn.Module, Residents]()
        self.activations = Activations(self)
        self._has_policies = False
        self._planned = weakref.WeakKeyDictionary[torch.nn.Module, bool]()  # {model: whether it has an AutoCheckpoint}

    @property
    def resident_bytes(self) -> int:
        """The total size of the buffers that keep_frozen="auto" keeps unsharded between steps, in bytes.

        A new plan subtracts this size from the free memory, so that it does not use the memory of these buffers for
        something else. The size includes buffers that were chosen but not all-gathered yet, unlike `gathered_bytes`.
        """
        return sum(plan.nbytes for plan in self.residents.values())

    @property
    def gathered_bytes(self) -> int:
        """The bytes allocated now for the buffers that keep_frozen="auto" keeps unsharded between steps.

        Measurements of memory subtract this number from the allocated bytes, because these buffers can be resharded.
        """
        return sum(plan.gathered for plan in self.residents.values())

    def policy(self, block: Block) -> AutoCheckpoint:
        """Return the recomputation policy of a block with use_checkpoint="auto", which follows the plan `activations`.

        Called once for each such block, when `auto_wrap` or CheckpointBlock creates it. The present plan may be left
        over from a model that has been deleted. So if, on any rank, all blocks measured for the plan have been deleted,
        all ranks first replace the plan with a new, empty one.

        Collective: every rank must call this method. The ranks tell each other whether the measured blocks have been
        deleted, because each rank may delete the model at a different time.

        block: the BlockState of the block, the object that runs its forward and backward.
        """
        self._has_policies = True
        if self.world.control.any(self.activations.outlived, "a new block with use_checkpoint='auto'"):
            self.activations = Activations(self)
        return AutoCheckpoint(self.activations, block, next(self.activations.numbers))

    def before_forward(self, model: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        plan, training = self.residents.get(model), torch.is_grad_enabled()
        if plan is not None:
            if training:
                plan.begin_forward(shapes_of(args, kwargs))
            else:
                plan.reshard()
        if training and self._has_policies:
            if self.world.schedule.collective_layers:
                self.activations.begin_together(shapes_of(args, kwargs))
            elif self.activations.has_measured and self._is_planned(model):
                self.activations.begin_forward()  # now, before the prefetch of the first block allocates memory

    def _is_planned(self, model: torch.nn.Module) -> bool:
        if model not in self._planned:
            blocks = (module for module in model.modules() if isinstance(module, CheckpointBlock))
            self._planned[model] = any(isinstance(block._bmt.recompute, AutoCheckpoint) for block in blocks)
        return self._planned[model]

    def finish_backward(self) -> None:
        """Store the memory measurements of the backward that is ending, and of the forwards before it.

        The measurements include the peaks of allocated memory, and the size of each block's activations. They are
        stored in `activations`, the plan for use_checkpoint="auto", which uses them when it next chooses which blocks
        are recomputed.
        """
        self.activations.finish_backward()

    def abandon_backward(self) -> None:
        self.activations.abandon_backward()

    def end_backward(self) -> None:
        for plan in self.residents.values():
            plan.end_backward()


def planner_of(world: World) -> MemoryPlanner | None:
    """Return the MemoryPlanner of `world`, which plans for use_checkpoint="auto" and keep_frozen="auto".

    Creates it if needed. Returns None on the CPU, where free memory is not known.
    """
    if world.device_memory is None:
        return None
    planner = world.schedule.observer(MemoryPlanner)
    if planner is None:
        planner = MemoryPlanner(world, world.device_memory)
        world.schedule.observe(planner)
    return planner


def choose_recompute(use_checkpoint: UseCheckpoint, block: Block, world: World) -> Recompute:
    """Return the recomputation policy that `use_checkpoint` selects for `block`.

    Called when `auto_wrap` or CheckpointBlock creates the block. In each training forward, the block asks the policy
    whether to recompute this forward in backward. With "auto" on a GPU, this function is collective: every rank must
    call it.

    Args:
        use_checkpoint: the argument of `auto_wrap` or CheckpointBlock. True recomputes the block in backward, False
            does not, and "attention" recomputes everything except attention. "auto" decides from the measured memory;
            on the CPU it is the same as False.
        block: the BlockState of the block, the object that runs its forward and backward. Only used for "auto".
        world: the world whose device runs the block.

    Raises:
        RuntimeError: in these cases:

            * `use_checkpoint` is "auto", the world's device is a GPU, and torch is older than 2.7. Such a torch cannot
              count the bytes that autograd saves.
            * `use_checkpoint` is "attention", and torch is older than 2.9. In such a torch, keeping the outputs of
              attention prevents torch.compile from compiling the functions that blocks call.
    """
    if use_checkpoint is True or use_checkpoint is False:
        return ALWAYS if use_checkpoint else NEVER
    if use_checkpoint == "attention":
        if not modes_see_compiled:
            raise RuntimeError(
                f"use_checkpoint='attention' needs torch 2.9 or newer, but this is torch {torch.__version__}. In older "
                "versions, keeping the outputs of attention prevents torch.compile from compiling the functions that "
                "blocks call. Pass use_checkpoint=True, or install a newer torch."
            )
        return KeepAttention()
    assert use_checkpoint == "auto", use_checkpoint
    planner = planner_of(world)
    if planner is None:
        _log_once(
            "use_checkpoint='auto' recomputes no block on the CPU, because free memory is known only on GPUs. To "
            "recompute every block, pass use_checkpoint=True."
        )
        return NEVER
    if top_saved_tensors_hooks is None:
        raise RuntimeError(
            f"use_checkpoint='auto' needs torch 2.7 or newer, but this is torch {torch.__version__}, which cannot "
            "count the bytes that autograd saves. Pass use_checkpoint=True or False, or install a newer torch."
        )
    return planner.policy(block)


class Memory(Extension):
    """The part of `auto_wrap` that applies the argument `keep_frozen`, and adds advice to out-of-memory errors.

    keep_frozen determines which frozen parameters stay unsharded between steps. The advice says how to save memory.

    Args:
        options: the arguments that were passed to `auto_wrap`. Only `keep_frozen` and `cuda_graphs` are used. With CUDA
            graphs, keep_frozen="auto" means True, because the graphs keep the full parameters' memory allocated anyway.
    """

    def __init__(self, options: Options) -> None:
        self._options = options

    def connect(self, plan: WrapPlan) -> None:
        follow_shortage(plan.model, plan.world)
        if plan.late:
            _extend_keep_frozen(plan.model, plan.world)
        else:
            # CUDA graphs keep the memory of the full parameters allocated anyway, so with them "auto" means True.
            graphs = self._options.cuda_graphs
            keep_frozen = True if graphs and self._options.keep_frozen == "auto" else self._options.keep_frozen
            _apply_keep_frozen(plan.model, plan.world, keep_frozen)


def _apply_keep_frozen(model: torch.nn.Module, world: World, keep_frozen: KeepFrozen) -> None:
    """Apply the argument `keep_frozen` of `auto_wrap` to `model`, which has just been wrapped.

    Collective: every rank must call it. Does nothing if a single rank stores the whole model.

    world: the ranks over which the model is sharded.
    keep_frozen: True keeps all frozen parameters unsharded between steps, False keeps none. "auto" measures the memory
        of the first steps, and then keeps as many unsharded as fit; on the CPU it keeps none.
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
            "GPUs. To keep all of them unsharded between steps, pass keep_frozen=True."
        )


def _extend_keep_frozen(model: torch.nn.Module, world: World) -> None:
    """Keep all frozen parameters of `model` unsharded between steps, also those added or frozen after it was wrapped.

    Called when auto_wrap shards parameters that were added to a wrapped model. Does nothing unless `model` was wrapped
    with keep_frozen=True. Collective: every rank must call it.

    model: the wrapped model, or a module that contains it.
    world: the ranks over which the model is sharded.
    """
    planner = world.schedule.observer(MemoryPlanner)
    if planner is None or not any(module in planner.residents for module in model.modules()):
        # This model was not wrapped with keep_frozen="auto", because `planner.residents` does not contain it. So if it
        # has a resident buffer (one that stays unsharded between steps), it was wrapped with keep_frozen=True. Buffers
        # of blocks with CUDA graphs (`keeps_address`) do not count, because they are resident with any keep_frozen.
        if any(buffer.resident and not buffer.keeps_address for buffer in buffers_of(model)):
            keep_all(model, world)
