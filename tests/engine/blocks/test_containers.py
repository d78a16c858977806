"""Lists, dicts and objects that blocks are given by reference: what layers write into them is there afterwards."""

import dataclasses
import types
from collections import OrderedDict, defaultdict, deque, namedtuple

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import BaseModelOutput

import hf_bmtrain as bmt
from cases import by_default, in_full, pairwise
from ranks import on_ranks
from twins import Layer, Tower, check_twins, ids, tower_loss

OPTIONS = [{"use_checkpoint": checkpoint, "zero_level": level} for checkpoint in (True, False) for level in (3, 2)]


class Writing(Layer):
    """Writes into `state`, a container that all layers get, and reads what layers before it wrote."""

    def forward(self, x, write, state):
        y = super().forward(x)
        return y + 0.1 * write(state, y, self.linear(x).square().mean())


def appended(state, y, loss):
    state.append(loss)
    return sum(state[:-1], start=torch.zeros(()))


def nested(state, y, loss):
    state["losses"].append((loss, {"y": y}))
    state["last"], before = y, state.get("last")
    state.setdefault("made", []).append(loss * 2)
    return sum(made for made in state["made"]) + (0 if before is None else before)


def attributes(state, y, loss):
    """Also counts, so that a repetition would not begin where the forward did."""
    state.calls += 1
    state.total = state.total + loss * state.calls
    state.rows = [*state.rows, y]
    return state.total + state.rows[0]


def through_keys(state, y, loss):
    first = state.get("last_hidden_state")
    state["last_hidden_state"] = y if first is None else first + y
    return state["last_hidden_state"]


def replaced(state, y, loss):
    """The last two alone are kept."""
    old = sum(state, start=torch.zeros(()))
    state[:] = [*state[-1:], loss]
    return old


def rotated(state, y, loss):
    state.append(loss)
    return state[0]


@dataclasses.dataclass
class Inner:
    total: object
    rows: list
    calls: int = 0


@dataclasses.dataclass
class State(Inner):
    inner: object = None


def inner(state, y, loss):
    return attributes(state.inner, y, loss) + attributes(state, y, loss)


def zeros():
    return torch.zeros(())


STATES = {
    "list": (list, appended, sum),
    "list in a tuple": (lambda: (1, []), lambda s, y, loss: appended(s[1], y, loss), lambda s: sum(s[1])),
    "list that loses": (list, replaced, sum),
    "deque": (lambda: deque(maxlen=2), rotated, sum),
    "dict": (lambda: {"losses": []}, nested, lambda s: s["losses"][1][0] + s["last"].mean() + sum(s["made"])),
    "default dict": (
        lambda: defaultdict(list), lambda s, y, loss: appended(s["losses"], y, loss), lambda s: s["losses"][0],
    ),
    "ordered dict": (OrderedDict, through_keys, lambda s: s["last_hidden_state"].mean()),
    "model output": (BaseModelOutput, through_keys, lambda s: s.last_hidden_state.mean()),
    "dataclass": (lambda: Inner(zeros(), []), attributes, lambda s: s.total + s.rows[1].mean()),
    "dataclass in a dataclass": (
        lambda: State(zeros(), [], 0, Inner(zeros(), [])), inner, lambda s: s.total + s.inner.rows[-1].mean(),
    ),
    "namespace": (
        lambda: types.SimpleNamespace(calls=0, total=zeros(), rows=[]), attributes, lambda s: s.total,
    ),
    "not in the loss": (list, appended, lambda s: s[0].detach()),
    "partly in the loss": (list, appended, lambda s: s[1]),
}  # fmt: skip


class WritingTower(Tower):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList([Writing() for _ in range(3)])


def make_forward(name, by_keyword):
    make, write, read = STATES[name]

    def loss(model, step, rank):
        x, state = model.embedding(ids(step, rank)), make()
        for layer in model.layers:
            x = layer(x, state=state, write=write) if by_keyword else layer(x, write, state)
        return model.head(x).square().mean() + read(state)

    class Reading(WritingTower):
        def forward(self, step, rank):
            return loss(self, step, rank)

    return Reading


@pytest.mark.parametrize(
    ("name", "by_keyword", "use_checkpoint", "zero_level"),
    pairwise(
        [
            ("list in a tuple", True, True, 3),
            ("default dict", False, False, 3),
            ("dataclass in a dataclass", True, True, 2),
        ],
        list(STATES),
        [True, False],
        [True, False],
        [3, 2],
    ),
)
@on_ranks(2)
def test_state_by_reference(name, by_keyword, use_checkpoint, zero_level):
    def loss(model, step, rank):
        return model(step, rank)

    check_twins(make_forward(name, by_keyword), loss, use_checkpoint=use_checkpoint, zero_level=zero_level)


# -- particular cases ------------------------------------------------------------------------------------------------


class Known(Layer):
    """Is given the list that it holds, twice, and tensors that stand in several places."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def forward(self, x, rows, again, pair):
        assert rows is again is self.rows
        assert pair["x"] is x
        rows.append(x)
        y = super().forward(x) + len(rows) + sum(again)
        rows.append(y)
        return y


class KnownTower(Tower):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList([Known() for _ in range(3)])

    def forward(self, ids):
        x, loss = self.embedding(ids), 0
        for layer in self.layers:
            layer.rows.clear()
            before, pair = x, {"x": x}
            x = layer(x, layer.rows, again=layer.rows, pair=pair)
            assert layer.rows[0] is before is pair["x"]
            assert len(layer.rows) == 2
            loss = loss + layer.rows[1].mean()
        return self.head(x).square().mean() + loss


def identities(options):
    check_twins(KnownTower, tower_loss, **options)


class Batch(Layer):
    """Takes and returns a dict, which it fills."""

    def forward(self, batch):
        batch["x"] = super().forward(batch["x"])
        batch.setdefault("all", []).append(batch["x"])
        return batch


class BatchTower(Tower):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList([Batch() for _ in range(3)])

    def forward(self, ids):
        batch = {"x": self.embedding(ids)}
        for layer in self.layers:
            assert layer(batch) is batch
        assert len(batch["all"]) == 3
        return self.head(batch["x"]).square().mean() + sum(batch["all"]).square().mean()


def returned(options):
    """Every tensor goes through the dict, so the blocks are released as they are otherwise."""
    check_twins(BatchTower, tower_loss, **options)


@dataclasses.dataclass
class Answer:
    hidden: Inner
    note: str = ""


class Answering(Layer):
    def forward(self, answer):
        y = super().forward(answer.hidden.total)
        return Answer(Inner(y, [y * 2]))


class AnsweringTower(Tower):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList([Answering() for _ in range(3)])

    def forward(self, ids):
        answer = Answer(Inner(self.embedding(ids), []))
        for layer in self.layers:
            answer = layer(answer)
        return self.head(answer.hidden.total).square().mean() + answer.hidden.rows[0].mean()


def nested_outputs(options):
    check_twins(AnsweringTower, tower_loss, **options)


class InSet(Layer):
    """Takes and returns its hidden states in a set. The order of so many depends on how the set was filled."""

    def forward(self, states, some=None):
        return {torch.sin(super(InSet, self).forward(x)) for x in (states if some is None else {some})}


class SetTower(Tower):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList([InSet() for _ in range(3)])

    def forward(self, ids):
        x = self.embedding(ids)
        states = {x * number / 10 for number in range(20)}
        for layer in self.layers:
            states = self.call(layer, states)
        return torch.stack([self.head(state).square().mean() for state in states]).mean()

    def call(self, layer, states):
        return layer(states)


class IteratedTower(SetTower):
    """Iterates over a set while layers get it."""

    def call(self, layer, states):
        return {y for x in states for y in layer(states, x)}


class CheckpointedTower(SetTower):
    """Recomputes layers by itself."""

    def call(self, layer, states):
        return checkpoint(layer, states, use_reentrant=False)


def sets(options):
    for tower in (SetTower, IteratedTower, CheckpointedTower):
        check_twins(tower, tower_loss, **options)


class Pair(namedtuple("Pair", "hidden rows")):  # unlike a plain named tuple, it has a `__dict__`
    pass


class Pairing(Layer):
    """Takes and returns a tuple that may have attributes as well."""

    def forward(self, pair):
        y = super().forward(pair.hidden)
        pair.rows.append(y)
        made = Pair(y, [y * 2])
        if hasattr(pair, "total"):
            pair.last = y.mean()
            made.total = pair.total + y.mean()
        return made


class PairingTower(Tower):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList([Pairing() for _ in range(3)])

    def forward(self, ids, attributes):
        pair, loss = Pair(self.embedding(ids), []), 0
        if attributes:
            pair.total = pair.hidden.mean()
        for layer in self.layers:
            before, pair = pair, layer(pair)
            loss = loss + before.rows[-1].mean() + (before.last if attributes else 0)
        return self.head(pair.hidden).square().mean() + pair.rows[0].mean() + loss


def tuples_with_attributes(options):
    for attributes in (True, False):
        check_twins(PairingTower, lambda model, step, rank, some=attributes: model(ids(step, rank), some), **options)


class Failing(Layer):
    def forward(self, x, rows):
        rows.append(x)
        raise KeyError("a user's bug")


def after_an_exception(options):
    """The caller's tensors are in the containers again."""
    layer = bmt.CheckpointBlock(Failing(), **options)
    x, y = (torch.ones(1, 6, requires_grad=True) for _ in range(2))
    rows = [y]
    with pytest.raises(KeyError):
        layer(x, rows)
    assert rows[0] is y
    assert rows[1] is x


def without_gradients(options):
    model, twin = bmt.auto_wrap(KnownTower(), **options), KnownTower()
    with torch.no_grad():
        torch.testing.assert_close(model(ids(0, 0)), twin(ids(0, 0)))


def two_forwards_at_once(options):
    """Each backward repeats its own forward, although another one has filled the same list since."""

    class Reused(WritingTower):
        def forward(self, ids, rows):
            x = self.embedding(ids)
            for layer in self.layers:
                x = layer(x, appended, rows)
            return self.head(x).square().mean() + sum(rows)

    def loss(model, step, rank):
        rows = []
        return model(ids(step, rank), rows) + model(ids(step + 5, rank), rows)

    check_twins(Reused, loss, **options)


CASES = [
    identities,
    returned,
    nested_outputs,
    sets,
    tuples_with_attributes,
    after_an_exception,
    without_gradients,
    two_forwards_at_once,
]


@pytest.mark.parametrize("options", [OPTIONS[0], *in_full(OPTIONS[3])], ids=lambda o: "-".join(map(str, o.values())))
@pytest.mark.parametrize(
    "case",
    by_default(CASES, identities, sets, tuples_with_attributes, after_an_exception, two_forwards_at_once),
    ids=lambda case: case.__name__,
)
def test_containers(world, case, options):
    world(2)(case, options)
