"""PEFT's adapters on parameters (`target_parameters`), which replace a parameter while their module's forward runs."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from ...engine.base.torch_internals import preserve_version
from ...engine.blocks.block import weak_method


def let_parametrize(model: torch.nn.Module) -> None:
    """Let PEFT's adapters on parameters (`target_parameters`) replace a parameter while its module's forward runs.

    For the duration of the forward, PEFT registers a torch parametrization. This writes the full parameter to itself
    and sets the module's slot (its entry in `_parameters`). Neither may count as a change of the weight, so the version
    of the parameter is preserved and the slot is restored.
    """
    for module in model.modules():
        activate = getattr(module, "_activate_lora", None)
        if inspect.ismethod(activate):  # the method has not been patched yet
            module._activate_lora = functools.partial(  # pyright: ignore[reportArgumentType]
                _activate_uncounted, weak_method(activate), weakref.ref(module)
            )


@contextmanager
def _activate_uncounted(activate: Callable, reference: weakref.ref[Any], *args: Any, **kwargs: Any) -> Iterator[None]:
    """Enter PEFT's context `activate(*args, **kwargs)`, which replaces a parameter.

    The parameter's version is not incremented, and its slot is restored on exit.

    reference: refers to PEFT's wrapper module, which knows the parameter (`get_param`) and the module that contains it
        (`get_base_layer`).
    """
    wrapper: Any = reference()
    holder, name = wrapper.get_base_layer(), wrapper.parameter_name
    held = holder._parameters.get(name)
    with ExitStack() as stack:
        if held is not None:  # it is None if an outer adapter of the same parameter was applied first
            stack.callback(holder._parameters.__setitem__, name, held)
        with preserve_version(wrapper.get_param()):
            stack.enter_context(activate(*args, **kwargs))
        yield
