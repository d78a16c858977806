"""FusedCrossEntropy(parallel=True) on two ranks that have half of the classes each, against losses of all classes."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import hf_bmtrain as bmt
from cases import full, in_full, rows_in_full
from hf_bmtrain.loss import FusedCrossEntropy
from ranks import Ranks

CLASSES = 6


@pytest.fixture(scope="module")
def group() -> Iterator[Ranks]:
    """The two ranks of one tensor-parallel group."""
    ranks = Ranks(2, tp_size=2)
    yield ranks
    ranks.stop()


def own(whole: Tensor) -> Tensor:
    """A copy of this rank's half of the classes."""
    return whole.chunk(2, -1)[bmt.config["tp_rank"]].clone()


def follows_torch(logits: Tensor, targets: Tensor, smoothing: float) -> None:
    exact = logits.masked_fill(logits < -2e38, -torch.inf).double().requires_grad_()
    leaf = own(logits).requires_grad_()
    losses = FusedCrossEntropy(reduction="none", label_smoothing=smoothing, parallel=True)(leaf, targets)
    truth = F.cross_entropy(exact, targets, reduction="none", label_smoothing=smoothing)
    torch.testing.assert_close(losses.double(), truth, rtol=1e-5, atol=1e-6)
    assert torch.equal(losses, bmt.nn.parallel_cross_entropy_func(leaf, targets, smoothing))
    losses.sum().backward()
    truth.sum().backward()
    torch.testing.assert_close(leaf.grad.double(), own(exact.grad), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, *in_full(0.1)])
def test_minus_infinity_is_an_impossible_class(group, smoothing):
    logits = torch.randn(5, CLASSES, generator=torch.Generator().manual_seed(0))
    logits[0, 4] = -torch.inf
    logits[1, :3] = -torch.inf  # all classes of the first rank
    logits[2, 1] = -torch.inf  # the target: the loss is inf
    logits[3, 2:5] = torch.finfo(torch.float32).min  # counts as -inf; the sum overflows
    group(follows_torch, logits, torch.tensor([1, 3, 1, 0, 5]), smoothing)


def refuses_as_without_parallel(wrong: int, ignore_index: int) -> None:
    logits, targets = torch.randn(3, CLASSES), torch.tensor([0, wrong, ignore_index])
    message = rf"target {wrong} at \[1\] is neither a class in \[0, {CLASSES}\) nor ignore_index {ignore_index}; 1 of 3"
    with pytest.raises(ValueError, match=message):
        FusedCrossEntropy(ignore_index=ignore_index)(logits, targets)
    with pytest.raises(ValueError, match=message):
        FusedCrossEntropy(ignore_index=ignore_index, parallel=True)(own(logits), targets)
    if ignore_index == -100:
        with pytest.raises(ValueError, match=message):
            bmt.nn.parallel_cross_entropy_func(own(logits), targets)


@pytest.mark.parametrize(("wrong", "ignore_index"), [(-1, -100), *rows_in_full([(CLASSES, -100), (-100, -1)])])
def test_a_target_out_of_range_is_named(group, wrong, ignore_index):
    group(refuses_as_without_parallel, wrong, ignore_index)


def refuses_create_graph() -> None:
    leaf = torch.randn(3, CLASSES // 2, requires_grad=True)
    loss = FusedCrossEntropy(parallel=True)(leaf, torch.tensor([0, 3, -100]))
    with pytest.raises(RuntimeError, match=r"create_graph=True.* Use torch.nn.functional.cross_entropy"):
        torch.autograd.grad(loss, leaf, create_graph=True)


def test_double_backward_raises(group):
    group(refuses_create_graph)


def leaves_out(ignore_index: int) -> None:
    logits, targets = torch.randn(4, CLASSES, generator=torch.Generator().manual_seed(1)), torch.tensor([1, 5, 0, 4])
    targets[2:] = ignore_index
    logits[2, 1] = torch.nan
    leaf, exact = own(logits).requires_grad_(), logits[:2].double().requires_grad_()
    loss = FusedCrossEntropy(ignore_index=ignore_index, parallel=True)(leaf, targets)
    truth = F.cross_entropy(exact, targets[:2])
    torch.testing.assert_close(loss.double(), truth, rtol=1e-5, atol=1e-6)
    loss.backward()
    truth.backward()
    torch.testing.assert_close(leaf.grad[:2].double(), own(exact.grad), rtol=1e-5, atol=1e-6)
    assert leaf.grad[2:].count_nonzero() == 0


@full
@pytest.mark.parametrize("ignore_index", [-100, -1, 2])
def test_ignored_rows_have_no_gradient_whatever_their_logits(group, ignore_index):
    group(leaves_out, ignore_index)
