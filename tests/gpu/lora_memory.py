"""LoRA on a GPT-2 of 1.5 B parameters in bf16: memory and step time, sharded or under plain DDP with PEFT.

    torchrun --nproc-per-node 2 tests lora_memory --engine bmt
    torchrun --nproc-per-node 2 tests lora_memory --engine ddp

Both train the same adapters on the same batches with torch's AdamW and print one JSON line: losses, milliseconds a
step (the median), bytes allocated between steps and at the peak. --no-recompute keeps activations in both. Needs PEFT.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import peft
import torch
import torch.distributed as dist
import transformers

import hf_bmtrain as bmt

VOCABULARY = 50257


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("bmt", "ddp"), required=True)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--width", type=int, default=1600)
    parser.add_argument("--rows", type=int, default=4, help="samples a GPU")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--no-recompute", action="store_true")
    options = parser.parse_args()
    bmt.init_distributed(seed=0)
    device = bmt.current_world().device
    model = build(options, device)
    if options.engine == "bmt":
        model = bmt.auto_wrap(model, zero_level=3, use_checkpoint=not options.no_recompute)
    else:
        model = prepare_ddp(model, device, not options.no_recompute)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, foreach=True)
    times, losses = [], []
    for step in range(options.steps):
        if step == 2:
            reset_peak(device)
        begin = time.perf_counter()
        losses.append(train_step(model, optimizer, step, options, device))
        times.append(time.perf_counter() - begin)
    report = {
        "engine": options.engine,
        "ranks": bmt.world_size(),
        "recompute": not options.no_recompute,
        "trainable": sum(p.full_shape.numel() if options.engine == "bmt" else p.numel() for p in trainable(model)),
        "ms a step": round(1e3 * statistics.median(times[2:]), 1),
        "rest, MB": round(memory(device)[0] / 1e6, 1),
        "peak, MB": round(memory(device)[1] / 1e6, 1),
        "losses": [round(loss, 4) for loss in losses],
    }
    bmt.print_rank(json.dumps(report))


def trainable(model) -> list:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def build(options, device: torch.device) -> torch.nn.Module:
    """The same weights and adapters in every run."""
    config = transformers.GPT2Config(
        n_embd=options.width, n_layer=options.layers, n_head=options.width // 64, n_positions=options.length,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    with device:
        model = transformers.GPT2LMHeadModel(config).to(torch.bfloat16)
    adapters = peft.LoraConfig(r=16, lora_alpha=32, target_modules=["c_attn"], fan_in_fan_out=True)
    return peft.get_peft_model(model, adapters, autocast_adapter_dtype=False).train()


def prepare_ddp(model, device: torch.device, recompute: bool) -> torch.nn.Module:
    model = model.to(device)
    if recompute:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if bmt.world_size() == 1:
        return model
    group = dist.new_group(backend="nccl" if device.type == "cuda" else "gloo")
    return torch.nn.parallel.DistributedDataParallel(model, process_group=group)


def train_step(model, optimizer, step: int, options, device: torch.device) -> float:
    """One step on this rank's rows of arithmetic sequences."""
    generator = torch.Generator().manual_seed(step * bmt.world_size() + bmt.rank())
    start = torch.randint(0, VOCABULARY, (options.rows, 1), generator=generator)
    stride = torch.randint(1, 9, (options.rows, 1), generator=generator)
    ids = ((start + stride * torch.arange(options.length)) % VOCABULARY).to(device)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return bmt.sum_loss(loss.detach()).item()


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()


def memory(device: torch.device) -> tuple[int, int]:
    """Bytes allocated now and at the peak; zeros without a GPU."""
    if device.type != "cuda":
        return 0, 0
    return torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
