"""What linear_cross_entropy must satisfy on any device: tests/test_linear_loss.py and tests/gpu call it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from cases import by_default, in_full, pairwise
from hf_bmtrain.loss import linear_cross_entropy
from loss_checks import OPTIONS, exact

__all__ = ["OPTIONS"]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
WIDTH, CLASSES = 12, 37


def case(device, dtype=torch.float32, shape=(3, 7), width=WIDTH, classes=CLASSES):
    """hidden, weight, bias, targets and class weights."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(*shape, width, generator=generator).to(dtype)
    weight = (torch.randn(classes, width, generator=generator) * width**-0.5 * 2).to(dtype)
    bias = torch.randn(classes, generator=generator).to(dtype)
    targets = torch.randint(classes, shape, generator=generator)
    targets.view(-1)[::4] = -100
    targets.view(-1)[1::5] = 2
    class_weight = torch.rand(classes, generator=generator) + 0.1
    return [tensor.to(device) for tensor in (hidden, weight, bias, targets, class_weight)]


def check_options(device, dtype, options, with_bias, rows_a_chunk, shape=(3, 7), classes=CLASSES) -> None:
    """Loss and gradients against float64, with an incoming gradient that is not 1."""
    hidden, weight, bias, targets, class_weight = case(device, dtype, shape, classes=classes)
    options = dict(options)
    class_weight = class_weight if options.pop("weighted", False) else None
    if options.get("ignore_index") == 2:
        targets = targets.clamp(min=0)
    leaves = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
    truths = [t.double().requires_grad_() for t in (hidden, weight, bias)]
    logits = F.linear(truths[0], truths[1], truths[2] if with_bias else None).flatten(0, -2)
    truth = exact(logits, targets.flatten(), class_weight, **options).view(-1)
    loss = linear_cross_entropy(
        leaves[0], leaves[1], targets, leaves[2] if with_bias else None, class_weight=class_weight, **options,
        chunk_bytes=rows_a_chunk * classes * leaves[0].element_size(),
    )  # fmt: skip
    assert loss.dtype == torch.float32
    assert loss.shape == (targets.shape if options.get("reduction") == "none" else ())
    unit = TOLERANCE[dtype]
    torch.testing.assert_close(loss.double().view(-1), truth, rtol=unit, atol=unit * truth.abs().max().item())
    incoming = torch.linspace(0.5, 3, truth.numel(), device=device)
    truth.backward(incoming.double())
    loss.backward(incoming.view(loss.shape))
    for leaf, exact_leaf in zip(leaves if with_bias else leaves[:2], truths):
        assert leaf.grad.dtype == dtype
        assert (leaf.grad.double() - exact_leaf.grad).abs().max() <= unit * exact_leaf.grad.abs().max()


def check_only_what_is_wanted(device) -> None:
    """Every choice of who needs a gradient; nobody gets one that was not asked for."""
    hidden, weight, bias, targets, _ = case(device)
    truths = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
    F.cross_entropy(F.linear(*truths).flatten(0, 1), targets.flatten()).backward()
    for reduction in ("mean", "none"):
        for mask in range(1, 8):
            leaves = [t.clone().requires_grad_(bool(mask >> i & 1)) for i, t in enumerate((hidden, weight, bias))]
            loss = linear_cross_entropy(*leaves[:2], targets, leaves[2], reduction=reduction)
            count = (targets != -100).sum() if reduction == "none" else 1
            (loss.sum() / count).backward()
            for leaf, truth in zip(leaves, truths):
                assert (leaf.grad is not None) == leaf.requires_grad
                if leaf.grad is not None:
                    torch.testing.assert_close(leaf.grad, truth.grad, rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        assert not linear_cross_entropy(*leaves[:2], targets, leaves[2]).requires_grad


def check_misuse(device) -> None:
    hidden, weight, _, targets, _ = case(device)
    hidden.requires_grad_()
    loss = linear_cross_entropy(hidden, weight, targets)
    with pytest.raises(RuntimeError, match="linear_cross_entropy does not support double backward.*create_graph=True"):
        torch.autograd.grad(loss, hidden, create_graph=True)
    loss = linear_cross_entropy(hidden, weight, targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward through linear_cross_entropy.* reduction='none'"):
        loss.backward()
    losses = linear_cross_entropy(hidden, weight, targets, reduction="none")
    first = torch.autograd.grad(losses.sum(), hidden, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(losses.sum(), hidden)[0], first)


def check_nothing_counts(device, dtype) -> None:
    """Padding only, and no rows at all."""
    for shape in ((4,), (0,), (2, 0)):
        hidden, weight, bias, targets, _ = case(device, dtype, shape)
        leaves = [t.requires_grad_() for t in (hidden, weight, bias)]
        for reduction in ("mean", "none"):
            nothing = torch.full_like(targets, -100)
            loss = linear_cross_entropy(hidden, weight, nothing, bias, z_loss=0.1, reduction=reduction).sum()
            loss.backward()
            assert loss.item() == 0
            assert all(t.grad.shape == t.shape and not t.grad.count_nonzero() for t in leaves)


def check_autocast(device) -> None:
    """Under autocast the products are in half precision, the gradients in the parameters' own dtype."""
    hidden, weight, bias, targets, _ = case(device)
    leaves = [t.requires_grad_() for t in (hidden, weight, bias)]
    truths = [t.detach().double().requires_grad_() for t in (hidden, weight, bias)]
    F.cross_entropy(F.linear(*truths).flatten(0, 1), targets.flatten()).backward()
    with torch.autocast(device.type, dtype=torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, targets, bias)
    loss.backward()
    for leaf, truth in zip(leaves, truths):
        assert leaf.grad.dtype == torch.float32
        error = (leaf.grad.double() - truth.grad).abs().max() / truth.grad.abs().max()
        assert 1e-4 < error < 2e-2  # not computed in float32, and right


def check_weight_gradient_is_summed_in_float32(device) -> None:
    """Many chunks are no worse than one: a bfloat16 sum of them would lose what is small beside it."""
    generator = torch.Generator().manual_seed(0)
    rows, classes, width = 4096, 16, 32
    hidden = (torch.rand(rows, width, generator=generator) + 1).bfloat16().to(device)
    weight = torch.zeros(classes, width, dtype=torch.bfloat16, device=device).requires_grad_()
    targets = torch.zeros(rows, dtype=torch.int64, device=device)
    exact_gradient = torch.full((classes, 1), 1 / classes, dtype=torch.float64, device=device)
    exact_gradient[0] -= 1
    exact_gradient = exact_gradient * hidden.double().sum(0)
    loss = linear_cross_entropy(hidden, weight, targets, reduction="sum", chunk_bytes=8 * classes * 2)
    loss.backward()
    assert ((weight.grad.double() - exact_gradient).abs() / exact_gradient.abs()).max() <= 2**-8


def check_layouts(device) -> None:
    hidden, weight, _, targets, _ = case(device, shape=(8, 6))
    wide = hidden.repeat(1, 1, 2)
    for view in (hidden.transpose(0, 1), wide[..., ::2], hidden[:1, :1].expand(8, 6, -1), hidden[0].t()):
        view = view[..., :6]
        part, head = targets.reshape(-1)[: view[..., 0].numel()].view(view.shape[:-1]), weight.t()[: view.shape[-1]].t()
        leaf, truth = view.detach().requires_grad_(), view.detach().clone().requires_grad_()
        linear_cross_entropy(leaf, head, part).backward()
        F.cross_entropy((truth @ head.t()).flatten(0, -2), part.flatten()).backward()
        torch.testing.assert_close(leaf.grad, truth.grad, rtol=1e-4, atol=1e-6)


def check_wrong_inputs(device) -> None:
    hidden, weight, bias, targets, _ = case(device)
    for arguments, options, message in [
        ((hidden[..., :5], weight, targets), {}, r"weight \(37, 12\) and hidden \(3, 7, 5\)"),
        ((hidden, weight[0], targets), {}, r"weight \(12,\)"),
        ((hidden, weight, targets[:2]), {}, r"needs targets of shape \(3, 7\), got \(2, 7\)"),
        ((hidden, weight, targets, bias[:5]), {}, r"a bias of 37 numbers, got \(5,\)"),
        ((hidden.half(), weight, targets), {}, "hidden torch.float16, weight torch.float32"),
        ((hidden.double(), weight.double(), targets), {}, "got hidden torch.float64"),
        ((hidden, weight, targets.float()), {}, "integer dtype"),
        ((hidden, weight, targets), {"chunk_bytes": 0}, "chunk_bytes must be at least 1, got 0"),
        ((hidden, weight, targets), {"reduction": "average"}, "got 'average'"),
        (
            (hidden, weight, targets),
            {"class_weight": torch.ones(5, device=device)},
            "5 class weights were given for 37 classes",
        ),
        ((hidden, weight, targets.to("meta")), {}, "must be on the same device"),
    ]:
        with pytest.raises(ValueError, match=message):
            linear_cross_entropy(*arguments, **options)


def check_a_loss_scale_saves_small_gradients(device) -> None:
    """As for cross_entropy: the chunks' gradients in float16 do not underflow although made before the scale."""
    hidden, weight, bias, targets, _ = case(device, torch.float16, classes=200)
    leaves = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
    truths = [t.double().requires_grad_() for t in (hidden, weight, bias)]
    (linear_cross_entropy(*leaves[:2], targets, leaves[2], num_items_in_batch=10**6) * 2.0**16).backward()
    logits = F.linear(*truths).flatten(0, 1)
    (exact(logits, targets.flatten(), num_items_in_batch=10**6) * 2.0**16).backward()
    for leaf, truth in zip(leaves, truths):
        error = (leaf.grad.double() - truth.grad).abs().max() / truth.grad.abs().max()
        assert error < 2**-7


def check_padding_classes_have_no_gradient(device) -> None:
    """The hidden states of a padding token may be inf: this concerns neither its own gradient nor other rows."""
    hidden, weight, _, targets, _ = case(device)
    rows = hidden.clone()
    rows[0, 0] = float("inf")
    assert targets[0, 0] == -100
    expected, found = hidden.requires_grad_(), rows.requires_grad_()
    for each in (expected, found):
        linear_cross_entropy(each, weight, targets).backward()
    torch.testing.assert_close(found.grad, expected.grad, rtol=0, atol=0)


def check_no_uninitialized_memory_is_used(device) -> None:
    """What torch.empty returns is nan under deterministic algorithms; it must not reach the gradients."""
    hidden, weight, bias, targets, _ = case(device, torch.bfloat16)
    leaves = [t.requires_grad_() for t in (hidden, weight, bias)]
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(3, device=device).isnan().all()
        loss = linear_cross_entropy(hidden, weight, targets, bias)
        loss.backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert loss.isfinite()
    assert all(leaf.grad.isfinite().all() for leaf in leaves)


class OnAnyDevice:
    """The tests that hold on any device; a test class gives its `device`."""

    device: torch.device

    @pytest.mark.parametrize(
        ("dtype", "options", "with_bias", "rows_a_chunk"),
        pairwise(
            [(torch.bfloat16, OPTIONS[-1], True, 4), (torch.float16, OPTIONS[0], False, 1)],
            list(TOLERANCE),
            OPTIONS,
            [False, True],
            [1, 4, 1000],
        ),
        ids=str,
    )
    def test_options(self, dtype, options, with_bias, rows_a_chunk):
        check_options(self.device, dtype, options, with_bias, rows_a_chunk)

    @pytest.mark.parametrize("dtype", by_default(TOLERANCE, torch.bfloat16), ids=str)
    def test_nothing_counts(self, dtype):
        check_nothing_counts(self.device, dtype)

    @pytest.mark.parametrize(
        "check",
        [
            check_misuse, check_autocast, check_weight_gradient_is_summed_in_float32,
            check_padding_classes_have_no_gradient,
            *in_full(check_only_what_is_wanted, check_a_loss_scale_saves_small_gradients, check_layouts),
            *in_full(check_no_uninitialized_memory_is_used, check_wrong_inputs),
        ],
    )  # fmt: skip
    def test_check(self, check):
        check(self.device)
