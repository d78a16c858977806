"""Functions on lists of slices, such as `torch._foreach_add_`, which optimizers call with an entry a parameter."""

import copy

import pytest
import torch
from torch import nn

import hf_bmtrain as bmt

SHAPES = [(3, 5), (7,), (4, 2)]
CALLS = [
    lambda x, y: torch._foreach_add_(x, y), lambda x, y: torch._foreach_mul_(x, 0.5),
    lambda x, y: torch._foreach_sqrt(x), lambda x, y: torch._foreach_lerp_(x, y, 0.3),
    lambda x, y: torch._foreach_addcdiv_(x, y, y, [0.1, 0.2, 0.3]),
    lambda x, y: torch._foreach_addcmul(x, y, y, 2.0), lambda x, y: torch._foreach_div(x, y),
    lambda x, y: torch._foreach_copy_(x, y), lambda x, y: torch._foreach_add_(x, y, alpha=2),
    lambda x, y: torch._foreach_mul_(x, torch.tensor(3.0)),
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
    pieces, parts, wholes, others = make()
    for call in CALLS:
        found, expected = call(pieces, parts), call(wholes, others)
        assert (found is None) == (expected is None)
        for mine, theirs in zip(found or pieces, expected or wholes, strict=True):
            torch.testing.assert_close(mine.read_whole(), theirs.detach(), rtol=1e-6, atol=0)


@torch.no_grad()
def whole_operands_are_cut():
    pieces, _, wholes, others = make()
    torch._foreach_add_(pieces, others)
    torch._foreach_add_(wholes, others)
    for mine, theirs in zip(pieces, wholes, strict=True):
        assert torch.equal(mine.read_whole(), theirs)


@torch.no_grad()
def reductions_are_of_whole_tensors():
    pieces, _, wholes, _ = make()
    for reduce in (torch._foreach_norm, torch._foreach_max):
        for mine, theirs in zip(reduce(pieces), reduce(wholes), strict=True):
            torch.testing.assert_close(mine, theirs)


@torch.no_grad()
def slices_of_other_tensors_are_not_mixed():
    pieces, parts, _, _ = make()
    with pytest.raises(RuntimeError):
        torch._foreach_add_(pieces, parts[::-1])


CHECKS = [
    like_whole_tensors, whole_operands_are_cut, reductions_are_of_whole_tensors, slices_of_other_tensors_are_not_mixed,
]  # fmt: skip


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("check", CHECKS)
def test_lists(world, size, check):
    world(size)(check)
