"""Memory of what is dropped is freed at once, without the garbage collector; slices that are kept stay usable."""

import gc
import time
import weakref

import pytest
import torch
from torch import nn

import hf_bmtrain as bmt
from cases import in_full
from hf_bmtrain.engine.sharding.slots import find_places, shard_places
from hf_bmtrain.engine.sharding.state_dict import follow_state_dicts

SIZES = pytest.mark.parametrize("size", [2, *in_full(1)])


class Scaled(nn.Module):
    """A parameter of its own, and a child."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.rand(6))
        self.linear = nn.Linear(6, 6)


class Unused(Scaled):
    """Holds a layer that it does not use, which shares a buffer with the other parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) * self.scale).square().mean()


class Own(bmt.DistributedModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = bmt.DistributedParameter(torch.rand(6, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight).square().mean()


def sharded_module():
    world = bmt.current_world()
    module = Scaled()
    slots = shard_places(world, find_places(module.modules()), world.schedule.blocks)[1]
    follow_state_dicts(module, slots)
    module.load_state_dict(Scaled().state_dict())
    return module


def trained_module():
    module = Own()
    for _ in range(2):
        module(torch.ones(2, 6)).backward()
    module(torch.ones(2, 6))
    return module


def freed(make):
    module = make()
    dropped = [weakref.ref(module), *(weakref.ref(parameter.buffer) for parameter in module.parameters())]
    gc.collect()
    gc.disable()
    try:
        del module
        end = time.monotonic() + 5  # the watch may be looking at a function, with what is in its variables
        while any(reference() is not None for reference in dropped) and time.monotonic() < end:
            time.sleep(0.01)
        assert [reference() for reference in dropped] == [None] * len(dropped)
    finally:
        gc.enable()


def kept_slice():
    module = Own()
    whole, piece = module.weight.gather(), module.weight
    del module
    assert torch.equal(piece.gather(), whole) and len(piece.buffer.slices) == 1


def dropped_before_backward():
    x = torch.ones(2, 6, requires_grad=True)
    loss = Own()(x)
    loss.backward()
    assert x.grad.abs().sum() > 0


def dropped_layer():
    """The rest of its buffer is trained on, through accumulations too."""
    model, twin = bmt.auto_wrap(Unused()), Unused()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, twin)]
    assert model.unused.weight.buffer is model.scale.buffer
    for step in range(4):
        if step == 2:
            model.unused = twin.unused = nn.Identity()
            optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, twin)]
        for each, optimizer in zip((model, twin), optimizers):
            for number in range(2):
                each(torch.full((2, 6), 1.0 + step + number)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert len(model.scale.buffer.slices) == 3
    for name, value in twin.state_dict().items():
        torch.testing.assert_close(model.get_parameter(name).gather(), value)


@SIZES
@pytest.mark.parametrize("make", [sharded_module, trained_module], ids=lambda make: make.__name__)
def test_freed(world, size, make):
    world(size)(freed, make)


@SIZES
@pytest.mark.parametrize("case", [kept_slice, dropped_before_backward, dropped_layer], ids=lambda case: case.__name__)
def test_kept(world, size, case):
    world(size)(case)
