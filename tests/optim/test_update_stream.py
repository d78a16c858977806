"""AdamOptimizer(overlap_forward=True) is AdamOptimizer, by streams that lag at random; nobody waits for too much."""

import functools
import gc
import pickle
import weakref

import pytest
import torch

import hf_bmtrain as bmt
from hf_bmtrain.sharding.pending_update import PendingUpdate
from offloaded import DTYPES, Trainee, as_on_a_gpu, assert_equal, steps_in_a_row, the_same, written_gradients_wait
from twins import ids

overlapping = functools.partial(bmt.optim.AdamOptimizer, overlap_forward=True)


def lagging(dtype, seed, kernels, **options):
    with as_on_a_gpu(seed, kernels) as clock:
        the_same(dtype, overlapping, **options)
    assert clock.lag > 6, "the stream was never far behind"


def short_and_held(seed):
    lagging(torch.bfloat16, seed, True, exp_avg_dtype=torch.bfloat16, hold_steps=2)


def direct_reads(seed):
    """`wait`, `.data`, `gather` and both state dicts show the step's weights and state at once."""
    with as_on_a_gpu(seed):
        trainees = [Trainee(cls, torch.bfloat16) for cls in (bmt.optim.AdamOptimizer, overlapping)]
        for number in range(10):
            for trainee in trainees:
                trainee.step(number)
            if number % 5 == 0:
                trainees[1].optimizer.wait()
            if number % 5 == 4:
                a, b = (trainee.manager.state_dict()["optimizers"][0]["state"] for trainee in trainees)
                assert all(torch.equal(a[key][name], b[key][name]) for key in a for name in a[key])
            if number % 5 == 3:
                assert_equal(*trainees, number)
            for a, b in zip(*(trainee.model.parameters() for trainee in trainees)):
                if number % 5 == 0:
                    assert torch.equal(a, b)
                elif number % 5 == 1:
                    assert torch.equal(a.data, b.data)
                elif number % 5 == 2:
                    assert torch.equal(a.gather(), b.gather())


def looked_at_and_pickled(seed):
    """`inspect_model` and a pickle of a parameter show the step's weights at once."""
    with as_on_a_gpu(seed):
        trainees = [Trainee(cls, torch.float32) for cls in (bmt.optim.AdamOptimizer, overlapping)]
        for number in range(4):
            for trainee in trainees:
                trainee.step(number)
            if number % 2:
                a, b = (bmt.inspect.inspect_model(trainee.model, "*") for trainee in trainees)
                assert a == b
            else:
                a, b = (pickle.dumps([*trainee.model.parameters()]) for trainee in trainees)
                assert all(torch.equal(x, y) for x, y in zip(pickle.loads(a), pickle.loads(b)))


def ordinary(seed):
    """Nobody waits for parameters outside buffers: they are there after the step."""
    with as_on_a_gpu(seed):
        parameters = [torch.nn.Parameter(torch.linspace(-1, 1, 200)) for _ in range(2)]
        optimizer, plain = overlapping([parameters[0]], lr=0.1), bmt.optim.AdamOptimizer([parameters[1]], lr=0.1)
        for _ in range(3):
            for parameter, either in zip(parameters, (optimizer, plain)):
                parameter.grad = parameter.detach().sin()
                either.step()
            assert torch.equal(*parameters)


def each_buffer_waits_for_its_own(seed):
    """A gather is behind the update of its buffer and not behind the last one; updates come in the buffers' order."""
    with as_on_a_gpu(seed) as clock:
        trainee = Trainee(overlapping, torch.bfloat16)
        trainee.step(0)
        trainee.model(ids(1, bmt.rank())).backward()
        clock.pass_some_time = lambda: None  # from here nothing is done before somebody waits
        trainee.optimizer.step()
        first = trainee.model.embedding._parameters["weight"].buffer
        last = trainee.model.layers[2].linear._parameters["weight"].buffer
        tickets = first.update._ticket, last.update._ticket
        assert not any(ticket.reached for ticket in tickets)
        first.gather()
        assert tickets[0].reached
        assert not tickets[1].reached
        last.gather()
        assert tickets[1].reached


def ordinary_readers_need_no_care():
    """Without overlap_forward nothing is pending when `step` returns."""
    with as_on_a_gpu(0):
        trainee = Trainee(bmt.optim.AdamOptimizer, torch.bfloat16)
        trainee.step(0)
        assert not any(p.buffer.update.pending for p in trainee.model.parameters())


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "torch"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 2])
def test_lagging_is_the_same(world, size, dtype, kernels):
    world(size)(lagging, dtype, 3, kernels)


def test_lagging_with_a_short_exp_avg_and_held_steps_is_the_same(world):
    world(2)(short_and_held, 4)


CASES = [direct_reads, looked_at_and_pickled, ordinary, each_buffer_waits_for_its_own]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@pytest.mark.parametrize("size", [1, 2])
def test_overlap(world, size, case):
    world(size)(case, 7)


@pytest.mark.parametrize("case", [written_gradients_wait, steps_in_a_row], ids=lambda case: case.__name__)
@pytest.mark.parametrize("size", [1, 2])
def test_it_lags_as_an_offloaded_one_does(world, size, case):
    world(size)(case, 7, overlapping)


def test_without_overlap_nothing_is_pending(world):
    world(2)(ordinary_readers_need_no_care)


def test_gradients_are_kept_until_the_current_stream_has_waited():
    class Late:
        waited = False

        def wait(self):
            self.waited = True

    update, ticket, gradient = PendingUpdate(None), Late(), torch.zeros(3)
    alive = weakref.ref(gradient)
    update.begin(ticket, [gradient])
    del gradient
    gc.collect()
    assert alive() is not None
    update.wait()
    assert ticket.waited
    gc.collect()
    assert alive() is None
