"""What lanes carry: every dtype is moved whole, and added up only where there is an arithmetic for it."""

import threading
import time
from unittest import mock

import pytest
import torch

import hf_bmtrain as bmt
from cases import by_default, full, in_full
from hf_bmtrain.engine.comm.collective_log import CollectiveLog
from hf_bmtrain.engine.comm.nccl import NcclCommunicator, abort_all
from ranks import on_ranks

NATIVE = [
    torch.int8, torch.uint8, torch.int32, torch.uint32, torch.int64, torch.uint64, torch.float16, torch.float32,
    torch.float64, torch.bfloat16,
]  # fmt: skip
"""In the order of nccl.h from 0."""
OTHERS = [torch.bool, torch.int16, torch.uint16, torch.complex64, torch.float8_e4m3fn]
NUMEL = 12


class Asked:
    """Stands for CuPy's communicator: notes what each call is asked to do."""

    def __init__(self) -> None:
        self.calls = []

    def __getattr__(self, name):
        return lambda *arguments: self.calls.append((name, arguments))


class Lane(NcclCommunicator):
    """The lane without its stream, which needs a GPU."""

    def __init__(self) -> None:
        self._comm, self.collective_log = Asked(), CollectiveLog("lane")

    def _issue(self, call, send, receive, arguments):
        call(*arguments)

    def last(self):
        return self._comm.calls[-1]


def tensor(dtype):
    return torch.zeros(NUMEL, dtype=dtype)


@pytest.mark.parametrize("dtype", by_default([*NATIVE, *OTHERS], torch.bfloat16, torch.bool, torch.float8_e4m3fn))
def test_nccl_moves_all_bytes(dtype):
    lane, shard = Lane(), tensor(dtype)
    moves = [lambda: lane.all_gather(shard, shard), lambda: lane.broadcast(shard, 1)]
    for move, expected in zip(moves, [("allGather", ()), ("broadcast", (1,))]):
        move()
        name, (count, kind, *rest) = lane.last()
        assert (name, tuple(rest)) == expected
        assert count * NATIVE[kind].itemsize == shard.nbytes
        assert NATIVE[kind] == (dtype if dtype in NATIVE else torch.uint8)


@full
@pytest.mark.parametrize("dtype", by_default(NATIVE, torch.bfloat16, torch.int64))
def test_nccl_reduces_its_own_types(dtype):
    lane, shard = Lane(), tensor(dtype)
    kind = NATIVE.index(dtype)
    lane.all_reduce(shard)
    assert lane.last() == ("allReduce", (NUMEL, kind, 0))
    lane.all_reduce(shard, maximum=True)
    assert lane.last() == ("allReduce", (NUMEL, kind, 2))
    lane.reduce_scatter_mean(shard, shard)
    assert lane.last() == ("reduceScatter", (NUMEL, kind, 4))


@full
@pytest.mark.parametrize("dtype", [torch.bool, *in_full(torch.int16, torch.uint16, torch.float8_e4m3fn)])
def test_nccl_does_not_add_bytes(dtype):
    lane, shard = Lane(), tensor(dtype)
    for reduce in (lambda: lane.all_reduce(shard), lambda: lane.reduce_scatter_mean(shard, shard)):
        with pytest.raises(ValueError, match=f"NCCL cannot reduce {dtype}"):
            reduce()


@on_ranks(2)
def test_every_dtype_between_ranks():
    for dtype in [torch.bool, torch.int16, torch.complex64]:
        mine = (torch.arange(5) + bmt.rank()) % 2
        gathered = bmt.distributed.all_gather(mine.to(dtype))
        assert gathered.dtype == dtype
        expected = [(torch.arange(5) + rank) % 2 for rank in range(bmt.world_size())]
        assert torch.equal(gathered, torch.stack(expected).to(dtype))
        assert torch.equal(bmt.distributed.broadcast(mine.to(dtype), 1), expected[1].to(dtype))
        with pytest.raises(ValueError, match="Convert x first"):
            bmt.distributed.all_reduce(mine.to(dtype))


SIZES = [[1, 0, 4], [2, 3, 0], [0, 5, 0]]
"""From rank (row) to rank (column)."""


def sent(source, target, dtype=torch.int16):
    return (100 * source + 10 * target + torch.arange(SIZES[source][target])).to(dtype)


@on_ranks(3)
def test_all_to_all_of_uneven_parts():
    communicator, rank = bmt.current_world().reduce, bmt.rank()
    for dtype in (torch.int16, torch.bfloat16):
        counts = [row[rank] for row in SIZES]
        received = torch.zeros(sum(counts), dtype=dtype)
        parts = torch.cat([sent(rank, to, dtype) for to in range(3)])
        communicator.all_to_all(received, parts, counts, SIZES[rank]).wait()
        assert torch.equal(received, torch.cat([sent(source, rank, dtype) for source in range(3)]))


def test_nccl_exchanges_bytes_in_one_group(monkeypatch):
    lane = Lane()
    monkeypatch.setattr("hf_bmtrain.engine.comm.nccl.import_nccl", lambda: lane._comm)
    lane._issue = lambda call, send, receive, arguments: call(1000, 2000, *arguments, 7)
    received, parts = torch.zeros(8, dtype=torch.int16), torch.zeros(5, dtype=torch.int16)
    lane.all_to_all(received, parts, [row[1] for row in SIZES], SIZES[1])
    assert lane._comm.calls == [
        ("groupStart", ()), ("send", (1000, 4, 1, 0, 7)), ("send", (1004, 6, 1, 1, 7)), ("recv", (2000, 6, 1, 1, 7)),
        ("recv", (2006, 10, 1, 2, 7)), ("groupEnd", ()),
    ]  # fmt: skip


class Abortable:
    """A communicator whose abort takes until `ready` returns."""

    def __init__(self, ready):
        self._ready = ready

    def close(self, abort):
        assert abort
        self._ready()


def test_communicators_are_aborted_together():
    """NCCL's abort waits for operations of the other communicators, which end with theirs."""
    meeting = threading.Barrier(3)
    assert abort_all([Abortable(lambda: meeting.wait(20)) for _ in range(3)])
    never, end = threading.Event(), time.monotonic() + 10
    assert not abort_all([Abortable(never.wait), Abortable(lambda: None)], seconds=0.2)
    assert time.monotonic() < end
    never.set()


def fails(*arguments):
    raise RuntimeError("as asked")


@full
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_communicator_whose_abort_fails_is_not_aborted():
    assert not abort_all([Abortable(fails), Abortable(lambda: None)])


@full
def test_nothing_is_aborted_where_no_thread_starts(monkeypatch):
    monkeypatch.setattr(threading.Thread, "start", fails)
    assert not abort_all([Abortable(lambda: None)])


class Failing(NcclCommunicator):
    """A lane on which every operation fails, without a GPU."""

    def __init__(self):
        self._comm, self.collective_log = mock.Mock(), CollectiveLog("lane")
        self._comm.allReduce.side_effect = OSError("remote process exited")
        self._comm.allReduce.__name__ = "allReduce"
        self.size = 2
        self._name, self.rank, self._device, self._stream = "lane", 0, torch.device("cpu"), mock.Mock()


def test_an_error_of_nccl_names_the_rank_that_is_gone(monkeypatch):
    """NCCL says at once that a process has exited, and not which; the watch says it within seconds."""
    monkeypatch.setattr(torch.cuda, "current_stream", mock.Mock())
    lane = Failing()
    threading.Timer(0.4, lambda: setattr(lane.collective_log, "problem", "rank 1 was killed")).start()
    with pytest.raises(RuntimeError, match="rank 1 was killed"):
        lane.all_reduce(tensor(torch.float32))
    monkeypatch.setattr(CollectiveLog, "check", lambda collective_log, seconds: None)
    with pytest.raises(
        RuntimeError,
        match="allReduce of 12 elements of torch.float32 failed on rank 0 .* has 2 ranks: remote process exited",
    ):
        Failing().all_reduce(tensor(torch.float32))
