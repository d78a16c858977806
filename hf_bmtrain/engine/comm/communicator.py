"""Collectives over flat tensors: the contract, gloo, and one process. `nccl` implements them for GPUs.

The operations of a `Communicator` run in the order in which they were issued, asynchronously to the computation. Each
returns a `Ticket`; wait for it before reading the result or freeing an operand. Every rank issues the operations of
all communicators in the same order, from one thread at a time.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from .collective_log import CollectiveLog, code
from .streams import DONE, Ticket

# torch 2.13 renames the collective and warns about its old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_ABORT_SECONDS = 1.0
_CHECK_SECONDS = 1.0  # how often a wait looks whether the ranks have been found to differ
_DIAGNOSIS_SECONDS = 5.0  # an operation fails at once if another process has ended, before that is found out
PATIENCE = 5.0
"""Seconds beyond the timeout, so that the watch ends the wait, which knows more."""
_LATER = timedelta(seconds=60)  # for which gloo waits longer, so that the reason comes from here

Ranges = Sequence[tuple[int, int]]


class Communicator(Protocol):
    """An ordered queue of collectives between `size` ranks. Tensors are contiguous and on this rank's device.

    journal: of the operations, to which callers may add what they are for.
    """

    rank: int
    size: int
    collective_log: CollectiveLog

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor) -> Ticket:
        """Fill `full` (size * n,) with every rank's `shard` (n,), in rank order."""
        ...

    def reduce_scatter_mean(self, shard: torch.Tensor, full: torch.Tensor) -> Ticket:
        """Fill `shard` (n,) with this rank's part of the mean of `full` (size * n,) over ranks."""
        ...

    def all_reduce(self, tensor: torch.Tensor, maximum: bool = False) -> Ticket:
        """Replace `tensor` by its sum over ranks, or by its maximum."""
        ...

    def broadcast(self, tensor: torch.Tensor, root: int) -> Ticket:
        """Replace `tensor` by that of rank `root`."""
        ...

    def unfinished(self) -> bool:
        """Return whether an operation that was issued is not complete. From any thread."""
        ...

    def close(self, abort: bool) -> None:
        """Destroy the communicator. With `abort`, do not wait for other ranks: gloo waits at most one second for them.

        Abort those of a GPU together, see `nccl.abort_all`.
        """


class Gather(Protocol):
    """Allocates shards and gathers them into whole buffers. communicator: orders all gathers and collectives.

    By default `wait_for_readers`, `announce` and `free_dropped` do nothing, and shards are in torch's memory.
    """

    communicator: Communicator

    @property
    def mapped_bytes(self) -> int:
        """Bytes of this rank's shards outside torch's allocator, which its statistics do not include."""
        return 0

    def allocate(
        self, numel: int, dtype: torch.dtype, device: torch.device, wait_for_update: Callable[[], None]
    ) -> torch.Tensor:
        """Return a shard of zeros (numel,) that can be gathered. Collective.

        wait_for_update: makes the current stream wait for any asynchronous update that still writes the shard.
        """
        ...

    def gather(self, full: torch.Tensor, shard: torch.Tensor, own: Ranges) -> Ticket:
        """Fill `full` (size * n,) with every rank's `shard` (n,), in rank order.

        own: ranges of this rank's `shard` that are read from `full`; the rest of its part may stay unfilled.
        """
        ...

    def is_collective(self, shard: torch.Tensor) -> bool:
        """Return whether `gather` of this shard is a collective; True by default."""
        return True

    def wait_for_readers(self) -> None:
        """Make the current stream wait until no rank is gathering, so that shards may be written. Collective."""

    def announce(self, shard: torch.Tensor, update: Ticket) -> None:
        """Make later gathers of `shard` wait for `update`, the asynchronous write to it on each rank. Collective."""

    def free_dropped(self) -> None:
        """Free the memory of shards from `allocate` that are no longer referenced. Collective."""


class CollectiveGather(Gather):
    """Gathers by all-gather, which ends only after all ranks have entered it: shards need no other protection."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator

    def allocate(
        self, numel: int, dtype: torch.dtype, device: torch.device, wait_for_update: Callable[[], None]
    ) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype, device=device)

    def gather(self, full: torch.Tensor, shard: torch.Tensor, own: Ranges) -> Ticket:
        return self.communicator.all_gather(full, shard)


class SingleProcess:
    """The communicator of a world of one rank. Operations are copies, or nothing, and complete at once."""

    rank, size = 0, 1

    def __init__(self) -> None:
        self.collective_log = CollectiveLog("single")

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor) -> Ticket:
        full.copy_(shard)
        return DONE

    def reduce_scatter_mean(self, shard: torch.Tensor, full: torch.Tensor) -> Ticket:
        shard.copy_(full)
        return DONE

    def all_reduce(self, tensor: torch.Tensor, maximum: bool = False) -> Ticket:
        return DONE

    def broadcast(self, tensor: torch.Tensor, root: int) -> Ticket:
        return DONE

    def unfinished(self) -> bool:
        return False

    def close(self, abort: bool) -> None:
        pass


class _GlooTicket:
    def __init__(
        self,
        label: str,
        work: dist.Work,
        under_way: set[dist.Work],
        collective_log: CollectiveLog,
        seconds: float,
        finish: Callable | None,
    ) -> None:
        self.label, self._seconds = label, seconds
        self._work, self._under_way, self._collective_log, self._finish = work, under_way, collective_log, finish

    def wait(self) -> None:
        try:
            wait_for(self._work, self._collective_log, self._seconds)
        except RuntimeError as error:
            self._collective_log.refuse()
            raise RuntimeError(
                f"{self.label} failed: another rank ended, raised, or did not reach this operation "
                f"within the timeout. Look for the first error among the ranks' logs. ({error})"
            ) from error
        finally:
            self._under_way.discard(self._work)
        if self._finish is not None:
            self._finish()


class GlooCommunicator:
    """A communicator on CPU. Operations run asynchronously in gloo's threads, so the control flow equals that on GPUs.

    Means are summed in float32 (float64 for float64) in rank order: equal on every rank and in every run.
    """

    def __init__(self, name: str, timeout: timedelta) -> None:
        self._name, self.collective_log, self._seconds = name, CollectiveLog(name), timeout.total_seconds() + PATIENCE
        self._group: Any = dist.new_group(backend="gloo", timeout=timeout + _LATER)
        self._under_way: set[dist.Work] = set()
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor) -> Ticket:
        self.collective_log.note(code("all-gather", full.numel()))
        work = _all_gather(as_bytes(full), as_bytes(shard), group=self._group, async_op=True)
        return self._ticket("all_gather", shard, work)

    def reduce_scatter_mean(self, shard: torch.Tensor, full: torch.Tensor) -> Ticket:
        self.collective_log.note(code("reduce-scatter", full.numel()))
        received = torch.empty_like(full)
        work = dist.all_to_all_single(as_bytes(received), as_bytes(full), group=self._group, async_op=True)
        wide = torch.promote_types(shard.dtype, torch.float32)

        def finish() -> None:
            parts = received.view(self.size, -1)
            total = parts[0].to(wide, copy=True)
            for part in parts[1:]:
                total += part
            shard.copy_(total.div_(self.size))

        return self._ticket("reduce_scatter", shard, work, finish)

    def all_reduce(self, tensor: torch.Tensor, maximum: bool = False) -> Ticket:
        self.collective_log.note(code("all-reduce", tensor.numel()))
        op = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
        work = dist.all_reduce(tensor, op, group=self._group, async_op=True)
        return self._ticket("all_reduce", tensor, work)

    def broadcast(self, tensor: torch.Tensor, root: int) -> Ticket:
        self.collective_log.note(code("broadcast", tensor.numel()))
        work = dist.broadcast(as_bytes(tensor), root, group=self._group, async_op=True)
        return self._ticket("broadcast", tensor, work)

    def unfinished(self) -> bool:
        return any(not work.is_completed() for work in list(self._under_way))

    def close(self, abort: bool) -> None:
        end = time.monotonic() + _ABORT_SECONDS
        if abort and not all(comes(work, end - time.monotonic()) or work.is_completed() for work in self._under_way):
            keep_group(self._group)
            return
        self._under_way.clear()
        end_group(self._group)
        self._group = None

    def _ticket(self, operation: str, tensor: torch.Tensor, work, finish=None) -> Ticket:
        self._under_way.difference_update([other for other in self._under_way if other.is_completed()])
        self._under_way.add(work)  # until it has been waited for
        label = f"rank {self.rank}: {operation} of {tensor.numel()} × {tensor.dtype} on communicator '{self._name}'"
        return _GlooTicket(label, work, self._under_way, self.collective_log, self._seconds, finish)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor's memory as uint8, which all collectives accept, with its own version counter."""
    return tensor.detach().data.view(-1).view(torch.uint8)


# -- waiting for gloo, and ending its groups --------------------------------------------------------------------------


def wait_for(work: Any, collective_log: CollectiveLog, seconds: float) -> None:
    """Wait until an operation of gloo is complete, at most `seconds`.

    Raises RuntimeError if it fails, and the journal's problem as soon as there is one.
    """
    end = time.monotonic() + seconds
    while not work.is_completed():
        left = end - time.monotonic()
        if left <= 0:
            raise RuntimeError(f"Not all ranks came within {seconds:.0f} s.")
        if comes(work, min(left, _CHECK_SECONDS)):
            return
        collective_log.check()
    with explained_by(collective_log):
        work.wait()  # raises its error


@contextlib.contextmanager
def explained_by(collective_log: CollectiveLog) -> Iterator[None]:
    """Replace an error of gloo or NCCL by the journal's problem, if the watch finds one within seconds."""
    try:
        yield
    except RuntimeError:
        collective_log.check(_DIAGNOSIS_SECONDS)
        raise


def comes(work: Any, seconds: float) -> bool:
    """Return whether an operation succeeds within `seconds`."""
    try:
        work.wait(timedelta(seconds=max(seconds, 0.001)))
    except RuntimeError:
        return False
    return True


def keep_group(group: Any) -> None:
    """Never destroy a process group whose threads wait for another rank: its destructor would wait for them."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def end_group(group: Any) -> None:
    """Destroy a process group. Its threads end when the caller drops its own reference as well.

    They must end before the interpreter: a gloo thread that frees the tensors of its last operation while the
    interpreter shuts down aborts the process ("terminate called without an active exception").
    """
    with contextlib.suppress(ValueError):  # already destroyed with the default group
        dist.destroy_process_group(group)
