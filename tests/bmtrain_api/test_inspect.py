"""What is inspected equals statistics of whole tensors in one process."""

import math

import numpy
import pytest
import torch
from torch import nn

import hf_bmtrain as bmt
from cases import by_default
from twins import WIDTH, Tower, ids


def close(value, expected):
    if isinstance(expected, torch.Tensor):
        expected = expected.item()
    same = value == pytest.approx(expected, rel=2e-5, abs=1e-7)
    assert same or (math.isnan(value) and math.isnan(expected)), (value, expected)


def parameters():
    """Slices of any length, one-element ones too, against the whole tensors of a twin."""
    size = bmt.world_size()
    model, twin = bmt.auto_wrap(Tower()), Tower()
    assert all(line["grad_std"] == line["grad_mean"] == 0.0 for line in bmt.inspect.inspect_model(model, "*"))
    model(ids(0, bmt.rank())).backward()
    torch.stack([twin(ids(0, r)) for r in range(size)]).mean().backward()
    lines = bmt.inspect.inspect_model(model, "*")
    twins = dict(twin.named_parameters())
    assert [line["name"] for line in lines] == list(twins)
    for line in lines:
        whole = twins[line["name"]].detach()
        gradient = twins[line["name"]].grad
        assert line["shape"] == tuple(whole.shape)
        for key in ("mean", "max", "min"):
            close(line[key], getattr(whole, key)())
        close(line["std"], whole.std() if whole.numel() > 1 else math.nan)
        close(line["grad_mean"], gradient.mean())
        close(line["grad_std"], gradient.std() if gradient.numel() > 1 else math.nan)
    chosen = bmt.inspect.inspect_model(model, "root.layers.?.gain", prefix="root.")
    assert [line["name"] for line in chosen] == [f"root.layers.{i}.gain" for i in range(3)]


class Recorded(Tower):
    def forward(self, ids, plan=None):
        x = self.embedding(ids)
        bmt.inspect.record_tensor(x, "embedded")
        for layer in self.layers:
            x = layer(x)
        bmt.inspect.record_tensor(x.detach(), "last", group="tail")
        return self.head(x).square().mean()


def recording_layers(model):
    """Recorded inside the blocks, where recomputation runs the line twice."""
    for layer in model.layers:

        def forward(x, layer=layer):
            y = layer.linear(x)
            bmt.inspect.record_tensor(y, "inner", group="layer")
            return x + torch.tanh(y) * layer.gain  # needed in backward: a recomputation does not stop before it

        layer.forward = forward
    return model


def activations(use_checkpoint):
    rank, size = bmt.rank(), bmt.world_size()
    model = bmt.auto_wrap(recording_layers(Recorded()), use_checkpoint=use_checkpoint)
    with bmt.inspect.inspect_tensor() as inspector:
        model(ids(0, rank)).backward()
    model(ids(1, rank))  # not noted
    summary = inspector.get_summary()
    names = ["0.embedded", "layer.0.inner", "layer.1.inner", "layer.2.inner", "tail.0.last"]
    assert [line["name"] for line in summary] == names
    twin = recording_layers(Recorded())
    twins = []
    for other in range(size):
        with bmt.inspect.inspect_tensor() as plain:
            twin(ids(0, other)).backward()
        twins.append(plain)
    for line, (name, group, index) in zip(
        summary, [("embedded", None, None), *(("inner", "layer", i) for i in range(3)), ("last", "tail", None)]
    ):
        full_params = [inspector_.get_tensor(name, group, index) for inspector_ in twins]
        whole = torch.cat([x.detach() for x in full_params])
        assert line["shape"] == (4 * size, 3, WIDTH)
        for key in ("mean", "max", "min", "std"):
            close(line[key], getattr(whole, key)())
        if name == "last":
            assert line["grad_mean"] is None
            continue
        gradient = torch.cat([x.grad for x in full_params])
        close(line["grad_mean"], gradient.mean())
        close(line["grad_std"], gradient.std())
        torch.testing.assert_close(inspector.get_tensor(name, group, index).grad, full_params[rank].grad)
    assert [line["summary_name"] for line in inspector.summary] == names
    assert inspector.summary[1]["tensor"] is inspector.get_tensor("inner", "layer")
    assert inspector.get_tensor("nothing") is None
    assert inspector.get_tensor("inner", "layer", 3) is None


def table():
    model = bmt.auto_wrap(Tower())
    text = bmt.inspect.format_summary(bmt.inspect.inspect_model(model, "head.*"))
    header, weight, bias = text.splitlines()
    assert header.split() == ["name", "shape", "max", "min", "std", "mean", "grad_std", "grad_mean"]
    assert weight.split()[0] == "head.weight"
    assert bias.split()[-2:] == ["0.0000", "0.0000"]
    assert weight.index("(2, 6)") == header.index("shape")
    columns = [header.index(name) for name in ("max", "min", "std", "mean", "grad_std", "grad_mean")]
    assert columns == [columns[0] + 10 * number for number in range(6)]  # however long the numbers are
    wide = dict.fromkeys(("max", "min", "std", "mean", "grad_std", "grad_mean"), 123456789.0) | {
        "name": "w",
        "shape": (),
    }
    assert bmt.inspect.format_summary([wide]).count("123456789.0000 ") == 5


def refused():
    x = torch.ones(2, requires_grad=True) * 2
    bmt.inspect.record_tensor(x, "nobody listens")
    with bmt.inspect.inspect_tensor() as inspector:
        with pytest.raises(ValueError, match="inspect_model"):
            bmt.inspect.record_tensor(nn.Parameter(torch.ones(1)), "weight")
        with pytest.raises(RuntimeError, match="already active"), bmt.inspect.inspect_tensor():
            pass
        bmt.inspect.record_tensor(x, "x")
    if bmt.rank() == 0:
        x.mul_(2)
    with pytest.raises(RuntimeError, match=r"Record x\.clone.*rank 0: x"):
        inspector.get_summary()
    with bmt.inspect.inspect_tensor() as inspector:
        for _ in range(bmt.rank()):
            bmt.inspect.record_tensor(x, "x")
    if bmt.world_size() > 1:
        with pytest.raises(RuntimeError, match="on every rank the same number of times"):
            inspector.get_summary()


def shapes_of_ranks():
    """Only the number of rows may differ."""
    rank = bmt.rank()

    def summary(*shape):
        with bmt.inspect.inspect_tensor() as inspector:
            bmt.inspect.record_tensor(torch.ones(shape), "x", group="layer")
        return inspector.get_summary()

    assert summary(2 + rank, 3)[0]["shape"] == (5, 3)
    for first in (0, 1):
        with bmt.inspect.inspect_tensor() as inspector:
            bmt.inspect.record_tensor(torch.tensor([1.0, float("nan") if rank == first else 2.0]), "x")
        line = inspector.get_summary()[0]
        assert numpy.isnan([line["min"], line["max"], line["mean"]]).all()
    with torch.inference_mode():  # in which tensors have no version
        assert summary(2 + rank, 3)[0]["shape"] == (5, 3)
    for shape in ((2, 3 + rank), (3,) * rank, (3,) * (1 - rank), (3,) * (1 + rank)):
        with pytest.raises(RuntimeError, match=r"layer\.0\.x with different shapes: .* Only dimension 0 may differ"):
            summary(*shape)


CASES = [(parameters,), (activations, True), (activations, False), (table,), (refused,), (shapes_of_ranks,)]


@pytest.mark.parametrize(
    "case",
    by_default(CASES, (parameters,), (activations, True), (table,), (refused,), (shapes_of_ranks,)),
    ids=lambda case: "-".join(str(getattr(c, "__name__", c)) for c in case),
)
def test_inspect(world, case):
    world(2)(*case)
