"""Peak host memory of loading whole states: `python tests state_memory` loads 0.2 GB of weights on two ranks."""

from __future__ import annotations

import gc
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

import hf_bmtrain as bmt
from peak_memory import Peak, anonymous_bytes, on_ranks

RANKS = 2
OPTIMIZERS: dict[str, Callable] = {
    "AdamOptimizer": bmt.optim.AdamOptimizer, "AdamOffloadOptimizer": bmt.optim.AdamOffloadOptimizer,
    "AdamW": torch.optim.AdamW,
}  # fmt: skip


class Tower(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(2048, 2048) for _ in range(12))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def managed(kind: str, model: torch.nn.Module) -> bmt.optim.OptimManager:
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(OPTIMIZERS[kind](model.parameters(), lr=1e-3))
    return manager


def step(manager: bmt.optim.OptimManager, model: torch.nn.Module) -> None:
    manager.zero_grad()
    manager.backward(model(torch.ones(1, 2048)).sum())
    manager.step()
    manager.zero_grad()


def measure(folder: str) -> None:
    """Print, for each case, the peak and what is left when the loaded state is gone, per byte of the model."""
    bmt.init_distributed(seed=0)
    model, results = bmt.auto_wrap(Tower()), {}
    whole = sum(p.full_shape.numel() * p.itemsize for p in model.parameters())
    for ending in (".pt", ".safetensors"):
        bmt.save(model, f"{folder}/model{ending}")
        with Peak() as peak:
            bmt.load(model, f"{folder}/model{ending}")
        results[f"load {ending}"] = peak.bytes, anonymous_bytes() - peak.base
    for kind in OPTIMIZERS:
        first = managed(kind, model)
        step(first, model)
        saved = first.state_dict(gather_opt=True)
        if bmt.rank() == 0:
            torch.save(saved, f"{folder}/{kind}.pt")
        del first, saved
        bmt.synchronize()
        for how in ("manager", "optimizer"):
            gc.collect()
            manager, base = managed(kind, model), anonymous_bytes()
            state = torch.load(f"{folder}/{kind}.pt")
            with Peak() as peak:
                if how == "manager":
                    manager.load_state_dict(state)
                else:  # as Accelerate does: whole tensors, not marked as such
                    del state["optimizers"][0]["sliced"]
                    manager.optimizers[0].load_state_dict(state["optimizers"][0])
            del state
            gc.collect()
            results[f"{kind} {how}"] = peak.bytes, anonymous_bytes() - base
            step(manager, model)
            del manager
    print(json.dumps({name: [count / whole for count in counts] for name, counts in results.items()}), flush=True)


def run(folder: str) -> list[dict[str, list[float]]]:
    """Peak and remainder by case, of each rank, in units of the model."""
    results = [json.loads(line) for line in on_ranks(RANKS, Path(__file__), "measure", folder)]
    for name in results[0]:
        print(f"{name:32} " + "   ".join(f"peak {each[name][0]:.2f} left {each[name][1]:.2f}" for each in results))
    return results


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run(folder)


if __name__ == "__main__":
    main()
