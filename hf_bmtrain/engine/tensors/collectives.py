"""Functions of torch.distributed that leave tensors of this package to their classes, as all do since torch 2.12."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import distributed
from torch.distributed import distributed_c10d
from torch.overrides import handle_torch_function

from .functions import find_tensors

_NAMES = (
    "broadcast", "all_reduce", "all_reduce_coalesced", "reduce", "all_gather", "all_gather_into_tensor",
    "all_gather_coalesced", "gather", "scatter", "reduce_scatter", "reduce_scatter_tensor", "all_to_all_single",
    "all_to_all", "send", "recv",
)  # fmt: skip
"""Not `isend` and `irecv`: `P2POp` takes nothing else, and a script may have imported them before."""


def override_collectives(kinds: tuple[type, ...]) -> None:
    """Let each of these functions call `__torch_function__` if it is given tensors of `kinds`, unless it does already.

    It would communicate the memory of a slice, and ranks would get each other's slices in place of their own. Nothing
    changes for other tensors, or for what was imported from torch.distributed before.
    """
    for name in _NAMES:
        function: Any = getattr(distributed_c10d, name)
        if "has_torch_function" not in inspect.unwrap(function).__code__.co_names:
            overridden = _overridable(function, kinds)
            for module in (distributed, distributed_c10d):
                if getattr(module, name, None) is function:
                    setattr(module, name, overridden)


def _overridable(function: Callable[..., Any], kinds: tuple[type, ...]) -> Callable[..., Any]:
    @wraps(function)
    def overridable(*args: Any, **kwargs: Any) -> Any:
        found = [each for each in find_tensors((args, kwargs)) if isinstance(each, kinds)]
        if found:
            return handle_torch_function(overridable, found, *args, **kwargs)
        return function(*args, **kwargs)

    return overridable
