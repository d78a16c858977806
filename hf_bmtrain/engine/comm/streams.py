"""Queues for work that runs concurrently with the computation on separate CUDA streams, or at once on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class Ticket(Protocol):
    """A handle of an asynchronous operation. Call `wait` once, before you use the operation's result.

    `wait` itself may do the last part of the operation, such as a division, which must not be repeated. Only the `wait`
    of an `Event` may be called several times, for example to make several CUDA streams wait.
    """

    def wait(self) -> None:
        """Make the current CUDA stream wait for the operation.

        If the operation does not run on a GPU, block the host until it ends.
        """


class Event(Ticket, Protocol):
    """A point in a queue of work, like a CUDA event.

    `wait` makes the current stream wait for all work that was queued before this point.
    """

    def synchronize(self) -> None:
        """Block the host until all work that was queued before this event is complete."""


class _Done:
    def wait(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


DONE: Event = _Done()
"""The ticket (handle to wait for) of an operation that is already complete."""


class After(Ticket):
    """The ticket of an operation whose last part runs on the caller's stream: `wait` calls `finish` for this part.

    On a GPU, `wait` first makes the current stream wait for the rest of the operation. The work that `finish` queues on
    this stream therefore runs last.

    Args:
        ticket: the ticket of the operation without its last part.
        finish: a function that does the last part. It is kept until `wait`, with the tensors to which it refers.
    """

    def __init__(self, ticket: Ticket, finish: Callable[[], object]) -> None:
        self._ticket, self._finish = ticket, finish

    def wait(self) -> None:
        self._ticket.wait()
        self._finish()
        self._finish = lambda: None


class WorkStream:
    """A queue of GPU work on a separate CUDA stream, which runs concurrently with the work of other streams.

    The caller must not free memory while queued work uses it.

    Args:
        device: the CUDA device.
        priority: the CUDA stream's priority. 0 is the priority of torch's default stream, which runs the computation.
            With -1, the GPU starts this queue's work first if work on both streams is ready.
    """

    def __init__(self, device: torch.device, priority: int) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device, priority=priority)

    def run(self, function: Callable[[], object]) -> None:
        """Call `function` at once. The kernels that it launches are put into this queue, not on the current stream."""
        with torch.cuda.stream(self._stream):
            function()

    def after(self, ticket: Ticket) -> None:
        """Make work that is put into this queue from now on wait for an asynchronous operation.

        ticket: the handle that the operation returned when it was started.
        """
        self.run(ticket.wait)

    def follow(self) -> None:
        """Make work that is put into this queue from now on wait for all work on the current stream so far.

        Call it before `run`, if the work of `run` reads what the current stream computes.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def record_event(self) -> Event:
        """Return an event that completes when all work that has been put into this queue so far is complete."""
        event = torch.cuda.Event()
        event.record(self._stream)
        return event


class Immediate:
    """A queue of work for the CPU, which has no streams: `run` calls its function at once.

    It has the methods of `WorkStream`, the queue with its own CUDA stream, so callers need not distinguish the two.
    """

    def run(self, function: Callable[[], object]) -> None:
        function()

    def after(self, ticket: Ticket) -> None:
        pass

    def follow(self) -> None:
        pass

    def record_event(self) -> Event:
        return DONE


def finish(device: torch.device) -> None:
    """Make the host wait until `device` has completed all work queued on the current stream.

    Called, for example, before the host measures times or reads values that the device has written to host memory.
    """
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def has_own_memory(device: torch.device) -> bool:
    """Return whether `device` has its own memory, separate from the host's.

    If it has, a tensor must be copied to host memory before the host can keep it there (offloading) or write it to a
    file. The result is also True for the meta device, on which the package simulates a GPU to predict memory use.
    """
    return device.type != "cpu"


def work_stream(device: torch.device, priority: int = 0) -> WorkStream | Immediate:
    """Return a new queue for work on `device`.

    On a CUDA device, the work runs on a separate stream, concurrently with the computation. On any other device, it
    runs at once.

    Args:
        device: the device on which the work runs.
        priority: the CUDA stream's priority. 0 is the priority of torch's default stream, which runs the computation.
            With -1, the GPU starts this queue's work first if work on both streams is ready.
    """
    return WorkStream(device, priority) if device.type == "cuda" else Immediate()
