"""`auto_wrap(compile=True, cuda_graphs=True)`: the forward and the backward of each block are replayed as CUDA graphs.

A compiled layer of a small model, or one with adapters, experts or float8, runs up to a hundred short kernels. The host
may take longer to launch them than the GPU to run them. torch.compile can record the kernels (`mode="reduce-overhead"`)
and launch them together. All-gathers, reductions and everything else between blocks are not recorded.

A recorded graph reads parameters at fixed addresses. torch places the results of all graphs of a step in one memory
pool, at the same addresses in each step, so each step overwrites the results of the step before. Therefore:

* The memory into which a block's parameters are all-gathered stays allocated, at the same addresses. If the addresses
  changed, torch would record the graphs again, which costs more than graphs save. Since resharding would free no
  memory, blocks also stay unsharded between forward and backward, and frozen parameters stay unsharded between steps.
* `RecordedBlocks` tells torch when a step begins and the pool may be overwritten. It raises an error if a result of the
  step before is still in use.
* The outputs of the last block are copied out of the pool, because the model returns them to the user.
* Forwards without gradients run compiled code, but no graphs: in evaluation and generation the lengths of inputs vary,
  and a graph would be recorded for each length. Forwards under saved-tensor hooks, such as those of torch's
  checkpoint, run no graphs either, because the hooks decide how long results stay in use.
"""

from __future__ import annotations

import functools
import gc
import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ...engine.base.torch_internals import (
    graph_outputs_in_use,
    inside_hooks,
    mode_options,
    top_saved_tensors_hooks,
)
from ...engine.blocks.block_state import BlockState
from ...engine.blocks.containers import copy_views
from ...engine.blocks.observer import Observer
from ...engine.runtime.world import World
from ...engine.sharding.parameter import DistributedParameter
from ...engine.sharding.sourced import SourcedParameter
from ...engine.wrap.extension import Extension, WrapPlan
from ..options import Options

_log_once = functools.cache(logging.getLogger("hf_bmtrain").info)


class RecordedBlocks(Observer):
    """Keeps track of the blocks that are replayed as CUDA graphs, in all models of one world (set of ranks).

    Both the forward and the backward of such a block are replayed. This object is an observer: its method
    `before_forward` is called before each training forward of a model, and tells torch that a step begins. From then
    on, torch may overwrite the results of earlier graphs.

    Args:
        world: the ranks that train the models.

    Attributes:
        blocks: the BlockState of each block that is replayed. A BlockState runs the forward and backward of its block.
    """

    def __init__(self, world: World) -> None:
        self._schedule, self._device = world.schedule, world.device
        self.blocks = weakref.WeakSet[BlockState]()
        # From the next two attributes, `begin_call` recognizes repeated calls in the same forward. They describe its
        # last call that was not ignored: how many backwards had ended, and a weak reference to the running ForwardPass
        # (one call of the outermost module).
        self._backwards = -1
        self._forward: Callable[[], object] = lambda: None

    def before_forward(self, model: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            self.begin_call()

    def begin_call(self) -> None:
        """Tell torch that a step begins, so that it may overwrite the results of earlier graphs.

        Called before each training forward of a model and, because blocks may also be called outside a model, before
        each call of a block's graph. In two cases, the step has begun already, and the call is ignored:

        * A backward is running.
        * The last call that was not ignored was in the same forward of a model, and no backward has ended since. (All
          calls outside models count as calls in one forward.)

        torch must not overwrite results of earlier graphs that are still in use (referenced). If such results exist:

        * A backward may still need them if a block waits for its backward, or if no backward has ended since the last
          call that was not ignored. Then torch is not told that a step begins, and keeps the results.
        * Otherwise, the program has kept the results longer than training needs them, and RuntimeError is raised.

        Raises:
            RuntimeError: results of earlier graphs are in use, no block waits for its backward, and a backward has
                ended since the last call that was not ignored.
        """
        schedule = self._schedule
        running, backwards = schedule.running, schedule.backwards
        if (backwards == self._backwards and self._forward() is running) or schedule.in_backward:
            return
        ended = backwards != self._backwards
        self._backwards = backwards
        self._forward = (lambda: None) if running is None else weakref.ref(running)
        if self._in_use():
            if not ended or any(block.pending for block in self.blocks):
                return
            gc.collect()  # perhaps only unreachable reference cycles still refer to the results
            if count := self._in_use():
                raise RuntimeError(
                    f"{count} tensors that blocks have computed in earlier steps are still in use, and CUDA graphs "
                    "would overwrite them in this forward. They may be hidden states or router logits that the model "
                    "has returned, tensors that a hook has stored, gradients of inputs, a loss whose backward has not "
                    "run or has failed, or a backward graph that is retained. Delete them before the next forward, for "
                    "example with `del outputs`, and clone what you keep. Or train without CUDA graphs."
                )
        torch.compiler.cudagraph_mark_step_begin()

    def _in_use(self) -> int:
        return 0 if self._device.type == "cpu" else graph_outputs_in_use(self._device)

    def out_of_memory(self) -> str | None:
        if not self.blocks:
            return None
        return (
            f"The CUDA graphs of {len(self.blocks)} blocks keep the blocks' full parameters and the memory of their "
            "activations, which other tensors cannot use. To save this memory, leave out cuda_graphs=True (in Trainer "
            'torch_compile_mode="reduce-overhead"), or recompute the blocks (use_checkpoint=True).'
        )


def compile_forward(function: Callable, block: BlockState, options: dict[str, Any], world: World) -> Callable:
    """Compile the forward of a block with torch.compile. If `options` request CUDA graphs, prepare the block for them.

    Options of torch.compile that request CUDA graphs are, for example, `mode="reduce-overhead"` and
    `options={"triton.cudagraphs": True}`. The memory of the block's full parameters then stays allocated from step to
    step, and the block stays unsharded from its forward to its backward.

    Args:
        function: what to compile: the forward of the block's layer, or a function that calls this forward inside
            torch's checkpoint, so that the compiled graph also contains the recomputation.
        block: the state of the block.
        options: the keyword arguments of torch.compile.
        world: the ranks that share the block's parameters.

    Returns:
        The compiled function. If CUDA graphs are requested, calls of this function replay graphs while gradients are
        enabled and no saved-tensor hooks are active. All other calls run the compiled code without graphs.

    Raises:
        ValueError: CUDA graphs are requested, but do not work with this block. The message says why.
        RuntimeError: CUDA graphs are requested, but torch is older than 2.7.
    """
    compiled = torch.compile(function, **options)
    inductor = _inductor_options(**options)
    if not inductor.get("triton.cudagraphs"):
        return compiled
    _check_torch()
    _refuse(block, options.get("mode") or "triton.cudagraphs")
    recorded = world.schedule.observer(RecordedBlocks)
    if recorded is None:
        recorded = RecordedBlocks(world)
        world.schedule.observe(recorded)
    recorded.blocks.add(block)
    _keep_unsharded(block)
    if world.rank == 0:
        _log_once(
            "CUDA graphs: the blocks' full parameters keep their memory from step to step, whatever zero_level is"
            if world.device.type != "cpu"
            else "There are no CUDA graphs on the CPU: blocks are compiled, and keep their full parameters' memory"
        )
    others = {key: value for key, value in options.items() if key not in ("mode", "options")}
    unrecorded = torch.compile(function, **others, options={**inductor, "triton.cudagraphs": False})
    owner = weakref.ref(block)  # weak, because the block owns `run`, and a strong reference would make a cycle

    def run(*args: Any, **kwargs: Any) -> Any:
        state = owner()
        if state is None or not torch.is_grad_enabled():
            return unrecorded(*args, **kwargs)
        if inside_hooks():
            _log_once(
                "A compiled block runs without CUDA graphs, with the same results, because saved-tensor hooks decide "
                "how long its results stay in use: those of torch's checkpoint, those with which use_checkpoint='auto' "
                "measures memory, or the program's own. To replay it, call it without such hooks."
            )
            return unrecorded(*args, **kwargs)
        recorded.begin_call()
        outputs = compiled(*args, **kwargs)
        if state.next is not None:
            return outputs
        # The model returns the outputs of its last block, and the caller may still use them in the next step. The next
        # step overwrites the memory of the graphs' results, so return copies.
        return copy_views(outputs, (), lambda _: True)

    return run


def _inductor_options(backend: Any = "inductor", mode: str | None = None, options: Any = None, **_: Any) -> dict:
    """Return the options of the backend "inductor" that these arguments of torch.compile select.

    The result is {} if they select a different backend.
    """
    if backend != "inductor":
        return {}
    if mode is None or mode == "default":
        return dict(options or {})
    return mode_options(mode)


def _check_torch() -> None:
    if top_saved_tensors_hooks is None:
        raise RuntimeError(
            f"CUDA graphs need torch 2.7 or newer, but this is torch {torch.__version__}, which cannot tell whether "
            "saved-tensor hooks are active around a block. Install a newer torch, or compile the blocks without graphs."
        )


_STORED = "graphs would copy, in each step, weights that are quantized or split by tensor parallelism"
_PLAIN = (torch.nn.Parameter, SourcedParameter, DistributedParameter)
_COMMUNICATES = "a model of this process communicates inside layers (sequence_parallel, or tensor parallelism)"


def _refuse(block: BlockState, requested: str) -> None:
    """Raise ValueError if the block cannot be replayed as CUDA graphs.

    requested: the mode or option of torch.compile that requests CUDA graphs, for the message.
    """
    if not all(buffer.storage.has_fixed_addresses for buffer in block.buffers):
        reason = _STORED
    elif block.inputs is not None:
        reason = "graphs could overwrite the inputs that offload_activations copies to host memory"
    elif block.schedule.collective_layers:
        reason = _COMMUNICATES
    else:
        return
    raise ValueError(
        f"torch.compile cannot record CUDA graphs of these blocks, as {requested!r} requests, because {reason}. "
        "Compile the blocks without CUDA graphs: leave out this mode or option. Instead of 'max-autotune', use "
        "'max-autotune-no-cudagraphs'."
    )


def _keep_unsharded(block: BlockState) -> None:
    for buffer in block.buffers:
        buffer.keep_address()
        buffer.resident = True  # stay unsharded between steps; this has an effect only if all parameters are frozen
    # Do not reshard after the forward: the memory stays allocated anyway, and backward would need another all-gather.
    block.zero_level = 2


class CudaGraphs(Extension):
    """The part of `auto_wrap` that refuses `cuda_graphs=True` for models with which CUDA graphs do not work.

    It raises ValueError for such a model. If graphs work, `compile_forward` prepares the blocks for them.

    It also handles parameters, such as adapters, that the user adds to blocks that already use CUDA graphs. When a
    later call of `auto_wrap` shards these parameters, the memory of the blocks' full parameters is kept at fixed
    addresses, because CUDA graphs read the parameters there.

    Args:
        options: the arguments that were passed to `auto_wrap`. Only `cuda_graphs` is used.

    Raises:
        RuntimeError: `cuda_graphs` is True, but torch is older than 2.7.
    """

    def __init__(self, options: Options) -> None:
        self._on = options.cuda_graphs
        if self._on:
            _check_torch()

    def choose(self, plan: WrapPlan) -> None:
        parameters = (parameter for layer in plan.layers for parameter in layer.parameters())
        reason = None
        if plan.world.grid is not None or plan.world.schedule.collective_layers:
            reason = _COMMUNICATES
        elif any(type(parameter) not in _PLAIN for parameter in parameters):
            reason = _STORED  # `_PLAIN` does not contain, for example, bitsandbytes' classes of quantized parameters
        if self._on and reason is not None:
            raise ValueError(f"auto_wrap: cuda_graphs=True cannot be used, because {reason}. Leave it out.")

    def connect(self, plan: WrapPlan) -> None:
        recorded = plan.world.schedule.observer(RecordedBlocks)
        if recorded is None or not plan.late:
            return
        layers: list[Any] = plan.layers
        for layer in layers:
            if layer._bmt in recorded.blocks:
                _keep_unsharded(layer._bmt)
