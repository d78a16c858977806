"""Collectives between GPUs, with NCCL through CuPy.

Each communicator runs its operations on its own stream. With these rules, no other synchronization is needed:
* The caller allocates operands on the compute stream. It issues operations with the compute stream as the current
  stream, or with a stream that has waited for it (such as the stream that packs gradients; see reduce.py).
* Before each operation, the communicator's stream waits for all work queued so far on the current stream. This includes
  the kernels that write the operands, and earlier kernels that used the same memory for other tensors.
* `Ticket.wait` makes the current stream wait for this operation, but not for later ones. The caller frees operands
  after `wait`. The allocator reuses memory in the order of the compute stream, so it never reuses memory of a pending
  operation.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from .collective_log import CollectiveLog, code
from .communicator import Communicator, explained_by
from .streams import Ticket

_NCCL_TYPES = {
    torch.int8: 0, torch.uint8: 1, torch.int32: 2, torch.uint32: 3, torch.int64: 4, torch.uint64: 5,
    torch.float16: 6, torch.float32: 7, torch.float64: 8, torch.bfloat16: 9,
}  # fmt: skip
_SUM, _MAX, _AVG = 0, 2, 4
_ABORT_SECONDS = 10.0


def _moved(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the (element count, NCCL dtype) to pass to NCCL for sending `tensor`.

    A tensor of a dtype that NCCL does not support, such as bool, is sent as bytes.
    """
    known = _NCCL_TYPES.get(tensor.dtype)
    return (tensor.numel() * tensor.itemsize, _NCCL_TYPES[torch.uint8]) if known is None else (tensor.numel(), known)


def _reduced(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the (element count, NCCL dtype) to pass to NCCL for a reduction of `tensor`.

    A complex tensor is reduced as its real and imaginary parts. Raises ValueError if NCCL cannot compute in the
    tensor's dtype.
    """
    real = tensor.dtype.to_real() if tensor.is_complex() else tensor.dtype
    if real not in _NCCL_TYPES:
        raise ValueError(f"NCCL cannot reduce {tensor.dtype}. Convert the tensor first, for example with .int()")
    return tensor.nbytes // real.itemsize, _NCCL_TYPES[real]


class _CudaTicket:
    """A ticket (handle to wait for) of an operation on a CUDA stream.

    `wait` makes the current stream wait for the operation. Until then, this object keeps the operands alive.
    """

    def __init__(self, event: torch.cuda.Event, *operands: torch.Tensor) -> None:
        self._event, self._operands = event, operands

    def wait(self) -> None:
        torch.cuda.current_stream(self._operands[0].device).wait_event(self._event)
        self._operands = self._operands[:1]  # one operand is kept, because later calls of `wait` read its device


class NcclCommunicator:
    """A communicator for CUDA tensors. It uses NCCL through CuPy, and has its own CUDA stream.

    Collective: every rank of the communicator must create it.

    Args:
        name: the communicator's name, for messages.
        rank: this rank's index in the communicator, 0 to size - 1.
        size: the number of ranks in the communicator.
        unique_id: the communicator's identifier for NCCL. One rank creates it with NCCL and sends it to the others.
        device: this rank's device.
    """

    def __init__(self, name: str, rank: int, size: int, unique_id: bytes, device: torch.device) -> None:
        nccl = import_nccl()
        self._name, self._device, self.collective_log = name, device, CollectiveLog(name)
        self.rank, self.size = rank, size
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._last: torch.cuda.Event | None = None
        self._closing, self._closed = threading.Lock(), False
        with torch.cuda.device(device):
            self._comm = nccl.NcclCommunicator(size, unique_id, rank)

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor) -> Ticket:
        self.collective_log.note(code("all-gather", full.numel()))
        return self._issue(self._comm.allGather, shard, full, _moved(shard))

    def reduce_scatter_mean(self, shard: torch.Tensor, full: torch.Tensor) -> Ticket:
        self.collective_log.note(code("reduce-scatter", full.numel()))
        return self._issue(self._comm.reduceScatter, full, shard, (*_reduced(shard), _AVG))

    def all_reduce(self, tensor: torch.Tensor, maximum: bool = False) -> Ticket:
        self.collective_log.note(code("all-reduce", tensor.numel()))
        return self._issue(self._comm.allReduce, tensor, tensor, (*_reduced(tensor), _MAX if maximum else _SUM))

    def all_reduce_mean(self, tensor: torch.Tensor) -> Ticket:
        self.collective_log.note(code("all-reduce", tensor.numel()))
        return self._issue(self._comm.allReduce, tensor, tensor, (*_reduced(tensor), _AVG))

    def broadcast(self, tensor: torch.Tensor, root: int) -> Ticket:
        self.collective_log.note(code("broadcast", tensor.numel()))
        return self._issue(self._comm.broadcast, tensor, tensor, (*_moved(tensor), root))

    def all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, receive_counts: Sequence[int], send_counts: Sequence[int]
    ) -> Ticket:
        self.collective_log.note(code("all-to-all", 0))
        return self._issue(self._send_and_receive, sent, received, (sent.itemsize, send_counts, receive_counts))

    def _send_and_receive(
        self, sent: int, received: int, itemsize: int, send_counts: Sequence[int], receive_counts: Sequence[int],
        stream: int,
    ) -> None:  # fmt: skip
        """Queue all sends and receives of an all-to-all on `stream`, as one NCCL group.

        sent: the address of the tensor with the parts for all ranks, in rank order.
        received: the address of the tensor for the parts from all ranks, in rank order.
        itemsize: the size of an element in bytes.
        send_counts: the number of elements to send to each rank, possibly 0.
        receive_counts: the number of elements to receive from each rank, possibly 0.
        stream: the handle of the CUDA stream.
        """
        nccl, kind = import_nccl(), _NCCL_TYPES[torch.uint8]
        nccl.groupStart()
        for other, (outgoing, incoming) in enumerate(zip(send_counts, receive_counts)):
            if outgoing:
                self._comm.send(sent, outgoing * itemsize, kind, other, stream)
            if incoming:
                self._comm.recv(received, incoming * itemsize, kind, other, stream)
            sent, received = sent + outgoing * itemsize, received + incoming * itemsize
        nccl.groupEnd()

    def unfinished(self) -> bool:
        return self._last is not None and not self._last.query()

    def close(self, abort: bool) -> None:
        with self._closing:  # the main thread and the monitor's thread may abort the communicator at the same time
            if self._closed:
                return
            if abort:
                self._comm.abort()
            else:
                self._comm.destroy()
            self._closed = True

    def _issue(self, call, send: torch.Tensor, receive: torch.Tensor, arguments: tuple) -> Ticket:
        assert send.is_contiguous() and receive.is_contiguous() and send.device == self._device
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        # If another rank has ended, NCCL may fail before the monitor (the thread that watches the ranks) reports it. In
        # this case, `explained_by` waits for the monitor's report, and raises an error with it.
        with explained_by(self.collective_log):
            try:
                call(send.data_ptr(), receive.data_ptr(), *arguments, self._stream.cuda_stream)
            except Exception as error:
                raise RuntimeError(
                    f"NCCL's {call.__name__} of {send.numel()} elements of {send.dtype} failed on rank {self.rank} of "
                    f"the communicator '{self._name}', which has {self.size} ranks: {error}. Look for the first error "
                    "in the logs of all ranks. If there is none, run with NCCL_DEBUG=INFO to see the cause."
                ) from error
        event = self._last = torch.cuda.Event()
        event.record(self._stream)
        return _CudaTicket(event, send, receive)


def abort_all(communicators: Sequence[Communicator], seconds: float = _ABORT_SECONDS) -> bool:
    """Abort all communicators of a device at the same time, each in a thread.

    Aborting them one after another would deadlock: to free memory, each abort waits until the device is idle, but
    pending operations of the communicators that are not yet aborted keep the device busy.

    Args:
        communicators: all NCCL communicators of the device.
        seconds: the maximum time to wait for the threads.

    Returns:
        Whether all communicators were aborted within `seconds`. Also False if threads cannot be started.
    """
    aborted: list[Communicator] = []

    def abort(communicator: Communicator) -> None:
        communicator.close(abort=True)
        aborted.append(communicator)

    threads = [threading.Thread(target=abort, args=(each,), daemon=True) for each in communicators]
    try:
        for thread in threads:
            thread.start()
    except RuntimeError:  # in an exit handler, some versions of Python 3.12 cannot start threads
        return False
    end = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return len(aborted) == len(communicators)


def import_nccl() -> Any:
    """Import and return the module `cupy.cuda.nccl`, which uses the NCCL library that torch has loaded.

    Raises:
        RuntimeError: the module cannot be imported. The message gives the pip command.
        RuntimeError: several NCCL libraries are loaded in this process.
    """
    major = (torch.version.cuda or "13").split(".")[0]
    try:
        nccl: Any = importlib.import_module("cupy.cuda.nccl")  # imported after torch, so that CuPy uses torch's libnccl
        nccl.get_version()
    except (ImportError, AttributeError) as error:
        raise RuntimeError(
            f"Training on several GPUs needs CuPy, which could not be imported ({error}). This torch is built for "
            f"CUDA {torch.version.cuda}. Run pip install 'hf_bmtrain[cuda{major}]', which installs "
            f"cupy-cuda{major}x."
        ) from error
    libraries = _loaded_libraries("libnccl.so")
    if len(libraries) > 1:
        raise RuntimeError(
            f"Several NCCL libraries are loaded in this process ({', '.join(sorted(libraries))}), but hf_bmtrain needs "
            f"exactly one. Keep the package nvidia-nccl-cu{major}, uninstall the nvidia-nccl packages of other CUDA "
            "versions, and unset LD_LIBRARY_PATH."
        )
    return nccl


def _loaded_libraries(name: str) -> set[str]:
    with open("/proc/self/maps") as maps:
        return {line.split()[-1] for line in maps if name in line}
