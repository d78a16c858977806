"""Training loops: accumulation, other people's optimizers, precision, ranks with other data, habits of DDP."""

# ruff: noqa: B023 - a loss is called before the loop goes on
from __future__ import annotations

import contextlib
import io
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import nn

from sides import Side, expect, sgd, train, train_step
from small import WIDTH, Encoder, Layer, decoder, ids, vectors
from tiny_models import VOCABULARY

# -- optimizers of others -----------------------------------------------------------------------------------------


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                p.data.mul_(1 - group["lr"] * group["weight_decay"])
                a, (b1, b2) = state["exp_avg"], group["betas"]
                p.add_(a.clone().mul_(b1).add(p.grad, alpha=1 - b1).sign_(), alpha=-group["lr"])
                a.mul_(b2).add_(p.grad, alpha=1 - b2)


def lion(side: Side) -> None:
    """Lion by hand: signs of an average."""
    model = side.wrap(Encoder())
    train(side, model, Lion(model.parameters()))


class ScheduleFree(torch.optim.Optimizer):
    """SGD whose weights are an interpolation of two averages, swapped for evaluation."""

    def __init__(self, params, lr=0.5, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                z = self.state[p].setdefault("z", torch.clone(p.detach()))
                x = self.state[p].setdefault("x", torch.clone(p.detach()))
                z.sub_(p.grad, alpha=group["lr"])
                x.lerp_(z, 1 / group["k"])
                p.copy_(x.lerp(z, 1 - group["beta"]))

    @torch.no_grad()
    def eval(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(self.state[p]["x"])


def schedule_free(side: Side) -> None:
    """A schedule-free optimizer: weights are exchanged for an evaluation."""
    model = side.wrap(Encoder())
    optimizer = ScheduleFree(model.parameters())
    train(side, model, optimizer)
    optimizer.eval()
    side.weights(model)


class Muon(torch.optim.Optimizer):
    """Newton-Schulz for matrices, plain momentum for the rest, by p.ndim."""

    def __init__(self, params, lr=0.02):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                g = self.state[p].setdefault("m", torch.zeros_like(p)).lerp_(p.grad, 0.1)
                if g.ndim == 2:
                    x = g / (g.norm() + 1e-7)
                    for _ in range(3):
                        x = 1.5 * x - 0.5 * x @ x.T @ x
                    g = x
                p.add_(g, alpha=-group["lr"])


def muon_by_hand(side: Side) -> None:
    """A Muon that falls back to momentum where p.ndim is not 2."""
    model = side.wrap(Encoder())
    train(side, model, Muon(model.parameters()))


def muon_for_matrices(side: Side) -> None:
    """The usual split: Muon for `p.ndim == 2` parameters, AdamW for the others."""
    model = side.wrap(Encoder())
    optimizers = [
        cls(list(ps), lr=1e-2)
        for cls, ps in (
            (Muon, [p for p in model.parameters() if p.ndim == 2]),
            (torch.optim.SGD, [p for p in model.parameters() if p.ndim != 2]),
        )
        if ps
    ]
    for step in range(2):
        side.backward(model, step)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
    side.weights(model)


class Lars(torch.optim.Optimizer):
    """A trust ratio of norms for each parameter of more than one dimension."""

    def __init__(self, params, lr=0.5, least=2):
        super().__init__(params, {"lr": lr, "least": least})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                ratio = 0.01 * p.norm() / (p.grad.norm() + 1e-9) if p.ndim >= group["least"] else 1.0
                p.add_(p.grad * ratio, alpha=-group["lr"])


def lars(side: Side) -> None:
    """LARS by hand, trust ratios for matrices."""
    model = side.wrap(Encoder())
    train(side, model, Lars(model.parameters()))


def lars_for_all(side: Side) -> None:
    """LARS by hand, trust ratios for all parameters."""
    model = side.wrap(Encoder())
    train(side, model, Lars(model.parameters(), least=0))


class NovoGrad(torch.optim.Optimizer):
    """One second moment for each parameter: the norm of its gradient."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                norm = p.grad.pow(2).sum()
                v = self.state[p].setdefault("v", norm.clone())
                v.mul_(0.9).add_(0.1 * norm)
                p.add_(p.grad / (v.sqrt() + 1e-8), alpha=-group["lr"])


def novograd(side: Side) -> None:
    """NovoGrad by hand: gradients divided by an average of their norms, which are global."""
    model = side.wrap(Encoder())
    train(side, model, NovoGrad(model.parameters()))


class Prodigy(torch.optim.Optimizer):
    """A step size from sums over all parameters of products of gradients and distances (D-Adaptation)."""

    def __init__(self, params):
        super().__init__(params, {"d": 1e-2})
        self.numerator = 0.0

    def product(self, a, b):
        return torch.dot(a.flatten(), b.flatten()).item()

    @torch.no_grad()
    def step(self, closure=None):
        group = self.param_groups[0]
        for p in group["params"]:
            start = self.state[p].setdefault("p0", p.detach().clone())
            self.numerator += self.product(p.grad, start - p.data)
        total = sum(p.grad.abs().sum().item() for p in group["params"])
        group["d"] = max(group["d"], self.numerator / total)
        for p in group["params"]:
            p.add_(p.grad, alpha=-10 * group["d"])


def prodigy(side: Side) -> None:
    """Prodigy by hand: dot products of gradients with distances from the start."""
    model = side.wrap(Encoder())
    train(side, model, Prodigy(model.parameters()), steps=4)


class ProdigyBySums(Prodigy):
    def product(self, a, b):
        return (a * b).sum().item()


def prodigy_by_sums(side: Side) -> None:
    """The same by `(g * (p0 - p)).sum()`."""
    model = side.wrap(Encoder())
    train(side, model, ProdigyBySums(model.parameters()), steps=4)


def adafactor(side: Side) -> None:
    """transformers' Adafactor."""
    model = side.wrap(Encoder())
    train(side, model, transformers.Adafactor(model.parameters(), lr=1e-2, relative_step=False))


def lbfgs(side: Side) -> None:
    """torch's L-BFGS with a closure, which takes dot products over all parameters."""
    model = side.wrap(Encoder())
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    for _step in range(2):

        def closure():
            optimizer.zero_grad()
            loss = side.loss(lambda rank: model(ids(0, rank)).square().mean())
            loss.backward()
            return loss

        optimizer.step(closure)
    side.weights(model)


def closure_of_sgd(side: Side) -> None:
    """`optimizer.step(closure)` of SGD."""
    model = side.wrap(Encoder())
    optimizer = sgd(model, momentum=0.9, nesterov=True)
    for step in range(3):

        def closure():
            optimizer.zero_grad()
            loss = side.loss(lambda rank: model(ids(step, rank)).square().mean())
            loss.backward()
            return loss

        optimizer.step(closure)
    side.weights(model)


def galore(side: Side) -> None:
    """GaLore by hand: gradients of matrices are projected by an SVD, `if p.dim() == 2`."""
    model = side.wrap(Encoder())
    for step in range(2):
        side.backward(model, step)
        with torch.no_grad():
            for p in model.parameters():
                g = p.grad
                if g.dim() == 2 and min(g.shape) > 4:
                    u = torch.linalg.svd(g, full_matrices=False)[0][:, :4]
                    g = u @ (u.T @ g)
                p.add_(g, alpha=-0.5)
        model.zero_grad()
    side.weights(model)


@expect(refused="optimizer.step: the ranks differ", on=(2,), slow=True)
def optimizer_of_torch_distributed(side: Side) -> None:
    """ZeroRedundancyOptimizer around the slices, a habit of DDP."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = side.wrap(Encoder())
    optimizer = sgd(model, lr=0.1)
    if side.sharded and dist.is_initialized():
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    train(side, model, optimizer)


def optimizer_state_saved(side: Side) -> None:
    """torch.save and torch.load of an optimizer's state (SGD with momentum), into a new optimizer."""
    model = side.wrap(Encoder())
    optimizer = sgd(model, momentum=0.9)
    for step in range(4):
        train_step(side, model, optimizer, step)
        if step == 1:
            file = io.BytesIO()
            torch.save(optimizer.state_dict(), file)
            file.seek(0)
            optimizer = sgd(model, lr=0.1, momentum=0.5)
            optimizer.load_state_dict(torch.load(file, weights_only=False))
    side.weights(model)


# -- accumulation -------------------------------------------------------------------------------------------------


def accumulation(side: Side) -> None:
    """Three backwards of `loss / 3`, weights clipped before the step; zero_grad(set_to_none=False)."""
    model = side.wrap(Encoder())
    optimizer = sgd(model)
    for step in range(2):
        for part in range(3):
            side.loss(lambda rank: model(ids(step, rank, part)).square().mean() / 3).backward()
        side.see("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.05))
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    side.weights(model)


@expect(refused="no attribute 'no_sync'. A sharded model reduces gradients in every backward")
def accumulation_with_no_sync(side: Side) -> None:
    """`with model.no_sync():` for all but the last part, if the model has it, as code for DDP does."""
    model = side.wrap(Encoder())
    optimizer = sgd(model)
    for step in range(2):
        for part in range(3):
            context = model.no_sync() if part < 2 and side.sharded else contextlib.nullcontext()
            with context:
                side.loss(lambda rank: model(ids(step, rank, part)).square().mean() / 3).backward()
        optimizer.step()
        optimizer.zero_grad()
    side.weights(model)


def accumulation_of_tokens(side: Side) -> None:
    """Sums over tokens, divided by the number of tokens of all ranks and parts; other numbers on each rank."""
    model = side.wrap(decoder())
    optimizer = sgd(model)
    for step in range(2):
        rows = {
            (rank, part): ids(step, rank, part, length=4 + rank + 2 * part)
            for rank in range(side.size)
            for part in (0, 1)
        }
        total = sum(each[:, 1:].numel() for each in rows.values())
        for part in (0, 1):

            def loss(rank):
                each = rows[rank, part]
                logits = model(each).logits[:, :-1].flatten(0, 1)
                return F.cross_entropy(logits, each[:, 1:].flatten(), reduction="sum") * side.size / total

            side.loss(loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    side.weights(model)


def forwards_before_backwards(side: Side) -> None:
    """All parts' losses are summed before one backward."""
    model = side.wrap(decoder("gpt2"))
    train(
        side,
        model,
        steps=2,
        loss=lambda rank, step: sum(model(ids(step, rank, p), labels=ids(step, rank, p)).loss for p in range(3)) / 3,
    )


# -- ranks with other data ----------------------------------------------------------------------------------------


def lengths_of_each_rank(side: Side) -> None:
    """Rows and tokens differ between the ranks."""
    model = side.wrap(decoder())

    def loss(rank, step):
        rows = ids(step, rank, rows=2 + 2 * rank, length=3 + 4 * rank + step)
        return model(rows, labels=rows).loss

    train(side, model, loss=loss)


def empty_batch(side: Side) -> None:
    """The last rank has no rows in some steps: its model is called with none, and its loss is a sum of nothing."""
    model = side.wrap(Encoder())

    def loss(rank, step):
        rows = 0 if rank == side.size - 1 and step != 1 and side.size > 1 else 4
        return model(ids(step, rank)[:rows]).square().sum() / 4

    train(side, model, loss=loss)


def loss_of_zero(side: Side) -> None:
    """One rank's loss is multiplied by 0 (all labels ignored)."""
    model = side.wrap(Encoder())
    train(side, model, steps=2, loss=lambda rank, step: model(ids(step, rank)).square().mean() * (rank == 0))


@expect(refused="No progress for", on=(2,), slow=True)
def a_rank_without_a_loss(side: Side) -> None:
    """One rank has a loss that does not depend on the model: `torch.zeros((), requires_grad=True)`."""
    model = side.wrap(Encoder())

    def loss(rank):
        output = model(ids(0, rank)).square().mean()
        return output if rank == 0 else torch.zeros((), requires_grad=True)

    side.loss(loss).backward()
    side.gradients(model)


@expect(refused="issued different operations", on=(2,), slow=True)
def a_rank_that_skips(side: Side) -> None:
    """One rank skips the step of a bad batch: neither forward nor backward."""
    model = side.wrap(Encoder())
    for step in range(2):
        if side.sharded and side.rank and step == 0:
            continue
        if side.sharded:
            side.backward(model, step)
        else:
            side.loss(lambda rank: model(ids(step, rank)).square().mean() * (step == 1 or rank == 0)).backward()
    side.gradients(model)


# -- habits of DDP ------------------------------------------------------------------------------------------------


def gradients_averaged_by_hand(side: Side) -> None:
    """`dist.all_reduce(p.grad); p.grad /= world_size` for all parameters, as without DDP."""
    model = side.wrap(Encoder())
    optimizer = sgd(model)
    side.backward(model)
    if side.sharded and dist.is_initialized():
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= side.size
    optimizer.step()
    side.weights(model)


def gradients_of_equal_slices_averaged(side: Side) -> None:
    """The same of a weight whose slices have equal lengths on all ranks."""
    torch.manual_seed(0)
    model = side.wrap(nn.ModuleList([nn.Linear(32, 16, bias=False)]))
    side.loss(lambda rank: model[0](vectors(0, rank, width=32)).square().mean()).backward()
    if side.sharded and dist.is_initialized():
        dist.all_reduce(model[0].weight.grad)
        model[0].weight.grad /= side.size
    side.gradients(model)


def weights_broadcast_by_hand(side: Side) -> None:
    """`dist.broadcast(p.data, 0)` of all parameters at the start, as without DDP; slices of equal length."""
    torch.manual_seed(0)
    model = side.wrap(nn.ModuleList([nn.Linear(32, 16, bias=False)]))
    if side.sharded and dist.is_initialized():
        for p in model.parameters():
            dist.broadcast(p.data, 0)
    side.weights(model)


def loss_reduced_for_the_log(side: Side) -> None:
    """`dist.all_reduce(loss.detach())` and the mean, between backward and step."""
    model = side.wrap(Encoder())
    optimizer = sgd(model)
    for step in range(2):
        loss = side.loss(lambda rank: model(ids(step, rank)).square().mean())
        loss.backward()
        logged = loss.detach().clone()
        if side.sharded and dist.is_initialized():
            dist.all_reduce(logged)
            logged /= side.size
        side.see("logged", logged)
        optimizer.step()
        optimizer.zero_grad()


# -- precision ----------------------------------------------------------------------------------------------------


def autocast_by_the_user(side: Side) -> None:
    """`torch.autocast("cpu", torch.bfloat16)` around forward and loss."""
    model = side.wrap(Encoder())

    def loss(rank, step):
        with torch.autocast("cpu", torch.bfloat16):
            return model(ids(step, rank)).float().square().mean()

    train(side, model, loss=loss)
    side.see("after", model(ids(9, side.rank)))


def autocast_with_a_scaler(side: Side) -> None:
    """torch.amp.GradScaler with unscale_, clipping, step and update, on the CPU."""
    model = side.wrap(Encoder())
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    for step in range(3):
        loss = side.loss(lambda rank: model(ids(step, rank)).square().mean() * (math.inf if step == 1 else 1))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        side.see("scale", scaler.get_scale())
    side.weights(model)


def overflow_on_one_rank(side: Side) -> None:
    """The scaler, and an infinite loss on the last rank alone: every rank must skip."""
    model = side.wrap(Encoder())
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    for step in range(3):
        loss = side.loss(
            lambda rank: (
                model(ids(step, rank)).square().mean() * (math.inf if step == 1 and rank == side.size - 1 else 1)
            )
        )
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        side.see("scale", scaler.get_scale())
    side.weights(model)


def double_precision(side: Side) -> None:
    """model.double() before wrapping."""
    train(side, side.wrap(Encoder().double()))


def mixed_dtypes(side: Side) -> None:
    """Layers in bfloat16, norms and embedding in float32, with casts in the forward."""

    class Mixed(Layer):
        def forward(self, x):
            return x + torch.tanh(self.linear(self.norm(x).bfloat16())).float()

    model = Encoder(Mixed, layers=2)
    for layer in model.layers:
        layer.linear.bfloat16()
    model = side.wrap(model)
    side.backward(model)
    if side.size == 1:
        side.gradients(model)
    side.weights(model)


def complex_weights(side: Side) -> None:
    """Complex parameters (spectral layers)."""

    class Spectral(Layer):
        def __init__(self):
            super().__init__()
            self.filter = nn.Parameter(torch.ones(3, WIDTH, dtype=torch.cfloat) * (0.5 + 0.5j))

        def forward(self, x):
            return x + torch.fft.irfft(torch.fft.rfft(self.linear(x), dim=1) * self.filter, n=x.shape[1], dim=1)

    model = side.wrap(Encoder(Spectral, layers=2))
    train(side, model, steps=2)
    side.see("after", model(ids(9, side.rank)))


# -- evaluation in between ----------------------------------------------------------------------------------------


def evaluation_in_between(side: Side) -> None:
    """Between forward and backward, and between steps: forwards under inference_mode and no_grad, and generate."""
    model = side.wrap(decoder())
    optimizer = sgd(model, lr=0.1)
    for step in range(3):
        loss = side.loss(lambda rank: model(ids(step, rank), labels=ids(step, rank)).loss)
        with torch.no_grad():
            side.see("evaluated", model(ids(8, side.rank)).logits)
        loss.backward()
        model.eval()
        with torch.inference_mode():
            side.see("inferred", model(ids(9, side.rank)).logits.clone())
        made = model.generate(ids(7, side.rank, length=3), max_new_tokens=3, do_sample=False, pad_token_id=0)
        side.see("made", made)
        model.train()
        optimizer.step()
        optimizer.zero_grad()
    side.weights(model)


def parts_saved_and_loaded(side: Side) -> None:
    """`model.head.state_dict()` and `model.head.load_state_dict(...)` of submodules, in mid-training."""
    model = side.wrap(Encoder())
    head = {name: 2 * value for name, value in model.head.state_dict().items()}
    layers = {name: value + 1 for name, value in model.layers.state_dict().items()}
    model.head.load_state_dict(head)
    model.layers.load_state_dict(layers)
    model.load_state_dict({"embedding.weight": torch.ones(VOCABULARY, WIDTH)}, strict=False)
    side.see("output", model(ids(0, side.rank)))
    side.weights(model)


@expect(wrong="the state dict holds copies, so that writes to it are lost")
def own_parameter_copied_by_name(side: Side) -> None:
    """`own = model.state_dict(); own[name].copy_(value)`: writes through the dict's tensors, as old loaders do."""
    model = side.wrap(Encoder())
    own = model.state_dict()
    with torch.no_grad():
        for _name, value in own.items():
            value.copy_(0.5 * value)
    side.weights(model)
