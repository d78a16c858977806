"""AdamOffloadOptimizer alongside the next forward and in a backward, on GPUs: the same bits, whatever lags."""

import functools
from contextlib import nullcontext

import pytest
import torch

import hf_bmtrain as bmt
from inner import note_parts
from lagging import DTYPES, lagging, small_chunks
from ranks import Ranks
from twenty_steps import OPTIONS, groups
from twins import Tower, ids

pytestmark = pytest.mark.gpu


class Trainee:
    """A tower of wider layers whose gradients are overwritten as they arrive: a backward's last places may vary."""

    def __init__(self, make, dtype, **options):
        torch.manual_seed(0)
        tower = Tower()
        for layer in tower.layers:
            layer.wide = torch.nn.Parameter(torch.randn(1000, 301))
        self.model = bmt.auto_wrap(tower.to(dtype))
        self.optimizer = make(groups(self.model.named_parameters()), **OPTIONS, **options)
        self.manager = bmt.optim.OptimManager()
        self.manager.add_optimizer(self.optimizer)
        self._number = 0
        self.handles = [
            parameter.register_post_accumulate_grad_hook(functools.partial(self._overwrite, index))
            for index, parameter in enumerate(self.model.parameters())
        ]

    def _overwrite(self, index, parameter):
        generator = torch.Generator().manual_seed(1000 * self._number + index)
        parameter.grad.copy_(parameter.take(torch.randn(parameter.full_shape, generator=generator)))

    def step(self, number, early=False, clip=False):
        self._number = number
        self.manager.zero_grad()
        with self.optimizer.update_in_backward() if early else nullcontext():
            self.manager.backward(self.model(ids(number, bmt.rank()).cuda()))
        if clip:
            self.manager.clip_grad_norm(self.optimizer.param_groups, 0.1)
        self.manager.step()

    def result(self):
        state = self.optimizer.state_dict()["state"]
        held = [value.cpu() for values in state.values() for _, value in sorted(values.items())]
        return [*self.model.state_dict().values(), *held]


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.result(), b.result(), strict=True))


def the_same(dtype, early, seed, **options):
    """Whatever lags, the bits are those of an AdamOptimizer that does all at once."""
    plain = Trainee(bmt.optim.AdamOptimizer, dtype, **options)
    with small_chunks(), lagging(seed):
        other = Trainee(bmt.optim.AdamOffloadOptimizer, dtype, **options)
        for number in range(8):
            plain.step(number, clip=not early)
            other.step(number, early, clip=not early)
            assert early is False or not other.optimizer.updated_in_backward
            if number % 3 == 2:
                assert equal(plain, other), number


def parts_are_made_inside_the_backward():
    trainee = Trainee(bmt.optim.AdamOffloadOptimizer, torch.bfloat16)
    parts = note_parts(trainee.optimizer)
    trainee.step(0, early=True)
    parts.clear()
    trainee.step(1, early=True)
    assert [inside for inside, _ in parts] == [True] * len({p.buffer for p in trainee.model.parameters()})


def the_host_never_waits(early):
    trainee = Trainee(bmt.optim.AdamOffloadOptimizer, torch.bfloat16)
    trainee.step(0, early)
    for handle in trainee.handles:
        handle.remove()  # the hooks bring gradients from the host
    for number in (1, 2):
        tokens = ids(number, 0).cuda()
        torch.cuda._sleep(1_000_000_000)  # half a second: the host may be busy
        done = torch.cuda.Event()
        torch.cuda.set_sync_debug_mode("error")
        try:
            trainee.manager.zero_grad()
            with trainee.optimizer.update_in_backward() if early else nullcontext():
                trainee.manager.backward(trainee.model(tokens))
            trainee.manager.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        done.record()
        assert not done.query(), "the host waited for the device"


def memory_is_free_for_the_next_forward():
    """Gradients of a block are given back when its own update is over, not when the last one is."""
    trainee = Trainee(bmt.optim.AdamOffloadOptimizer, torch.bfloat16)
    for number in range(3):
        trainee.step(number)
    trainee.manager.zero_grad()
    held = torch.cuda.memory_allocated()
    for parameter in trainee.model.parameters():
        parameter.buffer.gather()
        parameter.buffer.gradient.free_if_unused()
    freed = held - torch.cuda.memory_allocated()
    assert freed >= sum(2 * p.numel() for p in trainee.model.parameters())


CASES = [
    *((the_same, dtype, False, 1) for dtype in DTYPES), *((the_same, dtype, True, 2) for dtype in DTYPES),
    (parts_are_made_inside_the_backward,), *((the_host_never_waits, early) for early in (False, True)),
    (memory_is_free_for_the_next_forward,),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(getattr(c, "__name__", c)) for c in case))
def test_one_gpu(gpu: Ranks, case) -> None:
    gpu(*case)


@pytest.fixture(scope="module", params=["peer", "collective"])
def gpus(request):
    ranks = Ranks(min(max(torch.cuda.device_count(), 2), 4), "cuda", gather=request.param)
    yield ranks
    ranks.stop()


@pytest.mark.parametrize("early", [False, True])
def test_several_gpus(gpus: Ranks, early: bool) -> None:
    """Ranks lag by themselves, so that one gathers what another is still updating."""
    gpus(lagging_by_rank, early)


def lagging_by_rank(early):
    the_same(torch.bfloat16, early, bmt.rank())
