"""The ranks of a benchmark: how they start, agree on what happened, and come back to empty memory."""

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
"""Seconds that a rank which has failed, or is done, waits for the others."""


def start(engines: Iterable[str], gather: str) -> torch.device:
    """Join the world: torch's own process group for those that need it, beside the lanes of hf_bmtrain."""
    if set(engines) - set(OWN_GROUP) and torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl")
    bmt.init_distributed(seed=0, gather=gather)
    return bmt.current_world().device


class RanksApart(RuntimeError):
    """Ranks stopped at different places: no collective can follow in these processes."""


def attempt(action: Callable[[], Result], patience: float = PATIENCE) -> tuple[Result | None, str | None]:
    """(what `action` returns, None), or (None, why it failed) where it failed on every rank. Collective.

    RanksApart where ranks failed in different ways, or some did not, or wait in the middle of it: nobody hangs.
    """
    result, problem, kind = None, None, "fine"
    try:
        result = action()
    except Exception as error:  # whatever an engine throws
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
    """Every rank's value; RanksApart where one does not come within `patience` seconds. Collective."""
    values: list = []
    # In a thread, because torch's barrier with a time limit keeps to it on rank 0 alone.
    waiter = threading.Thread(target=lambda: values.extend(bmt.current_world().gather_objects(value)), daemon=True)
    waiter.start()
    waiter.join(patience)
    if waiter.is_alive() or not values:
        raise RanksApart(f"not every rank came within {patience:.0f} s; this one has: {value}")
    return values


def drain(patience: float) -> None:
    """Wait for the device. What still waits for a rank that has stopped would wait for ever: RanksApart."""
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
    """Also where a library says so in its own error."""
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower()


def free_memory() -> float:
    """Drop what the last engine has left behind; the GB that are still held on this device. Collective."""
    world = bmt.current_world()
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()  # or the next shape would be compiled as a dynamic one
    world.schedule.discard_failed_backward()
    gc.collect()
    bmt.synchronize()
    if world.device.type != "cuda":
        return 0.0
    torch.cuda.set_per_process_memory_fraction(1.0, world.device)
    torch.cuda.empty_cache()
    return held_bytes() / 1e9


def held_bytes() -> int:
    """Bytes of tensors on the device, those that other ranks have mapped included."""
    return torch.cuda.memory_allocated() + mapped_bytes()


def mapped_bytes() -> int:
    """Bytes of shards outside of torch's allocator."""
    return bmt.current_world().schedule.mapped_bytes


def end_together(status: int) -> NoReturn:
    """End all ranks' processes at once: threads and communicators of so many libraries do not end well. Collective."""
    meet(status)
    end_alone(status)


def end_alone(status: int) -> NoReturn:
    """End this process without waiting for anyone; after a failure the launcher ends the others."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:500]
