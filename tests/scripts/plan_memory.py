"""Measure the plan, memory and time of use_checkpoint="auto" for GPT-2 of 1.5 B parameters, against True and False.

`torchrun --nproc-per-node N tests plan_memory --recompute auto`, then the same with `full` and `none`. Prints
the plan (rank 0's log) and one JSON line: ms per step, the peak in GiB, the number of blocks that keep their
activations, the losses (equal for the three but for rounding), or that memory ran out. `--grow` makes the sixth batch
half as large again; `--squeeze GIB` allocates that much outside torch after the fourth step.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import time

import torch
import transformers

import hf_bmtrain as bmt
from inner import state_of

VOCABULARY = 50257
USE_CHECKPOINT = {"none": False, "full": True, "auto": "auto"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recompute", choices=tuple(USE_CHECKPOINT), default="auto")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--width", type=int, default=1600)
    parser.add_argument("--rows", type=int, default=20, help="sequences a rank")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--grow", action="store_true")
    parser.add_argument("--squeeze", type=float, default=0.0, metavar="GIB")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("hf_bmtrain").setLevel(logging.INFO)
    bmt.init_distributed(seed=0)
    report = {"recompute": options.recompute, "ranks": bmt.world_size(), "rows": options.rows, "length": options.length}
    try:
        report |= train(options)
    except torch.OutOfMemoryError as error:
        report["out of memory"] = str(error).split(". ")[0]
        print(json.dumps({"rank": bmt.rank(), **report}), flush=True)
        raise SystemExit(1) from None
    bmt.print_rank(json.dumps(report))


def train(options) -> dict:
    device = bmt.current_world().device
    config = transformers.GPT2Config(
        n_embd=options.width, n_layer=options.layers, n_head=options.width // 64, n_positions=options.length,
        resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    with device:
        model = transformers.GPT2LMHeadModel(config).to(torch.bfloat16).train()
    model = bmt.auto_wrap(model, use_checkpoint=USE_CHECKPOINT[options.recompute], compile=options.compile)
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=1e-4, weight_decay=0.01)
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(optimizer)
    times, losses, kept, ballast = [], [], [], []
    for step in range(options.steps):
        if step == 3:
            torch.cuda.reset_peak_memory_stats()
        if step == 4 and options.squeeze:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            ballast.append(take(options.squeeze))
        rows = options.rows * 3 // 2 if options.grow and step == 5 else options.rows
        torch.cuda.synchronize()
        begin = time.perf_counter()
        losses.append(train_step(model, manager, optimizer, step, rows, options.length))
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - begin))
        kept.append(count_kept_blocks(model))
    return {
        "ms": round(statistics.median(times[4:]), 1),
        "each ms": [round(one) for one in times],
        "peak GiB": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "device GiB": round(torch.cuda.mem_get_info()[1] / 2**30, 2),
        "keep": kept,
        "whole": sum(state_of(block).zero_level == 2 for block in model.transformer.h),
        "losses": [round(float(loss), 4) for loss in losses],
    }


def take(gib: float):
    """Allocate memory outside torch's allocator."""
    import cupy

    return cupy.cuda.Memory(int(gib * 2**30))


def count_kept_blocks(model) -> int:
    """Count the blocks that keep their activations, by the plan or because use_checkpoint is False."""
    blocks = [module for module in model.modules() if isinstance(module, bmt.CheckpointBlock)]
    policies = [state_of(block).recompute for block in blocks]
    return sum(getattr(policy, "kept", policy is False) for policy in policies)


def train_step(model, manager, optimizer, step: int, rows: int, length: int) -> torch.Tensor:
    """Train one step on this rank's arithmetic sequences."""
    generator = torch.Generator().manual_seed(step * bmt.world_size() + bmt.rank())
    start = torch.randint(0, VOCABULARY, (rows, 1), generator=generator)
    stride = torch.randint(1, 9, (rows, 1), generator=generator)
    ids = ((start + stride * torch.arange(length)) % VOCABULARY).to(bmt.current_world().device)
    torch.manual_seed(100 * step + bmt.rank())  # dropout
    manager.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    manager.backward(loss)
    manager.clip_grad_norm(optimizer.param_groups, max_norm=1.0)
    manager.step()
    return bmt.sum_loss(loss.detach())
