"""Collectives over flat tensors: NCCL through CuPy, gloo, or one process.

A `Communicator` is one lane: its operations run in the order they were issued, beside the computation. Each
returns a `Ticket`; whoever reads the result or frees an operand waits for it first. Every rank issues the
operations of all lanes in the same order, from one thread at a time.

The contract of a CUDA lane (why no other synchronisation is needed):
* operands are allocated on the compute stream; the stream that is current at the call is that one, or one that is
  behind it (where gradients are packed, see reduction.py);
* the lane's stream first waits for everything queued on the current stream so far, hence for the operands'
  contents and for earlier users of their memory;
* `Ticket.wait` makes the then current stream wait for this operation only; operands are freed after it, so the
  allocator, which recycles memory in compute-stream order, never hands them out too early.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

# torch 2.13 renames the collective and warns of its old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Ticket(Protocol):
    """The promise of one operation; `wait` may be called once, by the stream that uses the result."""

    def wait(self) -> None: ...


class Communicator(Protocol):
    """One ordered lane of collectives between `size` ranks; tensors are contiguous and on this rank's device."""

    rank: int
    size: int

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor) -> Ticket:
        """Fill `whole` (size · n,) with every rank's `shard` (n,), in rank order."""
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

    def close(self, abort: bool) -> None:
        """End the lane; `abort` does not wait for other ranks."""
        ...


class _Done:
    def wait(self) -> None:
        pass


DONE: Ticket = _Done()
"""The ticket of what is already there."""


class _Collective:
    """A gather by a collective: it ends on no rank before all have come, so shards need nothing more."""

    def allocate(
        self, numel: int, dtype: torch.dtype, device: torch.device, settle: Callable[[], None]
    ) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype, device=device)

    def quiesce(self) -> None:
        pass


class SingleProcess(_Collective):
    """The lane of a world of one: everything is already where it belongs."""

    rank, size = 0, 1

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor) -> Ticket:
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
    def __init__(self, label: str, work: dist.Work, finish=None) -> None:
        self._label, self._work, self._finish = label, work, finish

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            raise RuntimeError(
                f"{self._label} failed: another rank ended, raised, or did not reach this operation "
                f"within the timeout. Look for the first error among the ranks' logs. ({error})"
            ) from error
        if self._finish is not None:
            self._finish()


class GlooCommunicator(_Collective):
    """A lane on CPU. Operations run asynchronously in gloo's threads, so the control flow is that of a GPU.

    Means are summed in float32 (float64 for float64) in rank order: the same on every rank and every run.
    """

    def __init__(self, name: str, timeout: timedelta) -> None:
        self._name = name
        self._group: Any = dist.new_group(backend="gloo", timeout=timeout)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor) -> Ticket:
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
        pass  # torch.distributed ends its own groups

    def _ticket(self, operation: str, tensor: torch.Tensor, work, finish=None) -> Ticket:
        size = f"{tensor.numel()} × {tensor.dtype}"
        return _GlooTicket(f"rank {self.rank}: {operation} of {size} on lane '{self._name}'", work, finish)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as uint8, which every gloo collective accepts; detached from autograd's version counter."""
    return tensor.detach().data.view(-1).view(torch.uint8)


_NCCL_TYPES = {
    torch.int8: 0, torch.uint8: 1, torch.int32: 2, torch.uint32: 3, torch.int64: 4, torch.uint64: 5,
    torch.float16: 6, torch.float32: 7, torch.float64: 8, torch.bfloat16: 9,
}  # fmt: skip
_SUM, _MAX, _AVG = 0, 2, 4


def _moved(tensor: torch.Tensor) -> tuple[int, int]:
    """(count, NCCL type) that move `tensor`: what NCCL has no type for (bool, int16, complex) goes as its bytes."""
    known = _NCCL_TYPES.get(tensor.dtype)
    return (tensor.numel() * tensor.itemsize, _NCCL_TYPES[torch.uint8]) if known is None else (tensor.numel(), known)


def _reduced(tensor: torch.Tensor) -> tuple[int, int]:
    """(count, NCCL type) to reduce `tensor` with, whose bytes alone would add up to something else."""
    if tensor.dtype not in _NCCL_TYPES:
        raise ValueError(f"NCCL has no arithmetic for {tensor.dtype}: convert it first, for example with .int()")
    return tensor.numel(), _NCCL_TYPES[tensor.dtype]


class _CudaTicket:
    def __init__(self, event: torch.cuda.Event, *operands: torch.Tensor) -> None:
        self._event, self._operands = event, operands

    def wait(self) -> None:
        torch.cuda.current_stream(self._operands[0].device).wait_event(self._event)
        self._operands = self._operands[:1]  # only the device is still needed


class NcclCommunicator(_Collective):
    """A lane on CUDA: one NCCL communicator of CuPy and one stream of torch, both owned here."""

    def __init__(self, name: str, rank: int, size: int, unique_id: bytes, device: torch.device) -> None:
        nccl = import_nccl()
        self._name, self._device = name, device
        self.rank, self.size = rank, size
        self._stream = torch.cuda.Stream(device, priority=-1)
        with torch.cuda.device(device):
            self._comm = nccl.NcclCommunicator(size, unique_id, rank)

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor) -> Ticket:
        call = self._comm.allGather
        return self._issue(call, shard, whole, _moved(shard))

    def reduce_scatter_mean(self, shard: torch.Tensor, whole: torch.Tensor) -> Ticket:
        call = self._comm.reduceScatter
        return self._issue(call, whole, shard, (*_reduced(shard), _AVG))

    def all_reduce(self, tensor: torch.Tensor, maximum: bool = False) -> Ticket:
        op = _MAX if maximum else _SUM
        return self._issue(self._comm.allReduce, tensor, tensor, (*_reduced(tensor), op))

    def broadcast(self, tensor: torch.Tensor, root: int) -> Ticket:
        call = self._comm.broadcast
        return self._issue(call, tensor, tensor, (*_moved(tensor), root))

    def close(self, abort: bool) -> None:
        if abort:
            self._comm.abort()
        else:
            self._comm.destroy()

    def _issue(self, call, send: torch.Tensor, receive: torch.Tensor, arguments: tuple) -> Ticket:
        assert send.is_contiguous() and receive.is_contiguous() and send.device == self._device
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        try:
            call(send.data_ptr(), receive.data_ptr(), *arguments, self._stream.cuda_stream)
        except Exception as error:
            raise RuntimeError(
                f"rank {self.rank}: {call.__name__} of {send.numel()} × {send.dtype} on lane '{self._name}' "
                f"failed: {error}. NCCL_DEBUG=INFO tells more."
            ) from error
        event = torch.cuda.Event()
        event.record(self._stream)
        return _CudaTicket(event, send, receive)


def import_nccl() -> Any:
    """`cupy.cuda.nccl`, sharing torch's libnccl; RuntimeError with the extra to install where it is missing."""
    major = (torch.version.cuda or "13").split(".")[0]
    try:
        nccl: Any = importlib.import_module("cupy.cuda.nccl")  # after torch, whose libnccl CuPy then takes
        nccl.get_version()
    except (ImportError, AttributeError) as error:
        raise RuntimeError(
            f"Training on several GPUs needs CuPy: pip install 'hf_bmtrain[cuda{major}]' "
            f"(cupy-cuda{major}x beside this torch, built for CUDA {torch.version.cuda}). ({error})"
        ) from error
    libraries = _loaded_libraries("libnccl.so")
    if len(libraries) > 1:
        raise RuntimeError(
            f"Two NCCL libraries are loaded, which corrupts both: {', '.join(sorted(libraries))}. Uninstall the "
            f"nvidia-nccl wheel of the other CUDA version, keep nvidia-nccl-cu{major}, and clear LD_LIBRARY_PATH."
        )
    return nccl


def _loaded_libraries(name: str) -> set[str]:
    with open("/proc/self/maps") as maps:
        return {line.split()[-1] for line in maps if name in line}
