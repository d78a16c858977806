"""What a slice says of itself, its part, and what may be set as its gradient."""

import ctypes

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hf_bmtrain as bmt
from cases import in_full
from ranks import on_ranks
from twins import WIDTH, Tower, ids


def describes_the_whole():
    model, twin = bmt.auto_wrap(Tower()), Tower()
    for mine, plain in zip(model.parameters(), twin.parameters()):
        assert (mine.shape, mine.numel(), mine.stride(), mine.nbytes) == (
            plain.shape, plain.numel(), plain.stride(), plain.nbytes,
        )  # fmt: skip
        assert mine.data.shape == plain.shape
    stored = torch.tensor([sum(len(p.part) for p in model.parameters())])
    assert bmt.sum_loss(stored.float()) * bmt.world_size() == sum(p.numel() for p in twin.parameters())


def part_is_the_memory():
    model = bmt.auto_wrap(Tower())
    weight = model.layers[0].linear.weight
    assert type(weight.part) is torch.Tensor
    assert weight.part.dim() == 1
    before, version = weight.gather().detach(), weight._version
    weight.part.mul_(2)
    assert weight._version > version
    torch.testing.assert_close(weight.gather().detach(), 2 * before, rtol=0, atol=0)


def address_is_refused_where_it_would_mislead():
    """It tells tied weights, and is no number that a kernel could read from."""
    model = bmt.auto_wrap(Tower())
    weight, other = model.head.weight, model.layers[0].linear.weight
    if bmt.world_size() == 1:
        assert weight.data_ptr() == weight.part.data_ptr()
    else:
        assert weight.data_ptr() == weight.data.data_ptr() != other.data_ptr()
        assert len({each.data_ptr() for each in (weight, weight.detach(), other)}) == 2
        for use in (int, hex, lambda address: address + 4, lambda address: address % 16, ctypes.c_void_p):
            with pytest.raises((RuntimeError, TypeError), match=r"Pass `tensor\.part`|cannot be converted to pointer"):
                use(weight.data_ptr())


def whole_gradient_is_set():
    model, twin = bmt.auto_wrap(Tower()), Tower()
    for each in (model, twin):
        for number, parameter in enumerate(each.parameters()):
            parameter.grad = torch.arange(parameter.numel(), dtype=torch.float32).view(parameter.shape) + number
        torch.optim.SGD(each.parameters(), lr=0.1).step()
    for mine, plain in zip(model.parameters(), twin.parameters()):
        torch.testing.assert_close(mine.gather().detach(), plain.detach(), rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="assigned grad|assign a gradient of size"):
        model.head.weight.grad = torch.zeros(3, WIDTH)
    model.head.weight.grad = None
    assert model.head.weight.grad is None


@pytest.mark.parametrize(
    "case", [describes_the_whole, part_is_the_memory, address_is_refused_where_it_would_mislead, whole_gradient_is_set]
)
@pytest.mark.parametrize("size", [3, *in_full(1)])
def test_slice(world, size, case):
    world(size)(case)


@on_ranks(2)
def test_collectives():
    """By hand, as in scripts without DistributedDataParallel; the gradients are averaged already."""
    model = bmt.auto_wrap(Tower())
    model(ids(0, bmt.rank())).backward()
    gradient = model.layers[0].linear.weight.gather_gradient()
    for parameter in model.parameters():
        torch.distributed.all_reduce(parameter.grad)
        parameter.grad /= bmt.world_size()
    torch.testing.assert_close(model.layers[0].linear.weight.gather_gradient(), gradient)
    with pytest.raises(RuntimeError, match="async_op=True and"):
        torch.distributed.all_reduce(model.head.weight.grad, async_op=True)


def broadcast(slice, whole, copies, first):
    dist.broadcast(slice, 1)


def reduce(slice, whole, copies, first):
    dist.reduce(slice, 0, dist.ReduceOp.MAX)


def all_gather(slice, whole, copies, first):
    dist.all_gather(copies, slice)
    assert all(torch.equal(copy, whole) for copy in copies)


def gather(slice, whole, copies, first):
    dist.gather(slice, copies if first else None)
    assert not first or all(torch.equal(copy, whole) for copy in copies)


def scatter(slice, whole, copies, first):
    dist.scatter(slice, [whole, whole] if first else None)


def all_to_all_single(slice, whole, copies, first):
    result = whole.new_empty(whole.shape)
    dist.all_to_all_single(result, slice)
    half = whole[: len(whole) // 2] if first else whole[len(whole) // 2 :]
    assert torch.equal(result, torch.cat([half, half]))


@pytest.mark.parametrize("function", [broadcast, *in_full(reduce, all_gather, gather, scatter, all_to_all_single)])
@on_ranks(2)
def test_collectives_are_of_wholes(function):
    """Each rank has the values of the whole, and not another rank's part; what they write to a slice is its part."""
    model = bmt.auto_wrap(nn.ModuleList([nn.Linear(32, 16, bias=False)]))  # the parts are of one length
    weight = model[0].weight
    whole = weight.gather().detach().clone()
    function(weight.data, whole, [torch.zeros_like(whole) for _ in range(2)], bmt.rank() == 0)
    assert torch.equal(weight.gather(), whole)
    with pytest.raises(RuntimeError, match="Subgroups, async"):
        dist.broadcast(weight.data, 0, async_op=True)


@on_ranks(2)
def test_one_matrix_is_drawn():
    """By torch.nn.init, of which each rank has some rows, although the ranks' random generators are unlike."""
    torch.manual_seed(bmt.rank())
    weight = bmt.DistributedParameter(torch.zeros(8, 8))
    nn.init.orthogonal_(weight)
    rows = weight.gather().detach()
    torch.testing.assert_close(rows @ rows.T, torch.eye(8))
    nn.init.orthogonal_(weight.data[:4])
    rows = weight.gather().detach()[:4]
    torch.testing.assert_close(rows @ rows.T, torch.eye(4))
    nn.init.sparse_(weight, 0.5)
    assert weight.gather().eq(0).sum(0).tolist() == [4] * 8
    column = weight.data[:, 3]  # half of it is on each rank
    column.normal_()
    assert torch.equal(column, weight.gather().detach()[:, 3])


class Update:
    """An asynchronous update of a shard, which is over when it is waited for."""

    def __init__(self, shard):
        self.shard = shard

    def wait(self):
        self.shard.data.add_(1)


READS = {
    "dot": torch.dot, "dotted": lambda p, other: torch.dot(other, p), "sum": lambda p, other: p.sum(),
    "norm": lambda p, other: p.norm(), "add": torch.add, "foreach": lambda p, other: torch._foreach_add([p], 1.0)[0],
    "view": lambda p, other: p[:2].clone(), "clone": lambda p, other: p.clone(),
    "data": lambda p, other: p.data.clone(),
}  # fmt: skip


@pytest.mark.parametrize("name", READS)
@on_ranks(2, full=(1,))
def test_reads_wait_for_an_update(name):
    """With AdamOffloadOptimizer the device still writes the shard when `step` returns."""
    parameter, other = (bmt.DistributedParameter(torch.arange(5.0) + add) for add in (0, 7))
    with torch.no_grad():
        expected = READS[name](torch.arange(5.0) + 1, torch.arange(5.0) + 7)
        parameter.buffer.update.begin(Update(parameter.buffer.shard), [])
        found = READS[name](parameter, other)
    found = found.read_full() if hasattr(found, "read_full") else found
    torch.testing.assert_close(found.as_subclass(torch.Tensor), expected)


def normalized(p):
    p.div_(p.norm(dim=1, keepdim=True))


def centralized(p):
    p.sub_(p.mean(dim=1, keepdim=True))


def adaptively_clipped(p):
    p.mul_(torch.clamp(0.1 / p.norm(dim=1, keepdim=True), max=1))


def by_lists(p):
    torch._foreach_mul_([p], [torch.full((1, 1), 0.5)])
    torch._foreach_add_([p.data], torch._foreach_mul([p], [p.mean(1, keepdim=True)]))


def contiguous(p):
    assert torch.equal(p.contiguous() @ torch.ones(5, 2), p @ torch.ones(5, 2))
    p.contiguous().mul_(2)
    p.positive().add_(p.real)


def mapped(p):
    p.data.apply_(lambda value: 2 * value)
    p.data.map_(torch.arange(5.0).view(1, 5), lambda value, other: value + other)


@pytest.mark.parametrize("update", [normalized, centralized, adaptively_clipped, by_lists, contiguous, mapped])
@pytest.mark.parametrize("size", [2, *in_full(1)])
def test_one_row(world, size, update):
    """Of a layer with one output, the norm of each row has one element and two dimensions."""
    world(size)(updates, update)


def updates(update):
    values = torch.arange(5.0).view(1, 5) + 1
    mine, plain = bmt.auto_wrap(nn.ParameterList([nn.Parameter(values.clone())]))[0], nn.Parameter(values.clone())
    with torch.no_grad():
        for each in (mine, plain):
            update(each)
    torch.testing.assert_close(mine.gather().detach(), plain.detach())


@on_ranks(2, full=(1,))
def test_no_gradient_of_new_tensors():
    weight = bmt.DistributedParameter(torch.ones(5, 3))
    for function in (torch.zeros_like, torch.rand_like):
        assert not function(weight, requires_grad=False).requires_grad
        with pytest.raises(RuntimeError, match=r"DistributedParameter\(torch\.zeros\(\(5, 3\)\)\)"):
            function(weight, requires_grad=True)
