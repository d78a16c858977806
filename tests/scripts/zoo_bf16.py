"""Ten families in bf16 on several GPUs against one: `torchrun --nproc-per-node 2 tests zoo_bf16`.

Prints a line a family: the losses of three steps of SGD, sharded over all GPUs with
ZeRO-3 and recomputation, those of the plain model on rank 0's GPU over the same batches, and the largest relative
difference. Exit code 1 where one is above what rounding in that dtype explains (2e-2; 1e-4 with --dtype float32).
`--stand-in` runs it on the CPU with gloo.
"""

from __future__ import annotations

import argparse
import os

import torch

FAMILIES = ("llama", "gpt2", "mixtral", "gpt_oss", "mamba", "bert", "deberta_v2", "t5", "swin", "qwen2_vl")
ALLOWED = {"bfloat16": 2e-2, "float32": 1e-4}
STEPS, LEARNING_RATE = 3, 0.1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", default=FAMILIES)
    parser.add_argument("--dtype", choices=ALLOWED, default="bfloat16")
    parser.add_argument("--stand-in", action="store_true")
    options = parser.parse_args()
    if options.stand_in:
        os.environ["ACCELERATE_USE_CPU"] = "true"
    import hf_bmtrain as bmt

    bmt.init_distributed(seed=0)
    device = bmt.current_world().device
    if device.type != "cuda" and not options.stand_in:
        raise SystemExit("no CUDA device: --stand-in runs this on the CPU")
    bmt.print_rank(f"{bmt.world_size()} × {device.type}, {options.dtype}")
    worst = 0.0
    for name in options.families:
        mine, plain = train(bmt, name, getattr(torch, options.dtype))
        difference = ((mine - plain).abs() / plain.abs()).max().item()
        worst = max(worst, difference if difference == difference else float("inf"))
        losses = " ".join(f"{value:.5f}" for value in mine.flatten().tolist())
        expected = " ".join(f"{value:.5f}" for value in plain.flatten().tolist())
        bmt.print_rank(f"{name:12} {losses} | one GPU: {expected} | {difference:.1e}")
    bmt.print_rank(f"worst {worst:.1e}, allowed {ALLOWED[options.dtype]:.0e}")
    return int(worst > ALLOWED[options.dtype])


def train(bmt, name: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses (steps, ranks) of the sharded and of the plain model; the latter are rank 0's on every rank."""
    from zoo_families import FAMILIES
    from zoo_twin import Twin, compute_loss

    size, rank, device = bmt.world_size(), bmt.rank(), bmt.current_world().device
    family = FAMILIES[name]
    model = bmt.auto_wrap(family.build().to(dtype), zero_level=3, use_checkpoint=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    twin = Twin(family, family.build().to(device, dtype), size, LEARNING_RATE) if rank == 0 else None
    mine, plain = [], torch.zeros(STEPS, size, device=device)
    for step in range(STEPS):
        loss = compute_loss(family, model, step * size + rank)
        loss.backward()
        mine.append(bmt.gather_result(loss.detach().float().view(1)))
        optimizer.step()
        optimizer.zero_grad()
        if twin is not None:
            plain[step] = twin.step([step * size + other for other in range(size)]).float()
            twin.update()
    return torch.stack(mine), bmt.gather_result(plain)[:STEPS]
