"""All that a forward of a model changes, put back afterwards."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .contents import Attributes, Contents
from .generators import Generators, generators_of


class ForwardState:
    """The buffers and attributes of `model`, and all random generators, when this object was made.

    Buffers are copied. arguments: of the forward to come; the containers among them (lists, dicts, caches) are put back
    too. The tensors in attributes and containers are not copied.
    """

    def __init__(self, model: torch.nn.Module, device: torch.device, arguments: Iterable[Any] = ()) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device) if device.type != "cpu" else None
        self._generators = Generators(generators_of(model))
        self._draws = torch.get_rng_state()
        self._device_draws = None if self._module is None else self._module.get_rng_state(device)
        self._attributes = Attributes(list(model.modules()))
        self._arguments = Contents(arguments)
        self._buffers = [
            (module._buffers, {name: (b, None if b is None else b.clone()) for name, b in module._buffers.items()})
            for module in model.modules()
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back, so that another forward begins as the first one did."""
        self._generators.restore()
        torch.set_rng_state(self._draws)
        if self._module is not None:
            self._module.set_rng_state(self._device_draws, self._device)
        for buffers, values in self._buffers:
            for name in buffers.keys() - values.keys():
                del buffers[name]
            for name, (buffer, value) in values.items():
                buffers[name] = buffer
                # Autograd may have saved a buffer for a backward that is to come: what did not change is not written.
                if buffer is not None and value is not None and not torch.equal(buffer, value):
                    buffer.copy_(value)
        self._arguments.restore()
        if not self._attributes.is_present():
            self._attributes.restore()
