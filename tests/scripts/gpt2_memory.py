"""GPT-2 of 1.5 B parameters in bf16: losses and memory, for `torchrun --nproc-per-node N tests gpt2_memory`.

Prints one JSON line: the losses of 20 steps over the same global batches for any N; bytes a parameter allocated
between steps; and the peak of a step on a batch so small that activations do not count, above that.
`--micro-batches 2` on one GPU adds up two halves, as two GPUs do: what its losses differ by is rounding.
"""

from __future__ import annotations

import argparse
import json

import torch
import transformers

import hf_bmtrain as bmt

ROWS, LENGTH, VOCABULARY = 8, 256, 50257


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--width", type=int, default=1600)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    options = parser.parse_args()
    bmt.init_distributed(seed=0)
    device = bmt.current_world().device
    config = transformers.GPT2Config(
        n_embd=options.width, n_layer=options.layers, n_head=options.width // 64,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    with device:
        model = transformers.GPT2LMHeadModel(config).to(getattr(torch, options.dtype))
    block_bytes = sum(p.nbytes for p in model.transformer.h[0].parameters())
    outside_bytes = model.transformer.wte.weight.nbytes
    parameters = model.num_parameters()
    model = bmt.auto_wrap(model)
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), weight_decay=0.01)
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(optimizer, bmt.lr_scheduler.Linear(optimizer, 2e-5, warmup_iter=10, end_iter=1000))
    losses = [
        train_step(model, manager, optimizer, step, ROWS, LENGTH, options.micro_batches)
        for step in range(options.steps)
    ]
    mapped = bmt.current_world().schedule.mapped_bytes  # shards and slots beside torch's allocator
    rest = torch.cuda.memory_allocated() + mapped
    torch.cuda.reset_peak_memory_stats()
    for step in range(2):
        train_step(model, manager, optimizer, step, bmt.world_size(), 8)
    peak = torch.cuda.max_memory_allocated() + mapped - rest
    report = {
        "ranks": bmt.world_size(),
        "parameters": parameters,
        "rest bytes/parameter × N": round(rest / parameters * bmt.world_size(), 3),
        "peak above rest, MB": round(peak / 1e6, 1),
        "one block, weights, MB": round(block_bytes / 1e6, 1),
        "largest outside, weights, MB": round(outside_bytes / 1e6, 1),
        "losses": [round(loss, 4) for loss in losses],
    }
    bmt.print_rank(json.dumps(report))


def train_step(model, manager, optimizer, step: int, rows: int, length: int, micro_batches: int = 1) -> float:
    """One step on this rank's share of `rows` arithmetic sequences; gradients stay until the next."""
    device = bmt.current_world().device
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(0, VOCABULARY, (rows, 1), generator=generator)
    stride = torch.randint(1, 9, (rows, 1), generator=generator)
    ids = (start + stride * torch.arange(length)) % VOCABULARY
    manager.zero_grad()
    total = torch.zeros((), device=device)
    for part in ids[bmt.rank() :: bmt.world_size()].to(device).chunk(micro_batches):
        loss = model(input_ids=part, labels=part).loss / micro_batches
        manager.backward(loss)
        total += loss.detach()
    manager.clip_grad_norm(optimizer.param_groups, max_norm=1.0)
    manager.step()
    return bmt.sum_loss(total).item()
