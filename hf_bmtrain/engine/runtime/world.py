"""The World: the ranks that train together, seen from this process.

Apart from caches, the World is the only global state of the package.
"""

from __future__ import annotations

import sys
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
from ..comm.communicator import Communicator, Gather, OpenGroup
from ..comm.object_comm import ObjectComm
from .monitor import Monitor

if TYPE_CHECKING:  # at run time, these imports would be circular, because `blocks` and `sharding` import `runtime`
    from ..blocks.recompute import LayerFeatures
    from ..blocks.schedule import ForwardDepth, Schedule
    from ..sharding.storage import StorageKind


class BufferCount:
    """Counts the flat buffers (1-D tensors of parameters) that this process creates, to number them from 1.

    All ranks create their buffers in the same order, so a buffer has the same number on every rank. The collective log
    identifies a buffer by this number.

    Attributes:
        made: the number of flat buffers created so far. It is also the number of the newest buffer.
    """

    made = 0


class SavedState(NamedTuple):
    """Two functions with which a feature of the package saves an object in checkpoints and loads it again.

    For each feature that needs this, `init_distributed` adds a SavedState to `World.saved_states`. Both functions are
    collective: every rank must call them.

    Attributes:
        save: called when a checkpoint is saved, with the world and the model. Returns the object to store.
        load: called when a checkpoint is loaded, with the world, the model and the stored object, or with {} if the
            checkpoint contains no such object.
    """

    save: Callable[[World, torch.nn.Module], Any]
    load: Callable[[World, torch.nn.Module, Any], None]


@dataclass(frozen=True)
class Grid:
    """The division of all ranks into tensor-parallel groups, each of `size` consecutive ranks.

    Attributes:
        size: the number of ranks of a group.
        place: this rank's index in its group.
        groups: the number of groups.
        group: the index of this rank's group.
        together: the communicator of this rank's group.
        across: the communicator of the ranks, one in each group, that have the same index in their groups as this rank.
    """

    size: int
    place: int
    groups: int
    group: int
    together: Communicator
    across: Communicator


@dataclass(frozen=True)
class World:
    """The ranks that train together, with this process's rank, device and communicators.

    `init_distributed` creates the World of all ranks, and `current_world` returns it. With tensor parallelism, there is
    a second World, for the parts of split tensors. It contains only the ranks that have the same part as this rank. Its
    `rank` is this rank's index among these ranks, and its `size` is their number. Its `gather`, `reduce`, `shards`,
    `shard_group` and `control` connect only these ranks.

    Attributes:
        rank: the rank of this process, 0 to size - 1.
        size: the number of ranks.
        local_rank: this process's index on its host.
        device: the device on which this rank computes and stores its shards.
        gather: the communicator of these ranks for all-gathers and broadcasts.
        reduce: the communicator of these ranks for reductions. Its operations do not wait for those of `gather`.
        shards: the object that allocates the shards of flat buffers, and all-gathers them with collectives or by peer
            copies.
        shard_group: the communicator of the ranks that store different shards, for sums over all shards, such as
            gradient norms. These are all ranks, or those of one host if every host stores all shards. A rank's index
            in this communicator is the index of its shard, which may differ from `rank`. Its `broadcast` always reaches
            all ranks of the world, even if its other collectives stay inside a host.
        control: exchanges Python objects between the ranks.
        monitor: finds out what is wrong on other ranks, for example that they issue different operations.
        inside: counts the nested forwards of layers and models that are running.
        schedule: decides in forward and backward when blocks (transformer layers) are unsharded and resharded, and when
            their gradients are reduced.
        layer_features: creates, for each new block, the objects that decide when and how its forward is recomputed.
        zero_level: 3 frees the full parameters of a block between its forward and its backward, and 2 keeps them.
            `auto_wrap` and CheckpointBlock use another value if one is passed to them.
        loss_scale_factor: the factor by which an OptimManager multiplies or divides its loss scale, unless it is
            created with another factor.
        loss_scale_steps: the number of steps in a row without overflow after which an OptimManager raises its loss
            scale, unless it is created with another number.
        open_group: a collective function `(size, stride=1)` that divides all ranks into groups, and returns the
            communicator of this rank's group. A group has `size` ranks, each `stride` after the previous one. With
            size 2 and stride 4, for example, ranks 1 and 5 form a group.
        saves_shards: whether this rank writes its shards to checkpoints. Of the ranks that store the same shard, only
            one does.
        norms: the communicator for gradient norms and for the search for inf and nan; None means `shard_group`. It is
            set only in the second World of tensor parallelism. It connects all ranks, because norms and searches must
            cover all parts.
        grid: the tensor-parallel groups; None without tensor parallelism.
        split_kind: a function that returns the StorageKind of parameters with `tp_mode=True`. The StorageKind defines
            how and over which ranks these parameters are sharded. The function's argument is the dimension on which
            they are split over a tensor-parallel group, or -1 if they are not split. None without tensor parallelism.
        poison: whether to fill memory with NaN before it is written and when it is freed. For debugging: code that
            reads the memory too early or too late then computes NaN.
        buffers: counts the flat buffers.
        kept: {folder of checkpoints: what `save_state` keeps for the next checkpoint in this folder, such as the host
            memory for copies}.
        copying: one event for each checkpoint that a thread is saving, set when the values have been copied. Before an
            optimizer modifies weights, the host waits for all these events.
        saved_states: {key in the checkpoint: the functions with which a feature saves and loads its object}.
        device_memory: memory statistics of the device, or None on the CPU.
    """

    rank: int
    size: int
    local_rank: int
    device: torch.device
    gather: Communicator
    reduce: Communicator
    shards: Gather
    shard_group: Communicator
    control: ObjectComm
    monitor: Monitor
    inside: ForwardDepth
    schedule: Schedule
    layer_features: LayerFeatures
    zero_level: int
    loss_scale_factor: float
    loss_scale_steps: int
    open_group: OpenGroup
    saves_shards: bool = True
    poison: bool = False
    norms: Communicator | None = None
    grid: Grid | None = None
    split_kind: Callable[[int], StorageKind] | None = None
    buffers: BufferCount = field(default_factory=BufferCount)
    kept: dict[Path, Any] = field(default_factory=dict)
    copying: set[threading.Event] = field(default_factory=set)
    saved_states: dict[str, SavedState] = field(default_factory=dict)
    device_memory: DeviceMemory | None = None

    @property
    def accelerator(self) -> Any:
        """Accelerate's AcceleratorState, or None if no Accelerator exists in this process.

        It contains the Accelerator's settings. A sharded model reads them, for example, to run its forward in the same
        mixed precision, and to refuse an Accelerator that would shard the model too.

        The program, or a library such as Trainer, may create an Accelerator at any time. Accelerate is not imported
        here: if the program has imported it, its state is found in `sys.modules`.
        """
        module = sys.modules.get("accelerate.state")
        return None if module is None or not module.AcceleratorState._shared_state else module.AcceleratorState()

    def barrier(self, occasion: str, seconds: float | None = None) -> None:
        """Wait until every rank has called this, and check that all ranks have issued the same operations so far.

        Collective: every rank must call it.

        Args:
            occasion: the operation that the ranks are about to start, for messages. It must be the same on all ranks.
            seconds: the maximum time to wait. None: 5 s more than the timeout of `init_distributed`.

        Raises:
            RuntimeError: a rank did not call this in time. The message names it.
            RuntimeError: a rank called this with a different occasion. The message names it.
            RuntimeError: a rank has issued operations that differ from this rank's, so results are wrong. The message
                names it.
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
                raise RuntimeError(
                    f"rank {self.rank}: before '{occasion}', the ranks compared the collective operations that they "
                    f"have started so far, and these differ: {problem}"
                )

    def gather_objects(self, value: Any) -> list[Any]:
        """Return a list of the objects that the ranks pass, in rank order. Collective: every rank must call it.

        Args:
            value: this rank's object, which must be picklable.
        """
        return self.control.gather(value)

    def check_same_on_all_ranks(
        self, occasion: str, facts: Mapping[str, Any], may_differ: Mapping[str, Any] | None = None
    ) -> None:
        """Check that all ranks pass the same facts in the same order. Collective: every rank must call it.

        Strings are compared directly, and other values by their `repr`. To save time, the ranks first exchange one hash
        each, and the facts themselves only if the hashes differ.

        Args:
            occasion: the operation that the ranks are about to start, for the message.
            facts: the values that must be equal, by name.
            may_differ: values that are not compared, but are shown in the message to explain a difference, such as the
                file that each rank has read. Their names must be the same on every rank.

        Raises:
            RuntimeError: facts differ. Every rank raises the same message.
        """
        agree(self.control, occasion, facts, may_differ)

    def check_comm(self, comm: Any) -> None:
        """Raise NotImplementedError if the argument `comm` of a BMTrain function does not select all ranks.

        In BMTrain, `comm` selects a group of ranks. Functions that accept it here for compatibility, but always use all
        ranks, call this method. It is not collective.

        Args:
            comm: the argument that the user passed. None and this World (`bmt.config["comm"]`) select all ranks.

        Raises:
            NotImplementedError: `comm` is anything else.
        """
        if comm is not None and comm is not self:
            raise NotImplementedError(
                f"comm={comm!r} is not supported. To use all ranks, leave comm out or pass bmt.config['comm']. With "
                "tp_size, some functions also accept bmt.config['tp_comm'] and bmt.config['tp_zero_comm']."
            )

    def raise_everywhere(self, what: str, problem: str | None) -> None:
        """Raise an error on every rank if any rank has a problem, so that no rank waits for one that has failed.

        Collective: every rank must call it.

        Args:
            what: the beginning of the error message, such as the operation that failed.
            problem: a description of this rank's problem, or None if it has none.

        Raises:
            RuntimeError: at least one rank has a problem. The message names these ranks and their problems.
        """
        problems = self.gather_objects(problem)
        report = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(problems) if text is not None)
        if report:
            raise RuntimeError(f"{what}. {report}") from None

    @contextmanager
    def raising_everywhere(self, what: str) -> Iterator[None]:
        """Run the body of the `with` statement, and raise an error on every rank if it fails on any rank.

        Collective: every rank must enter it. The body itself need not be collective.

        Args:
            what: the beginning of the error message, such as the operation that failed.

        Raises:
            RuntimeError: the body has raised an Exception on at least one rank. The message names these ranks and their
                exceptions.
        """
        problem = None
        try:
            yield
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        self.raise_everywhere(what, problem)

    def on_first_rank(self, what: str, call: Callable[[], Any]) -> Any:
        """Call a function on rank 0 only, and return its result on all ranks.

        Used for decisions that depend on files, because a network file system may show files to some ranks later than
        to others. Collective: every rank must call it. The function must not be collective.

        Args:
            what: the beginning of the error message, such as the operation that failed.
            call: a function without arguments. Its result must be picklable.

        Returns:
            The result of `call` on rank 0.

        Raises:
            RuntimeError: on every rank, if `call` has raised an Exception on rank 0. The message contains it.
        """
        with self.raising_everywhere(what):
            found = call() if self.rank == 0 else None
        return self.control.broadcast_object(found)


_world: World | None = None


def current_world() -> World:
    """Return the world of this process: the ranks that train together, with this rank's device and communicators.

    Raises:
        RuntimeError: `init_distributed` has not been called.
    """
    if _world is None:
        raise RuntimeError("hf_bmtrain is not initialized. Call hf_bmtrain.init_distributed() first.")
    return _world


def enter_world(world: World) -> None:
    """Make `world` the world of this process, which `current_world` returns. `init_distributed` calls this.

    Raises:
        RuntimeError: the process already has a world.
    """
    global _world
    check_no_world()
    _world = world


def check_no_world() -> None:
    """Check that `init_distributed` has not been called before. A process may call that function only once.

    Raises:
        RuntimeError: it has already been called in this process.
    """
    if _world is not None:
        raise RuntimeError(
            f"init_distributed has already been called; this is rank {_world.rank} of {_world.size}. Call it once, at "
            "the start of the program."
        )


@contextmanager
def simulated(world: World) -> Iterator[None]:
    """Context manager inside which `current_world` returns `world`.

    Used to predict the memory of a training step: the step is simulated on the meta device, with a separate world.

    Args:
        world: the simulated world.
    """
    global _world
    present, _world = _world, world
    try:
        yield
    finally:
        _world = present


def rank() -> int:
    """Return this process's rank, from 0 to world_size() - 1. It is 0 before `init_distributed`, as in BMTrain."""
    return 0 if _world is None else _world.rank


def world_size() -> int:
    """Return the number of processes that train together. It is 1 before `init_distributed`, as in BMTrain."""
    return 1 if _world is None else _world.size


def print_rank(*values, rank: int = 0, **options) -> None:
    """Print on one rank, and do nothing on the others.

    Before `init_distributed`, every process is rank 0, as in BMTrain.

    Args:
        *values: the values to print.
        rank: the rank that prints.
        **options: keyword arguments of `print`.

    Raises:
        TypeError: `rank` is not an integer.
        ValueError: `rank` is negative.
    """
    expect_number("rank", rank, "at least 0", lambda number: number >= 0, integer=True)
    if rank == (0 if _world is None else _world.rank):
        print(*values, **options)


def synchronize() -> None:
    """Wait until every rank has called this, and every rank's device has completed the work queued on it before.

    Collective: every rank must call it. Training does not need it. Call it, for example, before you read the clock, or
    before a rank reads a file that another rank has written.

    If all ranks have deleted a model whose shards were allocated outside torch's allocator, this function also frees
    the memory of these shards.

    Raises:
        RuntimeError: a rank did not call this in time. The message names it.
        RuntimeError: a rank has previously issued operations that differ from this rank's. The message names it.
    """
    world = current_world()
    world.schedule.wait_for_readers()
    wait_loader()
    world.barrier("synchronize")
    world.schedule.free_dropped()


def wait_loader() -> None:
    """Wait until this rank's device has completed all queued work, so that the host does not run far ahead of it.

    Scripts written for BMTrain call this, so that they do not load many batches ahead. With this package, training
    scripts need not call it. It is not collective.
    """
    world = current_world()
    torch.get_device_module(world.device).synchronize(world.device)


def check_zero_level(zero_level: int) -> None:
    """Check that an argument `zero_level`, such as that of `init_distributed` or `auto_wrap`, is 2 or 3.

    Raises:
        ValueError: the argument is neither 2 nor 3.
    """
    if not isinstance(zero_level, int) or zero_level not in (2, 3):
        raise ValueError(
            f"zero_level must be 2 (parameters stay unsharded from forward to backward) or 3 (they are resharded in "
            f"between), not {zero_level!r}."
        )


def refuse_parallelism(what: str) -> NoReturn:
    """Raise NotImplementedError for an option of BMTrain that requests pipeline parallelism, which is not supported.

    what: the option, as the user wrote it, for the message.
    """
    raise NotImplementedError(
        f"{what} is not supported: hf_bmtrain shards weights, gradients and optimizer state over all ranks (ZeRO-2/3), "
        "and each rank computes all layers. Leave pipe_size at 1; PipelineTransformerBlockList then runs all its "
        "blocks on every rank. To split individual layers over ranks, use tp_size."
    )
