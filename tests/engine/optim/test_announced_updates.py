"""Updates alongside the computation where ranks pull each other's weights: read when they are done, on every rank."""

import time
from contextlib import contextmanager, nullcontext
from unittest import mock

import pytest
import torch

import hf_bmtrain as bmt
from cases import by_default, in_full
from hf_bmtrain.engine.comm.communicator import GlooCommunicator
from inner import peer_gather
from offloaded import as_on_a_gpu
from twins import Tower, ids


class Trainee:
    """A sharded tower and its optimizer; `lag` seconds pass on this rank between step and forward."""

    def __init__(self, make, lag=0.0) -> None:
        self.model = bmt.auto_wrap(Tower())
        self.optimizer = make(self.model.parameters(), lr=1e-2)
        self._lag = lag

    def step(self, number, evaluations=2, early=False) -> list[torch.Tensor]:
        """The losses of evaluations after the step, and the weights."""
        self.optimizer.zero_grad()
        with self.optimizer.update_in_backward() if early else nullcontext():
            self.model(ids(number, bmt.rank())).backward()
        self.optimizer.step()
        time.sleep(self._lag)
        with torch.no_grad():
            losses = [self.model(ids(50, 0)) for _ in range(evaluations)]
        return [*losses, *(p.data.as_subclass(torch.Tensor).clone() for p in self.model.parameters())]


def updates_are_announced(early):
    """A rank that gathers at once gets what a slower one is still updating; evaluations may differ in number."""
    # Late streams count writes late, too, by which unannounced ones are told; a device's are counted when queued.
    with nullcontext() if early else as_on_a_gpu(bmt.rank()):
        plain = Trainee(bmt.optim.AdamOptimizer)
        expected = [plain.step(number) for number in range(4)]
        del plain
        late = Trainee(bmt.optim.AdamOffloadOptimizer, lag=0.05 * bmt.rank())
        for number in range(4):
            count = (bmt.rank() + number) % 3 if number < 3 else 2
            got = late.step(number, count, early)
            assert all(torch.equal(a, b) for a, b in zip(got, expected[number][2 - count :], strict=True)), number


@contextmanager
def streamed_at_once():
    """The path of a GPU, with streams that have done everything as soon as it is queued."""
    with as_on_a_gpu(0) as clock:

        def catch_up():
            while clock._advance():
                pass

        clock.pass_some_time = catch_up
        yield


def each_announced_update_meets_by_itself():
    """No gather after a step has a rendezvous of its own, and the first one waits for its own update alone."""
    trainee = Trainee(bmt.optim.AdamOffloadOptimizer)
    trainee.step(0)
    buffers = list(dict.fromkeys(p.buffer for p in trainee.model.parameters()))
    peers, reduced = peer_gather(), []
    original = GlooCommunicator.all_reduce

    def noting(communicator, *operands, **options):
        reduced.append(communicator)
        return original(communicator, *operands, **options)

    def counts():
        """How often updates met on a communicator of their own, and weights were published on that of the gathers."""
        own = {id(peers.communicator), id(bmt.current_world().reduce)}
        return sum(id(each) not in own for each in reduced), reduced.count(
            peers.communicator
        ) - wait_for_readers.call_count

    with (
        mock.patch.object(GlooCommunicator, "all_reduce", noting),
        mock.patch.object(peers, "wait_for_readers", wraps=peers.wait_for_readers) as wait_for_readers,
    ):
        trainee.optimizer.zero_grad()
        trainee.model(ids(1, 0)).backward()
        assert counts() == (0, 0)
        trainee.optimizer.step()
        assert counts() == (len(buffers), 0)
        assert all(buffer.shard.shared.meeting is not None for buffer in buffers)
        buffers[0].gather()
        assert [buffer.shard.shared.meeting is None for buffer in buffers] == [True] + [False] * (len(buffers) - 1)
        trainee.model(ids(2, 0)).backward()
        assert counts() == (len(buffers), 0)
        assert wait_for_readers.call_count > 0 and len(reduced) > len(buffers)


def loaded_after_an_announcement():
    """Weights that are written right after a step win over it, on every rank."""
    model, other = bmt.auto_wrap(Tower()), Tower()
    optimizer = bmt.optim.AdamOffloadOptimizer(model.parameters())
    for number in range(3):
        model(ids(number, bmt.rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(0.5)
        model.load_state_dict(other.state_dict())
        torch.testing.assert_close(model(ids(0, 0)), other(ids(0, 0)))
        bmt.synchronize()


def an_update_after_a_forward_is_refused():
    """As any write is that a slower rank may read half done."""
    trainee = Trainee(bmt.optim.AdamOffloadOptimizer)
    trainee.step(0)
    trainee.optimizer.zero_grad()
    trainee.model(ids(1, 0)).backward()
    with torch.no_grad():
        trainee.model(ids(1, 0))
    with pytest.raises(RuntimeError, match="partly written"):
        trainee.optimizer.step()
    bmt.synchronize()


@pytest.mark.parametrize("early", [True, *in_full(False)], ids=["inside", "after"])
@pytest.mark.parametrize("size", [2, *in_full(3)])
def test_updates_alongside_the_computation(peers, size, early):
    peers(size)(updates_are_announced, early)


OWN = [each_announced_update_meets_by_itself, loaded_after_an_announcement, an_update_after_a_forward_is_refused]


def at_once(case):
    with streamed_at_once():
        case()


@pytest.mark.parametrize(
    "case",
    by_default(OWN, each_announced_update_meets_by_itself, an_update_after_a_forward_is_refused),
    ids=lambda case: case.__name__,
)
def test_announced(peers, case):
    peers(2)(at_once, case)
