"""Queues of work that runs concurrently with the computation: CUDA streams, or immediate execution without CUDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class Ticket(Protocol):
    """A handle of an asynchronous operation. Call `wait` once before using the operation's result."""

    def wait(self) -> None:
        """Make the current stream wait for the operation, or the host if the operation is not on a GPU."""


class Event(Ticket, Protocol):
    """A point in the queue of a work stream. `wait` makes the current stream wait until the queue has reached it."""

    def synchronize(self) -> None:
        """Make the host wait until the queue has reached this point."""


class _Done:
    def wait(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


DONE: Event = _Done()
"""The ticket of an operation that is already complete."""


class WorkStream:
    """A queue of work with its own CUDA stream. The caller must not free memory that queued work uses.

    Args:
        device: the CUDA device.
        priority: the stream's priority: -1 runs before the computation if both are ready; 0 is equal priority.
    """

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device, priority=priority)

    def run(self, function: Callable[[], object]) -> None:
        """Call `function` with the CUDA stream of this queue as the current stream."""
        with torch.cuda.stream(self._stream):
            function()

    def after(self, ticket: Ticket) -> None:
        """Make work that is queued from now on wait for the operation of `ticket`."""
        self.run(ticket.wait)

    def follow(self) -> None:
        """Make work that is queued from now on wait for all work queued on the current stream so far."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def record_event(self) -> Event:
        """Return an event that completes with all work queued so far."""
        event = torch.cuda.Event()
        event.record(self._stream)
        return event


class Immediate:
    """The queue of a device without streams. When `run` returns, the work of its function is complete."""

    def run(self, function: Callable[[], object]) -> None:
        function()

    def after(self, ticket: Ticket) -> None:
        pass

    def follow(self) -> None:
        pass

    def record_event(self) -> Event:
        return DONE


def finish(device: torch.device) -> None:
    """Make the host wait until `device` has completed all work queued on the current stream."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def has_own_memory(device: torch.device) -> bool:
    """Return whether `device` has memory separate from the host's. The meta device, which stands for a GPU, does."""
    return device.type != "cpu"


def work_stream(device: torch.device, priority: int = 0) -> WorkStream | Immediate:
    """Return a queue of work that runs concurrently with the computation on `device`; see `WorkStream`."""
    return WorkStream(device, priority) if device.type == "cuda" else Immediate()
