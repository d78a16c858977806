"""Parameters outside blocks: whole only while their values are needed, and right whenever they are asked for."""

import pytest
import torch
from torch import nn

import hf_bmtrain as bmt
from cases import by_default
from twins import WIDTH, Layer, check_gradients, check_twins, ids

VOCABULARY = (1 << 20) // WIDTH + 1  # an embedding large enough for a buffer of its own


class Language(nn.Module):
    """Embedding, layers, norm, head; `words` reads the head's weight as a user's own code may."""

    def __init__(self, tied: bool, words=None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Layer() for _ in range(3)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.words = words
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        y = self.head(x) if self.words is None else self.words(self, x)
        return y[..., :7].square().mean()


def loss(model, step, rank):
    return model(ids(step, rank))


def whole(piece) -> bool:
    return piece.buffer.is_unsharded


class Trace:
    """Which of the embedding and the head are whole when a layer's forward, and its backward, run."""

    def __init__(self, model) -> None:
        self.forward, self.backward = [], []
        self.slices = model.embedding.weight, model.head.weight  # inside a forward these names are whole
        for layer in model.layers:
            layer.linear.register_forward_hook(lambda *_: self.note())
            layer.linear.register_full_backward_hook(lambda *_: self.backward.append(self.state()))

    def state(self):
        return tuple(whole(piece) for piece in self.slices)

    def note(self):
        if torch._C._current_graph_task_id() == -1:
            self.forward.append(self.state())


def untied_are_whole_while_needed():
    model = bmt.auto_wrap(Language(tied=False))
    buffers = {p.buffer for p in (model.embedding.weight, model.norm.weight, model.head.weight)}
    assert len(buffers) == 3 and model.norm.weight.buffer is model.norm.bias.buffer
    trace = Trace(model)
    output = model(ids(0, bmt.rank()))
    assert not whole(model.embedding.weight) and whole(model.head.weight)
    output.backward()
    assert trace.forward == trace.backward == [(False, False)] * 3


def tied_is_whole_until_the_head_is_done():
    model = bmt.auto_wrap(Language(tied=True))
    model(ids(0, bmt.rank())).backward()  # the first step learns who reads the weight
    trace = Trace(model)
    output = model(ids(1, bmt.rank()))
    assert whole(model.head.weight)
    output.backward()
    assert trace.forward == [(True, True)] * 3
    assert trace.backward == [(False, False)] * 3


def in_the_parent(model, x):
    return nn.functional.linear(x, model.head.weight)


def detached_in_the_parent(model, x):
    weight = model.head.weight
    inner = nn.functional.linear(x, weight.detach())[..., :WIDTH]
    return nn.functional.linear(x.tanh() + inner, weight)


def read_in_the_parent_stays_whole():
    """Nobody sees what the model's own forward saves of the weight: whole until the end."""
    model = bmt.auto_wrap(Language(tied=True, words=in_the_parent))
    trace = Trace(model)
    model(ids(1, bmt.rank())).backward()
    assert trace.backward == [(True, True)] * 3
    assert not whole(model.head.weight)


class Detached(nn.Linear):
    """Saves the weight on a path that does not lead to its gradient."""

    def forward(self, x):
        return nn.functional.linear(x.tanh() + nn.functional.linear(x, self.weight.detach())[..., :WIDTH], self.weight)


def with_detached_head(tied):
    model = Language(tied)
    head = Detached(WIDTH, VOCABULARY, bias=False)
    head.weight = model.head.weight
    model.head = head
    return model


def frozen_head(tied):
    model = Language(tied)
    model.head.weight.requires_grad_(False)
    return model


def equal_to_plain_torch(make, tied):
    check_twins(lambda: make(tied), loss)


def accumulated_and_interleaved(make, tied):
    """Two forwards before the first backward, then a backward through both at once; others between free the weights."""
    model, twin = bmt.auto_wrap(make(tied)), make(tied)
    size, rank = bmt.world_size(), bmt.rank()
    for together in (False, True):
        losses = [loss(model, step, rank) for step in (0, 1)]
        model(ids(5, rank)).item()
        with torch.no_grad():
            model(ids(6, rank))
        for backward in [sum(losses)] if together else losses:
            backward.backward()
        (sum(loss(twin, step, other) for step in (0, 1) for other in range(size)) / size).backward()
    check_gradients(model, twin)


def both_in_the_parent(model, x):
    """The gradients of both views are views of the same tensor."""
    weight, bias = (each.view(1, -1) for each in (model.norm.weight, model.norm.bias))
    return model.head(x) + (weight + bias).square().sum()


def penalty_inside(tied):
    return Language(tied, both_in_the_parent)


def penalty_outside(model, step, rank):
    """Autograd passes one tensor to both readers of the sum, and an expanded one to that of the last term."""
    weight, bias = model.norm.weight, model.norm.bias
    return loss(model, step, rank) + (weight + bias).square().sum() + bias.sum()


def readers_share_a_gradient():
    check_twins(lambda: penalty_inside(tied=False), penalty_outside, steps=2)


def backward_twice():
    model, twin = bmt.auto_wrap(Language(True)), Language(True)
    size, rank = bmt.world_size(), bmt.rank()
    output = loss(model, 0, rank)
    expected = torch.stack([loss(twin, 0, other) for other in range(size)]).mean()
    for either in (output, expected):
        either.backward(retain_graph=True)
        either.backward()
    check_gradients(model, twin)


class InPlace(nn.Linear):
    def forward(self, x):
        y = super().forward(x).exp()
        y.mul_(2)  # exp needs its result
        return y


def saved_activation_modified():
    model = Language(False)
    model.head = InPlace(WIDTH, 3)
    output = bmt.auto_wrap(model)(ids(0, bmt.rank()))
    with pytest.raises(RuntimeError, match="modified"):
        output.backward()


def read_in_the_parent(tied):
    return Language(tied, detached_in_the_parent)


class Queries(nn.Module):
    """Returns, beside its loss, the first hidden state: rows of a parameter, as detectors return their queries."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.queries = nn.Embedding(5, WIDTH)
        self.layers = nn.ModuleList([Layer() for _ in range(2)])

    def forward(self, rows: int) -> dict:
        first = x = self.queries.weight[:3].expand(rows, -1, -1)
        for layer in self.layers:
            x = layer(x)
        return {"loss": x.square().mean(), "states": [first, self.queries.weight[3:]]}


def returned_views_of_parameters():
    """They keep their values when the parameter is released: after an evaluation, and after a backward."""
    model, twin = bmt.auto_wrap(Queries()), Queries()
    for training in (False, True):
        with torch.set_grad_enabled(training):
            output, expected = model(2), twin(2)
        if training:
            for either in (output, expected):
                (either["loss"] + either["states"][0].sum()).backward()
        assert not model.queries.weight.buffer.is_unsharded
        for got, wanted in zip(output["states"], expected["states"]):
            torch.testing.assert_close(got, wanted)
    check_gradients(model, twin)


class Probing(nn.Linear):
    """Runs a backward between two uses of its weight."""

    def forward(self, x):
        weight = self.weight
        inner = nn.functional.linear(x.detach().requires_grad_(), weight)
        (0 * inner).sum().backward()
        return nn.functional.linear(x, weight, self.bias)


class Saliency(nn.Module):
    """Its forward computes a gradient, after and before it reads its own parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gain = nn.Parameter(torch.rand(WIDTH))
        self.embedding = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList([Layer() for _ in range(2)])
        self.head = Probing(WIDTH, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        gain = self.gain
        first = self.embedding(ids) * gain
        x = y = first.detach().requires_grad_()
        for layer in self.layers:
            y = layer(y)
        (slope,) = torch.autograd.grad(self.head(y).square().sum(), x)
        return self.head(self.layers[0](first + slope) * gain).square().mean()


def gradient_inside_forward():
    check_twins(Saliency, loss, steps=2)
    model = bmt.auto_wrap(Saliency())
    with torch.no_grad(), torch.enable_grad():
        model(ids(0, bmt.rank()))
    model(ids(0, bmt.rank())).backward()
    assert not model.gain.buffer.is_unsharded


def failed_backward_inside_forward():
    """The forward goes on with the views of parameters that it has."""

    class Failing(Saliency):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.embedding(ids)
            gain = self.gain
            scaled = x * gain
            scaled.register_hook(fail)
            with pytest.raises(ArithmeticError):
                torch.autograd.grad(self.head(scaled).square().sum(), x)
            y = self.layers[0](self.embedding(ids))
            return self.head(y * gain).square().mean()

    def fail(gradient: torch.Tensor) -> None:
        raise ArithmeticError

    check_twins(Failing, loss, steps=2)


class Keeping(Language):
    """Reads a parameter of its own, and keeps a regularizer that depends on it in an attribute."""

    def __init__(self) -> None:
        super().__init__(tied=False)
        self.gain = nn.Parameter(torch.rand(WIDTH))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids) * self.gain
        self.kept = x.square().mean()
        x = self.norm(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)[..., :7].square().mean()


def kept_in_attribute(model, step, rank, keep=lambda model: model.kept):
    """Of two forwards. The evaluation behind them frees the weights."""
    regularizers = []
    for number in range(2):
        model(ids(step + number, rank))
        regularizers.append(keep(model))
    with torch.no_grad():
        model(ids(5, rank))
    return sum(regularizers)


def kept_by_hook(name):
    def loss(model, step, rank):
        kept = []
        handle = model.get_submodule(name).register_forward_hook(lambda *args: kept.append(args[-1]))
        try:
            return kept_in_attribute(model, step, rank, lambda model: kept.pop().tanh().mean())
        finally:
            handle.remove()

    return loss


def backward_from_inside(name):
    """From activations that the model does not return, of blocks and outside them."""
    check_twins(Keeping, kept_in_attribute if name is None else kept_by_hook(name), steps=2)


def weights_changed_before_backward_from_inside():
    model = bmt.auto_wrap(Keeping())
    model(ids(0, bmt.rank()))
    with torch.no_grad():
        model.gain.mul_(2)
    with pytest.raises(RuntimeError, match="changed between the forward and its backward"):
        model.kept.backward()


MAKERS = [Language, with_detached_head, frozen_head, read_in_the_parent]
CASES = [(equal_to_plain_torch, make, tied) for make in MAKERS for tied in (False, True)]
CASES += [(accumulated_and_interleaved, make, tied) for make in MAKERS[::3] for tied in (False, True)]
CASES += [(readers_share_a_gradient,), (backward_twice,), (saved_activation_modified,), (returned_views_of_parameters,)]
CASES += [(gradient_inside_forward,), (failed_backward_inside_forward,)]
CASES += [(backward_from_inside, name) for name in (None, "layers.2", "norm")]
CASES += [(weights_changed_before_backward_from_inside,)]
CASES += [(untied_are_whole_while_needed,), (tied_is_whole_until_the_head_is_done,), (read_in_the_parent_stays_whole,)]

each_case = pytest.mark.parametrize(
    "case",
    by_default(
        CASES,
        (equal_to_plain_torch, Language, True),
        (readers_share_a_gradient,),
        (read_in_the_parent_stays_whole,),
        (gradient_inside_forward,),
        (backward_from_inside, None),
    ),
    ids=lambda case: "-".join(str(getattr(c, "__name__", c)) for c in case),
)


@each_case
def test_reads(world, case):
    world(2)(*case)


@each_case
def test_reads_by_copies(peers, case):
    peers(2)(*case)
