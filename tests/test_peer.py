"""Gathers by pulling: the engine's own cases, unequal forwards, and what must not be read half written."""

import gc
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import hf_bmtrain as bmt
import test_block
import test_reads
import test_users
from hf_bmtrain.lanes import GATHERS
from hf_bmtrain.peer import PeerCommunicator
from parity import cells, measure
from ranks import Ranks
from twins import Tower, check_gradients, check_twins, ids


@pytest.fixture(scope="module")
def peers() -> Iterator[Callable[[int], Ranks]]:
    worlds: dict[int, Ranks] = {}
    yield lambda size: worlds.setdefault(size, Ranks(size, gather="peer"))
    for ranks in worlds.values():
        ranks.stop()


def lane() -> Any:
    gather = bmt.current_world().step.gather
    assert isinstance(gather, PeerCommunicator)
    return gather


def wrapped() -> Any:
    return bmt.auto_wrap(Tower())


def weights_are_pulled():
    """No collective below takes part in a step's gathers but the one that publishes."""
    model = wrapped()
    calls = []
    below = lane()._below
    original = below.all_gather
    below.all_gather = lambda *operands: calls.append(operands) or original(*operands)
    try:
        model(ids(0, bmt.rank())).backward()
    finally:
        del below.all_gather
    assert not calls


def unequal_forwards():
    """Ranks that evaluate 1, 3 and 0 times between steps finish, with equal logits and gradients."""
    model, twin = wrapped(), Tower()
    optimizer, plain = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin))
    size, rank = bmt.world_size(), bmt.rank()
    for step in range(3):
        with torch.no_grad():
            for extra in range([1, 3, 0][rank]):
                torch.testing.assert_close(model(ids(50 + extra, 0)), twin(ids(50 + extra, 0)))
        model(ids(step, rank)).backward()
        torch.stack([twin(ids(step, other)) for other in range(size)]).mean().backward()
        check_gradients(model, twin)
        for either in (optimizer, plain):
            either.step()
            either.zero_grad()


def write_after_a_forward():
    """A slower rank may still read: refused, unless the ranks have met."""
    model = wrapped()
    model(ids(0, 0)).detach()
    with torch.no_grad():
        model.head.weight.mul_(2)
    with pytest.raises(RuntimeError, match="half written") as refusal:
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
    def kept() -> int:
        return len(lane()._shared)

    gc.collect()
    model = wrapped()
    first = kept()
    held = model.layers[0].linear.weight.detach()
    before = held.clone()
    del model
    gc.collect()
    check_twins(Tower, lambda m, step, rank: m(ids(step, rank)))
    gc.collect()
    bmt.auto_wrap(Tower())
    assert kept() <= 2 * first
    assert torch.equal(held, before)


OWN = [weights_are_pulled, unequal_forwards, write_after_a_forward, loaded_after_a_forward]
OWN += [dropped_shards_are_given_back]
WRITE = {"weights_changed_before_backward", "weights_changed_under_one_block", "weights_written_between_forwards"}
BLOCKS = [
    (case, options)
    for case in test_block.CASES
    if case.__name__ not in WRITE  # refused here, see write_after_a_forward
    for options in test_block.OPTIONS
]
BORROWED = [*test_reads.CASES, *BLOCKS, (test_users.data_is_written,), (test_users.masters_follow_a_load,)]
CELLS = [c for c in cells(2) if c.family in ("llama", "t5") and c.accumulation == 1]


@pytest.mark.parametrize("case", OWN, ids=lambda case: case.__name__)
@pytest.mark.parametrize("size", [2, 3])
def test_peer(peers, size, case):
    peers(size)(case)


@pytest.mark.parametrize("case", BORROWED, ids=lambda case: "-".join(str(getattr(c, "__name__", c)) for c in case))
def test_engine(peers, case):
    peers(2)(*case)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.label())
def test_parity(peers, cell):
    errors = peers(2)(measure, cell)[0]
    assert errors.loss <= 1
    assert errors.gradient <= 1
