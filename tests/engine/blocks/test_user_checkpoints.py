"""Blocks inside checkpoints of the user's: alone, one in another, and beside a plain call of the same blocks."""

import copy
import functools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import hf_bmtrain as bmt
from hf_bmtrain.engine.base.torch_internals import inside_hooks, top_saved_tensors_hooks
from hf_bmtrain.engine.blocks.recompute import Recompute
from ranks import on_ranks

WIDTH = 8


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(WIDTH, 16), torch.nn.Linear(16, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Twice(torch.nn.Module):
    """The same blocks see two inputs. nested: `use_reentrant` of the checkpoints around one, the outer one first.

    beside: what becomes of the other one, which no checkpoint is around.
    """

    def __init__(self, nested, beside):
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.head = torch.nn.ModuleList(Block() for _ in range(2)), torch.nn.Linear(WIDTH, 1)
        self.nested, self.beside = nested, beside

    def encode(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, x):
        run = self.encode
        for reentrant in reversed(self.nested):
            run = functools.partial(checkpoint, run, use_reentrant=reentrant)
        first = self.encode(x.cos()) if self.beside.startswith("before") else 0
        y = run(x.sin())
        last = self.encode(x.cos()) if self.beside == "after" else 0
        return self.head(y - (first.detach() if self.beside == "before, detached" else first) - last).square().mean()


class InHooks(Recompute):
    """As "auto" answers while memory suffices: only what saved-tensor hooks see is recomputed."""

    def recomputes(self, args, kwargs, pending):
        return inside_hooks()


@pytest.mark.parametrize("use_checkpoint", [True, False, "in hooks"])
@pytest.mark.parametrize("beside", ["nothing", "before", "before, detached", "after"])
@pytest.mark.parametrize("nested", [(True,), (False,), (True, False), (False, True), (True, True)])
@on_ranks(1, 2)
def test_gradients(nested, beside, use_checkpoint):
    """Two steps equal those of plain torch. In a reentrant checkpoint, the second forward has its own backward."""
    plain = Twice(nested, beside).double()
    model = bmt.auto_wrap(copy.deepcopy(plain), use_checkpoint=use_checkpoint is True)
    if use_checkpoint == "in hooks":
        for layer in model.layers:
            layer._bmt.recompute = InHooks()
    size, rank = bmt.world_size(), bmt.rank()
    for step in range(2):
        x = torch.randn(4 * size, WIDTH, generator=torch.Generator().manual_seed(step)).double().requires_grad_()
        model(x[4 * rank :][:4]).backward()
        plain(x).backward()
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters()):
        torch.testing.assert_close(ours.gather_gradient(), theirs.grad, msg=lambda text, name=name: f"{name}: {text}")


class Runs(torch.autograd.Function):
    """Calls a function in its backward."""

    @staticmethod
    def forward(ctx, x, function):
        ctx.function = function
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            ctx.function()
        return gradient, None


@pytest.mark.skipif(top_saved_tensors_hooks is None, reason="torch 2.6 does not tell whether it is a recomputation")
@pytest.mark.parametrize("use_checkpoint", [True, False])
@on_ranks(1, 2)
def test_a_forward_in_another_backward_after_one_without_a_backward(use_checkpoint):
    """It is no recomputation of the forward whose backward never came."""
    plain = Twice((), "nothing").double()
    model = bmt.auto_wrap(copy.deepcopy(plain), use_checkpoint=use_checkpoint)
    x = torch.linspace(-1, 1, 4 * WIDTH).double().view(4, WIDTH)
    for each in (model, plain):
        kept = each(x)
        Runs.apply(torch.ones(1, requires_grad=True), lambda each=each: each(x.cos()).backward()).sum().backward()
        assert kept.requires_grad
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters()):
        torch.testing.assert_close(ours.gather_gradient(), theirs.grad, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("plain_first", [True, False])
@on_ranks(1, 2)
def test_a_model_in_a_reentrant_checkpoint_beside_a_plain_call(plain_first):
    """The backward of one runs the forward of the other, in both orders."""
    plain = Twice((), "nothing").double()
    model = bmt.auto_wrap(copy.deepcopy(plain))
    for each in (model, plain):
        x = torch.linspace(-1, 1, 4 * WIDTH).double().view(4, WIDTH).requires_grad_()
        calls = [lambda x, each=each: each(x), lambda x, each=each: checkpoint(each, x + 1, use_reentrant=True)]
        sum(call(x) for call in (calls if plain_first else reversed(calls))).backward()
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters()):
        torch.testing.assert_close(ours.gather_gradient(), theirs.grad, msg=lambda text, name=name: f"{name}: {text}")
