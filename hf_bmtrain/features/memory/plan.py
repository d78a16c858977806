"""A plan: the blocks that keep their activations, and those that stay whole, within the free memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_GIB = 2**30


@dataclass(frozen=True)
class Plan:
    """The choice per block, in execution order.

    kept: whether the block keeps its activations. whole: whether it stays whole until its backward. left: the bytes
    that the plan leaves free at both peaks; less than 0 if even recomputing every block takes too much.
    """

    kept: tuple[bool, ...]
    full: tuple[bool, ...]
    left: int = 0

    def table(self, activations: Sequence[int], parameters: Sequence[int], forward_room: int) -> str:
        """Return a table of the plan's memory in GiB, for the log."""
        rows = [
            ("keep their activations", self.kept, activations),
            ("recompute", tuple(not kept for kept in self.kept), activations),
            ("stay whole until backward", self.full, parameters),
        ]
        lines = [f"of {len(self.kept)} blocks, with {forward_room / _GIB:.2f} GiB to give:"]
        for name, chosen, sizes in rows:
            taken = sum(size for size, one in zip(sizes, chosen) if one)
            lines.append(f"  {sum(chosen):4d} {name:26} {taken / _GIB:8.2f} GiB")
        return "\n".join(lines)


def make_plan(activations: Sequence[int], parameters: Sequence[int], forward_room: int, backward_room: int) -> Plan:
    """Choose the blocks that keep their activations and, where all do, those that stay whole until their backward.

    activations, parameters: bytes per block in execution order; 0 parameters for a block that is always whole or must
    not stay whole. forward_room, backward_room: the bytes free at the peak of a step that recomputes every block;
    backward_room while one block's recomputed activations are alive, forward_room at all other times (forward and
    loss). They may be negative.

    Blocks are chosen from the last one back. All kept activations are alive when backward begins, before any block is
    recomputed; those of the first blocks would still be alive while the last blocks are recomputed. The last block's
    own activations do not count against backward_room, which already includes them. A block that does not fit is
    skipped.
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
