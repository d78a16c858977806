"""Peak host memory of from_pretrained, of auto_wrap with `weights=`, of save_state, of load_state, of a resume.

`python tests load_memory` does it with a model of 0.4 GB on two ranks, of which each has a half.
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
    tell(model, "share", peak)


def measure_saving(folder: str) -> None:
    """Print the peaks of a save, and of loading it again, beyond the shards of weights and of AdamOptimizer's state."""
    bmt.init_distributed(seed=0)
    model, manager = prepare(f"{folder}/small")
    save(f"{folder}/warm", model, manager)
    model, manager = prepare(f"{folder}/large")
    compare(model, "save", lambda: save(f"{folder}/state", model, manager))
    compare(model, "load", lambda: bmt.load_state(f"{folder}/state", model, manager))


def measure_resuming(folder: str) -> None:
    """Print the peak of a resume in new processes: the model, AdamOptimizer's state (twice its size), and the rest."""
    bmt.init_distributed(seed=0)
    model, manager = wrap(f"{folder}/small")
    bmt.load_state(f"{folder}/warm", model, manager)
    del model, manager
    with Peak() as peak:
        model, manager = wrap(f"{folder}/large")
        bmt.load_state(f"{folder}/state", model, manager)
    tell(model, "resume", peak)


def wrap(folder: str) -> tuple[torch.nn.Module, bmt.optim.OptimManager]:
    model = bmt.hf.from_pretrained(transformers.LlamaForCausalLM, folder)
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(bmt.optim.AdamOptimizer(model.parameters(), lr=1e-4))
    return model, manager


def prepare(folder: str) -> tuple[torch.nn.Module, bmt.optim.OptimManager]:
    """A model that has made a step."""
    model, manager = wrap(folder)
    ids = torch.arange(8)[None]
    manager.zero_grad()
    manager.backward(model(input_ids=ids, labels=ids).loss)
    manager.step()
    return model, manager


def save(folder: str, model: torch.nn.Module, manager: bmt.optim.OptimManager) -> None:
    bmt.save_state(folder, model, manager, step=1)


def compare(model: torch.nn.Module, name: str, action: Callable[[], object]) -> None:
    with Peak() as peak:
        action()
    tell(model, name, peak)


def tell(model: torch.nn.Module, name: str, peak: Peak) -> None:
    whole = sum(p.full_shape.numel() * p.itemsize for p in model.parameters())
    kept = anonymous_bytes() - peak.base
    print(f"{name} of {whole} bytes: peak {peak.bytes / whole:.3f} kept {kept / whole:.3f}", flush=True)


def run(folder: str, function: str) -> list[float]:
    """The peaks of all ranks, in units of the model."""
    build(LAYERS).save_pretrained(f"{folder}/large")
    build(1).save_pretrained(f"{folder}/small")
    lines = on_ranks(RANKS, Path(__file__), function, folder)
    print("\n".join(lines))
    return [float(each.split()[0]) for line in lines for each in line.split("peak ")[1:]]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for function in ("measure", "measure_filling", "measure_saving", "measure_resuming"):
            run(folder, function)


if __name__ == "__main__":
    main()
