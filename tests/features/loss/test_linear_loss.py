"""linear_cross_entropy against float64 on CPU, and with a sharded head against one process of plain torch."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hf_bmtrain as bmt
import hf_bmtrain.engine.wrap.root_params
import linear_loss_checks as checks
from cases import full, in_full, pairwise, rows_in_full
from hf_bmtrain.features.loss import wide_product
from hf_bmtrain.features.loss.linear import chunk_rows
from hf_bmtrain.loss import linear_cross_entropy
from language_model import CLASSES, Language, batch, buffers, head_loss
from ranks import on_ranks
from twins import WIDTH, Layer, check_gradients, check_twins

CPU = torch.device("cpu")


class TestOnCpu(checks.OnAnyDevice):
    device = CPU


def test_a_target_out_of_range_is_named():
    hidden, weight, _, targets, _ = checks.case(CPU)
    targets[1, 2] = 37
    with pytest.raises(ValueError, match=r"target 37 at \[1, 2\] is neither a class in \[0, 37\)"):
        linear_cross_entropy(hidden, weight, targets)


@full
@pytest.mark.parametrize(
    ("rows", "row_bytes", "budget", "expected"),
    [
        (8192, 128256 * 2, 1 << 30, 4096),
        (100, 10, 70, 7),
        *rows_in_full([(8192, 32000 * 2, 1 << 30, 8192), (100, 10, 1, 1), (0, 10, 100, 1), (1000, 1, 900, 512)]),
    ],
)
def test_chunks_are_even_and_within_the_budget(rows, row_bytes, budget, expected):
    assert chunk_rows(rows, row_bytes, budget) == expected


def test_the_logits_of_a_chunk_are_within_the_budget():
    """Also with the classes that are added to make rows of 16-bit logits a multiple of 16 bytes."""
    hidden, weight, _, targets, _ = checks.case(CPU)
    budget, found = 4 * 37 * 8, []  # 8 rows of 37 classes, or 7 of 40
    mm = torch.mm
    with mock.patch.object(torch, "mm", lambda *given, out: (found.append(out.nbytes), mm(*given, out=out))[1]):
        linear_cross_entropy(hidden, weight, targets, chunk_bytes=budget)
    assert max(found) == 4 * 40 * 7 <= budget


def test_the_capability_of_a_gpu_is_printed_as_a_number(monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert not wide_product._wide_output.__wrapped__(torch.device("cuda", 0))
    assert "on a GPU of compute capability 7.5 cannot" in caplog.text


# -- a sharded head ---------------------------------------------------------------------------------------------


def inside(model, step, rank):
    return model(*batch(step, rank))


def outside(model, step, rank):
    ids, targets = batch(step, rank)
    return head_loss(model, model(ids), targets)


def row_by_row(model, step, rank):
    ids, targets = batch(step, rank)
    losses = head_loss(model, model(ids), targets, reduction="none").view(-1)
    return (losses * torch.linspace(1, 2, losses.numel())).sum() / 9


def two_losses(model, step, rank):
    """One hidden state, two losses on it: the head's gradient arrives twice in one backward."""
    ids, targets = batch(step, rank)
    hidden = model(ids)
    return head_loss(model, hidden, targets) + 0.5 * head_loss(model, hidden.tanh(), targets.flip(1))


LOSSES = {f.__name__: f for f in (inside, outside, row_by_row, two_losses)}


def train(name: str, own: bool, tied: bool, bias: bool, frozen: str, zero_level: int) -> None:
    def prepare(model, step):
        frozen_module = getattr(model, frozen) if frozen != "body" else nn.ModuleList([model.embedding, *model.layers])
        frozen_module.requires_grad_(False)
        if frozen == "body":
            model.norm.requires_grad_(False)

    with buffers(own):
        how = {"zero_level": zero_level, "prepare": prepare if frozen else None}
        check_twins(lambda: Language(tied, bias), LOSSES[name], **how)


@pytest.mark.parametrize(
    ("size", "name", "own", "bias", "frozen"),
    pairwise(
        [
            (2, "inside", True, True, ""),
            (2, "outside", False, True, "head"),
            (2, "row_by_row", True, False, "embedding"),
            (1, "two_losses", True, True, "body"),
        ],
        [1, 2],
        list(LOSSES),
        [False, True],
        [False, True],
        ["", "head", "embedding", "body"],
    ),
)
def test_a_sharded_head(world, size, name, own, bias, frozen):
    world(size)(train, name, own, False, bias, frozen, 3)


@pytest.mark.parametrize(
    ("size", "name", "own", "zero_level"),
    pairwise([(2, "inside", True, 3), (2, "two_losses", False, 3)], [1, 2], list(LOSSES), [False, True], [2, 3]),
)
def test_a_tied_head(world, size, name, own, zero_level):
    world(size)(train, name, own, True, True, "", zero_level)


@pytest.mark.parametrize("tied", [True, *in_full(False)])
@pytest.mark.parametrize("own", [True, *in_full(False)])
@on_ranks(2, full=(1,))
def test_accumulation(own: bool, tied: bool) -> None:
    """Micro-batches with a backward each against the plain twin's mean over all of them."""
    size, rank = bmt.world_size(), bmt.rank()
    with buffers(own):
        model, twin = bmt.auto_wrap(Language(tied)), Language(tied)
    for micro in range(3):
        (outside(model, micro, rank) / 3).backward()
        for other in range(size):
            (outside(twin, micro, other) / 3 / size).backward()
    check_gradients(model, twin)


def look() -> list[bool]:
    """Whether the head is whole: at rest, after the loss, in a layer's backward; whether it is after evaluation."""
    with buffers(own=True):
        model = bmt.auto_wrap(Language())
    buffer = model.head.weight.buffer
    seen = [buffer.is_unsharded]
    model.layers[1].linear.register_full_backward_hook(lambda *_: seen.append(buffer.is_unsharded))
    loss = outside(model, 0, 0)
    seen.append(buffer.is_unsharded)
    loss.backward()
    with torch.no_grad():
        outside(model, 0, 0)
    return [*seen, buffer.is_unsharded]


def test_the_head_is_whole_for_the_loss_alone(world):
    assert world(2)(look)[0] == [False] * 4


@on_ranks(2, full=(1,))
def test_a_failed_backward_is_forgotten() -> None:
    """A backward that raises after the head's gradient was collected leaves nothing for the next one."""
    model, twin = bmt.auto_wrap(Language()), Language()
    hidden = model(batch(5, 0)[0])
    hidden.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        head_loss(model, hidden, batch(5, 0)[1]).backward()
    hidden = hidden.detach()  # nothing but the loss itself can see that a backward has failed
    for either in (model, twin):
        head_loss(either, hidden, batch(0, 0)[1]).backward()
    torch.testing.assert_close(model.head.weight.gather_gradient(), twin.head.weight.grad)


@on_ranks(2, full=(1,))
def test_weights_that_change_before_backward_computes_with_them_raise() -> None:
    model = bmt.auto_wrap(Language())
    hidden = model(batch(0, 0)[0]).detach().requires_grad_()
    losses = head_loss(model, hidden, batch(0, 0)[1], reduction="none")
    with torch.no_grad():
        model.head.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses.sum().backward()


class Blocks(nn.Module):
    """Written as for BMTrain: the head is a block of its own, read only by the loss."""

    def __init__(self, wrap: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        block = bmt.CheckpointBlock if wrap else lambda layer: layer
        self.body, self.head = block(Layer()), block(nn.Linear(WIDTH, CLASSES))


@full
@on_ranks(2, full=(1,))
def test_a_head_that_is_a_block() -> None:
    model, twin = Blocks(wrap=True), Blocks(wrap=False)
    x = torch.randn(4, WIDTH)
    for rank in range(bmt.world_size()):
        targets = torch.arange(4) + rank
        (F.cross_entropy(twin.head(twin.body(x)), targets) / bmt.world_size()).backward()
        if rank == bmt.rank():
            linear_cross_entropy(model.body(x), model.head.weight, targets, model.head.bias).backward()
    check_gradients(model, twin)


def spent() -> list[bool]:
    """Whether the head's gradient shard is there: after backward, and once the next loss follows zero_grad."""
    with buffers(own=True):
        model = bmt.auto_wrap(Language())
    gradient = model.head.weight.buffer.gradient
    outside(model, 0, 0).backward()
    seen = [gradient.shard is not None]
    model.zero_grad()
    outside(model, 0, 0)
    return [*seen, gradient.shard is not None]


@full
@pytest.mark.parametrize("size", [2, *in_full(1)])
def test_a_gradient_that_was_used_is_freed_in_the_next_forward(world, size):
    assert world(size)(spent)[0] == [True, False]
