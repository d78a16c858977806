"""Make functions of torch.nn.init and torch.distributed call `__torch_function__` of sharded tensors.

In torch, these functions ignore `__torch_function__` of their arguments. (From torch 2.12 on, the functions of
torch.distributed call `__torch_function__` themselves, and are not changed here.)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import distributed
from torch.distributed import distributed_c10d
from torch.nn import init
from torch.overrides import handle_torch_function, has_torch_function

from .functions import find_tensors

_NAMES = (
    "broadcast", "all_reduce", "all_reduce_coalesced", "reduce", "all_gather", "all_gather_into_tensor",
    "all_gather_coalesced", "gather", "scatter", "reduce_scatter", "reduce_scatter_tensor", "all_to_all_single",
    "all_to_all", "send", "recv",
)  # fmt: skip
"""The functions of torch.distributed to replace. `isend` and `irecv` are left out: `P2POp` accepts only these two
functions, and would refuse originals that a script has imported before the replacement."""


def override_collectives(kinds: tuple[type, ...]) -> None:
    """Make the functions of torch.distributed in `_NAMES` call `__torch_function__` of tensors of the classes `kinds`.

    Without this, `all_reduce` of a sharded tensor, for example, would add up the ranks' memory, in which each rank has
    different elements of the full tensor. Nothing changes for other tensors, or for functions that call
    `__torch_function__` already. A module that imported a function by name before this call keeps the original one.
    The file tensor.py calls this when it is imported, if torch is older than 2.12.

    kinds: the tensor subclasses whose `__torch_function__` is called: the classes of sharded tensors, and `WholeCopy`,
        the class of `parameter[0]` and other views of a temporary full copy of a sharded tensor.
    """
    for name in _NAMES:
        function: Any = getattr(distributed_c10d, name)
        if "has_torch_function" not in inspect.unwrap(function).__code__.co_names:
            overridden = _overridable(function, kinds)
            for module in (distributed, distributed_c10d):
                if getattr(module, name, None) is function:
                    setattr(module, name, overridden)


def override_initializers(kinds: tuple[type, ...]) -> Callable[[], None]:
    """Make `orthogonal_` and `sparse_` of torch.nn.init call `__torch_function__` of tensors of the classes `kinds`.

    Without this, each rank would draw a different matrix, and keep its own elements of this matrix. Together, the
    elements of all ranks would then form a matrix that is not orthogonal, or does not have the requested sparsity.

    `init_distributed` calls this function if there are several ranks. A module that stored one of the two original
    functions before this call keeps it. `transformers.initialization` does so when it is imported.

    kinds: the tensor subclasses whose `__torch_function__` is called: the classes of sharded tensors, and `WholeCopy`,
        the class of views of a temporary full copy of a sharded tensor.

    Returns a function that restores the original functions.
    """
    originals = {name: getattr(init, name) for name in ("orthogonal_", "sparse_")}
    for name, function in originals.items():
        setattr(init, name, _overridable(function, kinds))

    def undo() -> None:
        for name, function in originals.items():
            setattr(init, name, function)

    return undo


def _overridable(function: Callable[..., Any], kinds: tuple[type, ...]) -> Callable[..., Any]:
    """Return a wrapper of `function` that calls `__torch_function__` if an argument is an instance of `kinds`."""

    @wraps(function)
    def overridable(*args: Any, **kwargs: Any) -> Any:
        found = [each for each in find_tensors((args, kwargs)) if isinstance(each, kinds)]
        if has_torch_function(found):  # False if `__torch_function__` made this call, because it is disabled then
            return handle_torch_function(overridable, found, *args, **kwargs)
        return function(*args, **kwargs)

    return overridable
