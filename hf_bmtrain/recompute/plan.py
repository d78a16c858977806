"""Which blocks keep their activations, and which stay whole, within the memory that is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_GIB = 2**30


@dataclass(frozen=True)
class Plan:
    """For each block in execution order: whether it keeps its activations, and stays whole until its backward."""

    kept: tuple[bool, ...]
    whole: tuple[bool, ...]

    def table(self, activations: Sequence[int], parameters: Sequence[int], forward_room: int) -> str:
        """What the plan takes, in GiB: three lines for people to read."""
        rows = [
            ("keep their activations", self.kept, activations),
            ("recompute", tuple(not kept for kept in self.kept), activations),
            ("stay whole until backward", self.whole, parameters),
        ]
        lines = [f"of {len(self.kept)} blocks, with {forward_room / _GIB:.2f} GiB to give:"]
        for what, chosen, sizes in rows:
            taken = sum(size for size, one in zip(sizes, chosen) if one)
            lines.append(f"  {sum(chosen):4d} {what:26} {taken / _GIB:8.2f} GiB")
        return "\n".join(lines)


def make_plan(activations: Sequence[int], parameters: Sequence[int], forward_room: int, backward_room: int) -> Plan:
    """The blocks that may keep their activations and, where all do, those that may keep their parameters whole.

    activations, parameters: bytes of each block in execution order; parameters are 0 where a block is whole anyway
    or must not be. The rooms are the bytes that are still free when most is taken in a step in which every block is
    recomputed: backward_room while activations of one block, recomputed, are there; forward_room at all other times,
    those of the forward and the loss. They may be negative.

    Blocks are taken from the last one back. All that is kept is there when backward begins, where nothing is
    recomputed yet; what the first blocks kept would still be there while the last ones are recomputed. The last
    block's own activations do not count against backward_room, which has them already. A block too large for what is
    left is passed over.
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
    whole = [False] * len(parameters)
    left = min(forward_room - total, backward_room - (total - own))
    if all(kept):
        for index in reversed(range(len(parameters))):
            if 0 < parameters[index] <= left:
                whole[index] = True
                left -= parameters[index]
    return Plan(tuple(kept), tuple(whole))
