"""Gathers and reductions by copies: unequal ranks, what must not be read partly written."""

import dataclasses
import gc
import os
import random
import re
import time
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import hf_bmtrain as bmt
import twins
from cases import by_default, in_full
from hf_bmtrain.engine.comm import peer_reduce as reducing
from hf_bmtrain.engine.comm.peer_memory import HostMemory
from hf_bmtrain.engine.comm.peer_reduce import MAILBOXES, PeerReduction
from hf_bmtrain.engine.comm.resizable import shares_storage
from hf_bmtrain.engine.ops.peer_sum import peer_mean
from hf_bmtrain.engine.optim import manager
from hf_bmtrain.engine.runtime.backend import GATHERS
from hf_bmtrain.engine.runtime.world import simulated
from inner import peer_gather, peer_reduction
from twins import Tower, check_gradients, check_twins, compare_backward, ids, tower_loss


def wrapped() -> Any:
    return bmt.auto_wrap(Tower())


def weights_are_pulled():
    """No collective below takes part in a step's gathers but the one that publishes."""
    model = wrapped()
    calls = []
    below = peer_gather().communicator
    original = below.all_gather
    below.all_gather = lambda *operands: calls.append(operands) or original(*operands)
    try:
        model(ids(0, bmt.rank())).backward()
    finally:
        del below.all_gather
    assert not calls


def what_a_rank_owns_is_not_copied():
    """A parameter that lies in one shard is read there on its rank; only parts of the others come into the buffer."""
    model = wrapped()
    buffers = {piece.buffer for piece in model.parameters()}
    pulled: list[int] = []
    original, whole = HostMemory.copy, 0

    def pull(memory, pairs):
        pulled.append(sum(target.nbytes for target, _ in pairs[-1]))
        return original(memory, pairs)

    for buffer in buffers:
        for index, parameter in enumerate(buffer.full_params):
            owned = buffer.local_ranges[index].length == parameter.numel()
            assert shares_storage(parameter, buffer.shard) == owned
            whole += owned
    assert sum(bmt.current_world().gather_objects(whole)) > 0
    with mock.patch.object(HostMemory, "copy", pull):
        for buffer in buffers:
            with buffer.unsharded():
                pass
    sizes = [stop - start for b in buffers for start, stop in b.layout.cut_ranges(b.rank)]
    assert sum(pulled) == 4 * sum(sizes) < 4 * sum(buffer.shard.numel() for buffer in buffers)


def unequal_forwards():
    """Ranks that evaluate 1, 3 and 0 times between steps finish, with equal logits and gradients."""
    model, twin = wrapped(), Tower()
    optimizer, plain = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin))
    rank = bmt.rank()
    for step in range(3):
        with torch.no_grad():
            for extra in range([1, 3, 0][rank]):
                torch.testing.assert_close(model(ids(50 + extra, 0)), twin(ids(50 + extra, 0)))
        compare_backward(model, twin, tower_loss, step)
        for either in (optimizer, plain):
            either.step()
            either.zero_grad()


def write_after_a_forward():
    """A slower rank may still read: refused, unless the ranks have met."""
    model = wrapped()
    model(ids(0, 0)).detach()
    with torch.no_grad():
        model.head.weight.mul_(2)
    with pytest.raises(RuntimeError, match="partly written") as refusal:
        model(ids(0, 0))
    assert re.search(r"gather='(\w+)'", str(refusal.value)).group(1) in GATHERS  # what it advises exists
    bmt.synchronize()
    twin = Tower()
    with torch.no_grad():
        twin.head.weight.mul_(2)
    torch.testing.assert_close(model(ids(0, 0)), twin(ids(0, 0)))


def loaded_after_a_forward():
    model, other = wrapped(), Tower()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    model(ids(0, 0))
    model.load_state_dict(other.state_dict())
    torch.testing.assert_close(model(ids(0, 0)), other(ids(0, 0)))
    piece = model.head.weight
    whole = piece.gather() * 3
    with torch.no_grad():
        piece.copy_(piece.take(whole))
        other.head.weight.mul_(3)
    torch.testing.assert_close(model(ids(0, 0)), other(ids(0, 0)))


def dropped_shards_are_given_back():
    gc.collect()
    model = wrapped()
    first = peer_gather().mapped_bytes
    held = model.layers[0].linear.weight.detach()
    before = held.clone()
    del model
    gc.collect()
    check_twins(Tower, lambda m, step, rank: m(ids(step, rank)))
    gc.collect()
    bmt.auto_wrap(Tower())
    assert peer_gather().mapped_bytes <= 2 * first
    assert torch.equal(held, before)


def gradients_are_pushed():
    """Those of blocks; what lies outside is reduced below in one piece."""
    model = wrapped()
    calls = []
    below = bmt.current_world().reduce
    original = below.reduce_scatter_mean
    with mock.patch.object(below, "reduce_scatter_mean", lambda *each: calls.append(each) or original(*each)):
        model(ids(0, bmt.rank())).backward()
    assert len(calls) == 1
    assert calls[0][0] is model.head.weight.buffer.gradient.shard


def gradients_of(dtype: torch.dtype, backwards: int) -> list[torch.Tensor]:
    model = bmt.auto_wrap(Tower().to(dtype))
    for step in range(backwards):
        model(ids(step, bmt.rank())).backward()
    return [parameter.gather_gradient() for parameter in model.parameters()]


def means_are_those_of_the_collective():
    """To the bit: both add in the order of ranks, in float32. A sum of several takes unrounded means here."""
    step = bmt.current_world().schedule
    for dtype, backwards in [(torch.float32, 1), (torch.float32, 3), (torch.bfloat16, 1), (torch.float64, 2)]:
        pulled = gradients_of(dtype, backwards)
        with mock.patch.object(step, "blocks", step.outside):
            reduced = gradients_of(dtype, backwards)
        assert all(torch.equal(*pair) for pair in zip(pulled, reduced)), (dtype, backwards)
        assert all(torch.equal(*pair) for pair in zip(pulled, gradients_of(dtype, backwards)))


def sums_are_rounded_once():
    """Unrounded means are added up in float32; `.grad` is their sum in bfloat16."""
    model, twin = bmt.auto_wrap(Tower().bfloat16()), Tower().bfloat16()
    size = bmt.world_size()
    total = torch.zeros(twin.layers[1].linear.weight.shape)
    for step in range(3):
        model(ids(step, bmt.rank())).backward()
        rows = []
        for other in range(size):
            twin.zero_grad()
            twin(ids(step, other)).backward()
            rows.append(twin.layers[1].linear.weight.grad.float())
        mean = sum(rows[1:], rows[0]) / size
        total = total + (mean if step else mean.bfloat16())  # the first is kept in `.grad` alone
    assert torch.equal(model.layers[1].linear.weight.gather_gradient(), total.bfloat16())


def squares_come_with_the_mean():
    """The norm reads no gradient that a block's reduction has brought, but those that someone has written since."""
    model, world = wrapped(), bmt.current_world()
    parameters = list(model.parameters())

    def check() -> int:
        with mock.patch.object(manager, "accumulate_squared_norm", wraps=manager.accumulate_squared_norm) as read:
            found = manager.global_norm(parameters, 2, world.reduce, world.device)
        full_params = [parameter.gather_gradient().double() for parameter in parameters]
        expected = torch.stack([whole.square().sum() for whole in full_params]).sum().sqrt()
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
        for parameter, whole in zip(parameters, full_params):
            torch.testing.assert_close(parameter.grad.norm().double(), whole.norm(), rtol=1e-6, atol=0)
        return read.call_count

    with simulated(dataclasses.replace(world, poison=False)):  # its writes are counted, those of a reduction are not
        for step in range(3):
            model(ids(step, bmt.rank())).backward()
            apart = check()
            assert apart == len({p.buffer for p in parameters}) - len(model.layers)
            parameters[1].grad.mul_(3.0)
            assert check() > 0
            model(ids(step + 10, bmt.rank())).backward()  # adds
            assert check() == apart
            model.zero_grad()


def slow_ranks():
    """Ranks that come late to meetings, copy late and add late; blocks used twice, accumulation, five layers."""
    communicator, chance = bmt.current_world().reduce, random.Random(bmt.rank())
    meet, met = communicator.all_reduce, []
    peer_reduction()  # or the test is of another one

    def late(function):
        def call(*arguments):
            time.sleep(chance.choice((0, 0, 0.004, 0.01)))
            return function(*arguments)

        return call

    model, twin = bmt.auto_wrap(Tower(5)), Tower(5)
    size = bmt.world_size()
    with (
        mock.patch.object(communicator, "all_reduce", late(lambda *each: met.append(each) or meet(*each))),
        mock.patch.object(HostMemory, "copy", late(HostMemory.copy)),
        mock.patch.object(reducing, "peer_mean", late(peer_mean)),
    ):
        for step in range(4):
            plan = [0, 1, 1, 2, 3, 4, 0] if step % 2 else None
            for micro in range(1 + step % 2):
                model(ids(10 * micro + step, bmt.rank()), plan).backward()
                losses = [twin(ids(10 * micro + step, other), plan) for other in range(size)]
                torch.stack(losses).mean().backward()
            check_gradients(model, twin)
            for either in (model, twin):
                torch.optim.SGD(either.parameters(), lr=0.1).step()
                either.zero_grad()
    assert len(met) >= 6 * len(model.layers), "no meetings: nothing came late to one"


def largest(model: nn.Module) -> int:
    layouts = [(block.linear.weight.buffer.layout, block.linear.weight.dtype) for block in model.layers]
    return max((layout.world_size - 1) * layout.shard_numel * dtype.itemsize for layout, dtype in layouts)


def slots_are_shared_and_grow():
    """Two models of different widths in turn, one of them dropped: slots are as large as the largest block's."""
    peers = peer_reduction()
    model, twin = wrapped(), Tower()
    with mock.patch.object(twins, "WIDTH", 40):
        wide, wide_twin = wrapped(), Tower()
    for step in range(3):
        for either, plain in [(model, twin), (wide, wide_twin)]:
            either.zero_grad()
            plain.zero_grad()
            compare_backward(either, plain, tower_loss, step)
        assert peers.mapped_bytes == MAILBOXES * max(peers.boxes.nbytes, largest(wide))
        assert peers.boxes.nbytes >= largest(wide) > largest(model)
    slots = [slot.memory.data_ptr() for slot in peers.boxes.boxes]
    del wide, either
    gc.collect()
    check_twins(Tower, lambda m, step, rank: m(ids(step, rank)))
    assert [slot.memory.data_ptr() for slot in peers.boxes.boxes] == slots


def two_blocks_of_gradients_at_most():
    """When the backward of a block begins, autograd's gradients of one other block are there."""
    schedule, sent, seen = bmt.current_world().schedule, [], []
    make_reducer, original = PeerReduction.reducer, schedule.make_room

    def reducer(*arguments):
        made = make_reducer(*arguments)
        send = made.send

        def noting(gradients, *operands):
            sent.append([StorageWeakRef(each.untyped_storage()) for each in gradients])
            return send(gradients, *operands)

        made.send = noting
        return made

    with mock.patch.object(PeerReduction, "reducer", reducer):
        model = bmt.auto_wrap(Tower(6))
    gradients = [buffer.gradient for layer in model.layers for buffer in {p.buffer for p in layer.parameters()}]

    def make_room():
        original()
        kept = sum(not all(storage.expired() for storage in storages) for storages in sent)
        seen.append((sum(gradient.is_pending for gradient in gradients), kept))

    with mock.patch.object(schedule, "make_room", make_room):
        model(ids(0, bmt.rank())).backward()
    assert len(sent) == len(model.layers) == len(gradients)
    assert max(kept for _, kept in seen) == 1
    assert max(is_pending for is_pending, _ in seen) == schedule.blocks.ahead == 1


class Hollow(twins.Layer):
    """One parameter has no elements and is alone in its buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0, 3, dtype=torch.float64))


def parameter_without_elements():
    def make():
        model = Tower()
        model.layers[1] = Hollow()
        return model

    check_twins(make, lambda m, step, rank: m(ids(step, rank)) + m.layers[1].nothing.sum())


def some_ranks_hold_nothing_of_an_update():
    """All ranks see new weights, and meet, where what Adam updates in a buffer lies on some of them alone."""
    model = bmt.auto_wrap(Tower())
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=0.1)
    for step in range(3):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(step == 0 or name in ("head.bias", "layers.0.linear.bias"))
        model(ids(step, bmt.rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
        weights = torch.cat([value.reshape(-1) for value in model.state_dict().values()])
        assert all(torch.equal(weights, other) for other in bmt.current_world().gather_objects(weights))


OWN = [gradients_are_pushed, means_are_those_of_the_collective, sums_are_rounded_once, squares_come_with_the_mean]
OWN += [slow_ranks, slots_are_shared_and_grow, two_blocks_of_gradients_at_most, parameter_without_elements]
OWN += [
    some_ranks_hold_nothing_of_an_update,
    weights_are_pulled,
    what_a_rank_owns_is_not_copied,
    unequal_forwards,
    write_after_a_forward,
    loaded_after_a_forward,
]
OWN += [dropped_shards_are_given_back]


@pytest.mark.parametrize(
    "case",
    by_default(
        OWN, means_are_those_of_the_collective, slow_ranks, some_ranks_hold_nothing_of_an_update, write_after_a_forward
    ),
    ids=lambda case: case.__name__,
)
@pytest.mark.parametrize("size", [2, *in_full(3)])
def test_peer(peers, size, case):
    peers(size)(case)


def test_shared_memory_that_is_too_small(tmp_path):
    """A container's /dev/shm has 64 MB: the process was ended by SIGBUS when it wrote its weights."""
    with mock.patch("os.posix_fallocate", side_effect=OSError(28, "No space left on device")):
        with mock.patch("tempfile.mkstemp", side_effect=lambda **_: (os.open(tmp_path / "f", 66), str(tmp_path / "f"))):
            with pytest.raises(RuntimeError, match=r"4096 bytes of shared memory .*No space left .*--shm-size"):
                HostMemory().allocate(1024, torch.float32)
    assert not list(tmp_path.iterdir())
