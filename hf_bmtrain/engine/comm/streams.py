"""Queues of work alongside the computation: CUDA streams; immediate execution where there are none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class Ticket(Protocol):
    """The promise of an asynchronous operation. Wait for it once before using its result."""

    def wait(self) -> None:
        """Make the current stream wait for the operation."""


class Event(Ticket, Protocol):
    """A point in the queue of a `WorkStream`."""

    def synchronize(self) -> None:
        """Block the host until the queue has reached this point."""


class _Done:
    def wait(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


DONE: Event = _Done()
"""The ticket of a complete operation."""


class WorkStream:
    """A queue with its own CUDA stream. The caller keeps the memory that queued work uses alive.

    priority: -1 for work that is scheduled before the computation when both are ready.
    """

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device, priority=priority)

    def run(self, function: Callable[[], object]) -> None:
        """Queue the work that `function` launches."""
        with torch.cuda.stream(self._stream):
            function()

    def after(self, ticket: Ticket) -> None:
        """Make work that is queued from now on wait for `ticket`."""
        self.run(ticket.wait)

    def follow(self) -> None:
        """Make work that is queued from now on wait for all work queued on the current stream so far."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def record_event(self) -> Event:
        """Return an event at the present end of the queue."""
        event = torch.cuda.Event()
        event.record(self._stream)
        return event


class Immediate:
    """The queue of a device without streams: `run` executes its function at once."""

    def run(self, function: Callable[[], object]) -> None:
        function()

    def after(self, ticket: Ticket) -> None:
        pass

    def follow(self) -> None:
        pass

    def record_event(self) -> Event:
        return DONE


def finish(device: torch.device) -> None:
    """Block the host until `device` has finished the work queued on the current stream."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def has_own_memory(device: torch.device) -> bool:
    """Return whether `device` has memory separate from the host's. The meta device stands for one that has."""
    return device.type != "cpu"


def work_stream(device: torch.device, priority: int = 0) -> WorkStream | Immediate:
    """Return a queue of work that runs alongside the computation on `device`."""
    return WorkStream(device, priority) if device.type == "cuda" else Immediate()
