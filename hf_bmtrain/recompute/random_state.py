"""Where the generators of random numbers stand."""

from __future__ import annotations

from typing import Any

import torch


class RandomState:
    """The default generators of the CPU and of `device`, as they stand now. Does not wait for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self._host = torch.get_rng_state()
        self._own = None if self._module is None else self._module.get_rng_state(device)

    def restore(self) -> None:
        torch.set_rng_state(self._host)
        if self._module is not None:
            self._module.set_rng_state(self._own, self._device)
