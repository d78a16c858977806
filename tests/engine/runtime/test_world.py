"""Joining a world, and what is refused."""

import os
import re
import subprocess
import sys
from datetime import timedelta
from unittest import mock

import pytest
import torch

import hf_bmtrain as bmt
from cases import full, in_full, in_slow
from hf_bmtrain.engine.runtime import backend
from hf_bmtrain.engine.runtime.launcher import seed_everything
from hf_bmtrain.engine.runtime.monitor import Monitor
from ranks import Ranks, free_port

INIT = "import hf_bmtrain as bmt; bmt.init_distributed(); print(bmt.rank(), bmt.world_size())"
MISUSES = [
    ("import hf_bmtrain as bmt; bmt.synchronize()", {}, "Call hf_bmtrain.init_distributed() first"),
    ("import hf_bmtrain as bmt, torch; bmt.auto_wrap(torch.nn.Linear(2, 2))", {}, "init_distributed() first"),
    ("import hf_bmtrain as bmt; bmt.init_distributed(zero_level=1)", {}, "zero_level must be 2"),
    (INIT, {"WORLD_SIZE": "2"}, "RANK=None does not fit WORLD_SIZE=2"),
    (INIT, {"WORLD_SIZE": "2", "RANK": "2"}, "RANK=2 does not fit"),
    (INIT, {"WORLD_SIZE": "two", "RANK": "0"}, "must be integers"),
    (INIT, {"WORLD_SIZE": "2", "RANK": "0"}, "not set: MASTER_ADDR and MASTER_PORT"),
]
LAUNCH = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"]


def run(code, **variables):
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCH}
    environment.update(ACCELERATE_USE_CPU="true", **variables)
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)


@full
def test_plain_python_is_a_world_of_one():
    assert run(INIT).stdout.strip() == "0 1"


@full
@pytest.mark.parametrize(("code", "variables", "message"), MISUSES)
def test_misuse_is_one_clear_error(code, variables, message):
    result = run(code, **variables)
    assert result.returncode == 1
    assert message in result.stderr.strip().splitlines()[-1]


NUMPY = """
import numpy, hf_bmtrain as bmt
numbers = {name: numpy.int64(value) for name, value in dict(loss_scale_steps=8, pipe_size=1, tp_size=1).items()}
bmt.init_distributed(seed=numpy.int64(3), timeout=numpy.int64(900), loss_scale_factor=numpy.float32(2), **numbers)
world = bmt.current_world()
print(type(world.loss_scale_factor).__name__, type(world.loss_scale_steps).__name__)
"""


def test_numbers_of_numpy():
    """They passed the checks of the arguments, and were then refused by `random` and `datetime`."""
    assert run(NUMPY).stdout.split() == ["float", "int"]


@pytest.mark.parametrize("seed", [0, 2**64 - 1])
def test_the_seed_of_every_rank_is_one_that_torch_accepts(seed):
    with mock.patch.object(torch.cuda, "manual_seed") as seeded, mock.patch.object(torch, "manual_seed"):
        for rank in range(3):
            seed_everything(seed, rank, torch.device("cuda"))
    seeds = [call.args[0] for call in seeded.call_args_list]
    assert len(set(seeds)) == 3 and all(each < 2**64 for each in seeds)


@pytest.mark.parametrize("given", [None, "1"])
def test_torch_does_not_ask_the_store_for_timeouts_unless_told_to(monkeypatch, given):
    """Its threads would log errors that name no rank when rank 0, which serves the store, is killed."""
    name, seen = backend._TRACE_ON_TIMEOUT, []
    monkeypatch.delenv(name, raising=False)
    if given is not None:
        monkeypatch.setenv(name, given)
    monkeypatch.setattr(backend.dist, "init_process_group", lambda *args, **kwargs: seen.append(os.environ[name]))
    arguments = (torch.device("cuda"), timedelta(seconds=1), "tcp://127.0.0.1:1", Monitor())
    backend._join(0, 2, *arguments)
    assert seen == [given or "0"] and os.environ.get(name) == given


JOINS = """
import torch.distributed as dist, hf_bmtrain as bmt
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:{port}", rank={rank}, world_size=2)
bmt.init_distributed()
print(bmt.rank(), bmt.world_size())
dist.destroy_process_group()
"""


@full
def test_joins_a_process_group_that_is_up():
    port = free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", JOINS.format(port=port, rank=rank)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    results = [process.communicate(timeout=120) for process in processes]
    assert [out.strip() for out, _ in results] == ["0 2", "1 2"]
    assert not any("Traceback" in errors for _, errors in results)  # nor at exit, when the group has gone


LEAVES = """
import atexit, os, pathlib, time

def count():  # registered first, so it runs last
    names = [task.joinpath("comm").read_text() for task in pathlib.Path("/proc/self/task").iterdir()]
    print(sum("gloo" in name for name in names), flush=True)

atexit.register(count)
import torch, torch.distributed as dist
import hf_bmtrain as bmt
bmt.init_distributed()
bmt.synchronize()
torch.optim.SGD([torch.zeros(1, requires_grad=True)])  # imports what keeps the default group that it finds
count()

def gather():
    return bmt.current_world().gather.all_gather(torch.empty(2), torch.ones(1))

{end}
"""
DESTROYS = "dist.destroy_process_group()"
ANOTHER = "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)"
DROPS = """
bmt.synchronize()
if bmt.rank() == 0:
    gather()  # nobody waits for it, and rank 1 comes later
else:
    time.sleep(0.5)
    gather().wait()
dist.destroy_process_group()
"""
ENDS = [
    pytest.param("", 0, 0, id="nothing"),
    pytest.param(DESTROYS, 0, 0, id="destroys the default group"),
    pytest.param(DROPS, 0, 0, id="drops an operation"),
    # What is not ours to end: a default group of the user's, and one that may still wait for another rank.
    pytest.param(f"{DESTROYS}\n{ANOTHER}", 0, 3, id="makes another default group"),
    pytest.param("raise ValueError", 1, 3, id="raises"),
]


def launch(code: str, size: int) -> list[subprocess.Popen[str]]:
    """A process a rank, as Slurm starts them."""
    world = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment = {**os.environ, **world, "ACCELERATE_USE_CPU": "true"}
    return [
        subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True,
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(size)
    ]  # fmt: skip


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are counted in /proc")
@full
@pytest.mark.parametrize(("end", "code", "left"), ENDS)
def test_no_thread_of_a_lane_outlives_the_exit(end, code, left):
    """One that drops a tensor while the interpreter ends aborts the process: in one run of six it did."""
    for process in launch(LEAVES.format(end=end), 2):
        before, after = process.communicate(timeout=120)[0].split()
        assert process.returncode == code and int(before) > left >= int(after)  # a young thread has no name yet


RETRIES = """
import atexit, pathlib, threading

def count():  # registered first, so it runs last
    names = [task.joinpath("comm").read_text() for task in pathlib.Path("/proc/self/task").iterdir()]
    print(sum("gloo" in name for name in names), flush=True)

atexit.register(count)
import hf_bmtrain as bmt
import hf_bmtrain.bmtrain.init as init
try:
    bmt.init_distributed(gather="two-level")
except RuntimeError as error:
    assert "there is one host" in str(error)

def fail(*arguments):
    raise OSError

init.make_grid, make = fail, init.make_grid
try:
    bmt.init_distributed(tp_size=2)
except OSError:
    init.make_grid = make
bmt.init_distributed()
bmt.synchronize()
print(sum(thread.name == "hf_bmtrain watch" for thread in threading.enumerate()))
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are counted in /proc")
def test_a_refused_start_leaves_nothing_to_the_next():
    """Its watch reported everything twice, and could end the process; nobody destroyed its process group."""
    for process in launch(RETRIES, 2):
        assert process.communicate(timeout=120)[0].split() == ["1", "0"] and process.returncode == 0


STAYS = """
import os, time, torch
import hf_bmtrain as bmt
bmt.init_distributed()
if bmt.rank() == 1:
    time.sleep(12)
    os._exit(0)
bmt.current_world().gather.all_gather(torch.empty(2), torch.ones(1))
torch.distributed.destroy_process_group()
"""


@full
def test_a_rank_leaves_without_one_that_never_comes():
    stays = launch(STAYS, 2)
    stays[0].communicate(timeout=120)
    assert stays[0].returncode == 0 and stays[1].poll() is None
    stays[1].communicate(timeout=120)


MISSING = """
import os, time
import hf_bmtrain as bmt
bmt.init_distributed()
world, absent = bmt.current_world(), int({absent})
world.barrier("begin")
begin = time.monotonic()
if world.rank == absent:
    time.sleep(9)
    os._exit(0)
try:
    world.barrier("save", seconds=2)
except RuntimeError as error:
    print(f"{{time.monotonic() - begin:.0f}} {{error}}", flush=True)
os._exit(0)
"""


@full
@pytest.mark.parametrize("absent", [1, *in_slow(0)])
def test_a_rank_that_does_not_come_is_missed_on_all_others(absent):
    told = [process.communicate(timeout=120)[0] for process in launch(MISSING.format(absent=absent), 3)]
    assert told[absent] == ""
    for rank in {0, 1, 2} - {absent}:
        assert f"rank {rank}: 'save' needs every rank" in told[rank] and int(told[rank].split()[0]) < 8
        assert f"rank {absent} is at <string>" in told[rank]


@full
@pytest.mark.parametrize("absent", [1, *in_slow(0)])
def test_a_rank_that_does_not_come_to_the_start_is_named(absent):
    """The last one starts late, so that its time is not up when the first one gives up."""
    port, processes = free_port(), []
    for rank in {0, 1, 2} - {absent}:
        place = {"RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        environment = {**os.environ, **place, "ACCELERATE_USE_CPU": "true", "HF_BMTRAIN_HANG_SECONDS": "10"}
        late = 3 if rank == 2 else 0
        code = f"import time, hf_bmtrain as bmt; time.sleep({late})\nbmt.init_distributed(timeout=16)"
        processes.append(subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE))
    told = [process.communicate(timeout=120)[1].decode() for process in processes]
    first = min({0, 1, 2} - {absent})
    warning = (
        rf"rank {first} has been waiting for \d+ s in init_distributed, at <string>:2 .*. Missing: rank {absent}\."
    )
    assert re.search(warning, told[0])
    assert all(f"not all of the 3 ranks reached init_distributed. Missing: rank {absent}." in text for text in told)
    assert [process.returncode for process in processes] == [1, 1]


def results():
    rank, size = bmt.rank(), bmt.world_size()
    assert bmt.sum_loss(torch.tensor(float(rank), dtype=torch.bfloat16)).item() == (size - 1) / 2
    for dtype in (torch.float32, torch.bfloat16, torch.int32, torch.int64, torch.bool):
        gathered = bmt.gather_result(torch.full((2, 3), rank, dtype=dtype))
        assert gathered.shape == (2 * size, 3)
        assert torch.equal(gathered, torch.arange(size).repeat_interleave(2)[:, None].expand(-1, 3).to(dtype))
    assert bmt.gather_result(torch.tensor(rank)).tolist() == list(range(size))
    assert bmt.gather_result(torch.empty(0)).shape == (0,)
    if size > 1:
        with pytest.raises(ValueError, match=r"rank 1: \(2,\)"):
            bmt.gather_result(torch.zeros(rank + 1))
    bmt.synchronize()


def printed():
    import contextlib
    import io

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        bmt.print_rank("here")
        bmt.print_rank("there", rank=1)
    return out.getvalue()


@pytest.mark.parametrize("size", [2, *in_full(1, 3)])
def test_results(world, size):
    world(size)(results)
    assert world(size)(printed) == ["here\n", "there\n", ""][:size]


def different_places():
    world = bmt.current_world()
    with pytest.raises(RuntimeError, match=r"rank 0: 'save'(.|\n)*rank \d: 'load'(.|\n)*call it on every rank"):
        world.barrier("save" if bmt.rank() == 0 else "load")


@full
@pytest.mark.parametrize("size", [2, *in_full(3)])
def test_ranks_at_different_places_are_told_of_it(size):
    """They would take each other's arrival for their own, and go on."""
    ranks = Ranks(size)
    ranks(different_places)
    ranks.stop()
