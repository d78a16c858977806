"""Streams that lag behind the host and one another as they please, on CPU: what is not waited for goes wrong."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable


class Ticket:
    def __init__(self, clock: Clock, stream: LazyStream, position: int) -> None:
        self._clock, self._stream, self._position = clock, stream, position

    @property
    def reached(self) -> bool:
        return self._stream.done >= self._position

    def wait(self) -> None:
        """The test's own thread is the current stream: it goes on when the work is done."""
        self._clock.run_until(lambda: self.reached)

    synchronize = wait


class LazyStream:
    """Stands in for `WorkStream`: what is queued is done later, in order."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.queue: deque[tuple[Callable[[], bool], Callable[[], object]]] = deque()
        self.queued = self.done = 0

    def run(self, function: Callable[[], object]) -> None:
        self._add(lambda: True, function)

    def after(self, ticket) -> None:
        self._add(lambda: getattr(ticket, "reached", True), lambda: None)

    def follow(self) -> None:
        pass  # what the current stream has, it has done

    def record_event(self) -> Ticket:
        return Ticket(self._clock, self, self.queued)

    def _add(self, ready: Callable[[], bool], function: Callable[[], object]) -> None:
        self.queue.append((ready, function))
        self.queued += 1
        self._clock.pass_some_time()


class Clock:
    """Lets its streams do their work in a random order, sometimes much and sometimes nothing at a time."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._streams: list[LazyStream] = []
        self.lag = 0

    def stream(self, device=None) -> LazyStream:
        self._streams.append(LazyStream(self))
        return self._streams[-1]

    def pass_some_time(self) -> None:
        for _ in range(self._random.choice((0, 0, 0, 1, 2))):
            self._advance()
        self.lag = max(self.lag, sum(len(stream.queue) for stream in self._streams))

    def run_until(self, reached: Callable[[], bool]) -> None:
        while not reached():
            assert self._advance(), "the streams wait for one another"

    def _advance(self) -> bool:
        ready = [stream for stream in self._streams if stream.queue and stream.queue[0][0]()]
        if not ready:
            return False
        stream = self._random.choice(ready)
        stream.queue.popleft()[1]()
        stream.done += 1
        return True
