"""What the losses must satisfy on any device: called by test_loss.py on CPU and by gpu/test_gpu_loss.py on a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hf_bmtrain.loss import cross_entropy

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
OPTIONS = [
    {},
    {"reduction": "sum", "label_smoothing": 0.1},
    {"reduction": "none", "weighted": True},
    {"label_smoothing": 0.1, "weighted": True, "ignore_index": 2},
    {"z_loss": 0.01},
    {"softcap": 4.0, "z_loss": 0.02, "reduction": "none"},
    {"softcap": 3.0, "num_items_in_batch": 29},
]


def exact(logits, targets, weighted=None, softcap=0.0, z_loss=0.0, num_items_in_batch=None, reduction="mean", **rest):
    """The loss by torch's own function in float64, from (N, C, d...) logits."""
    z = softcap * torch.tanh(logits / softcap) if softcap else logits
    counted = targets != rest.get("ignore_index", -100)
    weight = None if weighted is None else weighted.double()
    losses = F.cross_entropy(z, targets, weight, reduction="none", **rest)
    losses = losses + z_loss * z.logsumexp(1).square() * counted
    if reduction == "none":
        return losses
    if weighted is None or num_items_in_batch is not None:
        count = counted.sum() if num_items_in_batch is None else num_items_in_batch
    else:
        count = (weight[targets.where(counted, torch.zeros_like(targets))] * counted).sum()
    return losses.sum() / (count if reduction == "mean" else 1)


def case(device, shape=(9, 40), dtype=torch.float32, seed=0):
    """(logits, targets, class weights); some targets are ignored, some are class 2."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(shape, generator=generator) * 3).to(dtype)
    targets = torch.randint(shape[1], (shape[0], *shape[2:]), generator=generator)
    targets.view(-1)[::4] = -100
    targets.view(-1)[1::5] = 2
    weight = torch.rand(shape[1], generator=generator) + 0.1
    return logits.to(device), targets.to(device), weight.to(device)


def check_options(device, dtype, options, inplace, shape=(9, 40)) -> None:
    """Loss and gradient against float64, with an incoming gradient that is not 1."""
    logits, targets, weight = case(device, shape, dtype)
    options = dict(options)
    weight = weight if options.pop("weighted", False) else None
    if options.get("ignore_index") == 2:
        targets = targets.clamp(min=0)
    truth_logits = logits.double().requires_grad_()
    truth = exact(truth_logits, targets, weight, **options)
    incoming = torch.linspace(0.5, 3, truth.numel(), device=device).view(truth.shape)
    truth.backward(incoming.double())
    leaf = logits.clone().requires_grad_()
    loss = cross_entropy(leaf * 1, targets, weight, inplace=inplace, **options)
    assert loss.dtype == torch.float32 and loss.shape == truth.shape
    torch.testing.assert_close(loss.double(), truth, rtol=1e-5, atol=1e-5)
    loss.backward(incoming)
    error = (leaf.grad.double() - truth_logits.grad).abs().max()
    assert error <= 2 * TOLERANCE[dtype] * truth_logits.grad.abs().max()  # in place: rounded twice


def check_logits_are_kept(device) -> None:
    """The caller's logits are the same after forward and backward, and a second backward is right."""
    logits, targets, _ = case(device)
    before = logits.clone()
    loss = cross_entropy(logits.requires_grad_(), targets)
    first = torch.autograd.grad(loss, logits, retain_graph=True)[0]
    assert torch.equal(logits, before) and torch.equal(torch.autograd.grad(loss, logits)[0], first)


def check_inplace(device, dtype) -> None:
    """The gradient lies where the logits were, and what autograd or the caller does with them then raises."""
    values, targets, _ = case(device, dtype=dtype)
    leaf = values.clone().requires_grad_()
    logits = leaf * 1
    loss = cross_entropy(logits, targets, inplace=True)
    early = dtype != torch.float16
    assert torch.equal(logits, values) != early
    loss.backward(retain_graph=True)
    assert torch.equal(logits, leaf.grad) and bool(leaf.grad.any())
    with pytest.raises(RuntimeError, match="second backward .* inplace=False"):
        loss.backward()
    loss = cross_entropy(torch.tanh(leaf), targets, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):  # tanh needs its own output
        loss.backward()
    with pytest.raises(ValueError, match="leaf tensor or a view of one, whose values would be lost"):
        cross_entropy(leaf, targets, inplace=True)
    for view in (leaf[None].squeeze(0), leaf.detach()[:].requires_grad_()):
        with pytest.raises(ValueError, match="leaf tensor or a view of one, whose values would be lost"):
            cross_entropy(view, targets, inplace=True)
    logits = leaf * 1
    loss = cross_entropy(logits, targets, inplace=True)
    logits.detach().zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def check_inplace_without_gradient(device) -> None:
    logits, targets, _ = case(device)
    before = logits.clone()
    with torch.no_grad():
        cross_entropy(logits.requires_grad_(), targets, inplace=True)
    assert torch.equal(logits, before)


def check_double_backward(device) -> None:
    logits, targets, _ = case(device)
    loss = cross_entropy(logits.requires_grad_(), targets)
    with pytest.raises(RuntimeError, match=r"create_graph=True.* Use torch.nn.functional.cross_entropy"):
        torch.autograd.grad(loss, logits, create_graph=True)


def check_num_items(device, place) -> None:
    """num_items_in_batch as int, float and tensor (made by `place`); 0 of them give 0."""
    logits, targets, _ = case(device)
    total = cross_entropy(logits, targets, reduction="sum")
    for items in (7, 7.0, place(torch.tensor(7)), place(torch.tensor([7.0]))):
        torch.testing.assert_close(cross_entropy(logits, targets, num_items_in_batch=items), total / 7)
    nothing = torch.full_like(targets, -100)
    for items in (0, place(torch.tensor(0))):
        assert cross_entropy(logits, nothing, num_items_in_batch=items).item() == 0


def check_nothing_counts(device, dtype, inplace) -> None:
    """Padding only, and no rows at all: loss 0 and gradient 0."""
    for rows in (3, 0):
        leaf = torch.randn(rows, 5, device=device).to(dtype).requires_grad_()
        targets = torch.full((rows,), -100, device=device)
        loss = cross_entropy(leaf * 1, targets, label_smoothing=0.1, inplace=inplace, z_loss=0.1)
        loss.backward()
        assert loss.item() == 0
        assert leaf.grad.shape == (rows, 5) and leaf.grad.count_nonzero() == 0 and bool(leaf.grad.isfinite().all())


def check_odd_logits(device) -> None:
    """-inf is an impossible class; a NaN or +inf spoils its row alone."""
    values = torch.randn(4, 6, device=device)
    values[1, 3:], values[2, 0], values[3, 5] = -torch.inf, torch.inf, torch.nan
    leaf, targets = values.clone().requires_grad_(), torch.tensor([1, 0, 2, 2], device=device)
    losses = cross_entropy(leaf, targets, reduction="none")
    losses.sum().backward()
    torch.testing.assert_close(losses[:2], F.cross_entropy(values[:2], targets[:2], reduction="none"))
    assert bool(losses[2:].isnan().all()) and bool(leaf.grad[2:].isnan().all())
    assert bool(leaf.grad[:2].isfinite().all()) and leaf.grad[1, 3:].count_nonzero() == 0


def check_layouts(device) -> None:
    """Any strides and further dimensions give the numbers of contiguous rows, and a gradient in the same shape."""
    wide, targets, _ = case(device, (6, 22, 4))
    for logits in (wide, wide.transpose(0, 2).contiguous().transpose(0, 2), wide[:, 1::2], wide.expand(6, 22, 4)):
        targets_here = targets % logits.shape[1]
        leaf = logits.detach().requires_grad_()
        truth_leaf = logits.detach().double().requires_grad_()
        cross_entropy(leaf, targets_here).backward()
        exact(truth_leaf, targets_here).backward()
        torch.testing.assert_close(leaf.grad.double(), truth_leaf.grad, rtol=1e-5, atol=1e-7)
    rows, targets, _ = case(device, (8, 30))
    for logits in (rows[:, 3:17], rows.t().contiguous().t(), rows[:1].expand(8, 30), rows[:, :1], rows[1:2].t()[:8]):
        targets_here = (targets % logits.shape[1])[: logits.shape[0]]
        leaf, truth_leaf = logits.detach().requires_grad_(), logits.detach().double().requires_grad_()
        cross_entropy(leaf, targets_here).backward()
        exact(truth_leaf, targets_here).backward()
        torch.testing.assert_close(leaf.grad.double(), truth_leaf.grad, rtol=1e-5, atol=1e-7)


def check_wrong_inputs(device) -> None:
    logits, targets, _ = case(device, (4, 5))
    for bad_logits, bad_targets, options, message in [
        (logits, targets[:3], {}, r"\(4, 5\) and targets \(3,\)"),
        (logits.double(), targets, {}, "got torch.float64"),
        (logits, targets.float(), {}, "integer dtype, got torch.float32"),
        (logits, targets, {"weight": torch.ones(4, device=device)}, "4 class weights were given for 5 classes"),
        (logits, targets, {"weight": torch.ones(2, 3, device=device)}, r"one number per class, got \(2, 3\)"),
        (logits[:, :0], targets, {}, "no classes"),
        (logits, targets, {"num_items_in_batch": -1}, "must not be negative, got -1"),
        (logits, targets, {"num_items_in_batch": torch.ones(2)}, r"one number, got a tensor of shape \(2,\)"),
        (logits, targets, {"num_items_in_batch": 3, "reduction": "sum"}, "reduction='sum' computes no mean"),
        (logits, targets, {"softcap": -1.0}, "must not be negative, got -1.0"),
    ]:
        with pytest.raises(ValueError, match=message):
            cross_entropy(bad_logits, bad_targets, **options)


def check_a_loss_scale_saves_small_gradients(device, inplace) -> None:
    """float16 gradients of a mean over a million items, times a loss scale: none is lost before the scale is in."""
    logits, targets, _ = case(device, (8, 200), torch.float16)
    leaf, truth_leaf = logits.clone().requires_grad_(), logits.double().requires_grad_()
    loss = cross_entropy(leaf * 1, targets, num_items_in_batch=10**6, inplace=inplace)
    (loss * 2.0**16).backward()
    (exact(truth_leaf, targets, num_items_in_batch=10**6) * 2.0**16).backward()
    torch.testing.assert_close(leaf.grad.double(), truth_leaf.grad, rtol=2**-9, atol=2**-24)
