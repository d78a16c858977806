"""BMTrain's `config` mapping: rank, world size, device and other properties of this process's world."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ..engine.runtime.world import World, current_world


def _stream(world: World) -> Any:
    """Return the device's current stream."""
    return torch.get_device_module(world.device).current_stream()


_VALUES: dict[str, Callable[[World], Any]] = {
    "rank": lambda world: world.rank,
    "local_rank": lambda world: world.local_rank,
    "world_size": lambda world: world.size,
    "zero_level": lambda world: world.zero_level,
    "loss_scale_factor": lambda world: world.loss_scale_factor,
    "loss_scale_steps": lambda world: world.loss_scale_steps,
    "device": lambda world: world.device,
    "zero_rank": lambda world: world.rank,
    "zero_size": lambda world: world.size,
    "tp_rank": lambda world: 0,
    "tp_size": lambda world: 1,
    "tp_zero_rank": lambda world: world.rank,
    "tp_zero_size": lambda world: world.size,
    "pipe_size": lambda world: 1,
    "pipe_enabled": lambda world: False,
}
_OBJECTS: dict[str, Callable[[World], Any]] = {
    "comm": lambda world: world, "zero_comm": lambda world: world, "calc_stream": _stream, "load_stream": _stream,
}  # fmt: skip
_READ = _VALUES | _OBJECTS


class Config(Mapping):
    """A read-only mapping with the properties of this process's world.

    Before `init_distributed` only `initialized` can be read; it is False. The keys are:

    * rank, local_rank, world_size, zero_level, loss_scale_factor, loss_scale_steps, device, initialized.
    * The properties of BMTrain's process groups. zero_rank, zero_size, tp_zero_rank and tp_zero_size describe the group
      of all ranks; tp_rank, tp_size, pipe_size and pipe_enabled describe a group of this rank alone.
    * comm and zero_comm: values for the argument `comm` of collectives. Both mean all ranks.
    * calc_stream and load_stream: the device's current stream. Communication synchronizes with it automatically.
    """

    def __getitem__(self, key: str) -> Any:
        if key == "initialized":
            return _initialized()
        if key not in _READ:
            raise KeyError(f"config has no key {key!r}: of BMTrain's keys it has only {', '.join(self)}")
        return _READ[key](current_world())

    def __iter__(self) -> Iterator[str]:
        return iter((*_READ, "initialized"))

    def __contains__(self, key: object) -> bool:
        return key in (*_READ, "initialized")

    def __len__(self) -> int:
        return len(_READ) + 1

    def __setitem__(self, key: str, value: Any) -> None:
        raise TypeError(f"config is read-only: pass {key!r} to init_distributed, auto_wrap or CheckpointBlock instead.")

    def __repr__(self) -> str:
        return f"Config({ {key: self[key] for key in _VALUES} if _initialized() else 'before init_distributed' })"


def _initialized() -> bool:
    """Return whether `init_distributed` has been called."""
    try:
        current_world()
    except RuntimeError:
        return False
    return True


config = Config()
