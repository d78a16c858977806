"""Collectives over flat tensors: the contract, gloo, and one process; `nccl_lane` has the GPUs'.

A `Communicator` is one lane: its operations run in the order they were issued, beside the computation. Each
returns a `Ticket`; whoever reads the result or frees an operand waits for it first. Every rank issues the
operations of all lanes in the same order, from one thread at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from .control import comes, end_group

# torch 2.13 renames the collective and warns of its old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_ABORT_SECONDS = 1.0

Ranges = Sequence[tuple[int, int]]


class Ticket(Protocol):
    """The promise of one operation; `wait` may be called once, by the stream that uses the result."""

    def wait(self) -> None: ...


class Communicator(Protocol):
    """One ordered lane of collectives between `size` ranks; tensors are contiguous and on this rank's device."""

    rank: int
    size: int

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor, own: Ranges | None = None) -> Ticket:
        """Fill `whole` (size · n,) with every rank's `shard` (n,), in rank order.

        own: the elements of this rank's `shard`, begin and end of each range, that are needed there, if not all are;
        the rest of its part may or may not be filled.
        """
        ...

    def reduce_scatter_mean(self, shard: torch.Tensor, whole: torch.Tensor) -> Ticket:
        """Fill `shard` (n,) with this rank's part of the mean over ranks of `whole` (size · n,)."""
        ...

    def all_reduce(self, tensor: torch.Tensor, maximum: bool = False) -> Ticket:
        """Replace `tensor` by its sum (or maximum) over ranks."""
        ...

    def broadcast(self, tensor: torch.Tensor, root: int) -> Ticket:
        """Replace `tensor` by that of rank `root`."""
        ...

    def allocate(
        self, numel: int, dtype: torch.dtype, device: torch.device, settle: Callable[[], None]
    ) -> torch.Tensor:
        """Zeros (numel,) for a shard that this lane will gather. Collective.

        settle: lets the current stream wait for whatever else still writes the shard.
        """
        ...

    def quiesce(self) -> None:
        """The current stream goes on when the shards may be written: no rank is gathering them. Collective."""
        ...

    def free_dropped(self) -> None:
        """Give back the memory of shards from `allocate` that nobody holds any more. Collective."""
        ...

    def announce(self, shard: torch.Tensor, update: Ticket) -> None:
        """The `shard` is being written until `update`, and will then be gathered. Collective."""
        ...

    def close(self, abort: bool) -> None:
        """End the lane; `abort` waits for other ranks no longer than a second."""
        ...


class _Done:
    def wait(self) -> None:
        pass


DONE: Ticket = _Done()
"""The ticket of what is already there."""


class Collective:
    """A gather by a collective: it ends on no rank before all have come, so shards need nothing more."""

    def allocate(
        self, numel: int, dtype: torch.dtype, device: torch.device, settle: Callable[[], None]
    ) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype, device=device)

    def quiesce(self) -> None:
        pass

    def free_dropped(self) -> None:
        pass  # torch's allocator has them back already

    def announce(self, shard: torch.Tensor, update: Ticket) -> None:
        pass


class SingleProcess(Collective):
    """The lane of a world of one: everything is already where it belongs."""

    rank, size = 0, 1

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor, own: Ranges | None = None) -> Ticket:
        whole.copy_(shard)
        return DONE

    def reduce_scatter_mean(self, shard: torch.Tensor, whole: torch.Tensor) -> Ticket:
        shard.copy_(whole)
        return DONE

    def all_reduce(self, tensor: torch.Tensor, maximum: bool = False) -> Ticket:
        return DONE

    def broadcast(self, tensor: torch.Tensor, root: int) -> Ticket:
        return DONE

    def close(self, abort: bool) -> None:
        pass


class _GlooTicket:
    def __init__(self, label: str, work: dist.Work, under_way: set[dist.Work], finish=None) -> None:
        self._label, self._work, self._under_way, self._finish = label, work, under_way, finish

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            raise RuntimeError(
                f"{self._label} failed: another rank ended, raised, or did not reach this operation "
                f"within the timeout. Look for the first error among the ranks' logs. ({error})"
            ) from error
        finally:
            self._under_way.discard(self._work)
        if self._finish is not None:
            self._finish()


class GlooCommunicator(Collective):
    """A lane on CPU. Operations run asynchronously in gloo's threads, so the control flow is that of a GPU.

    Means are summed in float32 (float64 for float64) in rank order: the same on every rank and every run.
    """

    def __init__(self, name: str, timeout: timedelta) -> None:
        self._name = name
        self._group: Any = dist.new_group(backend="gloo", timeout=timeout)
        self._under_way: set[dist.Work] = set()
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor, own: Ranges | None = None) -> Ticket:
        work = _all_gather(_bytes(whole), _bytes(shard), group=self._group, async_op=True)
        return self._ticket("all_gather", shard, work)

    def reduce_scatter_mean(self, shard: torch.Tensor, whole: torch.Tensor) -> Ticket:
        received = torch.empty_like(whole)
        work = dist.all_to_all_single(_bytes(received), _bytes(whole), group=self._group, async_op=True)
        wide = torch.promote_types(shard.dtype, torch.float32)

        def finish() -> None:
            parts = received.view(self.size, -1)
            total = parts[0].to(wide, copy=True)
            for part in parts[1:]:
                total += part
            shard.copy_(total.div_(self.size))

        return self._ticket("reduce_scatter", shard, work, finish)

    def all_reduce(self, tensor: torch.Tensor, maximum: bool = False) -> Ticket:
        op = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
        work = dist.all_reduce(tensor, op, group=self._group, async_op=True)
        return self._ticket("all_reduce", tensor, work)

    def broadcast(self, tensor: torch.Tensor, root: int) -> Ticket:
        work = dist.broadcast(_bytes(tensor), root, group=self._group, async_op=True)
        return self._ticket("broadcast", tensor, work)

    def close(self, abort: bool) -> None:
        end = time.monotonic() + _ABORT_SECONDS
        if abort and not all(comes(work, end - time.monotonic()) or work.is_completed() for work in self._under_way):
            return  # the group's threads wait for another rank, and this one would wait for them
        self._under_way.clear()
        end_group(self._group)
        self._group = None

    def _ticket(self, operation: str, tensor: torch.Tensor, work, finish=None) -> Ticket:
        self._under_way.difference_update([other for other in self._under_way if other.is_completed()])
        self._under_way.add(work)  # as long as nobody has waited for it
        label = f"rank {self.rank}: {operation} of {tensor.numel()} × {tensor.dtype} on lane '{self._name}'"
        return _GlooTicket(label, work, self._under_way, finish)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as uint8, which every gloo collective accepts; detached from autograd's version counter."""
    return tensor.detach().data.view(-1).view(torch.uint8)
