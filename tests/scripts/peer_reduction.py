"""Reductions by copies between GPUs against NCCL's, for `torchrun --nproc-per-node 2 tests peer_reduction`.

Trains a small GPT-2 by collectives, by copies, and by copies again while every stream sleeps at random, with what is
unfilled or freed poisoned: losses, gradients and weights must be close to the collectives', and the runs by copies
equal to one another to the bit. Then prints milliseconds a step of either. `--tiny` runs it on CPU, too.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
import transformers

import hf_bmtrain as bmt
from hf_bmtrain.engine.comm import streams
from hf_bmtrain.engine.comm.peer_reduce import PeerReduction
from hf_bmtrain.engine.runtime.world import simulated

STEPS = 4
WORDS = 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--tiny", action="store_true", help="four layers of 64, every shard copied")
    options = parser.parse_args()
    if options.tiny:
        options.layers, options.width, options.length = 4, 64, 16
    os.environ["HF_BMTRAIN_POISON"] = "1"
    bmt.init_distributed(seed=0, gather="peer" if options.tiny else "auto")
    torch.use_deterministic_algorithms(True, warn_only=True)
    step: Any = bmt.current_world().schedule
    if not isinstance(step.blocks, PeerReduction):
        print("no peer access here: gradients are reduced by NCCL")
        return 1
    with collectives(step):
        expected = train(options)
    copied = [train(options), train(options)]
    with sleeping():
        copied.append(train(options, lag=True))
    wrong = compare(expected, copied)
    torch.use_deterministic_algorithms(False)
    for name, way in [("collectives", collectives(step)), ("copies", nullcontext())]:
        with way, simulated(replace(bmt.current_world(), poison=False)):
            bmt.print_rank(f"{name}: {milliseconds(options):.2f} ms a step")
    bmt.print_rank(f"slots: {step.blocks.mapped_bytes / 1e6:.0f} MB a rank")
    return wrong


@contextmanager
def collectives(step: Any) -> Iterator[None]:
    """What is made and run here gathers and reduces by the lanes below."""
    world = bmt.current_world()
    with simulated(replace(world, shards=world.shards.collective)), mock.patch.object(step, "blocks", step.outside):
        yield


@contextmanager
def sleeping() -> Iterator[None]:
    """Work streams sleep before what they do, for different times on each rank."""
    chance, run = random.Random(bmt.rank()), streams.WorkStream.run

    def lagging(stream, function):
        run(stream, lambda: sleep(chance))
        run(stream, function)

    with mock.patch.object(streams.WorkStream, "run", lagging):
        yield


def sleep(chance: random.Random) -> None:
    """Up to some milliseconds, mostly none."""
    if torch.cuda.is_available():
        torch.cuda._sleep(chance.choice((0, 0, 100_000, 1_000_000, 5_000_000)))


def make(options: argparse.Namespace) -> Any:
    device = bmt.current_world().device
    config = transformers.GPT2Config(
        n_embd=options.width, n_layer=options.layers, n_head=max(1, options.width // 128), vocab_size=WORDS,
        n_positions=options.length, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    with device:
        return bmt.auto_wrap(transformers.GPT2LMHeadModel(config).to(torch.bfloat16), use_checkpoint=False)


def rows(options: argparse.Namespace, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * number + bmt.rank())
    ids = torch.randint(WORDS, (options.batch, options.length), generator=generator)
    return ids.to(bmt.current_world().device)


def backward(model: Any, ids: torch.Tensor) -> torch.Tensor:
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach()


def train(options: argparse.Namespace, lag: bool = False) -> dict[str, torch.Tensor]:
    """SGD steps, of one and of two backwards in turn: losses, this rank's gradients of two steps, its weights."""
    model, found, losses = make(options), {}, []
    chance = random.Random(7 + bmt.rank())
    if lag:
        for layer in model.transformer.h:
            layer.register_forward_hook(lambda *_: sleep(chance))
            layer.register_full_backward_hook(lambda *_: sleep(chance))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        for micro in range(1 + step % 2):
            losses.append(bmt.sum_loss(backward(model, rows(options, 10 * step + micro))))
        if step < 2:
            found[f"gradients of step {step}"] = flat(parameter.grad for parameter in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    found["losses"] = torch.stack(losses).cpu()
    found["weights"] = flat(parameter.data for parameter in model.parameters())
    return found


def flat(tensors: Any) -> torch.Tensor:
    return torch.cat([tensor.detach().as_subclass(torch.Tensor).float().cpu() for tensor in tensors])


def compare(expected: dict[str, torch.Tensor], copied: list[dict[str, torch.Tensor]]) -> int:
    """Prints what is wrong on any rank."""
    problems = []
    for name, value in expected.items():
        difference = float((copied[0][name] - value).abs().max() / value.abs().max())
        bmt.print_rank(f"{name}: copies and collectives differ by {difference:.1e} of the largest")
        if not difference < 2.0**-6:
            problems.append(f"{name}: {difference:.1e} off")
        for number, again in enumerate(copied[1:], 1):
            if not torch.equal(again[name], copied[0][name]):
                problems.append(f"{name}: run {number} has other bits")
    reports = bmt.current_world().gather_objects(problems)
    for rank, report in enumerate(reports):
        bmt.print_rank(f"rank {rank}: {'; '.join(report) or 'good'}")
    return int(any(reports))


def milliseconds(options: argparse.Namespace, steps: int = 10) -> float:
    """A forward and a backward, of ten without a pause: the median of three times that, after one."""
    model, ids, seconds = make(options), rows(options, 0), []
    for _ in range(4):
        bmt.synchronize()
        begin = time.perf_counter()
        for _ in range(steps):
            backward(model, ids)
            model.zero_grad()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append((time.perf_counter() - begin) / steps)
    return 1e3 * statistics.median(seconds[1:])
