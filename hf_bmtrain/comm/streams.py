"""Queues of work beside the computation: CUDA streams, or at once where there are none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class Ticket(Protocol):
    """A point in a queue."""

    def wait(self) -> None:
        """The current stream goes on when the queue has come to this point."""
        ...

    def synchronize(self) -> None:
        """The host goes on when the queue has come to this point."""
        ...


class WorkStream:
    """A stream of its own on a CUDA device. Its user keeps the memory that queued work uses.

    priority: -1 for what goes before the computation where both are ready.
    """

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device, priority=priority)

    def run(self, function: Callable[[], object]) -> None:
        """Queue what `function` launches."""
        with torch.cuda.stream(self._stream):
            function()

    def after(self, ticket: Ticket) -> None:
        """What is queued from now on begins after `ticket`."""
        self.run(ticket.wait)

    def follow(self) -> None:
        """What is queued from now on begins after all that the current stream has now."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def mark(self) -> Ticket:
        event = torch.cuda.Event()
        event.record(self._stream)
        return event


class _Done:
    def wait(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


DONE: Ticket = _Done()
"""The ticket of what is already there."""


class Immediate:
    """The queue of a device without streams: everything is done when it is asked for."""

    def run(self, function: Callable[[], object]) -> None:
        function()

    def after(self, ticket: Ticket) -> None:
        pass

    def follow(self) -> None:
        pass

    def mark(self) -> Ticket:
        return DONE


def has_own_memory(device: torch.device) -> bool:
    """Whether host memory is something else than the memory of this device."""
    return device.type == "cuda"


def work_stream(device: torch.device, priority: int = 0) -> WorkStream | Immediate:
    return WorkStream(device, priority) if device.type == "cuda" else Immediate()
