"""Differentiable collectives against a formula of all ranks' inputs in one process."""

import pytest
import torch

import hf_bmtrain as bmt
from cases import by_default, full
from ranks import on_ranks

ROWS = 4  # divisible by every world size here


def total(x):
    return x.sum(0)


FORMULAS = {
    "sum": total,
    "avg": lambda x: x.mean(0),
    "max": lambda x: x.amax(0),
    "min": lambda x: x.amin(0),
    "prod": lambda x: x.prod(0),
}


def formula(name, x):
    """(N, ROWS, 3) inputs of all ranks → (N, ...) outputs of all ranks, in plain torch."""
    size = len(x)
    operation, _, op = name.partition("-")
    if operation == "all_gather":
        return torch.stack([x] * size)
    if operation == "broadcast":
        return torch.stack([x[size - 1]] * size)
    reduced = FORMULAS[op](x)
    return torch.stack([reduced] * size if operation == "all_reduce" else list(reduced.chunk(size)))


def ours(name, x):
    """The same through the library: every rank takes its own part of `x`, which all ranks hold."""
    operation, _, op = name.partition("-")
    mine = bmt.distributed.all_reduce(x, "avg")[bmt.rank()]  # equal on all ranks; its adjoint is their mean
    if operation == "all_gather":
        out = bmt.distributed.all_gather(mine)
    elif operation == "broadcast":
        out = bmt.distributed.broadcast(mine, bmt.world_size() - 1)
    else:
        out = getattr(bmt.distributed, operation)(mine, op)
    return bmt.distributed.all_gather(out)


def inputs():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(bmt.world_size(), ROWS, 3, generator=generator, dtype=torch.float64)
    return x.requires_grad_()


def values_and_adjoint(name):
    x = inputs()
    torch.testing.assert_close(ours(name, x), formula(name, x))
    assert torch.autograd.gradcheck(lambda x: ours(name, x), [x])


def cotangents_of_each_rank(name):
    """Each rank's loss is its own: the gradient is that of their sum."""
    size, rank = bmt.world_size(), bmt.rank()
    x = inputs()
    mine = x.detach()[rank].clone().requires_grad_()
    operation, _, op = name.partition("-")
    extra = {"broadcast": (size - 1,), "all_gather": ()}.get(operation, (op,))
    out = getattr(bmt.distributed, operation)(mine, *extra)
    expected = formula(name, x)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    (out * weights[rank]).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(mine.grad, x.grad[rank])


NAMES = ["all_gather", "broadcast", *(f"{name}-{op}" for name in ("all_reduce", "reduce_scatter") for op in FORMULAS)]


@pytest.mark.parametrize("case", [values_and_adjoint, cotangents_of_each_rank], ids=lambda case: case.__name__)
@pytest.mark.parametrize("name", by_default(NAMES, "all_gather", "all_reduce-prod", "reduce_scatter-avg"))
def test_collective(world, name, case):
    world(2)(case, name)


@full
@on_ranks(2, full=(1,))
def test_other_dtypes():
    rank, size = bmt.rank(), bmt.world_size()
    assert bmt.distributed.all_gather(torch.tensor(rank)).tolist() == list(range(size))
    assert bmt.distributed.all_gather(torch.tensor([rank == 0])).tolist() == [[r == 0] for r in range(size)]
    assert bmt.distributed.all_reduce(torch.tensor([rank + 1]), "max").tolist() == [size]
    half = torch.full((2,), float(rank), dtype=torch.bfloat16)
    assert bmt.distributed.all_reduce(half).tolist() == [sum(range(size))] * 2
    assert bmt.distributed.all_gather(torch.empty(0, 3)).shape == (size, 0, 3)
    assert bmt.distributed.all_gather(torch.arange(6).view(2, 3).t()).shape == (size, 3, 2)


@on_ranks(2, full=(1, 3))
def test_averages_are_computed_in_float32():
    """Sums of float16 values overflow long before their mean does, and bfloat16 would round at each addition."""
    rank, size = bmt.rank(), bmt.world_size()
    for x in (torch.full((size,), 40000.0, dtype=torch.float16), torch.full((size,), 257.0 + rank).bfloat16()):
        everyone = bmt.distributed.all_gather(x).float().mean(0).to(x.dtype)
        for operation, expected in (("all_reduce", everyone), ("reduce_scatter", everyone[rank : rank + 1])):
            y = x.clone().requires_grad_()
            result = getattr(bmt.distributed, operation)(y, "avg")
            assert result.dtype == x.dtype and torch.equal(result, expected)
            result.backward(torch.full_like(result, 40000.0))
            shares = 1 if operation == "all_reduce" else size  # one gradient of each element, and not one a rank
            assert torch.equal(y.grad, torch.full_like(x, 40000.0 / shares))


@on_ranks(2, full=(1,))
def test_reductions_keep_the_dtype():
    size = bmt.world_size()
    for dtype in (torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float64):
        for op in ("sum", "max", "min", "prod"):
            for operation in (bmt.distributed.all_reduce, bmt.distributed.reduce_scatter):
                result = operation(torch.full((size,), 20, dtype=dtype), op)
                expected = {"sum": 20 * size, "prod": 20**size}.get(op, 20)
                assert result.dtype == dtype and (result == torch.tensor(expected).to(dtype)).all()


@on_ranks(2, full=(1,))
def test_ties_share():
    """Equal maxima share the gradient evenly, zeros do not break the product's."""
    size = bmt.world_size()
    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    bmt.distributed.all_reduce(x, "max").sum().backward()
    assert x.grad.tolist() == [1.0, 1.0]  # N losses, each 1/N to each of N equals
    y = torch.zeros(1, dtype=torch.float64, requires_grad=True) + (bmt.rank() + 0.0)
    y.retain_grad()
    bmt.distributed.all_reduce(y, "prod").sum().backward()
    others = 1.0 if size == 1 else float(bmt.rank() == 0)
    assert y.grad.item() == size * others
