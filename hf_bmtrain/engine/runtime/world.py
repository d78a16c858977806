"""The world: the processes that train together. The only global of the library."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch

from ..base.arguments import expect_number
from ..base.device_memory import DeviceMemory
from ..comm.agreement import agree
from ..comm.communicator import Communicator, Gather
from ..comm.object_comm import ObjectComm
from .monitor import Monitor

if TYPE_CHECKING:  # the schedule is to the right of this folder
    from ..blocks.recompute import LayerFeatures
    from ..blocks.schedule import ForwardDepth, Schedule


class BufferCount:
    """The number of flat buffers that a world has made, the same on every rank."""

    made = 0


class SavedState(NamedTuple):
    """What a feature keeps in checkpoints, by functions of a model. Both are collective.

    save: returns it. load: takes what `save` returned, or nothing where a checkpoint has none.
    """

    save: Callable[[World, torch.nn.Module], Any]
    load: Callable[[World, torch.nn.Module, Any], None]


@dataclass(frozen=True)
class World:
    """The ranks that train together, and this rank's place, device and communicators.

    Attributes:
        rank: 0 to size - 1.
        size: the number of ranks.
        local_rank: this rank's number on its host.
        device: where this rank computes and stores its shards.
        gather: the communicator for all-gathers of flat tensors.
        reduce: the communicator for reductions of flat tensors.
        shards: allocates and all-gathers shards.
        control: exchanges Python objects.
        monitor: finds out whether the ranks issue different operations.
        inside: how deep the running code is inside forwards.
        schedule: what is open in the current forward and backward.
        layer_features: what blocks are made with.
        zero_level: the default of `auto_wrap`.
        loss_scale_factor: the default of OptimManager.
        loss_scale_steps: the default of OptimManager.
        poison: a debug switch, which fills unfilled and freed memory with NaN.
        buffers: the number of flat buffers.
        kept: by folder, what saves its checkpoints.
        copying: an event for each checkpoint whose values are being copied; optimizers wait for them before they write
            weights.
        saved_states: what features save in checkpoints, by the key there.
        device_memory: counts the bytes of the device; None on the CPU, where they are not known.
    """

    rank: int
    size: int
    local_rank: int
    device: torch.device
    gather: Communicator
    reduce: Communicator
    shards: Gather
    control: ObjectComm
    monitor: Monitor
    inside: ForwardDepth
    schedule: Schedule
    layer_features: LayerFeatures
    zero_level: int
    loss_scale_factor: float
    loss_scale_steps: int
    poison: bool = False
    buffers: BufferCount = field(default_factory=BufferCount)
    kept: dict[Path, Any] = field(default_factory=dict)
    copying: set[threading.Event] = field(default_factory=set)
    saved_states: dict[str, SavedState] = field(default_factory=dict)
    device_memory: DeviceMemory | None = None

    def barrier(self, occasion: str, seconds: float | None = None) -> None:
        """Wait for every rank, and compare what the ranks have issued since the last time. Collective.

        Args:
            occasion: what the ranks are about to do, for messages; it must be equal on all ranks.
            seconds: how long to wait; None for the timeout of `init_distributed`.

        Raises:
            RuntimeError: a rank does not come, which is named, is at another occasion, or the ranks have issued
                different operations before, whose results are wrong.
        """
        try:
            self.control.barrier(occasion, seconds)
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self.rank}: '{occasion}' needs every rank: call it on all of them, in the same order, not on "
                f"rank 0 alone. {error if self.monitor.problem else self.monitor.missing()}"
            ) from error
        for rank, theirs in enumerate(self.gather_objects(self.monitor.excerpts())):
            problem = self.monitor.compare(rank, theirs)
            if problem is not None:
                raise RuntimeError(f"rank {self.rank}: '{occasion}' found that {problem}")

    def gather_objects(self, value: Any) -> list[Any]:
        """Return the objects of all ranks, in rank order. Collective.

        Args:
            value: any object that can be pickled.
        """
        return self.control.gather(value)

    def check_same_on_all_ranks(
        self, occasion: str, facts: Mapping[str, Any], may_differ: Mapping[str, Any] | None = None
    ) -> None:
        """Check that all ranks have equal facts, in one order. Collective.

        Two values are equal if their `repr`s are. If all are, the ranks exchange one digest.

        Args:
            occasion: what the ranks are about to do, for the message.
            facts: names and values that must be equal.
            may_differ: what the message shows besides, such as the file that each rank has read.

        Raises:
            RuntimeError: on every rank, with the same message, if facts differ.
        """
        agree(self.control, occasion, facts, may_differ)

    def check_comm(self, comm: Any) -> None:
        """Check an argument `comm` of BMTrain's.

        Args:
            comm: None or this world, which stands for all ranks.

        Raises:
            NotImplementedError: it is anything else.
        """
        if comm is not None and comm is not self:
            raise NotImplementedError(
                f"comm={comm!r}: collectives are over all ranks. Leave comm out, or pass bmt.config['comm']."
            )

    def raise_everywhere(self, what: str, problem: str | None) -> None:
        """Raise an error on every rank if one has a problem, so that the others do not hang. Collective.

        Args:
            what: the beginning of the message.
            problem: this rank's problem, or None.

        Raises:
            RuntimeError: a rank has a problem. The message names the ranks and their problems.
        """
        problems = self.gather_objects(problem)
        report = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(problems) if text is not None)
        if report:
            raise RuntimeError(f"{what}. {report}")


_world: World | None = None


def current_world() -> World:
    """Return the world of this process.

    Raises:
        RuntimeError: `init_distributed` has not been called.
    """
    if _world is None:
        raise RuntimeError("hf_bmtrain is not initialised: call hf_bmtrain.init_distributed() first.")
    return _world


def enter_world(world: World) -> None:
    """Make `world` the world of this process. Raises RuntimeError if it has one."""
    global _world
    check_no_world()
    _world = world


def check_no_world() -> None:
    """Raise RuntimeError if this process has a world."""
    if _world is not None:
        raise RuntimeError(
            f"init_distributed was called before: this is rank {_world.rank} of {_world.size}. Call it once, at the "
            "start of the program."
        )


@contextmanager
def simulated(world: World) -> Iterator[None]:
    """Make `world` the current one under `with`, for a simulation on the meta device."""
    global _world
    present, _world = _world, world
    try:
        yield
    finally:
        _world = present


def rank() -> int:
    """Return this process's rank, 0 ... world_size() - 1."""
    return current_world().rank


def world_size() -> int:
    """Return the number of processes that train together."""
    return current_world().size


def print_rank(*values, rank: int = 0, **options) -> None:
    """Print on one rank; do nothing on the others.

    Args:
        *values: what `print` takes.
        rank: the rank that prints.
        **options: keywords of `print`.
    """
    expect_number("rank", rank, "at least 0", lambda number: number >= 0, integer=True)
    if current_world().rank == rank:
        print(*values, **options)


def synchronize() -> None:
    """Wait until every rank has called this and this rank's device has finished all queued work. Collective.

    Frees the shards of models that every rank has dropped.
    """
    world = current_world()
    world.schedule.wait_for_readers()
    wait_loader()
    world.barrier("synchronize")
    world.schedule.free_dropped()


def wait_loader() -> None:
    """Wait until this rank's device has finished all queued work, so that a loader does not run ahead of it.

    Not collective. This library does not need it: all-gathers wait for their inputs by themselves.
    """
    world = current_world()
    torch.get_device_module(world.device).synchronize(world.device)


def check_zero_level(zero_level: int) -> None:
    """Raise ValueError unless `zero_level` is 2 or 3."""
    if not isinstance(zero_level, int) or zero_level not in (2, 3):
        raise ValueError(
            f"zero_level must be 2 (parameters stay whole from forward to backward) or 3 (freed between them), "
            f"not {zero_level!r}."
        )


def refuse_parallelism(what: str) -> NoReturn:
    """Raise NotImplementedError for `what`, an option of BMTrain's that splits a model in another way than ZeRO."""
    raise NotImplementedError(
        f"{what} is not offered: hf_bmtrain splits weights, gradients and optimizer state over all ranks (ZeRO-2/3) "
        "and keeps every layer's computation whole. Leave pipe_size and tp_size at 1, and use bmt.nn.Linear or any "
        "torch layer."
    )
