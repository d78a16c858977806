"""Clipping, noise, statistics of gradients and weights, and what is logged of them."""

from __future__ import annotations

import math

import torch
from torch import nn

from sides import Side, Usage, sgd, train
from small import Encoder, decoder


def train_with(side: Side, change) -> None:
    """change(model): after backward, before the SGD step."""
    model = side.wrap(Encoder())
    train(side, model, before_step=lambda step: change(model))


def clip_by_torch(side: Side) -> None:
    """torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)."""
    train_with(side, lambda m: side.see("norm", nn.utils.clip_grad_norm_(m.parameters(), 0.05)))


def clip_by_torch_infinity(side: Side) -> None:
    """The same with norm_type=inf, and with error_if_nonfinite."""
    train_with(
        side,
        lambda m: side.see("norm", nn.utils.clip_grad_norm_(m.parameters(), 0.01, math.inf, error_if_nonfinite=True)),
    )


def clip_by_torch_in_two_parts(side: Side) -> None:
    """torch's get_total_norm and clip_grads_with_norm_."""

    def change(model):
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
        side.see("norm", norm)
        nn.utils.clip_grads_with_norm_(model.parameters(), 0.05, norm)

    train_with(side, change)


def clip_each_parameter(side: Side) -> None:
    """clip_grad_norm_ of each parameter by itself."""

    def change(model):
        for p in model.parameters():
            side.see("norm", nn.utils.clip_grad_norm_(p, 0.01))

    train_with(side, change)


def clip_by_value(side: Side) -> None:
    """torch.nn.utils.clip_grad_value_."""
    train_with(side, lambda m: nn.utils.clip_grad_value_(m.parameters(), 0.003))


def clip_by_own_code(side: Side) -> None:
    """The forum's snippet: `p.grad.detach().data.norm(2).item() ** 2` summed, the gradients scaled by `.data.mul_`."""

    def change(model):
        total = 0.0
        for p in model.parameters():
            total += p.grad.detach().data.norm(2).item() ** 2
        total = total**0.5
        side.see("norm", total)
        factor = 0.05 / (total + 1e-6)
        if factor < 1:
            for p in model.parameters():
                p.grad.data.mul_(factor)

    train_with(side, change)


def clip_by_concatenation(side: Side) -> None:
    """The norm of all gradients as one vector: `torch.cat([p.grad.view(-1) ...]).norm()`."""

    def change(model):
        norm = torch.cat([p.grad.view(-1) for p in model.parameters()]).norm()
        side.see("norm", norm)
        for p in model.parameters():
            p.grad.mul_(0.05 / norm)

    train_with(side, change)


def clip_to_the_weight(side: Side) -> None:
    """Adaptive clipping by whole tensors: the gradient's norm at most 1 % of the weight's."""

    def change(model):
        for p in model.parameters():
            limit = 0.01 * p.detach().norm().clamp(min=1e-3)
            norm = p.grad.norm()
            if norm > limit:
                p.grad.mul_(limit / norm)

    train_with(side, change)


def gradients_noise(side: Side) -> None:
    """`p.grad += noise`, noise of the whole shape cut by `p.take`."""

    def change(model):
        for number, (_name, p) in enumerate(model.named_parameters()):
            noise = torch.randn(getattr(p, "full_shape", p.shape), generator=torch.Generator().manual_seed(number))
            p.grad += 0.01 * (p.take(noise) if side.sharded else noise)

    train_with(side, change)


def sign_descent(side: Side) -> None:
    """`p.grad.sign_()`, and gradients multiplied by a mask of their size."""

    def change(model):
        for p in model.parameters():
            p.grad.mul_((p.grad.abs() > 1e-4).float()).sign_()

    train_with(side, change)


def centralized_gradients(side: Side) -> None:
    """Gradient centralization: the mean over all but the first dimension is taken off, `if p.grad.dim() > 1`."""

    def change(model):
        for p in model.parameters():
            if p.grad.dim() > 1:
                p.grad.add_(-p.grad.mean(dim=tuple(range(1, p.grad.dim())), keepdim=True))

    train_with(side, change)


REDUCTIONS = {
    "norm": lambda g: g.norm(), "norm(1)": lambda g: g.norm(1), "torch.norm": torch.norm,
    "linalg": torch.linalg.vector_norm, "sum": lambda g: g.sum(), "mean": lambda g: g.mean(),
    "abs max": lambda g: g.abs().max(), "min": lambda g: g.min(), "std": lambda g: g.std(), "var": lambda g: g.var(),
    "square sum": lambda g: g.pow(2).sum(), "product": lambda g: (g * g).sum(), "amax": lambda g: g.abs().amax(),
    "any nan": lambda g: torch.isnan(g).any(), "all finite": lambda g: torch.isfinite(g).all(),
    "zeros": lambda g: (g == 0).sum(), "count": torch.count_nonzero, "zero share": lambda g: (g == 0).float().mean(),
    "logsumexp": lambda g: g.logsumexp(0) if g.dim() == 1 else g.flatten().logsumexp(0), "median": lambda g: g.median(),
    "quantile": lambda g: torch.quantile(g.flatten(), 0.9), "topk": lambda g: g.flatten().topk(1)[0],
    "dot": lambda g: torch.dot(g.flatten(), g.flatten()), "item": lambda g: g.norm().item(),
    "float max": lambda g: float(g.max()), "numpy": lambda g: abs(g.cpu().numpy()).max(),
    "list": lambda g: max(g.flatten().tolist()), "histogram": lambda g: torch.histc(g.float(), 4, -0.01, 0.01),
    "allclose": lambda g: torch.allclose(g, g * 1.0), "equal": lambda g: torch.equal(g, g.clone()),
    "sort": lambda g: g.flatten().sort()[0][:1], "elements": lambda g: g.numel(),
    "cosine": lambda g: torch.cosine_similarity(g.flatten(), g.flatten() + 1e-3, dim=0),
    "kurtosis": lambda g: (g - g.mean()).pow(4).mean() / g.var(unbiased=False).pow(2).clamp(min=1e-12),
    "cat": lambda g: torch.cat([g.flatten()]).norm(),
    "stack": lambda g: torch.stack([g.flatten()]).norm(),
    "first": lambda g: g.flatten()[0], "rms": lambda g: g.square().mean().sqrt(),
}  # fmt: skip


def statistic(name: str, of: str) -> Usage:
    """The usage that logs REDUCTIONS[name] of every gradient, or of every weight as it is reached by `of`."""

    def recipe(side: Side) -> None:
        model = side.wrap(Encoder())
        side.backward(model)
        for key, p in model.named_parameters():
            tensor = {"gradient": p.grad, "weight": p, "data": p.data, "detached": p.detach()}[of]
            if of == "weight":
                with torch.no_grad():
                    value = REDUCTIONS[name](tensor)
            else:
                value = REDUCTIONS[name](tensor)
            side.see(f"{name} of {key}", torch.as_tensor(value, dtype=torch.float64))

    recipe.__name__ = f"{of}_{name.replace(' ', '_')}"
    recipe.__doc__ = f"{name} of each {of}, for a log."
    return Usage(recipe)


def number_of_parameters(side: Side) -> None:
    """`sum(p.numel() for p in model.parameters())`, as logged by every script."""
    model = side.wrap(Encoder())
    side.see("count", sum(p.numel() for p in model.parameters()))


def number_of_parameters_by_transformers(side: Side) -> None:
    """model.num_parameters() of a Hugging Face model."""
    model = side.wrap(decoder())
    side.see("count", model.num_parameters())
    side.see("trainable", model.num_parameters(only_trainable=True))


def decay_groups_by_dimension(side: Side) -> None:
    """Weight decay only for `p.dim() >= 2`, as in nanoGPT."""
    model = side.wrap(Encoder())
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    train(side, model, torch.optim.SGD([g for g in groups if g["params"]], lr=0.5))


def gradient_noise_scale(side: Side) -> None:
    """Norms of a small and a large batch's gradients: `sum(p.grad.pow(2).sum())` after one backward and after two."""
    model = side.wrap(Encoder())
    side.backward(model)
    small = sum(p.grad.pow(2).sum() for p in model.parameters())
    side.backward(model, 1)
    large = sum((p.grad / 2).pow(2).sum() for p in model.parameters())
    side.see("small", small)
    side.see("ratio", large / small)


def gradients_vector(side: Side) -> None:
    """torch.nn.utils.parameters_to_vector(...).norm(), of weights and gradients."""
    model = side.wrap(Encoder())
    side.backward(model)
    side.see("gradients", nn.utils.parameters_to_vector([p.grad for p in model.parameters()]).norm())
    with torch.no_grad():
        side.see("weights", nn.utils.parameters_to_vector(model.parameters()).norm())


def update_to_weight_ratio(side: Side) -> None:
    """The logged ratio of an update's norm to the weight's: `(p - before).norm() / p.norm()`."""
    model = side.wrap(Encoder())
    optimizer = sgd(model)
    side.backward(model)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    with torch.no_grad():
        for p, q in zip(model.parameters(), before):
            side.see("ratio", (p - q).norm() / p.norm())


def norms_by_foreach(side: Side) -> None:
    """torch._foreach_norm of weights and of gradients."""
    model = side.wrap(Encoder())
    side.backward(model)
    side.see("gradients", torch.stack(torch._foreach_norm([p.grad for p in model.parameters()])))
    side.see("weights", torch.stack(torch._foreach_norm([p.detach() for p in model.parameters()])))


GENERATED = [
    *[statistic(name, "gradient") for name in REDUCTIONS],
    *[statistic(name, "weight") for name in ("norm", "mean", "abs max", "numpy", "std", "any nan", "cat", "elements")],
    *[statistic(name, "data") for name in ("norm", "mean", "abs max")],
    *[statistic(name, "detached") for name in ("norm", "mean", "abs max")],
]
