"""A layer that changes state in its forward is recomputed as if it had not."""

import pytest
import torch

import hf_bmtrain as bmt
from cases import in_full
from recomputed_models import Cache, Decoder, Ranged
from twins import WIDTH, Layer, check_gradients, ids, tower_of


class Late(Layer):
    """Begins to write its buffer in the second forward."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.count = 0

    def forward(self, x, shift=None):
        self.count += 1
        if self.count > 1:
            self.calls.add_(1)
        return super().forward(x, shift)


def buffers(retain):
    """Gradients and buffers are the plain model's, after each of two backwards through one graph too."""
    model, twin = bmt.auto_wrap(tower_of(Ranged)), tower_of(Ranged)
    for step in range(3):
        for either in (model, twin):
            loss = either(ids(step, 0))
            if retain:
                loss.backward(retain_graph=True)
            loss.backward()
        check_gradients(model, twin)
        for (name, mine), (_, plain) in zip(model.named_buffers(), twin.named_buffers()):
            torch.testing.assert_close(mine, plain, msg=name)
        for either in (model, twin):
            either.zero_grad()
    assert model.layers[0].norm.num_batches_tracked == 3
    model.eval()
    torch.testing.assert_close(model(ids(9, 0)), twin.eval()(ids(9, 0)))


def unexpected():
    model = bmt.auto_wrap(tower_of(Late))
    model(ids(0, 0))
    with pytest.raises(RuntimeError, match=r"^Late changed its buffers \['calls'\]"):
        model(ids(1, 0))


class Scaled(Layer):
    """Computes otherwise in evaluation, and has modules whose modes matter."""

    def __init__(self):
        super().__init__()
        self.dropout = torch.nn.Dropout(0.5)
        self.norm = torch.nn.InstanceNorm1d(3, affine=True, track_running_stats=True)

    def forward(self, x, shift=None):
        x = super().forward(self.norm(self.dropout(x)), shift)
        return x * x.sigmoid() if self.training else x


def modes():
    """Backward recomputes in the modes of the forward, which may have changed since; the present modes stay."""
    model, twin = bmt.auto_wrap(tower_of(Scaled)), tower_of(Scaled)
    for change in ("all", "dropout", "norm"):
        for either in (model, twin):
            either.train()
            torch.manual_seed(3)
            loss = either(ids(0, 0))
            for layer in either.layers:
                (layer if change == "all" else getattr(layer, change)).eval()
            before = [module.training for module in either.modules()]
            with torch.no_grad():
                either(ids(1, 0))
            loss.backward()
            assert [module.training for module in either.modules()] == before
        check_gradients(model, twin)
        for either in (model, twin):
            either.zero_grad()


def thawed():
    """A norm that was frozen writes its buffers from the second step on."""
    model, twin = bmt.auto_wrap(tower_of(Scaled)), tower_of(Scaled)
    for training in (False, True, False, True):
        for either in (model, twin):
            either.zero_grad()
            for layer in either.layers:
                layer.norm.train(training)
            torch.manual_seed(3)
            either(ids(0, 0)).backward()
        check_gradients(model, twin)
    for (name, mine), (_, plain) in zip(model.named_buffers(), twin.named_buffers()):
        torch.testing.assert_close(mine, plain, msg=name)


def cache():
    """A cache given to recomputed blocks is appended to once, and holds what it held in the forward."""
    torch.manual_seed(3)
    model = Decoder()
    twin = Decoder()
    twin.load_state_dict(model.state_dict())
    bmt.auto_wrap(model)
    mine, plain = Cache(), Cache()
    model(ids(0, 0), mine).backward()
    twin(ids(0, 0), plain).backward()
    check_gradients(model, twin)
    assert [row.shape for row in mine.rows] == [row.shape for row in plain.rows]
    assert mine.rows[0].shape == (4, 3, WIDTH)


@pytest.mark.parametrize(
    "case",
    [(buffers, True), (unexpected,), (modes,), (thawed,), (cache,), *in_full((buffers, False))],
    ids=lambda case: "-".join(str(getattr(c, "__name__", c)) for c in case),
)
def test_replay(world, case):
    world(2)(*case)  # every rank has the same batch, so the twin of each is the truth
