"""Train on rows that are too long for one process: several processes share each row.

    python recipes/long_context.py
    python recipes/long_context.py --model MODEL --length 131072

The script starts the processes itself, unless it runs under torchrun. Without --model, a small new model learns to find
needles in a haystack. To show that one process is not enough, the script first tries a step in one process with the
same memory limit.
"""

import argparse
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import hf_bmtrain as bmt
from boolq.job import check_output
from boolq.model import quiet_transformers
from common.command_line import choose_dtype, one_line_errors
from common.curve import Curve, versions
from gpt2.report import write_report
from needle.data import IGNORED, VOCABULARY, lengths, rows, text_row
from needle.memory import is_out_of_memory, limit_memory
from needle.options import parse_options

WARM_UP = 10  # steps
FIRST_LOSS_SCALE = 1024.0  # fp16 only
NO_MEMORY = 3  # exit status of a trial that runs out of memory


def main() -> int:
    options = parse_options()
    with one_line_errors():
        check_processes(options.processes)
        check_output(options.output)
    if "RANK" in os.environ or options.trial:
        return run(options)
    processes = options.processes or torch.cuda.device_count() or 2
    command = [sys.executable, __file__, *sys.argv[1:]]
    if processes > 1:
        tried = subprocess.run([*command, "--trial"]).returncode
        if tried not in (0, NO_MEMORY):
            return tried
        starter = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        command[1:1] = starter
        return subprocess.run(command).returncode
    return run(options)


def check_processes(count: int | None) -> None:
    """Raise ValueError if a launcher has started another number of processes than `count`."""
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if "RANK" in os.environ and count not in (None, launched):
        raise ValueError(
            f"--processes {count}: the launcher has started {launched}, and has its own option for this number: leave "
            "out --processes, or start the script with python"
        )


def run(options: argparse.Namespace) -> int:
    """Train together with the other ranks. With `--trial`, take only one step, to see whether memory suffices.

    Collective: every rank must call it. Returns the exit status of the process, 0 or `NO_MEMORY`.
    """
    bmt.init_distributed(seed=options.seed, zero_level=options.zero_level, shard_over=options.shard_over)
    device = bmt.current_world().device
    quiet_transformers(terminal=bmt.rank() == 0 and sys.stderr.isatty())
    choose_dtype(options, device)
    options.steps = options.steps or (20 if options.model else 300)
    options.lr = options.lr or (1e-5 if options.model else 3e-3)
    if options.memory is None and not options.model and device.type == "cpu":
        options.memory = 208
    with one_line_errors():
        model, batches = prepare(options)
    bmt.auto_wrap(
        model, options.zero_level, not options.no_checkpoint, sequence_parallel=bmt.world_size(),
        offload_activations=options.offload, mlp_chunks=options.mlp_chunks,
    )  # fmt: skip
    bmt.hf.fuse_causal_loss(model)  # computes the loss without the logits of the whole row in memory
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=options.lr)
    manager = bmt.optim.OptimManager(loss_scale=FIRST_LOSS_SCALE if options.dtype == "float16" else None)
    manager.add_optimizer(optimizer)
    train_step(model, manager, optimizer, next(batches(1, 64)))  # allocates the optimizer state, before the limit
    if options.memory is not None:
        limit_memory(options.memory, device)
    if options.trial:
        return trial(model, manager, optimizer, next(batches(1, options.length)), options)

    told = f", each with {options.memory} MiB in addition to the model" if options.memory else ""
    size = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    bmt.print_rank(
        f"{size:.2f} M parameters, {options.dtype}; {bmt.world_size()} x {device.type} share rows of {options.length} "
        f"tokens{told}"
    )
    curve, points, began = Curve(), [], time.perf_counter()
    before = None if options.model else right(model, next(batches(1, options.length)))
    plan = [(1, options.length)] * options.steps if options.model else lengths(options.length, options.steps)
    bar = tqdm([*plan], desc="training", disable=None if bmt.rank() == 0 else True)
    for step, (count, length) in enumerate(bar):
        for group in optimizer.param_groups:
            group["lr"] = options.lr * min(1.0, (step + 1) / WARM_UP)
        loss, norm = train_step(model, manager, optimizer, next(batches(count, length)))
        if curve.add(1, loss, norm, optimizer.param_groups[0]["lr"]):
            bar.set_postfix(loss=curve.steps[-1]["loss"], tokens=length, refresh=False)
    curve.read()
    seconds = time.perf_counter() - began
    after = None if options.model else right(model, next(batches(1, options.length)))
    points.append({"step": options.steps, "loss": curve.steps[-1]["loss"]})
    first, last = curve.steps[0]["loss"], curve.steps[-1]["loss"]
    bmt.print_rank(f"loss of rows never seen before: {first:.3f} at first, {last:.3f} at last; {seconds:.0f} s")
    if after is not None:
        bmt.print_rank(f"right answers in a row of {options.length} tokens: {before:.0%} before, {after:.0%} after")
    if bmt.rank() == 0:
        facts = {
            "arguments": vars(options), "versions": versions(), "world_size": bmt.world_size(), "device": device,
            "seconds": seconds, "right_before": before, "right_after": after,
        }  # fmt: skip
        print(write_report(options.output, facts, curve, points))
    bmt.synchronize()
    return 0


def prepare(options: argparse.Namespace) -> tuple[Any, Any]:
    """Return the model (not yet sharded), and a function (count, length) that returns an endless iterator of batches.

    A batch has `count` rows of `length` tokens; with --model it has one row. All processes draw the same rows, because
    they compute them together. Raises ValueError or OSError if the model cannot be loaded or --length is too small.
    """
    dtype = getattr(torch, options.dtype)
    if options.model:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype)
        draw = random.Random(options.seed)
        text_row(tokenizer, options.length, random.Random(0))  # raises ValueError if --length is too small

        def texts(count: int, length: int) -> Iterator[dict]:
            while True:
                yield text_row(tokenizer, max(length, 64), draw)

        return model, texts
    torch.set_num_threads(1)  # with layers this small, a second thread gains less than waiting for it costs
    torch.manual_seed(options.seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=options.length, rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )  # fmt: skip
    generator = torch.Generator().manual_seed(options.seed)

    def numbers(count: int, length: int) -> Iterator[dict]:
        while True:
            yield rows(count, length, generator)

    return LlamaForCausalLM(config).to(dtype), numbers


def train_step(model: Any, manager: Any, optimizer: Any, batch: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """Train on one batch. Return the loss and the norm of the gradients before clipping, as scalars on the device.

    Collective: every rank must call it.

    Args:
        model: the sharded model.
        manager: the OptimManager that contains `optimizer`.
        optimizer: the optimizer of the model's parameters.
        batch: `input_ids` and `labels`, (rows, length), on any device and the same on all ranks.
    """
    device = bmt.current_world().device
    manager.zero_grad()
    loss = model(**{name: value.to(device) for name, value in batch.items()}).loss
    manager.backward(loss)
    norm = manager.clip_grad_norm(optimizer.param_groups, 1.0)
    manager.step()
    return loss, norm


def trial(model: Any, manager: Any, optimizer: Any, batch: dict, options: argparse.Namespace) -> int:
    """Take one step in one process, and print whether the memory suffices. Return the exit status, 0 or `NO_MEMORY`.

    Args:
        model: the sharded model.
        manager: the OptimManager that contains `optimizer`.
        optimizer: the optimizer of the model's parameters.
        batch: `input_ids` and `labels` of the longest rows.
        options: the options of the command line, for the printed line.
    """
    told = f"{options.memory} MiB" if options.memory else "the memory of the device"
    try:
        train_step(model, manager, optimizer, batch)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        print(f"one process: a row of {options.length} tokens does not fit into {told}", flush=True)
        return NO_MEMORY
    print(f"one process: a row of {options.length} tokens fits into {told}", flush=True)
    return 0


@torch.no_grad()
def right(model: Any, batch: dict) -> float:
    """Return the fraction, from 0 to 1, of the labels in `batch` that the model predicts correctly.

    Collective: every rank must call it.

    Args:
        model: the sharded model.
        batch: `input_ids` and `labels`, (rows, length), on any device and the same on all ranks.
    """
    device = bmt.current_world().device
    model.eval()
    answers = model(input_ids=batch["input_ids"].to(device)).logits[:, :-1].argmax(-1).cpu()
    model.train()
    targets = batch["labels"][:, 1:]
    asked = targets != IGNORED
    return float((answers[asked] == targets[asked]).float().mean())


if __name__ == "__main__":
    sys.exit(main())
