"""Peak host memory of bmt.hf.from_pretrained, and of auto_wrap of a model on the meta device with `weights=`.

`python tests load_memory` loads a model of 0.4 GB on two ranks.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import transformers

import hf_bmtrain as bmt
from peak_memory import Peak, anonymous_bytes, on_ranks

LAYERS = 12
RANKS = 2


def build(layers: int) -> transformers.LlamaForCausalLM:
    """0.4 GB in float32 with 12 layers; the largest tensor is 1/20 of it."""
    config = transformers.LlamaConfig(
        hidden_size=768, intermediate_size=2304, num_hidden_layers=layers, num_attention_heads=12, vocab_size=6000
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


def measure(folder: str) -> None:
    """Print the peak beyond the memory after a first load, of a model of one layer, per byte of the model."""
    bmt.init_distributed(seed=0)
    report(lambda name: bmt.hf.from_pretrained(transformers.LlamaForCausalLM, f"{folder}/{name}"))


def measure_filling(folder: str) -> None:
    bmt.init_distributed(seed=0)
    report(lambda name: bmt.auto_wrap(empty(f"{folder}/{name}"), weights=f"{folder}/{name}"))


def empty(folder: str) -> transformers.LlamaForCausalLM:
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(transformers.LlamaConfig.from_pretrained(folder))


def report(load: Callable[[str], torch.nn.Module]) -> None:
    load("small")
    with Peak() as peak:
        model = load("large")
    whole = sum(p.full_shape.numel() * p.itemsize for p in model.parameters())
    kept = anonymous_bytes() - peak.base
    print(f"share of {whole} bytes: peak {peak.bytes / whole:.3f} kept {kept / whole:.3f}", flush=True)


def run(folder: str, function: str) -> list[float]:
    """The peak of each rank, in units of the model."""
    build(LAYERS).save_pretrained(f"{folder}/large")
    build(1).save_pretrained(f"{folder}/small")
    lines = on_ranks(RANKS, Path(__file__), function, folder)
    print("\n".join(lines))
    return [float(line.split("peak ")[1].split()[0]) for line in lines]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for function in ("measure", "measure_filling"):
            run(folder, function)


if __name__ == "__main__":
    main()
