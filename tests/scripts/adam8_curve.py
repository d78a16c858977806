"""Loss curves of AdamW with float32 and with 8-bit state, of several seeds, of a small language model of bytes.

    python tests adam8_curve                 float32 weights, 5 seeds, 2,000 steps in one process on the CPU
    python tests adam8_curve --bf16          bfloat16 weights; also without masters, rounded stochastically

The model learns the sources of Python's library (tests/support/byte_model.py). Printed are the losses of held-out rows,
and whether the 8-bit curves end within the spread of the float32 curves of all seeds.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Sequence

import torch

import hf_bmtrain as bmt
from byte_model import curve
from hf_bmtrain.engine.ops.adam import round_stochastic


class WithoutMasters(bmt.optim.AdamOptimizer):
    """Keeps no more of a bfloat16 weight than the weight: its master is rounded stochastically in every step."""

    def _update(self, numbers: Sequence[int]) -> None:
        super()._update(numbers)
        for state in (self._states[number] for number in numbers):
            if state.master.stored is not None:
                rounded = round_stochastic(state.master.stored, state.index_base, int(state.step))
                state.run.weights.copy_(rounded)
                state.master.stored.copy_(rounded)


def make(cls, bits: int, lr: float, model: torch.nn.Module) -> torch.optim.Optimizer:
    return cls(model.parameters(), lr=lr, betas=(0.9, 0.999), weight_decay=0.1, state_bits=bits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--points", type=int, default=4, help="how many times the loss is measured")
    parser.add_argument("--seeds", type=int, default=5, help="how many")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--bits", type=int, nargs="+", default=[32, 8], choices=(32, 8), help="which to run")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--bf16", action="store_true", help="bfloat16 weights instead of float32")
    given = parser.parse_args()
    bmt.init_distributed(seed=0)
    kinds = {"float32 state": (bmt.optim.AdamOptimizer, 32), "8-bit state": (bmt.optim.AdamOptimizer, 8)}
    if given.bf16:
        kinds["8-bit state, no masters"] = (WithoutMasters, 8)
    kinds = {name: kind for name, kind in kinds.items() if kind[1] in given.bits}
    dtype, every = torch.bfloat16 if given.bf16 else torch.float32, given.steps // given.points
    found: dict[str, list[list[float]]] = {name: [] for name in kinds}
    for seed in range(given.first_seed, given.first_seed + given.seeds):
        for name, (cls, bits) in kinds.items():
            losses = curve(functools.partial(make, cls, bits, given.lr), seed, given.steps, every, dtype)
            found[name].append(losses)
            bmt.print_rank(f"seed {seed}, {name}: {' '.join(f'{loss:.4f}' for loss in losses)}")
    if 32 not in given.bits:
        return
    reference = [losses[-1] for losses in found["float32 state"]]
    for name, curves in found.items():
        last = [losses[-1] for losses in curves]
        apart = [mine - theirs for mine, theirs in zip(last, reference)]
        bmt.print_rank(
            f"{name}: last loss {statistics.mean(last):.4f} on average, {min(last):.4f} to {max(last):.4f}; "
            f"{statistics.mean(apart):+.4f} from float32 state of the same seed; "
            f"{sum(min(reference) <= loss <= max(reference) for loss in last)} of {len(last)} within its spread"
        )


if __name__ == "__main__":
    main()
