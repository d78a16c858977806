"""Private names of torch that the package uses, and why it needs them. Other modules import the names from here.

Most are plain aliases, so that a call costs nothing extra. A name that does not exist in every supported version of
torch (2.6 and later) has a default value.

The package also uses these private attributes, which cannot be aliased:

* `Tensor._version`, the version counter, by which autograd notices writes (inference tensors have none);
* `Tensor._base` and `._is_view`, the tensor of which a tensor is a view;
* `Tensor._backward_hooks` and `._post_accumulate_grad_hooks`, because the hooks of a parameter cannot be listed
  otherwise;
* `Tensor._values`, the values of a sparse tensor, because the public `values` raises if the tensor is not coalesced;
* `UntypedStorage._cdata`, the address of the storage object, which identifies a storage even while its memory is freed
  (`data_ptr` is then null);
* `Module._parameters`, `._buffers` and `._modules`, the dictionaries behind `register_parameter` and similar methods,
  because the checks in those methods would cost time in every forward; `._forward_hooks` and similar, because hooks
  cannot be listed otherwise;
* `Module._apply` and `._load_from_state_dict`, which subclasses override, because no public hook can replace what they
  do;
* `Module._non_persistent_buffers_set`, the names of the buffers that are not in the state dict, and
  `._compiled_call_impl`, which is set if `Module.compile` was called, because neither can be found out otherwise;
* `Library._destroy`, which undoes the registrations of a `torch.library.Library` (torch's own tests use it);
* `DistributedDataParallel._active_ddp_module`, the only indication that a forward runs inside DistributedDataParallel.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._guards import TracingContext
from torch.distributed import distributed_c10d
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import _foreach_supported_types as _optimizer_types
from torch.utils import _pytree as pytree
from torch.utils._foreach_utils import _foreach_supported_types as _clipping_types
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointFunction

_C: Any = torch._C
_engine: Any = torch.autograd.Variable._execution_engine

# -- autograd -------------------------------------------------------------------------------------------------------

current_graph_task: Callable[[], int] = _C._current_graph_task_id
"""Return a number that identifies the backward that is running in this thread, or -1 if none is running. There is no
public equivalent."""

next_node: Callable[[], int] = _C._autograd._get_sequence_nr
"""Return the sequence number that the next autograd node created in this thread will get (`Node._sequence_nr`). Each
node gets a higher number than the one before. So the numbers tell whether a tensor was computed before or after a call
of this function. There is no public equivalent."""

call_after_backward: Callable[[Callable[[], None]], None] = _engine.queue_callback
"""Register a function to be called when the running backward ends. There is no public equivalent: public hooks run for
one tensor or one graph node."""

top_saved_tensors_hooks: Any = getattr(_C._autograd, "_top_saved_tensors_default_hooks", None)
"""`top_saved_tensors_hooks(also_under_tracing)` returns the innermost active (pack, unpack) hooks, or None. The public
`torch.autograd.graph.saved_tensors_hooks` can set these hooks, but not return them. Torch 2.6 has no such function, and
this name is None there."""


def inside_hooks() -> bool:
    """Return whether saved-tensor hooks are active. Always False in torch 2.6, which has no function to find this out.

    Such hooks, for example those of a torch.utils.checkpoint around a block, decide which tensors are kept for
    backward. So code that would keep or offload tensors itself calls this function first, and leaves the decision to
    the hooks if the result is True.
    """
    return top_saved_tensors_hooks is not None and top_saved_tensors_hooks(True) is not None


def inside_reentrant_checkpoint() -> bool:
    """Return whether backward is running the second forward of a torch.utils.checkpoint with use_reentrant=True.

    Usually, a forward that runs during a backward only recomputes an earlier forward, to fill in saved tensors. A
    reentrant checkpoint is different: it runs its first forward without gradients, so autograd records only the second
    forward. The second forward therefore counts as a new forward, with a backward of its own. Sharded modules call this
    function to distinguish such a new forward from a recomputation.

    This uses a private function of torch, because no public one returns the graph node that autograd is executing.
    """
    return isinstance(_C._current_autograd_node(), CheckpointFunction._backward_cls)  # pyright: ignore


functorch_transforms_active: Callable[[], bool] = _C._are_functorch_transforms_active
"""Return whether a transform of torch.func is active. There is no public equivalent."""

is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", lambda: False)
"""Return whether torch.export is tracing. torch 2.7 added this function. With torch 2.6, it returns False, so
exporting a sharded model fails with a less specific error."""

disable_compiler: Callable[[Callable[..., Any]], Callable[..., Any]] = torch._disable_dynamo
"""Exclude a function from compilation. `torch.compiler.disable` does the same, but imports the compiler at once, which
takes 1 s."""

optimize_scripts: Callable[[bool], None] = _C._set_graph_executor_optimize
"""Set whether TorchScript optimizes functions in this thread from now on. Functions that are already optimized stay so.
The public `torch.jit.optimized_execution` is a context manager, so its setting cannot outlast a `with` statement."""

# -- modules --------------------------------------------------------------------------------------------------------


def has_global_hooks() -> bool:
    """Return whether a global module hook, one that runs in the forward or backward of every module, is registered.

    Code that computes a layer's output without calling the layer, such as a fused layer, does not run these
    hooks. So such code calls this function first, and calls the layer if the result is True. Torch's public functions
    can register global hooks, but cannot list them.
    """
    # In later versions, `torch.nn.modules.module._has_any_global_hook` returns the same, but torch 2.6 lacks it.
    module: Any = torch.nn.modules.module
    return bool(
        module._global_forward_hooks
        or module._global_forward_pre_hooks
        or module._global_backward_hooks
        or module._global_backward_pre_hooks
    )


def has_hooks(module: torch.nn.Module) -> bool:
    """Return whether hooks that run in the forward or backward of `module` are registered on it."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


# -- tensors --------------------------------------------------------------------------------------------------------

make_subclass: Callable[..., Any] = torch.Tensor._make_subclass
"""`make_subclass(cls, data, requires_grad)`: return an instance of the tensor subclass `cls` that shares the memory of
`data`, without calling the constructor of `cls`. The public `Tensor.as_subclass` returns a view with an autograd
history, not a leaf."""

WithoutTorchFunction: Any = _C.DisableTorchFunctionSubclass
"""A context in which operations treat tensor subclasses as plain tensors: `__torch_function__` is not called. torch
exports this class at its top level, but does not document it. `torch.overrides` has no such context."""

FOREACH_TYPES: tuple[list[type], ...] = (_optimizer_types, _clipping_types)
"""The exact tensor types for which torch's optimizers and gradient clipping use `_foreach_` functions. The package
appends its own tensor classes to these lists, as torch does with DTensor."""

StorageWeakRef = StorageWeakRef
"""A weak reference to a storage, hashed and compared by the storage's address. `weakref.ref` would refer to the
storage's Python wrapper, which may be freed earlier. The module is public, but the class is undocumented."""

pytree = pytree
"""Functions that flatten nested arguments and outputs. There is no public equivalent."""

TorchDispatchMode = TorchDispatchMode
"""The base class of a context that intercepts every operation below autograd. It is documented only for extensions of
torch itself. The package uses it to track the memory of tensors when it predicts memory use, and to find calls of
attention functions."""


def detach_in_mode(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor.detach()`. The result shares the version counter of `tensor`, also inside a TorchDispatchMode.

    The shared counter shows whether `tensor` is written later. Outside a TorchDispatchMode, the result of
    `tensor.detach()` always shares the counter. Inside one, torch switches off the dispatch layer that does this, so
    this function switches the layer on again.
    """
    with _C._SetExcludeDispatchKeyGuard(_C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


modes_see_compiled: bool = hasattr(TorchDispatchMode, "ignore_compile_internals")
"""Whether this version of torch can compile functions (with torch.compile) inside a TorchDispatchMode. The mode then
sees the operations that the compiled code calls. In older versions, a function that was once called inside such a mode
is never compiled."""


def compile_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions by which torch.compile(fullgraph=True) reports that it cannot compile a function.

    When one of them is raised, no part of the function has run. The exceptions have no public names. They are imported
    only here, because the import takes a second.
    """
    from torch._dynamo import exc

    names = (
        "Unsupported", "UncapturedHigherOrderOpError", "UserError", "InternalTorchDynamoError", "BackendCompilerFailed",
        "FailOnRecompileLimitHit",
    )  # fmt: skip
    return tuple(getattr(exc, name) for name in names if hasattr(exc, name))


def compile_reason(error: Exception) -> str:
    """Return why a function cannot be compiled, in one line, for a log message.

    error: the exception that torch.compile raised, an instance of one of the classes in `compile_errors()`.
    """
    # The message of this error does not mention the limit, only fullgraph=True.
    if type(error).__name__ == "FailOnRecompileLimitHit":
        return "it needs more graphs than torch._dynamo.config.recompile_limit allows"
    # The first line of a BackendCompilerFailed names only the backend. The second line gives the reason.
    lines = 2 if type(error).__name__ == "BackendCompilerFailed" else 1
    return " ".join(str(error).strip().split("\n")[:lines]) or type(error).__name__


def mode_options(mode: str) -> dict[str, Any]:
    """Return the compiler options that torch.compile sets for its argument `mode`, such as {"triton.cudagraphs": True}.

    The options come from `torch._inductor.list_mode_options`, which torch documents. The import of `torch._inductor`
    takes a second, so this function does it only when it is called.
    """
    from torch._inductor import list_mode_options

    return list_mode_options(mode)


def graph_outputs_in_use(device: torch.device) -> int:
    """Return how many of the tensors that CUDA graphs have computed in this step are still in use (referenced).

    The CUDA graphs of torch.compile (`mode="reduce-overhead"`) write their outputs to the same memory in each step.
    After `torch.compiler.cudagraph_mark_step_begin()` has marked the start of the next step, the graphs overwrite the
    outputs of this step, even if they are still in use. So call this function before marking the next step: if the
    result is not 0, these outputs would be overwritten. torch has no public function to find this out.

    device: the GPU.
    """
    from torch._inductor import cudagraph_trees  # imported only here, because the import takes a second

    index = torch.cuda.current_device() if device.index is None else device.index
    manager = cudagraph_trees.get_manager(index, create_if_none_exists=False)
    node = None if manager is None else manager.current_node
    return 0 if node is None else len(list(node.path_live_weakrefs()))


def schema_of(operator: Any) -> Any:
    """Return the schema of an operator of torch.ops, for example to find out which arguments the operator writes.

    Returns None if `operator` is an OpOverloadPacket with several overloads, or is not an operator. There is no public
    equivalent.
    """
    if isinstance(operator, torch._ops.OpOverloadPacket):
        overloads = operator.overloads()
        operator = getattr(operator, overloads[0]) if len(overloads) == 1 else None
    return operator._schema if isinstance(operator, torch._ops.OpOverload) else None


scaled_mm: Callable[..., torch.Tensor] = torch._scaled_mm
"""Multiply two matrices of 8-bit floating-point numbers, and scale the rows and columns of the product. The public
`torch.nn.functional.scaled_mm` exists only in torch 2.10 and later."""


def has_wide_products(device: torch.device) -> bool:
    """Return whether the product of 16-bit matrices on `device` can be returned in float32, not rounded to 16 bits.

    On a CUDA device, this requires torch 2.8 or later, for the argument `out_dtype`, and compute capability 8.0 or
    higher. On all other devices, the result is True, because the matrices are converted to float32 before they are
    multiplied.
    """
    if device.type != "cuda":
        return True
    return "dtype_out" in torch.ops.aten.addmm.overloads() and torch.cuda.get_device_capability(device)[0] >= 8


preserve_version: Any = torch.autograd._unsafe_preserve_version_counter
"""`with preserve_version(tensor)`: writes to the tensor do not increment its version counter. There is no public
equivalent."""

# -- optimizers -----------------------------------------------------------------------------------------------------


def unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer inside wrappers such as Accelerate's, or `optimizer` itself if it is not wrapped.

    An object is a wrapper if one of its attributes is a torch.optim.Optimizer that has the same `state` dict as the
    object. If the object has no `state`, both must have the same `param_groups` list instead. A wrapper need not be a
    torch.optim.Optimizer itself.

    An optimizer that refers to another optimizer, but has a separate `state`, is not a wrapper. An LR scheduler is not
    a wrapper either, because it has no `param_groups`.
    """
    chain: list[Any] = [optimizer]
    for outer in chain:  # the loop continues with each optimizer that it appends
        shared = "state" if hasattr(outer, "state") else "param_groups"
        for inner in getattr(outer, "__dict__", {}).values() if hasattr(outer, "param_groups") else ():
            known = any(inner is each for each in chain)  # an optimizer may refer to its wrapper
            if isinstance(inner, torch.optim.Optimizer) and not known:
                if getattr(inner, shared) is getattr(outer, shared):
                    chain.append(inner)
                    break
    return chain[-1]


def state_dict_hooks(optimizer: torch.optim.Optimizer) -> list[Callable[..., Any]]:
    """Return the hooks that run at the end of `optimizer.state_dict()`. torch can register them, but not list them.

    The list is empty for an optimizer that did not call `Optimizer.__init__`, such as some wrappers in other packages.
    """
    return list(getattr(optimizer, "_optimizer_state_dict_post_hooks", {}).values())


def has_load_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether hooks that run at the beginning or end of `optimizer.load_state_dict()` are registered."""
    return bool(optimizer._optimizer_load_state_dict_pre_hooks or optimizer._optimizer_load_state_dict_post_hooks)


@contextlib.contextmanager
def load_hooks(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Context manager that runs an optimizer's `load_state_dict` hooks: the pre-hooks on entry, the post-hooks on exit.

    Inside the context, torch's `load_state_dict` runs no hooks. A subclass of Optimizer uses this to pass only a part
    of the state to torch's method, while its pre-hooks still get the complete state.

    optimizer: the optimizer.
    state_dict: the complete state. The context manager yields a copy of this dict, or what a pre-hook has returned
        instead.
    """
    before, after = optimizer._optimizer_load_state_dict_pre_hooks, optimizer._optimizer_load_state_dict_post_hooks
    # The pre-hooks may add or remove entries. Copy the dict, as torch's `load_state_dict` does, so that the caller's
    # dict does not change.
    state_dict = state_dict.copy()
    for hook in list(before.values()):
        result = hook(optimizer, state_dict)
        state_dict = state_dict if result is None else result
    optimizer._optimizer_load_state_dict_pre_hooks = OrderedDict()
    optimizer._optimizer_load_state_dict_post_hooks = OrderedDict()
    try:
        yield state_dict
    finally:
        optimizer._optimizer_load_state_dict_pre_hooks = before
        optimizer._optimizer_load_state_dict_post_hooks = after
    for hook in list(after.values()):
        hook(optimizer)


# -- one operation on many tensors ----------------------------------------------------------------------------------
# These functions, which torch's own optimizers use, take lists of tensors. Their public equivalents take one tensor.

foreach_copy_ = torch._foreach_copy_
foreach_div_ = torch._foreach_div_
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
foreach_zero_ = torch._foreach_zero_

amp_update_scale_ = torch._amp_update_scale_
"""Increase or decrease a loss scale on the device. The public `torch.amp.GradScaler` calls this function, too, but has
no arguments for a minimum and a maximum of the scale."""

amp_found_inf_and_unscale_ = torch._amp_foreach_non_finite_check_and_unscale_
"""The operation with which `torch.amp.GradScaler` unscales gradients and looks for inf and NaN. For sharded gradients,
the package replaces it by an operation that looks on all ranks.
"""

# -- processes ------------------------------------------------------------------------------------------------------

default_store: Callable[[], Any] = distributed_c10d._get_default_store
"""Return the key-value store through which the processes of torch's default process group found each other. There is no
public equivalent. A separate store would need a port of its own and an address that every host can reach."""

# -- devices --------------------------------------------------------------------------------------------------------

current_raw_stream: Any = getattr(_C, "_cuda_getCurrentRawStream", None)
"""`current_raw_stream(device_index)`: return the handle of the current CUDA stream, for kernel launches.
`torch.cuda.current_stream` creates an object in each call, which takes several times as long. This name is None in a
CPU build of torch."""

# -- compilation ----------------------------------------------------------------------------------------------------

is_tracing: Callable[[], bool] = lambda: TracingContext.try_get() is not None  # noqa: E731
"""Return whether torch.compile is tracing code, or inspecting a tensor in order to trace code. The public
`torch.compiler.is_compiling` is true in code that is being traced, but false while the compiler inspects a tensor."""


def autocast_type(device: torch.device) -> str:
    """Return the `device_type` to pass to torch.autocast for tensors on `device`.

    The package uses the meta device to simulate a GPU, so the result for it is "cuda".
    """
    return "cuda" if device.type == "meta" else device.type
