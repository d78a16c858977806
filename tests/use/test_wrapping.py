"""BMTrainModelWrapper where BMTrain's scripts use it: around parts of a model, and around what is sharded already."""

import pytest
import torch
from torch import nn

import hf_bmtrain as bmt
from cases import full, in_full
from ranks import on_ranks
from twins import WIDTH, compare_backward


def rows(step, rank):
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


class Mixed(nn.Module):
    """`wrap` and `block` are BMTrain's, or identities."""

    def __init__(self, wrap, block):
        super().__init__()
        torch.manual_seed(0)
        self.first = wrap(nn.Linear(WIDTH, WIDTH))
        self.inner = block(nn.Sequential(wrap(nn.Linear(WIDTH, WIDTH)), nn.Tanh(), wrap(nn.Linear(WIDTH, WIDTH))))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.last(self.inner(torch.tanh(self.first(x)))).square().mean()


class MixedDistributed(bmt.DistributedModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.plain = nn.Linear(WIDTH, WIDTH)
        self.sharded = bmt.BMTrainModelWrapper(nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        return self.sharded(torch.tanh(self.plain(x))).square().mean()


class PlainMixed(nn.Module):
    forward = MixedDistributed.forward

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.plain = nn.Linear(WIDTH, WIDTH)
        self.sharded = nn.Linear(WIDTH, WIDTH)


def train_both(model, twin):
    optimizer, plain = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin))
    for step in range(3):
        compare_backward(model, twin, lambda either, step, rank: either(rows(step, rank)), step)
        for either in (optimizer, plain):
            either.step()
            either.zero_grad()


def parts_of_blocks():
    """Wrapped layers inside a block, whose guards must see nothing wrong in the wholes, and outside one."""
    model = bmt.BMTrainModelWrapper(Mixed(bmt.BMTrainModelWrapper, bmt.CheckpointBlock))
    train_both(model, Mixed(lambda layer: layer, lambda layer: layer))
    assert bmt.BMTrainModelWrapper(model) is model


def the_rest_of_a_distributed_module():
    model = bmt.BMTrainModelWrapper(MixedDistributed())
    assert all(isinstance(parameter, bmt.DistributedParameter) for parameter in model.parameters())
    train_both(model, PlainMixed())


def sharded_already():
    """Each is returned as it is."""
    layer = bmt.nn.Linear(WIDTH, WIDTH)
    block = bmt.CheckpointBlock(nn.Linear(WIDTH, WIDTH))
    blocks = bmt.TransformerBlockList([nn.Linear(WIDTH, WIDTH)])
    whole = nn.Sequential(bmt.CheckpointBlock(nn.Linear(WIDTH, WIDTH)), nn.Tanh(), bmt.nn.Linear(WIDTH, WIDTH))
    for each in (layer, block, blocks, whole):
        names = {name: type(module) for name, module in each.named_modules()}
        assert bmt.BMTrainModelWrapper(each) is each
        assert {name: type(module) for name, module in each.named_modules()} == names
    with pytest.raises(ValueError, match="wrapped already"):
        bmt.auto_wrap(whole)


@pytest.mark.parametrize("case", [parts_of_blocks, *in_full(the_rest_of_a_distributed_module, sharded_already)])
def test_wrapping(world, case):
    world(2)(case)


@full
@on_ranks(2)
def test_still_guarded():
    """A plain parameter in a wrapped part of a block is still named."""
    block = bmt.CheckpointBlock(nn.Sequential(bmt.BMTrainModelWrapper(nn.Linear(WIDTH, WIDTH))))
    block[0].register_parameter("late", nn.Parameter(torch.zeros(2)))
    with pytest.raises(RuntimeError, match="^'late' is a Parameter"):
        block(rows(0, 0))


@on_ranks(1)
def test_a_module_without_parameters():
    """OpenDelta wraps the activation functions of its adapters."""
    module = nn.GELU()
    assert bmt.BMTrainModelWrapper(module) is module and type(module) is nn.GELU
