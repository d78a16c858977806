"""Loss curves of Muon and AdamW of a small language model of bytes, each with the best of several learning rates.

    python tests muon_curve                    2,000 steps in one process on the CPU, about ten minutes
    torchrun --nproc-per-node 2 tests muon_curve

The model learns the sources of Python's library (tests/support/byte_model.py). Printed is the loss of held-out rows.
"""

from __future__ import annotations

import argparse
import functools

import torch

import hf_bmtrain as bmt
from byte_model import curve


def adamw(lr: float, model: torch.nn.Module) -> torch.optim.Optimizer:
    return bmt.optim.AdamOptimizer(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1)


def muon(lr: float, model: torch.nn.Module) -> torch.optim.Optimizer:
    return bmt.optim.MuonOptimizer(model, lr=lr, betas=(0.9, 0.95), adjust_lr_fn="match_rms_adamw")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--points", type=int, default=8, help="how many times the loss is measured")
    parser.add_argument("--rates", type=float, nargs="+", default=[2e-3, 4e-3, 8e-3, 16e-3])
    parser.add_argument("--only", choices=("adamw", "muon"), help="run one of the two")
    given = parser.parse_args()
    bmt.init_distributed(seed=0)
    every = given.steps // given.points
    best: dict[str, list[float]] = {}
    for make in (adamw, muon):
        if given.only not in (None, make.__name__):
            continue
        for lr in given.rates:
            found = curve(functools.partial(make, lr), 0, given.steps, every)
            bmt.print_rank(f"{make.__name__} lr {lr:g}: {' '.join(f'{loss:.3f}' for loss in found)}")
            if make.__name__ not in best or found[-1] < best[make.__name__][-1]:
                best[make.__name__] = found
    bmt.print_rank("step    " + "    ".join(f"{name:>6}" for name in best))
    for point, losses in enumerate(zip(*best.values()), 1):
        bmt.print_rank(f"{point * every:<8}" + "    ".join(f"{loss:6.3f}" for loss in losses))
    if given.only is not None:
        return
    final = best["adamw"][-1]
    faster = next((point * every for point, loss in enumerate(best["muon"], 1) if loss <= final), None)
    bmt.print_rank(f"Muon reaches AdamW's last loss, {final:.3f}, {f'by step {faster}' if faster else 'never'}")


if __name__ == "__main__":
    main()
