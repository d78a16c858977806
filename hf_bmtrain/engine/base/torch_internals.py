"""Every private name of torch that the package uses, with the reason. Import them from here.

All but `top_saved_tensors_hooks` exist in every supported version (torch 2.6 and later). They are plain aliases, so
calls have no overhead.

These private attributes, which cannot have an alias, are used as well:

* `Tensor._version`, the counter that autograd compares (inference tensors have none);
* `Tensor._backward_hooks` and `._post_accumulate_grad_hooks`, since hooks of a parameter cannot be listed otherwise;
* `Tensor._values`, the values of a sparse tensor, whose public `values` refuses one that is not coalesced;
* `UntypedStorage._cdata`, the address of the storage object, since that of its memory is null while it is released;
* `Module._parameters`, `._buffers` and `._modules`, the dictionaries behind `register_parameter` and similar methods,
  whose checks would cost time in every forward; `._forward_hooks` and similar, since hooks cannot be listed otherwise;
* `Module._apply` and `._load_from_state_dict`, which subclasses extend since there are no public hooks;
* `Library._destroy`, by which torch's own tests undo what a `torch.library.Library` has registered;
* `DistributedDataParallel._active_ddp_module`, the only indication of a forward inside DistributedDataParallel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._guards import TracingContext
from torch.distributed import distributed_c10d
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import _foreach_supported_types as _optimizer_types
from torch.utils import _foreach_utils
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_C: Any = torch._C
_engine: Any = torch.autograd.Variable._execution_engine

# -- autograd -------------------------------------------------------------------------------------------------------

current_graph_task: Callable[[], int] = _C._current_graph_task_id
"""Return the number of the backward that runs in this thread, -1 outside one. There is no public equivalent."""

call_after_backward: Callable[[Callable[[], None]], None] = _engine.queue_callback
"""Call a function at the end of the running backward. Public hooks belong to a tensor or node, not to a backward."""

top_saved_tensors_hooks: Any = getattr(_C._autograd, "_top_saved_tensors_default_hooks", None)
"""`top_saved_tensors_hooks(also_under_tracing)` returns the innermost active (pack, unpack) hooks, or None. The public
context manager sets hooks but does not read them. In torch 2.6 they cannot be read, and this is None itself."""

functorch_transforms_active: Callable[[], bool] = _C._are_functorch_transforms_active
"""Return whether a transform of torch.func is active. There is no public equivalent."""

is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", lambda: False)
"""Return whether torch.export traces. Public since torch 2.7; before, an exported model fails with another error."""

disable_compiler: Callable[[Callable[..., Any]], Callable[..., Any]] = torch._disable_dynamo
"""Exclude a function from compilation. torch.compiler.disable does the same, but imports the compiler at once: 1 s."""

optimize_scripts: Callable[[bool], None] = _C._set_graph_executor_optimize
"""Set whether TorchScript functions that are not optimized yet may be, in this thread. The public
`torch.jit.optimized_execution` is a context, which ends."""

# -- modules --------------------------------------------------------------------------------------------------------


def has_global_hooks() -> bool:
    """Return whether hooks of all modules are registered. The public functions only register them."""
    module: Any = torch.nn.modules.module  # in torch 2.6 without `_has_any_global_hook`
    return bool(
        module._global_forward_hooks
        or module._global_forward_pre_hooks
        or module._global_backward_hooks
        or module._global_backward_pre_hooks
    )


# -- tensors --------------------------------------------------------------------------------------------------------

make_subclass: Callable[..., Any] = torch.Tensor._make_subclass
"""`make_subclass(cls, data, requires_grad)`: make an instance of a Parameter subclass over `data` without calling its
constructor. `Tensor.as_subclass` returns a view with a history, not a leaf."""

no_torch_function: Any = _C._disabled_torch_function_impl
"""The `__torch_function__` of a subclass whose operations return plain tensors. torch disables overrides so for its own
subclasses, such as Parameter."""

WithoutTorchFunction: Any = _C.DisableTorchFunctionSubclass

FOREACH_TYPES: tuple[list[type], ...] = (
    _optimizer_types, getattr(_foreach_utils, "_foreach_supported_types", []),
)  # fmt: skip
"""The exact types for which optimizers, and the clipping of norms, use functions on lists. DTensor adds itself too."""
"""A context in which subclasses are treated as plain tensors, so that attribute access does not search for overrides.
torch exports it at its top level without documentation; `torch.overrides` has no such context. Since torch 2.0."""

StorageWeakRef = StorageWeakRef
"""A weak reference to a storage, hashed and compared by the storage's address; `weakref.ref` would reference its Python
wrapper. The module is public, the class undocumented."""

pytree = pytree
"""Flattens arguments and outputs of any nesting. There is no public equivalent."""

TorchDispatchMode = TorchDispatchMode
"""A context in which a subclass of it sees every operation below autograd. Documented only where torch extends
itself; the package's memory predictions follow storages by it."""


def schema_of(operator: Any) -> Any:
    """Return the schema of an operator of torch.ops with one overload, which says what it writes, None for others.

    There is no public equivalent.
    """
    if isinstance(operator, torch._ops.OpOverloadPacket):
        overloads = operator.overloads()
        operator = getattr(operator, overloads[0]) if len(overloads) == 1 else None
    return operator._schema if isinstance(operator, torch._ops.OpOverload) else None


scaled_mm: Callable[..., torch.Tensor] = torch._scaled_mm
"""A product of float8 matrices, times scales of rows and columns. `torch.nn.functional.scaled_mm` exists since 2.10."""

preserve_version: Any = torch.autograd._unsafe_preserve_version_counter
"""`with preserve_version(tensor)`: writes to the tensor are not counted. There is no public equivalent."""

# -- one operation on many tensors ----------------------------------------------------------------------------------
# torch's optimizers are built on these; the public API has loops over single tensors only.

foreach_copy_ = torch._foreach_copy_
foreach_div_ = torch._foreach_div_
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
foreach_zero_ = torch._foreach_zero_

fused_adamw_ = torch._fused_adamw_
"""The kernel of `torch.optim.AdamW(fused=True)`, which the class applies to parameters only."""

amp_update_scale_ = torch._amp_update_scale_
"""Grow or back off a loss scale on the device. `torch.amp.GradScaler` is the public caller; its scaling is fixed."""

amp_found_inf_and_unscale_ = torch._amp_foreach_non_finite_check_and_unscale_
"""The operation by which `GradScaler` unscales gradients. `ShardTensor` overrides it."""

# -- processes ------------------------------------------------------------------------------------------------------

default_store: Callable[[], Any] = distributed_c10d._get_default_store
"""Return the store by which the processes of torch's default process group have found each other. There is no public
equivalent; a store of our own would need a port and an address that every host reaches."""

# -- devices --------------------------------------------------------------------------------------------------------

current_raw_stream: Any = getattr(_C, "_cuda_getCurrentRawStream", None)
"""`current_raw_stream(device_index)`: return the handle of the current CUDA stream, for kernel launches.
`torch.cuda.current_stream` makes an object per call and takes several times as long. None in a CPU build of torch."""

# -- compilation ----------------------------------------------------------------------------------------------------

is_tracing: Callable[[], bool] = lambda: TracingContext.try_get() is not None  # noqa: E731
"""Return whether torch.compile is describing tensors or tracing. `torch.compiler.is_compiling` is true for code that is
traced, and false while the compiler itself looks at a tensor."""


def autocast_type(device: torch.device) -> str:
    """Return what torch.autocast takes for a tensor on `device`: the meta device stands for a GPU."""
    return "cuda" if device.type == "meta" else device.type
