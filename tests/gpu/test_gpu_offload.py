"""AdamOffloadOptimizer on one GPU: AdamOptimizer's bits, without waiting, whatever lags."""

import gc
from unittest import mock

import pytest
import torch

import hf_bmtrain as bmt
from hf_bmtrain.engine.base import pinned
from hf_bmtrain.engine.comm import streams
from inner import chunks_of
from lagging import DTYPES, lagging, small_chunks
from ranks import Ranks
from trainee import Trainee
from twenty_steps import OPTIONS, groups, train
from twins import Layer, Tower

pytestmark = pytest.mark.gpu


class WideLayer(Layer):
    """A layer with a parameter of many elements."""

    def __init__(self):
        super().__init__()
        self.wide = torch.nn.Parameter(torch.randn(1000, 301))

    def forward(self, x, shift=None):
        return super().forward(x, shift) + 0 * self.wide.sum()


class Wide(Trainee):
    """A tower of wider layers; the gradients of step 4 overflow."""

    def __init__(self, cls, dtype, **options):
        torch.manual_seed(0)
        tower = Tower()
        tower.layers = torch.nn.ModuleList([WideLayer() for _ in tower.layers])
        model = bmt.auto_wrap(tower.to(dtype))
        optimizer = cls(groups(model.named_parameters()), **OPTIONS, **options)
        super().__init__(model, optimizer, loss_scale=8.0, max_norm=0.1)

    def backward(self, seed: int) -> None:
        super().backward(seed)
        if seed == 4:
            self.model.head.weight.grad[1] = float("nan")

    def result(self) -> list[torch.Tensor]:
        state = self.optimizer.state_dict()["state"]
        held = [value.cpu() for values in state.values() for _, value in sorted(values.items())]
        return [*self.model.state_dict().values(), *held]


def the_same(dtype, exp_avg_dtype, seed):
    with small_chunks(), lagging(seed):
        trainees = [
            Wide(cls, dtype, exp_avg_dtype=exp_avg_dtype)
            for cls in (bmt.optim.AdamOptimizer, bmt.optim.AdamOffloadOptimizer)
        ]
        for number in range(8):
            for trainee in trainees:
                trainee.backward(number)
                trainee.end_step()
            if number % 3 == 2:
                assert all(torch.equal(a, b) for a, b in zip(*(trainee.result() for trainee in trainees))), number
        chunks = chunks_of(trainees[1].optimizer)
        assert len(chunks) > 10
        assert all(chunk.slab.exp_avg.is_pinned() for chunk in chunks)


def written_after_a_step(seed):
    """Weights that are loaded while the update is under way win over it."""
    with small_chunks(), lagging(seed):
        trainees = [Wide(cls, torch.bfloat16) for cls in (bmt.optim.AdamOptimizer, bmt.optim.AdamOffloadOptimizer)]
        for trainee in trainees:
            trainee.backward(0)
            trainee.end_step()
            named = trainee.model.named_parameters()
            trainee.model.load_state_dict({name: torch.full(p.full_shape, 0.5) for name, p in named})
            trainee.backward(1)
            trainee.end_step()
        assert all(torch.equal(a, b) for a, b in zip(*(trainee.result() for trainee in trainees)))


def written_in_part(seed):
    """Masks and additions between steps, on weights of which some are frozen for a while."""
    with small_chunks(), lagging(seed):
        trainees = [Wide(cls, torch.bfloat16) for cls in (bmt.optim.AdamOptimizer, bmt.optim.AdamOffloadOptimizer)]
        for number in range(8):
            for trainee in trainees:
                trainee.model.layers[1].wide.requires_grad_(number not in (2, 3))
                trainee.backward(number)
                trainee.end_step()
                if number % 2:
                    bmt.synchronize()
                    for parameter in trainee.model.parameters():
                        values = parameter.data.as_subclass(torch.Tensor)
                        values.mul_(torch.arange(values.numel(), device=values.device) % 3 > 0)
                        values[1::7] += 1e-3
            assert all(torch.equal(a, b) for a, b in zip(*(trainee.result() for trainee in trainees))), number


def moved(dtype, seed):
    """A state dict goes from one kind of optimizer to the other, and back."""
    kinds = [bmt.optim.AdamOptimizer, bmt.optim.AdamOffloadOptimizer]
    with small_chunks(), lagging(seed):
        trainees = [Wide(kind, dtype) for kind in kinds]
        for number in range(6):
            if number in (2, 4):
                for trainee, kind in zip(trainees, reversed(kinds) if number == 2 else kinds):
                    state = trainee.optimizer.state_dict()
                    trainee.optimizer = kind(groups(trainee.model.named_parameters()), **OPTIONS)
                    trainee.optimizer.load_state_dict(state)
                    trainee.manager.optimizers[0] = trainee.optimizer
            for trainee in trainees:
                trainee.backward(number)
                trainee.end_step()
            assert all(torch.equal(a, b) for a, b in zip(*(trainee.result() for trainee in trainees))), number


def all_dtypes_at_once():
    """Parameters of three dtypes in one optimizer, and the bytes of state an element that they have on the host."""
    dtypes, numel = (torch.float32, torch.float16, torch.bfloat16), 200_000
    for exp_avg_dtype, travel in ((torch.float32, 8 + 12 + 10), (torch.bfloat16, 6 + 10 + 8)):
        pair = [
            [torch.nn.Parameter(torch.linspace(-1, 1, numel, device="cuda").to(dtype)) for dtype in dtypes]
            for _ in range(2)
        ]
        kinds = bmt.optim.AdamOptimizer, bmt.optim.AdamOffloadOptimizer
        optimizers = [kind(ps, **OPTIONS, exp_avg_dtype=exp_avg_dtype) for kind, ps in zip(kinds, pair)]
        for step in range(5):
            for parameters, optimizer in zip(pair, optimizers):
                for number, p in enumerate(parameters):
                    p.grad = (number + step + 1) * p.detach().sin()
                optimizer.step()
        states = [[*optimizer.state_dict()["state"].values()] for optimizer in optimizers]
        assert all(torch.equal(a, b) for a, b in zip(*pair))
        assert all(torch.equal(one[k].cpu(), other[k].cpu()) for one, other in zip(*states) for k in one)
        held = [
            t
            for slab in {chunk.slab for chunk in chunks_of(optimizers[1])}
            for t in slab.part(0, numel)
            if t is not None
        ]
        assert sum(t.element_size() for t in held) == travel
        assert all(t.is_pinned() for t in held)


def twenty_steps(dtype):
    train(dtype, bmt.optim.AdamOffloadOptimizer)


def never_waits():
    Wide(bmt.optim.AdamOffloadOptimizer, torch.bfloat16).check_never_waits()


def the_next_forward_begins_early():
    """The current stream is not behind the update at the end of a step; a gathered buffer is."""
    with small_chunks():
        trainee = Wide(bmt.optim.AdamOffloadOptimizer, torch.bfloat16)
        trainee.backward(0)
        trainee.end_step()
    trainee.backward(1)
    original = streams.WorkStream.run

    def slow(self, function):
        original(self, lambda: (torch.cuda._sleep(20_000_000), function()))

    with mock.patch.object(streams.WorkStream, "run", slow):
        trainee.end_step()
    ended, gathered = torch.cuda.Event(), torch.cuda.Event()
    ended.record()
    ended.synchronize()
    updated = trainee.model.layers[2].linear._parameters["weight"].buffer.update.ticket
    assert not updated.query()
    trainee.model.head._parameters["weight"].buffer.gather()
    gathered.record()
    gathered.synchronize()
    assert not updated.query()
    last = trainee.model.layers[2].linear._parameters["weight"].buffer
    last.gather()
    gathered.record()
    gathered.synchronize()
    assert updated.query()


def memory_is_unlocked():
    gc.collect()
    with mock.patch.object(pinned, "unregister", wraps=pinned.unregister) as unregister:
        parameter = torch.nn.Parameter(torch.ones(1000, device="cuda"))
        parameter.grad = torch.ones_like(parameter)
        optimizer = bmt.optim.AdamOffloadOptimizer([parameter])
        optimizer.step()
        assert optimizer.state[parameter]["exp_avg"].is_pinned()
        del optimizer
        gc.collect()
        assert unregister.call_count == 1
        assert bool((parameter < 1).all())


def too_much_is_refused():
    parameter = torch.nn.Parameter(torch.ones(1 << 20, device="cuda"))
    parameter.grad = torch.ones_like(parameter)
    with mock.patch.object(pinned, "available_bytes", return_value=1 << 20):
        with pytest.raises(RuntimeError, match="pinned host memory for the Adam state of 1,048,576 elements"):
            bmt.optim.AdamOffloadOptimizer([parameter]).step()


CASES = [
    *((the_same, d, m, s) for s in range(3) for d in DTYPES for m in (torch.float32, torch.bfloat16)),
    *((twenty_steps, dtype) for dtype in DTYPES),
    (written_after_a_step, 1), (written_in_part, 2), *((moved, dtype, 3) for dtype in DTYPES), (all_dtypes_at_once,),
    (never_waits,),
    (the_next_forward_begins_early,), (memory_is_unlocked,), (too_much_is_refused,),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(getattr(c, "__name__", c)) for c in case))
def test_one_gpu(gpu: Ranks, case) -> None:
    gpu(*case)
