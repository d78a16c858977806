"""LoRA in bf16 or on a 4-bit base, sharded, under plain DDP with PEFT, or on bitsandbytes: memory and step time.

    torchrun --nproc-per-node 2 tests lora_memory --engine bmt
    torchrun --nproc-per-node 2 tests lora_memory --engine ddp
    torchrun --nproc-per-node 2 tests lora_memory --engine bmt --model llama-70b --quantize nf4 --folder F --distinct 1
    torchrun --nproc-per-node 2 tests lora_memory --engine bnb --model llama-70b --distinct 1

The default model is a GPT-2 of 1.5 B parameters. All engines train the same adapters, from the same values, on the same
two batches with torch's AdamW. Random values depend on the names of parameters and the kind of device alone, so the
losses of engines that do not quantize are equal but for rounding, and so are those of `--engine bmt --quantize nf4` and
`--engine bnb --double-quantization`, whose bases have the same bits. Needs PEFT, and bitsandbytes for `bnb`.

--folder: the base is built on the meta device and filled from files there, which are written first, so that it is never
whole in one place. --distinct N: layers repeat the values of the first N, so that files of a large model are small.
--no-recompute keeps activations. --limit-gb X: the rest of the GPU is taken, so that all the process takes on it, in
torch's allocator and outside, with the CUDA context, stays below X GB; the GPU must be this process's alone.

Prints one JSON line, with the greatest number over the ranks: milliseconds a step (the median); bytes between steps and
at the peaks of building and of a step, of tensors in torch's allocator and of shards outside it; what else the device
holds for the process ("outside, MB": context, libraries, those shards); the peak of host memory until the model was
ready, pages of mapped files included. If memory runs out, a rank prints a line that says so, and the program ends
with 1.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import statistics
import time
from typing import Any

import torch

import hf_bmtrain as bmt
from lora_models import MODELS, prepare

WARM_UP = 2
"""Steps before those that are measured: memory is planned and layers are compiled in them."""
BATCHES = 2
"""Batches that are repeated, so that losses fall, and tell whether adapters are trained alike."""


def main() -> None:
    options = parse()
    if options.engine == "bnb" and importlib.util.find_spec("bitsandbytes") is None:
        raise SystemExit("--engine bnb needs bitsandbytes: pip install bitsandbytes")
    bmt.init_distributed(seed=0)
    try:
        report = measure(options, bmt.current_world().device)
    except Exception as error:
        if "out of memory" not in str(error).lower():
            raise
        said = str(error).strip().splitlines()[0]
        line = json.dumps({"engine": options.engine, "out of memory": said, "rank": bmt.rank()})
        print(f"{line}\n", end="", flush=True)  # at once, since several ranks may print
        os._exit(1)  # the other ranks wait in a collective; the launcher ends them, and nothing here may wait for them
    bmt.print_rank(json.dumps(report))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("bmt", "ddp", "bnb"), required=True)
    parser.add_argument("--model", choices=MODELS, default="gpt2")
    parser.add_argument("--layers", type=int, help="instead of the model's")
    parser.add_argument("--width", type=int, help="instead of the model's")
    parser.add_argument("--vocabulary", type=int, help="instead of the model's")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--rows", type=int, default=4, help="samples a GPU")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--no-recompute", action="store_true")
    parser.add_argument("--compile", action="store_true", help="the layers")
    parser.add_argument("--quantize", choices=("nf4", "fp8"), help="bmt: the frozen matrices of layers")
    parser.add_argument("--keep-frozen", choices=("auto", "yes", "no"), default="auto", help="bmt: as in auto_wrap")
    parser.add_argument("--folder", help="bmt: the base is filled from files here")
    parser.add_argument("--double-quantization", action="store_true", help="bnb: scales of 8 bits, as bmt's nf4 has")
    parser.add_argument("--distinct", type=int, default=0, help="layers with values of their own; 0 for all")
    parser.add_argument("--limit-gb", type=float, help="all that the process may take on its GPU")
    options = parser.parse_args()
    if options.engine != "bmt" and (options.quantize or options.folder or options.keep_frozen != "auto"):
        parser.error("--quantize, --folder and --keep-frozen are for --engine bmt")
    if options.engine == "bnb" and options.model == "gpt2":
        parser.error("GPT-2 has no nn.Linear for bitsandbytes to replace")
    if options.steps <= WARM_UP:
        parser.error(f"--steps must be more than {WARM_UP}")
    return options


def measure(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    taken = take_all_but(options.limit_gb, device)
    begin = time.perf_counter()
    options.seconds_to_write = 0.0
    model = prepare(options, device)
    bmt.synchronize()
    seconds = time.perf_counter() - begin - options.seconds_to_write
    host, building = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, memory(device)[1]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, foreach=True)
    times, losses, peak = [], [], 0
    for step in range(options.steps):
        reset_peak(device)
        begin = time.perf_counter()
        losses.append(train_step(model, optimizer, step, options, device))
        times.append(time.perf_counter() - begin)
        peak = max(peak, memory(device)[1]) if step >= WARM_UP else 0
    rest, _, outside = memory(device)
    outside -= 0 if taken is None else taken.size
    milliseconds = 1e3 * statistics.median(times[WARM_UP:])
    numbers = greatest([seconds, milliseconds, host, building, rest, peak, outside], device)
    seconds, milliseconds, host, building, rest, peak, outside = numbers
    return {
        "engine": options.engine,
        "model": options.model,
        "ranks": bmt.world_size(),
        "options": given(options),
        "recompute": not options.no_recompute,
        "trainable": sum(p.full_shape.numel() if options.engine == "bmt" else p.numel() for p in trained),
        "s to write files": round(options.seconds_to_write, 1),
        "s to build and wrap": round(seconds, 1),
        "host peak, MB": round(host / 1e6, 1),
        "peak of building, MB": round(building / 1e6, 1),
        "ms a step": round(milliseconds, 1),
        "tokens/s a rank": round(1e3 * options.rows * options.length / milliseconds),
        "rest, MB": round(rest / 1e6, 1),
        "peak, MB": round(peak / 1e6, 1),
        "outside, MB": round(outside / 1e6, 1),
        "losses": [round(loss, 4) for loss in losses],
    }


def given(options: argparse.Namespace) -> dict[str, Any]:
    """The options that say what was run, without those that were left out."""
    names = (
        "layers", "width", "vocabulary", "dtype", "rows", "length", "steps", "compile", "quantize", "keep_frozen",
        "double_quantization", "distinct", "limit_gb",
    )  # fmt: skip
    found = {name: getattr(options, name) for name in names}
    return {name: value for name, value in found.items() if value} | {"from files": options.folder is not None}


def train_step(model, optimizer, step: int, options: argparse.Namespace, device: torch.device) -> float:
    """One step on this rank's rows of arithmetic sequences."""
    vocabulary = getattr(model, "module", model).config.vocab_size
    generator = torch.Generator().manual_seed(step % BATCHES * bmt.world_size() + bmt.rank())
    start = torch.randint(0, vocabulary, (options.rows, 1), generator=generator)
    stride = torch.randint(1, 9, (options.rows, 1), generator=generator)
    ids = ((start + stride * torch.arange(options.length)) % vocabulary).to(device)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return bmt.sum_loss(loss.detach()).item()


# -- memory ---------------------------------------------------------------------------------------------------------


def take_all_but(gigabytes: float | None, device: torch.device) -> Any:
    """Take all of the device but `gigabytes`, outside torch's allocator, until the result is dropped.

    torch.cuda.set_per_process_memory_fraction would not do: it counts torch's allocator alone, and auto_wrap, which
    plans by what the device has free, would plan with memory that cannot be had.
    """
    if gigabytes is None:
        return None
    import cupy

    _, total = torch.cuda.mem_get_info(device)
    with cupy.cuda.Device(torch.cuda.current_device()):
        return cupy.cuda.Memory(max(0, total - round(gigabytes * 1e9)))


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()


def memory(device: torch.device) -> tuple[int, int, int]:
    """Bytes of tensors now and at the peak, and all else that is taken on the device; zeros without a GPU."""
    mapped = bmt.current_world().schedule.mapped_bytes
    if device.type != "cuda":
        return mapped, mapped, 0
    free, total = torch.cuda.mem_get_info()
    outside = total - free - torch.cuda.memory_reserved()
    return torch.cuda.memory_allocated() + mapped, torch.cuda.max_memory_allocated() + mapped, outside


def greatest(numbers: list[float], device: torch.device) -> list[float]:
    """Each number's maximum over the ranks. Collective."""
    every = bmt.gather_result(torch.tensor([numbers], dtype=torch.float64, device=device))
    return every.amax(0).tolist()
