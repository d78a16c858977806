"""Memory that the processes of one host share, and copies between it and a process's own tensors."""

from __future__ import annotations

import importlib
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from .streams import DONE, Ticket


class PeerMemory(Protocol):
    """Interface of memory that the processes of one host share, for peer copies between them.

    `HostMemory` implements it for processes that train on the CPU, and `CudaMemory` for GPUs. A process calls
    `allocate` and sends the handle to the other processes. These call `map`, and then read or write the memory with
    `copy`. To free the memory, all others call `unmap`, and then the process that allocated it calls `free`.
    """

    def allocate(self, numel: int, dtype: torch.dtype) -> tuple[torch.Tensor, Any, Callable[[], object]]:
        """Allocate zeroed memory that other processes of this host can map.

        Args:
            numel: the number of elements.
            dtype: their dtype.

        Returns:
            Three values: the memory as a tensor (numel,), a handle that other processes pass to `map`, and a function
            without arguments. The function returns None if no tensor of this process refers to the memory any longer,
            and another object until then. Only when it returns None may the memory be freed.
        """
        ...

    def map(self, handle: Any, nbytes: int) -> Any:
        """Map memory of another process into this one, so that `copy` can read and write it.

        Args:
            handle: the handle that `allocate` returned in the other process.
            nbytes: the size of the memory.

        Returns:
            The mapped memory, for `copy`, `part` and `unmap`.
        """
        ...

    def part(self, source: Any, start: int, stop: int) -> Any:
        """Return bytes start:stop of mapped memory of another process, as a source or target for `copy`.

        Args:
            source: the mapped memory that `map` returned.
            start: the position of the first byte.
            stop: the position after the last byte.
        """
        ...

    def unlink(self, handle: Any) -> None:
        """Delete the file through which memory is shared, if any, so that no file remains if the job is killed.

        The process that allocated the memory calls this when all other processes have mapped it. The memory itself
        stays until no process maps it any longer.

        handle: the handle that `allocate` returned in this process.
        """

    def unmap(self, source: Any) -> None:
        """Unmap memory of another process from this one.

        Called when this process has finished all copies from and to the memory, before its owner calls `free`.

        source: the mapped memory that `map` returned.
        """

    def free(self, handle: Any) -> None:
        """Free memory that this process allocated. Every other process must have unmapped it before.

        handle: the handle that `allocate` returned.
        """

    def copy(self, pairs: Sequence[Sequence[tuple[Any, Any]]]) -> Ticket:
        """Start asynchronous copies between this process's tensors and mapped memory of other processes.

        The copies wait for the work queued on the current stream so far. Wait for the returned ticket before you use
        the targets or overwrite the sources.

        Args:
            pairs: sequences of (target, source) pairs. The pairs of one sequence are copied one after another, and the
                sequences in parallel. A target or source is a contiguous tensor (n,) of this process, or memory from
                `map` or `part`. The target and the source of a pair must have the same size in bytes, and at least one
                of them must be a tensor.
        """
        ...

    def order(self) -> None:
        """Make the current stream wait for all copies that this process has started with `copy` so far.

        Called before an all-reduce on the current stream. When the all-reduce has ended, the copies of all ranks have
        ended too, so the ranks may write to memory that others have read.
        """


class HostMemory:
    """Shared memory (see `PeerMemory`) of processes that train on the CPU: files in /dev/shm, which each process maps.

    If /dev/shm does not exist, the files are in the default folder for temporary files. `copy` returns only after
    everything is copied.
    """

    def allocate(self, numel: int, dtype: torch.dtype) -> tuple[torch.Tensor, str, Callable[[], object]]:
        nbytes = numel * dtype.itemsize
        folder = "/dev/shm" if os.path.isdir("/dev/shm") else None  # None: the default folder for temporary files
        descriptor, path = tempfile.mkstemp(prefix="hf_bmtrain_", dir=folder)
        try:
            # Reserve the space now. Otherwise, if the file system is full, a later write to the mapped memory would end
            # the process by SIGBUS.
            os.posix_fallocate(descriptor, 0, nbytes)
        except OSError as error:
            os.unlink(path)
            raise RuntimeError(
                f"{nbytes} bytes of shared memory could not be reserved in {os.path.dirname(path)}: {error}. Make "
                "this folder's file system larger (with Docker: --shm-size=16g, or --ipc=host), or use "
                "init_distributed(gather='collective')."
            ) from error
        finally:
            os.close(descriptor)
        shard = self.map(path, nbytes).view(dtype)
        return shard, path, weakref.ref(shard)

    def map(self, handle: str, nbytes: int) -> torch.Tensor:
        return torch.from_file(handle, shared=True, size=nbytes, dtype=torch.uint8)

    def part(self, source: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        return source[start:stop]

    def unlink(self, handle: str) -> None:
        os.unlink(handle)

    def unmap(self, source: torch.Tensor) -> None:
        pass  # the memory is unmapped when the last tensor over it is freed

    def free(self, handle: str) -> None:
        pass

    def copy(self, pairs: Sequence[Sequence[tuple[torch.Tensor, torch.Tensor]]]) -> Ticket:
        for own in pairs:
            for target, source in own:
                target.view(torch.uint8).copy_(source.view(torch.uint8))
        return DONE

    def order(self) -> None:
        pass


class _Slab:
    """A range of a CUDA device's memory. torch.as_tensor makes a uint8 tensor of it without a copy."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None,
        }  # fmt: skip


class _EventsTicket:
    """The Ticket (handle to wait for) of asynchronous copies on several CUDA streams, with one event per stream.

    `wait` makes the current stream, not the host, wait for all of these events.
    """

    def __init__(self, device: torch.device, events: list[torch.cuda.Event]) -> None:
        self._device, self._events = device, events

    def wait(self) -> None:
        stream = torch.cuda.current_stream(self._device)
        for event in self._events:
            stream.wait_event(event)


class CudaMemory:
    """Shared memory (see `PeerMemory`) of processes that train on GPUs: GPU memory that they share by CUDA IPC.

    IPC makes GPU memory of one process accessible in other processes of the same host, which copy from it and to it.
    The GPU's copy engines execute these copies, so the copies do not occupy the multiprocessors.

    The memory is allocated with cudaMalloc, not with torch's allocator. IPC can share only a whole cudaMalloc block,
    and torch's allocator puts several tensors into one block, so IPC would also share tensors that other processes
    do not need.

    Args:
        device: the GPU of this process.
    """

    def __init__(self, device: torch.device) -> None:
        self._runtime: Any = importlib.import_module("cupy.cuda.runtime")
        self._device = device
        self._streams: list[torch.cuda.Stream] = []

    @contextmanager
    def _chosen(self) -> Iterator[None]:
        """Context manager that makes this object's device the current device of torch and, in this thread, of CuPy."""
        with torch.cuda.device(self._device):
            if self._runtime.getDevice() != self._device.index:
                self._runtime.setDevice(self._device.index)
            yield

    def allocate(self, numel: int, dtype: torch.dtype) -> tuple[torch.Tensor, tuple[bytes, int], Callable[[], object]]:
        nbytes = numel * dtype.itemsize
        with self._chosen():
            try:
                address = self._runtime.malloc(nbytes)
            except self._runtime.CUDARuntimeError:
                torch.cuda.empty_cache()  # torch's allocator may have reserved memory that no tensor uses
                address = self._runtime.malloc(nbytes)
            handle = bytes(self._runtime.ipcGetMemHandle(address))
        slab = _Slab(address, nbytes)  # the tensor `memory` and its views keep `slab` alive
        memory = torch.as_tensor(slab, device=self._device).zero_()
        torch.cuda.current_stream(self._device).synchronize()  # the zeros must be written before other processes write
        return memory.view(dtype), (handle, address), weakref.ref(slab)

    def map(self, handle: tuple[bytes, int], nbytes: int) -> int:
        with self._chosen():
            return self._runtime.ipcOpenMemHandle(handle[0])

    def part(self, source: int, start: int, stop: int) -> int:
        return source + start

    def unlink(self, handle: tuple[bytes, int]) -> None:
        pass

    def unmap(self, source: int) -> None:
        with self._chosen():
            self._runtime.ipcCloseMemHandle(source)

    def free(self, handle: tuple[bytes, int]) -> None:
        with self._chosen():
            self._runtime.free(handle[1])

    def copy(self, pairs: Sequence[Sequence[tuple[Any, Any]]]) -> Ticket:
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(self._device))
        events = []
        while len(self._streams) < len(pairs):
            self._streams.append(torch.cuda.Stream(self._device, priority=-1))
        for own, stream in zip(pairs, self._streams):
            if not own:
                continue
            stream.wait_event(ready)
            for target, source in own:
                nbytes = target.nbytes if isinstance(target, torch.Tensor) else source.nbytes
                self._runtime.memcpyAsync(_address(target), _address(source), nbytes, _DEFAULT, stream.cuda_stream)
            done = torch.cuda.Event()
            done.record(stream)
            events.append(done)
        return _EventsTicket(self._device, events)

    def order(self) -> None:
        current = torch.cuda.current_stream(self._device)
        for stream in self._streams:
            current.wait_stream(stream)


_DEFAULT = 4  # cudaMemcpyDefault: CUDA infers the devices from the addresses


def _address(memory: torch.Tensor | int) -> int:
    return memory.data_ptr() if isinstance(memory, torch.Tensor) else memory
