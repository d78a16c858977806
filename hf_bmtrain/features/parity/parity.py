"""The result of `check_parity`: the difference of each compared tensor, and the first one that is too large."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

_COLUMNS = ("what", "block", "worst in it", "difference", "allowed", "rank")


@dataclass(frozen=True)
class Difference:
    """The difference of one compared item between the two steps of `check_parity`: the sharded and the plain step.

    An item is all tensors that one call of a module returns, the loss, or the gradient or update of a parameter.

    Attributes:
        kind: "output" (of a module; the loss is the output of the model), "gradient" (of a parameter, averaged over the
            ranks) or "update" (of a parameter, by one optimizer step).
        block: for an output, the name of the module, which is a block or a module outside blocks. For a gradient or
            update, the name of the block that contains the parameter; outside blocks, the name of the parameter itself.
            "" for the loss.
        name: for an output, the name of the module, such as "head". For later calls of the same module the number of
            the call follows: "head (call 2)". For a gradient or update, the name of the parameter. "" for the loss.
        largest: the largest absolute difference of an element; inf if an element is infinite or NaN in one step and
            does not have the same value in the other, if the shapes or the number of tensors differ, or if the module
            ran in only one step.
        allowed: the largest absolute difference that is allowed.
        rank: the rank with the largest difference, relative to `allowed`; 0 until `merge` has compared the ranks.
    """

    kind: str
    block: str
    name: str
    largest: float
    allowed: float
    rank: int = 0

    @property
    def differs(self) -> bool:
        """True if the difference is larger than allowed."""
        return not self.largest <= self.allowed

    @property
    def error(self) -> float:
        """The largest difference divided by the allowed difference: above 1 if it is larger than allowed."""
        if self.largest == 0:
            return 0.0
        return self.largest / self.allowed if self.allowed else float("inf")

    def __str__(self) -> str:
        return (
            f"{self.kind} of {self.name or 'the model'} on rank {self.rank}, by {self.largest:.3g}, where "
            f"{self.allowed:.3g} is allowed"
        )


@dataclass(frozen=True)
class Parity:
    """The result of `check_parity`, the same on every rank.

    `check_parity` runs one training step twice: with the sharded model (the sharded step), and with full weights in
    plain torch (the plain step). A Parity contains the differences between these two steps.

    Its `str` is a table. For each block, and for each module or parameter outside blocks, it has up to three lines: the
    largest difference of an output, the largest of a gradient, and the largest of a weight update. "Largest" means
    relative to the allowed difference.

    Attributes:
        differences: one for each compared item, in this order: outputs, in the order in which forwards ended; the loss;
            gradients, in the reverse order of `model.parameters()`; weight updates, in the order of
            `model.parameters()`.
        loss: the loss of the plain step, averaged over the ranks.
        unrun_hooks: the number of hooks that `parameter.register_post_accumulate_grad_hook` has registered on the
            model's parameters, on the rank with the most. Neither step runs them, so their effect on gradients was not
            tested.
    """

    differences: tuple[Difference, ...]
    loss: float
    unrun_hooks: int = 0

    @property
    def first(self) -> Difference | None:
        """The first difference between the two steps that is larger than allowed; None if there is none."""
        return next((each for each in self.differences if each.differs), None)

    @property
    def ok(self) -> bool:
        """True if no difference between the sharded and the plain step is larger than allowed."""
        return self.first is None

    def __str__(self) -> str:
        worst: dict[tuple[str, str], Difference] = {}
        for each in self.differences:
            known = worst.get((each.kind, each.block))
            if known is None or each.error > known.error:
                worst[each.kind, each.block] = each
        rows = [_COLUMNS, *(_cells(each) for each in worst.values())]
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
        first = self.first
        end = "the sharded and the plain step agree" if first is None else f"the first that differs: {first}"
        lines.append(f"loss {self.loss:.6g}: {end}")
        if self.unrun_hooks:
            lines.append(f"gradient hooks (register_post_accumulate_grad_hook) that were not run: {self.unrun_hooks}")
        return "\n".join(lines)


def _cells(each: Difference) -> tuple[str, ...]:
    """Return one row of the table that `str(parity)` shows, for the Difference `each`: one string per column."""
    mark = "  <- differs" if each.differs else ""
    inside = each.name[len(each.block) :].lstrip(".") if each.name.startswith(each.block) else each.name
    numbers = f"{each.largest:.3g}", f"{each.allowed:.3g}", f"{each.rank}{mark}"
    return (each.kind, each.block or "the model", inside, *numbers)


def merge(ranks: Sequence[Sequence[Difference]]) -> tuple[Difference, ...]:
    """Combine the differences that the ranks have found: return the largest difference of each compared item.

    "Largest" means relative to the allowed difference. `check_parity` calls this on every rank, so that all ranks
    return the same result. The differences are returned in the order in which each rank lists them.

    Raises RuntimeError if the ranks compared different items, or the same items in different orders.

    ranks: for each rank, in rank order, the list of its differences: one for each item that it compared.
    """
    names = [[f"the {each.kind} of {each.name or 'the model'}" for each in own] for own in ranks]
    for rank, own in enumerate(names):
        if own != names[0]:
            mine, theirs = next(
                (a, b) for a, b in zip([*names[0], "nothing"], [*own, "nothing"]) if a != b
            )  # "nothing" ends each list, so that a shorter list differs at its end
            raise RuntimeError(
                f"check_parity: the ranks called different modules. At the first difference, rank 0 compared {mine}, "
                f"but rank {rank} compared {theirs}. Every rank must call the same modules in the same order."
            )
    merged = []
    for same in zip(*ranks):
        rank, each = max(enumerate(same), key=lambda numbered: numbered[1].error)
        merged.append(Difference(each.kind, each.block, each.name, each.largest, each.allowed, rank))
    return tuple(merged)


def largest_difference(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return max|got − wanted|, 0 for empty tensors, or inf if the shapes differ.

    `check_parity` compares a tensor of the sharded step (`got`) with the same tensor of the plain step (`wanted`).
    Equal infinities, or two NaNs, have the difference 0; any other pair with an infinity or NaN has the difference inf.
    """
    if got.shape != wanted.shape:
        return float("inf")
    if not got.numel():
        return 0.0
    wide = torch.promote_types(wanted.dtype, torch.float32)
    got, wanted = got.detach().to(wanted.device, wide), wanted.detach().to(wide)
    same = (got == wanted) | (got.isnan() & wanted.isnan())
    difference = (got - wanted).abs().masked_fill_(same, 0).nan_to_num_(nan=float("inf"), posinf=float("inf"))
    return difference.max().item()


def largest_of(tensor: torch.Tensor) -> float:
    """Return the largest finite magnitude in `tensor`, or 0 if it has no finite element.

    `check_parity` multiplies it by a relative tolerance to get the allowed difference.
    """
    if not tensor.numel():
        return 0.0
    return tensor.detach().abs().nan_to_num_(0, 0, 0).max().item()
