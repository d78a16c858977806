"""Losses and gradients against one process of plain torch: `python tests parity` prints every cell's error.

A cell is a model, ranks, ZeRO level, recomputation, micro-batches a step and a variant. The truth is plain torch
on the same micro-batches, gradients averaged in float32, stepped with SGD. Errors are in units of what is allowed:
a loss may differ by 1e-6 of itself; a gradient's element by 5e-6 of its tensor's largest plus 2e-6 of the model's.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from unittest import mock

import torch

import hf_bmtrain as bmt
from hf_bmtrain.engine.wrap.find import find_block_lists
from tiny_models import FAMILIES, batch, build, embeddings

STEPS = 3
LEARNING_RATE = 0.1
CLEAR = 2e-6  # of probabilities in float32; roundings are below 1e-7
VARIANTS = ("plain", "frozen embeddings", "frozen first block", "tied", "bf16")


@dataclass(frozen=True)
class Cell:
    family: str
    zero_level: int
    recompute: bool
    accumulation: int
    variant: str

    def label(self) -> str:
        recompute = "recompute" if self.recompute else "keep"
        return (
            f"{self.family}-zero{self.zero_level}-{recompute}-acc{self.accumulation}-{self.variant.replace(' ', '_')}"
        )


def cells(size: int) -> list[Cell]:
    """Every cell for a world of `size`; dropout is compared where there is one rank and thus one random stream."""
    variants = (*VARIANTS, "dropout") if size == 1 else VARIANTS
    return [Cell(*values) for values in itertools.product(FAMILIES, (2, 3), (False, True), (1, 3), variants)]


@dataclass(frozen=True)
class Errors:
    """Largest error of a loss and of a gradient over all steps; 1 is what is allowed."""

    loss: float
    gradient: float


def measure(cell: Cell) -> Errors:
    """Train both ways for some steps. Collective; only rank 0 compares, the others return zeros.

    A mixture of experts is compared on other data if a rounding decides in the twin which experts a token goes to.
    """
    for attempt in range(5):
        margins: list[float] = []
        errors = _train(cell, 10_000 * attempt, margins)
        margin = torch.tensor(min(margins, default=1.0), device=bmt.current_world().device)
        if bmt.distributed.broadcast(margin, 0) > CLEAR:
            return errors
    raise AssertionError(f"{cell.label()}: no data with which every token's experts are clear")


def _train(cell: Cell, seed: int, margins: list[float]) -> Errors:
    """Return the errors on the data of `seed`. Rank 0 adds to `margins` how clearly the twin chose its experts."""
    size, rank = bmt.world_size(), bmt.rank()
    device = bmt.current_world().device
    model, twin = _prepare(cell), _prepare(cell).to(device)
    bmt.auto_wrap(model, zero_level=cell.zero_level, use_checkpoint=cell.recompute)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    plain = torch.optim.SGD(twin.parameters(), lr=LEARNING_RATE)
    worst = [0.0, 0.0]
    for step in range(STEPS):
        losses = torch.stack(
            [
                _backward(model, cell, seed + 100 * step + micro * size + rank, cell.accumulation)
                for micro in range(cell.accumulation)
            ]
        )
        everyone = bmt.gather_result(losses).view(size, cell.accumulation).t().reshape(-1)
        gradients = {name: p.gather_gradient() for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            # In bfloat16 equal values are usual; both ways compute and choose alike in the first step.
            with nullcontext() if cell.variant == "bf16" else _watched_choices(margins):
                expected = _reference_step(twin, plain, cell, seed + 100 * step, size * cell.accumulation)
            errors = _compare(cell, everyone, gradients, *expected)
            if cell.variant == "bf16" and step > 0:
                errors = errors[0], 0.0  # the weights differ by roundings now, and so do their gradients
            worst = [max(pair) for pair in zip(worst, errors)]
    return Errors(*worst)


def _prepare(cell: Cell) -> torch.nn.Module:
    dropout = 0.1 if cell.variant == "dropout" else 0.0
    model = build(cell.family, tied=cell.variant == "tied", dropout=dropout).train()
    if cell.variant.startswith("frozen"):
        for parameter in embeddings(model):
            parameter.requires_grad_(False)
    if cell.variant == "frozen first block":
        for blocks in find_block_lists(model):
            blocks[0].requires_grad_(False)
    return model.to(torch.bfloat16) if cell.variant == "bf16" else model


@contextmanager
def _watched_choices(margins: list[float]) -> Iterator[None]:
    """Note by how much the last of the chosen values exceeds the first of the others, at every `torch.topk`."""
    topk = torch.topk

    def noted(values: torch.Tensor, k: int, *args, **kwargs):
        if k < values.shape[-1]:
            ordered = topk(values.detach().float(), k + 1, -1).values
            margins.append((ordered[..., -2] - ordered[..., -1]).min().item())
        return topk(values, k, *args, **kwargs)

    with mock.patch.object(torch, "topk", noted):
        yield


def _backward(model: torch.nn.Module, cell: Cell, seed: int, share: int) -> torch.Tensor:
    torch.manual_seed(seed)
    inputs = batch(cell.family, seed=seed)
    loss = model(**{name: ids.to(model.device) for name, ids in inputs.items()}).loss
    (loss / share).backward()
    return loss.detach().float()


def _reference_step(twin, optimizer, cell: Cell, seed: int, count: int):
    """Losses and mean gradients over all micro-batches, then one SGD step of the plain model."""
    losses, totals = [], {}
    for micro in range(count):
        losses.append(_backward(twin, cell, seed + micro, 1))
        for name, parameter in twin.named_parameters():
            if parameter.grad is not None:
                totals[name] = totals.get(name, 0) + parameter.grad.float()
        optimizer.zero_grad()
    gradients = {}
    for name, parameter in twin.named_parameters():
        if name in totals:
            gradients[name] = totals[name] / count
            parameter.grad = gradients[name].to(parameter.dtype)
    optimizer.step()
    optimizer.zero_grad()
    return torch.stack(losses), gradients


def _compare(cell: Cell, losses, gradients, expected_losses, expected) -> tuple[float, float]:
    # bfloat16 has 8 bits; gradients of what several blocks read are added up block by block, not use by use.
    loss_unit, own_unit, model_unit = (2e-2, 2**-6, 2**-6) if cell.variant == "bf16" else (1e-6, 5e-6, 2e-6)
    loss_error = ((losses - expected_losses).abs() / expected_losses.abs()).max().item() / loss_unit
    largest = max(value.abs().max().item() for value in expected.values())
    gradient_error = 0.0
    for name, value in expected.items():
        got = gradients[name]
        assert got is not None and got.shape == value.shape, name
        allowed = own_unit * value.abs().max().item() + model_unit * largest
        error = (got.float() - value).abs().max().item() / allowed
        gradient_error = max(gradient_error, error if error == error else float("inf"))
    frozen = [name for name, value in gradients.items() if value is not None and name not in expected]
    assert not any(gradients[name].abs().max() > 0 for name in frozen), frozen
    return loss_error, gradient_error


def main() -> int:
    from ranks import Ranks

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--gather", choices=("auto", "collective", "peer"), default="auto")
    arguments = parser.parse_args()
    sizes = arguments.ranks
    table: dict[Cell, dict[int, Errors]] = {}
    for size in sizes:
        ranks = Ranks(size, arguments.device, arguments.gather)
        for cell in cells(size):
            table.setdefault(cell, {})[size] = ranks(measure, cell)[0]
        ranks.stop()
    print(f"{'error / allowed: loss, gradient':52}" + "".join(f"{f'{size} ranks':>16}" for size in sizes))
    worst = 0.0
    for cell, row in table.items():
        entries = [f"{row[s].loss:7.3f} {row[s].gradient:7.3f} " if s in row else " " * 15 + "-" for s in sizes]
        print(f"{cell.label():52}" + "".join(entries))
        worst = max(worst, *(max(errors.loss, errors.gradient) for errors in row.values()))
    print(f"{sum(map(len, table.values()))} cells, worst {worst:.3f} of what is allowed")
    return int(worst > 1)
