"""Make PEFT's adapters on parameters (`target_parameters`) work if these parameters are sharded."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

from ...engine.base.torch_internals import preserve_version
from ...engine.blocks.sharded_module import OnlyWhileSharded, extend_class


class UncountedWrapper(OnlyWhileSharded):
    """Mixin for PEFT's ParamWrapper, so that its forward does not count as a write to the wrapped parameter.

    During the forward, PEFT registers a torch parametrization of the parameter, which has two effects:

    * The full parameter is copied onto itself. No value changes, but torch's counter of in-place writes increases, and
      for a sharded parameter a write in the forward is an error. So this class keeps the counter as it was.
    * In `_parameters` of its module, the parameter is replaced. So this class puts the parameter back there after the
      forward.
    """

    def _activate_lora(self, *args: Any, **kwargs: Any) -> AbstractContextManager[None]:
        return _uncounted(super()._activate_lora(*args, **kwargs), self)  # pyright: ignore[reportAttributeAccessIssue]


def let_parametrize(model: torch.nn.Module) -> None:
    """Let PEFT's wrappers in `model` add adapters to sharded parameters (`target_parameters`) by parametrizations.

    `auto_wrap` calls this. PEFT's wrapper registers a torch parametrization of its parameter in each forward, which
    counts as a write to the full parameter. For a sharded parameter, such a write is an error. Therefore the class of
    each wrapper is changed, in place, to one that also inherits from UncountedWrapper.
    """
    for module in model.modules():
        if hasattr(module, "_activate_lora") and not isinstance(module, UncountedWrapper):
            module.__class__ = _extended_class(type(module))


@functools.cache
def _extended_class(cls: Any) -> Any:
    """Return a subclass of UncountedWrapper and `cls`, which replaces `cls` as the class of a wrapper."""
    return extend_class(UncountedWrapper, cls, {})


@contextmanager
def _uncounted(activated: AbstractContextManager[Any], wrapper: Any) -> Iterator[None]:
    """Return a context that enters `activated`, but preserves torch's counter of writes to the wrapped parameter.

    At its end, it also puts the parameter back into `_parameters` of its module, where `activated` replaces it.

    activated: PEFT's context, in which the adapter is added to the parameter.
    wrapper: PEFT's wrapper of the parameter.
    """
    holder, name = wrapper.get_base_layer(), wrapper.parameter_name
    held = holder._parameters.get(name)
    with ExitStack() as stack:
        if held is not None:  # None if another adapter's context has replaced the parameter already
            stack.callback(holder._parameters.__setitem__, name, held)
        with preserve_version(wrapper.get_param()):
            stack.enter_context(activated)
        yield
