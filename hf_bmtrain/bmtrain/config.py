"""`config`: a read-only mapping with this process's rank, world size, device and settings, under BMTrain's keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ..engine.runtime.world import Grid, World, current_world


def _stream(world: World) -> Any:
    """Return the current stream (such as a torch.cuda.Stream) of the device of `world`."""
    return torch.get_device_module(world.device).current_stream()


class Topology:
    """The position of this rank in each kind of process group that BMTrain has: the value of `config["topology"]`.

    hf_bmtrain has no pipeline parallelism, so every rank is a pipeline of its own, with one stage.

    Attributes:
        rank: this process's rank.
        stages: the number of stages of a pipeline, always 1.
        pipe_idx: the index of this rank's pipeline, equal to `rank`.
        stage_id: the index of this rank's stage in its pipeline, always 0.
        tp_id: this rank's index in its tensor-parallel group.
        tp_idx: the index of this rank's tensor-parallel group among all such groups.
        zero_idx: the index of the group of all ranks, always 0.
        zero_id: this rank's index in the group of all ranks, equal to `rank`.
        tp_zero_idx: the index of the group of ranks that have the same `tp_id` as this rank; equal to `tp_id`. If
            tensor parallelism splits a weight, all ranks of this group have the same part.
        tp_zero_id: this rank's index in that group.
        pp_zero_idx: the index of the group of ranks that have the same `stage_id` as this rank; equal to `stage_id`.
        pp_zero_id: this rank's index in that group, equal to `pipe_idx`.
        pp_tp_zero_idx: the index of the group of ranks that have the same `stage_id` and `tp_id` as this rank; equal to
            `tp_id`.
        pp_tp_zero_id: this rank's index in that group, equal to `tp_zero_id`.
    """

    def __init__(self, world: World) -> None:
        size, self.tp_id = (1, 0) if world.grid is None else (world.grid.size, world.grid.place)
        self.rank = self.pipe_idx = self.zero_id = self.pp_zero_id = world.rank
        self.stages, self.stage_id, self.zero_idx, self.pp_zero_idx = 1, 0, 0, 0
        self.tp_idx = self.tp_zero_id = self.pp_tp_zero_id = world.rank // size
        self.tp_zero_idx = self.pp_tp_zero_idx = self.tp_id

    def get_group_id(self, group_name: str) -> int:
        """Return the index of this rank's process group among all groups of the given kind.

        Args:
            group_name: the kind of process group. "pipe": pipelines. "zero": the group of all ranks. "tp":
                tensor-parallel groups. "tp_zero": groups of the ranks with the same index in their tensor-parallel
                groups.

        Raises:
            KeyError: `group_name` is none of these.
        """
        return {"pipe": self.pipe_idx, "zero": self.zero_idx, "tp_zero": self.tp_zero_idx, "tp": self.tp_idx}[
            group_name
        ]

    def get_group_rank(self, group_name: str) -> int:
        """Return this rank's index in its process group of the given kind.

        Args:
            group_name: the kind of process group. "pipe": pipelines. "zero": the group of all ranks. "tp":
                tensor-parallel groups. "tp_zero": groups of the ranks with the same index in their tensor-parallel
                groups.

        Raises:
            KeyError: `group_name` is none of these.
        """
        return {"pipe": self.stage_id, "zero": self.zero_id, "tp_zero": self.tp_zero_id, "tp": self.tp_id}[group_name]


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
    "tp_rank": lambda world: Topology(world).tp_id,
    "tp_size": lambda world: 1 if world.grid is None else world.grid.size,
    "tp_zero_rank": lambda world: Topology(world).tp_zero_id,
    "tp_zero_size": lambda world: world.size if world.grid is None else world.grid.groups,
    "pipe_size": lambda world: 1,
    "pipe_enabled": lambda world: False,
}
_OBJECTS: dict[str, Callable[[World], Any]] = {
    "comm": lambda world: world,
    "zero_comm": lambda world: world,
    "calc_stream": _stream,
    "load_stream": _stream,
    "topology": Topology,
}
_TOGETHER: dict[str, Callable[[Grid], Any]] = {
    "tp_comm": lambda grid: grid.together, "tp_zero_comm": lambda grid: grid.across,
}  # fmt: skip
_READ = _VALUES | _OBJECTS
_BEFORE = {"rank": 0, "local_rank": 0, "world_size": 1}  # the values before `init_distributed`


class Config(Mapping):
    """The class of `config`: a read-only mapping with properties of this process and of its process groups.

    Before `init_distributed`, only four keys can be read: `initialized` is False, and `rank`, `local_rank` and
    `world_size` are 0, 0 and 1, as in BMTrain. The keys are those of BMTrain:

    * initialized: whether `init_distributed` was called.
    * rank, local_rank and world_size: this process's rank, its index among the ranks of its host, and the number of
      ranks.
    * device: the torch.device of this process.
    * zero_level, loss_scale_factor and loss_scale_steps: the values of these arguments of `init_distributed`.
    * zero_rank and zero_size: this rank's index in the group of all ranks, and the size of that group. They are equal
      to rank and world_size.
    * tp_rank and tp_size: this rank's index in its tensor-parallel group, and the size of that group; 0 and 1 without
      tensor parallelism.
    * tp_zero_rank and tp_zero_size: this rank's index in the group of ranks that have the same tp_rank as this rank,
      and the size of that group. If tensor parallelism splits a weight, all ranks of this group have the same part.
    * topology: a `Topology`, which has further indices of this rank in groups.
    * pipe_size and pipe_enabled: 1 and False, because there is no pipeline parallelism.
    * comm and zero_comm: values for the argument `comm` of collectives, such as `distributed.all_reduce`. Both select
      all ranks.
    * tp_comm and tp_zero_comm: further values for the argument `comm`. tp_comm selects the ranks of this rank's
      tensor-parallel group, and tp_zero_comm selects all ranks with the same tp_rank. These two keys exist only with
      tensor parallelism.
    * calc_stream and load_stream: both are the device's current stream, such as a torch.cuda.Stream. Communication
      synchronizes with this stream automatically.
    """

    def __getitem__(self, key: str) -> Any:
        if key == "initialized":
            return _initialized()
        # The keys in _TOGETHER exist only with tensor parallelism.
        if key in _TOGETHER and (grid := current_world().grid) is not None:
            return _TOGETHER[key](grid)
        if key not in _READ:
            raise KeyError(f"config has no key {key!r}. Its keys are {', '.join(self)}")
        if key in _BEFORE and not _initialized():
            return _BEFORE[key]
        return _READ[key](current_world())

    def __iter__(self) -> Iterator[str]:
        return iter((*_READ, *self._together(), "initialized"))

    def __contains__(self, key: object) -> bool:
        return key in (*_READ, *self._together(), "initialized")

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _together(self) -> tuple[str, ...]:
        return tuple(_TOGETHER) if _initialized() and current_world().grid is not None else ()

    def __setitem__(self, key: str, value: Any) -> None:
        raise TypeError(
            f"config is read-only, so {key!r} cannot be set. To change a setting, pass it as an argument of "
            "init_distributed, auto_wrap or CheckpointBlock, if one of them has such an argument."
        )

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
