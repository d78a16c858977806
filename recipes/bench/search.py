"""Search for the largest batch whose step fits into memory."""

import dataclasses
import gc
from collections.abc import Callable

import torch

import hf_bmtrain as bmt
from bench.cell import Cell
from bench.clock import timed
from bench.engines.base import Engine
from bench.engines.registry import ENGINES
from bench.measure import speed
from bench.models import make_batch, make_config
from bench.ranks import OUT_OF_MEMORY, attempt, free_memory, mapped_bytes, meet

RESERVE = 1 << 29
"""Bytes per GPU that stay free for allocations outside torch, such as NCCL's."""


def largest_batch(fits: Callable[[int], bool], first: int) -> int:
    """Return the largest batch for which `fits`, from 4 on a multiple of 4; 0 if one row does not fit."""
    good, bad = 0, first
    while fits(bad):
        good, bad = bad, 2 * bad
    while good == 0 and bad > 1:  # not even the first one
        half = bad // 2
        good, bad = (half, bad) if fits(half) else (0, half)
    while True:
        unit = 4 if good >= 4 else 1
        middle = (good + bad) // 2 // unit * unit
        if middle <= good:
            return good
        good, bad = (middle, bad) if fits(middle) else (good, middle)


def search(cell: Cell, name: str, device: torch.device, keep: Callable[[dict], object]) -> dict:
    """Return the report of a search. `keep` is called with it after every trial. Collective."""
    trials = Trials(cell, device)
    report = {"engine": name, "job": cell.job(bmt.world_size()), "largest_batch": 0, "trials": trials.done}

    def fits(batch: int) -> bool:
        good = trials.fits(batch)
        fitting = [trial for trial in trials.done if trial["fits"]]
        if fitting:
            best = max(fitting, key=lambda trial: trial["batch"])
            report.update({**best, "largest_batch": best["batch"], "memory_limit_GB": trials.limit / 1e9})
        keep(report)
        return good

    largest_batch(fits, cell.batch)
    trials.drop()
    return report


class Trials:
    """Trial steps, one batch size after another. done: their results. limit: bytes that torch may allocate.

    The engine is kept as long as its steps fit; torch's cache is emptied before each trial. A failed step leaves the
    engine in the middle of a step, so the next trial builds a new one.
    """

    def __init__(self, cell: Cell, device: torch.device) -> None:
        self._cell, self._device = cell, device
        self._config = make_config(cell.model, cell.seq, cell.layers)
        self._engine: Engine | None = None
        self.done: list[dict] = []
        self.limit = 0

    def fits(self, batch: int) -> bool:
        """Return whether a step of `batch` rows fits. Raises RuntimeError if it fails for another reason."""
        if self._cell.recompute == "auto":
            self.drop()  # its plan is that of another batch
        result, problem = (None, None) if self._engine is not None else attempt(self._build)
        if problem is None:
            self._limit()
            result, problem = attempt(lambda: self._try(batch))
        if problem not in (None, OUT_OF_MEMORY):
            self.drop()
            raise RuntimeError(f"a step of {batch} rows failed: {problem}")
        self.done.append({"batch": batch, "fits": problem is None, **(result or {})})
        if problem is not None:
            self.drop()
        return problem is None

    def _build(self) -> None:
        """Build an engine and run one small step, which allocates what is allocated once."""
        self._engine = ENGINES[self._cell.engine](dataclasses.replace(self._cell, batch=1), self._config, self._device)
        timed(self._engine.step, [self._batch(1)])

    def _try(self, batch: int) -> dict:
        """Run two steps. Return the second's speed and the peak memory."""
        engine = self._engine
        assert engine is not None
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._device)
        rows = self._batch(batch)
        _, seconds = timed(engine.step, [rows, rows])
        result = speed(seconds[1:], batch * self._cell.seq // self._cell.sequence_parallel, engine.flops_a_token)
        if self._device.type == "cuda":
            result["peak_GB"] = (torch.cuda.max_memory_allocated(self._device) + mapped_bytes()) / 1e9
        return result

    def _limit(self) -> None:
        """Limit torch to the same number of bytes on every rank, so that all run out of memory at the same point."""
        if self._device.type != "cuda":
            return
        free, total = torch.cuda.mem_get_info(self._device)
        room = min(meet(torch.cuda.memory_reserved(self._device) + free - RESERVE))
        self.limit = min(room, int(1e9 * self._cell.memory_limit)) if self._cell.memory_limit else room
        torch.cuda.set_per_process_memory_fraction(self.limit / total, self._device)

    def _batch(self, rows: int) -> dict:
        return make_batch(self._config, rows, self._cell.seq, bmt.rank() // self._cell.sequence_parallel, self._device)

    def drop(self) -> None:
        """Close the engine and free its memory. Collective."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None
        free_memory()
