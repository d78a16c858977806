"""Modules that return views of their own parameters: the caller reads the right values for as long as it needs them."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.utils import ModelOutput

import hf_bmtrain as bmt
from cases import by_default, full, in_slow
from twins import WIDTH, Layer, check_gradients, check_twins, compare_backward, ids

ROWS = 3


@dataclass
class Output(ModelOutput):
    state: torch.Tensor | None = None


class Attributes:
    """Not known to pytree."""

    def __init__(self, state: torch.Tensor) -> None:
        self.states = [state]


class Strange:
    """Nobody can look inside: what it holds is only found by calling it."""

    __slots__ = ("_read",)

    def __init__(self, state: torch.Tensor) -> None:
        self._read = lambda: state

    def read(self) -> torch.Tensor:
        return self._read()


class Named(namedtuple("Named", "state")):  # unlike a plain named tuple, it has a `__dict__`
    pass


FORMS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "rows": (lambda w: w[:ROWS], lambda y: y),
    "itself": (lambda w: w, lambda y: y[:ROWS]),
    "viewed": (lambda w: w.view(-1), lambda y: y[: ROWS * WIDTH].view(ROWS, WIDTH)),
    "transposed": (lambda w: w.t(), lambda y: y.t()[:ROWS]),
    "expanded": (lambda w: w[:ROWS].expand(4, -1, -1), lambda y: y),
    "data": (lambda w: w.data[:ROWS], lambda y: y),
    "detached": (lambda w: w.detach()[:ROWS], lambda y: y),
    "tuple": (lambda w: (None, (w[:ROWS],)), lambda y: y[1][0]),
    "named tuple": (lambda w: Named([w[:ROWS]]), lambda y: y.state[0]),
    "list": (lambda w: [[w[:ROWS]], "x"], lambda y: y[0][0]),
    "set": (lambda w: {w[:ROWS], None}, lambda y: next(rows for rows in y if rows is not None)),
    "dict": (lambda w: {"state": {"rows": w[:ROWS]}}, lambda y: y["state"]["rows"]),
    "output": (lambda w: Output(state=w[:ROWS]), lambda y: y.state),
    "namespace": (lambda w: SimpleNamespace(state=w[:ROWS]), lambda y: y.state),
    "attributes": (lambda w: Attributes(w[:ROWS]), lambda y: y.states[0]),
}
"""How a module returns a view of its parameter, and how its caller takes the rows from there."""


class Positions(nn.Module):
    def __init__(self, form: str = "rows") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2 * ROWS, WIDTH))
        self.form = form

    def forward(self):
        return FORMS[self.form][0](self.weight)


class WithChild(Positions):
    def __init__(self, form: str = "rows") -> None:
        super().__init__(form)
        self.child = nn.Identity()


class ByHook(Positions):
    """A forward hook returns the view, in place of what the forward computed."""

    def __init__(self, form: str = "rows") -> None:
        super().__init__(form)
        self.register_forward_hook(lambda module, args, output: FORMS[form][0](module.weight))

    def forward(self):
        return self.weight * 0


class InAttribute(Positions):
    def forward(self):
        self.last = self.weight[:ROWS]


class InArgument(Positions):
    def forward(self, found):
        found.append(self.weight[:ROWS])


class InParts(Positions):
    """Calls a part of its forward, which is a forward of its own, while it holds the view."""

    def forward_part(self):
        return self.weight.mean()

    def forward(self):
        rows = self.weight[:ROWS]
        return rows * self.forward_part()


class Callback(Positions):
    def forward(self):
        return Strange(self.weight[:ROWS])


def called(positions: nn.Module) -> torch.Tensor:
    return FORMS[positions.form][1](positions())


def read_by_parent(positions: nn.Module) -> torch.Tensor:
    return positions.weight[:ROWS]


def from_attribute(positions: nn.Module) -> torch.Tensor:
    positions()
    return positions.last


def from_argument(positions: nn.Module) -> torch.Tensor:
    found: list[torch.Tensor] = []
    positions(found)
    return found[0]


def from_callback(positions: nn.Module) -> torch.Tensor:
    return positions().read()


class Model(nn.Module):
    """Multiplies by the rows, so that backward reads them too, and passes them to the layers."""

    def __init__(self, make=Positions, form: str = "rows", take=called, around: Callable | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, WIDTH)
        self.positions = make(form)
        self.layers = nn.ModuleList([Layer() for _ in range(2)])
        self.head = nn.Linear(WIDTH, 2)
        self.take, self.around = take, around

    def add(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.take(self.positions)
        return (x * rows).tanh() * rows

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        x = self.add(x) if self.around is None else self.around(self.add, x)
        rows = self.take(self.positions)
        for layer in self.layers:
            x = layer(x, rows)
        return x * rows

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(ids)).square().mean()


def loss(model, step, rank):
    return model(ids(step, rank))


def evaluated(model: nn.Module, twin: nn.Module, step: int) -> None:
    for guard in (torch.no_grad, torch.inference_mode):
        with guard():
            got, expected = (loss(either.eval(), step, bmt.rank()) for either in (model, twin))
        torch.testing.assert_close(got, expected)
        model.train(), twin.train()


def trained(make: Callable[[], nn.Module], prepare=None, **wrap) -> None:
    """Trains, evaluates, trains."""
    model, twin = bmt.auto_wrap(make(), **wrap), make()
    optimizer, plain = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin))
    for step in range(3):
        if prepare is not None:
            prepare(model), prepare(twin)
        evaluated(model, twin, step + 5)
        compare_backward(model, twin, loss, step)
        for either in (optimizer, plain):
            either.step()
            either.zero_grad()
    assert not any(parameter.buffer.is_unsharded for parameter in model.parameters())


def of_form(form: str, make=Positions) -> None:
    trained(lambda: Model(make, form))


def of_reader(make, take) -> None:
    trained(lambda: Model(make, take=take))


def options(zero_level: int, use_checkpoint: bool) -> None:
    trained(Model, zero_level=zero_level, use_checkpoint=use_checkpoint)


def frozen() -> None:
    trained(Model, lambda model: model.positions.requires_grad_(False))


def frozen_before_wrapping() -> None:
    def make():
        model = Model()
        model.positions.requires_grad_(False)
        return model

    trained(make)


def everything_else_frozen() -> None:
    trained(Model, lambda model: (model.requires_grad_(False), model.positions.requires_grad_(True)))


def in_checkpoint(reentrant: bool) -> None:
    trained(lambda: Model(around=lambda add, x: checkpoint(add, x, use_reentrant=reentrant)))


def tied() -> None:
    """Two modules read it: the second frees nothing that the first has returned."""

    def make():
        model = Model()
        model.embedding = nn.Embedding(2 * ROWS, WIDTH)
        model.embedding.weight = model.positions.weight
        return model.double()  # in float32, some processors round the losses of later steps to more than the tolerance

    def loss_of_tied(model, step, rank):
        return model(ids(step, rank) % (2 * ROWS))

    check_twins(make, loss_of_tied)


def several_backwards() -> None:
    """Two forwards before a backward, others between, and a backward twice."""
    model, twin = bmt.auto_wrap(Model()), Model()
    size, rank = bmt.world_size(), bmt.rank()
    for together in (False, True):
        losses = [loss(model, step, rank) for step in (0, 1)]
        with torch.no_grad():
            loss(model, 6, rank)
        for backward in [sum(losses)] if together else losses:
            backward.backward(retain_graph=True)
            backward.backward()
        for _ in range(2):
            (sum(loss(twin, step, other) for step in (0, 1) for other in range(size)) / size).backward()
    check_gradients(model, twin)


def called_alone(form: str, make=Positions) -> None:
    """The outermost module returns a view: its values outlast the full parameter."""
    model, twin = bmt.auto_wrap(Model(make, form)), Model(make, form)
    for guard in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with guard():
            got, expected = called(model.positions), called(twin.positions)
        torch.testing.assert_close(got, expected)
        assert guard is torch.enable_grad or not model.positions.weight.buffer.is_unsharded
        if got.requires_grad:
            (got * got).sum().backward()
            (expected * expected).sum().backward()
            torch.testing.assert_close(got, expected)
            torch.testing.assert_close(model.positions.weight.gather_gradient(), twin.positions.weight.grad)
            assert not model.positions.weight.buffer.is_unsharded


class ReturnsRows(Model):
    """Returns the views beside its loss, as detectors return their queries."""

    def forward(self, ids):
        return super().forward(ids), self.positions()


def returned_by_the_model(form: str) -> None:
    model, twin = bmt.auto_wrap(ReturnsRows(form=form)), ReturnsRows(form=form)
    rows = FORMS[form][1]
    for training in (False, True, False):
        with torch.set_grad_enabled(training):
            (got, states), (expected, wanted) = model(ids(0, 0)), twin(ids(0, 0))
        if training:
            for value, state in ((got, states), (expected, wanted)):
                (value + rows(state).square().sum()).backward()
            check_gradients(model, twin)
        assert not model.positions.weight.buffer.is_unsharded
        torch.testing.assert_close(got, expected)
        torch.testing.assert_close(rows(states), rows(wanted))


class Table(Layer):
    """A layer that returns a view of its own parameter beside its hidden state."""

    def __init__(self, form: str = "rows") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2 * ROWS, WIDTH))
        self.form = form

    def forward(self, x, shift=None):
        return super().forward(x, shift), FORMS[self.form][0](self.weight)


class TableByHook(Table):
    """A forward hook inside the layer returns the view."""

    def __init__(self, form: str = "rows") -> None:
        super().__init__(form)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.inner.register_forward_hook(lambda module, args, output: module.weight[:ROWS])

    def forward(self, x, shift=None):
        return Layer.forward(self, x, shift), self.inner(x)


class TableInArgument(Table):
    def forward(self, x, found):
        found.append(self.weight[:ROWS])
        return Layer.forward(self, x), None


class Tables(nn.Module):
    """Reads what its layers return after later layers have run."""

    def __init__(self, form: str = "rows", make=Table, around: Callable | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList([make(form) for _ in range(4)])
        self.head = nn.Linear(WIDTH, 2)
        self.around = around

    def two(self, x, first, second):
        found: list[torch.Tensor] = []
        for layer in (first, second):
            if isinstance(layer, TableInArgument):
                x, _ = layer(x, found)
            else:
                x, rows = layer(x)
                found.append(FORMS[layer.form][1](rows))
        return (x * found[0]).tanh() * found[1], *found

    def forward(self, ids):
        x, found = self.embedding(ids), []
        for pair in (self.layers[:2], self.layers[2:]):
            x, *more = self.two(x, *pair) if self.around is None else self.around(self.two, x, *pair)
            found += more
        for rows in found:
            x = (x * rows).tanh()
        return self.head(x).square().mean()


def from_blocks(form: str, zero_level: int = 3, use_checkpoint: bool = True, **wrap) -> None:
    trained(lambda: Tables(form), zero_level=zero_level, use_checkpoint=use_checkpoint, **wrap)


def from_blocks_in_arguments(use_checkpoint: bool) -> None:
    trained(lambda: Tables(make=TableInArgument), use_checkpoint=use_checkpoint)


def from_blocks_by_hook() -> None:
    trained(lambda: Tables(make=TableByHook))


def from_frozen_blocks() -> None:
    trained(Tables, lambda model: model.layers.requires_grad_(False))


def from_blocks_in_checkpoint(reentrant: bool, use_checkpoint: bool) -> None:
    trained(
        lambda: Tables(around=lambda two, *args: checkpoint(two, *args, use_reentrant=reentrant)),
        use_checkpoint=use_checkpoint,
    )


def compiled_blocks(use_checkpoint: bool) -> None:
    torch._dynamo.reset()
    trained(Tables, compile="aot_eager", use_checkpoint=use_checkpoint)


def compiled_model(make) -> None:
    """What the whole model's compiler makes of it."""
    torch._dynamo.reset()
    model, twin = bmt.auto_wrap(make()), make()
    compiled: Any = torch.compile(model, backend="aot_eager")
    for step in range(2):
        mine = compiled(ids(step, bmt.rank()))
        mine = mine[0] if isinstance(mine, tuple) else mine
        mine.backward()
        expected = [twin(ids(step, other)) for other in range(bmt.world_size())]
        expected = torch.stack([each[0] if isinstance(each, tuple) else each for each in expected])
        expected.mean().backward()
        torch.testing.assert_close(mine, expected[bmt.rank()])
    check_gradients(model, twin)


def compiled_model_returns() -> None:
    torch._dynamo.reset()
    model, twin = bmt.auto_wrap(ReturnsRows()), ReturnsRows()
    compiled: Any = torch.compile(model, backend="aot_eager")
    for training in (False, True):
        with torch.set_grad_enabled(training):
            (got, states), (expected, wanted) = compiled(ids(0, 0)), twin(ids(0, 0))
        if training:
            got.backward()
        torch.testing.assert_close(got, expected)
        torch.testing.assert_close(states, wanted)


class Handmade(bmt.DistributedModule):
    def __init__(self, form: str = "rows") -> None:
        super().__init__()
        self.weight = bmt.DistributedParameter(torch.randn(2 * ROWS, WIDTH))
        self.form = form

    forward = Positions.forward


def by_hand() -> None:
    """A DistributedModule that is not in a model at all."""
    torch.manual_seed(0)
    positions = Handmade()
    weight = positions.weight.gather().detach().requires_grad_()
    for guard in (torch.no_grad, torch.enable_grad):
        with guard():
            rows = positions()
        torch.testing.assert_close(rows, weight[:ROWS])
    rows.square().sum().backward()
    weight[:ROWS].square().sum().backward()
    torch.testing.assert_close(positions.weight.gather_gradient(), weight.grad)


READERS = [
    (WithChild, called), (ByHook, called), (Positions, read_by_parent), (WithChild, read_by_parent),
    (InAttribute, from_attribute), (InArgument, from_argument), (Callback, from_callback),
]  # fmt: skip
SEARCHED = ("rows", "data", "list", "output")
"""Forms, one for each way in which a view is found: by itself, without autograd, in a container, in an object."""
CASES: list[tuple[Any, ...]] = [
    *((of_form, form) for form in FORMS),
    *((of_form, form, WithChild) for form in SEARCHED),
    *((of_reader, *reader) for reader in READERS),
    *((options, level, recomputed) for level in (2, 3) for recomputed in (False, True)),
    (frozen,), (frozen_before_wrapping,), (everything_else_frozen,), (tied,), (several_backwards,), (by_hand,),
    (in_checkpoint, False), (in_checkpoint, True),
    *((called_alone, form) for form in SEARCHED),
    (called_alone, "rows", InParts),
    *((returned_by_the_model, form) for form in SEARCHED),
    *((from_blocks, form) for form in (*SEARCHED, "set")),
    *((from_blocks, "rows", level, recomputed) for level in (2, 3) for recomputed in (False, True)),
    (from_blocks_in_arguments, False), (from_blocks_in_arguments, True), (from_frozen_blocks,),
    (from_blocks_by_hook,),
    *((from_blocks_in_checkpoint, *each) for each in ((False, False), (False, True), (True, False), (True, True))),
    (compiled_blocks, False), (compiled_blocks, True),
    (compiled_model, Model), (compiled_model_returns,),
]  # fmt: skip
MORE_CASES = [
    *((from_blocks, form) for form in FORMS if form not in (*SEARCHED, "set")),
    (compiled_model, Tables), (compiled_model, ReturnsRows),
]  # fmt: skip


def name(case: Any) -> str:
    return "-".join(str(getattr(value, "__name__", value)) for value in case)


DEFAULT = [
    (of_form, "rows"), (in_checkpoint, False), (called_alone, "rows", InParts), (from_blocks, "rows"),
    (from_blocks, "set"),
]  # fmt: skip


@pytest.mark.parametrize("case", [*by_default(CASES, *DEFAULT), *in_slow(*MORE_CASES)], ids=name)
def test_returned_views(world, case):
    world(2)(*case)


@full
@pytest.mark.parametrize("case", DEFAULT, ids=name)
def test_returned_views_by_copies(peers, case):
    peers(2)(*case)
