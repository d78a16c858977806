"""Averages of weights, copies of models, and optimizers that change weights for a while."""

# ruff: noqa: B023 - a loss is called before the loop goes on
from __future__ import annotations

import copy

import torch
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

from sides import Side, language_loss, sgd, train, train_step
from small import MLP, Encoder, Layer, decoder, ids, vectors


def ema_by_hand(side: Side) -> None:
    """Clones of the parameters, `lerp_`ed; for an evaluation they are copied in, and the weights put back."""
    model = side.wrap(Encoder())
    optimizer = sgd(model)
    shadow = [p.clone().detach() for p in model.parameters()]
    for step in range(3):
        train_step(side, model, optimizer, step)
        with torch.no_grad():
            for s, p in zip(shadow, model.parameters()):
                s.sub_(0.1 * (s - p))
        stored = [p.detach().cpu().clone() for p in model.parameters()]
        for s, p in zip(shadow, model.parameters()):
            p.data.copy_(s.data)
        with torch.no_grad():
            side.see("averaged", model(ids(9, side.rank)))
        for c, p in zip(stored, model.parameters()):
            p.data.copy_(c.data)
    side.weights(model)


def ema_over_state_dicts(side: Side) -> None:
    """The average is kept as a state dict on the CPU, and loaded at the end."""
    model = side.wrap(Encoder())
    average = {name: value.clone() for name, value in model.state_dict().items()}

    def after_step(step):
        for name, value in model.state_dict().items():
            average[name].mul_(0.9).add_(value, alpha=0.1)

    train(side, model, after_step=after_step)
    model.load_state_dict(average)
    side.see("averaged", model(ids(9, side.rank)))
    side.weights(model)


def averaged_model_of_the_wrapped(side: Side) -> None:
    """AveragedModel(model) after wrapping: the copy has full weights."""
    model = side.wrap(Encoder())
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    train(side, model, after_step=lambda step: average.update_parameters(model))
    side.see("averaged", average(ids(9, side.rank)))
    side.weights(average.module)


def averaged_model_that_is_sharded_too(side: Side) -> None:
    """The copy of the wrapped model is wrapped as well, so that each rank holds its part of the average."""
    model = side.wrap(Encoder())
    average = AveragedModel(model)
    side.wrap(average.module)
    train(side, model, after_step=lambda step: average.update_parameters(model))
    side.see("averaged", average(ids(9, side.rank)))
    side.weights(average.module)


def averaged_model_from_before(side: Side) -> None:
    """An AveragedModel of the plain model, made before, is updated by the wrapped one."""
    model = Encoder()
    average = AveragedModel(model)
    model = side.wrap(model)
    train(side, model, after_step=lambda step: average.update_parameters(model))
    side.see("averaged", average(ids(9, side.rank)))
    side.weights(average.module)


def averaged_model_of_vectors(side: Side) -> None:
    """The same where all parameters have one row of slices' length, so that shapes may fit by chance."""

    class Rows(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList([nn.Linear(32, side.size, bias=False) for _ in range(2)])

        def forward(self, x):
            return self.layers[0](x) + self.layers[1](x)

    model = Rows()
    average = AveragedModel(model)
    model = side.wrap(model)
    train(
        side, model, loss=lambda rank, step: model(vectors(step, rank, width=32)).square().mean(),
        after_step=lambda step: average.update_parameters(model),
    )  # fmt: skip
    side.weights(average.module)


def averaged_model_wrapped_too(side: Side) -> None:
    """Both are wrapped; torch's EMA by `_foreach_lerp_`."""
    model = Encoder()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    model = side.wrap(model)
    average.module = side.wrap(average.module)
    train(side, model, after_step=lambda step: average.update_parameters(model))
    with torch.no_grad():
        side.see("averaged", average(ids(9, side.rank)))
    side.weights(average.module)


def swa(side: Side) -> None:
    """Stochastic weight averaging: SWALR, and an equal average of both wrapped models."""
    model = Encoder()
    average = AveragedModel(model)
    model = side.wrap(model)
    average.module = side.wrap(average.module)
    optimizer = sgd(model)
    scheduler = SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
    for step in range(4):
        train_step(side, model, optimizer, step)
        scheduler.step()
        if step >= 1:
            average.update_parameters(model)
    side.weights(average.module, model)


def copy_from_a_plain_model(side: Side) -> None:
    """`for p, q in zip(wrapped.parameters(), plain.parameters()): p.data.copy_(q.data)`."""
    model, plain = side.wrap(Encoder()), Encoder(seed=1)
    for p, q in zip(model.parameters(), plain.parameters()):
        p.data.copy_(q.data)
    side.weights(model)


def copy_to_a_plain_model(side: Side) -> None:
    """The other way: a plain copy for evaluation follows the slices, by `q.data.copy_(p.data)`."""
    model, plain = side.wrap(Encoder(seed=1)), Encoder()
    for p, q in zip(model.parameters(), plain.parameters()):
        q.data.copy_(p.data)
    side.weights(plain)


def copy_of_rows_to_a_plain_model(side: Side) -> None:
    """A weight of `ranks` rows, whose slice broadcasts into the whole."""
    torch.manual_seed(0)
    model, plain = nn.ModuleList([nn.Linear(64, side.size, bias=False)]), nn.Linear(64, side.size, bias=False)
    model = side.wrap(model)
    plain.weight.data.copy_(model[0].weight.data)
    side.weights(plain)


def hard_copy_between_wrapped(side: Side) -> None:
    """A target network that is copied and moved by parameters, of two wrapped models (Polyak, DQN)."""
    online = side.wrap(MLP())
    target = side.wrap(MLP(seed=2))
    target.load_state_dict(online.state_dict())

    def loss(rank, step):
        with torch.no_grad():
            wanted = 0.9 * target(vectors(step + 1, rank)).max(1)[0] + 0.1
        return (online(vectors(step, rank)).max(1)[0] - wanted).square().mean()

    def after_step(step):
        for p, q in zip(target.parameters(), online.parameters()):
            p.data.copy_(0.1 * q.data + (1.0 - 0.1) * p.data)

    train(side, online, steps=4, loss=loss, after_step=after_step)
    side.weights(target)


def two_models_of_other_layouts(side: Side) -> None:
    """A soft update between equal layers of models that differ elsewhere, by names."""

    class Larger(nn.Module):
        def __init__(self, extra):
            super().__init__()
            torch.manual_seed(extra)
            self.a = nn.Linear(4, 4, bias=False)
            self.b = nn.Linear(4, extra, bias=False)
            self.layers = nn.ModuleList([Layer(4)])

        def forward(self, x):
            return self.b(self.layers[0](self.a(x)))

    online, target = side.wrap(Larger(4)), side.wrap(Larger(12))
    sources = dict(online.named_parameters())
    with torch.no_grad():
        for name, p in target.named_parameters():
            if name != "b.weight":
                p.lerp_(sources[name], 0.5)
    side.weights(target)


def sam(side: Side) -> None:
    """SAM by hand: up along the gradient, a second backward, back, and the step."""
    model = side.wrap(Encoder())
    optimizer = sgd(model)
    for step in range(3):
        side.backward(model, step)
        norm = torch.norm(torch.stack([p.grad.norm(p=2) for p in model.parameters() if p.grad is not None]), p=2)
        side.see("norm", norm)
        moves = {}
        with torch.no_grad():
            for p in model.parameters():
                moves[p] = p.grad * (0.05 / (norm + 1e-12))
                p.add_(moves[p])
        optimizer.zero_grad()
        side.backward(model, step)
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(moves[p])
        optimizer.step()
        optimizer.zero_grad()
    side.weights(model)


class SAM(torch.optim.Optimizer):
    """As it is often written: around a base optimizer, adaptive if asked for."""

    def __init__(self, params, rho, adaptive, **options):
        super().__init__(params, {"rho": rho, "adaptive": adaptive, **options})
        self.base = torch.optim.SGD(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self):
        norm = self.grad_norm()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old_p"] = p.data.clone()
                e = (torch.pow(p, 2) if group["adaptive"] else 1.0) * p.grad * (group["rho"] / (norm + 1e-12)).to(p)
                p.add_(e)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old_p"]
        self.base.step()
        self.zero_grad()

    def grad_norm(self):
        return torch.norm(
            torch.stack(
                [
                    ((torch.abs(p) if group["adaptive"] else 1.0) * p.grad).norm(p=2)
                    for group in self.param_groups
                    for p in group["params"]
                ]
            ),
            p=2,
        )


def train_with_sam(side: Side, adaptive: bool) -> None:
    model = side.wrap(Encoder())
    optimizer = SAM(model.parameters(), rho=0.5, adaptive=adaptive, lr=0.5, momentum=0.9)
    for step in range(3):
        side.backward(model, step)
        optimizer.first_step()
        side.backward(model, step)
        optimizer.second_step()
    side.weights(model)


def sam_class(side: Side) -> None:
    """The usual SAM class around SGD with momentum."""
    train_with_sam(side, adaptive=False)


def adaptive_sam(side: Side) -> None:
    """ASAM: the norm of weights times gradients."""
    train_with_sam(side, adaptive=True)


def lookahead(side: Side) -> None:
    """Slow weights every second step: `slow += 0.5 * (fast - slow); p.data.copy_(slow)`."""
    model = side.wrap(Encoder())
    slow = {p: p.data.clone() for p in model.parameters()}

    def after_step(step):
        if step % 2:
            for p, s in slow.items():
                s += 0.5 * (p.data - s)
                p.data.copy_(s)

    train(side, model, sgd(model, momentum=0.9), steps=4, after_step=after_step)


def model_soup(side: Side) -> None:
    """The mean of the state dicts of two trainings is loaded into a third wrapped model."""
    states = []
    for start in range(2):
        model = side.wrap(Encoder())
        optimizer = sgd(model)
        for step in (10 * start, 10 * start + 1):
            train_step(side, model, optimizer, step)
        states.append(model.state_dict())
    soup = side.wrap(Encoder(seed=3))
    soup.load_state_dict({name: sum(state[name] for state in states) / 2 for name in states[0]})
    side.weights(soup)


def task_vectors(side: Side) -> None:
    """The difference of two state dicts is added to the weights inside `gathered`."""
    model = side.wrap(Encoder())
    first = {name: value.clone() for name, value in model.state_dict().items()}
    train_step(side, model, sgd(model), 0)
    vector = {name: value - first[name] for name, value in model.state_dict().items()}
    with side.gathered(model):
        for name, p in model.named_parameters():
            p.data.sub_(2 * vector[name])
    side.weights(model)


def learning_rate_finder(side: Side) -> None:
    """Model and optimizer states are kept, the rate swept upwards, and both states restored."""
    model = side.wrap(Encoder())
    optimizer = sgd(model, lr=0.1, momentum=0.9)
    train_step(side, model, optimizer, 0)
    kept = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=3.0)
    for step in range(3):
        train_step(side, model, optimizer, step)
        scheduler.step()
    model.load_state_dict(kept[0])
    optimizer.load_state_dict(kept[1])
    for step in range(2):
        train_step(side, model, optimizer, step)
    side.weights(model)


def best_checkpoint_in_memory(side: Side) -> None:
    """Early stopping: the best state dict is deep-copied, and loaded back after worse steps."""
    model = side.wrap(decoder())
    optimizer = sgd(model)
    best = None
    for step in range(4):
        train_step(side, model, optimizer, step, language_loss(model))
        if step == 1:
            best = copy.deepcopy(model.state_dict())
    model.load_state_dict(best)
    model.eval()
    with torch.no_grad():
        side.see("evaluated", model(ids(8, side.rank)).logits)
    side.weights(model)


def gradient_descent_by_hand(side: Side) -> None:
    """No optimizer: `p.data.add_(p.grad, alpha=-lr)`, `p -= lr * p.grad` and `p.data = p.data - lr * p.grad`."""
    model = side.wrap(Encoder())
    for step in range(3):
        side.backward(model, step)
        for p in model.parameters():
            if step == 0:
                p.data.add_(p.grad, alpha=-0.5)
            elif step == 1:
                with torch.no_grad():
                    p -= 0.5 * p.grad
            else:
                p.data = p.data - 0.5 * p.grad.data
        model.zero_grad()
    side.weights(model)


def descent_in_place(side: Side) -> None:
    """The tutorials' `p -= lr * p.grad; p.grad = None` under no_grad, in one loop."""
    model = side.wrap(Encoder())
    for step in range(3):
        side.backward(model, step)
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.5 * p.grad
                p.grad = None
    side.weights(model)


def detached_gradients(side: Side) -> None:
    """The old way to clear gradients: `p.grad.detach_(); p.grad.zero_()`."""
    model = side.wrap(Encoder())
    optimizer = sgd(model)
    for step in range(3):
        side.backward(model, step)
        optimizer.step()
        for p in model.parameters():
            p.grad.detach_()
            p.grad.zero_()
    side.weights(model)


def reptile(side: Side) -> None:
    """Meta-learning by Reptile: inner steps, then `p.data = old + 0.5 * (p.data - old)`."""
    model = side.wrap(Encoder())
    for task in range(2):
        old = [p.data.clone() for p in model.parameters()]
        optimizer = sgd(model)
        for step in range(2):
            train_step(side, model, optimizer, 10 * task + step)
        for p, o in zip(model.parameters(), old):
            p.data = o + 0.5 * (p.data - o)
    side.weights(model)


def first_order_maml(side: Side) -> None:
    """FOMAML: inner steps, a query gradient, weights restored, the query gradient applied."""
    model = side.wrap(Encoder())
    outer = sgd(model)
    for task in range(2):
        old = [p.detach().clone() for p in model.parameters()]
        inner = sgd(model)
        train_step(side, model, inner, 10 * task)
        side.loss(lambda rank: model(ids(10 * task + 5, rank)).square().mean()).backward()
        with torch.no_grad():
            for p, o in zip(model.parameters(), old):
                p.copy_(o)
        outer.step()
        outer.zero_grad()
    side.weights(model)


def zeroth_order(side: Side) -> None:
    """MeZO: two forwards under no_grad at weights moved by a seeded direction, no backward."""
    model = side.wrap(Encoder())

    def move(scale):
        for number, p in enumerate(model.parameters()):
            z = torch.randn(getattr(p, "full_shape", p.shape), generator=torch.Generator().manual_seed(number))
            p.data.add_(p.take(z) if side.sharded else z, alpha=scale)

    for step in range(3):
        losses = []
        with torch.no_grad():
            for scale in (1e-2, -2e-2):
                move(scale)
                losses.append(side.mean(side.loss(lambda rank: model(ids(step, rank)).square().mean())))
            move(1e-2)
            move(-0.1 * (losses[0] - losses[1]).item() / 2e-2)
    side.weights(model)
