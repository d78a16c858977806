"""Functions on lists of slices, such as `torch._foreach_add_`, which optimizers call with an entry a parameter."""

import copy
from unittest import mock

import numpy
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import hf_bmtrain as bmt
from cases import by_default, in_full, pairwise
from hf_bmtrain.engine.base.torch_internals import WithoutTorchFunction
from hf_bmtrain.engine.tensors.neighbours import join_neighbours
from hf_bmtrain.engine.tensors.tensor import ShardBase
from ranks import on_ranks

SHAPES = [(3, 5), (7,), (4, 2)]
CALLS = [
    lambda x, y: torch._foreach_add_(x, y), lambda x, y: torch._foreach_mul_(x, 0.5),
    lambda x, y: torch._foreach_sqrt(x), lambda x, y: torch._foreach_lerp_(x, y, 0.3),
    lambda x, y: torch._foreach_addcdiv_(x, y, y, [0.1, 0.2, 0.3]),
    lambda x, y: torch._foreach_addcmul(x, y, y, 2.0), lambda x, y: torch._foreach_div(x, y),
    lambda x, y: torch._foreach_copy_(x, y), lambda x, y: torch._foreach_add_(x, y, alpha=2),
    lambda x, y: torch._foreach_mul_(x, torch.tensor(3.0)),
    lambda x, y: torch._foreach_add_(x, scalars=[0.1, 0.2, 0.3]), lambda x, y: torch._foreach_add_(x, scalar=2.0),
]  # fmt: skip


def make():
    torch.manual_seed(0)
    plain = nn.ParameterList([nn.Parameter(torch.rand(shape) + 0.5) for shape in SHAPES])
    others = [torch.rand(shape) + 0.5 for shape in SHAPES]
    model = bmt.auto_wrap(copy.deepcopy(plain))
    pieces = list(model.parameters())
    return pieces, [piece.take(other).clone() for piece, other in zip(pieces, others)], [*plain], others


@torch.no_grad()
def like_whole_tensors():
    pieces, parts, full_params, others = make()
    for call in CALLS:
        found, expected = call(pieces, parts), call(full_params, others)
        assert (found is None) == (expected is None)
        for mine, theirs in zip(found or pieces, expected or full_params, strict=True):
            torch.testing.assert_close(mine.read_full(), theirs.detach(), rtol=1e-6, atol=0)


@torch.no_grad()
def whole_operands_are_cut():
    pieces, _, full_params, others = make()
    torch._foreach_add_(pieces, others)
    torch._foreach_add_(full_params, others)
    for mine, theirs in zip(pieces, full_params, strict=True):
        assert torch.equal(mine.read_full(), theirs)


@torch.no_grad()
def reductions_are_of_whole_tensors():
    pieces, _, full_params, _ = make()
    for reduce in (torch._foreach_norm, torch._foreach_max):
        for mine, theirs in zip(reduce(pieces), reduce(full_params), strict=True):
            torch.testing.assert_close(mine, theirs)


@torch.no_grad()
def slices_of_other_tensors_are_not_mixed():
    pieces, parts, _, _ = make()
    with pytest.raises(RuntimeError):
        torch._foreach_add_(pieces, parts[::-1])


def train(optimizer, model, gradients):
    """Two clipped steps of `optimizer`, and the norms of the gradients before clipping."""
    norms = []
    for factor in (1.0, 3.0):
        for parameter, gradient in zip(model.parameters(), gradients):
            whole = gradient * factor
            parameter.grad = parameter.take(whole).clone() if isinstance(parameter, ShardBase) else whole
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()
    return norms


@pytest.mark.parametrize(
    ("name", "options"),
    pairwise(
        [("AdamW", {"foreach": True}), ("Adam", {"fused": True})],
        ["AdamW", "Adam", "SGD", "Adagrad"],
        [{"foreach": True}, {"fused": True}, {}],
    ),
    ids=str,
)
@on_ranks(2)
def test_optimizers(name, options):
    _, _, full_params, others = make()
    plain = nn.ParameterList(full_params)
    model = bmt.auto_wrap(copy.deepcopy(plain))
    make_optimizer = getattr(torch.optim, name)
    mine = train(make_optimizer(model.parameters(), lr=0.1, **options), model, others)
    theirs = train(make_optimizer(plain.parameters(), lr=0.1, **options), plain, others)
    torch.testing.assert_close(mine, theirs)
    for sharded, whole in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(sharded.gather(), whole)


def calls_of(function):
    """How many functions of torch are called on slices while `function` runs."""
    inner, count = ShardBase.__torch_function__.__func__, 0

    def counted(cls, *args, **kwargs):
        nonlocal count
        count += 1
        return inner(cls, *args, **kwargs)

    with mock.patch.object(ShardBase, "__torch_function__", classmethod(counted)):
        function()
    return count


@on_ranks(2, full=(1,))
def test_a_list_costs_one_call():
    counts = []
    for number in (5, 40):
        model = bmt.auto_wrap(nn.ParameterList([nn.Parameter(torch.ones(3, 2)) for _ in range(number)]))
        for parameter in model.parameters():
            parameter.grad = parameter.take(torch.ones(3, 2)).clone()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
        optimizer.step()
        clip = calls_of(lambda model=model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        counts.append((clip, calls_of(optimizer.step), calls_of(optimizer.zero_grad)))
    assert counts[0] == counts[1], counts


class Lists(TorchDispatchMode):
    """Notes the lists of tensors that torch._foreach_mul_ writes."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket is torch.ops.aten._foreach_mul_:
            self.seen.append(args[0])
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def neighbours_are_written_as_one():
    """Parameters of a buffer and their gradients, but not optimizer state, views, or neighbours by chance."""
    model = bmt.auto_wrap(nn.ParameterList([nn.Parameter(torch.rand(8, 16)) for _ in range(12)]))
    with torch.enable_grad():
        sum(parameter.square().sum() for parameter in model.parameters()).backward()
    pieces = list(model.parameters())
    gradients, state = [piece.grad for piece in pieces], [torch.zeros_like(piece) for piece in pieces]
    alone = torch.zeros_like(pieces[0])
    for tensors, most in (
        (pieces, 7), (gradients, 7), (state, 12), (gradients[::-1], 12), (pieces + gradients, 14),
        ([alone, *gradients], 10),
    ):  # fmt: skip
        before, versions = [each.part.clone() for each in tensors], [each._version for each in tensors]
        with WithoutTorchFunction():
            joined = join_neighbours(tensors)
            assert len(joined) <= most and sum(each.numel() for each in joined) == sum(each.numel() for each in before)
        for factor in (3.0, torch.tensor(3.0)):  # weight decay, clipping
            torch._foreach_mul_(tensors, factor)
            for each, old, version in zip(tensors, before, versions):
                assert torch.equal(each.part, 3.0 * old) and each._version > version
            before = [each.part.clone() for each in tensors]
            with Lists() as lists:
                torch._foreach_mul_(tensors, factor / factor)
            assert [*map(len, lists.seen)] == [len(joined)]
    memory = numpy.arange(6.0)
    apart = [torch.from_numpy(memory[start : start + 3]) for start in (0, 3)]
    doubles = torch.arange(2.0, dtype=torch.float64)
    mixed = [doubles[:1], doubles.view(torch.float32)[2:]]
    strided = [torch.arange(4.0)[::2], torch.arange(4.0)[::2]]
    strided[1] = strided[0].as_strided((2,), (1,), 2)
    for unchanged in (apart, mixed, strided):
        assert join_neighbours(unchanged) == unchanged


CHECKS = [
    like_whole_tensors, whole_operands_are_cut, reductions_are_of_whole_tensors, slices_of_other_tensors_are_not_mixed,
    neighbours_are_written_as_one,
]  # fmt: skip


@pytest.mark.parametrize("size", [2, *in_full(3)])
@pytest.mark.parametrize(
    "check", by_default(CHECKS, whole_operands_are_cut, reductions_are_of_whole_tensors, neighbours_are_written_as_one)
)
def test_lists(world, size, check):
    world(size)(check)


@on_ranks(2)
def test_results_go_where_they_are_asked_for():
    pieces, _, plain, _ = make()
    for piece, own in zip(pieces, plain):
        for function in (torch.linalg.vector_norm, torch.norm, torch.mean):
            out, result = torch.zeros(()), function(own.detach())
            with torch.no_grad():
                function(piece, out=out)
            torch.testing.assert_close(out, result)
    (norm,) = torch._foreach_norm([pieces[0].detach()], 2, dtype=torch.float64)
    assert norm.dtype == torch.float64
