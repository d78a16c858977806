"""The benchmark's ranks: start, agreement on failures, freeing of memory, end."""

import gc
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist

import hf_bmtrain as bmt
from bench.engines.registry import OWN_GROUP

Result = TypeVar("Result")
OUT_OF_MEMORY = "out of memory"
PATIENCE = 60.0
"""Seconds that a rank which has failed or finished waits for the others."""


def start(engines: Iterable[str], gather: str, shard_over: str) -> torch.device:
    """Initialize hf_bmtrain, and torch's process group first if one of the engines needs it. Return the device."""
    if set(engines) - set(OWN_GROUP):
        join_group()
    bmt.init_distributed(seed=0, gather=gather, shard_over=shard_over)
    return bmt.current_world().device


def join_group() -> None:
    """Initialize torch's process group of all ranks that a launcher started, or else of this process alone."""
    alone = {}
    if "RANK" not in os.environ:
        # DeepSpeed reads this variable.
        os.environ["LOCAL_RANK"] = "0"
        alone = {"store": dist.TCPStore("127.0.0.1", 0, 1, is_master=True), "rank": 0, "world_size": 1}
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", **alone)


class RanksApart(RuntimeError):
    """The ranks stopped at different points: no further collective is possible in these processes."""


def attempt(action: Callable[[], Result], patience: float = PATIENCE) -> tuple[Result | None, str | None]:
    """Return (result of `action`, None), or (None, reason) if it failed on every rank. Collective.

    Raises RanksApart if the ranks failed in different ways, only some failed, or one does not return within `patience`
    seconds.
    """
    result, problem, kind = None, None, "fine"
    try:
        result = action()
    except Exception as error:  # engines raise errors of many types
        kind = OUT_OF_MEMORY if ran_out_of_memory(error) else type(error).__name__
        problem = kind if kind == OUT_OF_MEMORY else f"{kind}: {_one_line(error)}"
        if kind != OUT_OF_MEMORY and bmt.rank() == 0:
            traceback.print_exc()
        traceback.clear_frames(error.__traceback__)  # they hold the tensors of the step
    kinds, problems = zip(*meet((kind, problem), patience))
    if len(set(kinds)) > 1:
        told = "; ".join(f"rank {rank}: {problem or 'fine'}" for rank, problem in enumerate(problems))
        raise RanksApart(f"the ranks ended differently ({told})")
    if problem is not None:
        drain(patience)
        return None, problems[0]
    return result, None


def meet(value, patience: float = PATIENCE) -> list:
    """Return every rank's value. Raises RanksApart if a rank does not call within `patience` seconds. Collective."""
    values: list = []
    # In a thread, because torch's barrier honours its time limit on rank 0 only.
    waiter = threading.Thread(target=lambda: values.extend(bmt.current_world().gather_objects(value)), daemon=True)
    waiter.start()
    waiter.join(patience)
    if waiter.is_alive() or not values:
        raise RanksApart(f"not every rank came within {patience:.0f} s; this one has: {value}")
    return values


def drain(patience: float) -> None:
    """Wait for the device. Raises RanksApart if a queued collective waits for a rank that never entered it."""
    device = bmt.current_world().device
    stuck = False
    if device.type == "cuda":
        waiter = threading.Thread(target=torch.cuda.synchronize, args=(device,), daemon=True)
        waiter.start()
        waiter.join(patience)
        stuck = waiter.is_alive()
    if any(meet(stuck, patience)):
        raise RanksApart("the device of a rank still waits for a collective that another rank never entered")


def ran_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` reports a lack of memory, whatever its type: libraries raise errors of their own."""
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower()


def free_memory() -> float:
    """Free the memory of the last engine. Return the GB still allocated on this device. Collective."""
    world = bmt.current_world()
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()  # else the next shape would be compiled as a dynamic one
    world.schedule.discard_failed_backward()
    gc.collect()
    bmt.synchronize()
    if world.device.type != "cuda":
        return 0.0
    torch.cuda.set_per_process_memory_fraction(1.0, world.device)
    torch.cuda.empty_cache()
    return held_bytes() / 1e9


def held_bytes() -> int:
    """Return the bytes of tensors on the device, including those that other ranks have mapped."""
    return torch.cuda.memory_allocated() + mapped_bytes()


def mapped_bytes() -> int:
    """Return the bytes of shards outside torch's allocator."""
    return bmt.current_world().schedule.mapped_bytes


def end_together(status: int) -> NoReturn:
    """End all ranks' processes at once: the clean-up of some libraries' threads and communicators hangs. Collective."""
    meet(status)
    end_alone(status)


def end_alone(status: int) -> NoReturn:
    """End this process without waiting for other ranks. After a failure the launcher ends the others."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:500]
