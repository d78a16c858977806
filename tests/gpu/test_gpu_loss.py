"""The losses on a GPU: the checks of tests/test_loss.py through the kernels, and what only a device shows."""

import pytest
import torch

import loss_checks as checks
from hf_bmtrain.loss import cross_entropy

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("launched")]
GPU = torch.device("cuda", 0)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("options", checks.OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", checks.TOLERANCE, ids=str)
def test_options(dtype, options, inplace):
    checks.check_options(GPU, dtype, options, inplace)
    checks.check_options(GPU, dtype, options, inplace, (3, 11, 2, 2))
    checks.check_options(GPU, dtype, options, inplace, (17, 50257))


@pytest.mark.parametrize("dtype", checks.TOLERANCE, ids=str)
def test_inplace(dtype):
    checks.check_inplace(GPU, dtype)
    checks.check_nothing_counts(GPU, dtype, inplace=True)
    checks.check_nothing_counts(GPU, dtype, inplace=False)


def test_the_rest_of_the_checks():
    checks.check_a_loss_scale_saves_small_gradients(GPU, inplace=False)
    checks.check_a_loss_scale_saves_small_gradients(GPU, inplace=True)
    checks.check_logits_are_kept(GPU)
    checks.check_inplace_without_gradient(GPU)
    checks.check_double_backward(GPU)
    checks.check_num_items(GPU, lambda tensor: tensor.to(GPU))
    checks.check_num_items(GPU, lambda tensor: tensor)
    checks.check_odd_logits(GPU)
    checks.check_layouts(GPU)
    checks.check_wrong_inputs(GPU)


def test_targets_out_of_range_are_nan_and_leave_the_other_rows_alone():
    logits, targets, _ = checks.case(GPU, (6, 30))
    targets = targets.clamp(min=0)
    bad = targets.clone()
    bad[1], bad[4] = 30, -7
    leaf, whole = (logits.clone().requires_grad_() for _ in range(2))
    losses, expected = (cross_entropy(*pair, reduction="none") for pair in ((leaf, bad), (whole, targets)))
    losses.sum().backward()
    expected.sum().backward()
    right = [0, 2, 3, 5]
    assert losses[[1, 4]].isnan().all() and torch.equal(losses[right], expected[right])
    assert not leaf.grad[[1, 4]].any() and torch.equal(leaf.grad[right], whole.grad[right])
    assert cross_entropy(logits, bad).isnan()


@pytest.mark.parametrize("inplace", [False, True])
def test_nothing_waits_for_the_device(inplace):
    leaf, targets, _ = checks.case(GPU, (64, 1000), torch.bfloat16)
    leaf.requires_grad_()
    items = torch.tensor(40, device=GPU)
    cross_entropy(leaf * 1, targets, inplace=inplace).backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for options in ({}, {"num_items_in_batch": items}, {"num_items_in_batch": 40}, {"label_smoothing": 0.1}):
            (cross_entropy(leaf * 1, targets, inplace=inplace, **options) / 3).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def extra_bytes(inplace: bool) -> int:
    """The most that a forward and backward of the loss allocates beside 1024 x 32000 bfloat16 logits."""
    leaf = torch.randn(1, 1, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    logits = leaf * torch.randn(1024, 32000, device=GPU, dtype=torch.bfloat16)
    targets = torch.randint(32000, (1024,), device=GPU)
    used: list[int] = []
    logits.register_hook(lambda gradient: used.append(torch.cuda.max_memory_allocated()))
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # a cached block is counted whole, though up to 1 MiB larger than what is asked for
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    cross_entropy(logits, targets, inplace=inplace).backward()
    return used[0] - before


def test_bytes_and_launches(launched):
    """By default one more tensor of the logits' size; in place none, and one launch makes loss and gradient."""
    size = 1024 * 32000 * 2
    assert size <= extra_bytes(inplace=False) < size + (1 << 20)
    assert launched == ["cross_entropy_losses", "cross_entropy_gradient"]
    del launched[:]
    assert extra_bytes(inplace=True) < 1 << 20
    assert launched == ["cross_entropy_fused", "rescale"]
