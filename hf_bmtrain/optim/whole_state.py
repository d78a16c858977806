"""The state of an optimizer over slices as whole tensors, out and in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..runtime.launcher import accelerator_is_running
from ..runtime.world import current_world
from ..sharding.parameter import DistributedParameter


class WholeState:
    """Makes `optimizer.state_dict()` give whole tensors while an Accelerator runs, and lets whole ones be loaded.

    Accelerate writes rank 0's state_dict and gives the file to every rank, so slices of rank 0 would reach all.
    Then `state_dict()` is collective: every rank calls it, as `accelerator.save_state` does. Without an
    Accelerator it gives this rank's slices, as before. What is loaded may be either: a tensor with as many
    elements as the whole parameter is sliced before the next step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._local, self._loaded = False, True
        optimizer.register_state_dict_post_hook(self._gather)
        optimizer.register_load_state_dict_post_hook(self._note_load)

    def _note_load(self, optimizer: torch.optim.Optimizer) -> None:
        self._loaded = True

    @contextmanager
    def local(self) -> Iterator[None]:
        """`with whole_state.local(): optimizer.state_dict()` gives this rank's slices, without communicating."""
        self._local = True
        try:
            yield
        finally:
            self._local = False

    def slice_loaded(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace whole tensors in the state by this rank's slices, once after a load."""
        if not self._loaded:
            return
        self._loaded = False
        for parameter, state in optimizer.state.items():
            if isinstance(parameter, DistributedParameter):
                for name, value in state.items():
                    state[name] = _slice(parameter, name, value)

    def _gather(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        if self._local or not state_dict["state"] or not accelerator_is_running():
            return None
        current_world().assemble("optimizer.state_dict")
        groups = zip(state_dict["param_groups"], optimizer.param_groups)
        owners = dict(pair for saved, group in groups for pair in zip(saved["params"], group["params"]))
        state = {key: dict(values) for key, values in state_dict["state"].items()}
        for key, name in _sliced_entries(owners, state):
            parameter = owners[key]
            whole = parameter.buffer.gather_piecewise(parameter.index, state[key][name])
            state[key][name] = whole.to("cpu", copy=True)
        return {**state_dict, "state": state}


def _slice(parameter: DistributedParameter, name: str, value: Any) -> Any:
    """This rank's part of `value` where that is whole; ValueError where it belongs to another model or rank."""
    if not isinstance(value, torch.Tensor) or value.dim() == 0 or value.shape == parameter.shape:
        return value
    if value.numel() == parameter.full_shape.numel():
        return parameter.take(value.reshape(parameter.full_shape)).clone()
    if value.numel() == 1:
        return value
    raise ValueError(
        f"Optimizer state '{name}' of shape {tuple(value.shape)} fits neither the parameter "
        f"{tuple(parameter.full_shape)} nor this rank's {parameter.numel()} elements of it: it was saved for another "
        "model, or on another rank."
    )


def _sliced_entries(owners: dict, state: dict) -> list[tuple[Any, str]]:
    """The (parameter key, name) of all per-element tensors, in one order on all ranks. Collective.

    A tensor is per-element when it has its slice's shape on every rank; one rank alone cannot tell a step count
    from a slice of one element.
    """
    mine = {
        (key, name): isinstance(value, torch.Tensor) and value.dim() == 1 and value.shape == owners[key].shape
        for key, values in sorted(state.items())
        for name, value in sorted(values.items())
        if isinstance(owners[key], DistributedParameter)
    }
    everyone = current_world().gather_objects(mine)
    if any(list(other) != list(mine) for other in everyone):
        raise RuntimeError("The ranks' optimizers hold state for different parameters: build them alike on all ranks.")
    return [entry for entry in mine if all(other[entry] for other in everyone)]
