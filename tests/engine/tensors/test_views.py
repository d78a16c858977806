"""Writes through views of sharded tensors reach the elements of every rank, or raise."""

import pytest
import torch
from torch import nn

import hf_bmtrain as bmt
from cases import full
from ranks import on_ranks


def two_views(weight):
    first, second = weight.data[0], weight.data[1]
    first.fill_(3)
    second.fill_(4)


def rows_under_no_grad(weight):
    with torch.no_grad():
        for row in weight:
            row.div_(2)
        weight[4].copy_(torch.ones(6))


def a_view_of_a_view(weight):
    row = weight.data[0]
    row += 1
    row[2] = 7


WRITES = {
    "fill": lambda weight: weight.data[1].fill_(0),
    "range": lambda weight: weight.data[2:5].zero_(),
    "draw": lambda weight: weight.data[3].normal_(),
    "set": lambda weight: weight.data.__setitem__(1, 5),
    "columns": lambda weight: weight.data[1][2:4].mul_(2),
    "transposed": lambda weight: weight.data.t()[1].fill_(8),
    "flat": lambda weight: weight.data.view(-1)[7:9].fill_(-1),
    "init": lambda weight: nn.init.zeros_(weight.data[7]),
    "drawn by init": lambda weight: nn.init.uniform_(nn.init.normal_(weight.data[1:4])[1:]),
    "row to row": lambda weight: weight.data[0].copy_(weight.data[1]),
    "out": lambda weight: torch.add(weight.data[1], 1, out=weight.data[2]),
    "unbound": lambda weight: weight.data.unbind(0)[2].zero_(),
    "no view": lambda weight: weight.data[[1, 2]].fill_(0),
    "two views": two_views,
    "no_grad": rows_under_no_grad,
    "view of a view": a_view_of_a_view,
}


@on_ranks(2, full=(1, 3))
def test_writes():
    """Equal to those to an ordinary parameter, also where a rank holds a part of the row or nothing of it."""
    for name, write in WRITES.items():
        values = torch.arange(60.0).reshape(10, 6)
        weight, truth = bmt.DistributedParameter(values.clone()), nn.Parameter(values.clone())
        for each in (weight, truth):
            torch.manual_seed(3)
            write(each)
        assert torch.equal(weight.gather().detach(), truth.detach()), name


def while_autograd_records(weight):
    weight[1].fill_(0)


def after_a_change(weight):
    row = weight.data[0]
    weight.data.add_(1)
    row.mul_(2)


@pytest.mark.parametrize(
    ("write", "why"), [(while_autograd_records, "gradients were enabled"), (after_a_change, "has changed")]
)
@on_ranks(2)
def test_what_is_refused(write, why):
    weight = bmt.DistributedParameter(torch.ones(10, 6))
    with pytest.raises(RuntimeError, match=f"writes to a view.*{why}"):
        write(weight)


class Padded(bmt.DistributedModule):
    def __init__(self):
        super().__init__()
        self.weight = bmt.DistributedParameter(torch.ones(10, 4))
        self.weight.data[1].fill_(0)

    def forward(self):
        return self.weight.sum(1)


@full
@on_ranks(2)
def test_a_padding_row():
    assert Padded()().tolist() == [4, 0, *[4] * 8]
