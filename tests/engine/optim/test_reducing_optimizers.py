"""Optimizers that reduce over whole parameters, or all of them: right where the reduction is global, or refused."""

import pytest
import torch

import hf_bmtrain as bmt
from cases import full, in_full
from ranks import on_ranks
from twins import Tower, compare_backward, tower_loss


class Reducing(torch.optim.Optimizer):
    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            self.update([p for p in group["params"] if p.grad is not None], group["lr"])


class NormalizedSGD(Reducing):
    """Steps along the gradient of all parameters, divided by its norm."""

    def update(self, parameters, lr):
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for p in parameters:
            p.sub_(p.grad * (lr / (norm + 1e-6)))


class LayerwiseNormalized(Reducing):
    """Divides each parameter's momentum by a norm of it that is made of its gradients."""

    def update(self, parameters, lr):
        for p in parameters:
            state = self.state[p]
            scaled = p.grad / (p.grad.pow(2).sum().sqrt() + 1e-6)
            state["momentum"] = scaled if "momentum" not in state else 0.9 * state["momentum"] + scaled
            p.sub_(state["momentum"] * lr)


class Lamb(Reducing):
    """Scales each parameter's step by the norm of its weights, divided by that of the update."""

    def update(self, parameters, lr):
        for p in parameters:
            state = self.state[p]
            if not state:
                state["exp_avg_sq"] = torch.zeros_like(p)
            state["exp_avg_sq"].mul_(0.9).addcmul_(p.grad, p.grad, value=0.1)
            update = p.grad / (state["exp_avg_sq"].sqrt() + 1e-3)
            p.sub_(update * (lr * p.norm() / (update.norm() + 1e-6)))


class Prodigy(Reducing):
    """Estimates the step size from the products of gradients and the way from the start, over all parameters."""

    def update(self, parameters, lr):
        numerator, denominator = 0.0, 1e-6
        for p in parameters:
            state = self.state[p]
            if not state:
                state["start"], state["sum"] = p.detach().clone(), torch.zeros_like(p)
            numerator = numerator + torch.dot(p.grad.flatten(), (state["start"] - p).flatten())
            state["sum"].add_(p.grad, alpha=lr)
            denominator = denominator + state["sum"].abs().sum()
        size = 0.1 + torch.abs(numerator / denominator)
        for p in parameters:
            p.sub_(p.grad * (lr * size))


def trained_as_in_plain_torch(make):
    model, twin = bmt.auto_wrap(Tower()), Tower()
    optimizer, plain = make(model.parameters()), make(twin.parameters())
    for step in range(4):
        compare_backward(model, twin, tower_loss, step)
        for either in (optimizer, plain):
            either.step()
            either.zero_grad()
        full_params = dict(twin.named_parameters())
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.gather(), full_params[name].detach(), rtol=1e-5, atol=1e-6, msg=name)


@full
@pytest.mark.parametrize("make", [LayerwiseNormalized, *in_full(NormalizedSGD)])
@pytest.mark.parametrize("size", [2, *in_full(1, 3)])
def test_global_reductions(world, size, make):
    world(size)(trained_as_in_plain_torch, make)


@pytest.mark.parametrize("make", [Lamb, Prodigy])
@on_ranks(2, full=(1, 3))
def test_reductions_of_weights(make):
    """A reduction that a slice does not make global is refused on every rank."""
    reason = None
    try:
        trained_as_in_plain_torch(make)
    except TypeError as error:
        reason = str(error)
    assert reason is None or ("depends on the shapes" in reason and "OptimManager.clip_grad_norm" in reason), reason
    reasons = bmt.current_world().gather_objects(reason)
    assert all((each is None) == (reason is None) for each in reasons)
