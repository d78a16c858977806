"""Seconds to load, to save, to resume, and the stall of saving beside training; of this library and of others.

    python tests checkpoint_speed make --folder F                      a folder of Hugging Face, of --model
    torchrun --nproc-per-node 2 tests checkpoint_speed load --folder F --engine ours|plain
    torchrun --nproc-per-node 2 tests checkpoint_speed save --folder F --engine ours|fsdp2

`load` has `bmt.hf.from_pretrained`, or `from_pretrained` and then `auto_wrap`. `save` trains, saves, saves twice beside
training (`--beside` times), and resumes: `save_state` and `load_state`, or FSDP2 (float32 shards) with
torch.distributed.checkpoint; with `--pinned` its async_save gets a stager that copies to pinned memory beside the next
step, as torch's options allow (that memory is rounded up to powers of two).
The stall is the time of the call and of the steps after it, less what as many steps take otherwise. Each save is
deleted before the next. Every line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict
from transformers import AutoModelForCausalLM

import hf_bmtrain as bmt
from bench.engines.base import adamw, torch_clip, torch_step
from bench.models import make_batch, make_config, make_model
from hf_bmtrain.engine.comm.streams import finish

STEPS_BESIDE = 4


class Ours:
    """save_state and load_state."""

    def __init__(self, config: Any, device: torch.device) -> None:
        self.model = bmt.auto_wrap(make_model(config, torch.bfloat16, device), use_checkpoint=False)
        self.manager = bmt.optim.OptimManager()
        self.manager.add_optimizer(bmt.optim.AdamOptimizer(self.model.parameters(), lr=1e-5))

    def step(self, batch: dict) -> None:
        loss = self.model(**batch).loss
        self.manager.zero_grad()
        self.manager.backward(loss)
        self.manager.clip_grad_norm(self.manager.optimizers[0].param_groups, 1.0)
        self.manager.step()

    def save(self, folder: Path, beside: bool) -> Callable[[], Any]:
        return bmt.save_state(folder, self.model, self.manager, step=1, non_blocking=beside).wait

    def load(self, folder: Path) -> None:
        assert bmt.load_state(folder, self.model, self.manager) is not None


class FSDP2:
    """torch.distributed.checkpoint of FSDP2."""

    def __init__(self, config: Any, device: torch.device, pinned: bool) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        self.model = make_model(config, torch.float32, device)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        for layer in self.model.model.layers:
            fully_shard(layer, mp_policy=policy)
        fully_shard(self.model, mp_policy=policy)
        self.optimizer = adamw(self.model.parameters(), 1e-5)
        self.step = torch_step(self.model, self.optimizer, torch_clip(self.model))
        self.staged: Any = None
        self.optimizer.register_step_pre_hook(self.wait_for_staging)
        self.group = dist.new_group(backend="gloo")  # for the thread that saves
        self.stager = DefaultStager(StagingOptions(True, False, True, True)) if pinned else None

    def wait_for_staging(self, *_: Any) -> None:
        if self.staged is not None:
            self.staged.result()
            self.staged = None

    def state(self) -> dict:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, folder: Path, beside: bool) -> Callable[[], Any]:
        if not beside:
            dcp.save(self.state(), checkpoint_id=str(folder))
            return lambda: None
        response: Any = dcp.async_save(
            self.state(), checkpoint_id=str(folder), async_stager=self.stager, process_group=self.group
        )
        if hasattr(response, "staging_completion"):
            self.staged = response.staging_completion
            return response.upload_completion.result
        return response.result

    def load(self, folder: Path) -> None:
        dcp.load(self.state(), checkpoint_id=str(folder))


class Clock:
    """Seconds between points that all ranks have reached, with nothing queued on their current streams."""

    def __init__(self) -> None:
        self.last = 0.0
        self.read()

    def read(self) -> float:
        world = bmt.current_world()
        finish(world.device)  # bmt.synchronize would wait for the copies beside it as well
        world.gather_objects(None)
        now = time.perf_counter()
        passed, self.last = now - self.last, now
        return passed


def report(**values: Any) -> None:
    values["peak_device_GB"] = torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else 0.0
    line = {key: round(value, 3) if isinstance(value, float) else value for key, value in values.items()}
    bmt.print_rank(json.dumps(line), flush=True)


def load(engine: str, folder: Path) -> None:
    load_one = bmt.hf.from_pretrained  # imports what it needs
    clock = Clock()
    if engine == "ours":
        model = load_one(AutoModelForCausalLM, folder, dtype=torch.bfloat16)
    else:
        model = bmt.auto_wrap(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16))
    report(part="load", engine=engine, seconds=clock.read(), parameters=model.num_parameters())


def measure_saves(engine: Ours | FSDP2, folder: Path, batches: list[dict], count: int) -> None:
    clock = Clock()

    def steps(count: int) -> list[float]:
        times = []
        for number in range(count):
            engine.step(batches[number % len(batches)])
            times.append(clock.read())
        return times

    steps(3)
    usual = statistics.median(steps(5))
    report(part="step", engine=type(engine).__name__, seconds=usual)
    for beside in [False] + [True] * count:
        if bmt.rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        clock.read()
        wait = engine.save(folder, beside)
        call = clock.read()
        if not beside:
            size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            report(part="save", engine=type(engine).__name__, seconds=call, GB=size / 1e9)
            continue
        times = steps(STEPS_BESIDE)
        wait()
        report(
            part="save beside training", engine=type(engine).__name__, call=call, steps=[round(t, 3) for t in times],
            stall=call + sum(times) - STEPS_BESIDE * usual, until_saved=call + sum(times) + clock.read(),
        )  # fmt: skip
    engine.load(folder)
    report(part="resume", engine=type(engine).__name__, seconds=clock.read())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("make", "load", "save"))
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--engine", choices=("ours", "plain", "fsdp2"), default="ours")
    parser.add_argument("--model", default="llama-8b")
    parser.add_argument("--beside", type=int, default=2, help="saves beside training")
    parser.add_argument("--pinned", action="store_true")
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--length", type=int, default=4096)
    options = parser.parse_args()
    config = make_config(options.model, options.length)
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if torch.cuda.is_available() else "cpu"
    if options.part == "make":
        make_model(config, torch.bfloat16, torch.device(device)).save_pretrained(options.folder)
        return
    if options.engine == "fsdp2":
        if torch.cuda.is_available():
            torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    bmt.init_distributed(seed=0)
    device = bmt.current_world().device
    if options.part == "load":
        load(options.engine, options.folder)
        return
    engine = FSDP2(config, device, options.pinned) if options.engine == "fsdp2" else Ours(config, device)
    seeds = range(bmt.rank(), 4 * bmt.world_size(), bmt.world_size())
    batches = [make_batch(config, options.rows, options.length, seed, device) for seed in seeds]
    measure_saves(engine, options.folder, batches, options.beside)


if __name__ == "__main__":
    main()
