"""torch's own analyser of the Flight Recorder reads what the ranks dump, and finds in what they differ."""

import os
import pickle
import time

import pytest

import hf_bmtrain as bmt
from hf_bmtrain.engine.comm.collective_log import KEPT, Journal, code
from hf_bmtrain.faults import flight_recorder
from ranks import Ranks
from twins import Tower, ids

analyser = pytest.importorskip("torch.distributed.flight_recorder.fr_trace")
NAMES = {0: "'layers.0.weight'", 1: "'layers.1.weight'"}
STEP = [code("gather of", 0), code("all-gather", 96), code("gather of", 1), code("all-gather", 96)]
STEP += [code("reduce-scatter", 96), code("all-reduce", 1), code("broadcast", 7)]


def collectives(folder) -> list:
    """What the analyser makes of the dumps in `folder`."""
    analyser.main([str(folder), "-o", str(folder.parent / "database")])
    with open(folder.parent / "database", "rb") as file:
        return pickle.load(file)[1].collectives


def compared(folder, *ranks) -> list:
    """The same, of ranks that have issued these entries to one communicator. Those with the most wait for others."""
    counts = [*map(len, ranks)]
    first = flight_recorder.first_of(counts)
    for rank, issued in enumerate(ranks):
        journal = Journal("gather")
        for entry in issued:
            journal.note(entry)
        words = lambda entry: NAMES.get(entry, str(entry))  # noqa: E731
        waits = len(issued) > min(counts)
        entries = flight_recorder.entries_of(journal, "gloo", len(ranks), first, waits, words)
        flight_recorder.write(str(folder / "dumps" / f"rank_{rank}"), rank, len(ranks), entries)
    return collectives(folder / "dumps")


def test_equal_ranks_match(tmp_path):
    found = compared(tmp_path, STEP, STEP)
    assert [each.collective_seq_id for each in found] == [*range(1, len(STEP) + 1)]
    assert all(each.pass_check and each.missing_ranks is None for each in found)
    kinds = "barrier _all_gather_base barrier _all_gather_base _reduce_scatter_base all_reduce broadcast".split()
    assert [each.collective_name for each in found] == [f"gloo:{kind}" for kind in kinds]


def test_a_rank_that_is_behind_is_found(tmp_path):
    found = compared(tmp_path, STEP[:-1], STEP[:-1], STEP)
    assert found[-1].missing_ranks == {0, 1} and found[-1].collective_state == "scheduled"
    assert all(each.pass_check and each.missing_ranks is None for each in found[:-1])


@pytest.mark.parametrize("other", [code("all-gather", 48), code("gather of", 1), code("all-reduce", 96)])
def test_another_operation_is_found(tmp_path, other):
    found = compared(tmp_path, STEP * 2, [*STEP, other, *STEP[1:]])
    first = next(each for each in found if not each.pass_check)
    assert first.collective_seq_id == len(STEP) + 1 and len(first.mismatch_collectives) == 1


def test_long_journals_begin_alike(tmp_path):
    """What only one of them keeps is left out."""
    count = KEPT // len(STEP) * 3
    found = compared(tmp_path, STEP * count, STEP * count + STEP[:3])
    assert KEPT // 2 < len(found) < KEPT and all(each.missing_ranks is None for each in found[:-3])


def stopped(folder, layers):
    os.environ["TORCH_FR_DUMP_TEMP_FILE"] = f"{folder}/stopped/rank_"
    model = bmt.auto_wrap(Tower())
    model(ids(0, bmt.rank())).backward()
    bmt.current_world().watch.dump(f"{folder}/asked/rank_{bmt.rank()}")
    with pytest.raises(RuntimeError, match="the ranks do different things"):
        model(ids(1, bmt.rank()), layers[bmt.rank()]).backward()
    end = time.monotonic() + 20  # the watch writes the dump, while this process goes on
    while not os.path.exists(f"{folder}/stopped/rank_{bmt.rank()}") and time.monotonic() < end:
        time.sleep(0.1)


def test_ranks_dump_when_asked_and_when_they_are_stopped(tmp_path):
    ranks = Ranks(2)
    try:
        ranks(stopped, str(tmp_path), [[0, 1, 2], [0, 2]])
    finally:
        ranks.stop()
    asked = collectives(tmp_path / "asked")
    assert len(asked) > 20 and all(each.pass_check for each in asked)
    assert {each.group_id for each in asked} == {"control", "gather", "reduce"}
    names = {frame["name"] for each in asked for frame in each.collective_frames}
    assert "'auto_wrap'" in names and any(name.startswith("gather of 'layers.1.") for name in names)
    different = next(each for each in collectives(tmp_path / "stopped") if not each.pass_check)
    both = [different, *different.mismatch_collectives.values()]  # the analyser may begin with either rank
    names = {each.collective_frames[0]["name"] for each in both}
    assert len(names) == 2 and any(name.startswith("gather of 'layers.1.") for name in names)
