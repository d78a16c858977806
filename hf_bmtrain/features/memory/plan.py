"""Choose which blocks keep their activations, and which stay unsharded until backward, given the free memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_GIB = 2**30


@dataclass(frozen=True)
class Plan:
    """The choice, for each block in execution order, of what is kept in memory until backward.

    Attributes:
        kept: for each block, whether it keeps its activations.
        full: for each block, whether it stays unsharded from its forward to its backward.
        left: the bytes that the plan leaves free at the forward's or the backward's peak, whichever are fewer. Negative
            if even a step that recomputes every block takes too much memory.
    """

    kept: tuple[bool, ...]
    full: tuple[bool, ...]
    left: int = 0

    def table(self, activations: Sequence[int], parameters: Sequence[int], forward_room: int) -> str:
        """Return a table of the plan's memory in GiB, for the log. The arguments are those of `make_plan`."""
        rows = [
            ("keep their activations", self.kept, activations),
            ("recompute", tuple(not kept for kept in self.kept), activations),
            ("stay unsharded until backward", self.full, parameters),
        ]
        lines = [f"of {len(self.kept)} blocks, with {forward_room / _GIB:.2f} GiB available:"]
        for name, chosen, sizes in rows:
            taken = sum(size for size, one in zip(sizes, chosen) if one)
            lines.append(f"  {sum(chosen):4d} {name:30} {taken / _GIB:8.2f} GiB")
        return "\n".join(lines)


def make_plan(activations: Sequence[int], parameters: Sequence[int], forward_room: int, backward_room: int) -> Plan:
    """Choose the blocks that keep their activations and, if all do, the blocks that stay unsharded until backward.

    Blocks are chosen from the last to the first, and a block that does not fit is skipped. The last blocks come first
    because of the peak in backward: activations of the first blocks would still be alive while the last blocks are
    recomputed. The activations of the last block do not count against `backward_room`, because a step that recomputes
    this block has them in memory at that peak too.

    Args:
        activations: bytes of each block's activations, in execution order.
        parameters: bytes of each block's full parameters, in execution order. 0 for a block for which there is no
            choice, because it always, or never, stays unsharded between forward and backward.
        forward_room: the bytes that a step which recomputes every block leaves free at its peak in the forward and the
            loss. May be negative.
        backward_room: the bytes that the same step leaves free at its peak while recomputed activations of a block are
            alive. May be negative.
    """
    kept = [False] * len(activations)
    total, own = 0, 0
    for index in reversed(range(len(activations))):
        size = activations[index]
        if index == len(activations) - 1:
            fits = size <= forward_room and backward_room >= 0
            own = size if fits else 0
        else:
            fits = total + size <= forward_room and total + size - own <= backward_room
        if fits:
            kept[index] = True
            total += size
    full = [False] * len(parameters)
    left = min(forward_room - total, backward_room - (total - own))
    if all(kept):
        for index in reversed(range(len(parameters))):
            if 0 < parameters[index] <= left:
                full[index] = True
                left -= parameters[index]
    return Plan(tuple(kept), tuple(full), left)
