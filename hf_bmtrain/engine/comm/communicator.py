"""Collectives over flat tensors: the interface, an implementation with gloo, and one for a single rank.

The module `nccl` implements the interface for GPUs. The operations of a `Communicator` run in the order in which they
were issued, asynchronously to the computation. Each operation returns a `Ticket`. Call the ticket's `wait` before you
read the result or free an operand. Every rank must issue the operations of all communicators in the same order, from
one thread at a time.
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

# torch 2.13 renamed `all_gather_into_tensor` to `all_gather_single`, and warns about the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_ABORT_SECONDS = 1.0
_CHECK_SECONDS = 1.0  # interval at which a waiting rank checks its collective log for a problem
# After an operation has failed, wait this long for the monitor (the thread that watches the other ranks) to explain it.
_DIAGNOSIS_SECONDS = 5.0
PATIENCE = 5.0
"""The number of seconds that an operation waits beyond the timeout, so that the monitor (the thread that watches the
other ranks) reports the timeout first. Only the monitor can find out why a rank is missing."""
LATER = timedelta(seconds=60)  # added to gloo's own timeout, so that this package's error is raised first

Ranges = Sequence[tuple[int, int]]
Groups = Sequence[Sequence[int]]
"""The groups into which all ranks are divided, each as a list of its ranks."""


class Communicator(Protocol):
    """Interface of an object that runs collectives between all ranks, or between the ranks of a group.

    Each collective is asynchronous: the method starts the operation and returns a ticket, whose `wait` makes the
    current stream (without a GPU, the host) wait for the operation. Every rank must start the operations of all
    communicators in the same order, from one thread at a time. The operations of a communicator run in this order.
    Tensors are contiguous and on this rank's device.

    Attributes:
        rank: this rank's index in the communicator, 0 to size - 1.
        size: the number of ranks in the communicator.
        collective_log: the log of the operations. Callers may add entries that state the purpose of an operation.
    """

    rank: int
    size: int
    collective_log: CollectiveLog

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor) -> Ticket:
        """Start to fill `full` (size * n,) with the shards (n,) of all ranks, in rank order. Any dtype can be sent.

        Collective: every rank must call it. Call `wait` of the returned ticket before you use `full` or write `shard`.
        """
        ...

    def reduce_scatter_mean(self, shard: torch.Tensor, full: torch.Tensor) -> Ticket:
        """Start to average `full` (size * n,) over the ranks. `shard` (n,) gets this rank's part of the mean.

        Collective: every rank must call it. Call `wait` of the returned ticket before you use `shard` or write `full`.
        """
        ...

    def all_reduce(self, tensor: torch.Tensor, maximum: bool = False) -> Ticket:
        """Start to replace `tensor` on every rank by its elementwise sum, or maximum, over the ranks.

        Collective: every rank must call it. Call `wait` of the returned ticket before you use `tensor`.

        Args:
            tensor: the same shape and dtype on every rank, overwritten.
            maximum: whether to compute the maximum instead of the sum.
        """
        ...

    def all_reduce_mean(self, tensor: torch.Tensor) -> Ticket:
        """Start to replace the 1-D `tensor` on every rank by its elementwise mean over the ranks.

        Collective: every rank must call it. The result is bit-identical on all ranks. Call `wait` of the returned
        ticket before you use `tensor`.
        """
        ...

    def broadcast(self, tensor: torch.Tensor, root: int) -> Ticket:
        """Start to replace `tensor` on every rank by its values on the rank with index `root` in the communicator.

        Collective: every rank must call it. Call `wait` of the returned ticket before you use `tensor`, which is
        contiguous and of any dtype.
        """
        ...

    def all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, receive_counts: Sequence[int], send_counts: Sequence[int]
    ) -> Ticket:
        """Start to send each rank a part of `sent`, and to fill `received` with the parts that this rank gets.

        Collective: every rank must call it. Call `wait` of the returned ticket before you use `received` or write
        `sent`.

        Args:
            received: (sum of receive_counts,), written: the parts from all ranks, in rank order.
            sent: (sum of send_counts,), of the same dtype: the parts for all ranks, in rank order.
            receive_counts: the number of elements from each rank, possibly 0.
            send_counts: the number of elements for each rank, possibly 0.
        """
        ...

    def unfinished(self) -> bool:
        """Return whether any issued operation is still running. Any thread may call this.

        The monitor (the thread that watches the other ranks) uses it to find out whether this rank waits for others.
        """
        ...

    def close(self, abort: bool) -> None:
        """Destroy the communicator. Called when the process ends, and when this rank must stop because of a failure.

        Args:
            abort: False if every rank has called all operations, so that they can complete. True after a failure, when
                operations may wait for other ranks forever. NCCL then aborts these operations. gloo cannot abort them:
                if they do not end within 1 s, the communicator is not destroyed. To abort several NCCL communicators of
                a GPU, call `nccl.abort_all`, because aborting them one after another would deadlock.
        """


class OpenGroup(Protocol):
    """The type of a function that divides all ranks into groups, and returns the communicator of this rank's group.

    Collective: every rank must call the function. Its arguments are `size`, the number of ranks in each group, and
    `stride`, the distance between the ranks of a group. With size 2 and stride 4, for example, ranks 1 and 5 form a
    group. `World.open_group` is such a function.
    """

    def __call__(self, size: int, stride: int = 1, /) -> Communicator: ...


class Gather(Protocol):
    """A way to allocate shards (each rank's part of a flat tensor), and to all-gather them into the full tensor.

    Shards are gathered with collectives (`CollectiveGather`) or with peer copies (`PeerGather`), by which each rank
    reads them directly from the memory of the other ranks. Most methods are needed only for peer copies, for example to
    wait until other ranks have read a shard. In this base class, these methods do nothing or return a constant, which
    is correct for collectives. `PeerGather` overrides them.

    Attributes:
        communicator: the communicator that all-gathers the shards or, with peer copies, synchronizes the copies.
    """

    communicator: Communicator

    @property
    def mapped_bytes(self) -> int:
        """The number of bytes of this rank's shards that are outside torch's allocator.

        Torch's memory statistics do not count them.
        """
        return 0

    def allocate(
        self, numel: int, dtype: torch.dtype, device: torch.device, wait_for_update: Callable[[], None]
    ) -> torch.Tensor:
        """Allocate a shard (numel,) of zeros that can be all-gathered. Collective: every rank must call it.

        Args:
            numel: the number of elements.
            dtype: their dtype.
            device: this rank's device.
            wait_for_update: a function that makes the current stream wait for any asynchronous update (by an
                optimizer) that is still writing to the shard. This function is called before other ranks may read new
                values.
        """
        ...

    def gather(self, full: torch.Tensor, shard: torch.Tensor, own: Ranges) -> Ticket:
        """Start to fill `full` with the shards of all ranks, in rank order.

        Collective if `is_collective` returns True, or if the shard was written since the last `publish`. Call `wait` of
        the returned ticket before you read `full`.

        Args:
            full: (number of ranks * n,), written. It consists of one part of n elements for each rank.
            shard: (n,), this rank's shard, from `allocate`.
            own: the (start, stop) ranges of `shard` to copy to this rank's own part of `full`. The rest of this part
                may be left unwritten; the parts of other ranks are always written completely. Pass [(0, n)] if the
                caller reads all tensors from `full`. Pass `Layout.cut_ranges(rank)`, the ranges of tensors that are
                split between ranks, if the caller reads the other tensors of this part from `shard`.
        """
        ...

    def publish(self) -> None:
        """Make the present values of all shards readable by the other ranks.

        Called at the start of each forward of a model in which the ranks may gather different shards. Until the values
        change again, gathers by peer copies are then not collective. By default, this method does nothing, because
        gathers by collectives need no preparation. Collective: every rank must call it.
        """

    def is_collective(self, shard: torch.Tensor) -> bool:
        """Return whether every call of `gather` for this shard is collective, as it is by default.

        The result is False for shards that are gathered by peer copies. For them, only the first gather after a change
        of the values is collective, unless `publish` was called.
        """
        return True

    def wait_for_readers(self) -> None:
        """Make the current stream wait until all gathers that any rank has started so far are complete.

        Collective: every rank must call it. Work that is queued on the stream afterwards may overwrite shards.
        """

    def announce(self, shard: torch.Tensor, update: Ticket) -> None:
        """Make later gathers of a flat buffer wait until every rank has updated its own shard of the buffer.

        Call this after an optimizer has started an asynchronous update of the shards. Otherwise, a peer copy could read
        a shard of another rank before that rank has updated it. By default, this does nothing: with collectives, each
        rank waits for its own update before it joins the gather.

        Collective: every rank must call it, for the same flat buffers in the same order.

        Args:
            shard: this rank's shard of the flat buffer, from `allocate`.
            update: the ticket (handle to wait for) of the operation that updates `shard`.
        """

    def free_dropped(self) -> None:
        """Free the memory of those shards from `allocate` that no rank references any longer.

        Only needed for shards that other ranks read by peer copies: each rank's Python may free a deleted model at a
        different time, but the memory may be freed only when all ranks have deleted the model. Called by
        `bmt.synchronize`, and before more such memory is allocated. Collective: every rank must call it.
        """


class CollectiveGather(Gather):
    """Gathers shards with the communicator's all-gather.

    A rank may write its shard again when its own all-gather has ended, because by then the shard has been sent.
    """

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator

    def allocate(
        self, numel: int, dtype: torch.dtype, device: torch.device, wait_for_update: Callable[[], None]
    ) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype, device=device)

    def gather(self, full: torch.Tensor, shard: torch.Tensor, own: Ranges) -> Ticket:
        return self.communicator.all_gather(full, shard)


def all_reduce_largest(communicator: Communicator, magnitudes: torch.Tensor) -> None:
    """Replace each element of `magnitudes` by its maximum over the ranks, or by NaN if it is NaN on any rank.

    An all-reduce that computes the maximum of floating-point numbers may ignore NaN. So the bits of the numbers are
    compared as integers. For non-negative numbers, these integers have the same order as the numbers, and the integer
    of NaN is larger than that of inf.

    Collective: every rank must call it.

    Args:
        communicator: the communicator of the ranks, which does the all-reduce.
        magnitudes: float32 or float64, non-negative or NaN, contiguous, of the same shape and dtype on every rank;
            overwritten.
    """
    magnitudes.abs_()  # clears the sign of NaN
    bits = magnitudes.view(torch.int64 if magnitudes.dtype == torch.float64 else torch.int32)
    communicator.all_reduce(bits, maximum=True).wait()


class SingleProcess:
    """The communicator of a job or group that has only one rank.

    Operations copy their input on the current stream, or do nothing.
    """

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

    def all_reduce_mean(self, tensor: torch.Tensor) -> Ticket:
        return DONE

    def broadcast(self, tensor: torch.Tensor, root: int) -> Ticket:
        return DONE

    def all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, receive_counts: Sequence[int], send_counts: Sequence[int]
    ) -> Ticket:
        received.copy_(sent)
        return DONE

    def unfinished(self) -> bool:
        return False

    def close(self, abort: bool) -> None:
        pass


class _GlooTicket:
    """The `Ticket` (handle to wait for) of a gloo operation that runs asynchronously on CPU tensors.

    communicator: the communicator that runs the operation.
    label: a description of the operation, for errors.
    work: the operation. `wait` removes it from the communicator's set of running operations.
    finish: a function that computes the result from the received values. `wait` calls it after the operation. None if
        the received values are the result.
    """

    def __init__(
        self, communicator: GlooCommunicator, label: str, work: dist.Work, finish: Callable[[], object] | None
    ) -> None:
        self.label, self._communicator, self._work, self._finish = label, communicator, work, finish

    def wait(self) -> None:
        communicator = self._communicator
        try:
            wait_for(self._work, communicator.collective_log, communicator.seconds)
        except RuntimeError as error:
            communicator.collective_log.refuse()
            raise RuntimeError(
                f"{self.label} failed: another rank ended, raised an error, or did not call this operation within the "
                f"timeout. Look for the first error in the logs of all ranks. ({error})"
            ) from error
        finally:
            communicator.under_way.discard(self._work)
        if self._finish is not None:
            self._finish()


class GlooCommunicator:
    """A communicator for CPU tensors. Operations run asynchronously in gloo's threads.

    Creating it is collective: every rank must do so.

    Means are computed in float32, or in float64 for float64 tensors. `reduce_scatter_mean` adds the values in rank
    order, so its results are bit-identical in every run.

    Args:
        name: the communicator's name, for messages.
        timeout: how long an operation may wait for other ranks. After this time and 5 s more (PATIENCE), `wait` of the
            operation's ticket raises RuntimeError.
        groups: the groups into which all ranks are divided, each as a list of ranks in ascending order. The
            communicator connects the ranks of this rank's group.
    """

    def __init__(self, name: str, timeout: timedelta, groups: Groups) -> None:
        self._name, self.collective_log, self.seconds = name, CollectiveLog(name), timeout.total_seconds() + PATIENCE
        self.under_way: set[dist.Work] = set()
        rank, self._group = dist.get_rank(), None
        for members in groups:
            group: Any = dist.new_group([*members], timeout + LATER, backend="gloo")
            if rank in members:  # torch requires every rank to create all groups; keep only this rank's
                self._group, self._members = group, members
        self.rank, self.size = self._members.index(rank), len(self._members)

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

    def all_reduce_mean(self, tensor: torch.Tensor) -> Ticket:
        self.collective_log.note(code("all-reduce", tensor.numel()))
        total = tensor.to(torch.promote_types(tensor.dtype, torch.float32), copy=True)
        work = dist.all_reduce(total, group=self._group, async_op=True)
        return self._ticket("all_reduce", tensor, work, lambda: tensor.copy_(total.div_(self.size)))

    def broadcast(self, tensor: torch.Tensor, root: int) -> Ticket:
        self.collective_log.note(code("broadcast", tensor.numel()))
        work = dist.broadcast(as_bytes(tensor), self._members[root], group=self._group, async_op=True)
        return self._ticket("broadcast", tensor, work)

    def all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, receive_counts: Sequence[int], send_counts: Sequence[int]
    ) -> Ticket:
        self.collective_log.note(code("all-to-all", 0))
        counts = [[count * sent.itemsize for count in each] for each in (receive_counts, send_counts)]
        work = dist.all_to_all_single(as_bytes(received), as_bytes(sent), *counts, group=self._group, async_op=True)
        return self._ticket("all_to_all", sent, work)

    def unfinished(self) -> bool:
        return any(not work.is_completed() for work in list(self.under_way))

    def close(self, abort: bool) -> None:
        end = time.monotonic() + _ABORT_SECONDS
        if abort and not all(comes(work, end - time.monotonic()) or work.is_completed() for work in self.under_way):
            keep_group(self._group)
            return
        self.under_way.clear()
        end_group(self._group)
        self._group = None

    def _ticket(self, operation: str, tensor: torch.Tensor, work, finish=None) -> Ticket:
        self.under_way.difference_update([other for other in self.under_way if other.is_completed()])
        self.under_way.add(work)  # `unfinished` and `close` read this set; `_GlooTicket.wait` removes `work` from it
        rank, what = self._members[self.rank], f"{operation} of {tensor.numel()} elements of {tensor.dtype}"
        label = f"rank {rank}: {what} (communicator '{self._name}')"
        return _GlooTicket(self, label, work, finish)


def group_of(rank: int, size: int, stride: int) -> range:
    """Return the ranks of the group that contains `rank`. A group has `size` ranks that are `stride` apart.

    For example, with size 2 and stride 4, the group of rank 5 consists of ranks 1 and 5.
    """
    first = rank - rank % (size * stride) + rank % stride
    return range(first, first + size * stride, stride)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View the memory of a contiguous tensor as a uint8 tensor (nbytes,), so that a collective can send any dtype.

    The result has its own version counter, so autograd does not count writes to it as writes to `tensor`.
    """
    return tensor.detach().data.view(-1).view(torch.uint8)


# -- waiting for gloo, and ending its groups --------------------------------------------------------------------------


def wait_for(work: Any, collective_log: CollectiveLog, seconds: float) -> None:
    """Wait until an operation of gloo is complete.

    Args:
        work: the operation.
        collective_log: the log of its communicator, in which the monitor (the thread that watches the other ranks)
            records a problem that it finds.
        seconds: the maximum time to wait.

    Raises:
        RuntimeError: the operation failed.
        RuntimeError: the operation was not complete after `seconds`.
        RuntimeError: the monitor recorded a problem in the log meanwhile.
    """
    end = time.monotonic() + seconds
    while not work.is_completed():
        left = end - time.monotonic()
        if left <= 0:
            raise RuntimeError(
                f"Not all ranks called this collective within {seconds:.0f} s: another rank ended, hangs or is slow. "
                "If a rank is slow, increase the timeout of init_distributed."
            )
        if comes(work, min(left, _CHECK_SECONDS)):
            return
        collective_log.check()
    with explained_by(collective_log):
        work.wait()  # raises the error of a failed operation


@contextlib.contextmanager
def explained_by(collective_log: CollectiveLog) -> Iterator[None]:
    """Context manager that replaces an error of gloo or NCCL by an error that states the cause, if it is found.

    When gloo or NCCL raises an error inside the context, wait up to 5 s, so that the monitor (the thread that watches
    the other ranks) can find the cause. If it finds none, the original error is raised.

    collective_log: the log in which the monitor records the cause.
    """
    try:
        yield
    except RuntimeError:
        collective_log.check(_DIAGNOSIS_SECONDS)
        raise


def comes(work: Any, seconds: float) -> bool:
    """Wait at most `seconds` for `work`, an operation of gloo. Return whether the operation succeeded in this time.

    Unlike `work.wait`, this does not raise an error. The caller can thus look for failed ranks while the operation
    runs, or stop waiting for it. If the result is False, `work.is_completed()` tells whether the operation has failed
    (True) or is still running (False).
    """
    try:
        work.wait(timedelta(seconds=max(seconds, 0.001)))
    except RuntimeError:
        return False
    return True


def keep_group(group: Any) -> None:
    """Keep a process group alive until the process ends, by never releasing a reference to it.

    Call this if threads of the group still wait for another rank. The group's destructor would wait for these threads.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def end_group(group: Any) -> None:
    """Destroy a process group. The caller must also drop its own reference to it, so that the group's threads end.

    The threads must end before the interpreter shuts down. Otherwise a gloo thread may free the tensors of its last
    operation during the shutdown, and the process aborts ("terminate called without an active exception").
    """
    with contextlib.suppress(ValueError):  # the group was already destroyed together with the default group
        dist.destroy_process_group(group)
