"""Make PEFT's adapters on parameters (`target_parameters`) work if these parameters are sharded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

from ...engine.base.torch_internals import preserve_version
from ...engine.blocks.sharded_module import OnlyWhileSharded, extend_module


class UncountedWrapper(OnlyWhileSharded):
    """Mixin for PEFT's ParamWrapper, so that its forward does not count as a write to the wrapped parameter.

    During the forward, PEFT registers a torch parametrization of the parameter, which has two effects:

    * The full parameter is copied onto itself. No value changes, but torch's counter of in-place writes increases, and
      for a sharded parameter a write in the forward is an error. So this class restores the counter.
    * The parameter is removed from the `_parameters` of the module that owns it. When the parametrization ends, torch
      puts the full parameter there, even if the local one was there before. So after the forward, this class restores
      the earlier entry.
    """

    def _activate_lora(self, *args: Any, **kwargs: Any) -> AbstractContextManager[None]:
        return _uncounted(super()._activate_lora(*args, **kwargs), self)  # pyright: ignore[reportAttributeAccessIssue]


def let_parametrize(model: torch.nn.Module) -> None:
    """Make PEFT's `target_parameters` (adapters added to parameters by parametrization) work on sharded parameters.

    `auto_wrap` calls this. In each forward, PEFT's wrapper registers a torch parametrization of its parameter. This
    counts as a write to the full parameter, and for a sharded parameter such a write is an error. Therefore the class
    of each wrapper in `model` is changed, in place, to one that also inherits from UncountedWrapper.
    """
    for module in model.modules():
        if hasattr(module, "_activate_lora") and not isinstance(module, UncountedWrapper):
            extend_module(module, UncountedWrapper)


@contextmanager
def _uncounted(activated: AbstractContextManager[Any], wrapper: Any) -> Iterator[None]:
    """Return a context that enters `activated`, but preserves torch's counter of writes to the wrapped parameter.

    On exit, the context also restores the parameter's entry in the module's `_parameters`, which `activated` has
    changed.

    activated: PEFT's context, in which the adapter is added to the parameter.
    wrapper: PEFT's wrapper of the parameter.
    """
    holder, name = wrapper.get_base_layer(), wrapper.parameter_name
    held = holder._parameters.get(name)
    with ExitStack() as stack:
        if held is not None:  # None if the context of another adapter is active and has replaced the parameter already
            stack.callback(holder._parameters.__setitem__, name, held)
        with preserve_version(wrapper.get_param()):
            stack.enter_context(activated)
        yield
