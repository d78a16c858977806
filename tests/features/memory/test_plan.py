"""The plan against a step played through: nothing it allows goes over, nothing it refuses would have fitted."""

import itertools
import random

import pytest

from cases import rows_in_full
from hf_bmtrain.features.memory.plan import Sizes, make_plan

INPUT, TEMPORARY = 2, 1


def peaks(activations, parameters, saved, whole, loss, early, late):
    """(others, recomputed): the most that one step takes, apart while a block's activations are there in any case.

    A block's input stays until its backward, and what it keeps: `saved` bytes of its activations. Backward does
    something in a block (early) before the block's activations are needed, and computed again where they were not kept,
    and more after that.
    """
    held, others, recomputed = 0, 0, 0
    for parameter, keeps, stays in zip(parameters, saved, whole):
        others = max(others, held + INPUT + keeps + TEMPORARY + parameter)
        held += INPUT + keeps + parameter * stays
    others = max(others, held + loss)
    for size, parameter, keeps, stays in reversed(list(zip(activations, parameters, saved, whole))):
        gathered = 0 if stays else parameter
        others = max(others, held + early + gathered)
        recomputed = max(recomputed, held + size - keeps + late + gathered)
        held -= INPUT + keeps + parameter * stays
    assert held == 0
    return others, recomputed


def rooms(activations, parameters, limit, loss, early, late):
    none = [False] * len(activations)
    others, recomputed = peaks(activations, parameters, none, none, loss, early, late)
    return limit - others, limit - recomputed


def random_cases(count):
    draw = random.Random(0)
    for _ in range(count):
        blocks = draw.randint(1, 8)
        alike = draw.random() < 0.5
        activations = [draw.randint(1, 12)] * blocks if alike else [draw.randint(0, 12) for _ in range(blocks)]
        parameters = [draw.randint(0, 4)] * blocks if alike else [draw.randint(0, 4) for _ in range(blocks)]
        yield activations, parameters, draw.randint(0, 120)


@pytest.mark.parametrize(
    ("loss", "early", "late"), [(3, 1, 2), *rows_in_full([(20, 0, 0), (0, 12, 1), (0, 0, 12), (0, 0, 0)])]
)
def test_no_plan_exceeds_the_limit(loss, early, late):
    kept = whole = 0
    parts = 0
    for activations, parameters, limit in random_cases(5_000):
        attention = [(size + limit) % (size + 1) for size in activations]
        sizes = Sizes(activations, attention, parameters, attention_first=bool(limit % 2))
        plan = make_plan(sizes, *rooms(activations, parameters, limit, loss, early, late))
        saved = [
            size if keeps else attends * part
            for size, keeps, part, attends in zip(activations, plan.kept, attention, plan.attention)
        ]
        if any(saved):
            most = max(peaks(activations, parameters, saved, plan.full, loss, early, late))
            assert most <= limit, (sizes, limit, plan, most)
        kept, whole, parts = kept + sum(plan.kept), whole + sum(plan.full), parts + sum(plan.attention)
    assert kept > 5_000 and whole > 500 and parts > 500, "the cases allow nothing"


def test_alike_blocks_keep_as_many_as_any_choice_within_the_rooms():
    """All choices of up to eight blocks are tried against the same bounds."""
    for blocks, size, forward, backward in itertools.product(range(1, 9), (3, 5), range(-4, 42, 3), range(-4, 42, 3)):
        best = 0
        for choice in itertools.product((False, True), repeat=blocks):
            total, last = sum(choice) * size, size * choice[-1]
            if forward >= total and backward >= total - last and sum(choice) > best:
                best = sum(choice)
        plan = make_plan(Sizes([size] * blocks, [0] * blocks, [0] * blocks), forward, backward)
        assert sum(plan.kept) == best
        assert list(plan.kept) == [False] * (blocks - best) + [True] * best, "not the last ones"


@pytest.mark.parametrize(
    ("activations", "parameters", "rooms", "kept", "whole"),
    [
        ([5, 5, 5], [1, 1, 1], (17, 99), "111", "011"),
        ([5, 5, 5], [1, 1, 1], (99, 10), "111", "000"),  # of the last block's own 5 backward has room already
        ([5, 50, 5], [1, 1, 1], (20, 20), "101", "000"),  # a large one is passed over; then none stays whole
        *rows_in_full(
            [
                ([5, 5, 5], [1, 1, 1], (14, 99), "011", "000"),
                ([5, 5, 5], [1, 1, 1], (15, 99), "111", "000"),
                ([5, 5, 5], [1, 1, 1], (99, 12), "111", "011"),
                ([5, 5, 5], [1, 1, 1], (99, 9), "011", "000"),
                ([5, 5, 5], [1, 1, 1], (99, 0), "001", "000"),
                ([5, 5, 5], [1, 1, 1], (99, -1), "000", "000"),
                ([5, 5, 5], [1, 1, 1], (-1, 99), "000", "000"),
                ([5, 5, 50], [1, 1, 1], (20, 8), "010", "000"),  # the last one recomputes: all that is kept counts
                ([0, 0], [1, 0], (0, 0), "11", "00"),
                ([0, 0], [1, 0], (1, 1), "11", "10"),  # 0: whole anyway
                ([], [], (1, 1), "", ""),
            ]
        ),
    ],
)
def test_cases(activations, parameters, rooms, kept, whole):
    plan = make_plan(Sizes(activations, [0] * len(activations), parameters), *rooms)
    assert "".join("01"[one] for one in plan.kept) == kept
    assert "".join("01"[one] for one in plan.full) == whole


@pytest.mark.parametrize(
    ("first", "rooms", "kept", "attention"),
    [
        (False, (13, 99), "001", "110"),  # what is left of the room after whole blocks
        (True, (13, 99), "001", "110"),  # all have attention before one is kept
        (True, (11, 99), "000", "111"),
        (False, (11, 99), "001", "010"),
        *rows_in_full([(True, (1, 99), "000", "000"), (True, (99, 2), "001", "010"), (True, (30, 99), "111", "000")]),
    ],
)
def test_what_attention_returns(first, rooms, kept, attention):
    plan = make_plan(Sizes([9, 9, 9], [2, 2, 2], [0, 0, 0], first), *rooms)
    assert "".join("01"[one] for one in plan.kept) == kept
    assert "".join("01"[one] for one in plan.attention) == attention
