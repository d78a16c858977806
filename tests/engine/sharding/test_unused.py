"""Parameters that a step does not use: left as they are if no rank used them, as in plain torch."""

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from torch import nn

import hf_bmtrain as bmt
from cases import by_default, full
from hf_bmtrain.engine.wrap import root_params as outside
from twins import WIDTH, compare_backward, ids


class Switched(nn.Module):
    """A layer whose middle parameter is used on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor, middle: bool) -> torch.Tensor:
        y = self.first(x)
        return x + torch.tanh(self.last(self.middle(y) if middle else y))


class Heads(nn.Module):
    """Layers and five heads. The outputs of all heads are computed, and those in `used` are in the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList([Switched() for _ in range(3)])
        self.heads = nn.ModuleDict({name: nn.Linear(WIDTH, 3) for name in "abcde"})

    def forward(self, ids: torch.Tensor, used: str, middle: bool, depth: int) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers[:depth]:
            x = layer(x, middle)
        outputs = {name: head(x).square().mean() for name, head in self.heads.items()}
        return torch.stack([outputs[name] for name in used]).sum()


USES = [("a", True, 3), ("ace", True, 3), ("b", False, 2), ("bd", False, 3), ("abcde", True, 3), ("e", True, 1)]
"""(heads, whether the middle of layers is used, depth): what all ranks use in a step."""
OWN = {0: "", 1: "c", 2: "e"}
"""The head that a rank uses in the odd steps besides."""


def loss(model, step: int, rank: int) -> torch.Tensor:
    used, middle, depth = USES[step % len(USES)]
    if step % 2:
        used, middle = used + OWN[rank], middle and rank != 1
    return model(ids(step, rank), used, middle, depth)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.3)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.3)


def ours(parameters):
    return bmt.optim.AdamOptimizer(parameters, lr=0.05, weight_decay=0.3)


def offloaded(parameters):
    return bmt.optim.AdamOffloadOptimizer(parameters, lr=0.05, weight_decay=0.3)


def trained_as_in_plain_torch(make, plain, use_checkpoint, own_buffers):
    """Steps of one or two backwards, with weight decay and momentum, which move what has a gradient of zero."""
    with mock.patch.object(outside, "OWN_BUFFER_NUMEL", 8) if own_buffers else nullcontext():
        model = bmt.auto_wrap(Heads(), use_checkpoint=use_checkpoint)
    twin = Heads()
    optimizer, expected = make(model.parameters()), plain(twin.parameters())
    for step in range(8):
        for micro in range(step, step + 1 + step % 3):
            compare_backward(model, twin, loss, micro)
        for either in (optimizer, expected):
            either.step()
            either.zero_grad()
        full_params = dict(twin.named_parameters())
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.gather(), full_params[name].detach(), rtol=1e-5, atol=2e-6)


def hooks_are_called_alike():
    model = bmt.auto_wrap(Heads())
    called, names = [], {}
    for name, parameter in model.named_parameters():
        names[id(parameter)] = name
        parameter.register_post_accumulate_grad_hook(lambda p: called.append((names[id(p)], p.gather_gradient())))
    loss(model, 1, bmt.rank()).backward()
    called, everyone = [name for name, _ in called], bmt.current_world().gather_objects([name for name, _ in called])
    assert all(each == called for each in everyone)
    used = {name for name, p in model.named_parameters() if p.grad is not None}
    assert set(called) == used and len(called) == len(used)
    assert not any("heads.b" in name or "heads.d" in name for name in called)


def updated_in_the_backward():
    models = [bmt.auto_wrap(Heads()) for _ in range(2)]
    early, late = (offloaded(model.parameters()) for model in models)
    for step in range(8):
        with early.update_in_backward():
            loss(models[0], step, bmt.rank()).backward()
        loss(models[1], step, bmt.rank()).backward()
        for each in (early, late):
            each.step()
            each.zero_grad()
        for a, b in zip(*(model.parameters() for model in models)):
            assert torch.equal(a.gather(), b.gather())


def nothing_is_posted_if_all_is_used():
    model = bmt.auto_wrap(Heads())
    control = bmt.current_world().control
    with mock.patch.object(type(control), "post") as post, mock.patch.object(type(control), "read_posts") as read:
        loss(model, 4, bmt.rank()).backward()
    assert not post.called and not read.called


def gradients_of_inputs_alone():
    model = bmt.auto_wrap(Heads())
    x = torch.randn(2, WIDTH, requires_grad=True)
    layer = model.layers[0]
    torch.autograd.grad(layer(x, True).sum(), x)
    assert all(p.grad is None for p in model.parameters())
    layer(x, True).sum().backward()
    assert all(p.grad is not None for p in layer.parameters())


def after_a_failed_backward():
    model, twin = bmt.auto_wrap(Heads()), Heads()
    output = loss(model, 1, bmt.rank())
    failing = output.sum()
    failing.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        (output + failing).backward()
    for step in (2, 3):
        compare_backward(model, twin, loss, step)


TRAINED = [
    (trained_as_in_plain_torch, make, plain, use_checkpoint, own_buffers)
    for make, plain in [(adamw, adamw), (sgd, sgd), (ours, adamw), (offloaded, adamw)]
    for use_checkpoint, own_buffers in [(True, False), (False, True)]
]
CASES = [
    *TRAINED, (hooks_are_called_alike,), (updated_in_the_backward,), (nothing_is_posted_if_all_is_used,),
    (gradients_of_inputs_alone,), (after_a_failed_backward,),
]  # fmt: skip
each_case = pytest.mark.parametrize(
    "case",
    by_default(
        CASES,
        (trained_as_in_plain_torch, ours, adamw, False, True),
        (hooks_are_called_alike,),
        (after_a_failed_backward,),
    ),
    ids=lambda case: "-".join(str(getattr(c, "__name__", c)) for c in case),
)


@each_case
def test_unused(world, case):
    world(3)(*case)


@full
@each_case
def test_unused_by_copies(peers, case):
    peers(2)(*case)
