"""Find a needle in rows that are too long for the memory of one process, shared by all processes.

    torchrun --nproc-per-node 2 recipes/long_context.py
    torchrun --nproc-per-node 8 recipes/long_context.py --tokens 1000000 --memory 70000 --hidden 1024 --layers 8

A row is a haystack of letters with one digit in it, the needle. The last token asks for the digit. A small new Llama
learns it in short rows, then in ever longer ones, each process under a cap of memory. With one process the longest rows
do not fit: the recipe says so and ends with status 1.
"""

import argparse
import resource
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hf_bmtrain as bmt
from common.command_line import at_least, positive

ASK, DIGITS, LETTERS = 0, 16, 48
"""Token 0 asks; then follow 16 digits and 48 letters."""
SHORTEST, LONGER = 64, 8


def main() -> None:
    options = parse_options()
    bmt.init_distributed(seed=0)
    torch.set_num_threads(1)
    model = build(options)
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=options.lr)
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(optimizer)
    generator = torch.Generator().manual_seed(1)
    try:
        for tokens in lengths(options.tokens):
            report(model, manager, optimizer.param_groups, tokens, options, generator)
            if tokens == SHORTEST:  # by then libraries and optimizer have allocated what is theirs
                limit_memory(options.memory)
    except (RuntimeError, MemoryError) as error:
        if "memory" not in str(error):
            raise
        what = f"{tokens} tokens do not fit in {options.memory:.0f} MB with {bmt.world_size()} process(es)"
        sys.exit(f"rank {bmt.rank()}: {what}: start more, with torchrun --nproc-per-node N.")
    bmt.synchronize()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Find a needle in rows that no process could hold alone.")
    add = parser.add_argument
    add("--tokens", type=at_least(SHORTEST), default=8192, help="of the longest rows (%(default)s)")
    add("--memory", type=positive, default=90, help="MB that training may add to a process (%(default)s)")
    add("--steps", type=at_least(1), default=60, help="optimizer steps in short rows; fewer in long ones (%(default)s)")
    add("--lr", type=positive, default=4e-3, help="learning rate (%(default)s)")
    add("--hidden", type=at_least(16), default=64, help="width (%(default)s)")
    add("--layers", type=at_least(1), default=2, help="(%(default)s)")
    return parser.parse_args()


def build(options: argparse.Namespace) -> Any:
    config = LlamaConfig(
        vocab_size=1 + DIGITS + LETTERS, hidden_size=options.hidden, intermediate_size=4 * options.hidden,
        num_hidden_layers=options.layers, num_attention_heads=4, num_key_value_heads=2, rope_theta=1e7,
        max_position_embeddings=options.tokens,
    )  # fmt: skip
    torch.manual_seed(0)
    model = bmt.auto_wrap(LlamaForCausalLM(config), sequence_parallel=bmt.world_size())
    bmt.hf.fuse_causal_loss(model)
    return model


def limit_memory(megabytes: float) -> None:
    """Let this process allocate so much more than now: on a GPU in all, on the CPU in data."""
    device = bmt.current_world().device
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, megabytes * 1e6 / total))
        return
    with open("/proc/self/status") as status:
        used = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (used + int(megabytes * 1e6), resource.RLIM_INFINITY))


def lengths(longest: int) -> Iterator[int]:
    tokens = SHORTEST
    while tokens < longest:
        yield tokens
        tokens *= LONGER
    yield longest


def report(
    model: Any, manager: Any, groups: Any, tokens: int, options: argparse.Namespace, generator: torch.Generator
) -> None:
    """Train in rows of `tokens` tokens, and print how many needles are found in new ones."""
    rows = max(1, 2048 // tokens)
    share = 1 if tokens < 2048 else 6 if tokens < options.tokens else 20
    started, steps, loss = time.perf_counter(), max(2, options.steps // share), 0.0
    for _ in range(steps):
        ids, labels = draw(rows, tokens, generator)
        output = model(input_ids=ids, labels=labels).loss
        manager.zero_grad()
        manager.backward(output)
        manager.clip_grad_norm(groups, 1.0)
        manager.step()
        loss = output.item()
    seconds = (time.perf_counter() - started) / steps
    right, asked = 0, 0
    with torch.no_grad():
        for _ in range(max(1, 8 // rows)):
            ids, labels = draw(rows, tokens, generator)
            found = model(input_ids=ids).logits[:, -2].argmax(-1)
            right, asked = right + int((found == labels[:, -1]).sum()), asked + rows
    bmt.print_rank(
        f"{tokens:7d} tokens over {bmt.world_size()} process(es): loss {loss:.3f}, {right} of {asked} needles found, "
        f"{seconds:.2f} s a step"
    )


def draw(rows: int, tokens: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows and their labels, all of which but the last are left out. The same on every rank."""
    ids = torch.randint(1 + DIGITS, 1 + DIGITS + LETTERS, (rows, tokens), generator=generator)
    needles = torch.randint(1, 1 + DIGITS, (rows,), generator=generator)
    places = torch.randint(0, tokens - 2, (rows,), generator=generator)
    ids[torch.arange(rows), places] = needles
    ids[:, -2], ids[:, -1] = ASK, needles
    labels = torch.full_like(ids, -100)
    labels[:, -1] = needles
    device = bmt.current_world().device
    return ids.to(device), labels.to(device)


if __name__ == "__main__":
    main()
