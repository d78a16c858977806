"""Signal-to-noise ratios of weight gradients in float8 and in bfloat16, against float64.

    python tests float8_signal

A model of each family with four blocks, width 256 and random weights makes one forward and backward with 512 tokens: in
float64, in bfloat16, and with its linear layers in float8 around activations in bfloat16. A row has the ratios in
decibels, as the median and the least over the linear layers in blocks.
"""

from __future__ import annotations

import statistics

import torch
from torch import nn

from float8_models import FAMILIES, build, extend_all, rows
from hf_bmtrain.features.float8.calibrate import decibels
from hf_bmtrain.features.float8.linear import Float8Linear


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    model(**rows(0, 0, number=8, length=64)).loss.backward()
    return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


def ratios(family: str, blocks: int = 4, width: int = 256) -> dict[str, dict[str, float]]:
    """By layer, the ratios of its weight's gradient, in bfloat16 and in float8."""
    exact = gradients(build(family, blocks, width).double())
    float8 = extend_all(build(family, blocks, width).bfloat16())
    names = [f"{name}.weight" for name, module in float8.named_modules() if isinstance(module, Float8Linear)]
    found = {"bf16": gradients(build(family, blocks, width).bfloat16()), "float8": gradients(float8)}
    return {
        name: {
            kind: decibels(exact[name].square().sum().item(), (given[name] - exact[name]).square().sum().item())
            for kind, given in found.items()
        }
        for name in names
    }


def main() -> None:
    head = ("bf16 median", "least", "float8 median", "least")
    print(f"{'family':10} {'layers':>6} {head[0]:>12} {head[1]:>6} {head[2]:>14} {head[3]:>6}  least in float8 at")
    for family in FAMILIES:
        found = ratios(family)
        cells = {kind: [each[kind] for each in found.values()] for kind in ("bf16", "float8")}
        worst = min(found, key=lambda name: found[name]["float8"])
        middle = {kind: statistics.median(values) for kind, values in cells.items()}
        print(
            f"{family:10} {len(found):6} {middle['bf16']:12.1f} {min(cells['bf16']):6.1f} {middle['float8']:14.1f} "
            f"{min(cells['float8']):6.1f}  {worst}",
            flush=True,
        )


if __name__ == "__main__":
    main()
