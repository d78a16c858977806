"""Ranks that do different things are told so within seconds, by the names of ranks and parameters."""

import time
from unittest import mock

import pytest
import torch

import hf_bmtrain as bmt
from cases import full, rows_in_full
from hf_bmtrain.engine.comm.collective_log import KEPT, SENT, CollectiveLog, code
from hf_bmtrain.faults import watch
from ranks import Ranks
from twins import Tower, ids


def problem_of(function) -> tuple[str, float]:
    begin = time.monotonic()
    with pytest.raises(RuntimeError) as raised:
        function()
    return str(raised.value), time.monotonic() - begin


def train(model, argument) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        model(ids(step, bmt.rank()), argument).backward()
        optimizer.step()
        optimizer.zero_grad()
    bmt.synchronize()


def skipped_layer():
    model = bmt.auto_wrap(Tower())
    return problem_of(lambda: train(model, [0, 2] if bmt.rank() else [0, 1, 2]))


def evaluation_alone():
    """What it gathers, the other rank gathers next, to train."""
    model = bmt.auto_wrap(Tower())
    with torch.set_grad_enabled(bmt.rank() != 0):
        return problem_of(lambda: model(ids(0, bmt.rank())))


def read_without_gradients_on_one_rank() -> bool:
    """Outside forwards the ranks may differ in that."""
    model = bmt.auto_wrap(Tower())
    with torch.set_grad_enabled(bmt.rank() != 0):
        return model.head.weight.gather().shape == model.state_dict()["head.weight"].shape


def other_order():
    model = bmt.auto_wrap(Tower())
    return problem_of(lambda: train(model, [0, 2, 1] if bmt.rank() else [0, 1, 2]))


def waiting_for_each_other():
    model = bmt.auto_wrap(Tower())
    model(ids(0, bmt.rank())).backward()
    with mock.patch.object(watch, "CROSSED_SECONDS", 1.0):
        return problem_of(model.head.weight.gather if bmt.rank() else model.head.weight.grad.norm)


@pytest.mark.parametrize(
    ("gather", "case", "words"),
    [
        ("collective", skipped_layer, ["rank 0: gather of 'layers.1.", "rank 1: gather of 'layers."]),
        ("peer", skipped_layer, ["rank 0: reduction of the gradient of 'layers.1.", "rank 1: "]),
        *rows_in_full(
            [
                (
                    "collective",
                    evaluation_alone,
                    ["rank 0: gather without gradients of 'e", "rank 1: gather of 'embedding."],
                ),
                (
                    "collective",
                    waiting_for_each_other,
                    ["rank 0: all-reduce of", "rank 1: gather of 'embedding.weight' and"],
                ),
                ("peer", other_order, ["rank 0: reduction of the gradient of 'layers.2.", "gradient of 'layers.1."]),
            ]
        ),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_ranks_that_differ_are_told(gather, case, words):
    ranks = Ranks(2, gather=gather)
    try:
        told = ranks(case)
    finally:
        ranks.stop()
    for text, seconds in told:
        assert "the ranks issued different operations" in text and "Every rank must call the same modules" in text
        assert all(each in text for each in words), text
        assert seconds < 15


def decides_otherwise():
    world = bmt.current_world()
    time.sleep(0.5 * world.rank)

    def decide() -> None:
        world.control.note_decision("a stop after step 3" if world.rank else "step 4 after step 3")
        world.barrier("save")

    return problem_of(decide)


@full
def test_ranks_that_decide_otherwise_are_told():
    ranks = Ranks(2)
    try:
        told = ranks(decides_otherwise)
    finally:
        ranks.stop()
    for text, seconds in told:
        assert (
            "the ranks differ in a decision" in text
            and "All ranks must make the same decision at the same step" in text
        )
        assert "rank 0: decision for step 4 after step 3" in text and "rank 1: decision for a stop after step 3" in text
        assert seconds < 8


def test_gradients_may_be_off_on_one_rank_outside_forwards(world):
    assert world(2)(read_without_gradients_on_one_rank) == [True, True]


def noted(entries, collective_log=None) -> CollectiveLog:
    collective_log = collective_log or CollectiveLog("gather")
    for entry in entries:
        collective_log.note(entry)
    return collective_log


def test_the_first_difference_is_found():
    entries = [code("gather of", number) for number in range(30)]
    mine, theirs = noted(entries), noted([*entries[:20], 7, *entries[21:25]])
    found = mine.compare(theirs.excerpt())
    assert (found.number, found.mine, found.theirs, found.first) == (21, entries[20], 7, True)
    assert mine.compare(noted(entries[:9]).excerpt()) is None


@full
def test_a_difference_is_not_forgotten():
    """It shows in the digest of what came later, also in journals that are apart by steps."""
    later = range(3 * SENT)
    mine, theirs = noted([1, *later]), noted([2, *later])
    assert not mine.compare(theirs.excerpt()).first
    noted(range(KEPT - 4 * SENT), mine)
    assert not mine.compare(theirs.excerpt()).first
    same = noted([1, *later])
    assert mine.compare(same.excerpt()) is None
    noted(range(4 * SENT), mine)
    assert mine.compare(theirs.excerpt()) is None  # nothing in common is kept


def test_a_problem_stops_the_next_operation():
    collective_log = CollectiveLog("gather")
    collective_log.problem = "the ranks issued different operations"
    with pytest.raises(RuntimeError, match="different operations"):
        collective_log.note(1)
    assert collective_log.count == 0


def test_a_call_on_one_rank_alone_is_named_first():
    end, trainer = repr(watch.EXIT), "Trainer's save_model() before train()"
    for place, named in ((repr("state_dict"), True), ("forward of block 2", False)):
        advice = watch._advice([place, end])
        assert advice.startswith("If the call is inside `if rank == 0:`, take it out")
        assert "the same number of batches" in advice and (trainer in advice) == named
