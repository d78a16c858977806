"""PEFT's adapters on parameters (`target_parameters`), which replace a parameter while their module's forward runs."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

from ...engine.base.torch_internals import preserve_version
from ...engine.blocks.sharded_module import OnlyWhileSharded, extend_class


class UncountedWrapper(OnlyWhileSharded):
    """PEFT's wrapper of a parameter, with a class that is extended in place: a forward leaves no change of the weight.

    For the duration of the forward, PEFT registers a torch parametrization. This writes the full parameter to itself
    and replaces the module's entry in `_parameters`. Neither may count as a change of the weight, so the parameter's
    version (torch's counter of in-place writes) is preserved and the entry is restored.
    """

    def _activate_lora(self, *args: Any, **kwargs: Any) -> AbstractContextManager[None]:
        return _uncounted(super()._activate_lora(*args, **kwargs), self)  # pyright: ignore[reportAttributeAccessIssue]


def let_parametrize(model: torch.nn.Module) -> None:
    """Turn PEFT's wrappers of parameters (`target_parameters`) in `model` into UncountedWrappers, in place."""
    for module in model.modules():
        if hasattr(module, "_activate_lora") and not isinstance(module, UncountedWrapper):
            module.__class__ = _extended_class(type(module))


@functools.cache
def _extended_class(cls: Any) -> Any:
    """Return a subclass of both UncountedWrapper and `cls`, to which the class of a module is changed from `cls`."""
    return extend_class(UncountedWrapper, cls, {})


@contextmanager
def _uncounted(activated: AbstractContextManager[Any], wrapper: Any) -> Iterator[None]:
    """Enter PEFT's context `activated`, which replaces the parameter of `wrapper`. Preserve the parameter's version."""
    holder, name = wrapper.get_base_layer(), wrapper.parameter_name
    held = holder._parameters.get(name)
    with ExitStack() as stack:
        if held is not None:  # it is None if an outer adapter of the same parameter was applied first
            stack.callback(holder._parameters.__setitem__, name, held)
        with preserve_version(wrapper.get_param()):
            stack.enter_context(activated)
        yield
