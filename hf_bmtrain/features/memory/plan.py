"""Choose which blocks keep their activations, and which stay unsharded until backward, given the free memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_GIB = 2**30


@dataclass(frozen=True)
class Sizes:
    """The sizes in bytes of what can be kept until backward, for each block in execution order.

    Attributes:
        activations: all activations of the block.
        attention: the outputs of attention, a part of the activations. 0 if they cannot be kept separately.
        parameters: the full parameters. 0 for a block for which there is no choice, because it always, or never, stays
            unsharded between forward and backward.
        attention_first: whether keeping the outputs of attention saves more time per byte than keeping all activations.
    """

    activations: Sequence[int]
    attention: Sequence[int]
    parameters: Sequence[int]
    attention_first: bool = False


@dataclass(frozen=True)
class Plan:
    """The choice, for each block in execution order, of what is kept in memory until backward.

    Attributes:
        kept: for each block, whether it keeps its activations.
        attention: for each block, whether it is recomputed but keeps the outputs of attention.
        full: for each block, whether it stays unsharded from its forward to its backward.
        left: the bytes that the plan leaves free at the forward's or the backward's peak, whichever are fewer. Negative
            if even a step that recomputes every block takes too much memory.
    """

    kept: tuple[bool, ...]
    attention: tuple[bool, ...]
    full: tuple[bool, ...]
    left: int = 0

    def table(self, sizes: Sizes, forward_room: int) -> str:
        """Return a table of the plan's memory in GiB, for the log. The arguments are those of `make_plan`."""
        rows = [
            ("keep their activations", self.kept, sizes.activations),
            ("recompute all but attention", self.attention, sizes.attention),
            ("recompute", tuple(not any(each) for each in zip(self.kept, self.attention)), sizes.activations),
            ("stay unsharded until backward", self.full, sizes.parameters),
        ]
        lines = [f"of {len(self.kept)} blocks, with {forward_room / _GIB:.2f} GiB available:"]
        for name, chosen, nbytes in rows:
            taken = sum(size for size, one in zip(nbytes, chosen) if one)
            lines.append(f"  {sum(chosen):4d} {name:30} {taken / _GIB:8.2f} GiB")
        return "\n".join(lines)


def make_plan(sizes: Sizes, forward_room: int, backward_room: int) -> Plan:
    """Choose the blocks that keep activations and, if all keep all of them, those that stay unsharded until backward.

    There are two passes over the blocks: one chooses the blocks that keep all activations, and the other those that
    keep the outputs of attention. The choice that saves more time per byte is made first. Each pass goes from the last
    block to the first, and skips a block that does not fit. The last blocks come first because of the peak in backward:
    activations of the first blocks would still be alive while the last blocks are recomputed. The activations of the
    last block do not count against `backward_room`, because a step that recomputes this block has them in memory at
    that peak too.

    Args:
        sizes: the sizes of what can be kept.
        forward_room: the bytes that a step which recomputes every block leaves free at its peak in the forward and the
            loss. May be negative.
        backward_room: the bytes that the same step leaves free at its peak while recomputed activations of a block are
            alive. May be negative.
    """
    count = len(sizes.activations)
    taken = [0] * count
    kept, attention = [False] * count, [False] * count

    def fits(index: int, size: int) -> bool:
        """Return whether `size` bytes fit for block `index`. If so, set its entry in `taken`."""
        before, taken[index] = taken[index], size
        if sum(taken) <= forward_room and sum(taken[:-1]) <= backward_room:
            return True
        taken[index] = before
        return False

    for all_of_it in (False, True) if sizes.attention_first else (True, False):
        for index in reversed(range(count)):
            if all_of_it:
                kept[index] = fits(index, sizes.activations[index])
            elif not kept[index] and sizes.attention[index]:
                attention[index] = fits(index, sizes.attention[index])
    full = [False] * count
    left = min(forward_room - sum(taken), backward_room - sum(taken[:-1]))
    if all(kept):
        for index in reversed(range(count)):
            if 0 < sizes.parameters[index] <= left:
                full[index] = True
                left -= sizes.parameters[index]
    attention = [one and not all_of_it for one, all_of_it in zip(attention, kept)]
    return Plan(tuple(kept), tuple(attention), tuple(full), left)
