"""linear_cross_entropy on a GPU: the checks of tests/test_linear_loss.py through the kernels, memory, no waiting."""

import pytest
import torch

import hf_bmtrain as bmt
import linear_loss_checks as checks
from hf_bmtrain.loss import linear_cross_entropy
from language_model import Language, batch, head_loss
from ranks import Ranks

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)


@pytest.mark.parametrize("classes", [50257, 128256])
@pytest.mark.parametrize("dtype", checks.TOLERANCE, ids=str)
def test_large_vocabularies(dtype, classes):
    for with_bias in (False, True):
        checks.check_options(GPU, dtype, {}, with_bias, 100, (2, 130), classes)


class TestOnGpu(checks.OnAnyDevice):
    device = GPU


def test_targets_out_of_range_are_nan():
    hidden, weight, _, targets, _ = checks.case(GPU)
    targets[0, 1] = 37
    hidden.requires_grad_()
    losses = linear_cross_entropy(hidden, weight, targets, reduction="none")
    assert losses.isnan().sum() == 1 and losses[0, 1].isnan()
    loss = linear_cross_entropy(hidden, weight, targets)
    loss.backward()
    assert loss.isnan() and hidden.grad.isfinite().all() and not hidden.grad[0, 1].any()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_nothing_waits_for_the_device(reduction):
    hidden, weight, bias, targets, _ = checks.case(GPU, torch.bfloat16, (64,), 128, 1000)
    leaves = [t.requires_grad_() for t in (hidden, weight, bias)]

    def step() -> None:
        losses = linear_cross_entropy(*leaves[:2], targets, bias, reduction=reduction, chunk_bytes=20 * 2000)
        (losses.sum() / 3).backward()

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_memory_is_the_budget_and_the_gradients():
    rows, width, classes, budget = 4096, 1024, 32000, 32 << 20
    hidden = torch.randn(rows, width, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(classes, width, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(classes, (rows,), device=GPU)
    for _ in range(2):  # the first run loads cuBLAS and its workspace
        hidden.grad = weight.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        linear_cross_entropy(hidden, weight, targets, chunk_bytes=budget).backward()
        used = torch.cuda.max_memory_allocated() - before
    gradients = hidden.numel() * 2 + weight.numel() * (4 + 2)  # the weight's, in float32 and rounded
    assert used < budget + gradients + (8 << 20)
    assert used < rows * classes * 2 * 2  # less than bfloat16 logits and their gradient


def train(tied: bool) -> None:
    """A sharded head's gradients beside a plain model's, on this rank's GPU."""
    device, size, rank = bmt.current_world().device, bmt.world_size(), bmt.rank()
    model, twin = bmt.auto_wrap(Language(tied, bias=True)), Language(tied, bias=True).to(device)
    for reduction in ("mean", "none"):
        for micro in range(2):
            for either, ranks in ((model, [rank]), (twin, range(size))):
                for other in ranks:
                    ids, targets = (t.to(device) for t in batch(micro, other))
                    loss = head_loss(either, either(ids), targets, reduction).sum() / 9
                    (loss if either is model else loss / size).backward()
        for (name, piece), plain in zip(model.named_parameters(), twin.parameters()):
            torch.testing.assert_close(piece.gather_gradient(), plain.grad, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_a_sharded_head(size, tied):
    ranks = Ranks(size, "cuda")
    try:
        ranks(train, tied)
    finally:
        ranks.stop()
