"""A toy tower of blocks, and training it sharded beside a plain twin."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import nn

import hf_bmtrain as bmt

WIDTH = 6


class Layer(nn.Module):
    """A residual layer with a one-element bias, of which most ranks own nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor, shift: torch.Tensor | None = None) -> torch.Tensor:
        y = torch.tanh(self.linear(x)) * self.gain
        return x + y if shift is None else x + y + shift


class Tower(nn.Module):
    """Embedding, layers, head; `plan` is the order in which a forward calls the layers."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList([Layer() for _ in range(layers)])
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, ids: torch.Tensor, plan: list[int] | None = None) -> torch.Tensor:
        x = self.embedding(ids)
        for index in range(len(self.layers)) if plan is None else plan:
            x = self.layers[index](x)
        return self.head(x).square().mean()


def tower_of(layer: Callable[[], nn.Module]) -> Tower:
    """A tower in training mode whose layers `layer` makes, each from a seed of its own."""
    model = Tower()
    for index in range(len(model.layers)):
        torch.manual_seed(index)
        model.layers[index] = layer()
    return model.train()


def ids(step: int, rank: int) -> torch.Tensor:
    return torch.randint(11, (4, 3), generator=torch.Generator().manual_seed(10 * step + rank))


Loss = Callable[[nn.Module, int, int], torch.Tensor]
"""(model, step, rank) → the loss of that rank's rows."""


def tower_loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    return model(ids(step, rank))


def check_twins(
    make: Callable[[], nn.Module],
    loss: Loss,
    steps: int = 3,
    prepare: Callable[[nn.Module, int], None] | None = None,
    blocks: Callable[[nn.Module], list[nn.Module]] | None = None,
    **wrap,
) -> nn.Module:
    """Train `make()` sharded and plain with SGD; assert equal losses and gradients at each step. Collective.

    prepare: changes both models before a step (freezing, say). blocks: names the blocks of a model; None leaves that
    to auto_wrap. Returns the sharded model.
    """
    model, twin = make(), make()
    bmt.auto_wrap(model, blocks=None if blocks is None else blocks(model), **wrap)
    optimizer, plain = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin))
    for step in range(steps):
        if prepare is not None:
            prepare(model, step)
            prepare(twin, step)
        compare_backward(model, twin, loss, step)
        for either in (optimizer, plain):
            either.step()
            either.zero_grad()
    return model


def compare_backward(model: nn.Module, twin: nn.Module, loss: Loss, step: int, rtol: float = 1e-6) -> None:
    """Backward of `model` on this rank's rows and of `twin` on all; losses and gradients are equal. Collective."""
    mine = loss(model, step, bmt.rank())
    mine.backward()
    expected = torch.stack([loss(twin, step, other) for other in range(bmt.world_size())])
    expected.mean().backward()
    torch.testing.assert_close(mine, expected[bmt.rank()], rtol=rtol, atol=0)
    check_gradients(model, twin)


def losses(model: nn.Module, twin: nn.Module, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of this rank by `model`, and their mean over the ranks by `twin`."""
    mine = model(ids(step, bmt.rank()))
    return mine, torch.stack([twin(ids(step, other)) for other in range(bmt.world_size())]).mean()


def check_gradients(model: nn.Module, twin: nn.Module) -> None:
    """Gathered gradients equal the twin's, None where the twin's is."""
    twins = dict(twin.named_parameters())
    largest = max(p.grad.abs().max().item() for p in twins.values() if p.grad is not None and p.numel())
    for name, parameter in model.named_parameters():
        gathered, expected = parameter.gather_gradient(), twins[name].grad
        if expected is None:
            assert gathered is None, name
        else:
            assert gathered is not None, name
            label = functools.partial("{}: {}".format, name)
            torch.testing.assert_close(gathered, expected, rtol=5e-6, atol=2e-6 * largest, msg=label)
