"""Root parameters that a forward reads after its last block: gathered beside it, and reduced beside the backward."""

import copy
from unittest import mock

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import hf_bmtrain as bmt
import tiny_models
from hf_bmtrain.engine.sharding.buffer import ShardedBuffer
from hf_bmtrain.engine.sharding.gradient import GradientBuffer
from hf_bmtrain.engine.wrap import root_params
from ranks import on_ranks

WIDTH, BLOCKS = 6, 3


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.linear(x).tanh()


class Model(torch.nn.Module):
    """kind, of a forward: how it uses the head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(11, WIDTH)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(BLOCKS))
        self.norm, self.head = torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, 11)

    def forward(self, tokens, kind="once"):
        x = early = self.embed(tokens)
        if kind == "before":
            x = x + self.head(x).mean()
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        if kind == "unused":
            return x
        if kind == "reentrant":
            return checkpoint(self.head, x, use_reentrant=True)
        return self.head(x) + (self.head(early) if kind == "twice" else 0)


def wrapped(model):
    """The model, in which the embedding and the head have flat buffers of their own, as in large models."""
    with mock.patch.object(root_params, "OWN_BUFFER_NUMEL", 11 * WIDTH):
        return bmt.auto_wrap(model)


def tokens(step, rank):
    return torch.randint(11, (2, 4), generator=torch.Generator().manual_seed(10 * step + rank))


def objective(model, given, kind):
    """Return the loss of one step, in ways that torch allows."""
    weight = model.head.weight
    if kind == "penalty first":
        penalty = (weight.gather() if isinstance(weight, bmt.DistributedParameter) else weight).square().sum()
        return model(given).square().mean() + penalty
    if kind == "penalty last":
        loss = model(given).square().mean()
        return loss + (weight.gather() if isinstance(weight, bmt.DistributedParameter) else weight).square().sum()
    if kind == "two forwards":
        return model(given).square().mean() + model(given.flip(0)).cos().mean()
    if kind == "forward without backward":
        model(given).sum()
    return model(given, kind).square().mean()


KINDS = {  # whether the head's gradient is sent before that of the last block; None if either is possible
    "once": True, "twice": True, "penalty last": False, "penalty first": False, "two forwards": False,
    "forward without backward": None, "before": False, "reentrant": None, "unused": None,
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(1, 2, full=(3,))
def test_gradients(kind):
    """Two steps equal those of plain torch; the second one knows what the first did, and adds to its gradients."""
    world, plain = bmt.current_world(), Model().double()
    model, sent = wrapped(copy.deepcopy(plain)), []
    send = GradientBuffer.send

    def noting(gradient):
        sent.append(gradient)
        send(gradient)

    with mock.patch.object(GradientBuffer, "send", noting):
        for step in range(2):
            del sent[:]
            objective(model, tokens(step, world.rank), kind).backward()
            if KINDS[kind] is not None:
                assert len(sent) == len(set(sent)), "sent twice"
                head, block = (part.weight.buffer.gradient for part in (model.head, model.layers[-1].linear))
                assert (sent.index(head) < sent.index(block)) == KINDS[kind]
            for rank in range(world.size):
                (objective(plain, tokens(step, rank), kind) / world.size).backward()
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters()):
        found = ours.gather_gradient()
        if theirs.grad is None:
            assert found is None, name
        else:
            torch.testing.assert_close(found, theirs.grad, msg=lambda text, name=name: f"{name}: {text}")


@on_ranks(2)
def test_they_are_gathered_beside_the_last_block():
    model, events = wrapped(Model()), []
    head = model.head.weight.buffer
    for layer in model.layers:
        layer.register_forward_hook(lambda *_: events.append("block"))
    gather = ShardedBuffer.gather

    def noting(buffer):
        if buffer is head and not buffer.is_unsharded:
            events.append("head")
        gather(buffer)

    with mock.patch.object(ShardedBuffer, "gather", noting):
        for kind, expected in (("once", BLOCKS), ("once", BLOCKS - 1), ("unused", BLOCKS - 1), ("once", BLOCKS)):
            del events[:]
            loss = model(tokens(0, 0), kind).square().mean()
            assert events.index("head") == expected, "how many blocks had ended"
            assert events.count("head") == 1, "gathered again"
            assert head.is_unsharded == (kind == "once"), "what no forward has read stays unsharded"
            loss.backward()
            assert not head.is_unsharded


def fused(model, given, states):
    """Return a loss of the head that computes its gradient itself."""
    weight = model.head._parameters["weight"]
    targets, states = given.flatten(), states.flatten(0, 1)
    if isinstance(weight, bmt.DistributedParameter):
        return bmt.loss.linear_cross_entropy(states, weight, targets)
    return torch.nn.functional.cross_entropy(states @ weight.t(), targets)


@pytest.mark.parametrize("tied", [False, True])
@on_ranks(2)
def test_the_head_of_a_fused_causal_loss(tied):
    """It is gathered beside the last block, freed in the forward, and reduced early unless it is the embedding too."""
    torch.manual_seed(0)
    plain = tiny_models.build("llama", tied=tied)
    model, events = copy.deepcopy(plain), []
    with mock.patch.object(root_params, "OWN_BUFFER_NUMEL", 1):
        bmt.auto_wrap(model)
    assert bmt.hf.fuse_causal_loss(model)
    head, last = model.lm_head._parameters["weight"].buffer, model.model.layers[-1]
    block = next(parameter.buffer for parameter in last.parameters())
    last.register_forward_hook(lambda *_: events.append("block"))
    gather, send = ShardedBuffer.gather, GradientBuffer.send

    def noting(buffer):
        if buffer is head and not buffer.is_unsharded:
            events.append("gather")
        gather(buffer)

    def noting_send(gradient):
        if gradient in (head.gradient, block.gradient):
            events.append("send head" if gradient is head.gradient else "send block")
        send(gradient)

    with mock.patch.object(ShardedBuffer, "gather", noting), mock.patch.object(GradientBuffer, "send", noting_send):
        for step in range(2):
            del events[:]
            loss = model(**tiny_models.batch("llama", 2 * step + bmt.rank())).loss
            assert head.is_unsharded == tied
            loss.backward()
            assert not head.is_unsharded
            for rank in range(2):
                (plain(**tiny_models.batch("llama", 2 * step + rank)).loss / 2).backward()
    assert events == (
        ["gather", "block", "send block", "send head"] if tied else ["gather", "block", "send head", "send block"]
    )
    for ours, theirs in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(ours.gather_gradient(), theirs.grad)


@on_ranks(1, 2)
def test_a_fused_loss_before_the_forward():
    """Its gradient comes after the other one of the head, and both are averaged at once."""
    world, plain = bmt.current_world(), Model()
    model, calls = wrapped(copy.deepcopy(plain)), []
    model.head.weight.register_post_accumulate_grad_hook(lambda parameter: calls.append(parameter.grad.norm()))
    states = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(1))
    for step in range(2):
        del calls[:]
        for each, ranks in ((model, [world.rank]), (plain, range(world.size))):
            for rank in ranks:
                first = fused(each, tokens(step, rank), states)
                ((first + objective(each, tokens(step, rank), "once")) / len(ranks)).backward()
        assert len(calls) == 1
    torch.testing.assert_close(model.head.weight.gather_gradient(), plain.head.weight.grad)


@on_ranks(1, 2)
def test_gradients_of_a_penalty_that_waits():
    """Its gradient comes in the second of two backwards, after the other ones of the head."""
    world, plain, calls = bmt.current_world(), Model().double(), []
    model = wrapped(copy.deepcopy(plain))
    model.head.weight.register_post_accumulate_grad_hook(lambda parameter: calls.append(parameter.grad.norm()))
    for each, ranks in ((model, [world.rank]), (plain, range(world.size))):
        for rank in ranks:
            weight = each.head.weight
            penalty = (weight.gather() if isinstance(weight, bmt.DistributedParameter) else weight).square().sum()
            (objective(each, tokens(0, rank), "once") / len(ranks)).backward()
            ((objective(each, tokens(1, rank), "once") + penalty) / len(ranks)).backward()
    assert len(calls) == 2
    torch.testing.assert_close(model.head.weight.gather_gradient(), plain.head.weight.grad)


@on_ranks(1, 2)
def test_gradients_of_a_retained_graph():
    """They come after those of the new one, when the head's reduction has begun."""
    world, plain = bmt.current_world(), Model().double()
    model = wrapped(copy.deepcopy(plain))
    for each, ranks in ((model, [world.rank]), (plain, range(world.size))):
        for rank in ranks:
            size = len(ranks)
            first = objective(each, tokens(0, rank), "once") / size
            first.backward(retain_graph=True)
            (first + objective(each, tokens(1, rank), "once") / size).backward()
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters()):
        torch.testing.assert_close(ours.gather_gradient(), theirs.grad, msg=lambda text, name=name: f"{name}: {text}")


@on_ranks(2)
def test_a_late_gradient_is_added():
    model, plain = wrapped(Model()), wrapped(Model())

    def give_gradient(_):
        model.head._parameters["weight"].on_demand.collect(0, torch.ones(11, WIDTH))

    model.embed.register_forward_hook(lambda _, inputs, output: output.register_hook(give_gradient) and None)
    for each in (model, plain):
        for step in range(2):
            objective(each, tokens(step, 0), "once").backward()
    ours, theirs = (each.head.weight.gather_gradient() for each in (model, plain))
    torch.testing.assert_close(ours, theirs + 2)
