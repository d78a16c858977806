"""A gradient that fills its buffer is reduced where it lies; every other one is packed. Both give the mean."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

import hf_bmtrain as bmt
from cases import full, in_full, pairwise
from hf_bmtrain.engine.comm.layout import Layout
from hf_bmtrain.engine.comm.reduce import CollectiveReduction, LocalReduction
from hf_bmtrain.engine.comm.resizable import shares_storage

SHAPE = torch.Size((96, 8))  # elements of whole shards of one, two and three ranks


def values(rank: int) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(rank))


def plain(rank):
    return values(rank)


def view_of_a_larger_one(rank):
    return torch.cat([torch.full((3, SHAPE[1]), float("nan")), values(rank)])[3:]


def transposed(rank):
    return values(rank).t().contiguous().t()


def of_another_dtype(rank):
    return values(rank).double()


def negated_when_read(rank):
    return (-values(rank))._neg_view()


def missing_on_all_ranks_but_one(rank):
    return values(rank) if rank == 1 else None


def reduce(make, accumulate: bool, like: torch.Tensor) -> bool:
    """Check the mean of every rank's `make(rank)`. Returns whether this rank packed its own."""
    world, size = bmt.current_world(), bmt.world_size()
    layout = Layout.build([SHAPE.numel()], size, 32)
    assert layout.numels == (layout.numel,)
    like = like.expand(layout.shard_numel)
    reducer = CollectiveReduction(world.reduce, world.device).reducer(layout, [SHAPE], like, True)
    shard = torch.ones_like(like)
    total = shard.float() if accumulate else None
    gradients = [make(rank) for rank in range(size)]
    mine = gradients[bmt.rank()]
    with mock.patch.object(world.reduce, "reduce_scatter_mean", wraps=world.reduce.reduce_scatter_mean) as reduced:
        reducer.send([mine], shard, total).wait()
    mean = sum(torch.zeros(SHAPE) if each is None else each.to(like.dtype).float() for each in gradients) / size
    expected = mean.reshape(size, -1)[bmt.rank()] + accumulate
    torch.testing.assert_close(shard, expected.to(like.dtype), rtol=1e-6, atol=1e-6)
    if total is not None:
        torch.testing.assert_close(total, expected, rtol=1e-6, atol=1e-6)
    return mine is None or not shares_storage(mine, reduced.call_args.args[1])


IN_PLACE = [plain, view_of_a_larger_one]
PACKED = [transposed, of_another_dtype, negated_when_read]


@pytest.mark.parametrize(
    ("size", "make", "accumulate"),
    pairwise(
        [
            (2, plain, True),
            (3, view_of_a_larger_one, False),
            (3, transposed, True),
            (2, of_another_dtype, True),
            (3, negated_when_read, False),
            (3, missing_on_all_ranks_but_one, True),
        ],
        [2, 3],
        [*IN_PLACE, *PACKED, missing_on_all_ranks_but_one],
        [False, True],
    ),
)
def test_the_mean(world, size, make, accumulate):
    packed = world(size)(reduce, make, accumulate, torch.zeros(1))
    if make is missing_on_all_ranks_but_one:
        assert packed == [rank != 1 for rank in range(size)]
    else:
        assert packed == [make in PACKED] * size


@full
@pytest.mark.parametrize("make", [of_another_dtype, *in_full(plain)])
def test_the_mean_in_bfloat16(world, make):
    """float32 gradients of a bfloat16 buffer are packed."""
    assert world(2)(reduce, make, False, torch.zeros(1, dtype=torch.bfloat16)) == [True] * 2


def two_parameters() -> bool:
    world, size = bmt.current_world(), bmt.world_size()
    shapes = [SHAPE, SHAPE]
    layout = Layout.build([shape.numel() for shape in shapes], size, 32)
    like = torch.zeros(layout.shard_numel)
    reducer = CollectiveReduction(world.reduce, world.device).reducer(layout, shapes, like, True)
    shard = torch.empty_like(like)
    mine = [values(bmt.rank()), values(bmt.rank() + 10)]
    with mock.patch.object(world.reduce, "reduce_scatter_mean", wraps=world.reduce.reduce_scatter_mean) as reduced:
        reducer.send(mine, shard, None).wait()
    rows = torch.stack([torch.cat([values(r), values(r + 10)]).view(size, -1)[bmt.rank()] for r in range(size)])
    torch.testing.assert_close(shard, rows.mean(0), rtol=1e-6, atol=1e-6)
    return not any(shares_storage(each, reduced.call_args.args[1]) for each in mine)


@full
def test_two_parameters_are_packed(world):
    assert world(2)(two_parameters) == [True] * 2


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("collected", [False, True])
def test_one_process_puts_each_gradient_in_its_place_and_zeros_between_them(accumulate, collected):
    gradients = [make(rank) for rank, make in enumerate([plain, *PACKED])] + [torch.full((3,), 2.0), torch.ones(40)]
    layout = Layout.build([each.numel() for each in gradients], 1, 32)
    assert [gap for gap in layout.sizes[::2] if gap] == [29, 24], "padding between tensors and at the end"
    shard = torch.ones(layout.numel)
    total = shard.double() if accumulate else None
    reducer = LocalReduction().reducer(layout, [each.shape for each in gradients], shard, True)
    if collected:
        reducer.collect(1, gradients[1], lambda: (shard, total))
    sent = [None if collected and index == 1 else each for index, each in enumerate(gradients)]
    reducer.send(sent, shard, total).wait()
    parts = shard.split_with_sizes(layout.sizes)
    for part, gradient in zip(parts[1::2], gradients):
        torch.testing.assert_close(part, gradient.float().reshape(-1) + accumulate, rtol=0, atol=1e-6)
    assert all(bool((gap == accumulate).all()) for gap in parts[::2])
