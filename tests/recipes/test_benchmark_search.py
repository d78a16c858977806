"""The search for the largest batch, and the agreement of ranks on a failure, on CPU."""

import dataclasses
import gc
import os
import time

import pytest
import torch
from torch.distributed.tensor import DTensor

from bench import search as batch_search
from bench.engines.registry import ENGINES
from bench.models import make_config
from bench.options import parse
from bench.ranks import RanksApart, attempt, free_memory, mapped_bytes, meet
from bench.search import largest_batch, search
from cases import full, in_full, rows_in_full
from ranks import Ranks

TINY = ("--model", "tiny", "--seq", "8", "--batch", "2", "--largest-batch")
CPU = torch.device("cpu")


@pytest.mark.parametrize("first", [8, *in_full(1, 32)])
@pytest.mark.parametrize("limit", [0, 27, *in_full(3, 66)])
def test_largest_batch_is_found(first, limit):
    asked = []

    def fits(batch: int) -> bool:
        asked.append(batch)
        return batch <= limit

    assert largest_batch(fits, first) == (limit if limit < 4 else limit // 4 * 4)
    assert len(asked) == len(set(asked)) <= 14


def searched(limit: int, failing: tuple[int, ...]):
    """Search with an engine whose second step runs out of memory above `limit` rows on the ranks `failing`."""
    real, cell, seen = ENGINES["ours"], parse(TINY)[0][0], []

    def scarce(cell, config, device):
        engine, before = real(cell, config, device), []

        def step(batch):
            loss, rows = engine.step(batch), len(batch["labels"])
            before.append(rows)
            if rows > limit and before.count(rows) == 2 and rank() in failing:
                raise torch.OutOfMemoryError("CUDA out of memory: Tried to allocate 2 GiB")
            return loss

        return dataclasses.replace(engine, step=step)

    batch_search.ENGINES["ours"] = scarce
    try:
        return search(cell, "ours", CPU, lambda report: seen.append(report["largest_batch"])), seen
    except RanksApart as error:
        return str(error), seen
    finally:
        batch_search.ENGINES["ours"] = real


@pytest.mark.parametrize(("given", "limit"), [("4", 4e9), *rows_in_full([("100", 8e10 - batch_search.RESERVE)])])
def test_a_search_keeps_to_the_memory_limit(monkeypatch, given, limit):
    told = []
    monkeypatch.setattr(batch_search, "meet", lambda value: [value])
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(8e10), int(8e10)))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: told.append(share))
    [cell] = parse((*TINY, "--memory-limit", given))[0]
    trials = batch_search.Trials(cell, torch.device("cuda"))
    trials._limit()
    assert trials.limit == limit and told == [limit / 8e10]


def rank() -> int:
    return int(os.environ["RANK"])


def test_search_on_two_ranks(world):
    for report, seen in world(2)(searched, 12, (0, 1)):
        assert report["largest_batch"] == report["batch"] == 12
        assert [(trial["batch"], trial["fits"]) for trial in report["trials"]] == [
            (2, True), (4, True), (8, True), (16, False), (12, True),
        ]  # fmt: skip
        assert report["job"] == "tiny largest batch x8 2 ranks"
        assert seen == [2, 4, 8, 8, 12]  # written after every trial


@pytest.fixture(scope="module")
def own():
    """Two ranks of this file's own, because its tests leave them at different points."""
    ranks = Ranks(2)
    yield ranks
    ranks.stop()


@full
def test_one_rank_out_of_memory_ends_the_search(own):
    for told, seen in own(searched, 4, (1,)):
        assert "rank 0: fine; rank 1: out of memory" in told
        assert seen == [2, 4]


def absent(late: int) -> str:
    """Rank `late` comes too late; the other one stops waiting."""
    try:
        time.sleep(3 * (rank() == late))
        meet("here", patience=1)
    except RanksApart as error:
        return str(error)
    return "met"


@full
@pytest.mark.parametrize("late", [1, *in_full(0)])
def test_a_rank_that_does_not_come_is_told(own, late):
    assert own(absent, late)[1 - late] == "not every rank came within 1 s; this one has: here"


def failing(text: str, ranks: tuple[int, ...]) -> tuple:
    def action() -> int:
        if rank() in ranks:
            raise ValueError(text)
        return 7

    return attempt(action)


@full
def test_attempts_agree(world):
    assert world(2)(failing, "", ()) == [(7, None)] * 2
    assert world(2)(failing, "a\nb", (0, 1)) == [(None, "ValueError: a b")] * 2
    assert world(2)(failing, "CUDA error: out of memory", (0, 1)) == [(None, "out of memory")] * 2


def bytes_left(engine: str, fail: bool) -> tuple[int, int, int]:
    """Return (bytes of tensors while an engine exists, their increase after it, bytes that other ranks have mapped)."""
    free_memory()
    before = tensor_bytes()
    peak = trained(engine, fail)
    free_memory()
    return peak, tensor_bytes() - before, mapped_bytes()


def trained(engine: str, fail: bool) -> int:
    config = make_config("tiny", 8)
    peak = 0

    def action() -> None:
        nonlocal peak
        built = ENGINES[engine](dataclasses.replace(parse(TINY)[0][0], engine=engine), config, CPU)
        ids = torch.arange(16).view(2, 8)
        built.step({"input_ids": ids, "labels": ids})
        peak = tensor_bytes()
        if fail:
            built.step({"input_ids": ids, "labels": ids + 512})  # beyond the vocabulary: fails in the middle

    result, problem = attempt(action)
    assert (problem is not None) == fail
    return peak


def tensor_bytes() -> int:
    storages = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor) and not isinstance(thing, DTensor) and not thing.is_meta:
            storage = thing.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


@full
@pytest.mark.parametrize("fail", [True, *in_full(False)], ids=["after a failure", "after steps"])
@pytest.mark.parametrize("engine", ["ours", *in_full("fsdp2", "ddp")])
def test_memory_comes_back(world, engine, fail):
    for peak, left, _ in world(2)(bytes_left, engine, fail):
        assert peak > 1e6
        assert left < 0.02 * peak


@full
def test_mapped_shards_come_back():
    ranks = Ranks(2, gather="peer")
    try:
        for peak, left, mapped in ranks(bytes_left, "ours", False):
            assert (left < 0.02 * peak) and mapped == 0
    finally:
        ranks.stop()
