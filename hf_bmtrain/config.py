"""The world of this process as BMTrain's `config` mapping."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .runtime.world import current_world

_ONE = ("pipe_size", "tp_size")
_KEYS = ("rank", "local_rank", "world_size", "zero_level", "loss_scale_factor", "loss_scale_steps", "device", *_ONE)


class Config(Mapping):
    """A read-only view of the world of this process.

    Keys: rank, local_rank, world_size, zero_level, loss_scale_factor, loss_scale_steps, device, pipe_size and tp_size
    (both 1), initialized. Before `init_distributed` only `initialized` can be read; it is False.
    """

    def __getitem__(self, key: str) -> Any:
        if key == "initialized":
            return _initialized()
        if key not in _KEYS:
            raise KeyError(f"{key}: config has {', '.join(self)}; streams and communicators are not public")
        world = current_world()
        return 1 if key in _ONE else world.size if key == "world_size" else getattr(world, key)

    def __iter__(self) -> Iterator[str]:
        return iter((*_KEYS, "initialized"))

    def __contains__(self, key: object) -> bool:
        return key in (*_KEYS, "initialized")

    def __len__(self) -> int:
        return len(_KEYS) + 1

    def __setitem__(self, key: str, value: Any) -> None:
        raise TypeError(f"config is read only: give {key!r} to init_distributed, auto_wrap or CheckpointBlock.")

    def __repr__(self) -> str:
        return f"Config({dict(self) if _initialized() else 'before init_distributed'})"


def _initialized() -> bool:
    try:
        current_world()
    except RuntimeError:
        return False
    return True


config = Config()
