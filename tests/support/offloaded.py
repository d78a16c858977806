"""Optimizers by the path of a GPU on the CPU, with streams that lag at random, against FloatMasters."""

from contextlib import ExitStack, contextmanager
from unittest import mock

import torch

import hf_bmtrain as bmt
from float_masters import FloatMasters
from hf_bmtrain.engine.ops import adam_step
from hf_bmtrain.features.offload import device_update, slabs
from hf_bmtrain.features.offload import optimizer as offload
from slow_streams import Clock
from twenty_steps import OPTIONS, groups
from twins import Tower, ids

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@contextmanager
def as_on_a_gpu(seed):
    """Slabs, chunks and streams on CPU; small enough that a tower has many, and runs cross their borders."""
    clock = Clock(seed)
    patches = [
        mock.patch.object(offload, "has_own_memory", return_value=True),
        mock.patch.object(device_update, "work_stream", clock.stream),
        mock.patch.object(adam_step, "kernels_serve", return_value=True),
        mock.patch.object(slabs, "CHUNK_ELEMENTS", 64),
        mock.patch.object(slabs, "SLAB_ELEMENTS", 256),
    ]
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield clock


class Trainee:
    """A tower, an optimizer and its manager."""

    def __init__(self, cls, dtype, **options):
        self.model = bmt.auto_wrap(Tower().to(dtype))
        self.optimizer = cls(groups(self.model.named_parameters()), **OPTIONS, **options)
        self.manager = bmt.optim.OptimManager(loss_scale=8.0)
        self.manager.add_optimizer(self.optimizer)

    def step(self, number, clip=True, backwards=1):
        self.manager.zero_grad()
        for micro in range(backwards):
            self.manager.backward(self.model(ids(100 * micro + number, bmt.rank())))
        if clip:
            self.manager.clip_grad_norm(self.optimizer.param_groups, 0.1)
        self.manager.step()


def assert_equal(a, b, label):
    states = [
        [*trainee.model.state_dict().values()]
        + [v for _, state in sorted(trainee.optimizer.state_dict()["state"].items()) for _, v in sorted(state.items())]
        for trainee in (a, b)
    ]
    assert len(states[0]) == len(states[1])
    assert all(torch.equal(x, y) for x, y in zip(*states)), label


def the_same(dtype, other=bmt.optim.AdamOffloadOptimizer, **options):
    """Steps with and without clipping, accumulation, overflow, freezing, a change of lr; compared now and then."""
    trainees = [Trainee(cls, dtype, **options) for cls in (FloatMasters, other)]
    for number in range(10):
        for trainee in trainees:
            if number == 3:
                trainee.optimizer.param_groups[1]["lr"] = 1e-3
            trainee.model.layers[1].linear.requires_grad_(number not in (4, 5))
            trainee.step(number, clip=number % 3 > 0, backwards=1 + number % 2)
        if number == 6:  # overflow on one rank
            for trainee in trainees:
                trainee.manager.backward(trainee.model(ids(0, 0)) * (float("inf") if bmt.rank() == 0 else 1.0))
                trainee.manager.step()
        if number in (2, 6, 7, 9):
            assert_equal(*trainees, number)
    written(trainees)


def written(trainees):
    """Weights that are loaded right after a step win over it, and the masters follow."""
    for trainee in trainees:
        trainee.step(20)
        trainee.model.load_state_dict({k: torch.full_like(v, 0.5) for k, v in Tower().state_dict().items()})
        trainee.step(21)
    assert_equal(*trainees, "loaded")
