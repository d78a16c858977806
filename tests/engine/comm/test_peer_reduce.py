"""The order of PeerReduction's work, with ranks and streams as threads that lag behind one another as they please.

Every rank of a small world has its streams, its memory and its part in the meetings here; nothing is waited for but
what PeerReduction waits for. Gradients are overwritten as soon as they may be, and pieces are copied in two halves.
"""

from __future__ import annotations

import functools
import queue
import random
import threading
import time
from typing import Any
from unittest import mock

import pytest
import torch

from cases import pairwise
from hf_bmtrain.engine.comm import peer_reduce as peer_reduction
from hf_bmtrain.engine.comm import reduce as reduction
from hf_bmtrain.engine.comm.layout import Layout
from hf_bmtrain.engine.comm.peer_reduce import PeerReduction
from hf_bmtrain.engine.comm.reduce import CollectiveReduction
from hf_bmtrain.engine.ops.peer_sum import reference

SECONDS = 20
GRADIENTS = 30


class Happened:
    """A point that a thread has come to."""

    def __init__(self) -> None:
        self.event = threading.Event()

    def wait(self) -> None:
        assert self.event.wait(SECONDS), "waits for ever"

    synchronize = wait


class ThreadStream:
    """Stands in for `WorkStream`: a thread that does what is queued, in order and late."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = random.Random(chance.random())
        self._queue: queue.Queue = queue.Queue()
        self.error: BaseException | None = None
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while (function := self._queue.get()) is not None:
            time.sleep(self._chance.choice((0, 0, 0, 0.001, 0.003)))
            try:
                function()
            except BaseException as error:
                self.error = error
                raise

    def run(self, function) -> None:
        self._queue.put(function)

    def stop(self) -> None:
        self._queue.put(None)

    def after(self, ticket) -> None:
        self.run(ticket.wait)

    def follow(self) -> None:
        pass  # what the current stream has, it has done

    def record_event(self) -> Happened:
        happened = Happened()
        self.run(happened.event.set)
        return happened


class Copies:
    """The ticket of several streams' work."""

    def __init__(self, events: list[Happened]) -> None:
        self._events = events

    def wait(self) -> None:
        for event in self._events:
            event.wait()


class World:
    """What the ranks share: meetings in order, objects exchanged."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._entered = [0] * size
        self._changed = threading.Condition()
        self._barrier = threading.Barrier(size, timeout=SECONDS)
        self._values: list[Any] = [None] * size

    def enter(self, rank: int) -> int:
        with self._changed:
            self._entered[rank] += 1
            self._changed.notify_all()
            return self._entered[rank]

    def wait_for(self, meeting: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: min(self._entered) >= meeting, SECONDS), "some rank does not come"

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values


class Lane:
    """All that PeerReduction asks of the lane below."""

    def __init__(self, world: World, rank: int) -> None:
        self._world, self.rank, self.size = world, rank, world.size

    def all_reduce(self, token):
        meeting = self._world.enter(self.rank)
        ticket = mock.Mock()
        ticket.wait = lambda: self._world.wait_for(meeting)
        return ticket


class Memory:
    """Everybody's memory is here; copies into it are made by a stream for each target."""

    def __init__(self, streams: list[ThreadStream]) -> None:
        self._streams = streams

    def allocate(self, numel: int, dtype: torch.dtype):
        tensor = torch.zeros(numel, dtype=dtype)
        return tensor, tensor, None

    def map(self, handle, nbytes):
        return handle

    def part(self, source, start, stop):
        return source[start:stop]

    def unlink(self, handle) -> None:
        pass

    def unmap(self, source) -> None:
        pass

    def free(self, handle) -> None:
        handle.fill_(255)  # NaN in every dtype, for whoever still reads it

    def copy(self, pairs):
        events = []
        for own, stream in zip(pairs, self._streams):
            for target, source in own:
                values, half = source.view(torch.uint8), source.nbytes // 2
                for part in (slice(half), slice(half, None)):
                    stream.run(lambda target=target[part], source=values[part]: target.copy_(source))
            events.append(stream.record_event())
        return Copies(events)


class Rank(threading.Thread):
    """Sends gradients, drops them when it may, and compares what lands."""

    def __init__(self, world: World, rank: int, seed: int, dtype: torch.dtype) -> None:
        super().__init__(daemon=True)
        self._world, self._rank, self._seed, self._dtype = world, rank, seed, dtype
        self._chance = random.Random(100 * seed + rank)
        self._streams: list[ThreadStream] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._train()
        except BaseException as error:
            self.error = error
        for stream in self._streams:
            stream.stop()

    def stream(self) -> ThreadStream:
        self._streams.append(ThreadStream(self._chance))
        return self._streams[-1]

    def _train(self) -> None:
        lane: Any = Lane(self._world, self._rank)
        memory: Any = Memory([self.stream() for _ in range(self._world.size)])
        apart = CollectiveReduction(lane, torch.device("cpu"))
        exchange = functools.partial(self._world.exchange, self._rank)
        peers = PeerReduction(apart, memory, exchange, 0, torch.device("cpu"))
        shapes = [torch.Size((5, 7)), torch.Size((3,)), torch.Size((11,))]
        layouts = [Layout.build([n * shape.numel() for shape in shapes], self._world.size, 64) for n in (1, 2)]
        reducers = [
            peers.reducer(layout, [torch.Size((n, *shape)) for shape in shapes], self._like(layout), True)
            for n, layout in zip((1, 2), layouts)
        ]
        open_flights: list[tuple] = []
        for number in range(GRADIENTS):
            kind = int(number > 3 and number % 3 == 0)  # the larger ones come later: slots grow meanwhile
            gradients = [self._gradient(number, self._rank, kind, index) for index in range(3)]
            shard = self._like(layouts[kind])
            total = torch.ones_like(shard, dtype=torch.float32) if number % 2 else None
            flight = reducers[kind].send([None if number % 5 == 0 else gradients[0], *gradients[1:]], shard, total)
            open_flights.append((number, kind, gradients, flight, shard, total))
            while len(open_flights) > self._chance.choice((0, 1, 2, 4)):
                self._land(layouts, *open_flights.pop(0))
        for flight in open_flights:
            self._land(layouts, *flight)
        assert [stream.error for stream in self._streams] == [None] * len(self._streams)

    def _land(self, layouts, number, kind, gradients, flight, shard, total) -> None:
        flight.wait()
        for gradient in gradients:
            gradient.fill_(float("nan"))  # whoever still reads them adds this
        rows = [self._packed(layouts[kind], number, rank, kind) for rank in range(self._world.size)]
        n = layouts[kind].shard_numel
        chunks = torch.stack([row[self._rank * n : (self._rank + 1) * n] for row in rows])
        expected, summed = torch.empty_like(shard), None if total is None else torch.ones_like(total)
        reference(chunks, expected, summed)
        if summed is not None:  # it began at 1, the padding too, which has become 0
            padding = self._padding(layouts[kind])
            expected[padding] = summed[padding] = 0
        assert torch.equal(shard, expected), f"gradient {number}"
        assert total is None or torch.equal(total, summed)

    def _padding(self, layout: Layout) -> torch.Tensor:
        """Which elements of this rank's shard are of no parameter."""
        sizes = torch.tensor(layout.shard_sizes(self._rank))
        return (torch.arange(len(sizes)) % 2 == 0).repeat_interleave(sizes)

    def _like(self, layout: Layout) -> torch.Tensor:
        return torch.empty(layout.shard_numel, dtype=self._dtype)

    def _gradient(self, number: int, rank: int, kind: int, index: int) -> torch.Tensor:
        shape = (kind + 1, *((5, 7), (3,), (11,))[index])
        generator = torch.Generator().manual_seed(1000 * number + 10 * rank + index)
        return torch.randn(shape, generator=generator).to(self._dtype)

    def _packed(self, layout: Layout, number: int, rank: int, kind: int) -> torch.Tensor:
        flat = torch.zeros(layout.numel, dtype=self._dtype)
        for index, (offset, numel) in enumerate(zip(layout.offsets, layout.numels)):
            if index > 0 or number % 5:
                flat[offset : offset + numel] = self._gradient(number, rank, kind, index).flatten()
        return flat


def stream_of_this_rank(device: torch.device, priority: int = 0) -> ThreadStream:
    rank = threading.current_thread()
    assert isinstance(rank, Rank)
    return rank.stream()


@pytest.mark.parametrize(
    ("size", "slots", "dtype"),
    pairwise([(3, 2, torch.bfloat16), (2, 3, torch.float32)], [2, 3], [2, 3], [torch.float32, torch.bfloat16]),
    ids=str,
)
def test_any_timing_gives_the_mean(size, slots, dtype, monkeypatch):
    monkeypatch.setattr(peer_reduction, "MAILBOXES", slots)
    for module in (reduction, peer_reduction):
        monkeypatch.setattr(module, "work_stream", stream_of_this_rank)
    for seed in range(3):
        world = World(size)
        ranks = [Rank(world, rank, seed, dtype) for rank in range(size)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        assert [rank.error for rank in ranks] == [None] * size, seed
