"""A small language model of bytes that learns the sources of Python's library: loss curves of optimizers."""

from __future__ import annotations

import functools
import sysconfig
from collections.abc import Callable
from pathlib import Path

import torch
import transformers

import hf_bmtrain as bmt

LENGTH, ROWS, BYTES, HELD_OUT = 64, 8, 4_000_000, 256
MakeOptimizer = Callable[[torch.nn.Module], torch.optim.Optimizer]


@functools.cache
def rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of LENGTH bytes, int64, of Python's library, its modules in the order of their names: to train, held out."""
    text = b""
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += file.read_bytes()
    values = torch.frombuffer(bytearray(text[:BYTES]), dtype=torch.uint8).long()
    values = values[: len(values) // LENGTH * LENGTH].view(-1, LENGTH)
    held_out = torch.arange(len(values)) % 20 == 0
    return values[~held_out], values[held_out][:HELD_OUT]


def build(seed: int, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=LENGTH, use_cache=False,
    )  # fmt: skip
    model: torch.nn.Module = transformers.LlamaForCausalLM(config).to(dtype)
    return model.to(bmt.current_world().device).train()


@torch.no_grad()
def held_out_loss(model: torch.nn.Module) -> float:
    held_out = rows()[1].to(bmt.current_world().device)
    losses = [model(input_ids=ids, labels=ids).loss.float() for ids in held_out.split(64)]
    return float(torch.stack(losses).mean())


def curve(
    make_optimizer: MakeOptimizer, seed: int, steps: int, every: int, dtype: torch.dtype = torch.float32
) -> list[float]:
    """The held-out loss after every `every` steps of a training, with a warm-up and a linear decay of the rates."""
    model = bmt.auto_wrap(build(seed, dtype), use_checkpoint=False)
    optimizer = make_optimizer(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: min((t + 1) / 100, (steps - t) / steps))
    generator, found = torch.Generator().manual_seed(seed), []
    for step in range(1, steps + 1):
        chosen = torch.randint(len(rows()[0]), (ROWS * bmt.world_size(),), generator=generator)
        ids = rows()[0][chosen[bmt.rank() :: bmt.world_size()]].to(bmt.current_world().device)
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % every == 0:
            found.append(held_out_loss(model))
            bmt.print_rank(f"  step {step}: {found[-1]:.4f}")
    return found
